"""Measurements: speed against peers and limits, growth, memory. Run by `make bench`."""
