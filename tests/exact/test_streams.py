"""Streams: word i is a pure function of (seed, name, i), computed here from the definition."""

import hashlib
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from copy import copy, deepcopy
from fractions import Fraction
from threading import Thread

import numpy as np
import pytest

from minigen.errors import OptionError
from minigen.exact.streams import Stream, bounded, unit_interval

TOP = 2**64 - 1  # the largest word


def philox_block(counter: int, key: int) -> list[int]:
    """Philox 4×64-10 in Python integers, from the paper: ten rounds on a 256-bit counter."""
    c = [counter >> (64 * i) & TOP for i in range(4)]
    k = [key >> (64 * i) & TOP for i in range(2)]
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [second >> 64 ^ c[1] ^ k[0], second & TOP, first >> 64 ^ c[3] ^ k[1], first & TOP]
        k = [(k[0] + 0x9E3779B97F4A7C15) & TOP, (k[1] + 0xBB67AE8584CAA73B) & TOP]
    return c


def word_by_definition(seed: int, name: str, i: int) -> int:
    digest = hashlib.sha256(f"minigen:{seed}:{name}".encode()).digest()
    key = int.from_bytes(digest[:16], "little")
    return philox_block(i // 4 + 1, key)[i % 4]  # numpy's first block uses counter + 1


PINNED = {
    (0, "optimizer"): [
        0xC2693E4D15508249,
        0x552C7CFBB3ADEBF7,
        0x0C6FCEC6541415EB,
        0xCA601803384853D9,
        0xC38C1581B2AA687B,
    ],
    (42, "inference"): [
        0x49C5F227154B82DE,
        0x933EA35BFAA9ABC8,
        0xB1053E55DD9A8229,
        0x62C0EFA129D80EEB,
        0xE25834EDED51C684,
    ],
    (2**64 + 1, "inference/draft"): [
        0xF83F03CBDAC2E843,
        0x2C66946F6A44A4FF,
        0xAB9B769FEE6B0694,
        0xE6F6D005D1BAB8F4,
        0x30DF4987D99227C6,
    ],
}


def test_the_definition_reproduces_the_published_vector_of_philox():
    # Random123's known answer for counter 0, key 0.
    assert philox_block(0, 0) == [
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    ]


@pytest.mark.parametrize("pair", PINNED, ids=str)
def test_words_are_those_pinned_and_those_of_the_definition(pair):
    words = Stream(*pair).words(10)
    assert words.dtype == np.uint64
    assert words[:5].tolist() == PINNED[pair]
    assert words.tolist() == [word_by_definition(*pair, i) for i in range(10)]


@pytest.mark.parametrize("position", [*range(10), 10**6 + 3, 2**40 - 1, 2**64 - 1, 2**64 + 2])
def test_any_word_is_reached_by_its_position_alone(position):
    expected = word_by_definition(5, "inference", position)
    assert Stream(5, "inference", position).word() == expected
    stream = Stream(5, "inference")
    stream.words(7)
    stream.position = position
    assert stream.word() == expected
    assert stream.position == position + 1


def test_words_do_not_depend_on_how_many_are_asked_for_at_a_time():
    whole = Stream(0, "optimizer").words(60).tolist()
    stream, found = Stream(0, "optimizer"), []
    for n in (0, 1, 2, 3, 4, 5, 0, 1, 8, 9, 1, 26):
        assert stream.position == len(found)
        found += stream.words(n).tolist()
    assert found == whole
    one_by_one = Stream(0, "optimizer")
    assert [one_by_one.word() for _ in range(60)] == whole


def test_position_is_the_whole_state_and_every_draw_moves_it_by_the_words_it_took():
    stream = Stream(3, "init")
    assert stream.position == 0
    stream.word()
    stream.integers(5, 10)
    stream.uniforms(7)
    stream.words(0)
    assert stream.position == 13
    assert type(stream.position) is int
    after = stream.words(6).tolist()
    assert Stream(3, "init", 13).words(6).tolist() == after
    stream.position = 13  # back again
    assert stream.words(6).tolist() == after


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.int64])
def test_a_stream_goes_on_where_a_number_of_numpy_would_wrap(kind):
    most = int(np.iinfo(kind).max)
    stream = Stream(0, "x", position=kind(most))
    assert [stream.word(), stream.word()] == Stream(0, "x", most).words(2).tolist()
    stream.position = kind(most - 1)
    stream.words(kind(3))
    stream.words(kind(100))
    assert stream.position == most + 102


def test_threads_that_share_a_stream_get_each_word_once():
    stream, n = Stream(0, "x"), 4000

    def draw(_):
        one_by_one = [stream.word() for _ in range(n // 2)]
        return one_by_one + [x for _ in range(n // 4) for x in stream.words(2).tolist()]

    with ThreadPoolExecutor(4) as pool:
        found = [word for words in pool.map(draw, range(4)) for word in words]
    assert sorted(found) == sorted(Stream(0, "x").words(4 * n).tolist())
    assert stream.position == 4 * n


def test_who_draws_in_the_midst_of_a_draw_does_not_wait_for_itself():
    class Interrupted(Stream):
        def _words_from(self, position, n):
            if n == 3:
                self.word()
            return super()._words_from(position, n)

    thread = Thread(target=lambda: Interrupted(0, "x").words(3), daemon=True)
    thread.start()
    thread.join(10.0)
    assert not thread.is_alive()


@pytest.mark.parametrize("twin_of", [copy, deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_copy_of_a_stream_goes_on_from_there_by_itself(twin_of):
    stream = Stream(5, "x", 7)
    stream.word()
    twin = twin_of(stream)
    assert (twin.position, repr(twin)) == (8, repr(stream))
    after = [stream.word() for _ in range(100)]
    assert twin.position == 8
    assert [twin.word() for _ in range(100)] == after == Stream(5, "x", 8).words(100).tolist()


def test_streams_of_other_seeds_or_names_share_no_word():
    streams = [Stream(s, name) for s in (0, 1, 10) for name in ("init", "inference", "inference/1")]
    words = {word for stream in streams for word in stream.words(50).tolist()}
    assert len(words) == len(streams) * 50


def test_drawing_from_one_stream_leaves_another_where_it_was():
    alone = Stream(0, "optimizer").words(12).tolist()
    optimizer, inference = Stream(0, "optimizer"), Stream(0, "inference")
    found = []
    for _ in range(4):
        found += optimizer.words(3).tolist()
        inference.words(5)
        Stream(0, "optimizer").words(1)
    assert found == alone


@pytest.mark.parametrize("below", [1, 2, 3, 257, 1000, 2**31, 2**32 - 1, 2**32])
def test_integers_are_the_words_scaled_in_python_integers(below):
    words = [0, 1, 2**32 - 1, 2**32, 2**63, TOP - 2**32, TOP, *Stream(1, "x").words(200).tolist()]
    found = bounded(np.array(words, dtype=np.uint64), below)
    assert found.dtype == np.int64
    assert found.tolist() == [word * below // 2**64 for word in words]
    assert found.max() == below - 1
    drawn = Stream(1, "x").integers(200, below)
    assert drawn.tolist() == found[7:].tolist()


@pytest.mark.parametrize("below", [0, -1, 2**32 + 1])
def test_integers_refuse_a_range_that_32_bits_do_not_hold(below):
    with pytest.raises(OptionError, match=rf"^below must lie in 1 … 2\^32 \(got {below}\)$"):
        Stream(0, "x").integers(1, below)


def test_uniforms_are_the_upper_53_bits_and_stay_below_one():
    words = [0, 2047, 2048, 2**63, TOP, *Stream(1, "x").words(200).tolist()]
    found = unit_interval(np.array(words, dtype=np.uint64))
    assert found.dtype == np.float64
    assert [Fraction(x) for x in found.tolist()] == [Fraction(w >> 11, 2**53) for w in words]
    assert found.max() == 1 - 2.0**-53
    assert Stream(1, "x").uniforms(200).tolist() == found[5:].tolist()


def test_uniforms_fill_the_interval_evenly():
    # 100 bins of 1,000 expected draws, each ±3.2 %: six sigma is 19 %; a fair stream fails this
    # for one seed in 10^7, and the seed is fixed.
    bins = np.bincount((Stream(0, "x").uniforms(100_000) * 100).astype(int), minlength=100)
    assert np.abs(bins - 1000).max() < 190


@pytest.mark.parametrize("position", [-1, 2**258])
def test_a_position_that_no_word_has_is_refused(position):
    with pytest.raises(OptionError, match=rf"^position must be .* 2\^258 \(got {position}\)$"):
        Stream(0, "init", position)
    stream = Stream(0, "init", 3)
    with pytest.raises(OptionError, match=rf"\(got {position}\)$"):
        stream.position = position
    assert stream.position == 3


@pytest.mark.parametrize("seed", [-1, -(10**5000), np.int64(-7)], ids=["-1", "long", "numpy"])
def test_a_seed_below_0_names_no_stream(seed):
    with pytest.raises(OptionError, match=r"^seed must be a whole number of at least 0 \(got "):
        Stream(seed, "x")


def test_seeds_may_be_any_integer_from_0_on():
    for seed in (0, 2**64, 2**200):
        assert Stream(seed, "x").word() == word_by_definition(seed, "x", 0)
    assert Stream(np.int64(7), "x").word() == Stream(7, "x").word()  # type: ignore[arg-type]


def test_no_global_generator_is_read_or_disturbed():
    np.random.seed(1)
    random.seed(1)
    numpy_before, python_before = np.random.get_state(legacy=False), random.getstate()
    found = Stream(0, "optimizer").words(10).tolist()
    numpy_after = np.random.get_state(legacy=False)
    assert numpy_after["state"]["key"].tobytes() == numpy_before["state"]["key"].tobytes()
    assert numpy_after["state"]["pos"] == numpy_before["state"]["pos"]
    assert random.getstate() == python_before
    np.random.seed(2)
    assert Stream(0, "optimizer").words(10).tolist() == found


@pytest.mark.parametrize("n", [-1, 1.5, "2", None])
def test_a_number_of_words_that_is_none_is_refused(n):
    stream = Stream(0, "x")
    with pytest.raises(OptionError, match=r"^n must be a whole number of at least 0 \(got .+\)$"):
        stream.words(n)
    assert stream.position == 0


@pytest.mark.parametrize(("seed", "name"), [(10**5000, "x"), (0, "\ud800")], ids=["seed", "name"])
def test_what_cannot_be_written_names_no_stream(seed, name):
    with pytest.raises(OptionError, match=r"a seed of at most 4300 digits and a name of Unicode"):
        Stream(seed, name)
