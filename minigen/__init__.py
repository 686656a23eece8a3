"""minigen: a tiny autoregressive text generator whose training has one fingerprint per config."""
