"""The signals that ask a process to stop, and who hears them."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGXCPU", "SIGUSR1")  # schedulers send the last two
STOP_SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))


def let_pass(_number: int, _frame: FrameType | None) -> None:
    """Hear a signal and do nothing; SIG_IGN, which helpers would inherit, is the launcher's."""


@contextmanager
def heard_by(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Let ``handler`` hear the signals that stop a process, apart from those the launcher ignores.

    ``nohup`` and a script's background jobs set some to be ignored, which they stay. Python lets
    the main thread alone set a handler: elsewhere nothing changes.
    """
    old: dict[int, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    old[number] = signal.signal(number, handler)
        yield
    finally:
        for number, former in old.items():
            signal.signal(number, former)
