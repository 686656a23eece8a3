"""Arguments of public calls are checked before anything is done: their names, and their types.

The rule stands in the signature, where type checkers read it, too; what else holds of a value (a
range, a length) is said by whoever works with it.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import cache, wraps
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import ArrayLike

from minigen.errors import OptionError, listed, nearest, shown

P = ParamSpec("P")
R = TypeVar("R")


class _Rule(NamedTuple):
    """What an annotation asks for: in words, of one and of several, and as a check."""

    one: str
    several: str
    fits: Callable[[Any], bool]


_GIVEN_BY = {"a Config": ', as Config.load("fables") gives', "a Run": ", as Run(config) gives"}


def checked(function: Callable[P, R], *, types: bool = True) -> Callable[P, R]:
    """Check the arguments of each call: OptionError for an unknown name and for a wrong type.

    >>> @checked
    ... def double(number: float) -> float:
    ...     return 2 * number
    >>> double("2")
    Traceback (most recent call last):
    ...
    minigen.errors.OptionError: number must be a number (got '2')
    """
    parameters = inspect.signature(function).parameters
    by_place = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    rest = [name for name, p in parameters.items() if p.kind is p.VAR_KEYWORD]

    @cache  # at the first call: annotations may name what is defined further down
    def read() -> tuple[set[str], dict[str, _Rule]]:
        hints = get_type_hints(function)
        tables = [table for name in rest for table in get_args(hints[name])]  # TypedDicts
        names = {*parameters}.union(*map(get_type_hints, tables)) - {"self", "cls", *rest}
        rules = {name: _rule(hint) for name, hint in hints.items() if types and name in names}
        return names if tables or not rest else set(), rules

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        names, rules = read()
        for name in kwargs:
            if names and name not in names:
                meant = nearest(name, sorted(names))
                raise OptionError(f"unknown option {name!r}: the nearest known one is {meant}")
        for name, value in [*zip(by_place, args, strict=False), *kwargs.items()]:
            if name in rules and not rules[name].fits(value):
                rule = rules[name].one
                given = _GIVEN_BY.get(rule, "")
                raise OptionError(f"{name} must be {rule}{given} (got {shown(value)})")
        whole: Any = function
        own = {name: endless(value) for name, value in kwargs.items()}
        result: R = whole(*map(endless, args), **own)
        return result

    return call


def endless(value: Any) -> Any:
    """Return an integer of numpy as Python's, which grows where the other would wrap."""
    return int(value) if isinstance(value, np.integer) else value


def keywords_of(whole: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let help() and completion see which keywords of ``whole`` the last one, ``**``, takes."""

    def show(call: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(call)
        *own, settings = signature.parameters.values()
        taken = get_args(settings.annotation)[0].__annotations__  # of a TypedDict
        theirs = inspect.signature(whole).parameters.values()
        shown = [p for p in theirs if p.name in taken or p.kind is p.VAR_KEYWORD]
        call.__signature__ = signature.replace(parameters=[*own, *shown])  # type: ignore[attr-defined]
        return call

    return show


def _rule(hint: Any) -> _Rule:
    """Read an annotation, one of those that public signatures have."""
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if rule := _RULES.get(hint) or _RULES.get(kind):
        return rule
    if not parts:
        return _plain(f"a {kind.__name__}", "", kind)
    rules = [*map(_rule, parts)]
    if kind in (Union, UnionType):
        ones, severals, checks = zip(*rules, strict=True)
        one, several = (listed(dict.fromkeys(words), "or") for words in (ones, severals))
        return _Rule(one, several, lambda v: any(fits(v) for fits in checks))
    _, several, fits = rules[-1]  # of the items, or of a dict's values
    if kind in (Mapping, dict):
        one = f"a dict of {several}" if several else "a dict"
        return _Rule(one, "", lambda v: isinstance(v, kind) and all(map(fits, v.values())))
    if kind is tuple:
        return _Rule(
            "a pair",
            "pairs",
            lambda v: isinstance(v, tuple | list) and len(v) == 2 and all(map(fits, v)),
        )
    return _Rule(f"a list of {several}", "lists", lambda v: is_list(v, kind, fits))


def _plain(one: str, several: str, kind: Any) -> _Rule:
    """Return the rule of a class. A bool is no more a number than a text is."""
    return _Rule(one, several, lambda v: isinstance(v, kind) and not isinstance(v, bool))


def is_list(value: Any, kind: Any, fits: Callable[[Any], bool] = lambda item: True) -> bool:
    """Whether a value is a list, or an array of numpy, of items that fit, or is an iterator."""
    if isinstance(value, str | bytes | bytearray | Mapping) or getattr(value, "ndim", 1) == 0:
        return False
    if hasattr(value, "__len__") and hasattr(value, "__getitem__"):
        return all(map(fits, value))
    return kind is Iterable and isinstance(value, Iterable)


def _is_numeric(value: Any) -> bool:
    try:
        return np.asarray(value).dtype.kind in "biuf"
    except ValueError:  # rows of different lengths
        return False


_RULES = {
    Any: _Rule("", "", lambda v: True),
    object: _Rule("", "", lambda v: True),
    Callable: _Rule("a function", "", callable),
    ArrayLike: _Rule("numbers", "", _is_numeric),
    NoneType: _plain("None", "None", NoneType),
    bool: _Rule("True or False", "", lambda v: isinstance(v, bool | np.bool_)),
    int: _plain("a whole number", "whole numbers", Integral),
    float: _plain("a number", "numbers", Real),
    str: _plain("a str", "str", str),
    bytes: _plain("bytes", "bytes", bytes),
    Path: _plain("a Path", "Path", Path),
}
