"""Decoding: from logits to a token, from tokens to a text, and what a text is worth."""
