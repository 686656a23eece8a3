"""Model: an embedding, an output head, the loops that train them, and the optimizer."""
