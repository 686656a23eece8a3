"""A user's mistake, as an exception whose text is one line: the rule, the value, the cure."""

import difflib
import re
from collections.abc import Iterable


class MinigenError(Exception):
    """Something that was read, or a claim, is wrong: the command line exits with status 1."""


class OptionError(MinigenError, ValueError):
    """An argument breaks a rule that can be decided from it alone: exit status 2."""


def shown(value: object) -> str:
    """Return a value for an error message: in one line, never endless."""
    try:
        text = re.sub(r"\s*\n\s*", " ", repr(value))
    except ValueError:  # Python shows no integer of more than 4300 digits
        text = "a number too long to show"
    return text if len(text) <= 80 else text[:77] + "..."


def listed(names: Iterable[str], last_word: str) -> str:
    """Return names, of which there is one at least, as in "a, b and c"."""
    *others, last = names
    return f"{', '.join(others)} {last_word} {last}" if others else last


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most like one that was mistyped."""
    return max(known, key=lambda word: likeness(name, word))


def likeness(word: str, known: str) -> float:
    """Say how much two names have in common, from 0 to 1; of an endless one, its start counts."""
    return difflib.SequenceMatcher(None, word[:100], known).ratio()
