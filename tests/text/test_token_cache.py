"""The cache keeps tokens in files that are found again, whole, by what made them."""

import copy
import hashlib
import json
import os
import pickle
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minigen.errors import MinigenError
from minigen.text import corpus, token_cache
from minigen.text.tokenizer import ByteTokenizer

U4 = np.dtype("<u4")
TEXT = b"the crow, the tree, the end, the crow again and the tree" * 3


def test_a_file_is_called_after_its_recipe_and_ends_in_the_hash_of_name_and_content(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "new" / "folder"
    blocks = [np.array([1, 2], ">u4"), np.array([300])]
    kept = token_cache.keep(folder, "a recipe", 0.5, blocks=iter(blocks), dtype=U4)
    key = json.dumps(["minigen tokens 4", "a recipe", 0.5]).encode()
    (path,) = folder.iterdir()
    assert path.name == f"{hashlib.sha256(key).hexdigest()}.tokens"
    content = np.array([1, 2, 300], U4).tobytes()
    seal = hashlib.sha256(path.name.encode() + content).digest()
    assert path.read_bytes() == content + seal
    assert kept[0:3].tolist() == [1, 2, 300]
    assert kept.dtype == U4
    again = token_cache.keep(folder, "a recipe", 0.5, blocks=[], dtype=U4)
    assert again[0:3].tolist() == [1, 2, 300]
    assert token_cache.keep(None, "a recipe", blocks=blocks).tolist() == [1, 2, 300]


def test_a_file_larger_than_what_is_read_at_once_is_checked_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_cache, "BLOCK", 7)
    tokens = np.arange(100, dtype="<u2")
    token_cache.keep(tmp_path, blocks=[tokens])
    assert token_cache.keep(tmp_path, blocks=[])[0:100].tolist() == tokens.tolist()
    (path,) = tmp_path.iterdir()
    for place in (0, 100, 199, 200, 231):
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)
        with pytest.raises(MinigenError, match=f"^cannot read {path}: it is damaged$"):
            token_cache.TokenFile(path, np.dtype("<u2"))
        data[place] ^= 1
        path.write_bytes(data)


def test_a_text_has_the_same_files_in_each_release(tmp_path: Path) -> None:
    """Else each release would encode every large text anew, and leave the old files behind."""
    options = {"documents": "line", "validation_fraction": 0.25, "cache": tmp_path}
    one = corpus.from_memory(TEXT, **options)
    several = corpus.from_memory(TEXT.replace(b", ", b"\n"), vocab_size=260, **options)
    assert (one.tokenizer.vocab_size, several.tokenizer.vocab_size) == (257, 260)
    files = {path.name[:8]: path.read_bytes() for path in tmp_path.iterdir()}
    assert files["218911c5"][:-32] == np.array(several.tokenizer.merges, U4).tobytes()
    assert sorted(files) == [
        "0a67e59c",
        "218911c5",
        "2cf6a869",
        "3386f8ed",
        "6ab28db3",
        "e62ce5c2",
        "fcd74887",
    ]


def test_parts_are_read_copied_and_pickled_as_what_they_are_a_part_of(tmp_path: Path) -> None:
    for cache in (None, tmp_path):
        text = corpus.from_memory(["abc", "de"] * 3000, validation_fraction=0.4, cache=cache)
        for part in (text.training, text.validation):
            tokens = part.array.tolist()
            assert len(part) == len(tokens) - 1
            assert part.part(3, 3).array.tolist() == []
            assert part.part(2, 5).array.tolist() == tokens[2:5]
            assert part.part(2, 9).part(1, 3).part(0, 2).array.tolist() == tokens[3:5]
            assert part.part(len(tokens) - 2, 1 << 30).array.tolist() == tokens[-2:]
            assert len(part.part(2, 5)) == 2
            for other in (copy.deepcopy(part), pickle.loads(pickle.dumps(part))):
                assert other.array.tolist() == tokens
                assert (other.bytes, len(other)) == (part.bytes, len(part))
            assert len(pickle.dumps(part)) < 3000 or cache is None  # of 42,000 bytes


def test_a_copy_opens_the_file_again_whatever_folder_the_process_works_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    part = corpus.from_memory("abc", cache=Path("cache")).training
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert copy.deepcopy(part).array.tolist() == part.array.tolist()


class Slow:
    """A file that takes a while from seeking to reading, in which another thread may come."""

    def __init__(self, file: Any) -> None:
        self.read = file.read
        self._seek = file.seek

    def seek(self, place: int) -> None:
        self._seek(place)
        time.sleep(0.001)


@pytest.mark.skipif(not hasattr(os, "pread"), reason="needs a system that forks processes")
def test_a_read_moves_no_position_which_threads_and_forked_processes_share(tmp_path: Path) -> None:
    kept = token_cache.keep(tmp_path, blocks=[np.arange(1000, dtype="<u2")])
    assert isinstance(kept, token_cache.TokenFile)
    position = kept._file.tell()
    assert kept[7:9].tolist() == [7, 8]
    assert kept.windows(np.array([30, 2]), 2).tolist() == [[30, 31], [2, 3]]
    assert kept._file.tell() == position


def test_threads_read_one_file_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pread", raising=False)
    kept = token_cache.keep(tmp_path, blocks=[np.arange(1000, dtype="<u2")])
    kept._file = Slow(kept._file)
    found: list[list[int]] = []

    def read(start: int) -> None:
        starts = np.arange(start, start + 10)
        found.append(kept.windows(starts, 2)[:, 0].tolist())

    threads = [threading.Thread(target=read, args=(start,)) for start in (0, 100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [list(range(start, start + 10)) for start in (0, 100, 200)]


@pytest.mark.parametrize(
    ("named", "caches", "home", "folder"),
    [
        ("/n", "/c", "/h", "/n"),
        ("~/n", "/c", "/h", "/h/n"),
        (None, "/c", "/h", "/c/minigen"),
        ("", "~/c", "/h", "/h/c/minigen"),
        (None, "", "/h", "/h/.cache/minigen"),
        ("/n", None, None, "/n"),
        (None, "/c", None, "/c/minigen"),
        (None, None, None, None),
        ("~/n", None, None, None),
        ("", "~/c", None, None),
    ],
)
def test_the_users_folder_for_tokens_is_the_one_named_or_that_for_caches(
    monkeypatch: pytest.MonkeyPatch,
    named: str | None,
    caches: str | None,
    home: str | None,
    folder: str | None,
) -> None:
    users = pytest.importorskip("pwd", reason="users are POSIX's")
    monkeypatch.setattr(users, "getpwuid", {}.__getitem__)  # nor does the system know a home
    for name, value in (("MINIGEN_CACHE", named), ("XDG_CACHE_HOME", caches), ("HOME", home)):
        monkeypatch.delenv(name, False)
        if value is not None:
            monkeypatch.setenv(name, value)
    if folder:
        assert token_cache.default_folder() == Path(folder)
        return
    message = (
        "the tokens of a text above 64 MB are kept in a folder, and there is no home for it: set "
        f"MINIGEN_CACHE to a folder with room (it is {named or ''!r})"
    )
    with pytest.raises(MinigenError, match=f"^{re.escape(message)}$"):
        token_cache.default_folder()
    assert corpus.LARGE == 64 << 20


def test_a_text_of_more_than_its_limit_is_kept_in_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIGEN_CACHE", str(tmp_path))
    monkeypatch.setattr(corpus, "LARGE", 10)
    for size, kept in ((10, 0), (11, 1)):
        corpus.from_memory(b"a" * size)
        assert len(list(tmp_path.iterdir())) == kept


def test_no_merges_are_kept_as_well_as_some(tmp_path: Path) -> None:
    for _ in range(2):  # made, then found
        assert corpus.from_memory("a", vocab_size=300, cache=tmp_path).tokenizer.merges == ()
        learned = corpus.from_memory(TEXT, vocab_size=280, cache=tmp_path).tokenizer
        assert learned.merges == ByteTokenizer.train([TEXT], 280).merges
