"""How much memory this process may still take, so that what cannot fit is refused before it starts.

Without that, Linux lends memory that is not there, and kills the process in the middle of its work.
"""

import os
from contextlib import suppress
from pathlib import Path

from minigen.errors import MinigenError

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def available() -> int | None:
    """Return the bytes that are free, or can be made so; None where the system does not say."""
    found = []
    with suppress(OSError, ValueError, KeyError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines}
        found.append(sizes["MemAvailable"] + sizes["SwapFree"])
    for limit in _LIMITS:  # of a container
        with suppress(OSError, ValueError):
            found.append(int(Path(limit).read_text()))
    with suppress(ImportError, OSError, ValueError):
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        found += [soft] if soft != resource.RLIM_INFINITY else []
    with suppress(AttributeError, OSError, ValueError):
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(found, default=None)


def require(size: int, what: str, cure: str) -> None:
    """Raise MinigenError where so many bytes, needed by ``what``, are not to be had."""
    there = available()
    if there is not None and size > there:
        raise MinigenError(
            f"{what} needs {_shown(size)} of memory, and there is {_shown(there)}: {cure}"
        )


def _shown(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"
