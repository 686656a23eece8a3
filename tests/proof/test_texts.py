"""A text that can be checked: written again from its own line, and any change of it is caught."""

import json

import pytest

from minigen import Config, Run
from minigen.cli import run as command

SETTINGS = {
    "training.steps": 4,
    "training.batch_size": 16,
    "tokenizer.vocab_size": 270,
    "model.context_length": 3,
    "model.embedding_dim": 4,
    "evaluation.every": 0,
    "sampling.every": 0,
}


def write_model(path, **changes):
    run = Run(Config.load("fables", {**SETTINGS, **changes}))
    run.train()
    run.save(path)
    return str(path)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model and a smaller one with the same tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    draft = {"model.context_length": 1, "model.embedding_dim": 2}
    return (
        write_model(folder / "model.safetensors"),
        write_model(folder / "draft.safetensors", **draft),
    )


@pytest.fixture
def generate(models, capsys):
    """Return the lines that `generate --json` prints."""

    def call(*options):
        assert command(["generate", models[0], *options, "--json"]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return call


@pytest.fixture
def verify(models, tmp_path, capsys):
    """Verify lines; return exit status, the verdicts, and what a reader sees."""

    def call(lines, *options):
        path = tmp_path / "lines.jsonl"
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("\n".join(texts) + "\n")
        arguments = ["verify", models[0], "--texts", str(path), *options]
        status = command([*arguments, "--json"])
        found = json.loads(capsys.readouterr().out)
        assert command(arguments) == status
        output = capsys.readouterr()
        assert "Traceback" not in output.err
        assert found["verified"] == (status == 0)
        return status, found["texts"], output.out

    return call


SHORT = ("--max-new-tokens", "12")
WAYS = {
    "sampling": ["Once", *SHORT],
    "no prompt": [*SHORT],
    "a seed": ["Once", "--seed", "7", *SHORT],
    "greedy": ["Once", "--greedy", *SHORT],
    "samples": ["Once", "--num-samples", "3", *SHORT],
    "beams": ["Once", "--num-beams", "3", "--length-penalty", "0.5", *SHORT],
    "a stop string": ["Once", "--stop", "e", "--stop", "an", "--max-new-tokens", "60"],
    "a dead end": ["Once", "--no-repeat-ngram-size", "1", "--max-new-tokens", "400"],
    "a policy": [
        *("Once", "--temperature", "0.7", "--top-k", "40", "--top-p", "0.9"),
        *("--logit-bias", "101=-2.5", "--suppress-token", "32", "--frequency-penalty", "0.1"),
        *("--min-new-tokens", "3", *SHORT),
    ],
}


@pytest.mark.parametrize("way", WAYS)
def test_what_was_written_is_true(generate, verify, way):
    lines = generate(*WAYS[way])
    status, verdicts, said = verify(lines)
    assert status == 0
    numbers = range(1, len(lines) + 1)
    assert verdicts == [{"line": n, "holds": True, "first_token": None} for n in numbers]
    assert f"{len(lines)} of {len(lines)} texts are" in said


def test_so_are_the_texts_of_many_prompts_each_alone(generate, verify, tmp_path):
    (tmp_path / "prompts").write_text("Once\nThe fox\n\nOnce\n")
    lines = generate("--prompts", str(tmp_path / "prompts"), *SHORT)
    assert len(lines) == 4
    assert verify(lines)[0] == 0
    assert verify(lines[2:3])[0] == 0


def change_token(line, index):
    ids = list(line["token_ids"])
    ids[index] = 65 if ids[index] != 65 else 66
    return {**line, "token_ids": ids}


def change_log_probability(line, index):
    figures = list(line["log_probabilities"])
    figures[index] -= 1e-12
    return {**line, "log_probabilities": figures}


@pytest.mark.parametrize(
    ("change", "first_token"),
    [
        (lambda line: {**line, "text": line["text"].replace(line["text"][3], "§", 1)}, None),
        (lambda line: {**line, "text": line["text"] + " "}, None),
        (lambda line: change_token(line, 0), 0),
        (lambda line: change_token(line, 11), 11),
        (lambda line: {**line, "token_ids": line["token_ids"][:-1]}, 11),
        (lambda line: {**line, "token_ids": [*line["token_ids"], 65]}, 12),
        (lambda line: change_log_probability(line, 5), 5),
        (lambda line: {**line, "log_probabilities": line["log_probabilities"][1:]}, 0),
        (lambda line: {**line, "finish_reason": "stop"}, None),
        (lambda line: {**line, "prompt": "Twice"}, 0),
        (lambda line: {**line, "seed": 1}, 0),
        (lambda line: {**line, "sample": 1}, 0),
        (lambda line: {**line, "policy": {"temperature": 0.1}}, 0),
        (lambda line: {**line, "max_new_tokens": 11}, 11),
    ],
)
def test_any_change_is_caught_where_it_is(generate, verify, change, first_token):
    [line] = generate("Once upon", "--top-k", "200", "--seed", "3", *SHORT)
    status, verdicts, said = verify([line, change(line), line])
    assert status == 1
    assert [one["holds"] for one in verdicts] == [True, False, True]
    assert first_token is None or verdicts[1]["first_token"] == first_token
    assert "line 2: NOT TRUE, " in said
    assert "2 of 3 texts are" in said


@pytest.mark.parametrize(
    "extra",
    [
        {"acceptance_rate": 0.5},
        {"acceptance_rate": None},
        {"length_penalty": 1.0},
        {"mood": "x" * 999},
    ],
    ids=lambda extra: str(extra)[:30],
)
def test_a_key_that_the_text_written_again_lacks_is_told(generate, verify, models, extra):
    lines = generate("Once", *SHORT) + generate("Once", "--greedy", *SHORT)
    if extra.keys() != {"length_penalty"}:
        lines += generate("Once", "--num-beams", "2", *SHORT)
    for line in lines:
        status, verdicts, said = verify([{**line, **extra}])
        assert (status, verdicts) == (1, [{"line": 1, "holds": False, "first_token": None}])
        assert f"its {next(iter(extra))} is " in said
    [drafted] = generate("Once", "--draft", models[1], *SHORT)
    status, verdicts, _ = verify([{**drafted, "mood": 1}])
    assert (status, verdicts[0]["holds"]) == (1, False)


@pytest.mark.parametrize("way", [["--greedy"], ["--num-beams", "2"]], ids=["greedy", "beams"])
def test_a_seed_and_a_sample_of_a_text_that_draws_nothing_are_told(generate, verify, way):
    [line] = generate("Once", *way, *SHORT)
    for change in ({"seed": 0}, {"seed": 7}, {"sample": 1}):
        assert verify([{**line, **change}])[1][0]["holds"] is False


def test_the_text_of_another_model_is_named(generate, verify, models, capsys):
    assert command(["generate", models[1], "Once", *SHORT, "--json"]) == 0
    _, verdicts, said = verify(capsys.readouterr().out.splitlines())
    assert verdicts == [{"line": 1, "holds": False, "first_token": None}]
    assert "another model wrote it" in said


@pytest.mark.parametrize("policy", [[], ["--greedy"]], ids=["sampling", "greedy"])
def test_what_a_draft_had_a_say_in_needs_the_draft(generate, verify, models, policy):
    lines = generate("Once", "--draft", models[1], *policy, *SHORT)
    status, verdicts, said = verify(lines)
    assert (status, verdicts[0]["holds"]) == (1, None)
    assert "give --draft, the model" in said
    assert verify(lines, "--draft", models[1])[:2] == (0, [{**verdicts[0], "holds": True}])
    assert verify(lines, "--draft", models[0])[1][0]["holds"] is None
    forged = change_log_probability(lines[0], 4)
    assert verify([forged])[1] == [{"line": 1, "holds": False, "first_token": 4}]
    assert verify([forged], "--draft", models[1])[1][0]["holds"] is False
    assert verify([{**lines[0], "text": "x"}])[1][0]["holds"] is False
    assert verify([{**lines[0], "acceptance_rate": 2.0}], "--draft", models[1])[0] == 1


@pytest.mark.parametrize(
    "line",
    [
        "not JSON",
        "[]",
        "{}",
        "[" * 100_000,
        '{"text": 1, "text": 2}',
    ],
    ids=lambda line: line[:9],
)
def test_what_is_no_line_of_generate_is_said(generate, verify, line):
    [good] = generate("Once", *SHORT)
    status, verdicts, _ = verify([line, good])
    assert (status, [one["holds"] for one in verdicts]) == (1, [False, True])


@pytest.mark.parametrize(
    "change",
    [
        {"policy": {"top_k": "many"}},
        {"policy": {"temprature": 1}},
        {"policy": None},
        {"seed": None},
        {"seed": -1.5},
        {"sample": -1},
        {"stop": 5},
        {"prompt": 3},
        {"token_ids": None},
        {"log_probabilities": None},
        {"log_probabilities": "x"},
        {"max_new_tokens": 0},
        {"num_beams": "x"},
        {"draft": "0", "token_ids": [-1]},
    ],
    ids=str,
)
def test_senseless_values_make_a_text_untrue_and_no_error(generate, verify, change):
    [line] = generate("Once", *SHORT)
    status, verdicts, _ = verify([{**line, **change}])
    assert (status, verdicts[0]["holds"]) == (1, False)


def test_a_prompt_that_json_could_not_hold_is_not_called_a_lie(generate, verify):
    [line] = generate("Once", *SHORT)
    status, verdicts, said = verify([{**line, "prompt": "\ufffd"}])
    assert (status, verdicts[0]["holds"]) == (1, None)
    assert "its prompt was not UTF-8, most likely" in said
    # Where the tokens happen to be the same, their probabilities are others.
    bare = {**line, "prompt": "\ufffd"}
    [right] = generate("\ufffd", *SHORT)
    status, verdicts, _ = verify([{**right, "log_probabilities": bare["log_probabilities"]}])
    assert (status, verdicts[0]["holds"]) == (1, None)


def test_a_stop_string_that_json_could_not_hold_is_not_called_a_lie(generate, verify):
    [line] = generate("Once", *SHORT, "--stop", "\udcff")
    assert line["stop"] == ["\ufffd"]
    status, verdicts, said = verify([{**line, "finish_reason": "stop"}])
    assert (status, verdicts[0]["holds"]) == (1, None)
    assert "its stop was not UTF-8, most likely" in said


def test_a_file_without_a_text_and_options_without_meaning_are_refused(models, tmp_path, capsys):
    (tmp_path / "empty").write_text("\n")
    texts = ["verify", models[0], "--texts", str(tmp_path / "empty")]
    for arguments, status, told in (
        (texts, 1, "empty holds no text: give what generate --json printed"),
        (["verify", models[0], "--texts", str(tmp_path / "gone")], 1, "No such file or directory"),
        ([*texts, "--segments", "1"], 2, "so --segments has no meaning with it"),
        ([*texts, "--seed", "1"], 2, "so --seed has no meaning with it"),
        ([*texts, "--text", "x"], 2, "so --text has no meaning with it"),
        (["verify", models[0], "--draft", models[1]], 2, "give --texts too"),
    ):
        assert command(arguments) == status
        err = capsys.readouterr().err
        assert (err.count("\n"), err.endswith(f"{told}\n")) == (1, True)
