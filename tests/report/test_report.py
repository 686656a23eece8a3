"""The report: one page, self-contained, the same bytes for the same run, all data shown as text."""

import base64
import hashlib
import json
import re
import shlex
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from minigen import cli
from minigen.decoding.scoring import baselines, evaluate
from minigen.errors import MinigenError
from minigen.report import facts, page
from minigen.report.page import MOST_WEIGHT_BYTES, write_report
from minigen.report.projection import principal_coordinates
from minigen.text import corpus
from minigen.text.tokenizer import ByteTokenizer
from minigen.training.checkpoint import locate
from minigen.training.config import Config, differences, parse_override
from minigen.training.folder import RunFolder
from minigen.training.keys import KEYS
from minigen.training.logs import read_lines
from minigen.training.run import Run

FREE = {key for key, entry in KEYS.items() if not entry.decides_weights}
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)><!-- \u2028 \u00e9 &lt;"
SETTINGS = {
    "tokenizer.vocab_size": 270,
    "model.context_length": 2,
    "model.embedding_dim": 4,
    "training.steps": 6,
    "training.batch_size": 16,
    "evaluation.every": 3,
    "sampling.every": 2,
    "sampling.max_new_tokens": 5,
    "checkpoint.every": 3,
}


DATA = Path(__file__).parents[1] / "data"


def train(path, **settings):
    config = Config.load("fables", {**SETTINGS, **settings})
    folder = RunFolder.create(path, Run(config))
    for _ in folder.steps():
        pass
    return path


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    return train(tmp_path_factory.mktemp("report") / "run")


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


class Page(HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.tags, self.scripts, self.styles = [], [], []
        self.feed(path.read_text())
        self.data = json.loads(self.scripts[0])

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, tuple(attributes)))

    def handle_data(self, data):
        if self.lasttag == "script" and data.strip():
            self.scripts.append(data)


def page_of(run):
    return Page(write_report(run))


def test_the_same_run_gives_the_same_bytes_wherever_a_folder_of_its_name_lies(run, tmp_path):
    first = write_report(run).read_bytes()
    assert write_report(run).read_bytes() == first
    elsewhere = shutil.copytree(run, tmp_path / "elsewhere" / run.name)
    assert write_report(elsewhere).read_bytes() == first


def test_the_page_asks_for_nothing_from_outside(run):
    page = page_of(run)
    for tag, attributes in page.tags:
        for name, value in attributes:
            if name in ("src", "href", "action", "srcset", "data"):
                assert value.startswith(("#", "data:")), (tag, name, value)
    policies = [dict(attributes) for tag, attributes in page.tags if tag == "meta"]
    policy = next(meta for meta in policies if "http-equiv" in meta)
    assert policy["http-equiv"] == "Content-Security-Policy"
    assert policy["content"].startswith("default-src 'none'; ")


def test_the_browser_is_told_to_run_these_three_scripts_alone(run):
    page = page_of(run)
    allowed = re.findall(r"'sha256-([^']+)'", str(page.tags))
    digests = [hashlib.sha256(script.encode()).digest() for script in page.scripts[1:]]
    assert allowed == [base64.b64encode(digest).decode() for digest in digests]
    assert len(allowed) == 3


def test_data_from_models_and_files_is_never_markup(run, tmp_path):
    harmless = page_of(run)
    hostile = train(tmp_path / "hostile", **{"sampling.prompt": HOSTILE})
    lines = read_lines(hostile / "samples.jsonl")
    for line in lines:
        line["text"] = HOSTILE
    (hostile / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = page_of(hostile)
    assert page.tags == harmless.tags
    assert page.data["prompt"] == HOSTILE
    assert [sample["text"] for sample in page.data["samples"]] == [HOSTILE] * 3
    assert "innerHTML" not in page.scripts[2] + page.scripts[3]


def test_the_page_holds_what_the_run_recorded(run):
    data = page_of(run).data
    log = read_lines(run / "metrics.jsonl")
    assert data["fingerprint"] == log[-1]["fingerprint"]
    assert data["loss"]["last"] == {"step": 6, "loss": log[-1]["loss"]}
    assert data["loss"]["validation"]["validation_loss"] == log[-1]["validation_loss"]
    assert [sample["step"] for sample in data["samples"]] == [2, 4, 6]
    assert data["streams"]["optimizer"] == 6 * 16
    assert data["streams"]["agree"] is True
    assert data["repeatable"]["position"] == log[4]["inference_position"]
    assert data["missing"] == {}


def test_the_page_carries_the_weights_bit_for_bit(run):
    weights = base64.b64decode(page_of(run).data["weights"])
    model = Run.load(run).model
    assert weights == model.flat.astype("<f8").tobytes()


def test_weights_too_large_to_travel_leave_the_twin_out(run, monkeypatch):
    assert MOST_WEIGHT_BYTES == 8_000_000
    monkeypatch.setattr(page, "MOST_WEIGHT_BYTES", 8 * Run.load(run).model.flat.size)
    assert page_of(run).data["weights"] is not None
    monkeypatch.setattr(page, "MOST_WEIGHT_BYTES", 8 * Run.load(run).model.flat.size - 1)
    assert page_of(run).data["weights"] is None


def test_lines_to_compare_with_are_those_of_evaluate(run):
    lines = page_of(run).data["loss"]["lines"]
    loaded = Run.load(run)
    expected = evaluate(loaded.model, loaded.read_corpus().training)
    assert sorted(lines.values()) == sorted(expected.baselines.values())
    unit = page_of(run).data["loss"]["units"]["training_unit"]
    assert unit * expected.loss == pytest.approx(expected.bits_per_byte)


def test_counts_do_not_depend_on_blocks(run, monkeypatch):
    tokens = Run.load(run).read_corpus().training
    whole = baselines(tokens, 270), facts.occurring(tokens, 270)
    monkeypatch.setattr(corpus, "BLOCK", 1000)
    assert (baselines(tokens, 270), facts.occurring(tokens, 270)) == whole


def test_long_runs_keep_500_samples_with_the_last(run):
    sample = read_lines(run / "samples.jsonl")[0]
    lines = [json.dumps({**sample, "step": step}) + "\n" for step in range(1, 1202)]
    (run / "samples.jsonl").write_text("".join(lines))
    data = page_of(run).data
    assert [shown["step"] for shown in data["samples"]] == list(range(1, 1202, 3))
    assert data["samplesTaken"] == 1201


def test_the_page_of_the_default_config_stays_below_6_megabytes(tmp_path):
    config = Config.load("fables")
    RunFolder.create(tmp_path / "run", Run(config))
    loss = 6.269201635052013
    line = f'"loss": {loss}, "loss_bits": "{loss.hex()}", "learning_rate": 0.007, '
    line += '"optimizer_position": 384000, "inference_position": 600}\n'
    lines = [f'{{"step": {step}, {line}' for step in range(1, config.training.steps + 1)]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines))
    assert write_report(tmp_path / "run").stat().st_size < 6_000_000


def test_a_checkpoint_alone_gives_a_page_that_says_what_it_cannot_know(run, tmp_path):
    alone = shutil.copy(locate(run), tmp_path / "model.safetensors")
    written = write_report(alone)
    assert written == tmp_path / "model.html"
    data = Page(written).data
    assert (data["loss"], data["samples"], data["streams"]) == (None, [], None)
    assert data["missing"]["metrics"].startswith("A checkpoint alone")
    assert data["missing"]["samples"].startswith("A checkpoint alone")
    assert data["weights"] is not None


def test_a_checkpoint_of_format_1_writes_its_text_and_claims_no_training(tmp_path):
    old, new = (
        Page(write_report(DATA / f"golden-{n}.safetensors", tmp_path / f"{n}.html")).data
        for n in (1, 2)
    )
    assert old["weights"]
    assert "with the arithmetic of format 1" in old["training"]["missing"]
    assert "command trains with that of format 2, to other weights" in old["reproduce"]["claim"]
    assert "verify" not in old["reproduce"]["notes"]
    assert new["reproduce"]["claim"].endswith("must be the one below, every digit of it.")
    assert "Or let minigen verify train it again" in new["reproduce"]["notes"]


def test_a_run_folder_without_logs_gives_a_page_that_says_so(run):
    (run / "metrics.jsonl").unlink()
    (run / "samples.jsonl").write_bytes(b"")
    data = page_of(run).data
    assert data["missing"]["metrics"] == "The run folder holds no line of metrics.jsonl."
    assert data["missing"]["samples"] == "The run folder holds no line of samples.jsonl."


def test_lines_half_written_in_a_crash_are_left_out(run):
    whole = page_of(run).data
    for name in ("metrics.jsonl", "samples.jsonl"):
        with open(run / name, "ab") as log:
            log.write(b'{"step": 7, "loss": 2.')
    assert page_of(run).data == whole


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 7}',
        "[1]",
        "{",
        '{"step": "7", "loss": 1.0, "optimizer_position": 1, "inference_position": 1}',
        '{"step": 7, "loss": NaN, "optimizer_position": 1, "inference_position": 1}',
        '{"step": 7, "loss": 1.0, "optimizer_position": 1, "inference_position": 1,'
        ' "validation_loss": "<b>"}',
    ],
)
def test_a_damaged_line_is_named_and_nothing_is_written(run, line):
    with open(run / "metrics.jsonl", "a") as log:
        log.write(line + "\n")
    with pytest.raises(MinigenError, match=r"metrics\.jsonl.*resuming the run mends it"):
        write_report(run)
    assert not (run / "report.html").exists()


def test_an_external_text_is_looked_for_where_the_folder_says(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("so it was and so it is.\n\n" * 40)
    changes = {"corpus.text": [str(text)], "tokenizer.vocab_size": 257}
    run = train(tmp_path / "run", **changes)
    assert page_of(run).data["missing"] == {}
    alone = shutil.copy(locate(run), tmp_path / "alone.safetensors")
    assert "does not say where" in page_of(alone).data["missing"]["corpus"]
    text.write_text("changed\n" * 9)
    assert "has changed" in page_of(run).data["missing"]["corpus"]
    text.unlink()
    data = page_of(run).data
    assert "not where it was" in data["missing"]["corpus"]
    assert list(data["loss"]["lines"]) == ["ln V: no knowledge"]
    assert data["loss"]["units"]["training_unit"] is None
    assert str(tmp_path) not in (run / "report.html").read_text()
    assert "--text YOUR_TEXT" in data["reproduce"]["command"]


def test_a_run_on_text_from_memory_has_no_text_to_compare_with(tmp_path):
    config = Config.load("fables", {**SETTINGS, "tokenizer.vocab_size": 257})
    folder = RunFolder.create(tmp_path / "run", Run(config, text="to be or not to be. " * 50))
    list(folder.steps())
    assert "not read from a file" in page_of(tmp_path / "run").data["missing"]["corpus"]


def config_of_command(reproduce):
    words = shlex.split(reproduce["command"])
    assert words[:3] == ["minigen", "train", "fables"]
    settings = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    return Config.load("fables", dict(parse_override(setting) for setting in settings))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optimizer.betas": [0.5, 1e-300], "optimizer.decay": "linear", "run.seed": 2**62},
        {"optimizer.decay": "constant", "sampling.logit_bias": {"65": 1.5, "7": -2}},
        {"sampling.prompt": "it's \u202edef\x7f\x00 \U000e0041", "training.micro_batches": 2},
    ],
)
def test_the_command_shown_sets_what_decides_the_weights_and_nothing_else(run, settings, tmp_path):
    """The config beside it has everything, as text that can be seen: no mark turns a line round."""
    config = Config.load(run / "config.toml", settings)
    reproduce = page._reproduce(replace(facts.gather(run), config=config))
    shown = config_of_command(reproduce)
    assert {key for key, _, _ in differences(config, shown)} <= FREE
    assert not {key for key, _, _ in differences(Config.load(), shown)} & FREE
    (tmp_path / "again.toml").write_text(reproduce["config"], encoding="utf-8")
    assert Config.load(tmp_path / "again.toml") == config
    assert reproduce["command"].isprintable()
    assert reproduce["config"].replace("\n", "").isprintable()


def test_the_command_shown_gives_the_weights_of_a_run_with_a_logit_bias(tmp_path, minigen):
    shown = page_of(train(tmp_path / "run", **{"sampling.logit_bias": {"65": 1.5}})).data
    again = shlex.split(shown["reproduce"]["command"])[1:-1]
    assert minigen(*again, str(tmp_path / "again")).status == 0
    assert Run.load(tmp_path / "again").fingerprint == shown["fingerprint"]


def test_a_policy_that_the_twin_does_not_know_is_not_claimed(tmp_path):
    data = page_of(train(tmp_path / "run", **{"sampling.repetition_penalty": 1.2})).data
    assert (data["policy"], data["repeatable"]) == (None, None)


def test_streams_agree_only_where_every_position_is_step_times_batch_size(run):
    whole = facts.gather(run)
    assert page._streams(whole)["agree"] is True
    for number in range(len(whole.metrics)):
        for words in (1, -1, 16):
            metrics = [dict(line) for line in whole.metrics]
            metrics[number]["optimizer_position"] += words
            assert page._streams(replace(whole, metrics=metrics))["agree"] is False


def test_the_validation_curve_has_the_baselines_of_its_own_text(run):
    lines = page_of(run).data["loss"]["validation_lines"]
    loaded = Run.load(run)
    expected = evaluate(loaded.model, loaded.read_corpus().validation).baselines
    assert lines == {f"{name} entropy": expected[name] for name in ("unigram", "bigram")}
    data = page_of(run).data["loss"]
    assert lines != {name: data["lines"][name] for name in lines}


def test_a_log_that_says_other_weights_is_told(run):
    data = page_of(run).data
    assert data["logged"] == data["fingerprint"]
    lines = read_lines(run / "metrics.jsonl")
    lines[-1]["fingerprint"] = "0" * 64
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert page_of(run).data["logged"] == "0" * 64


@pytest.mark.parametrize(("key", "value"), [("loss_bits", "0x1p0"), ("learning_rate", None)])
def test_a_log_whose_bits_are_not_its_numbers_is_refused(run, key, value):
    lines = read_lines(run / "metrics.jsonl")
    lines[2][key] = value
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(MinigenError, match=f"line 3: {key}"):
        write_report(run)


def test_streams_show_where_words_were_drawn():
    lines = [(1, 8, 0), (2, 16, 3), (3, 24, 5), (4, 32, 5), (5, 40, 6)]
    log = [
        {"step": step, "optimizer_position": optimizer, "inference_position": inference}
        for step, optimizer, inference in lines
    ]
    bars = [(bar["start"], bar["step"], bar["words"]) for bar in page._drawn(log, "inference")]
    assert bars == [(1, 3, 5), (4, 5, 1)]
    bars = [(bar["start"], bar["step"], bar["words"]) for bar in page._drawn(log, "optimizer")]
    assert bars == [(0, 5, 40)]


def test_long_runs_are_thinned_but_keep_what_was_measured():
    log = [{"step": step} for step in range(1, 10_001)]
    log[776]["validation_loss"] = 1.0
    kept = [line["step"] for line in page._thinned(log)]
    assert len(kept) < 1600
    assert {1, 777, 10_000} <= set(kept)


@pytest.mark.parametrize(
    ("token", "label"),
    [
        (97, "a"),
        (60, "<"),
        (32, "␣"),
        (10, "⏎"),
        (9, "⇥"),
        (0, "\\x00"),
        (226, "\\xe2"),
        (256, "<|endoftext|>"),
        (257, "é"),
        (258, "é␣"),
    ],
)
def test_tokens_are_shown_as_text(token, label):
    tokenizer = ByteTokenizer([(0xC3, 0xA9), (257, 32)])
    assert facts.token_label(tokenizer, token) == label


def test_a_missing_library_is_one_line_that_says_how_to_install_it(run, monkeypatch):
    monkeypatch.setattr(page, "find_spec", lambda name: None if name == "altair" else object())
    with pytest.raises(MinigenError) as raised:
        write_report(run)
    assert str(raised.value) == ("a report needs altair: pip install 'minigen[report]'")


def test_the_command_writes_where_it_is_told(run, tmp_path, capsys):
    assert cli.run(["report", str(run)]) == 0
    assert cli.run(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_bytes() == (run / "report.html").read_bytes()
    output = capsys.readouterr().out
    assert output == f"report {run / 'report.html'}\nreport {tmp_path / 'page.html'}\n"


def test_the_command_refuses_what_is_no_run_in_one_line(tmp_path, capsys):
    assert cli.run(["report"]) == 2
    assert cli.run(["report", str(tmp_path / "nothing")]) == 1
    assert cli.run(["report", str(tmp_path)]) == 1
    assert all(line.startswith("Error: ") for line in capsys.readouterr().err.splitlines())


# Principal coordinates


def rows(shape, seed=0):
    words = np.random.Philox(seed).random_raw(shape[0] * shape[1]).reshape(shape)
    return (words >> np.uint64(11)) * 2.0**-53 * np.arange(1, shape[1] + 1)


@pytest.mark.parametrize("shape", [(60, 12), (5, 3), (3, 2), (300, 24)])
def test_principal_coordinates_are_those_of_an_eigenvalue_solver(shape):
    x = rows(shape)
    coordinates, shares = principal_coordinates(x)
    centered = x - x.mean(axis=0)
    values, vectors = np.linalg.eigh(centered.T @ centered)
    expected = centered @ vectors[:, [-1, -2]]
    np.testing.assert_allclose(np.abs(coordinates), np.abs(expected), atol=1e-3)
    np.testing.assert_allclose(shares, values[[-1, -2]] / values.sum(), atol=1e-5)


def test_principal_coordinates_are_the_same_bits_in_any_order_of_the_rows():
    x = rows((4000, 8))
    order = np.argsort(x[:, 0], kind="stable")
    np.testing.assert_array_equal(
        principal_coordinates(x[order])[0], principal_coordinates(x)[0][order]
    )


def test_rows_without_two_directions_lie_on_a_line_or_a_point():
    line = principal_coordinates(np.arange(12.0)[:, None] * [[1.0, 2.0]])[0]
    assert np.ptp(line[:, 0]) == pytest.approx(11 * 5**0.5)
    np.testing.assert_array_equal(line[:, 1], 0.0)
    for point in (np.ones((4, 3)), np.zeros((4, 3)), np.ones((1, 1))):
        np.testing.assert_array_equal(principal_coordinates(point)[0], 0.0)
