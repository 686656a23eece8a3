"""The twin: minigen's generation in JavaScript gives what Python gives, bit for bit."""

import base64
import hashlib
import itertools
import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from minigen.decoding.generation import Task, complete, generate, padded_contexts
from minigen.decoding.policy import Policy
from minigen.errors import OptionError
from minigen.exact.arithmetic import integer_exp, log
from minigen.exact.streams import Stream
from minigen.model.model import Model
from minigen.text.tokenizer import ByteTokenizer, TextDecoder
from minigen.training.checkpoint import PARAMETERS, fingerprint
from tests.report.asking import ask, needs_node

FABLES = Path(__file__).parents[2] / "minigen" / "corpora" / "fables.txt"

pytestmark = needs_node


@cache
def learned_tokenizer():
    return ByteTokenizer.train([FABLES.read_bytes()], 400)


@cache
def model(kind):
    """A model whose distributions are flat, peaked, or full of ties."""
    tokenizer = ByteTokenizer() if kind == "ties" else learned_tokenizer()
    made = Model(tokenizer.vocab_size, context_length=3, embedding_dim=5)
    made.initialize(Stream(7, kind))
    made.parameters["E"][0, 0] = 1.0  # a power of two as the largest: the grid's edge
    if kind == "peaked":  # most tokens lie more than 30 nats below the best
        made.flat *= 7.3
    if kind == "ties":  # few distinct logits; <|endoftext|> is likely
        made.flat[:] = np.rint(made.flat * 2.0)
        made.parameters["b"][256] = 3.0
    if kind == "decimals":  # probabilities that stand exactly at the thresholds of the policies
        made.flat[:] = 0.0
        made.parameters["b"][:] = -1000.0
        made.parameters["b"][60:64] = log([0.3, 0.1, 0.1, 0.5])
    if kind == "huge":
        made.flat *= 2.0**150
    made.changed()
    return made, tokenizer


def random_text(dice):
    alphabet = dice.choice(["ab c", "Once upon a time.\n", "äß€😀 x", "\t \r\n12a'"])
    text = "".join(dice.choice(alphabet) for _ in range(dice.randrange(90))).encode()
    if dice.random() < 0.3:
        text += bytes(dice.randrange(256) for _ in range(dice.randrange(9)))
    start = dice.randrange(80_000)
    return text if dice.random() < 0.6 else FABLES.read_bytes()[start : start + 150]


NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
FRACTIONS = [0.1, 0.5, 0.6, 0.8, 0.9, 0.95, 1e-7, 2.5e-9, 5e-324]


def random_policy(dice):
    policy = {
        "temperature": dice.choice([1.0, 0.8, 0.3, 1.7, 0.0, 1e-310, 40.0]),
        "top_k": dice.choice([0, 1, 2, 5, 40, 1000]),
        "top_p": dice.choice([0.0, 1.0, *FRACTIONS, dice.random()]),
        "min_p": dice.choice([0.0, 1.0, *FRACTIONS, dice.random()]),
    }
    used = dice.sample(sorted(policy), k=dice.choice([1, 1, 2, 3, 4]))
    return {**NEUTRAL, **{name: policy[name] for name in used}}


def random_case(dice):
    return {
        "prompt": random_text(dice).hex(),
        "policy": random_policy(dice),
        "seed": str(dice.choice([0, 1, 12345, 10**30])),
        "position": dice.choice([0, 0, 3, 1001]),
        "length": dice.randrange(1, 40),
    }


def python_answer(made, tokenizer, case):
    prompt, policy = bytes.fromhex(case["prompt"]), Policy(**case["policy"])
    ids = tokenizer.encode(prompt).ids
    logits = made.logits(padded_contexts([ids], made.context_length))
    stream = Stream(int(case["seed"]), "inference", case["position"])
    task = Task(made, tokenizer, policy, max_new_tokens=case["length"])
    pieces = generate(task, [prompt], lambda _: stream)
    continuation = complete(pieces)[0]
    used = [name for name, value in NEUTRAL.items() if case["policy"][name] != value]
    stages = ["greedy"] if policy.greedy else [name.replace("_", "-") for name in used]
    return {
        "logits": logits[0].tolist(),
        "weights": policy.weights(logits, policy.history([ids], made.vocab_size))[0].tolist(),
        "stages": ["model", *stages],
        "ids": continuation.token_ids,
        "text": continuation.text,
    }


def check(made, tokenizer, cases):
    """Ask for the same texts of a model here and there."""
    weights = b"".join(made.parameters[name].astype("<f8").tobytes() for name in PARAMETERS)
    answer = ask(
        "models",
        weights=base64.b64encode(weights).decode(),
        shape=[made.vocab_size, made.context_length, made.embedding_dim],
        merges=tokenizer.state()["merges"],
        cases=cases,
    )
    assert answer["fingerprint"] == fingerprint(made.parameters)
    for case, got in zip(cases, answer["cases"], strict=True):
        assert got == python_answer(made, tokenizer, case), case


@pytest.mark.parametrize("kind", ["flat", "peaked", "ties", "decimals", "huge"])
def test_same_weights_prompt_policy_and_seed_give_the_same_token_ids(kind):
    made, tokenizer = model(kind)
    dice = random.Random(kind)
    check(made, tokenizer, [random_case(dice) for _ in range(50)])


@pytest.mark.parametrize(
    ("second", "options"),
    [
        (0.0, {"temperature": 0.0}),  # the first of two that are equal
        (0.0, {"top_p": 0.5000000000009094}),  # the share that may be missed: half, and 2^-40
        (-0.25, {"min_p": 0.7788007830730521}),  # the second one's weight, and that much
    ],
)
def test_what_lies_exactly_on_an_edge_falls_as_it_does_in_python(second, options):
    made = Model(257, context_length=1, embedding_dim=1)
    made.parameters["b"][:] = -1000.0
    made.parameters["b"][:2] = 0.0, second
    made.changed()
    case = {"prompt": "", "seed": "0", "position": 0, "length": 1}
    check(made, ByteTokenizer(), [{**case, "policy": {**NEUTRAL, **options}}])


def test_a_word_on_the_edge_between_two_tokens_draws_the_second():
    words = [0, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
    drawn = [Policy().choose(np.zeros(2), word=word) for word in words]
    assert ask("draws", w=[1 << 51, 1 << 51], words=[str(word) for word in words]) == drawn
    assert drawn == [0, 0, 1, 1]


@pytest.mark.parametrize("name", NEUTRAL)
def test_an_option_may_be_what_it_may_be_in_python(name):
    values = ["-1", "-5e-324", "0", "5e-324", "0.5", "1", "1.0000000000000002", "7", "Infinity"]
    may_be = []
    for value in values:
        number = float(value)
        try:
            Policy(**{name: int(number) if number.is_integer() else number})
            may_be.append(True)
        except OptionError:
            may_be.append(False)
    assert ask("rules", name=name, values=values) == may_be
    assert set(may_be) == {True, False}


def test_stream_words_are_those_of_python_at_any_position():
    for seed, name in [(0, "inference"), (2**64, "inference/1"), (10**40, "optimizer")]:
        indices = [0, 1, 2, 3, 4, 7, 1000, 999, 2**40 + 1]
        expected = [str(Stream(seed, name, index).word()) for index in indices]
        assert ask("words", seed=str(seed), name=name, indices=indices) == expected


@pytest.mark.parametrize("bits", [20, 43])
def test_integer_exponentials_are_those_of_python(bits):
    dice = random.Random(bits)
    gaps = [0.0, 5e-324, 1e-9, 31.0, 1e300, *(dice.uniform(0, 32) for _ in range(5000))]
    expected = integer_exp(np.array([*gaps, np.inf]), bits).tolist()
    assert ask("exponentials", gaps=[*gaps, None], bits=bits) == expected


def test_texts_become_the_ids_of_python():
    tokenizer, dice = learned_tokenizer(), random.Random(1)
    texts = [
        b"",
        b" ",
        b"  x",
        b"\n\n",
        b"a" * 200,
        b" " * 130,
        b"1" * 61 + b" 12",
        bytes(range(256)),
    ]
    texts += [random_text(dice) for _ in range(150)]
    texts += [bytes(dice.choices(b" \t\r\nab1.\x80\xff", k=80)) for _ in range(50)]
    texts.append(FABLES.read_bytes())
    expected = [tokenizer.encode(text).ids for text in texts]
    got = ask(
        "encodings",
        merges=tokenizer.state()["merges"],
        texts=[text.hex() for text in texts],
    )
    assert got == expected


def test_equal_pairs_are_joined_from_the_left():
    tokenizer = ByteTokenizer([(97, 97), (257, 97), (98, 97)])
    texts = [b"aaa", b"aaaaa", b"baaaab", b"aab aaba"]
    expected = [tokenizer.encode(text).ids for text in texts]
    merges = tokenizer.state()["merges"]
    assert ask("encodings", merges=merges, texts=[text.hex() for text in texts]) == expected


def python_parts(parts):
    decoder = TextDecoder()
    return [*map(decoder.decode, map(bytes.fromhex, parts)), decoder.decode(b"", final=True)]


def test_valid_bytes_cut_anywhere_become_the_text_of_python_part_by_part():
    dice = random.Random(2)
    texts = []
    for _ in range(200):
        data = "".join(dice.choices("aé€😀\ufeff", k=8)).encode()
        cuts = sorted(dice.sample(range(len(data)), k=4))
        texts.append([data[i:j].hex() for i, j in itertools.pairwise([0, *cuts, len(data)])])
    assert ask("decodings", texts=texts) == [python_parts(parts) for parts in texts]


def test_any_bytes_become_the_text_of_python_part_by_part():
    dice = random.Random(3)
    lead = b"a\x80\xbf\xc0\xc3\xe0\xe2\xed\xef\xbb\xf0\xf4\xf5\xff\xa0"
    texts = [
        [bytes(dice.choices(lead, k=dice.randrange(4))).hex() for _ in range(6)] for _ in range(400)
    ]
    assert ask("decodings", texts=texts) == [python_parts(parts) for parts in texts]


def test_sha256_is_that_of_the_standard_at_every_block_boundary():
    texts = [bytes(i % 251 for i in range(size)) for size in (0, 1, 55, 56, 63, 64, 65, 119, 1000)]
    expected = [hashlib.sha256(text).hexdigest() for text in texts]
    assert ask("sha256", texts=[text.hex() for text in texts]) == expected
