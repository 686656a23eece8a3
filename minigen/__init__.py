"""minigen: a tiny autoregressive text generator whose training has one fingerprint per config."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minigen.decoding.policy import Policy
    from minigen.errors import MinigenError
    from minigen.exact.streams import Stream
    from minigen.model import head
    from minigen.text.tokenizer import ByteTokenizer
    from minigen.training.config import Config
    from minigen.training.run import Run

__all__ = ["ByteTokenizer", "Config", "MinigenError", "Policy", "Run", "Stream", "head"]

_HOMES = {
    "ByteTokenizer": "text.tokenizer",
    "Config": "training.config",
    "MinigenError": "errors",
    "Policy": "decoding.policy",
    "Run": "training.run",
    "Stream": "exact.streams",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: training's libraries cost half a second."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"minigen.{_HOMES[name]}"), name)
    if name == "head":
        return importlib.import_module("minigen.model.head")
    raise AttributeError(f"module 'minigen' has no attribute {name!r}")
