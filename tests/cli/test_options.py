"""Every option of every command changes what comes out, in the way that its help states.

The tables below name each of them: an option without a row is an error, and so is a row without an
option. Where an option only carries a value to the library, the library says what must come out.
"""

import inspect
import json
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict
from math import exp
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from minigen import Generator, Policy, Run, cli, load
from minigen.cli.demo import _free_folder
from minigen.cli.outlets import Outlet
from minigen.decoding.beams import beam_search
from minigen.decoding.generation import Task
from minigen.decoding.speculation import speculate
from minigen.proof.demonstration import Demonstration
from minigen.training import checkpoint, workers
from minigen.training.config import Config, shipped
from minigen.training.keys import KEYS
from minigen.training.workers import Workers
from tests.conftest import TINY, TINY_SETTINGS, Result

Command = Callable[..., Result]
Called = Callable[..., Any]
PROMPT = "the fox the fox th"
SHORT = [
    part
    for key, value in {**TINY, "training.steps": 2}.items()
    for part in ("--set", f"{key}={value}")
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that has learnt enough for its distributions to have a shape."""
    folder = tmp_path_factory.mktemp("learnt") / "run"
    learn = ["--set", "training.steps=40", "--set", "optimizer.learning_rate=0.05"]
    keep = ["--set", "checkpoint.every=10", "--set", "sampling.every=0"]
    assert cli.run(["train", *TINY_SETTINGS, *learn, *keep, "--out", str(folder)]) == 0
    return folder


# ── The options of a policy, for generate and next ───────────────────────────────────────────────

# flag: what is written, what the library is given, what is put before both
POLICY: dict[str, tuple[list[str], dict[str, Any]]] = {
    "--logit-bias": (["101=2.5", "102=-1"], {"logit_bias": {101: 2.5, 102: -1.0}}),
    "--repetition-penalty": (["1.7"], {"repetition_penalty": 1.7}),
    "--frequency-penalty": (["0.9"], {"frequency_penalty": 0.9}),
    "--presence-penalty": (["0.8"], {"presence_penalty": 0.8}),
    "--no-repeat-ngram-size": (["3"], {"no_repeat_ngram_size": 3}),
    "--suppress-token": (["101", "32"], {"suppress_tokens": (101, 32)}),
    "--min-new-tokens": (["1"], {"min_new_tokens": 1}),
    "--temperature": (["0.6"], {"temperature": 0.6}),
    "--top-n-sigma": (["1.5"], {"top_n_sigma": 1.5}),
    "--top-k": (["4"], {"top_k": 4}),
    "--top-p": (["0.5"], {"top_p": 0.5}),
    "--min-p": (["0.3"], {"min_p": 0.3}),
    "--typical-p": (["0.4"], {"typical_p": 0.4}),
    "--epsilon-cutoff": (["0.04"], {"epsilon_cutoff": 0.04}),
    "--eta-cutoff": (["0.5"], {"eta_cutoff": 0.5}),
    "--greedy": ([""], {"temperature": 0.0}),
}


def written(flag: str) -> list[str]:
    """What a user writes for the row of an option: repeated, where it has several values."""
    return [part for value in POLICY[flag][0] for part in (flag, value) if part]


@pytest.mark.parametrize("flag", POLICY)
def test_an_option_of_the_policy_gives_next_the_distribution_of_the_library(
    minigen: Command, model: Path, flag: str
) -> None:
    found = json.loads(
        minigen("next", str(model), PROMPT, "--top", "257", "--json", *written(flag)).out
    )
    generator = load(model)
    expected = generator.next(PROMPT, top=257, policy=Policy(**POLICY[flag][1]))
    plain = generator.next(PROMPT, top=257)
    shown = [(c["token_id"], c["logit"], c["probability"]) for c in found["candidates"]]
    assert shown == [(c.token_id, c.logit, c.probability) for c in expected.candidates]
    assert found["entropy"] == expected.entropy
    assert found["greedy_token_id"] == expected.greedy_token_id
    assert expected.entropy != plain.entropy


@pytest.mark.parametrize("flag", POLICY)
def test_an_option_of_the_policy_gives_generate_the_text_of_the_library(
    minigen: Command, model: Path, flag: str
) -> None:
    changes = POLICY[flag][1]
    options = ("--max-new-tokens", "60", "--seed", "3", "--json", *written(flag))
    line = json.loads(minigen("generate", str(model), PROMPT, *options).out)
    expected = load(model).generate(
        PROMPT, max_new_tokens=60, seed=3, policy=Policy(**changes), log_probabilities=True
    )
    assert line["token_ids"] == expected.token_ids
    assert line["log_probabilities"] == expected.log_probabilities
    ids = {"logit_bias": {"101": 2.5, "102": -1.0}, "suppress_tokens": [101, 32]}
    assert line["policy"] == {name: ids.get(name, value) for name, value in changes.items()}
    assert line["seed"] == (None if flag == "--greedy" else 3)


# ── What each other option must do ───────────────────────────────────────────────────────────────


class Bench:
    """What a row works with: the command line, a trained run, and the library on the same run."""

    def __init__(self, minigen: Command, model: Path, monkeypatch: pytest.MonkeyPatch):
        self.run, self.patch = str(model), monkeypatch
        self.writer = load(model)
        self.call = minigen

    def __call__(self, *arguments: str) -> Result:
        """Run a command that must succeed."""
        result = self.call(*arguments)
        assert result.status == 0, result.err
        return result

    def json(self, *arguments: str) -> Any:
        """The one JSON value that a command prints."""
        return json.loads(self(*arguments, "--json").out)

    def generate(self, *options: str) -> Any:
        return self.json("generate", self.run, PROMPT, "--max-new-tokens", "20", *options)

    def train(self, *options: str, out: str = "run") -> Result:
        return self("train", *SHORT, *options, "--out", out)

    def config(self, folder: str = "run") -> Config:
        return Config.load(Path(folder) / "config.toml")

    def prints(self, *arguments: str, lines: list[str]) -> None:
        """A command must print these lines and no others, however wide its columns are."""
        shown = self(*arguments).out.splitlines()
        assert [line.split() for line in shown] == [line.split() for line in lines]


ROWS: dict[str, dict[str, Callable[[Bench], None]]] = {}


def row(command: str, *names: str) -> Callable[[Callable[[Bench], None]], Callable[[Bench], None]]:
    """Enter a check in the table as the row of these options of a command."""

    def enter(check: Callable[[Bench], None]) -> Callable[[Bench], None]:
        ROWS.setdefault(command, {}).update(dict.fromkeys(names, check))
        return check

    return enter


@row("generate", "MODEL", "PROMPT", "--max-new-tokens", "--json")
def _(bench: Bench) -> None:
    text = bench.writer.generate(PROMPT, max_new_tokens=7)
    line = bench.json("generate", bench.run, PROMPT, "--max-new-tokens", "7")
    assert (line["prompt"], line["text"], line["token_ids"]) == (PROMPT, text.text, text.token_ids)
    assert line["max_new_tokens"] == len(line["token_ids"]) == 7
    assert line["model"] == bench.writer.fingerprint
    plain = bench("generate", bench.run, PROMPT, "--max-new-tokens", "7")
    assert plain.out == f"{PROMPT}{text.text}\n"
    other = bench.json("generate", f"{bench.run}/step-000010.safetensors", "A wolf")
    assert (other["prompt"], other["max_new_tokens"]) == ("A wolf", 200)
    assert other["model"] == load(f"{bench.run}/step-000010.safetensors").fingerprint != line


@row("generate", "--num-beams")
def _(bench: Bench) -> None:
    for count in (2, 3):
        line = bench.generate("--num-beams", str(count))
        beams = bench.writer.beams(
            PROMPT, num_beams=count, max_new_tokens=20, log_probabilities=True
        )
        assert line["token_ids"] == beams[0].token_ids != beams[-1].token_ids
        assert line["log_probabilities"] == beams[0].log_probabilities
        total = bench.writer.score(PROMPT + line["text"]).total_nats
        assert all(total <= bench.writer.score(PROMPT + other.text).total_nats for other in beams)
        assert (line["num_beams"], line["length_penalty"], line["seed"]) == (count, 1.0, None)


@row("generate", "--length-penalty")
def _(bench: Bench) -> None:
    beams = ["--num-beams", "4", "--logit-bias", "256=6"]
    short = bench.generate(*beams, "--length-penalty", "-3")
    long = bench.generate(*beams, "--length-penalty", "6")
    assert len(short["token_ids"]) < len(long["token_ids"])
    assert (short["length_penalty"], long["length_penalty"]) == (-3.0, 6.0)


@row("generate", "--draft", "--num-draft-tokens")
def _(bench: Bench) -> None:
    path = f"{bench.run}/step-000020.safetensors"
    draft = load(path)
    for count in (1, 4, 7):
        given = [] if count == 4 else ["--num-draft-tokens", str(count)]
        line = bench.generate("--draft", path, *given)
        expected = bench.writer.generate(
            PROMPT, max_new_tokens=20, draft=draft, num_draft_tokens=count
        )
        assert line["token_ids"] == expected.token_ids
        assert line["acceptance_rate"] == expected.acceptance_rate
        assert (line["draft"], line["num_draft_tokens"]) == (draft.fingerprint, count)
    assert line["acceptance_rate"] < 1.0


@row("generate", "--num-samples", "--seed")
def _(bench: Bench) -> None:
    arguments = ["generate", bench.run, PROMPT, "--seed", "5", "--num-samples", "3"]
    expected = bench.writer.generate([PROMPT], num_samples=3, seed=5, max_new_tokens=200)
    texts = [text.text for text in expected]
    assert bench(*arguments).out == "\n---\n".join(PROMPT + text for text in texts) + "\n"
    lines = [json.loads(line) for line in bench(*arguments, "--json").out.splitlines()]
    assert [line["text"] for line in lines] == texts
    assert [line["sample"] for line in lines] == [0, 1, 2]
    assert [line["seed"] for line in lines] == [5, 5, 5]
    assert len({*texts, bench.writer.generate(PROMPT, seed=0).text}) == 4


@row("generate", "--stop")
def _(bench: Bench) -> None:
    plain = bench.generate("--top-k", "3")["text"]  # nothing but letters and spaces
    line = bench.generate("--top-k", "3", "--stop", plain[5:7], "--stop", plain[3:5])
    assert line["text"] == plain[: min(plain.index(plain[5:7]), plain.index(plain[3:5]))]
    assert (line["finish_reason"], line["stop"]) == ("stop", [plain[5:7], plain[3:5]])


@row("generate", "--prompts")
def _(bench: Bench) -> None:
    Path("prompts.txt").write_text("A wolf\nThe ass\n")
    out = bench("generate", bench.run, "--prompts", "prompts.txt", "--max-new-tokens", "5").out
    texts = [bench.writer.generate(p, max_new_tokens=5).text for p in ("A wolf", "The ass")]
    assert out == f"A wolf{texts[0]}\n---\nThe ass{texts[1]}\n"


@row("generate", "--stream")
def _(bench: Bench) -> None:
    flushes: list[Outlet] = []
    bench.patch.setattr(Outlet, "flush", lambda outlet: flushes.append(outlet))
    counts = []
    for how in (["--stream"], [], ["--no-stream"]):
        bench("generate", bench.run, PROMPT, "--max-new-tokens", "9", "--greedy", *how)
        counts.append(len(flushes))
        flushes.clear()
    live, default, at_the_end = counts
    assert live == default >= at_the_end + 9


ODD = ({256: 12.0, 255: 11.0}, ["<|endoftext|>", r"'\xff'"])


@row("next", "MODEL", "PROMPT", "--top", "--json")
def _(bench: Bench) -> None:
    for top in (10, 2):
        given = [] if top == 10 else ["--top", str(top)]
        found = bench.json("next", bench.run, PROMPT, *given)
        expected = bench.writer.next(PROMPT, top=top)
        ids = [candidate.token_id for candidate in expected.candidates]
        assert [candidate["token_id"] for candidate in found["candidates"]] == ids
        assert len(ids) == top
    best = expected.candidates[0]
    assert found["candidates"][0] == {
        "token_id": best.token_id,
        "text": best.text,
        "bytes": best.bytes.hex(),
        "logit": best.logit,
        "probability": best.probability,
        "negative_log_likelihood": best.negative_log_likelihood,
    }
    for biases, names in (({}, [repr(c.text) for c in expected.candidates]), ODD):
        rules = [f"--logit-bias={token}={bias}" for token, bias in biases.items()]
        shown = bench.writer.next(PROMPT, top=2, policy=Policy(logit_bias=biases))
        rows = [
            f"{c.token_id} {name} {c.logit:.4f} {c.probability:.6f} {c.negative_log_likelihood:.4f}"
            for c, name in zip(shown.candidates, names, strict=True)
        ]
        bench.prints(
            *("next", bench.run, PROMPT, "--top", "2", *rules),
            lines=[
                "id bytes logit probability −ln p",
                f"{rows[0]} ← greedy",
                rows[1],
                f"255 others {shown.others_probability:.6f}",
                f"entropy {shown.entropy:.6f} nats",
            ],
        )
    assert bench("next", bench.run, "A wolf").out != bench("next", bench.run, PROMPT).out
    first = f"{bench.run}/step-000000.safetensors"
    assert bench("next", first, PROMPT).out != bench("next", bench.run, PROMPT).out


@row("score", "MODEL", "TEXT", "--file", "--json")
def _(bench: Bench) -> None:
    Path("text.txt").write_text("A wolf\n")
    expected = bench.writer.score("A wolf")
    for how in (["A wolf"], ["--file", "text.txt"]):
        found = bench.json("score", bench.run, *how)
        assert found["token_ids"] == expected.token_ids == list(b"A wolf")
        assert found["log_probabilities"] == expected.log_probabilities
        assert found["total_nats"] == expected.total_nats
    Path("odd.txt").write_bytes(b"ab\xff")
    odd = bench.writer.score(b"ab\xff")
    rows = [
        f"{token} {name} {exp(log_p):.6g} {-log_p:.6f}"
        for token, name, log_p in zip(
            [97, 98, 255], ["'a'", "'b'", r"'\xff'"], odd.log_probabilities, strict=True
        )
    ]
    bench.prints(
        *("score", bench.run, "--file", "odd.txt"),
        lines=[
            "id bytes probability −ln p",
            *rows,
            f"total {odd.total_nats:.6f} nats, the sum of −ln p",
            f"probability {odd.probability:.6g}, the product",
            f"perplexity {odd.perplexity:.6g} per token",
            f"bits per byte {odd.bits_per_byte:.6f} over 3 bytes",
        ],
    )
    assert bench.json("score", f"{bench.run}/step-000000.safetensors", "A wolf") != found


@row("evaluate", "MODEL", "--text", "--json")
def _(bench: Bench) -> None:
    Path("text.txt").write_text("ab\ncd\n\nef\n")  # two paragraphs, of 5 and 2 bytes
    Path("more.txt").write_text("x")
    found = bench.json("evaluate", bench.run, "--text", "text.txt", "--text", "more.txt")
    assert (found["tokens"], found["bytes"]) == (5 + 1 + 2 + 1 + 1 + 1, 8)
    assert found["loss"] == bench.writer.evaluate(paths=["text.txt", "more.txt"]).loss
    result = bench.writer.evaluate()
    assert bench.json("evaluate", bench.run) == json.loads(json.dumps(asdict(result)))
    assert result.loss != found["loss"]
    known = ", had this text's counts been known"
    bench.prints(
        *("evaluate", bench.run),
        lines=[
            f"loss {result.loss:.6f} nats per token over {result.tokens:,} tokens",
            f"bits per byte {result.bits_per_byte:.6f} over {result.bytes:,} bytes of documents, "
            "without the line ends between them",
            f"perplexity {result.perplexity:.6g} per token",
            f"uniform {result.baselines['uniform']:.6f} nats per token",
            f"unigram {result.baselines['unigram']:.6f} nats per token{known}",
            f"bigram {result.baselines['bigram']:.6f} nats per token{known}",
            f"calibration {result.calibration_error:.6f} expected error",
            "",
            "top probability tokens confidence accuracy",
            *(
                f"{one.lowest:.3f} to {one.highest:.3f} {one.count:,} {one.confidence:.4f} "
                f"{one.accuracy:.4f}"
                for one in result.reliability
            ),
        ],
    )
    first = f"{bench.run}/step-000000.safetensors"
    assert bench.json("evaluate", first)["loss"] > result.loss


@row("head", "--logits", "--target", "--json")
def _(bench: Bench) -> None:
    found = bench.json("head", "--logits", "0, ln2, -ln 4", "--target", "1")
    assert found["probabilities"] == pytest.approx([4 / 13, 8 / 13, 1 / 13], abs=1e-13)
    assert found["gradient"] == pytest.approx([4 / 13, -5 / 13, 1 / 13], abs=1e-13)
    assert found["greedy"] == 1
    found = bench.json("head", "--logits", "0, -inf, - log(1.0), 0.5e1, +ln 2")
    weights = [1.0, 0.0, 1.0, 148.4131591, 2.0]
    assert found["probabilities"] == pytest.approx([w / 152.4131591 for w in weights])
    assert [found["log_probabilities"][1], found["greedy"]] == [None, 3]
    assert found.keys() == {"probabilities", "log_probabilities", "greedy"}
    rows = [["0", "0.000000", "0.333333", "-1.098612"], ["1", "0.693147", "0.666667", "-0.405465"]]
    bench.prints(
        *("head", "--logits", "0, ln2"),
        lines=["token logit probability ln p", *map(" ".join, rows), "greedy takes token 1"],
    )
    bench.prints(
        *("head", "--logits", "0, ln2", "--target", "0"),
        lines=[
            "token logit probability ln p gradient",
            " ".join([*rows[0], "-0.666667"]),
            " ".join([*rows[1], "0.666667"]),
            "greedy takes token 1",
            "loss = −ln p[0] = 1.098612 nats",
        ],
    )


@row("info", "MODEL", "--json")
def _(bench: Bench) -> None:
    for name, step in (("/step-000040.safetensors", 40), ("/step-000010.safetensors", 10)):
        found = bench.json("info", bench.run + name)
        assert found == {
            "fingerprint": load(bench.run + name).fingerprint,
            "step": step,
            "parameters": {"E": [257, 4], "W": [4, 2, 257], "b": [257]},
            "config": checkpoint.load(Path(bench.run + name)).config,
            "streams": {"init": 257 * 4 * 3, "optimizer": step * 16, "inference": 0},
            "corpus_sha256": Run.load(bench.run + name).corpus_sha256,
        }
        bench.prints(
            *("info", bench.run + name),
            lines=[
                f"file {bench.run}{name}",
                f"fingerprint {found['fingerprint']}",
                f"step {step}",
                "parameters 3,341: E (257, 4), W (4, 2, 257), b (257,)",
                *(f"stream {name} at word {at:,}" for name, at in found["streams"].items()),
                f"corpus {found['corpus_sha256']}",
                *(
                    f"config {table}.{key} = {value!r}"
                    for table, keys in found["config"].items()
                    for key, value in keys.items()
                    if value is not None
                ),
            ],
        )
    assert bench.json("info", bench.run)["step"] == 40


@row("diff", "A", "B", "--json")
def _(bench: Bench) -> None:
    bench.train("--set", "run.seed=1")
    bench.train("--set", "run.seed=2", out="other")
    for a, b, values in (("run", "other", ("1", "2")), ("other", "run", ("2", "1"))):
        found = bench.call("diff", a, b, "--json")
        first = json.loads(found.out)["differences"][0]
        assert (found.status, json.loads(found.out)["same"]) == (1, False)
        assert "run.seed" in first["what"]
        assert (str(first["a"]), str(first["b"])) == values
        said = bench.call("diff", a, b)
        assert said.status == 1
        assert f"  A  {first['a']}\n  B  {first['b']}\n" in said.out
    assert bench.json("diff", "run", "run")["same"] is True
    bench.train("--set", "sampling.prompt=Twice", "--set", "run.seed=1", out="third")
    same = bench("diff", "run", "third")
    assert same.out == "the same: config, text, merges, losses, weights and moments, bit for bit\n"
    assert same.err == "these keys differ, and decide no weights: sampling.prompt\n"
    assert bench("diff", "run", "run").err == ""


@row("config", "KEY", "--json")
def _(bench: Bench) -> None:
    everything, one = bench.json("config"), bench.json("config", "optimizer.decay")
    assert one == {"optimizer.decay": everything["optimizer.decay"]}
    table = bench.json("config", "optimizer")
    assert table.keys() == {name for name in everything if name.startswith("optimizer.")}
    out = bench("config", "optimizer.decay").out
    key = KEYS["optimizer.decay"]
    bench.prints(
        *("config", "optimizer.decay"),
        lines=["[optimizer]", f"# {key.comment}", f'decay = "{key.default}" # {key.rule}'],
    )
    assert out.startswith("[optimizer]\n# ")
    assert bench("config").out == Path(str(shipped()["fables"])).read_text(encoding="utf-8")


@row("train", "CONFIG", "--out", "--set", "--text")
def _(bench: Bench) -> None:
    Path("text.txt").write_text("one two three " * 9)
    Path("mine.toml").write_text("[run]\nseed = 77\n")
    result = bench("train", "mine.toml", *SHORT, "--text", "text.txt")
    assert "trained 2 steps: runs/mine/step-000002.safetensors\n" in result.out
    config = bench.config("runs/mine")
    assert (config.run.seed, config.training.steps) == (77, 2)
    assert list(config.corpus.text) == [str(Path("text.txt").absolute())]
    bench.train("--set", "run.seed=5", out="there")
    assert bench.config("there").run.seed == 5
    assert (
        bench.json("info", "there")["corpus_sha256"]
        != bench.json("info", "runs/mine")["corpus_sha256"]
    )


@row("train", "--resume", "--report")
def _(bench: Bench) -> None:
    bench.train("--set", 'optimizer.decay="constant"')
    assert not Path("run/report.html").exists()
    longer = ["--set", "training.steps=3", "--report"]
    result = bench("train", "--resume", "--out", "run", *longer)
    assert result.out.startswith("report run/report.html\ntrained 3 steps: run/step-000003.")
    assert Path("run/report.html").stat().st_size > 10_000


@row("train", "--progress")
def _(bench: Bench) -> None:
    assert bench.train().err.startswith("training: steps 1 to 2\n")
    assert "training: 100%" in bench.train("--progress", out="with").err
    assert "%|" not in bench.train("--no-progress", out="without").err


def _tiny_demo(bench: Bench, *options: str) -> Result:
    return bench("demo", *SHORT, *options)


@row("demo", "--out", "--set", "--progress")
def _(bench: Bench) -> None:
    plain = _tiny_demo(bench)
    assert Path("runs/demo/step-000002.safetensors").is_file()
    assert "training: steps 1 to 2\n" in plain.err
    assert "twin: steps 1 to 2\n" in plain.err
    for free in (Path("runs/demo-2"), Path("runs/demo-3")):  # where the next ones go
        assert _free_folder() == free
        free.mkdir()
    shown = _tiny_demo(bench, "--out", "there", "--progress", "--set", "run.seed=4")
    config = bench.config("there")
    assert config.run.seed == 4
    assert "training: 100%" in shown.err
    assert "twin: 100%" in shown.err

    for what in ("batches", "losses", "weights"):
        assert f"\nSame {what} at every step: yes\n" in shown.out
    again = load("there/step-000002.safetensors")
    record = Run.load("there").generate(
        prompt := config.sampling.prompt,
        **asdict(config.sampling.policy) | {"min_new_tokens": 60},
    )
    assert shown.out.startswith(
        f"Training {257 * 4 * 3 + 257:,} weights for 2 steps, with samples.\n"
        "Training its twin, which is never asked for text.\n"
        "Random numbers drawn for 1 samples: "
    )
    assert shown.out.endswith(
        f"\nFingerprint: {again.fingerprint}\n\nText from the trained model:\n\n{prompt}{record}\n"
        f"\nEverything is in there; go on with: minigen generate there {prompt} "
        f"--temperature {config.sampling.temperature}\n"
    )


@row("demo", "--report")
def _(bench: Bench) -> None:
    out = _tiny_demo(bench, "--out", "there", "--report").out
    assert "report there/report.html\n" in out
    assert Path("there/report.html").is_file()


@row("report", "RUN", "--out")
def _(bench: Bench) -> None:
    bench.train()
    for given, written in (([], "run/report.html"), (["--out", "page.html"], "page.html")):
        assert bench("report", "run", *given).out == f"report {written}\n"
        assert bench.writer is not None
        assert load("run").fingerprint[:12] in Path(written).read_text(encoding="utf-8")


@row("sweep", "CONFIG", "--text", "--set", "--seeds", "--out", "--resume")
def _(bench: Bench) -> None:
    Path("text.txt").write_text("one two three " * 9)
    tiny = [*SHORT, "--text", "text.txt", "--seeds", "3:5"]
    result = bench("sweep", "bigram", *tiny, "--set", "optimizer.weight_decay=0.2,0.3")
    folders = [path for path in Path("runs/bigram-sweep").iterdir() if path.is_dir()]
    configs = [bench.config(str(folder)) for folder in folders]
    found = {(config.run.seed, config.optimizer.weight_decay) for config in configs}
    assert found == {(3, 0.2), (3, 0.3), (4, 0.2), (4, 0.3)}
    assert {config.corpus.text for config in configs} == {(str(Path("text.txt").absolute()),)}
    Path("runs/bigram-sweep").rename("moved")
    again = bench("sweep", "--resume", "--out", "moved")
    assert "nothing left to do: all 4 runs are done" in again.err
    assert again.out == result.out


@row("sweep", "--progress")
def _(bench: Bench) -> None:
    tiny = [*SHORT]
    assert "step" not in bench("sweep", *tiny, "--out", "plain").err
    shown = bench("sweep", *tiny, "--progress", "--out", "shown").err
    assert re.search(r"(step/s|s/step), 1 of 1 runs\]", shown)


@row("verify", "MODEL", "--text", "--segments", "--seed", "--json", "--progress")
def _(bench: Bench) -> None:
    found = bench.json("verify", bench.run)
    assert (found["verified"], found["share"], len(found["segments"])) == (True, 1.0, 4)
    default, zero, one = (
        bench.json("verify", bench.run, "--segments", "1", *seed)["segments"]
        for seed in ([], ["--seed", "0"], ["--seed", "1"])
    )
    assert default == zero != one
    assert len(default) == len(one) == 1
    first = f"{bench.run}/step-000010.safetensors"
    assert f"file           {first}, step 10\n" in bench("verify", first).out
    Path("other.txt").write_text("another text")
    other = bench.call("verify", first, "--text", "other.txt")
    assert (other.status, "SHA-256" in other.err) == (1, True)
    assert re.search(r"%\|.*(step/s|s/step)\]", bench("verify", first, "--progress").err)
    assert "%|" not in bench("verify", first).err


@row("verify", "--texts", "--draft")
def _(bench: Bench) -> None:
    draft = ["--draft", f"{bench.run}/step-000020.safetensors"]
    Path("true.jsonl").write_text(json.dumps(bench.generate(*draft)))
    Path("false.jsonl").write_text(json.dumps(bench.generate(*draft) | {"token_ids": [1, 2]}))
    checked = bench.json("verify", bench.run, "--texts", "true.jsonl", *draft)
    assert checked == {"verified": True, "texts": [{"line": 1, "holds": True, "first_token": None}]}
    without = bench.call("verify", bench.run, "--texts", "true.jsonl")
    assert (without.status, "cannot be told" in without.out) == (1, True)
    said = bench("verify", bench.run, "--texts", "true.jsonl", *draft).out
    assert said == (
        "line 1: true, 20 tokens\n1 of 1 texts are what the model writes, token by token\n"
    )
    Path("empty.jsonl").touch()
    empty = bench.call("verify", bench.run, "--texts", "empty.jsonl", "--json")
    assert (empty.status, empty.out) == (1, '{"verified": false, "texts": []}\n')
    wrong = bench.call("verify", bench.run, "--texts", "false.jsonl", *draft)
    assert (wrong.status, "NOT TRUE" in wrong.out) == (1, True)


@row("prove", "CONFIG", "--text", "--set", "--share", "--json", "--progress")
def _(bench: Bench) -> None:
    from minigen.proof import proving, sharing
    from minigen.proof.laboratory import Claim, Control

    asked: list[Config] = []

    def prove(config: Config, *, progress: Any) -> Iterator[Claim]:
        asked.append(config)
        progress("reading", 1, 2)
        return iter([Claim("a claim", True, "its evidence", Control("a control", True))])

    bench.patch.setattr(proving, "prove", prove)
    bench.patch.setattr(proving, "EXPERIMENTS", proving.EXPERIMENTS[:1])
    bench.patch.setattr(sharing, "facts", lambda config, claims: {"seed": str(config.run.seed)})
    plain = bench("prove", "names", "--set", "run.seed=6", "--text", "x.txt")
    assert plain.out.endswith("\nEverything holds.\n")
    assert (asked[0].run.seed, list(asked[0].corpus.text)) == (6, [str(Path("x.txt").absolute())])
    assert asked[0].override({"run.seed": 0, "corpus.text": "fables"}) == Config.load(
        "names", {"run.seed": 0, "corpus.text": "fables"}
    )
    shared = bench("prove", "--share")
    assert shared.out.endswith("\n```\nseed          0\n```\n")
    found = bench.json("prove", "--share")
    assert (found["holds"], found["share"]) == (True, {"seed": "0"})
    assert found["claims"][0]["control"] == {"description": "a control", "caught": True}
    assert "share" not in bench.json("prove")
    assert "reading" in bench("prove", "--progress").err
    assert "1 of 1: sampling [" in bench("prove", "--progress").err
    assert plain.err == "1 of 1: sampling\n"


CHECKS = list(
    {
        id(check): (command, check) for command, rows in ROWS.items() for check in rows.values()
    }.values()
)


@pytest.mark.parametrize(
    ("command", "check"),
    CHECKS,
    ids=[
        " ".join([command, *(name for name, other in ROWS[command].items() if other is check)])
        for command, check in CHECKS
    ],
)
def test_an_option_changes_what_comes_out_as_it_says(
    minigen: Command,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    check: Callable[[Bench], None],
) -> None:
    check(Bench(minigen, model, monkeypatch))


def test_every_option_of_every_command_has_a_row() -> None:
    context = click.Context(cli.cli, **cli.cli.context_settings)
    for name in cli.cli.list_commands(context):
        command = cli.cli.get_command(context, name)
        assert command is not None
        found = {
            parameter.opts[0].upper()
            if isinstance(parameter, click.Argument)
            else parameter.opts[0]
            for parameter in command.get_params(context)
            if "--help" not in parameter.opts
        }
        policy = set(POLICY) if name in ("generate", "next") else set()
        assert found == {*ROWS[name], *policy}, name


def test_a_default_of_generate_is_the_same_wherever_it_stands() -> None:
    command = cli.cli.get_command(click.Context(cli.cli), "generate")
    assert command is not None
    defaults = {p.name: p.default for p in command.params if isinstance(p.default, int | float)}
    assert defaults["max_new_tokens"] == 200
    assert defaults["num_draft_tokens"] == 4
    compared = set()
    for function in (
        Generator.pieces,
        Generator.beams,
        Run.generate,
        beam_search,
        Task,
        speculate,
    ):
        for name, parameter in inspect.signature(function).parameters.items():
            # Of beams the command has one, which is none; the library's search asks for several.
            if parameter.default not in (parameter.empty, None) and name in defaults:
                compared.add(name)
                assert name == "num_beams" or parameter.default == defaults[name], function
    assert compared >= {"max_new_tokens", "num_draft_tokens", "num_samples", "length_penalty"}


# ── What no option shows ─────────────────────────────────────────────────────────────────────────


def test_candidates_that_are_equally_likely_stand_by_their_ids(
    minigen: Command, model: Path
) -> None:
    equal = [part for token in (90, 5, 40) for part in ("--logit-bias", f"{token}=1e300")]
    found = json.loads(minigen("next", str(model), "a", "--json", *equal).out)
    ids = [candidate["token_id"] for candidate in found["candidates"]]
    assert (ids, found["greedy_token_id"]) == ([5, 40, 90], 5)


def test_a_prompt_is_none_of_the_new_tokens_of_next(minigen: Command, model: Path) -> None:
    command = ("next", str(model), "The end.", "--top", "257", "--json")
    for options, count in (((), 1), (("--min-new-tokens", "1"), 0)):
        found = json.loads(minigen(*command, *options).out)["candidates"]
        assert [one["token_id"] for one in found].count(256) == count


def test_a_demo_asks_for_a_text_of_sixty_tokens_at_least(
    minigen: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    generate = Run.generate
    monkeypatch.setattr(
        Run, "generate", lambda run, *a, **options: asked.append(options) or generate(run, *a)
    )
    assert minigen("demo", *SHORT).status == 0
    assert [options["min_new_tokens"] for options in asked[-1:]] == [60]


@pytest.mark.parametrize("which", ["run", "twin"])
def test_a_demo_that_is_interrupted_saves_its_run_and_says_how_to_go_on(
    minigen: Command, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    watch = Demonstration.watch

    def interrupted(demonstration: Any, run: Run, records: Iterator[Any]) -> Iterator[Any]:
        for record in watch(demonstration, run, records):
            if run is getattr(demonstration, which):
                signal.raise_signal(signal.SIGTERM)
            yield record

    monkeypatch.setattr(Demonstration, "watch", interrupted)
    result = minigen("demo", *SHORT)
    step = {"run": 1, "twin": 2}[which]
    assert (result.status, "Same" in result.out) == (130, False)
    assert result.err.endswith(
        f"interrupted at step {step}, saved runs/demo/step-{step:06d}.safetensors\n"
        "to go on: minigen train --resume --out runs/demo\n"
    )
    assert load("runs/demo")


def test_a_demo_is_for_one_process(minigen: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    several = Workers()
    several.size = 2
    several.fail_together = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(workers, "from_mpiexec", lambda: several)
    result = minigen("demo", *SHORT)
    assert (result.status, result.err.count("\n")) == (2, 1)
    assert not Path("runs").exists()


@pytest.mark.parametrize("holds", [True, False])
def test_a_demo_whose_finding_fails_says_so_to_its_status(
    minigen: Command, monkeypatch: pytest.MonkeyPatch, holds: bool
) -> None:
    findings = [SimpleNamespace(text="good", holds=True), SimpleNamespace(text="x", holds=holds)]
    monkeypatch.setattr(Demonstration, "findings", lambda self: findings)
    result = minigen("demo", *SHORT)
    assert (result.status, "\ngood\nx\n" in result.out) == (0 if holds else 1, True)
