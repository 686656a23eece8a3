"""A user's mistake, as an exception whose text is one line: the rule, the value, the cure."""

import difflib
from collections.abc import Iterable


class MinigenError(Exception):
    """Something that was read, or a claim, is wrong: the command line exits with status 1."""


class OptionError(MinigenError, ValueError):
    """An argument breaks a rule that can be decided from it alone: exit status 2."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most like one that was mistyped."""
    return max(known, key=lambda word: difflib.SequenceMatcher(None, name, word).ratio())
