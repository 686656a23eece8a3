"""One fingerprint, in every environment that this machine can build: `make matrix`."""
