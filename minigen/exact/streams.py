"""A stream is a sequence of random 64-bit words, each a pure function of (seed, name, index).

Training draws from ``optimizer``, generation from ``inference``: two streams share no state, so
neither can disturb the other, and no global generator is ever read or seeded.
"""

import hashlib
from contextlib import suppress
from numbers import Integral
from threading import RLock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minigen.arguments import checked
from minigen.errors import OptionError, shown

Words = NDArray[np.uint64]

_AHEAD = 64  # words that are computed at once where they are taken one by one

MOST_WORDS = 2**258
"""How many words a stream has: four for each value of its counter of 256 bits."""


def bounded(words: Words, below: int) -> NDArray[np.int64]:
    """⌊word·below/2⁶⁴⌋, elementwise: integers in [0, below) for 1 ≤ below ≤ 2³².

    Their probabilities differ from 1/below by 2⁻⁶⁴ at most.
    """
    if not 1 <= below <= 1 << 32:
        raise OptionError(f"below must lie in 1 … 2^32 (got {shown(below)})")
    n, half = np.uint64(below), np.uint64(32)
    high, low = words >> half, words & np.uint64(0xFFFFFFFF)
    return ((high * n + ((low * n) >> half)) >> half).astype(np.int64)


def unit_interval(words: Words) -> NDArray[np.float64]:
    """(word ≫ 11)·2⁻⁵³, elementwise: floats in [0, 1)."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _require_position(position: int) -> None:
    if not (isinstance(position, Integral) and 0 <= position < MOST_WORDS):
        raise OptionError(
            f"position must be a whole number from 0 to below 2^258 (got {shown(position)})"
        )


class Stream:
    """Philox 4×64-10 under a key made of seed and name; its whole state is ``position``.

    Threads may share a stream: each word goes to one of them. Source of the generator: J. K. Salmon
    et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

    >>> stream = Stream(0, "optimizer")
    >>> stream.word() == Stream(0, "optimizer", position=0).word()
    True
    """

    @checked
    def __init__(self, seed: int, name: str, position: int = 0):
        self.seed, self.name = int(seed), name
        if self.seed < 0:
            raise OptionError(f"seed must be a whole number of at least 0 (got {shown(seed)})")
        try:
            text = f"minigen:{self.seed}:{name}".encode()
        except ValueError:  # Python writes no more digits, and no lone surrogate
            raise OptionError(
                "a stream takes a seed of at most 4300 digits and a name of Unicode "
                f"(got {shown(seed)} and {shown(name)})"
            ) from None
        digest = hashlib.sha256(text).digest()
        self._key = int.from_bytes(digest[:16], "little")
        self.__setstate__({"position": position})

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the lock, and the words ahead, which follow from the position."""
        kept = {name: x for name, x in vars(self).items() if name not in ("_taking", "_kept")}
        return {**kept, "position": self.position}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._taking = RLock()  # whoever draws in a signal handler must not wait for itself
        self.position = state.pop("position")
        vars(self).update(state)

    @property
    def position(self) -> int:
        """Index of the next word; assigning it seeks."""
        end, ahead = self._kept
        return end - len(ahead)

    @position.setter
    def position(self, position: int) -> None:
        _require_position(position)
        # Where the words end that were looked up, and those that are left of them, the next one
        # last: ``pop`` gives each to one thread, and takes no lock.
        self._kept: tuple[int, list[int]] = int(position), []

    def __repr__(self) -> str:
        return f"Stream(seed={self.seed}, name={self.name!r}, position={self.position})"

    def words(self, n: int) -> Words:
        """Return the next n words, (n,) uint64."""
        if not (isinstance(n, Integral) and n >= 0):
            raise OptionError(f"n must be a whole number of at least 0 (got {shown(n)})")
        kept: list[int] = []
        with self._taking:
            end, ahead = self._kept
            words = self._words_from(end, int(n))  # too many, where some are left of those ahead
            with suppress(IndexError):
                while len(kept) < n:
                    kept.append(ahead.pop())
            if len(kept) < n:
                self._kept = end + int(n) - len(kept), []
        return np.concatenate([np.array(kept, np.uint64), words])[: int(n)]

    def _words_from(self, position: int, n: int) -> Words:
        _require_position(position)
        # Made anew each time, since a generator that is kept could stand elsewhere than
        # ``position`` says: after an interruption, in a copy, or in another thread.
        generator = np.random.Philox(key=self._key, counter=position // 4)
        generator.random_raw(position % 4)  # a count of the counter gives four words
        return generator.random_raw(n)

    def word(self) -> int:
        """Return the next word, 0 ≤ word < 2⁶⁴."""
        while True:  # as often as other threads take all that was looked up
            try:
                return self._kept[1].pop()
            except IndexError:
                self._look_ahead()

    def _look_ahead(self) -> None:
        with self._taking:
            end, ahead = self._kept
            if not ahead:
                self._kept = end + _AHEAD, self._words_from(end, _AHEAD)[::-1].tolist()

    @checked
    def integers(self, n: int, below: int) -> NDArray[np.int64]:
        """Return n integers in [0, below), one word each; (n,) int64."""
        return bounded(self.words(n), below)

    @checked
    def uniforms(self, n: int) -> NDArray[np.float64]:
        """Return n floats in [0, 1), one word each; (n,) float64."""
        return unit_interval(self.words(n))
