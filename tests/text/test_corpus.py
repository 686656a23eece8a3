"""A text becomes documents, two parts and flat tokens, the same from memory as from a file."""

import hashlib
import io
import os
import re
import signal
import subprocess
import sys
import zlib
from importlib import resources
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minigen.errors import MinigenError, OptionError
from minigen.text import corpus, token_cache
from minigen.text.tokenizer import END_OF_TEXT, ByteTokenizer
from minigen.training.config import Config
from minigen.training.folder import RunFolder
from minigen.training.run import Run
from tests.conftest import TINY, not_as_root

PROSE = (
    "The crow sat in the old tree — the tallest one.\nIt sang.\r\n\r\nThe end.\n\n" * 9
).encode()


def parts(text):
    """The documents of both parts."""
    return tuple(
        [
            part._tokenizer.decode(document)
            for document in np.split(part.array, np.flatnonzero(part.array == END_OF_TEXT))[1:-1]
        ]
        for part in (text.training, text.validation)
    )


def documents(text, mode, **options):
    return parts(corpus.from_memory(text, documents=mode, **options))[0]


def set_block(patch, size):
    patch.setattr("minigen.text.documents.BLOCK", size)
    patch.setattr("minigen.text.corpus.BLOCK", size)


# Documents


def test_tokens_open_and_close_with_end_of_text():
    tokens = corpus.from_memory(["ab", "c"]).training
    assert tokens.array.tolist() == [256, 97, 98, 256, 99, 256]
    assert len(tokens) == 5
    assert tokens.bytes == 3


def test_a_file_is_one_document_with_its_line_ends():
    assert documents(b"\n\na\r\n\r\nb\n", "file") == [b"\n\na\r\n\r\nb\n"]


def test_a_line_is_a_document_without_its_end():
    assert documents(b"\r\n\nAda\nBo b\r\n\n\r\nC\rd\r\r\n \nEve", "line") == [
        b"Ada",
        b"Bo b",
        b"C",
        b"d",
        b" ",
        b"Eve",
    ]


def test_a_paragraph_is_a_document_without_the_blank_lines_around_it():
    text = b" \n\t\r\n a\nb \r\n\r\n \t\nc\rd\n\n\n  e\n  \n"
    assert documents(text, "paragraph") == [b" a\nb ", b"c\rd", b"  e"]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r\r\n", b"\r"])
def test_lines_may_end_in_any_of_the_four_ways(end):
    text = end.join([b"Ada", b"Bo b", b"", b" ", b"C", b""])
    assert documents(text, "line") == [b"Ada", b"Bo b", b" ", b"C"]
    assert documents(text, "paragraph") == [b"Ada" + end + b"Bo b", b"C"]


@pytest.mark.parametrize("mode", ["line", "paragraph", "file"])
def test_a_byte_order_mark_is_no_part_of_a_text(mode, tmp_path):
    path = tmp_path / "marked.txt"
    path.write_bytes(b"\xef\xbb\xbfAda \xef\xbb\xbf")
    for loaded in (
        corpus.load([path, path], documents=mode),
        corpus.from_memory(["\ufeffAda \ufeff"]),
    ):
        assert parts(loaded)[0][0] == b"Ada \xef\xbb\xbf"


@pytest.mark.parametrize("blank", [b"\r\n", b" \t\n", b"\r"])
def test_more_blank_lines_than_a_block_part_the_same_documents_wherever_it_is_cut(blank):
    for extra in range(4):
        text = b"a" * extra + b"b \n" + blank * 400_000 + b"  c"
        assert documents(text, "paragraph") == [b"a" * extra + b"b ", b"  c"]


def test_what_looks_like_no_text_is_taken_as_it_is(tmp_path):
    (tmp_path / "a").write_bytes(b"%PDF-1.7\n")
    with pytest.warns(UserWarning, match=r"a looks like PDF; its bytes are taken as they are"):
        assert parts(corpus.load([tmp_path / "a"]))[0] == [b"%PDF-1.7\n"]


def test_a_list_of_documents_is_not_cut_further():
    assert documents(["a\n\nb", b"", "c\n"], "line") == [b"a\n\nb", b"c\n"]


def plain_documents(text, mode):
    """Documents by lines, as their definition says."""
    lines = re.findall(rb"[^\r\n]*(?:\r\r\n|\r\n|\n|\r|$)", text)
    if mode == "line":
        return [line.rstrip(b"\r\n") for line in lines if line.rstrip(b"\r\n")]
    groups, group = [], b""
    for line in [*lines, b""]:
        if line.strip(b" \t\r\n"):
            group += line
        elif group:
            groups.append(re.sub(rb"(\r\r\n|\r\n|\n|\r)$", b"", group))
            group = b""
    return groups


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from([b"a", b"b c", b"\n", b"\r\n", b"\r", b" ", b"\t"]), max_size=20),
    st.integers(1, 7),
)
@example([b" ", b"\r", b"\r\n", b"a"], 1)  # where one line end is cut, it stays one
def test_documents_are_those_of_their_definition_however_they_are_read(pieces, size):
    data = b"x" + b"".join(pieces)
    for mode in ("line", "paragraph"):
        assert documents(data, mode) == plain_documents(data, mode)
        with pytest.MonkeyPatch.context() as patch:
            set_block(patch, size)
            assert documents(data, mode) == plain_documents(data, mode)


@pytest.mark.parametrize("mode", ["line", "paragraph", "file"])
def test_blocks_of_a_file_change_nothing(tmp_path, monkeypatch, mode):
    path = tmp_path / "text.txt"
    path.write_bytes(PROSE * 20)
    options = {"documents": mode, "validation_fraction": 0.1, "vocab_size": 290}
    whole = corpus.load([path], **options)
    for block in (7, 64, 1000):
        set_block(monkeypatch, block)
        pieces = corpus.load([path], **options)
        assert pieces.tokenizer.merges == whole.tokenizer.merges
        assert parts(pieces) == parts(whole)


# Sources


def test_a_folder_gives_its_visible_files_sorted_by_their_relative_paths_as_bytes(tmp_path):
    for name in ("b.txt", "a/z.txt", "a.txt", "é.txt", "Z", ".hidden", ".git/x", "a/.y", "a/b/c"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(name)
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.warns(UserWarning, match="link is a link to a folder"):
        found = parts(corpus.load([tmp_path]))[0]
    assert [name.decode() for name in found] == [
        "Z",
        "a.txt",
        "a/b/c",
        "a/z.txt",
        "b.txt",
        "é.txt",
    ]


def test_standard_input_is_read_once_and_used_like_a_file(monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(PROSE)))
    options = {"documents": "line", "validation_fraction": 0.2, "vocab_size": 280}
    assert parts(corpus.load(["-"], **options)) == parts(corpus.from_memory(PROSE, **options))


def test_large_standard_input_is_kept_in_a_file(monkeypatch, tmp_path):
    monkeypatch.setattr("minigen.text.documents.LARGE", 100)
    monkeypatch.setattr("minigen.text.corpus.LARGE", 100)
    monkeypatch.setenv("MINIGEN_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(PROSE)))
    assert parts(corpus.load(["-"]))[0] == [PROSE]


def test_a_pipe_with_a_name_is_read_once(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["sh", "-c", f"printf hello > '{pipe}'"]):
        assert parts(corpus.load([pipe]))[0] == [b"hello"]


def test_the_hash_of_one_file_is_that_of_its_bytes(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"abc\n")
    assert corpus.load([path]).sha256 == hashlib.sha256(b"abc\n").hexdigest()
    one = corpus.from_memory("abc\n")
    assert (one.sha256, one.files) == (hashlib.sha256(b"abc\n").hexdigest(), 1)


def test_the_hash_of_several_files_is_that_of_their_digests_and_their_number():
    digests = hashlib.sha256(b"a").digest() + hashlib.sha256(b"b").digest()
    several = corpus.from_memory(["a", "b"])
    assert (several.sha256, several.files) == (f"{hashlib.sha256(digests).hexdigest()}-2", 2)
    assert corpus.from_memory("ab").sha256 != several.sha256


def test_a_file_that_holds_the_digests_of_others_is_another_text():
    digests = [hashlib.sha256(text).digest() for text in (b"a", b"b", b"c")]
    texts = [["a", "b", "c"], [b"".join(digests)], [digests[0] + digests[1], "c"], ["a", "b"]]
    texts.append([digests[0] + digests[1]])
    assert len({corpus.from_memory(text).sha256 for text in texts}) == len(texts)


def test_only_the_embedded_text_has_a_name(tmp_path, monkeypatch):
    path = tmp_path / "fables.txt"
    path.write_text("A fox.")
    monkeypatch.setattr(corpus, "FABLES", path)
    assert corpus.load("fables").name == "fables"
    assert corpus.load([path]).name == "external"


# Bad input


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda path: None, "No such file or directory"),
        (lambda path: path.mkdir(), "has no files"),
        (lambda path: path.symlink_to(path), "symbolic link"),
    ],
)
def test_what_cannot_be_read_is_named_with_the_cause_in_one_line(tmp_path, make, cause):
    path = tmp_path / "text.txt"
    make(path)
    with pytest.raises(MinigenError, match=cause) as caught:
        corpus.load([path])
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@not_as_root
def test_a_file_without_permission_is_named(tmp_path):
    path = tmp_path / "text.txt"
    path.touch(mode=0)
    with pytest.raises(MinigenError, match="Permission denied"):
        corpus.load([path])


def test_a_path_with_a_nul_is_an_error():
    with pytest.raises(MinigenError, match="null byte"):
        corpus.load(["a\0b"])


def test_a_text_of_line_ends_alone_is_an_error_with_its_size():
    with pytest.raises(MinigenError, match="got 3 bytes"):
        corpus.from_memory("\r\n\n", documents="line")


def test_a_file_that_grows_while_it_is_read_is_an_error(tmp_path):
    path, other = tmp_path / "text.txt", tmp_path / "other.txt"
    path.write_text("abc")
    other.write_text("xy")

    def grow(phase, done, total):
        if (phase, done) == ("hashing", 5):
            path.write_text("abcd")

    with pytest.raises(MinigenError, match="changed while it was read: 5 bytes, then 6"):
        corpus.load([path, other], progress=grow)


def test_a_file_rewritten_with_the_same_size_while_it_is_read_is_an_error_and_not_cached(tmp_path):
    path, cache = tmp_path / "text.txt", tmp_path / "cache"
    path.write_text("abc")

    def rewrite(phase, done, total):
        if phase == "hashing":
            path.write_text("xyz")

    with pytest.raises(MinigenError, match="changed while it was read: 3 bytes, then 3 that are"):
        corpus.load([path], progress=rewrite, cache=cache)
    assert list(cache.iterdir()) == []


# Folders


TEXT_SETTINGS = {**TINY, "training.steps": 2, "sampling.every": 0, "evaluation.every": 0}


def test_what_trainings_leave_in_a_folder_of_texts_is_no_text(tmp_path, monkeypatch):
    monkeypatch.setenv("MINIGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(corpus, "LARGE", 1)
    (tmp_path / "a.txt").write_text("to be or not to be")
    (tmp_path / "config.toml").write_text("[training]\nsteps = 2")  # the user's own
    expected = corpus.load([tmp_path]).sha256
    config = Config.load("fables", TEXT_SETTINGS | {"corpus.text": [str(tmp_path)]})
    folder = RunFolder.create(tmp_path / "runs" / "one", Run(config))
    config_alone = tmp_path / "runs" / "two"  # of a sweep, for one
    config_alone.mkdir()
    (config_alone / "config.toml").write_bytes((folder.path / "config.toml").read_bytes())
    with pytest.warns(UserWarning, match=r"left out of the text: .* is a run, and 1 more"):
        assert corpus.load([tmp_path]).sha256 == expected


def test_a_link_to_nothing_in_a_folder_is_a_missing_file(tmp_path):
    (tmp_path / "text.txt").write_text("a")
    (tmp_path / "gone.txt").symlink_to("nowhere")
    with pytest.raises(MinigenError, match=r"cannot read .*gone\.txt: No such file"):
        corpus.load([tmp_path])


FRACTION = "validation_fraction must be from 0 to below 1 (got {})"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"documents": "word"}, 'documents must be "file", "paragraph" or "line" (got \'word\')'),
        ({"validation_fraction": 1.0}, FRACTION.format("1.0")),
        ({"validation_fraction": -1e-300}, FRACTION.format("-1e-300")),
        ({"validation_fraction": float("nan")}, FRACTION.format("nan")),
        ({"vocab_size": 256}, "vocab_size must be at least 257 (got 256)"),
    ],
)
def test_an_option_out_of_range_is_refused(options, message):
    with pytest.raises(OptionError, match=f"^{re.escape(message)}$"):
        corpus.from_memory("abc", **options)


@pytest.mark.parametrize("text", ["some text", b"bytes"])
def test_load_takes_paths_alone(text):
    with pytest.raises(OptionError, match="list of paths"):
        corpus.load(text)


# The split


def test_one_byte_trains_and_leaves_validation_empty():
    one = corpus.from_memory(b"a", validation_fraction=0.5)
    assert len(one.training) == 2
    assert len(one.validation) == 0
    assert one.validation.bytes == 0


def test_without_a_fraction_validation_is_empty():
    assert parts(corpus.from_memory(PROSE)) == ([PROSE], [])
    assert len(corpus.from_memory(["a", "b"]).validation) == 0


def test_one_document_is_cut_inside():
    text = corpus.from_memory(b"0123456789", validation_fraction=0.2)
    assert parts(text) == ([b"01234567"], [b"89"])


@pytest.mark.parametrize(
    ("text", "training"), [("aaéé", b"aa"), ("aa😀😀", b"aa"), ("😀", "😀".encode())]
)
def test_one_document_is_never_cut_inside_a_character(text, training):
    fraction = 5 / 8 if "😀" in text else 3 / 6
    assert parts(corpus.from_memory(text, validation_fraction=fraction))[0] == [training]


def plain_cut(data, fraction):
    """Where one document is cut: at the last start of a character before, up to three bytes."""
    ideal = len(data) - round(len(data) * fraction)
    places = range(ideal, max(ideal - 4, -1), -1)
    cut = next((i for i in places if data[i : i + 1] not in [b"\x80", b"\xbf"]), ideal)
    return cut if 0 < cut < len(data) else len(data)


@settings(max_examples=100)
@given(
    st.lists(st.sampled_from([b"\0", b"\x7f", b"\x80", b"\xbf", b"\xc0", b"\xff"]), min_size=1),
    st.floats(0, 1, exclude_max=True),
)
@example([b"\x80"] * 10, 0.5)
@example([b"a", b"a", b"\xc0", b"\x80"], 0.5)
@example([b"a", b"\x80", b"\x80", b"\x80", b"\x80"], 0.2)
@example([b"a", b"\x80", b"\x80", b"\x80"], 0.1)
def test_one_document_is_cut_as_its_definition_says(pieces, fraction):
    data = b"".join(pieces)
    cut = plain_cut(data, fraction)
    text = corpus.from_memory(data, validation_fraction=fraction)
    assert parts(text) == ([data[:cut]], [data[cut:]] if data[cut:] else [])


@settings(max_examples=200)
@given(
    st.lists(st.binary(min_size=4, max_size=20), min_size=2, max_size=12),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from([3, 5, 1 << 20]),
)
@example([b"aaaa", b"bbbbb", b"ccc"], 7 / 15, 1 << 20)  # 8 of 15: as far from 5 as from 11
@example([b"aaaa", b"bbbbb", b"ccc"], 7 / 15, 5)  # the same, in two blocks
def test_many_documents_are_cut_at_the_nearest_boundary_inside(texts, fraction, block):
    with pytest.MonkeyPatch.context() as patch:
        set_block(patch, block)
        training, validation = parts(corpus.from_memory(texts, validation_fraction=fraction))
    texts = [text.removeprefix(b"\xef\xbb\xbf") for text in texts]
    assert training + validation == [text for text in texts if text]
    ends = np.cumsum([len(text) + 1 for text in texts]).tolist()
    held_out = round(ends[-1] * fraction)
    if held_out == 0:
        assert validation == []
    else:
        distances = [abs(end - (ends[-1] - held_out)) for end in ends[:-1]]
        assert len(training) - 1 == distances.index(min(distances))  # of two, the first


def test_a_long_document_is_cut_like_a_short_one(monkeypatch):
    whole = parts(corpus.from_memory(PROSE, validation_fraction=0.3))
    set_block(monkeypatch, 10)
    assert parts(corpus.from_memory(PROSE, validation_fraction=0.3)) == whole


def test_merges_are_learned_from_the_training_part_alone():
    text = corpus.from_memory(["abab" * 5, "xyxy" * 3], vocab_size=258, validation_fraction=0.4)
    assert text.tokenizer.merges == ((97, 98),)
    text = corpus.from_memory(["ab", "xyxy"], vocab_size=259, validation_fraction=0.5)
    assert text.tokenizer.merges == ((97, 98),)


def test_tokens_with_merges_are_those_of_each_document_between_end_of_text():
    texts = ["the crow", "the tree", "the end", "the crow’s tree"]
    text = corpus.from_memory(texts, vocab_size=262, validation_fraction=0.5)
    expected = [END_OF_TEXT]
    for document in texts:
        expected += [*text.tokenizer.encode(document).ids, END_OF_TEXT]
    size = len(text.training.array)
    assert text.training.array.tolist() == expected[:size]
    assert text.validation.array.tolist() == expected[size - 1 :]
    assert 1 < size < len(expected)


def test_a_tokenizer_given_is_used_as_it_is():
    tokenizer = ByteTokenizer([(120, 121)])
    text = corpus.from_memory("abab xy", vocab_size=300, tokenizer=tokenizer)
    assert text.tokenizer is tokenizer
    assert text.training.array.tolist() == [256, 97, 98, 97, 98, 32, 257, 256]


def test_the_merges_of_a_large_text_do_not_depend_on_the_order_of_its_lines(monkeypatch):
    monkeypatch.setattr(corpus, "LEARN_FROM", 2000)
    lines = [f"line {number} of {number % 7} — {number**3}\n".encode() for number in range(600)]
    forward = corpus.from_memory(b"".join(lines), vocab_size=300).tokenizer
    backward = corpus.from_memory(b"".join(lines[::-1]), vocab_size=300).tokenizer
    assert forward.merges == backward.merges


def test_merges_of_a_large_text_are_learned_from_32_mb_of_its_lines():
    pieces = [f"line {number}\n" for number in range(100)]
    pieces += ["x" * 4096, "x" * 904 + "\n", "y\u0100", "z\u0100"]
    edge = "aaaacaacaaacacaaaaaacccacaccacccaaaaaaaaaaaa\n"  # with 2^31 as its sum
    pieces = [edge, *pieces]
    text = "".join(pieces)
    blocks = [text[start : start + 17] for start in range(0, len(text), 17)]
    chosen = [piece for piece in pieces if zlib.crc32(piece.encode()) < 1 << 31]
    assert 20 < len(chosen) < 80
    assert zlib.crc32(edge.encode()) == 1 << 31
    assert "".join(corpus._sample(blocks, 64 << 20)) == "".join(chosen)
    assert "".join(corpus._sample(blocks, 32 << 20)) == text


def test_the_embedded_text_is_the_one_of_the_package():
    data = (resources.files("minigen") / "corpora" / "fables.txt").read_bytes()
    assert parts(corpus.load("fables")) == ([data], [])
    assert corpus.load("fables").sha256 == hashlib.sha256(data).hexdigest()


# Contexts


def plain_context(tokens, index, length):
    context = tokens[max(index + 1 - length, 0) : index + 1]
    last_end = max(i for i, token in enumerate([END_OF_TEXT, *context]) if token == END_OF_TEXT)
    context = context[last_end:] if last_end else context
    return [END_OF_TEXT] * (length - len(context)) + context


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize("length", [1, 2, 5, 40, 400])  # the last longer than the text
def test_contexts_end_where_their_document_starts(tmp_path, monkeypatch, in_file, length):
    set_block(monkeypatch, 16)  # in a file: neighbours are read at once
    text = corpus.from_memory(
        ["abc", "d", "", "efghijk" * 9, "é"] * 4,
        validation_fraction=0.3,
        vocab_size=260,
        cache=tmp_path if in_file else None,
    )
    for part in (text.training, text.validation):
        tokens = part.array.tolist()
        indices = np.random.Generator(np.random.Philox(0)).permutation(len(part))
        contexts, targets = part.contexts_and_targets(indices, length)
        assert contexts.dtype == targets.dtype == np.int64
        assert contexts.flags.c_contiguous
        assert contexts.shape == (len(part), length)
        assert targets.tolist() == [tokens[i + 1] for i in indices]
        assert contexts.tolist() == [plain_context(tokens, i, length) for i in indices.tolist()]
        alone = [part.contexts_and_targets(indices[i : i + 1], length) for i in range(len(part))]
        assert [c.tolist()[0] for c, _ in alone] == contexts.tolist()
        assert [t.tolist()[0] for _, t in alone] == targets.tolist()


def test_neighbours_anywhere_in_a_file_are_read_at_once_and_others_one_by_one(
    tmp_path, monkeypatch
):
    set_block(monkeypatch, 16)
    part, read = corpus.from_memory("abcdefg" * 20, cache=tmp_path).training, []
    windows = part._kept.windows
    monkeypatch.setattr(
        part._kept, "windows", lambda starts, width: read.append(width) or windows(starts, width)
    )
    part.contexts_and_targets(np.arange(100, 112), 5)
    assert read == [12 + 5]
    part.contexts_and_targets(np.array([100, 120]), 5)
    assert read == [12 + 5, 5 + 1, 5]


def test_no_indices_give_no_contexts(tmp_path):
    for cache in (None, tmp_path):
        part = corpus.from_memory("abc", cache=cache).training
        contexts, targets = part.contexts_and_targets(np.array([], np.int64), 4)
        assert contexts.shape == (0, 4)
        assert targets.shape == (0,)


# The cache


OPTIONS = {"documents": "line", "validation_fraction": 0.2, "vocab_size": 280}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(PROSE)
    return path


def test_tokens_are_the_same_from_a_file_as_from_memory(path, tmp_path):
    memory = corpus.load([path], **OPTIONS)
    for _ in range(2):  # built, then found
        file = corpus.load([path], **OPTIONS, cache=tmp_path / "cache")
        assert file.tokenizer.merges == memory.tokenizer.merges
        assert file.sha256 == memory.sha256
        for mine, other in ((file.training, memory.training), (file.validation, memory.validation)):
            assert mine.array.dtype == other.array.dtype == np.uint16
            assert mine.array.tolist() == other.array.tolist()
            assert mine.bytes == other.bytes
            assert np.concatenate(list(mine.blocks())).tolist() == mine.array.tolist()


def phases(path, cache, **options):
    found = set()
    corpus.load(
        [path],
        **{**OPTIONS, **options},
        cache=cache,
        progress=lambda phase, done, total: found.add(phase),
    )
    return found


def test_a_text_is_encoded_once(path, tmp_path):
    built = {"hashing", "reading", "learning merges", "encoding", "encoding validation"}
    assert phases(path, tmp_path / "cache") == built
    assert phases(path, tmp_path / "cache") == {"hashing"}
    tokenizer = corpus.load([path], **OPTIONS).tokenizer
    assert phases(path, tmp_path / "cache", tokenizer=tokenizer) == {"hashing"}


@pytest.mark.parametrize(
    "change",
    [
        {"documents": "paragraph"},
        {"validation_fraction": 0.3},
        {"vocab_size": 281},
        {"tokenizer": ByteTokenizer([(97, 98)])},
    ],
)
def test_another_recipe_is_another_file(path, tmp_path, change):
    corpus.load([path], **OPTIONS, cache=tmp_path / "cache")
    assert phases(path, tmp_path / "cache", **change) > {"encoding"}
    changed = {**OPTIONS, **change}
    assert parts(corpus.load([path], **changed, cache=tmp_path / "cache")) == parts(
        corpus.load([path], **changed)
    )


def test_another_text_is_another_file(path, tmp_path):
    corpus.load([path], **OPTIONS, cache=tmp_path / "cache")
    path.write_bytes(PROSE.replace(b"crow", b"frog"))
    assert phases(path, tmp_path / "cache") > {"reading"}


def test_progress_reaches_the_total(path):
    calls = {}
    corpus.load(
        [path],
        **OPTIONS,
        progress=lambda phase, done, total: calls.setdefault(phase, []).append((done, total)),
    )
    assert calls["hashing"][-1] == calls["reading"][-1] == (len(PROSE), len(PROSE))
    assert all(done == total for done, total in (call[-1] for call in calls.values()))


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: data * 2,
        lambda data: bytes([data[0] ^ 1]) + data[1:],
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    ],
)
def test_a_file_of_the_cache_that_is_damaged_is_built_again(path, tmp_path, damage):
    whole = parts(corpus.load([path], **OPTIONS, cache=tmp_path / "cache"))
    for file in (tmp_path / "cache").iterdir():
        file.write_bytes(damage(file.read_bytes()))
    assert parts(corpus.load([path], **OPTIONS, cache=tmp_path / "cache")) == whole


def test_an_interrupted_build_leaves_nothing(path, tmp_path):
    def interrupt(phase, done, total):
        if phase == "reading":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        corpus.load([path], **OPTIONS, cache=tmp_path / "cache", progress=interrupt)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_killed_build_leaves_nothing_that_is_used_and_is_cleaned_up_later(path, tmp_path):
    script = (
        "import os, signal, sys; from minigen.text import corpus\n"
        "def kill(phase, done, total):\n"
        "    if phase == 'reading': os.kill(os.getpid(), signal.SIGKILL)\n"
        "corpus.load([sys.argv[1]], documents='line', cache=corpus.Path(sys.argv[2]),"
        "progress=kill)"
    )
    cache = tmp_path / "cache"
    run = subprocess.run([sys.executable, "-c", script, str(path), str(cache)])
    assert run.returncode == -signal.SIGKILL
    (left,) = cache.iterdir()
    assert left.suffix == ".unfinished"
    corpus.load([path], documents="line", cache=cache)
    assert [file.suffix for file in cache.iterdir()] == [".tokens"]


def test_what_another_process_is_building_is_left_alone(path, tmp_path):
    cache = tmp_path / "cache"

    def half_way():
        yield np.array([1])
        corpus.load([path], cache=cache)
        yield np.array([2])

    assert token_cache.keep(cache, "another text", blocks=half_way())[0:2].tolist() == [1, 2]


def test_what_is_not_of_the_cache_is_left_alone(path, tmp_path):
    cache = tmp_path / "cache"
    (cache / "folder.tmp").mkdir(parents=True)
    (cache / f".x.tokens.{'0' * 16}.unfinished").mkdir()
    (cache / "thesis.tmp").touch()
    for entry in cache.iterdir():
        os.utime(entry, (0, 0))
    corpus.load([path], cache=cache)
    assert len(list(cache.iterdir())) == 4


def test_files_of_the_cache_that_were_exchanged_are_built_again(path, tmp_path):
    cache, other = tmp_path / "cache", tmp_path / "other.txt"
    other.write_bytes(PROSE[::-1])
    texts = [path, other]
    whole = [parts(corpus.load([text], **OPTIONS, cache=cache)) for text in texts]
    files = list(cache.iterdir())
    data = [file.read_bytes() for file in files]
    for file, other_data in zip(files, data[1:] + data[:1], strict=True):
        file.write_bytes(other_data)
    assert [parts(corpus.load([text], **OPTIONS, cache=cache)) for text in texts] == whole


def test_the_umask_decides_who_may_read_the_cache(path, tmp_path):
    old = os.umask(0o027)
    try:
        corpus.load([path], cache=tmp_path / "cache")
    finally:
        os.umask(old)
    (file,) = (tmp_path / "cache").iterdir()
    assert file.stat().st_mode & 0o777 == 0o640


def test_a_cache_that_cannot_be_written_is_an_error_with_a_cure(path, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(MinigenError, match=r"cannot keep tokens in .*cache.*MINIGEN_CACHE"):
        corpus.load([path], cache=tmp_path / "cache")


def test_a_full_disk_is_an_error_and_leaves_nothing(path, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MinigenError, match="No space left on device"):
        corpus.load([path], cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
