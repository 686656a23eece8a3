"""minigen: a tiny autoregressive text generator whose training has one fingerprint per config."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minigen import head
    from minigen.config import Config
    from minigen.decoding import Policy
    from minigen.errors import MinigenError
    from minigen.run import Run
    from minigen.streams import Stream
    from minigen.tokenizer import ByteTokenizer

__all__ = ["ByteTokenizer", "Config", "MinigenError", "Policy", "Run", "Stream", "head"]

_HOMES = {
    "ByteTokenizer": "tokenizer",
    "Config": "config",
    "MinigenError": "errors",
    "Policy": "decoding",
    "Run": "run",
    "Stream": "streams",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: training's libraries cost half a second."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"minigen.{_HOMES[name]}"), name)
    if name == "head":
        return importlib.import_module("minigen.head")
    raise AttributeError(f"module 'minigen' has no attribute {name!r}")
