"""The twin trains: its arithmetic, gradient, updates and whole runs are Python's, bit for bit."""

import base64
import json
import random
import subprocess
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from minigen.exact import arithmetic
from minigen.exact.streams import Stream
from minigen.model import engines, head, kernels, kernels_numba, optimizer, rules
from minigen.model.model import Model
from minigen.report import trainable
from minigen.report.facts import gather
from minigen.report.page import write_report
from minigen.report.trainable import training_data
from minigen.text.tokenizer import END_OF_TEXT
from minigen.training.config import Config
from minigen.training.folder import RunFolder
from minigen.training.run import Run
from tests.report.asking import NODE, TWIN, ask, coded, floats, needs_node, node

pytestmark = needs_node


def same_bits(got: Any, expected: Any) -> None:
    np.testing.assert_array_equal(floats(got).view(np.int64), expected.reshape(-1).view(np.int64))


# Arithmetic


def test_every_constant_is_pythons():
    expected = {
        "STEPS_PER_NAT": arithmetic._STEPS_PER_NAT,
        "STEP_HIGH": arithmetic._STEP_HIGH,
        "STEP_LOW": arithmetic._STEP_LOW,
        "LN2_HIGH": arithmetic._LN2_HIGH,
        "LN2_LOW": arithmetic._LN2_LOW,
        "ROOTS": coded(arithmetic._ROOTS),
        "PER_HALF_PI": (1 << 128) / arithmetic._HALF_PI,
        "HALF_PI_HIGH": arithmetic._HALF_PI_HIGH,
        "HALF_PI_MIDDLE": arithmetic._HALF_PI_MIDDLE,
        "HALF_PI_LOW": arithmetic._HALF_PI_LOW,
        "EXPONENT_LIMIT": arithmetic._EXPONENT_LIMIT,
        "LOSS_UNIT": head.LOSS_UNIT,
        "LOSS_LIMIT": head._LOSS_LIMIT,
        "PI": optimizer._PI,
        "EPSILON": rules._EPSILON,
        "SMALLEST_FIRST": rules._SMALLEST_FIRST,
        "SMALLEST_SECOND": rules._SMALLEST_SECOND,
        "END_OF_TEXT": END_OF_TEXT,
    }
    assert ask("constants") == expected


def test_logarithms_are_those_of_python():
    dice = random.Random(1)
    x = np.array([1.0, 0.5, 2.0**0.5, 2.0**-0.5, 257.0, 1e-300, 1e300])
    decided = ["0x1.689ebe111cf6ap+0", "0x1.677dbb1d06160p+0", "0x1.6a3bdfc39c1adp-1"]
    x = np.append(x, list(map(float.fromhex, decided)))  # by the number of terms
    x = np.append(x, float.fromhex("0x1.6a09e667f3bcdp+20"))  # by where an octave ends
    x = np.append(x, [dice.uniform(0, 1024) for _ in range(5000)])
    same_bits(ask("functions", name="log", x=coded(x)), arithmetic.log(x))


def test_cosines_are_those_of_python():
    dice = random.Random(2)
    x = np.array(
        [0.0, 1.0, 3.141592653589793, -2.0, 2.0**20, *(dice.uniform(-9, 9) for _ in range(5000))]
    )
    decided = ["0x1.f203026754da9p+1", "0x1.01e8182d91100p+11", "0x1.24edf61240746p+1"]
    x = np.append(x, list(map(float.fromhex, decided)))  # by the number of factors
    same_bits(ask("functions", name="cos", x=coded(x)), arithmetic.cos(x))


@pytest.mark.parametrize("bits", [0, 17, 22])
def test_grid_units_are_those_of_python_on_both_sides_of_every_power_of_two(bits):
    powers = 2.0 ** np.array([-500.0, -400, -399, -1, 0, 1, 10, 399])
    largest = np.concatenate(
        [[0.0, 5e-324], *([p * (1 - 2**-53), p, p * (1 + 2**-52)] for p in powers)]
    )
    expected = np.array([arithmetic.grid_unit(float(x), bits) for x in largest])
    same_bits(ask("units", largest=coded(largest), bits=bits), expected)


def test_bounded_words_are_those_of_python():
    for first, below in [(0, 1), (5, 257), (2**20 + 3, 1_000_003), (7, 2**32)]:
        expected = Stream(3, "optimizer", first).integers(9, below).tolist()
        got = ask("integers", seed="3", name="optimizer", first=first, count=9, below=below)
        assert got == expected


# The gradient


def model(shape, seed=0, size=1.0):
    made = Model(*shape)
    made.initialize(Stream(seed, "init"))
    made.flat *= size
    made.changed()
    return made


def test_initial_weights_are_those_of_python():
    shape = (260, 3, 5)
    same_bits(ask("initial", seed="12", shape=shape), model(shape, seed=12).flat)


def plain_loss_and_gradient(made, contexts, targets):
    """The gradient as the specification states it: an outer product a prediction, in integers."""
    N, K = contexts.shape
    bits = 51 - arithmetic.ceil_log2(N) - arithmetic.ceil_log2(K)
    a = (bits - 6) // 2
    q = bits - a
    E, W, b = made.parameters.values()
    E_integers, E_unit = arithmetic.round_to_grid(E, a)
    W_integers, W_unit = arithmetic.round_to_grid(W, a)
    E_integers, W_integers = E_integers.astype(np.int64), W_integers.astype(np.int64)
    dE, dW, db = (np.zeros(x.shape, np.int64) for x in (E, W, b))
    loss = 0
    for x, y in zip(contexts, targets, strict=True):
        z = head.project(made.hidden(x[None]), W, b)[0]
        w, S = head.integer_weights(z)
        d = np.rint(w * (2.0**q / S)).astype(np.int64)
        d[y] -= 1 << q
        db += d
        for k, token in enumerate(x):
            dW[:, k] += E_integers[token][:, None] * d
            dE[token] += W_integers[:, k] @ d
        loss += round(-float(head.log_softmax(z)[y]) * 2**32)
    scale = 2.0**-q / N
    gradient = [dE * (W_unit * scale), dW * (E_unit * scale), db * scale]
    return np.concatenate([[loss / N * 2.0**-32], *(part.reshape(-1) for part in gradient)])


def biased(losses):
    """A model of one bias for each token: the loss of token 0 is 0, the next have these."""
    made = Model(257, 1, 1)
    made.parameters["b"][1:] = -5000.0
    made.parameters["b"][1 : 1 + len(losses)] = -np.array(losses)
    return {"weights": coded(made.flat), "shape": (257, 1, 1)}


def test_a_bit_or_a_term_of_an_exponential_decides_a_gradient():
    """Of thousands of seeds, those whose gradient is another one without it."""
    shape, x, y = (257, 1, 1), np.array([[0]]), [1]
    models = [model(shape, seed=seed, size=8.0) for seed in (28, 622, 3563)]
    asked = {"shape": shape, "contexts": [0], "targets": y}
    answers = ask("gradients", cases=[{**asked, "weights": coded(made.flat)} for made in models])
    for made, got in zip(models, answers, strict=True):
        np.testing.assert_array_equal(floats(got), plain_loss_and_gradient(made, x, y))


def test_what_passes_a_limit_is_refused_from_the_limit_on():
    with pytest.raises(AssertionError, match=r"magnitudes must be finite and below 2\^400"):
        ask("units", largest=coded([2.0**400]), bits=0)
    case = {**biased([4096.0]), "contexts": [0], "targets": [1]}
    with pytest.raises(AssertionError, match="a loss must stay below 4096 nats"):
        ask("gradients", cases=[case])


def test_a_mean_loss_half_way_between_two_floats_is_the_even_one():
    case = {**biased([4000.0, 3000.0 + 2.0**-32]), "contexts": [0] * 1024}
    [got] = ask("gradients", cases=[{**case, "targets": [1] * 1023 + [2]}])
    total = (1023 * 4000 + 3000 << 32) + 1
    assert total % 4 == 1
    assert 1 << 53 < total < 1 << 54
    assert floats(got)[0] == (total - 1) / 1024 * 2.0**-32


@pytest.mark.parametrize("shape", [(257, 1, 1), (257, 3, 1), (260, 2, 5), (300, 5, 7), (513, 4, 2)])
@pytest.mark.parametrize("distinct", [2, 257])
def test_the_gradient_is_the_plain_sum_of_integers(shape, distinct):
    """Few distinct tokens go by table, many by contexts; no batch size is special."""
    dice = random.Random(repr((shape, distinct)))
    cases, expected = [], []
    for N in (1, 2, 3, 24, 33):
        made = model(shape, seed=N, size=dice.choice([1.0, 0.01, 30.0]))
        contexts = np.array([[dice.randrange(distinct) for _ in range(shape[1])] for _ in range(N)])
        targets = [dice.randrange(shape[0]) for _ in range(N)]
        cases.append(
            {
                "weights": coded(made.flat),
                "shape": shape,
                "contexts": contexts.reshape(-1).tolist(),
                "targets": targets,
            }
        )
        expected.append(plain_loss_and_gradient(made, contexts, targets))
    for got, right in zip(ask("gradients", cases=cases), expected, strict=True):
        np.testing.assert_array_equal(floats(got), right)


# The update


OPTIONS = {
    "name": "adamw",
    "learning_rate": 0.01,
    "betas": (0.9, 0.99),
    "momentum": 0.8,
    "weight_decay": 0.1,
    "gradient_clip": 1.0,
    "warmup_steps": 3,
    "decay": "cosine",
}


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup_steps", [0, 1, 7, 40])
def test_learning_rates_are_those_of_python(decay, warmup_steps):
    options = {**OPTIONS, "decay": decay, "warmup_steps": warmup_steps}
    schedule = optimizer.Optimizer(1, total_steps=30, **options)
    expected = np.array([schedule.learning_rate(step) for step in range(1, 31)])
    same_bits(ask("rates", options=options, steps=30), expected)


def test_norms_are_those_of_python():
    dice = random.Random(4)
    sizes = [1, 2, 3, 257, 1000]
    vectors = [np.array([dice.gauss(0, 1) for _ in range(size)]) for size in sizes]
    vectors += [np.zeros(5), np.ones(1024), np.array([1e-200, 3e-200]), np.array([-2.0, 0.0])]
    expected = np.array([optimizer.norm(vector) for vector in vectors])
    same_bits(ask("norms", vectors=[coded(vector) for vector in vectors]), expected)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("gradient_clip", [0.0, 0.5, 1e9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_updates_are_those_of_python(name, gradient_clip, weight_decay):
    """From moments on both sides of where they become +0, of either sign."""
    options = {
        **OPTIONS,
        "name": name,
        "gradient_clip": gradient_clip,
        "weight_decay": weight_decay,
    }
    dice = random.Random(name)
    edge = [s * 2.0**-400 * f for s in (1, -1) for f in (1, 0.7, 1.2, 1.5)] + [0.0, -0.0, 1e-300]
    size = 50 + len(edge)
    weights = np.array([dice.gauss(0, 1) for _ in range(size)])
    first = np.array([dice.gauss(0, 0.1) for _ in range(50)] + edge)
    moments = [first, first * first][: 2 if name == "adamw" else 1]
    gradients = [np.array([dice.gauss(0, 1) for _ in range(50)] + [0.0] * len(edge)) for _ in "abc"]
    answer = ask(
        "updates",
        options=options,
        steps=20,
        weights=coded(weights),
        moments=[coded(moment) for moment in moments],
        gradients=[coded(gradient) for gradient in gradients],
    )
    reference = optimizer.Optimizer(size, total_steps=20, **options)
    reference.resume(3)
    for view, moment in zip(reference.moments.values(), moments, strict=True):
        view[:] = moment
    for gradient in gradients:
        weights = reference.update(weights, gradient)
    for got, right in zip(answer, [weights, *reference.moments.values()], strict=True):
        same_bits(got, right)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_moments_exactly_at_their_limit_stay(name):
    """Halved, they are there; the next smaller float is not."""
    options = {**OPTIONS, "name": name, "betas": (0.5, 0.5), "momentum": 0.5, "gradient_clip": 0.0}
    first, second = 2.0**-399, 2.0**-799
    moments = [np.array([first, -first, np.nextafter(first, 0), -np.nextafter(first, 0)])]
    if name == "adamw":
        moments.append(np.array([second, np.nextafter(second, 0), second, 0.0]))
    nothing = np.zeros(4)
    answer = ask(
        "updates",
        options=options,
        steps=20,
        weights=coded(nothing),
        moments=[coded(moment) for moment in moments],
        gradients=[coded(nothing)],
    )
    same_bits(answer[1], np.array([first / 2, -first / 2, 0.0, 0.0]))
    if name == "adamw":
        same_bits(answer[2], np.array([second / 2, 0.0, second / 2, 0.0]))


# Whole runs


RUN = {
    "tokenizer.vocab_size": 270,
    "model.context_length": 2,
    "model.embedding_dim": 4,
    "training.steps": 12,
    "training.batch_size": 16,
    "optimizer.learning_rate": 0.02,
    "optimizer.warmup_steps": 3,
    "evaluation.every": 5,
    "sampling.every": 4,
    "sampling.max_new_tokens": 8,
    "checkpoint.every": 5,
}
RUNS: dict[str, dict[str, Any]] = {
    "as configured": {},
    "no power of two, sgd, linear, clipped": {
        "training.batch_size": 24,
        "optimizer.name": "sgd",
        "optimizer.decay": "linear",
        "optimizer.gradient_clip": 0.05,
    },
    "clipped adamw, constant, no warm-up": {
        "training.batch_size": 37,
        "optimizer.gradient_clip": 0.1,
        "optimizer.decay": "constant",
        "optimizer.warmup_steps": 0,
        "optimizer.betas": [0.0, 0.5],
    },
    "bytes only, lines, long contexts": {
        "tokenizer.vocab_size": 257,
        "corpus.documents": "line",
        "corpus.validation_fraction": 0.0,
        "model.context_length": 9,
        "optimizer.weight_decay": 0.0,
        "run.seed": 2**62,
    },
    "one number a token, one prediction a step": {
        "model.context_length": 1,
        "model.embedding_dim": 1,
        "training.batch_size": 1,
        "corpus.documents": "file",
        "optimizer.gradient_clip": 0.0,
    },
}


def write_run(path, settings):
    config = Config.load("fables", {**RUN, **settings})
    for _ in RunFolder.create(path, Run(config)).steps():
        pass
    data = training_data(gather(path))
    (path / "training.json").write_text(json.dumps(data))
    return data


@pytest.mark.parametrize("name", RUNS)
def test_a_run_comes_out_the_same_in_both_engines_and_in_the_twin(name, monkeypatch, tmp_path):
    monkeypatch.setattr(engines, "chosen", lambda: kernels)
    plain = Run(Config.load("fables", {**RUN, **RUNS[name]}))
    plain.train()
    monkeypatch.setattr(engines, "chosen", lambda: kernels_numba)
    data = write_run(tmp_path, RUNS[name])
    assert gather(tmp_path).fingerprint == plain.fingerprint
    done = node("train", tmp_path / "training.json")
    answer = json.loads(done.stdout)
    assert answer == {
        "step": 12,
        "fingerprint": gather(tmp_path).fingerprint,
        "compared": {"losses": 12, "learning_rates": 12, "fingerprints": 3},
        "difference": None,
        "fault": None,
        "agrees": True,
    }
    assert done.returncode == 0
    for saved in data["checkpoints"]:
        done = node("train", tmp_path / "training.json", "--from", saved["step"])
        assert json.loads(done.stdout) == {
            **answer,
            "compared": json.loads(done.stdout)["compared"],
        }
    assert [saved["step"] for saved in data["checkpoints"]] == [5, 10]


WORKER = """
globalThis.WorkerGlobalScope = class {};
globalThis.self = { postMessage: (answer) => console.log(JSON.stringify(answer)) };
require(process.argv[1]);
const data = JSON.parse(require("fs").readFileSync(process.argv[2], "utf8"));
self.onmessage({ data: { begin: { data, options: {} }, until: 2, milliseconds: 1e9 } });
self.onmessage({ data: { until: 12, milliseconds: -1 } });
self.onmessage({ data: { until: 12, milliseconds: 1e9 } });
"""


def test_in_a_page_it_trains_as_long_as_it_is_asked_to(tmp_path):
    write_run(tmp_path, {})
    command = [NODE, "-e", WORKER, str(TWIN), str(tmp_path / "training.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["step"] for answer in answers] == [2, 2, 12]
    assert [answer["fingerprint"] is None for answer in answers] == [False, True, False]
    assert answers[-1]["fingerprint"] == gather(tmp_path).fingerprint
    losses = [[line["step"], line["loss"]] for line in gather(tmp_path).metrics]
    assert [answer["losses"] for answer in answers] == [losses[:2], [], losses[2:]]
    assert all(answer["fault"] is answer["difference"] is None for answer in answers)
    assert answers[-1]["compared"] == {"losses": 12, "learning_rates": 12, "fingerprints": 3}


@pytest.fixture(scope="session")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("training") / "run"
    write_run(path, {})
    return write_report(path)


def forged(page, **changes):
    """Write a page whose data for training were changed."""
    before, rest = page.read_text().split('<script type="application/json" id="data">', 1)
    data, after = rest.split("</script>", 1)
    read = json.loads(data)
    read["training"] |= changes
    path = page.with_name("forged.html")
    path.write_text(
        f'{before}<script type="application/json" id="data">{json.dumps(read)}</script>{after}'
    )
    return path, read["training"]


def training_of(page):
    return forged(page)[1]


def changed(numbers, at, factor=1 + 2**-52):
    numbers = floats(numbers).copy()
    numbers[at] *= factor
    return coded(numbers)


def first_difference(path, *options):
    done = node("train", path, *options)
    assert done.returncode == 1
    found = json.loads(done.stdout)["difference"]
    return found["what"], found["step"]


def test_a_page_trains_under_node_and_its_last_bits_are_compared(page):
    assert node("train", page).returncode == 0
    data = training_of(page)
    losses = changed(data["losses"], 6)
    assert first_difference(forged(page, losses=losses)[0]) == ("losses", 7)
    rates = changed(data["learning_rates"], 1)
    assert first_difference(forged(page, learning_rates=rates)[0]) == ("learning_rates", 2)
    fingerprints = [[step, "0" * 64] for step, _ in data["fingerprints"]]
    assert first_difference(forged(page, fingerprints=fingerprints)[0]) == ("fingerprints", 5)


def test_a_peak_rate_in_the_log_is_no_rate(page):
    rates = coded(np.full(12, RUN["optimizer.learning_rate"]))
    assert first_difference(forged(page, learning_rates=rates)[0]) == ("learning_rates", 1)


def test_a_checkpoint_forged_in_one_weight_or_moment_is_found_out(page):
    for saved in training_of(page)["checkpoints"]:
        P = len(floats(saved["state"])) // 3
        for at in (3, P + 3, 2 * P + 3):  # a weight, and either moment, of "e"
            state = changed(saved["state"], at + 101 * 4, 1.01)
            path, _ = forged(page, checkpoints=[{**saved, "state": state}])
            assert first_difference(path, "--from", saved["step"])[1] > saved["step"]


def test_samples_from_the_batches_stream_part_at_the_step_after_the_first(page):
    assert first_difference(page, "--mistake") == ("losses", 5)
    assert node("train", page, "--mistake", "--until", 4).returncode == 0


def test_the_mistake_takes_one_word_of_the_batches_stream_for_each_token(page):
    before, after, then = ask("positions", data=training_of(page), steps=5)[2:]
    assert before == 3 * RUN["training.batch_size"]
    words = after - 4 * RUN["training.batch_size"]
    assert 0 < words <= RUN["sampling.max_new_tokens"]
    assert then == after + RUN["training.batch_size"]


def test_a_run_may_end_where_it_begins(page):
    step = training_of(page)["checkpoints"][0]["step"]
    done = node("train", page, "--from", step, "--until", step)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_greedy_mistake_takes_no_word(page):
    data = training_of(page)
    greedy = {**data["sampling"], "policy": {**data["sampling"]["policy"], "temperature": 0}}
    positions = ask("positions", data={**data, "sampling": greedy}, steps=5)
    assert positions == [step * RUN["training.batch_size"] for step in range(1, 6)]


def test_tokens_of_four_bytes_are_read_like_those_of_two(page):
    narrow = np.frombuffer(base64.b64decode(training_of(page)["tokens"]), "<u2")
    wide = base64.b64encode(narrow.astype("<u4").tobytes()).decode()
    path, _ = forged(page, tokens=wide, token_bytes=4)
    assert node("train", path, "--until", 3).returncode == 0


def test_in_a_page_there_is_no_module():
    code = 'new Function("module", require("fs").readFileSync(process.argv[1], "utf8"))();'
    assert NODE
    subprocess.run([NODE, "-e", code, TWIN], check=True)


def test_divergence_is_one_line_with_its_step(page):
    optimizer = {**training_of(page)["optimizer"], "learning_rate": 1e130, "warmup_steps": 0}
    answer = json.loads(node("train", forged(page, optimizer=optimizer)[0]).stdout)
    assert answer["fault"].startswith("training diverged at step 1: ")


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [
        ([], "usage: node twin.js train FILE"),
        (["train"], "usage: node twin.js train FILE"),
        (["train", "nowhere.html"], "cannot read nowhere.html"),
        (["train", "{page}", "--from", "3"], "--from must be a step of which the file holds"),
        (["train", "{page}", "--until", "13"], "--until must be from 0 to 12 (got 13)"),
        (["train", "{page}", "--steps", "3"], "usage: node twin.js train FILE"),
    ],
)
def test_wrong_usage_is_one_line_that_says_what_is_right(page, arguments, cure):
    done = node(*(argument.format(page=page) for argument in arguments))
    assert (done.returncode, done.stdout) == (2, "")
    assert cure in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_run_of_an_older_format_is_not_trained(page):
    facts = gather(page.parent)
    older = replace(facts, saved=replace(facts.saved, format=1))
    assert training_data(older)["missing"].startswith("This run was trained with the arithmetic")


def test_a_run_with_a_setting_that_the_twin_does_not_know_is_not_trained(page, monkeypatch):
    monkeypatch.setattr(trainable, "_TWINS_KEYS", trainable._TWINS_KEYS - {"decay"})
    missing = training_data(gather(page.parent))["missing"]
    assert missing == "The page cannot train with optimizer.decay."


def test_a_run_whose_text_is_gone_or_long_says_why_it_cannot_be_trained(tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("a fox and a crow\n" * 40)
    data = write_run(tmp_path / "run", {"corpus.text": [str(text)]})
    assert data["tokens_count"] > 40
    monkeypatch.setattr(trainable, "MOST_TOKEN_BYTES", data["tokens_count"] * 2 - 1)
    assert "does not travel in the page" in training_data(gather(tmp_path / "run"))["missing"]
    monkeypatch.setattr(trainable, "MOST_TOKEN_BYTES", data["tokens_count"] * 2)
    assert "missing" not in training_data(gather(tmp_path / "run"))
    text.unlink()
    page = write_report(tmp_path / "run")
    done = node("train", page)
    assert done.returncode == 2
    assert (
        "The run's text is not where it was. So there is nothing to train on here." in done.stderr
    )
