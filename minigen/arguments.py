"""Arguments of public calls are checked before anything is done: their names, and their types.

The rule stands in the signature, where type checkers read it, too; what else holds of a value (a
range, a length) is said by whoever works with it.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, wraps
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import ArrayLike

from minigen.errors import OptionError, nearest, shown

P = ParamSpec("P")
R = TypeVar("R")

_NAMED: dict[Any, tuple[str, str]] = {  # one of them, several of them
    bool: ("True or False", "True or False"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("a str", "str"),
    bytes: ("bytes", "bytes"),
    Path: ("a Path", "Path"),
    NoneType: ("None", "None"),
}
_GIVEN_BY = {
    "Config": 'Config.load("fables")',
    "Generator": "minigen.load(MODEL)",
    "Policy": "Policy(temperature=0.7)",
    "Run": "Run(config)",
}
_TEXTS = (str, bytes, bytearray)


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Check the arguments of each call: OptionError for an unknown name and for a wrong type.

    >>> @checked
    ... def double(number: float) -> float:
    ...     return 2 * number
    >>> double("2")
    Traceback (most recent call last):
    ...
    minigen.errors.OptionError: number must be a number (got '2')
    """
    parameters = inspect.signature(function).parameters.values()
    by_place = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    rest = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), "")

    @cache  # at the first call: annotations may name what is defined further down
    def rules() -> tuple[dict[str, Any], set[str]]:
        hints = get_type_hints(function)
        options = get_args(hints.get(rest))  # of keywords that a TypedDict lists
        names = {p.name for p in parameters}.union(*map(get_type_hints, options))
        return hints, names if options or not rest else set()

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        hints, names = rules()
        if names:
            _know(kwargs, names - {"self", "cls", rest})
        for name, value in [*zip(by_place, args, strict=False), *kwargs.items()]:
            if name in hints and not _fits(value, hints[name]):
                raise OptionError(f"{name} must be {_rule(hints[name])} (got {shown(value)})")
        return function(*args, **kwargs)

    return call


def checked_names(kind: type[R]) -> type[R]:
    """Refuse an unknown argument of a class that checks the values itself."""
    init: Any = kind.__init__
    names = set(inspect.signature(init).parameters)

    @wraps(init)
    def call(self: R, *args: Any, **kwargs: Any) -> None:
        _know(kwargs, names - {"self"})
        init(self, *args, **kwargs)

    setattr(kind, "__init__", call)  # noqa: B010 (which a type checker would refuse)
    return kind


def _know(given: Iterable[str], names: set[str]) -> None:
    for name in given:
        if name not in names:
            meant = nearest(name, sorted(names))
            raise OptionError(f"unknown option {name!r}: the nearest known one is {meant}")


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is what an annotation says: a list with all its items, an iterator alone."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any or hint is object:
        return True
    if hint is ArrayLike:
        return _is_numeric(value)
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is Literal:
        return isinstance(value, str) and value in parts
    if origin is Callable:
        return callable(value)
    if origin is tuple:
        is_pair = isinstance(value, tuple | list) and len(value) == len(parts)
        return is_pair and all(map(_fits, value, parts))
    if origin is Mapping:
        return isinstance(value, Mapping) and all(_fits(v, parts[1]) for v in value.values())
    if origin in (Sequence, Iterable):
        if isinstance(value, (*_TEXTS, Mapping)):
            return False
        if hasattr(value, "__len__") and hasattr(value, "__getitem__"):  # of numpy, too
            return all(_fits(item, parts[0]) for item in value)
        return origin is Iterable and isinstance(value, Iterable)
    if hint is bool:
        return isinstance(value, bool | np.bool_)
    kind = {int: Integral, float: Real}.get(hint, origin or hint)
    return isinstance(value, kind) and (kind is hint or not isinstance(value, bool))


def _is_numeric(value: Any) -> bool:
    try:
        return np.asarray(value).dtype.kind in "biuf"
    except ValueError:  # rows of different lengths
        return False


def _rule(hint: Any) -> str:
    """Say what an annotation asks for, and how to get one."""
    cure = _GIVEN_BY.get(getattr(hint, "__name__", ""))
    return f"{_named(hint)}, as {cure} gives" if cure else _named(hint)


def _named(hint: Any, several: bool = False) -> str:
    origin, parts = get_origin(hint), get_args(hint)
    if hint in _NAMED:
        return _NAMED[hint][several]
    if hint is ArrayLike:
        return "numbers"
    if origin in (Union, UnionType):
        *others, last = dict.fromkeys(_named(part, several) for part in parts)
        return f"{', '.join(others)} or {last}" if others else last
    if origin is Literal:
        return " or ".join(map(repr, parts))
    if origin is Callable:
        return "a function"
    if origin is Mapping:
        lists = get_origin(parts[1]) is Sequence
        return "a dict of lists" if lists else "a dict"
    if origin is tuple:
        return "pairs" if several else "a pair"
    if origin in (Sequence, Iterable):
        return f"a list of {_named(parts[0], several=True)}"
    return f"a {hint.__name__}"
