"""Exact: the arithmetic and the random words that every bit rests on."""
