"""The self-check: a process that does not compute as the bits need it is refused in one line."""

import ctypes
import platform
import struct
from contextlib import contextmanager
from fractions import Fraction

import numpy as np
import pytest

from minigen import Config, Run
from minigen.errors import MinigenError
from minigen.exact import selfcheck
from minigen.exact.arithmetic import exact_matmul, grid_bits
from minigen.exact.selfcheck import check, fault_of_numbers
from minigen.model.model import Model
from minigen.text import corpus, token_cache
from minigen.text.corpus import Tokens
from minigen.text.tokenizer import ByteTokenizer
from minigen.training import checkpoint

on_linux_x86 = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"),
    reason="sets registers of x86-64 by glibc's names",
)


@contextmanager
def floating_point(mxcsr=0, rounding=0):
    """Set control bits of SSE, or a rounding mode of both units, for the block alone."""
    libm = ctypes.CDLL("libm.so.6")
    kept, changed = ctypes.create_string_buffer(32), ctypes.create_string_buffer(32)
    libm.fegetenv(kept)
    changed.raw = kept.raw
    struct.pack_into("<I", changed, 28, struct.unpack_from("<I", kept, 28)[0] | mxcsr)
    libm.fesetenv(changed)
    libm.fesetround(rounding)
    try:
        yield
    finally:
        libm.fesetenv(kept)


def by_x87(operation):
    """Return an operator of RoundedTwice."""

    def apply(a, b):
        exact = operation(Fraction(a.value), Fraction(getattr(b, "value", b)))
        return RoundedTwice(rounded(rounded(exact, 64), 53))

    return apply


class RoundedTwice:
    """A float as x87 computes it: rounded to 64 bits, then to 53."""

    def __init__(self, value):
        self.value = float(value)

    __add__ = by_x87(lambda a, b: a + b)
    __sub__ = by_x87(lambda a, b: a - b)
    __mul__ = by_x87(lambda a, b: a * b)
    __truediv__ = by_x87(lambda a, b: a / b)

    def __neg__(self):
        return RoundedTwice(-self.value)

    def __eq__(self, other):
        return self.value == getattr(other, "value", other)

    def __gt__(self, other):
        return self.value > other

    def __bool__(self):
        return self.value != 0.0

    def __hash__(self):
        return hash(self.value)


def rounded(x, bits):
    """Round a fraction to so many bits, ties to even; exponents have no limit."""
    if not x:
        return x
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    scale = Fraction(2) ** (bits - exponent - (abs(x) >= Fraction(2) ** exponent))
    return round(x * scale) / scale


def message(*arguments, **options):
    with pytest.raises(MinigenError) as caught:
        check(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("longest_sum", [1, 2, 37, 512, 5000, 1 << 21])
@pytest.mark.parametrize("columns", [1, 257, 1 << 21])
def test_this_process_is_admitted_whatever_the_shape(longest_sum, columns):
    check(longest_sum, columns)


@on_linux_x86
@pytest.mark.parametrize(
    ("mode", "name"), [(0x400, "downwards"), (0x800, "upwards"), (0xC00, "towards zero")]
)
def test_another_rounding_mode_is_refused_and_named(mode, name):
    with floating_point(rounding=mode):
        said = message(512, 257)
    assert f"floats are rounded {name}, not to the nearest" in said


@on_linux_x86
@pytest.mark.parametrize("bits", [0x8000, 0x0040, 0x8040], ids=["flush", "denormals", "both"])
def test_subnormals_that_count_as_zero_are_refused_and_named(bits):
    with floating_point(mxcsr=bits):
        said = message(512, 257)
    assert "subnormal floats are flushed to zero" in said


@on_linux_x86
def test_no_run_and_no_model_is_made_in_such_a_process():
    config = Config.load("fables")
    run = Run(config)
    with floating_point(rounding=0x400):
        for make in (lambda: Model(257, 2, 3), lambda: Run(config)):
            with pytest.raises(MinigenError, match="rounded downwards"):
                make()
    assert Run(config).fingerprint == run.fingerprint


def test_numbers_that_are_rounded_twice_are_refused_and_named():
    assert "rounded twice (x87" in fault_of_numbers(RoundedTwice)
    assert fault_of_numbers(float) == ""


@pytest.mark.parametrize("whose", ["Python's", "numpy's"])
def test_it_is_told_whose_numbers_are_wrong(whose, monkeypatch):
    wrong = {"Python's": float, "numpy's": np.ndarray}[whose]
    fault = lambda number: "numbers" * isinstance(number(1.0), wrong)  # noqa: E731
    monkeypatch.setattr(selfcheck, "fault_of_numbers", fault)
    assert message(512, 257).endswith(f": {whose} numbers")


def test_a_part_of_a_vector_that_computes_otherwise_is_noticed():
    """As where one unit of several is in another mode."""
    assert "in an unknown way" in fault_of_numbers(lambda x: np.array([x, x, 0.0]))


@pytest.mark.parametrize("position", range(3))
def test_each_operation_is_looked_at_by_itself(position):
    """What rounds twice in one operation alone is caught by that one."""

    class Partly(RoundedTwice):
        pass

    for i, name in enumerate(("__add__", "__mul__", "__truediv__")):
        if i != position:
            setattr(Partly, name, lambda a, b, n=name: Partly(getattr(a.value, n)(b.value)))
    assert "rounded twice" in fault_of_numbers(Partly)


def in_single_precision(a, b):
    return np.matmul(a.astype(np.float32), b.astype(np.float32)).astype(np.float64)


def with_the_last_bit_lost(a, b):
    return np.floor(exact_matmul(a, b) / 2.0) * 2.0


def with_one_entry_wrong(a, b):
    product = exact_matmul(a, b)
    product[-1, -1] += 1.0
    return product


def split_in_halves_of_factors(a, b):
    """Three products of 21 bits instead of four: what emulations on matrix units drop."""
    low = a - np.rint(a / 2.0**10) * 2.0**10
    return exact_matmul(a - low, b)


@pytest.mark.parametrize(
    "multiply",
    [
        in_single_precision,
        with_the_last_bit_lost,
        with_one_entry_wrong,
        split_in_halves_of_factors,
    ],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("longest_sum", [2, 512, 8192])
def test_a_blas_that_is_not_exact_is_refused_and_named(multiply, longest_sum):
    assert "BLAS does not add products" in message(longest_sum, 257, multiply=multiply)


@pytest.mark.parametrize("wrong", [0, 1])
def test_each_of_both_products_is_looked_at(wrong):
    """As a step needs them: h·W, and the transposed ones of its gradient."""
    ways = [exact_matmul, exact_matmul]
    ways[wrong] = with_one_entry_wrong
    assert "BLAS does not add products" in message(512, 257, lambda a, b: ways.pop(0)(a, b))


@pytest.mark.parametrize(
    ("longest_sum", "columns", "rows", "inner", "side"),
    [
        (512, 257, 8, 512, 64),
        (2, 1, 8, 2, 1),
        (2, 257, 8, 2, 64),
        (5000, 3, 6, 5000, 3),
        (5000, 257, 6, 5000, 6),
        (1 << 15, 9, 1, 1 << 15, 1),
        (1 << 21, 9, 1, 1 << 15, 1),
    ],
)
def test_it_tries_the_models_products_up_to_a_limit_with_sums_near_2_to_the_53(
    longest_sum, columns, rows, inner, side
):
    seen = []
    check(longest_sum, columns, lambda a, b: seen.append((a, b)) or exact_matmul(a, b))
    (a, b), _ = seen
    assert (a.shape, b.shape) == ((rows, inner), (inner, side))
    largest = 2.0 ** grid_bits(inner) - 1.0
    assert np.abs(a).max() == np.abs(b).max() == largest
    assert 2.0**51 < np.abs(exact_matmul(a, b)).max() == inner * largest**2 < 2.0**53


@pytest.mark.parametrize("state", ["raise", "warn"])
def test_the_check_itself_raises_no_warning_of_numpy(state):
    with np.errstate(all=state):
        check(512, 257)


# ── Byte order ───────────────────────────────────────────────────────────────────────────────────


def swapped(array):
    """Return the same numbers in the other byte order, as another machine holds them."""
    return array.astype(array.dtype.newbyteorder(">"))


def test_fingerprint_and_checksums_do_not_ask_for_the_byte_order_of_the_machine():
    tensors = {name: np.linspace(0.0, 1.0, 12).reshape(3, 4) for name in checkpoint.PARAMETERS}
    other = {name: swapped(tensor) for name, tensor in tensors.items()}
    assert checkpoint.fingerprint(other) == checkpoint.fingerprint(tensors)
    assert bytes(checkpoint._bytes(other["E"])) == bytes(checkpoint._bytes(tensors["E"]))


def test_tokens_become_text_and_files_in_one_byte_order(tmp_path):
    tokens = np.array(ByteTokenizer().encode("Once, a fox").ids, "<u2")
    texts = [
        "".join(corpus._characters(Tokens(array, ByteTokenizer()), lambda done, total: None))
        for array in (tokens, swapped(tokens))
    ]
    assert texts == ["Once, a fox"] * 2
    for name, array in (("a", tokens), ("b", swapped(tokens))):
        token_cache.keep(tmp_path / name, "a recipe", blocks=[array])
    a, b = (next((tmp_path / name).iterdir()).read_bytes() for name in "ab")
    assert a == b
