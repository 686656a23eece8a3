"""What the system is asked for: files written whole, one owner of a folder, paths, signals."""

import os
import re
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minigen import files, load
from minigen.errors import MinigenError
from minigen.files import explained, own, remove_strays, replacing, write_atomically
from minigen.paths import expand, home_is_known
from minigen.signals import STOP_SIGNALS, heard_by, let_pass

pwd = pytest.importorskip("pwd", reason="folders' locks, users and most signals are POSIX's")
STRAY = re.compile(r"\.x y\.[0-9a-f]{16}\.unfinished")


# ── One safe writer ──────────────────────────────────────────────────────────────────────────────


def test_a_file_is_replaced_by_all_of_its_content_in_the_order_that_survives_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, done, before = tmp_path / "x y", [], open_descriptors()
    path.write_bytes(b"old")
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        done.append("folder" if is_folder else os.fstat(descriptor).st_size)
        fsync(descriptor)

    def replaced(old: str, new: Path) -> None:
        assert (path.read_bytes(), Path(old).parent) == (b"old", tmp_path)
        done.append("replaced")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    with replacing(path) as file:
        (hidden,) = {entry.name for entry in tmp_path.iterdir()} - {"x y"}
        assert STRAY.fullmatch(hidden)
        file.write(b"new")
        remove_strays(tmp_path)  # of one that is being written, another process keeps off
        assert (tmp_path / hidden).exists()
    assert done == [3, "replaced", "folder"]
    assert open_descriptors() == before
    assert [(entry.name, entry.read_bytes()) for entry in tmp_path.iterdir()] == [("x y", b"new")]


@pytest.mark.parametrize("error", [OSError(28, "full"), KeyboardInterrupt()])
def test_what_fails_half_way_leaves_the_old_file_alone(tmp_path: Path, error: Any) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")

    def fail() -> None:
        with replacing(path) as file:
            file.write(b"new")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert [(entry.name, entry.read_bytes()) for entry in tmp_path.iterdir()] == [("x", b"old")]


def test_any_bytes_can_be_written_atomically(tmp_path: Path) -> None:
    write_atomically(tmp_path / "x", b"a", memoryview(b"bc"))
    write_atomically(tmp_path / "x", b"d")
    assert (tmp_path / "x").read_bytes() == b"d"
    assert os.listdir(tmp_path) == ["x"]
    with pytest.raises(MinigenError, match=r"^cannot save .*: it is a folder; name a file in it$"):
        write_atomically(tmp_path, b"d")
    with pytest.raises(
        MinigenError, match=r"^cannot save .*file or directory; nothing was changed$"
    ):
        write_atomically(tmp_path / "none" / "x", b"d")


def test_a_link_stays_one_and_a_pipe_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    write_atomically(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"
    write_atomically("/dev/null", b"new")
    assert not Path("/dev/null").is_file()
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_atomically(tmp_path / "pipe", b"new")
    assert os.read(reader, 9) == b"new"
    os.close(reader)
    reader, writer = os.pipe()  # which has no name, though a link leads to it: as /dev/stdout
    write_atomically(f"/dev/fd/{writer}", b"new")
    assert os.read(reader, 9) == b"new"
    for end in (reader, writer):
        os.close(end)


def test_a_name_that_is_too_long_is_explained(tmp_path: Path) -> None:
    with pytest.raises(MinigenError, match=r"^cannot save .*: File name too long"):
        write_atomically(tmp_path / ("a" * 300), b"new")
    for path in ("a" * 300, "a" * 5000):
        with pytest.raises(MinigenError, match=r"^cannot load a*: File name too long$"):
            load(path)


def test_no_temporary_file_can_be_foreseen_or_is_taken_from_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files.secrets, "token_hex", lambda n: "0" * 16)
    (tmp_path / f".x.{'0' * 16}.unfinished").symlink_to(tmp_path / "prey")
    with pytest.raises(MinigenError, match="File exists"):
        write_atomically(tmp_path / "x", b"data")
    assert not (tmp_path / "prey").exists()


def test_a_name_that_another_process_took_for_a_stray_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, locked = files._lock, []

    def taken(file: Any) -> bool | None:
        locked.append(Path(file.name))
        if len(locked) == 1:  # the other one has the lock
            return False
        if len(locked) == 2:  # the other one had it, and removed the file
            locked[1].unlink()
        return lock(file)

    monkeypatch.setattr(files, "_lock", taken)
    with replacing(tmp_path / "x") as file:
        assert Path(file.name) == locked[-1]
        file.write(b"new")
    assert len(set(locked)) == 3
    assert (tmp_path / "x").read_bytes() == b"new"


def test_strays_are_removed_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strays = [f".x.{'0' * 16}.unfinished", f".a\nb.c.{'f' * 16}.unfinished"]
    others = [f"x.{'0' * 16}.unfinished", f".x.{'0' * 15}.unfinished", f".{'0' * 16}.unfinished"]
    others += [f".x.{'0' * 16}.unfinished2", f".x.{'g' * 16}.unfinished", ".x.unfinished"]
    folder, link = f".d.{'0' * 16}.unfinished", f".l.{'0' * 16}.unfinished"
    (tmp_path / folder).mkdir()
    for name in (*strays, *others):
        (tmp_path / name).touch()
    (tmp_path / link).symlink_to(tmp_path / others[0])
    with replacing(tmp_path / others[0]):  # as each writer does, before it begins
        left = {path.name for path in tmp_path.iterdir()}
        assert left > {folder, link, *others}
        assert not left & set(strays)
    # Without locks, only what nobody has written to for an hour was surely left by the killed.
    monkeypatch.setattr(files, "fcntl", None)
    now = 1_000_000.0
    monkeypatch.setattr(files.time, "time", lambda: now)
    for name, age in zip(strays, (3600, 3601), strict=True):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (now - age, now - age))
    remove_strays(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {folder, link, strays[0], *others}


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0


# ── One owner of a folder ────────────────────────────────────────────────────────────────────────

ASK = "import sys; from pathlib import Path; from minigen.files import own; own(Path(sys.argv[1]))"


def another_process(folder: Path) -> str:
    """What another process is told that wants to own the folder; nothing where it may."""
    done = subprocess.run([sys.executable, "-c", ASK, folder], capture_output=True, text=True)
    return done.stderr.rpartition("MinigenError: ")[2].strip()


def test_a_folder_is_owned_as_long_as_its_owner_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_descriptors()
    first = own(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    assert first is own(tmp_path) is own(tmp_path / "link")
    holder = f"process {os.getpid()}" if sys.platform == "linux" else "another process"
    assert another_process(tmp_path) == (
        f"{tmp_path} is being written to by {holder}: wait for its end, or name another folder "
        "with --out"
    )
    assert open_descriptors() == (before and before + 1)
    first = None
    assert another_process(tmp_path) == ""
    monkeypatch.setattr(files, "fcntl", None)
    assert own(tmp_path) is None


def test_the_process_with_a_lock_is_found_among_all_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    path.touch()
    inode, table = path.stat().st_ino, ""
    monkeypatch.setattr(files.Path, "read_text", lambda path: table)
    with path.open() as file:
        for line, owner in (
            ("", "another process"),
            (f"1: POSIX  ADVISORY  WRITE 71 08:01:{inode} 0 EOF\n", "another process"),
            (f"2: FLOCK  ADVISORY  WRITE 72 08:01:{inode}1 0 EOF\n", "another process"),
            (f"3: FLOCK  ADVISORY  WRITE 0 08:01:{inode} 0 EOF\n", "another process"),
            (f"4: FLOCK  ADVISORY  WRITE 74 08:01:{inode} 0 EOF\n", "process 74"),
            (f"5: FLOCK  ADVISORY  WRITE 75 08:01:{inode} 0 EOF\n", "process 74"),
        ):
            table += line
            assert files._owner(file.fileno()) == owner
        table = "6: FLOCK\n" + table
        assert files._owner(file.fileno()) == "another process"


def test_where_locks_do_not_exist_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", unknown)
    said = f"^{tmp_path} cannot be locked here: start no second process that writes to it$"
    with pytest.warns(UserWarning, match=said) as caught:
        own(tmp_path)
    assert [Path(warning.filename) for warning in caught] == [Path(__file__)]
    with replacing(tmp_path / "x") as file:  # which is none the less safe
        file.write(b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(MinigenError, match=f"^cannot read folder {tmp_path}/x: No such file"):
        own(tmp_path / "x")


# ── What the system refuses ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left"), "cannot write: No space left; make room"),
        (OSError("odd"), "cannot write: odd; make room"),
        (ValueError("null byte"), "cannot write: null byte; make room"),
        (MinigenError("says it"), "says it"),
    ],
)
def test_what_the_system_refuses_is_explained_once(error: Exception, message: str) -> None:
    with pytest.raises(MinigenError) as caught, explained("cannot write", "; make room"):
        raise error
    assert str(caught.value) == message
    with pytest.raises(KeyError), explained("cannot write"):  # a fault of ours keeps its traceback
        raise KeyError


def test_only_a_regular_file_is_opened(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        files.opened(tmp_path / "x")
    (tmp_path / "x").write_bytes(b"abc")
    with files.opened(tmp_path / "x") as file:
        assert file.read() == b"abc"
    os.mkfifo(tmp_path / "pipe")  # nobody writes to it
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, why in (
        ("pipe", "it is not a regular file"),
        ("", "Is a directory"),
        ("loop", "Too many levels of symbolic links"),
    ):
        path = tmp_path / name
        with pytest.raises(MinigenError, match=f"^cannot read {path}: {why}$"):
            files.opened(path)


# ── Paths ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("home", "is_known"),
    [("/home/of-mine", True), ("", False), ("not/absolute", False), (None, False)],
)
def test_a_path_of_the_home_folder_needs_one(
    monkeypatch: pytest.MonkeyPatch, home: str | None, is_known: bool
) -> None:
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # nor does the system know one
    monkeypatch.setattr(pwd, "getpwnam", {}.__getitem__)
    monkeypatch.delenv("HOME")
    if home is not None:
        monkeypatch.setenv("HOME", home)
    assert home_is_known() is is_known
    for path in ("a", "a~", "", "/x/~", "~of-nobody", "~of-nobody/x"):
        assert expand(path) == path
    for path in ("~", "~/", "~/a b"):
        if is_known:
            assert expand(path) == f"{home}{path[1:]}"
        else:
            message = f"{path}: ~ is not known here, for want of HOME: give the whole path"
            with pytest.raises(MinigenError, match=re.escape(message)):
                expand(path)


# ── Signals ──────────────────────────────────────────────────────────────────────────────────────


def test_signals_that_stop_are_heard_but_those_that_the_launcher_ignores() -> None:
    names = ["SIGINT", "SIGTERM", "SIGHUP", "SIGXCPU", "SIGUSR1"]
    assert [number.name for number in STOP_SIGNALS] == names
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    heard: list[int] = []

    def hear(number: int, _: Any) -> None:
        heard.append(number)

    def in_a_thread(action: Callable[[], None]) -> None:
        thread = threading.Thread(target=action)
        thread.start()
        thread.join()

    def stopped() -> None:
        with heard_by(hear):
            for number in STOP_SIGNALS:
                signal.raise_signal(number)
            raise KeyError

    try:
        with pytest.raises(KeyError):
            stopped()
        assert heard == [number for number in STOP_SIGNALS if number != signal.SIGHUP]
        assert {number: signal.getsignal(number) for number in STOP_SIGNALS} == before
        with heard_by(let_pass):
            signal.raise_signal(signal.SIGTERM)

        def unchanged() -> None:
            with heard_by(hear):
                heard.append(signal.getsignal(signal.SIGTERM) is before[signal.SIGTERM])

        in_a_thread(unchanged)
        assert heard[-1] is True
    finally:
        signal.signal(signal.SIGHUP, former)
