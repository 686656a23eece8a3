"""How all of this is measured: contestants take turns in one run; medians, ratios with spread."""

import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles

Contestants = Mapping[str, Callable[[], object]]


def rounds(contestants: Contestants, seconds: float = 0.02, repetitions: int = 15) -> "Times":
    """Let each contestant run for about ``seconds`` per round, one after the other; seconds a call.

    In every turn the first call is not timed: it finds caches, and cores, that another has left.
    """
    calls = {}
    for name, call in contestants.items():
        call(), call()  # compiles
        calls[name] = max(1, round(seconds / _seconds(call, 1)))
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(repetitions):
        for name, call in contestants.items():
            call()
            times[name].append(_seconds(call, calls[name]))
    return Times(times)


def _seconds(call: Callable[[], object], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


@dataclass
class Times:
    """Seconds a call, by contestant and round."""

    seconds: dict[str, list[float]]

    def __getitem__(self, name: str) -> float:
        return median(self.seconds[name])

    def fastest(self, *names: str) -> str:
        """Return the name with the smallest median."""
        return min(names, key=self.__getitem__)

    def ratio(self, slower: str, faster: str) -> str:
        """Median over the rounds of slower/faster, with its middle half."""
        pairs = zip(self.seconds[slower], self.seconds[faster], strict=True)
        low, middle, high = quantiles((a / b for a, b in pairs), n=4)
        return f"{middle:.2f} ({low:.2f} to {high:.2f})"


@dataclass
class Table:
    """A section of the results: a heading, rows under column names, and remarks."""

    title: str
    columns: list[str]
    remarks: str = ""
    rows: list[list[str]] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        """Add a row, and print it."""
        self.rows.append([_three_digits(x) if isinstance(x, float) else str(x) for x in cells])
        print(" | ".join(self.rows[-1]), flush=True)

    def __str__(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        return f"## {self.title}\n\n{table}\n\n{self.remarks.strip()}\n"


def _three_digits(number: float) -> str:
    return f"{number:.0f}" if number >= 1000 else f"{number:.3g}"


def machine() -> str:
    """Return a paragraph about what all of this runs on, and how busy it is."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [x.partition(": ")[2] for x in info.read_text().splitlines() if "model name" in x]
        cpu = names[0] if names else cpu
    packages = ", ".join(
        f"{name} {version(name)}" for name in ("numpy", "scipy", "numba", "torch", "jax")
    )
    load = f"load average {os.getloadavg()[1]:.1f}"
    return (
        f"{cpu}, {os.cpu_count()} cores ({load}), {platform.system()}, "
        f"Python {platform.python_version()}, {packages}."
    )
