"""What memory there is: the least that any part of the system names."""

import os
from pathlib import Path

import pytest

from minigen.errors import MinigenError
from minigen.model import memory

resource = pytest.importorskip("resource", reason="asks POSIX for its limits")

MUCH = 1 << 60
SYSTEM = {  # what each source says, of much memory and of 5,120 bytes
    "/proc/meminfo": (f"MemTotal: 1 kB\nMemAvailable: {MUCH} kB\nSwapFree: 0 kB\n",
                      "MemTotal: 1 kB\nMemAvailable: 4 kB\nSwapFree: 1 kB\n"),
    "/sys/fs/cgroup/memory.max": ("max\n", "5120\n"),
    "/sys/fs/cgroup/memory/memory.limit_in_bytes": (f"{MUCH}\n", "5120\n"),
    "RLIMIT_AS": (resource.RLIM_INFINITY, 5120),
    "sysconf": ({"SC_PHYS_PAGES": MUCH, "SC_PAGE_SIZE": 1024},
                {"SC_PHYS_PAGES": 5, "SC_PAGE_SIZE": 1024}),
}  # fmt: skip


@pytest.fixture
def scarce(request, monkeypatch) -> None:
    """Let one source name 5,120 bytes, and all others much memory."""
    says = {
        source: few if source == request.param else much for source, (much, few) in SYSTEM.items()
    }
    monkeypatch.setattr(Path, "read_text", lambda path: says[str(path)])
    monkeypatch.setattr(resource, "getrlimit", {resource.RLIMIT_AS: (says["RLIMIT_AS"], 1)}.get)
    monkeypatch.setattr(os, "sysconf", says["sysconf"].get)


@pytest.mark.parametrize("scarce", SYSTEM, indirect=True)
def test_the_least_that_any_source_names_is_what_there_is(scarce):
    found = memory.available()
    memory.require(5120, "it", "take less")
    with pytest.raises(MinigenError) as caught:
        memory.require(5121, "it", "take less")
    assert found == 5120
    assert type(caught.value) is MinigenError  # no caller's mistake
    assert str(caught.value) == "it needs 0.0 MiB of memory, and there is 0.0 MiB: take less"


@pytest.mark.parametrize(("size", "shown"), [(5 << 20, "5.0 MiB"), (1 << 30, "1.0 GiB")])
def test_what_is_needed_is_told_in_a_unit_of_its_size(size, shown, monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: 0)
    with pytest.raises(MinigenError, match=f"^it needs {shown} of memory"):
        memory.require(size, "it", "take less")


def test_where_no_source_says_anything_nothing_is_refused(monkeypatch):
    def silent(*of):
        raise OSError("not here")

    monkeypatch.setattr(Path, "read_text", silent)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, 1))
    monkeypatch.setattr(os, "sysconf", silent)
    assert memory.available() is None
    memory.require(1 << 80, "it", "take less")
