"""Numba's cache on disk, made harmless: whatever it holds, loops are then compiled anew."""
# mypy: allow-untyped-defs, allow-untyped-calls, no-check-untyped-defs, allow-subclassing-any

import hashlib
import logging
from contextlib import suppress
from functools import cache
from pathlib import Path

import numba
from numba.core.caching import FunctionCache, IndexDataCacheFile

from minigen.errors import MinigenError
from minigen.paths import expand, home_is_known

_SEAL = hashlib.sha256().digest_size


class _SealedFiles(IndexDataCacheFile):
    """Numba's files, with a SHA-256 behind: machine code that is damaged must not run."""

    def _dump(self, obj):
        data = super()._dump(obj)
        return data + hashlib.sha256(data).digest()

    def _load_data(self, name):
        data = Path(self._data_path(name)).read_bytes()
        if hashlib.sha256(data[:-_SEAL]).digest() != data[-_SEAL:]:
            raise ValueError(f"{name} is damaged")
        return super()._load_data(name)


class _Cache(FunctionCache):
    """Numba's cache, which may hold nothing, rubbish, or have no room: it only saves time."""

    def __init__(self, function):
        super().__init__(function)
        files = vars(self._cache_file)
        self._cache_file = object.__new__(_SealedFiles)
        vars(self._cache_file).update(files)

    def load_overload(self, sig, target_context):
        found = None
        try:
            found = super().load_overload(sig, target_context)
        except Exception:
            with suppress(Exception):
                self.flush()  # else nothing could be saved in it either
        return found or _announce()

    def save_overload(self, sig, data):
        with suppress(Exception):
            super().save_overload(sig, data)


@cache
def _announce():
    """Say, once, that loops are about to be compiled: whoever waits should know for what."""
    logging.getLogger("minigen").info("compiling the training loops, which takes some seconds")


def enable(compiled):
    """Let a compiled function use the cache, where there is a folder for it."""
    if numba.config.DISABLE_JIT:
        return
    try:
        numba.config.CACHE_DIR = expand(numba.config.CACHE_DIR)
        if numba.config.CACHE_DIR or home_is_known():  # else numba makes a folder called ~
            compiled._cache = _Cache(compiled.py_func)
            return
    except (MinigenError, RuntimeError):  # there is no ~, or no folder that can be written
        pass
    _announce()
