"""What is read as text, from where, and what is told of it."""

import os
import re
import warnings
from pathlib import Path

import pytest

from minigen.errors import MinigenError, OptionError
from minigen.text import documents
from minigen.text.documents import Reader, find, in_memory, lines, looks_like, passes, whole
from minigen.training.config import Config

KINDS = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip (or a document in it)",
    b"7z\xbc\xaf\x27\x1c": "7-Zip",
    b"%PDF-": "PDF",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"version https://git-lfs.github.com/spec/": "a Git-LFS pointer, not the file itself",
    "ein Text".encode("utf-16-le"): "UTF-16",
    "ein Text".encode("utf-16-be"): "UTF-16",
    b"a" * 4095 + b"\0": "binary data",
    b"a\0b": "UTF-16",
    b"a\0\0b": "binary data",
}


@pytest.mark.parametrize("start", KINDS, ids=lambda start: repr(start[-12:]))
def test_a_file_that_is_no_text_is_told_by_its_first_bytes(start: bytes) -> None:
    assert looks_like(start) == KINDS[start]
    if not start.endswith(b"\0"):  # what is looked for stands whole at the start, or not at all
        assert looks_like(b"a" + start[:-1].replace(b"\0", b"")) is None


@pytest.mark.parametrize("start", [b"", b"text", "é".encode(), b"a" * 4096 + b"\0", b"\xff"])
def test_what_may_be_text_is_not_told_of(start: bytes) -> None:
    assert looks_like(start) is None


@pytest.mark.parametrize(
    ("data", "meant", "cut"),
    [
        (b"", b"", []),
        (b"\xef\xbb\xbf", b"", []),
        (b"\xef\xbb\xbfa\n", b"a", [b"a"]),
        (b"a\xef\xbb\xbf", b"a\xef\xbb\xbf", [b"a\xef\xbb\xbf"]),
        (b"\n", b"", [b""]),
        (b"ab", b"ab", [b"ab"]),
        (b"ab\n", b"ab", [b"ab"]),
        (b"ab\r", b"ab", [b"ab"]),
        (b"ab\r\n", b"ab", [b"ab"]),
        (b"ab\r\r\n", b"ab", [b"ab"]),
        (b"ab\r\r\r\n", b"ab\r", [b"ab", b""]),
        (b"ab\n\n", b"ab\n", [b"ab", b""]),
        (b"ab\n\r\n", b"ab\n", [b"ab", b""]),
        (b"a\rb\nc\r\nd\r\r\ne", b"a\rb\nc\r\nd\r\r\ne", [b"a", b"b", b"c", b"d", b"e"]),
    ],
)
def test_a_text_is_meant_without_its_mark_and_the_end_of_its_last_line(
    data: bytes, meant: bytes, cut: list[bytes]
) -> None:
    assert (whole(data), lines(data)) == (meant, cut)


# ── Folders ──────────────────────────────────────────────────────────────────────────────────────


def test_a_folder_is_one_of_a_run_where_a_run_left_its_config(tmp_path: Path) -> None:
    config = Config.load().to_toml()
    tables = ["run", "corpus", "tokenizer", "model", "training", "optimizer"]
    contents = {
        "whole": (config, "x"),
        "just these": ("".join(f"[{name}]\n" for name in tables), "x"),
        "more": (config + "\n[more]\n", "x"),
        "damaged": ("run = [", "step-000001.safetensors"),
        "another": ("run = [", "step-1.safetensors.txt"),
        "latin": ("run = 'é'", "my-step-1.safetensors"),
        **{
            f"no {name}": (re.sub(rf"^\[{name}\]", f"[{name}s]", config, flags=re.M), "x")
            for name in tables
        },
    }
    for name, (text, beside) in contents.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_bytes(text.encode("latin-1"))
        (tmp_path / name / beside).touch()
    (tmp_path / "no config").mkdir()
    (tmp_path / "no config" / "step-000001.safetensors").touch()
    (tmp_path / "a folder" / "config.toml").mkdir(parents=True)
    (tmp_path / "a folder" / "config.toml" / "step-000001.safetensors").touch()
    with pytest.warns(UserWarning, match=r"^left out of the text: .* is a run, and 3 more$"):
        found = {Path(source.name).parent.name for source in find(tmp_path)}
    assert found == {"another", "latin", "no config", "config.toml", *(f"no {t}" for t in tables)}
    for name in ("whole", "damaged"):  # what is named is read
        assert len(find(tmp_path / name)) == 2


def test_one_thing_left_out_is_told_of_alone(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    message = rf"^left out of the text: {tmp_path}/link is a link to a folder$"
    with pytest.warns(UserWarning, match=message) as caught:
        find(tmp_path)
    assert [Path(warning.filename) for warning in caught] == [Path(documents.__file__)]


def test_files_of_the_token_cache_are_no_text(tmp_path: Path) -> None:
    names = ["0" * 64 + ".tokens", "f" * 64 + ".merges"]
    others = ["0" * 63 + ".tokens", "g" * 64 + ".tokens", "0" * 64 + ".tokens2", "0" * 64, "a.b"]
    for name in (*names, *others, "." + names[0]):
        (tmp_path / name).touch()
    assert {Path(source.name).name for source in find(tmp_path)} == {*others}


def test_standard_input_and_a_pipe_can_be_read_only_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    paths = "-", tmp_path / "pipe", tmp_path / "file", tmp_path, tmp_path / "missing"
    assert [passes(path) for path in paths] == [True, True, False, False, False]


def test_a_path_is_opened_however_long_it_is_and_no_descriptor_stays_open(tmp_path: Path) -> None:
    here = os.open(tmp_path, os.O_RDONLY)
    name = "d" * 199
    for depth in range(30):  # 6,000 bytes
        os.mkdir(name, dir_fd=here)
        deeper = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = deeper
        file = os.open(f"text-{depth}", os.O_CREAT | os.O_WRONLY, dir_fd=here)
        os.write(file, b"%d" % depth)
        os.close(file)
    os.close(here)
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir())) if descriptors.exists() else 0
    sources = find(tmp_path)
    assert sorted(len(source.name) for source in sources)[-1] > 6000
    texts = {source.name.rpartition("-")[2]: b"".join(source.blocks()) for source in sources}
    assert texts == {str(depth): b"%d" % depth for depth in range(30)}
    with pytest.raises(MinigenError, match="File name too long"):
        find(tmp_path / ("n" * 300))
    with pytest.raises(MinigenError, match="File name too long"):
        documents._on_disk(Path("n" * 5000))  # there is nowhere to cut it
    long = sources[-1].name
    for gone in (long + "/x", long.replace("/d", "/e", 1)):
        with pytest.raises(MinigenError, match="cannot read"):
            documents._on_disk(Path(gone))
    if descriptors.exists():
        assert len(list(descriptors.iterdir())) == before


# ── What is told ─────────────────────────────────────────────────────────────────────────────────


def test_what_looks_strange_is_told_of_once_and_only_of_files(tmp_path: Path) -> None:
    odd = []
    for i in range(3):
        odd.append(tmp_path / f"odd-{i}")
        odd[-1].write_bytes(b"%PDF-")
    later = tmp_path / "later"
    later.write_bytes(b"a" * documents.BLOCK + b"%PDF-\0")
    for count, more in (
        (1, ""),
        (2, ", and 1 more no text either"),
        (3, ", and 2 more no text either"),
    ):
        sources = [source for path in [later, *odd[:count]] for source in find(path)]
        told = f"^{odd[0]} looks like PDF{more}; its bytes are taken as they are$"
        with pytest.warns(UserWarning, match=told) as caught:
            Reader(sources, "file")
        assert [Path(warning.filename) for warning in caught] == [Path(__file__)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Reader([in_memory(b"%PDF-\0")], "file")  # a program knows what it has made


@pytest.mark.parametrize(
    ("count", "told"), [(1, "1 file: /a"), (2, "2 files: /a, /a"), (4, "4 files: /a, /a, /a")]
)
def test_a_text_without_a_byte_is_refused_with_its_files(
    tmp_path: Path, count: int, told: str
) -> None:
    (tmp_path / "a").touch()
    sources = find(tmp_path / "a") * count
    message = f"the text must hold at least one byte (got 0 bytes in {told})"
    with pytest.raises(MinigenError) as caught:
        Reader(sources, "file")
    assert str(caught.value).replace(str(tmp_path), "") == message


@pytest.mark.parametrize("mode", ["word", "files", "", None])
def test_there_are_three_kinds_of_documents(mode: str) -> None:
    message = re.escape(f'documents must be "file", "paragraph" or "line" (got {mode!r})')
    with pytest.raises(OptionError, match=f"^{message}$"):
        Reader([in_memory("a")], mode)  # type: ignore[arg-type]


def test_blocks_are_told_of_as_they_are_hashed_and_read(tmp_path: Path) -> None:
    size = documents.BLOCK + 5
    told: list[tuple[str, int, int]] = []
    sources = [in_memory(b"a" * size), in_memory(b"b")]
    reader = Reader(sources, "file", lambda *given: told.append(given))
    total = size + 1
    steps = [(documents.BLOCK, total), (size, total), (total, total)]
    assert told == [("hashing", *step) for step in steps]
    text = "".join(reader.characters())
    assert told[3:] == [("reading", *step) for step in steps]
    assert text == f"\u0100{'a' * size}\u0100b\u0100"
