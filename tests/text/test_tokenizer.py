"""Any bytes become ids and come back; merges are the same however they are learned."""

import json
import os
import random
import re
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import trainers

from minigen.errors import MinigenError, OptionError
from minigen.text.tokenizer import (
    END_OF_TEXT,
    ByteTokenizer,
    TextDecoder,
    _words,
    require_tokens,
    to_bytes,
)

FABLE = (
    "The crow — an old one — sat in the old tree. “The tree,” said the crow, “is mine.”\r\n"
    "The café’s owner said: the tree is the tree’s. 12 crows, 12 trees,  and  \t tabs.\n\n"
)
TEXT = (FABLE * 3).encode()


@pytest.fixture(scope="module")
def merged():
    return ByteTokenizer.train([TEXT], 300)


@pytest.fixture(params=["bytes", "merges"])
def tokenizer(request, merged):
    return ByteTokenizer() if request.param == "bytes" else merged


@pytest.mark.parametrize(
    "text",
    ["hello", " hello", "😀z", "\r\n", "\0", "", "<|endoftext|>", "Ā", FABLE, "a" * 200, " " * 200],
)
def test_a_text_comes_back_from_its_ids(tokenizer, text):
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text.encode()
    assert END_OF_TEXT not in ids


def test_every_single_byte_comes_back_and_is_its_own_value(tokenizer):
    for value in range(256):
        assert tokenizer.encode(bytes([value])).ids == [value]
        assert tokenizer.token_bytes(value) == bytes([value])


@given(st.binary(max_size=300))
def test_any_bytes_come_back(merged, data):
    for tokenizer in (ByteTokenizer(), merged):
        assert tokenizer.decode(tokenizer.encode(data).array) == data


def test_ids_of_the_byte_vocabulary_are_the_bytes():
    encoding = ByteTokenizer().encode(b"\xff any \x00 bytes")
    assert encoding.ids == list(b"\xff any \x00 bytes")
    assert encoding.array.tolist() == encoding.ids
    assert encoding.array.dtype == np.uint16
    assert len(encoding) == 13
    assert encoding in {encoding}


def test_the_control_token_has_no_bytes(tokenizer):
    assert tokenizer.decode([104, END_OF_TEXT, 105]) == b"hi"
    assert tokenizer.token_bytes(END_OF_TEXT) == b""


def test_bytes_that_the_command_line_hides_in_a_str_are_bytes_again(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\udcff").ids) == b"a\xff"


def test_a_str_that_is_not_unicode_is_refused():
    with pytest.raises(OptionError, match=r"must be Unicode \(got the lone surrogate '\\ud800'\)"):
        ByteTokenizer().encode("a\ud800")


@pytest.mark.parametrize("ids", [[257], [-1], [2**40]])
def test_an_id_outside_the_vocabulary_is_refused(ids):
    with pytest.raises(OptionError, match=rf"must be from 0 to 256 \(got {ids[0]}\)"):
        ByteTokenizer().decode(ids)


@pytest.mark.parametrize("ids", [[1.0], [True], ["a"], [2**70]])
def test_an_id_that_is_no_integer_is_refused(ids):
    with pytest.raises(OptionError, match=r"must be (integers|numbers)"):
        ByteTokenizer().decode(ids)


def test_a_vocabulary_of_one_has_one_token():
    require_tokens(np.array([], int), 1)
    require_tokens(np.array([0]), 1)
    for ids, got in (([0, 1], 1), ([-1, 1], -1)):
        with pytest.raises(OptionError, match=rf"^token ids must be from 0 to 0 \(got {got}\)$"):
            require_tokens(np.array(ids), 1)


def test_one_id_alone_is_decoded_and_so_is_any_type_of_integer():
    assert ByteTokenizer().decode(104) == ByteTokenizer().decode(np.array([104], "u1")) == b"h"


def test_no_ids_are_no_bytes(tokenizer):
    assert tokenizer.decode([]) == b""


def test_merges_follow_the_textbook():
    # "aaabdaaabac": aa, then aa + a (4 pairs tie at 2; (a, b) = (97, 98) has the lowest ids).
    assert ByteTokenizer.train([b"aaabdaaabac"], 259).merges == ((97, 97), (97, 98))
    assert ByteTokenizer.train([b"aaabdaaabac"], 259).encode("aaab").ids == [257, 258]


def test_the_library_shows_no_bar_of_its_own(monkeypatch):
    made, make = [], trainers.BpeTrainer
    monkeypatch.setattr(trainers, "BpeTrainer", lambda **o: made.append(make(**o)) or made[-1])
    ByteTokenizer.train([b"abab"], 258)
    assert [trainer.show_progress for trainer in made] == [False]


def test_merges_apply_in_the_order_learned():
    tokenizer = ByteTokenizer([(98, 99), (97, 98), (97, 257)])
    assert tokenizer.encode("abc ab").ids == [259, 32, 258]


def test_merges_stay_inside_words(merged):
    words = [token.strip() for token in map(merged.token_bytes, range(257, 300))]
    assert all(b" " not in word and b"\n" not in word for word in words)


@pytest.mark.parametrize(
    "words",
    [
        ["one", " two", "\t", "three", "\n", " ", " four"],
        [" a", "1", " 2", "bé\xa0", "!?", " «"],
        ["a\x80\xffZ", "@[`{\x7f/:", "09", "\0"],
        ["\t\v\f\r", " a", "\r\n", "\n", "  \n", "\v"],
        ["x" * 60, "x"],
        [" " + "x" * 60, "x"],
        ["9" * 60, "9"],
        [" " + "9" * 60, "9"],
        ["!" * 60, "!"],
        [" " + "!" * 60, "!"],
        [" " * 59 + "\n"],
        [" " * 60, "\n"],
        [" " * 60, " \n"],
        [" " * 60, " ", " a"],
        [" " * 59, " a"],
        ["a", "\u0100", "\u0100", " b", " ", "\u0100", "  ", "\u0100"],
    ],
)
def test_a_text_is_cut_into_words_of_one_kind(words):
    text = "".join(words)
    found = [word for block in _words(text) for word in block]  # a block for each character
    assert found == [word for block in _words([text]) for word in block] == words


def test_merges_do_not_depend_on_the_order_of_lines_and_documents(merged):
    lines = TEXT.splitlines(keepends=True)
    random.Random(0).shuffle(lines)
    assert ByteTokenizer.train([b"".join(lines)], 300).merges == merged.merges
    assert ByteTokenizer.train(lines, 300).merges == merged.merges


def test_merges_do_not_depend_on_threads(merged):
    script = (
        "import sys; from minigen.text.tokenizer import ByteTokenizer;"
        "print(ByteTokenizer.train([sys.stdin.buffer.read()], 300).merges)"
    )
    for threads in ("1", "2", "8"):
        environment = {**os.environ, "RAYON_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "true"}
        run = subprocess.run(
            [sys.executable, "-c", script], input=TEXT, capture_output=True, env=environment
        )
        assert run.stdout.decode().strip() == str(merged.merges)


def naive_merges(words, count):
    """Byte-pair encoding as the paper has it: most frequent pair, then lowest ids."""
    words = [list(word) for word in words]
    merges = []
    while len(merges) < count:
        pairs = {}
        for word in words:
            for pair in pairwise(word):
                pairs[pair] = pairs.get(pair, 0) + 1
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        for word in words:
            i = 0
            while i < len(word) - 1:
                if (word[i], word[i + 1]) == best:
                    word[i : i + 2] = [257 + len(merges)]
                i += 1
        merges.append(best)
    return tuple(merges)


def test_merges_are_those_of_a_plain_implementation():
    draw = random.Random(0)
    for _ in range(20):
        words = [bytes(draw.choices(b"abc", k=draw.randint(4, 12))) for _ in range(40)]
        assert ByteTokenizer.train(words, 280).merges == naive_merges(words, 23)


def test_where_a_long_text_is_cut_changes_no_id(tokenizer):
    text = (TEXT + b" " * 70 + b"x" * 70 + b"\t" * 61 + b"\n").decode("latin-1")
    whole = tokenizer.encode(text.encode("latin-1")).ids
    for size in (1, 2, 7, 61, 64):
        blocks = [text[start : start + size] for start in range(0, len(text), size)]
        assert [i for array in tokenizer.encode_stream(blocks) for i in array.tolist()] == whole


@pytest.mark.parametrize("block", ["the …", "\u0101", "\U0001f600", "\ud800", b"the", 5, None])
def test_a_block_that_holds_more_than_characters_is_refused(tokenizer, block):
    for read in (
        ByteTokenizer().encode_stream,
        tokenizer.encode_stream,
        lambda blocks: [ByteTokenizer.train_stream(blocks, 300)],
    ):
        with pytest.raises(OptionError, match=r"^a block of text must hold characters from chr"):
            list(read(iter(["the", block])))


@pytest.mark.parametrize("texts", ["the", b"the", 5, None])
def test_what_is_no_list_of_blocks_is_refused(tokenizer, texts):
    for read in (tokenizer.encode_stream, lambda x: ByteTokenizer.train_stream(x, 300)):
        with pytest.raises(OptionError, match=r"^texts must be a list of str \(got"):
            read(texts)
    with pytest.raises(OptionError, match=r"^vocab_size must be a whole number \(got"):
        ByteTokenizer.train_stream(["the"], texts if texts != 5 else 5.0)


def test_documents_that_come_one_by_one_are_texts_as_well():
    documents = [b"the the", b"\xff the"]
    assert ByteTokenizer.train(iter(documents), 260).merges
    with pytest.raises(OptionError, match=r"^a text must be a str or bytes \(got 5\)$"):
        ByteTokenizer.train(iter([b"the", 5]), 260)  # type: ignore[list-item]


def test_the_control_character_of_a_stream_is_the_control_token(tokenizer):
    texts = ["the\u0100", " crow\u0100 sat in the old\u0100\u0100"]
    ids = np.concatenate(list(tokenizer.encode_stream(texts)))
    parts = np.split(ids, np.flatnonzero(ids == END_OF_TEXT))
    assert [tokenizer.decode(part) for part in parts] == [
        b"the",
        b" crow",
        b" sat in the old",
        b"",
        b"",
    ]


def test_many_words_are_new_at_once():
    tokenizer = ByteTokenizer([(119, 119)])
    text = " ".join(f"ww{chr(97 + i // 26 // 26)}{i:x}" for i in range(1600)).encode()
    assert tokenizer.encode(text).ids == [
        i for word in re.split(rb"(ww)", text) for i in ([257] if word == b"ww" else word)
    ]


def test_forgetting_words_changes_no_id(merged, monkeypatch):
    whole = merged.encode(TEXT).ids
    monkeypatch.setattr("minigen.text.tokenizer._REMEMBERED_WORDS", 3)
    assert merged.encode(TEXT).ids == whole
    forgetful = ByteTokenizer([(97, 98)])
    for text, known in (("a b c", {"a", " b", " c"}), ("a", {"a", " b", " c"}), ("d", {"d"})):
        forgetful.encode(text)
        assert set(forgetful._tokens_of_word) == known


@pytest.mark.parametrize(
    ("text", "merges"),
    [(b"ab ab", ((97, 98), (32, 257))), (b"a", ()), (b"", ()), (b"a b\nc", ((32, 98),))],
)
def test_merges_end_where_no_pair_is_left(text, merges):
    assert ByteTokenizer.train([text], 640).merges == merges


def test_a_vocabulary_smaller_than_the_bytes_is_refused():
    with pytest.raises(OptionError, match=r"vocab_size must be at least 257 \(got 256\)"):
        ByteTokenizer.train([b"ab"], 256)


@pytest.mark.parametrize("vocab_size", [2**21 + 1, 2**40, 10**5000], ids=["1", "2", "3"])
def test_a_vocabulary_larger_than_any_model_is_refused_before_memory_is_taken(vocab_size):
    with pytest.raises(OptionError, match=r"vocab_size must be at most 2097152 \(got "):
        ByteTokenizer.train([b"ab"], vocab_size)


def test_a_vocabulary_of_just_as_many_tokens_as_are_allowed_is_learned(monkeypatch):
    monkeypatch.setattr("minigen.text.tokenizer.MOST_TOKENS", 259)
    assert len(ByteTokenizer.train([b"aa aa bb bb"], 259).merges) == 2
    with pytest.raises(OptionError, match="at most 259"):
        ByteTokenizer.train([b"aa aa bb bb"], 260)


def test_a_state_goes_through_json(tokenizer):
    copy = ByteTokenizer.from_state(json.loads(json.dumps(tokenizer.state())))
    assert copy.merges == tokenizer.merges
    assert copy.encode(TEXT).ids == tokenizer.encode(TEXT).ids


@pytest.mark.parametrize(
    "state",
    [
        None,
        {},
        {"merge": []},
        {"merges": [], "more": 1},
        {"merges": None},
        {"merges": "ab"},
        {"merges": [[1]]},
        {"merges": [[1, 2, 3]]},
        {"merges": [[1, 2.0]]},
        {"merges": [[1, True]]},
        {"merges": [["a", "b"]]},
    ],
)
def test_a_state_of_another_shape_is_refused(state):
    with pytest.raises(MinigenError, match=r"^a tokenizer must hold a list of pairs of token ids"):
        ByteTokenizer.from_state(state)


JOINED = "must join two tokens below {} other than <|endoftext|> (got {}, {}); the tokenizer is dam"


@pytest.mark.parametrize(
    ("merges", "message"),
    [
        ([[1, 257]], "merge 0 " + JOINED.format(257, 1, 257)),
        ([[257, 1]], "merge 0 " + JOINED.format(257, 257, 1)),
        ([[1, 2], [1, 258]], "merge 1 " + JOINED.format(258, 1, 258)),
        ([[256, 1]], "merge 0 " + JOINED.format(257, 256, 1)),
        ([[1, 256]], "merge 0 " + JOINED.format(257, 1, 256)),
        ([[-1, 1]], "merge 0 " + JOINED.format(257, -1, 1)),
        ([[1, -1]], "merge 0 " + JOINED.format(257, 1, -1)),
        ([[1, 2], [1, 2]], "two merges spell the same token; the tokenizer is damaged"),
        ([[1, 2], [2, 3], [1, 258], [257, 3]], "two merges spell the same token"),
        (
            [[97, 97]] + [[256 + i, 256 + i] for i in range(1, 6)],
            "token 262 must be at most 61 bytes long (got 64); the tokenizer is damaged",
        ),
        (
            [[97, 97]] + [[256 + i, 97] for i in range(1, 61)],
            "token 317 must be at most 61 bytes long (got 62); the tokenizer is damaged",
        ),
    ],
)
def test_damaged_merges_are_refused_before_they_fill_the_memory(merges, message):
    with pytest.raises(MinigenError, match="^" + re.escape(message)):
        ByteTokenizer.from_state({"merges": merges})


def test_merges_may_join_the_first_and_the_last_token_up_to_61_bytes():
    merges = [(0, 255), (257, 0), (0, 258), *((259 + i, 97) for i in range(57))]
    assert ByteTokenizer(merges).merges == tuple(merges)
    assert len(ByteTokenizer(merges).token_bytes(256 + len(merges))) == 61


def test_the_byte_vocabulary_does_not_import_the_library():
    script = (
        "import sys; from minigen.text.tokenizer import ByteTokenizer as B;"
        "b = B.train([b'a'], 257);"
        "b.decode(b.encode('hello').ids); print('tokenizers' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True)
    assert run.stdout == b"False\n"


def test_a_large_vocabulary_takes_wider_ids():
    pairs = [(left, right) for left in range(256) for right in range(256)]
    assert ByteTokenizer(pairs[: 65536 - 257]).dtype == np.uint16
    wide = ByteTokenizer([*pairs[: 65536 - 257], (255, 255)])
    assert wide.dtype == np.uint32
    assert wide.encode(b"\xff\xff \0\0").ids == [65536, 32, 257]


def test_a_text_is_bytes():
    assert to_bytes("é") == to_bytes("é".encode()) == b"\xc3\xa9"
    with pytest.raises(OptionError, match=r"^a text must be a str or bytes \(got 5\)$"):
        to_bytes(5)


def test_several_lists_of_ids_are_refused_and_not_run_together():
    with pytest.raises(OptionError, match=r"must be one list \(got shape \(1, 2\)\)"):
        ByteTokenizer().decode([[1, 2]])


def test_a_decoder_holds_back_what_may_become_a_character_and_nothing_else():
    # 64 characters in a row differ in their last byte alone.
    characters = [chr(i).encode() for i in range(0x80, 0x110000, 64) if not 0xD800 <= i < 0xE000]
    begun = {character[:n] for character in characters for n in range(1, len(character))}
    draw, bytes_ = (
        random.Random(0),
        b"a\x80\x9f\xa0\xbf\xc0\xc3\xe0\xe2\xed\xef\xf0\x90\x8f\xf4\xf5",
    )
    for _ in range(2000):
        decoder, data, text = TextDecoder(), b"", ""
        for byte in draw.choices(bytes_, k=8):
            data += bytes([byte])
            text += decoder.decode(bytes([byte]))
            held = max((n for n in range(1, 4) if data[-n:] in begun and n <= len(data)), default=0)
            assert text == data[: len(data) - held].decode(errors="replace")
        assert text + decoder.decode(b"", final=True) == data.decode(errors="replace")
