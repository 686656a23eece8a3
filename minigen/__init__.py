"""minigen: a tiny autoregressive text generator whose training has one fingerprint per config.

Everything is reached from here: ``minigen.Config`` and ``minigen.Run`` train, ``minigen.load``
gives a model to write with, ``minigen.prove`` and ``minigen.verify`` check the claim.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minigen.decoding.generation import Continuation as Continuation
    from minigen.decoding.generator import Generator as Generator
    from minigen.decoding.policy import DeadEndError as DeadEndError
    from minigen.decoding.policy import Policy as Policy
    from minigen.errors import MinigenError as MinigenError
    from minigen.errors import OptionError as OptionError
    from minigen.exact.streams import Stream as Stream
    from minigen.model import head as head
    from minigen.proof.proving import prove as prove
    from minigen.proof.verification import verify as verify
    from minigen.report.page import write_report as write_report
    from minigen.text.tokenizer import ByteTokenizer as ByteTokenizer
    from minigen.training.config import Config as Config
    from minigen.training.folder import RunFolder as RunFolder
    from minigen.training.loading import load as load
    from minigen.training.run import Run as Run
    from minigen.training.sweep import sweep as sweep

    __version__: str
else:
    _HOMES = {  # public name → where it lives
        "ByteTokenizer": "text.tokenizer",
        "Config": "training.config",
        "Continuation": "decoding.generation",
        "DeadEndError": "decoding.policy",
        "Generator": "decoding.generator",
        "MinigenError": "errors",
        "OptionError": "errors",
        "Policy": "decoding.policy",
        "Run": "training.run",
        "RunFolder": "training.folder",
        "Stream": "exact.streams",
        "head": "model.head",
        "load": "training.loading",
        "prove": "proof.proving",
        "sweep": "training.sweep",
        "verify": "proof.verification",
        "write_report": "report.page",
    }
    __all__ = [*_HOMES]

    def __getattr__(name):
        """Import a name when it is first asked for: training's libraries cost half a second."""
        import importlib

        if name == "__version__":
            from importlib.metadata import version

            return version("minigen")
        if name in _HOMES:
            home = importlib.import_module(f"minigen.{_HOMES[name]}")
            return home if name == "head" else getattr(home, name)
        from minigen.errors import nearest

        message = f"module 'minigen' has no attribute {name!r}"
        raise AttributeError(f"{message}; the nearest known one is {nearest(name, __all__)}")

    def __dir__():
        return [*__all__, "__version__", *(name for name in globals() if name.startswith("__"))]
