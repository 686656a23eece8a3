"""Proof: experiments on "one config, one fingerprint", each with a control; verification."""
