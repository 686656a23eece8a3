"""A public call reads its rules off its signature: which values fit, and how they are named."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
import pytest
from numpy.typing import ArrayLike

from minigen.arguments import checked, is_list
from minigen.decoding.policy import Policy
from minigen.errors import MinigenError, OptionError, likeness, nearest, shown
from minigen.exact.streams import Stream
from minigen.model.head import loss_and_gradient
from minigen.text.tokenizer import ByteTokenizer
from minigen.training.config import Config
from minigen.training.run import Run

NAN = float("nan")
INTEGERS = [0, -1, 1 << 70, np.int64(5), np.uint8(5)]
NUMBERS = [*INTEGERS, 0.5, NAN, np.float32(0.5)]
BOOLS = [True, False, np.True_]
TEXTS = ["", "a", np.str_("a")]
OTHERS = [1j, {1}, object(), Path, bytearray(b"a")]


class Sized:
    """Has a length and no items."""

    def __len__(self) -> int:
        return 0


class Indexed:
    """Has items and no length."""

    def __getitem__(self, index: int) -> int:
        return [1, 2][index]


RULES: list[tuple[Any, str, list[Any], list[Any]]] = [  # annotation, its words, what fits, what not
    (Any, "", [None, *NUMBERS, *BOOLS, *TEXTS, *OTHERS], []),
    (object, "", [None, *NUMBERS, *BOOLS, *TEXTS, *OTHERS], []),
    (None, "None", [None], [0, False, ""]),
    (bool, "True or False", BOOLS, [0, 1, None, "True", np.int64(1), [True]]),
    (int, "a whole number", INTEGERS, [0.0, "1", None, *BOOLS, *OTHERS, [1], np.array([1])]),
    (float, "a number", NUMBERS, ["1", None, *BOOLS, *OTHERS, [1.0], np.array([0.5])]),
    (str, "a str", TEXTS, [b"a", None, 5, *OTHERS, ["a"]]),
    (bytes, "bytes", [b"", b"a", np.bytes_(b"a")], ["a", None, 5, *OTHERS, [97]]),
    (Path, "a Path", [Path("a")], ["a", None, *OTHERS]),
    (int | None, "a whole number or None", [None, 5], [0.5, True, ""]),
    (str | bytes | None, "a str, bytes or None", ["a", b"a", None], [5, ["a"]]),
    (Sequence[int], "a list of whole numbers", [[], [1], (1, 2), range(3), np.array([1])],
     [1, "1", b"1", {1: 2}, {1}, iter([1]), [0.5], [1, "1"], [[1]], np.array([[1]]), np.array(1),
      bytearray(b"1"), Sized(), Indexed(), None]),
    (Sequence[float], "a list of numbers", [[0.5, 1]], [["a"], [True]]),
    (Sequence[str | bytes], "a list of str or bytes", [["a", b"a"], np.array(["a"])], ["a", [1]]),
    (Sequence[str | Path], "a list of str or Path", [["a", Path("a")]], [[b"a"]]),
    (Sequence[bytes | None], "a list of bytes or None", [[b"a", None]], [["a"]]),
    (Sequence[tuple[int, int]], "a list of pairs", [[(1, 2)], [[1, 2]], []],
     [[(1,)], [(1, 2, 3)], [1], ["ab"], [(1, "a")], [{1, 2}], (1, 2)]),
    (tuple[int, int], "a pair", [(1, 2), [1, 2]], [(1,), (1, 2, 3), 1, "ab", np.array([1, 2])]),
    (Iterable[bytes], "a list of bytes", [[b"a"], iter([b"a"]), {b"a"}, (b for b in [1])],
     [b"a", "a", ["a"], {b"a": 1}, 5, np.array(5)]),
    (Mapping[str, object], "a dict", [{}, {"a": 1}], [[], "a", None, [("a", 1)]]),
    (dict[str, Any], "a dict", [{}, {"a": None}], [[], "a", None]),
    (Mapping[str, Sequence[object]], "a dict of lists", [{}, {"a": [1, "b"]}], [{"a": 1}, []]),
    (Callable[[int], None], "a function", [len, lambda: None, int], [5, "len", None]),
    (ArrayLike, "numbers", [5, 0.5, [1], [[1], [2]], [True], np.zeros((2, 2)), range(3), []],
     ["a", ["a"], [[1], [2, 3]], None, 1j, [b"a"], {1: 2}]),
    (Config, 'a Config, as Config.load("fables") gives', [Config.load()], ["fables", None, Config]),
    (Run, "a Run, as Run(config) gives", [], [Config.load(), None]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("hint", "words", "right", "wrong"), RULES, ids=[str(hint)[:60] for hint, *_ in RULES]
)
def test_each_annotation_takes_what_it_says_and_names_it(
    hint: Any, words: str, right: list[Any], wrong: list[Any]
) -> None:
    def call(value: Any) -> Any:
        return value

    call.__annotations__["value"] = hint
    asked = checked(call)
    for value in right:
        given = asked(value)
        assert given is value or (type(given) is int and given == value)
    for value in wrong:
        with pytest.raises(OptionError) as caught:
            asked(value)
        assert str(caught.value) == f"value must be {words} (got {shown(value)})"


def test_a_whole_number_of_numpy_counts_on_where_it_would_wrap() -> None:
    @checked
    def double(number: int, *, other: int | None = None) -> list[int]:
        return [2 * number, 2 * (other or 0)]

    assert double(np.uint8(200), other=np.int8(-128)) == [400, -256]


def test_of_a_list_whose_items_nobody_asks_about_anything_is_one() -> None:
    assert is_list([None, "a"], Sequence)
    assert not is_list("a", Sequence)


class Options(TypedDict, total=False):
    """What may be given beside."""

    top_k: int
    min_p: float


def test_names_are_those_of_the_signature_and_of_its_table_of_options() -> None:
    @checked
    def listed(prompt: str, *, seed: int = 0, **options: Unpack[Options]) -> dict[str, Any]:
        return {"prompt": prompt, "seed": seed, **options}

    @checked
    def unlisted(prompt: str, **options: Any) -> dict[str, Any]:
        return options

    class Thing:
        @checked
        def method(self, size: int = 1) -> int:
            return size

        @classmethod
        @checked
        def made(cls, size: int = 1) -> int:
            return size

    given = {"prompt": "a", "seed": 1, "top_k": "whoever takes it says what", "min_p": 0.5}
    assert listed(**given) == given  # type: ignore[arg-type]
    assert unlisted("a", whatever=1) == {"whatever": 1}
    assert Thing().method(size=2) == Thing.made(2) == 2
    for call, wrong, meant in (
        (listed, "prompts", "prompt"),
        (listed, "topk", "top_k"),
        (listed, "options", "prompt"),
        (Thing().method, "selfs", "size"),
        (Thing.made, "clss", "size"),
    ):
        with pytest.raises(OptionError) as caught:
            call(**{wrong: 5})
        message = f"unknown option {wrong!r}: the nearest known one is {meant}"
        assert str(caught.value) == message
    with pytest.raises(OptionError, match=r"^seed must be a whole number \(got 'x'\)$"):
        listed("a", seed="x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes 1 positional argument but 2 were given"):
        listed("a", "b")  # type: ignore[arg-type, misc]


def test_values_are_shown_in_one_line_of_80_characters_at_most() -> None:
    class Lines:
        def __repr__(self) -> str:
            return "a \n  b\nc"

    assert shown(Lines()) == "a b c"
    assert shown("x" * 78) == repr("x" * 78)
    assert shown("x" * 79) == "'" + "x" * 76 + "..."
    assert shown(1 << 20_000) == "a number too long to show"


def test_the_nearest_name_is_the_one_with_most_in_common() -> None:
    assert nearest("temprature", ["top_p", "temperature", "min_p"]) == "temperature"
    assert nearest("mn_p", ["top_p", "temperature", "min_p"]) == "min_p"
    assert (likeness("tide", "diet"), likeness("diet", "tide")) == (0.25, 0.5)
    assert likeness("a" * 101, "a" * 100) == 1.0  # of an endless one, the start


LONG = 10**5000  # Python writes no integer of so many digits


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (OptionError, lambda: Policy().probabilities([0.0, 1.0], [LONG])),
        (OptionError, lambda: Policy().probabilities([0.0, 1.0], [-LONG])),
        (OptionError, lambda: loss_and_gradient([0.0, 1.0], LONG)),
        (OptionError, lambda: Stream(0, "x").integers(1, below=LONG)),
        (MinigenError, lambda: ByteTokenizer([(LONG, 1)])),
        (OptionError, lambda: ByteTokenizer.train([b"a"], -LONG)),
    ],
)
def test_a_number_too_long_to_show_is_refused_in_one_line(
    error: type[MinigenError], call: Callable[[], object]
) -> None:
    with pytest.raises(error, match="a number too long to show") as caught:
        call()
    assert "\n" not in str(caught.value)
