"""Environments are built of wheels, of Debian's packages in root folders, and of npm's programs.

Nothing is installed: all lies in one cache folder, and each thing is made once, under a name that
says what it is. What cannot be had raises MissingError, which gives the reason in a line.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from urllib.parse import unquote

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minigen-matrix"
MIRROR = "http://deb.debian.org/debian"
_KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
_GLIBC = ("2_17", "2_24", "2_26", "2_27", "2_28", "2_31", "2_34", "2_35", "2_38", "2_39")
_LIMIT = 3600  # seconds for a download


class MissingError(Exception):
    """What cannot be built here, and why, in one line."""


def _run(*command: object, cwd: Path | None = None) -> str:
    try:
        done = subprocess.run(
            [*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=_LIMIT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingError(str(error).splitlines()[0]) from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith(("ERROR", "E:"))]
        lines = lines or done.stderr.splitlines() or [f"exit status {done.returncode}"]
        program, told = Path(str(command[0])).name, lines[-1].strip()
        if refused := re.search(r"Failed to fetch \S*/(\S+)\s+(.*?) *(\[|$)", lines[0]):
            told = f"the mirror has no {unquote(refused[1])} ({' '.join(refused[2].split())})"
        raise MissingError(f"{program}: {told[:200]}")
    return done.stdout


_MISSING: dict[str, str] = {}  # what could not be made, and why: nothing is tried twice


def _made(name: str, make: Callable[[Path], None]) -> Path:
    """Return the folder of that name, made on first use: whole or not at all."""
    folder = CACHE / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(Path(f"{folder}.lock")):
        if name in _MISSING:
            raise MissingError(_MISSING[name])
        if not folder.exists():
            unfinished = Path(f"{folder}.new")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            print(f"builds {folder}", file=sys.stderr, flush=True)
            try:
                make(unfinished)
            except MissingError as missing:
                _MISSING[name] = str(missing)
                raise
            unfinished.rename(folder)
    return folder


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ── Wheels ───────────────────────────────────────────────────────────────────────────────────────


def wheels(
    python: str, *requirements: str, machine: str = "x86_64", libc: str = "", whole: bool = True
) -> Path:
    """Unpack wheels for a Python ("3.13", "3.14t") and a machine; with what they need if ``whole``.

    ``libc`` is "musllinux" for Alpine's kind.
    """
    version = python.rstrip("t")
    platforms = [f"manylinux_{glibc}_{machine}" for glibc in _GLIBC]
    platforms += [f"manylinux2014_{machine}", f"linux_{machine}"]
    if libc:
        platforms = [f"{libc}_1_{minor}_{machine}" for minor in (1, 2)]
    abi = f"cp{python.replace('.', '')}"

    def make(folder: Path) -> None:
        _run(
            *(
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-compile",
                "--target",
                folder,
            ),
            *("--python-version", version, "--implementation", "cp", "--only-binary", ":all:"),
            *("--abi", abi, *(() if python.endswith("t") else ("--abi", "abi3")), "--abi", "none"),
            *(part for platform in platforms for part in ("--platform", platform)),
            *(() if whole else ("--no-deps",)),
            *requirements,
        )

    digest = hashlib.sha256(repr((requirements, whole)).encode()).hexdigest()[:8]
    short = "-".join("".join(c for c in r if c.isalnum() or c == ".") for r in requirements)
    return _made(f"wheels/{python}-{libc or 'gnu'}-{machine}-{short[:40]}-{digest}", make)


def programs(requirement: str, machine: str = "x86_64") -> Path:
    """Unpack what a wheel puts beside Python, bin and lib; pip, given a target, loses the second.

    Returns the folder that holds them.
    """

    def make(folder: Path) -> None:
        platforms = [f"manylinux_{glibc}_{machine}" for glibc in _GLIBC]
        _run(
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder),
            *("--only-binary", ":all:"),
            *(part for platform in platforms for part in ("--platform", platform)),
            *("--platform", f"manylinux2014_{machine}", requirement),
        )
        wheel = next(folder.glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        for data in folder.glob("*.data/data/*"):
            data.rename(folder / data.name)
        for scripts in folder.glob("*.data/scripts"):
            scripts.rename(folder / "bin")
        for program in folder.glob("bin/*"):
            program.chmod(0o755)
        wheel.unlink()

    return _made(f"programs/{requirement}-{machine}", make)


# ── Pythons of this machine ──────────────────────────────────────────────────────────────────────


@cache
def pythons() -> dict[str, str]:
    """Return the CPythons on the path and among pyenv's: version ("3.13") → program."""
    candidates = [sys.executable]
    for minor in range(11, 20):
        for name in (f"python3.{minor}", f"python3.{minor}t"):
            candidates += [str(Path(p) / name) for p in os.get_exec_path()]
            pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
            candidates += map(str, sorted(pyenv.glob(f"versions/*/bin/{name}")))
    code = (
        "import sys, sysconfig; t = 't' if sysconfig.get_config_var('Py_GIL_DISABLED') else ''; "
        "print('%d.%d' % sys.version_info[:2] + t) if sys.implementation.name == 'cpython' else 1/0"
    )
    found: dict[str, str] = {}
    for program in candidates:
        if os.access(program, os.X_OK):
            asked = subprocess.run([program, "-c", code], capture_output=True, text=True)
            if asked.returncode == 0:
                found.setdefault(asked.stdout.strip(), program)
    return dict(sorted(found.items(), key=lambda item: int(item[0].rstrip("t").split(".")[1])))


# ── Debian's packages in a root folder ───────────────────────────────────────────────────────────


def root(suite: str, machine: str, *packages: str) -> Path:
    """Unpack Debian packages, and what they need, into a folder that looks like a root."""
    apt = shutil.which("apt-get")
    if not apt or not shutil.which("dpkg-deb"):
        raise MissingError("needs apt-get and dpkg-deb, Debian's")

    def make(folder: Path) -> None:
        state = _lists(suite, machine)
        archives = folder / "archives"
        (archives / "partial").mkdir(parents=True)
        _run(
            *_apt(state, machine),
            *("-o", f"Dir::Cache::archives={archives}", "-o", "APT::Install-Recommends=false"),
            *("install", "--download-only", "--yes", *packages),
        )
        for name in ("bin", "lib", "lib64"):
            (folder / "usr" / name).mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(f"usr/{name}")
        for archive in sorted(archives.glob("*.deb")):
            _unpack(archive, folder)
        shutil.rmtree(archives)

    digest = hashlib.sha256(repr(packages).encode()).hexdigest()[:8]
    return _made(f"roots/{suite}-{machine}-{digest}", make)


def _unpack(archive: Path, folder: Path) -> None:
    """As ``dpkg-deb --extract``, which would replace the links of the root by folders."""
    tar = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", archive], stdout=subprocess.PIPE)
    extract = ["tar", "-x", "--keep-directory-symlink", "--no-same-owner", "-C", str(folder)]
    done = subprocess.run([*extract, "--exclude=./dev/*"], stdin=tar.stdout, capture_output=True)
    if tar.wait() or done.returncode:
        raise MissingError(f"cannot unpack {archive.name}: {done.stderr.decode()[-200:]}")


def _apt(state: Path, machine: str) -> list[str]:
    settings = {
        "Dir::State": state,
        "Dir::State::lists": state / "lists",
        "Dir::State::status": state / "status",
        "Dir::Cache": state / "cache",
        "Dir::Etc::sourcelist": state / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null",
        "APT::Architecture": machine,
        "APT::Architectures": machine,
        "APT::Sandbox::User": "root",
    }
    return ["apt-get", "-q", *(f"-o{key}={value}" for key, value in settings.items())]


def _lists(suite: str, machine: str, kind: str = "deb") -> Path:
    """Return apt's state for a suite and a machine; of sources where ``kind`` is "deb-src"."""

    def make(state: Path) -> None:
        (state / "lists" / "partial").mkdir(parents=True)
        (state / "cache" / "archives" / "partial").mkdir(parents=True)
        (state / "status").touch()
        source = f"{kind} [signed-by={_KEYS}] {MIRROR} {suite} main\n"
        (state / "sources.list").write_text(source)
        _run(*_apt(state, machine), "update")

    return _made(f"lists/{suite}-{machine if kind == 'deb' else 'source'}", make)


def emulator(machine: str) -> str:
    """Return the program of qemu that runs another machine's programs: Debian's, by its name."""
    program = root("trixie", "amd64", "qemu-user") / "usr/bin" / f"qemu-{machine}"
    if not program.exists():
        raise MissingError(f"qemu has no qemu-{machine}")
    return str(program)


# ── CPython, compiled of Debian's sources ────────────────────────────────────────────────────────


def compiled(python: str, suite: str, libc: str = "") -> str:
    """Compile a CPython that no package brings, without the GIL ("3.14t") or with musl for libc.

    Returns its program. Of what Debian's is linked to it has libffi and zlib alone: scipy needs
    ctypes, and modules of Cython hold compressed texts.
    """
    if missing := [name for name in ("gcc", "make", "autoreconf") if not shutil.which(name)]:
        raise MissingError(f"needs {missing[0]}")

    def make(folder: Path) -> None:
        told = ("env", f"CC={_musl() if libc else 'gcc'}", "CFLAGS=-O1 -fPIC", "PKG_CONFIG=false")
        with tempfile.TemporaryDirectory() as temporary:
            code, ffi, zlib = (
                _source(name, of, Path(temporary) / name)
                for name, of in (
                    (f"python{python.rstrip('t')}", suite),
                    ("libffi", "trixie"),
                    ("zlib", "trixie"),
                )
            )
            out = Path(temporary) / "out"
            _run("autoreconf", "--force", "--install", cwd=ffi)
            kinds = ("--disable-shared", "--disable-docs", "--disable-exec-static-tramp")
            _run(*told, ffi / "configure", *kinds, f"--prefix={out}", cwd=ffi)
            _run(*told, zlib / "configure", "--static", f"--prefix={out}", cwd=zlib)
            for library in (ffi, zlib):
                _run("make", "-s", "install", cwd=library)
            for name, archive in (("LIBFFI", "libffi.a"), ("ZLIB", "libz.a")):
                told += (f"{name}_CFLAGS=-I{out}/include",)
                told += (f"{name}_LIBS={next(out.glob(f'lib*/{archive}'))}",)
            _run(
                *(*told, "OPT=-DNDEBUG -fwrapv", code / "configure", f"--prefix={folder}"),
                *("--disable-test-modules", "--without-ensurepip"),
                *(("--disable-gil",) if python.endswith("t") else ()),
                cwd=code,
            )
            _run("make", "-s", "-j2", cwd=code)
            _run("make", "-s", "install", cwd=code)

    return str(_made(f"compiled/{python}-{libc or 'gnu'}", make) / "bin" / f"python{python}")


def _source(package: str, suite: str, folder: Path) -> Path:
    """Unpack the original sources of a Debian package."""
    folder.mkdir()
    state = _lists(suite, "amd64", "deb-src")
    _run(*_apt(state, "amd64"), "source", "--tar-only", package, cwd=folder)
    archive = next(path for path in folder.iterdir() if ".orig.tar." in path.name)
    _run("tar", "-xf", archive, cwd=folder)
    return next(path for path in folder.iterdir() if path.is_dir())


def _musl() -> Path:
    """Return a gcc that compiles for musl, Debian's, as it lies in a root folder."""
    folder = root("trixie", "amd64", "musl-dev", "linux-libc-dev")
    for name in ("linux", "asm-generic", "x86_64-linux-gnu/asm"):  # the kernel's headers
        with suppress(FileExistsError):
            beside = folder / "usr/include/x86_64-linux-musl" / Path(name).name
            beside.symlink_to(folder / "usr/include" / name)
    specs = folder / "usr/lib/x86_64-linux-musl/musl-gcc.specs"
    own = folder / "musl-gcc.specs"
    own.write_text(re.sub(r"(?<![\w/])(-L)?(/usr|/lib)/", rf"\1{folder}\2/", specs.read_text()))
    compiler = folder / "musl-gcc"
    compiler.write_text(
        '#!/bin/sh\n[ "$*" = --print-multiarch ] && exec echo x86_64-linux-musl\n'
        f'exec gcc -specs={own} "$@"\n'
    )
    compiler.chmod(0o755)
    return compiler


# ── npm ──────────────────────────────────────────────────────────────────────────────────────────


def from_npm(package: str, version: str, program: str) -> str:
    """Return a program out of a package of npm, a JavaScript engine for instance."""
    if not shutil.which("npm"):
        raise MissingError("needs npm")

    def make(folder: Path) -> None:
        command = ("npm", "pack", "--silent", f"{package}@{version}")
        archive = _run(*command, cwd=folder).strip().splitlines()[-1]
        _run("tar", "-xzf", folder / archive, "-C", folder)
        (folder / archive).unlink()

    folder = _made(f"npm/{package.replace('/', '-')}-{version}", make)
    path = folder / "package" / program
    path.chmod(0o755)
    return str(path)
