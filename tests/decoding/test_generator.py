"""The generator in front: what a command prints, a call returns; a run draws from its stream."""

import ast
import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import fields
from inspect import getsource, signature
from pathlib import Path
from threading import Thread
from typing import Any, get_type_hints

import numpy as np
import pytest

from minigen import Config, Generator, OptionError, Policy, Run, Stream, load
from minigen.decoding import policy
from minigen.decoding.generation import Piece, Task, complete, generate
from minigen.decoding.generator import _Settings
from minigen.decoding.policy import OPTIONS, PolicyOptions
from minigen.decoding.speculation import speculate
from minigen.model.model import Model
from minigen.training.keys import SamplingTable
from tests.conftest import PATIENCE, TINY, Result

Command = Callable[..., Result]


@pytest.fixture(scope="module")
def model(tiny_run: Path) -> Generator:
    return load(tiny_run)


@pytest.fixture
def run() -> Run:
    return Run(Config.load(overrides=TINY))


def json_lines(result: Result) -> list[dict[str, Any]]:
    assert result.status == 0
    return [json.loads(line) for line in result.out.splitlines()]


# ── The command of the same name gives the same ──────────────────────────────────────────────────

CALLS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "nothing": ([], {}),
    "a seed": (["--seed", "5"], {"seed": 5}),
    "a policy": (
        ["--temperature", "0.8", "--top-k", "40", "--seed", "1"],
        {"temperature": 0.8, "top_k": 40, "seed": 1},
    ),
    "greedy": (["--greedy"], {"temperature": 0}),
    "a stop string": (["--stop", "e", "--seed", "2"], {"stop": "e", "seed": 2}),
}


@pytest.mark.parametrize("case", CALLS)
def test_generate_is_the_command_of_that_name(
    minigen: Command, tiny_run: Path, model: Generator, case: str
) -> None:
    options, keywords = CALLS[case]
    command = ("generate", str(tiny_run), "Once", "--max-new-tokens", "12", "--json", *options)
    (line,) = json_lines(minigen(*command))
    text = model.generate("Once", max_new_tokens=12, log_probabilities=True, **keywords)
    assert (text.text, text.token_ids, text.finish_reason, text.log_probabilities) == (
        line["text"],
        line["token_ids"],
        line["finish_reason"],
        line["log_probabilities"],
    )


def test_several_prompts_and_samples_are_those_of_the_command(
    minigen: Command, tiny_run: Path, model: Generator
) -> None:
    Path("prompts").write_text("Once\nThen\n")
    options = ("--num-samples", "2", "--seed", "3", "--max-new-tokens", "9", "--json")
    lines = json_lines(minigen("generate", str(tiny_run), "--prompts", "prompts", *options))
    texts = model.generate(["Once", "Then"], num_samples=2, seed=3, max_new_tokens=9)
    assert [text.token_ids for text in texts] == [line["token_ids"] for line in lines]
    assert texts[2].token_ids == model.generate("Then", seed=3, max_new_tokens=9).token_ids


def test_a_draft_gives_the_text_of_the_command(
    minigen: Command, tiny_run: Path, model: Generator
) -> None:
    draft = tiny_run / "step-000004.safetensors"
    options = ("--draft", str(draft), "--num-samples", "2", "--max-new-tokens", "9", "--json")
    lines = json_lines(minigen("generate", str(tiny_run), "a", *options))
    loaded = load(draft)
    texts = model.generate("a", draft=loaded, num_samples=2, max_new_tokens=9)
    assert [text.token_ids for text in texts] == [line["token_ids"] for line in lines]
    assert texts[0].acceptance_rate == lines[0]["acceptance_rate"]


def test_a_sample_draws_from_streams_of_its_own_names(model: Generator, tiny_run: Path) -> None:
    """The names are published: a text is `inference/i`'s, and with a draft of two more."""
    draft = load(tiny_run / "step-000004.safetensors")
    for given, names in ((None, ("",)), (draft, ("/draft", "/accept"))):
        texts = model.generate(
            ["a", "b"], num_samples=2, seed=6, max_new_tokens=9, draft=given, num_draft_tokens=2
        )
        streams = [
            tuple(Stream(6, own + name) for name in names)
            for own in ("inference", "inference/1") * 2
        ]
        prompts = ["a", "a", "b", "b"]
        task = Task(model.model, model.tokenizer, max_new_tokens=9)
        if given:
            expected = complete(
                speculate(
                    task,
                    given.model,
                    given.tokenizer,
                    prompts,
                    streams.__getitem__,  # type: ignore[arg-type]
                    num_draft_tokens=2,
                )
            )
        else:
            alone = [stream for (stream,) in streams]
            expected = complete(generate(task, prompts, alone.__getitem__))
        assert texts == expected
        assert len({tuple(text.token_ids) for text in texts}) == 4


def test_the_best_of_the_beams_is_the_text_of_the_command(
    minigen: Command, tiny_run: Path, model: Generator
) -> None:
    options = ("--num-beams", "3", "--max-new-tokens", "5", "--json")
    (line,) = json_lines(minigen("generate", str(tiny_run), "a", *options))
    beams = model.beams("a", num_beams=3, max_new_tokens=5)
    assert beams[0].token_ids == line["token_ids"]
    assert beams[0].log_probabilities is None
    (other,) = json_lines(
        minigen("generate", str(tiny_run), "a", *options, "--length-penalty", "3")
    )
    longer = model.beams("a", num_beams=3, max_new_tokens=5, length_penalty=3.0)
    assert (longer[0].token_ids, longer[0].score != beams[0].score) == (other["token_ids"], True)
    scores = [beam.score for beam in beams]
    assert scores == sorted(scores, reverse=True)  # type: ignore[type-var]


def test_score_next_and_evaluate_are_the_commands_of_their_names(
    minigen: Command, tiny_run: Path, model: Generator
) -> None:
    (line,) = json_lines(minigen("score", str(tiny_run), "Once", "--json"))
    assert vars(model.score("Once")) == line
    (line,) = json_lines(minigen("next", str(tiny_run), "Once", "--top", "3", "--json"))
    decision = model.next("Once", top=3)
    assert (decision.greedy_token_id, decision.entropy) == (
        line["greedy_token_id"],
        line["entropy"],
    )
    for candidate, shown in zip(decision.candidates, line["candidates"], strict=True):
        assert candidate.bytes.hex() == shown.pop("bytes")
        assert {name: getattr(candidate, name) for name in shown} == shown
    (line,) = json_lines(minigen("evaluate", str(tiny_run), "--json"))
    assert model.evaluate().loss == line["loss"]


def test_a_stream_gives_the_text_of_generate_in_parts(model: Generator) -> None:
    whole = model.generate("Once", seed=4, max_new_tokens=20)
    parts = list(model.stream("Once", seed=4, max_new_tokens=20))
    assert "".join(parts) == whole.text
    assert len(parts) > 1
    assert "" not in parts
    greedy = model.generate("Once", temperature=0, max_new_tokens=20).text
    assert "".join(model.stream("Once", policy=Policy(temperature=0), max_new_tokens=20)) == greedy


# ── A run's own generator ────────────────────────────────────────────────────────────────────────


def test_a_run_draws_on_from_its_stream_one_text_after_the_other(run: Run) -> None:
    stream = run.streams["inference"]
    start = stream.position
    texts = run.generator.generate(["a", "b"], max_new_tokens=5)
    assert stream.position == start + sum(len(text.token_ids) for text in texts)
    stream.position = start
    assert [run.generator.generate(prompt, max_new_tokens=5) for prompt in "ab"] == texts


FLAT: dict[str, Any] = {"temperature": 1e300, "min_new_tokens": 999}  # a token is a word's byte


def flat_run(every: int = 1) -> Run:
    sampling = {"every": every, "max_new_tokens": 9, **FLAT}
    return Run(Config.load(overrides=TINY | {f"sampling.{key}": v for key, v in sampling.items()}))


def test_each_word_of_a_run_goes_to_whoever_needs_one_next_and_to_nobody_else() -> None:
    run = flat_run()
    drawn: list[int | None] = []

    def take(pieces: Iterator[Piece], count: int) -> None:
        drawn.extend(next(pieces).token_id for _ in range(count))

    make = run.generator.pieces
    one, other = (make(["Once"], max_new_tokens=99, **FLAT) for _ in range(2))
    drafted = make(["Once"], draft=run.generator, num_draft_tokens=1, max_new_tokens=5, **FLAT)
    take(one, 1)
    take(other, 2)
    drawn += run.generator.generate("Then", max_new_tokens=20, **FLAT).token_ids
    take(one, 3)
    sample = run.train(1)[0].sample
    assert sample
    drawn += sample.token_ids
    take(other, 70)
    take(one, 1)
    assert drawn == (Stream(0, "inference").words(len(drawn)) >> np.uint64(56)).tolist()
    for pieces in (drafted, one):
        before = run.streams["inference"].position
        next(pieces)
        assert run.streams["inference"].position > before >= len(drawn)


@pytest.mark.parametrize(
    "write",
    [
        lambda run: run.generate("a", max_new_tokens=9, **FLAT),
        lambda run: run.train(2)[1].sample.text,
    ],
    ids=["generate", "train"],
)
def test_no_thread_takes_a_word_between_those_of_a_text(
    monkeypatch: pytest.MonkeyPatch, write: Callable[[Run], str]
) -> None:
    alone, run, logits = flat_run(every=2), flat_run(every=2), Model.logits
    expected = [write(alone), alone.generate("b", max_new_tokens=9, **FLAT)]
    found: list[str] = []

    def write_beside() -> None:
        found.append(run.generator.generate("b", max_new_tokens=9, **FLAT).text)

    thread = Thread(target=write_beside)

    def begun_within(*arguments: Any) -> Any:
        if not thread.ident:
            thread.start()
            thread.join(0.2)  # not to its end, since it waits for its turn
        return logits(*arguments)

    monkeypatch.setattr(Model, "logits", begun_within)
    text = write(run)
    thread.join()
    assert [text, *found] == expected


def test_a_step_without_a_sample_keeps_no_thread_from_writing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, advance = flat_run(every=0), Run._advance
    thread = Thread(target=run.generate, kwargs={"max_new_tokens": 9, **FLAT})
    waits: list[bool] = []

    def beside(after: Run) -> Any:
        thread.start()
        thread.join(PATIENCE)
        waits.append(thread.is_alive())
        return advance(after)

    monkeypatch.setattr(Run, "_advance", beside)
    run.train(1)
    assert waits == [False]


def test_what_a_run_writes_first_is_what_its_checkpoint_writes(run: Run, tmp_path: Path) -> None:
    run.save(tmp_path / "saved.safetensors")
    saved = load(tmp_path / "saved.safetensors")
    assert run.generate("a", max_new_tokens=9) == saved.generate("a", max_new_tokens=9).text


def test_with_a_seed_or_a_draft_a_run_moves_no_stream_but_inference(run: Run) -> None:
    before = {name: stream.position for name, stream in run.streams.items()}
    run.generator.generate("a", seed=0, num_samples=2, max_new_tokens=5)
    run.generator.beams("a", max_new_tokens=3)
    run.generator.next("a")
    run.generator.score("a")
    run.generator.evaluate()
    assert {name: stream.position for name, stream in run.streams.items()} == before
    run.generator.generate("a", draft=run.generator, max_new_tokens=5)
    after = {name: stream.position for name, stream in run.streams.items()}
    assert after.pop("inference") > before.pop("inference")
    assert after == before


def test_a_run_loaded_from_its_folder_finds_its_text(minigen: Command, tmp_path: Path) -> None:
    Path("mine.txt").write_text("to be or not to be\n" * 20)
    settings = [part for key, value in TINY.items() for part in ("--set", f"{key}={value}")]
    assert minigen("train", *settings, "--text", "mine.txt", "--out", "mine").status == 0
    expected = json_lines(minigen("evaluate", "mine", "--json"))[0]["loss"]
    assert Run.load("mine").evaluate() == expected
    assert load("mine").evaluate().loss == expected
    other = load("mine").evaluate("to be")
    assert (other.tokens, other.bytes) == (6, 5)
    for paths in (["mine.txt"], np.array(["mine.txt"])):
        assert load("mine").evaluate(paths=paths).bytes == 379  # the last line's end left out


def test_a_pickled_generator_writes_and_reads_as_the_one_it_was_made_of(
    minigen: Command, tmp_path: Path
) -> None:
    settings = [part for key, value in TINY.items() for part in ("--set", f"{key}={value}")]
    assert minigen("train", *settings, "--out", "run").status == 0
    run = Run.load("run")
    for generator in (load("run"), run.generator):
        twin = pickle.loads(pickle.dumps(generator))
        for _ in range(2):  # a run's own goes on from where its stream stands, the twin's likewise
            assert twin.generate("Once", max_new_tokens=9) == generator.generate(
                "Once", max_new_tokens=9
            )
        assert twin.evaluate() == generator.evaluate()


def test_a_model_finds_its_text_wherever_the_process_has_gone(
    minigen: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [part for key, value in TINY.items() for part in ("--set", f"{key}={value}")]
    Path("mine.txt").write_text("to be or not to be\n" * 20)
    assert minigen("train", *settings, "--text", "mine.txt", "--out", "mine").status == 0
    model, expected = load("mine"), load("mine").evaluate().loss
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert model.evaluate().loss == expected


# ── Mistakes get one line ────────────────────────────────────────────────────────────────────────

MISTAKES: dict[str, tuple[Callable[[Generator], object], str]] = {
    "a misspelt option": (
        lambda model: model.generate("a", temprature=0.3),  # type: ignore[call-overload]
        "unknown option 'temprature': the nearest known one is temperature",
    ),
    "a misspelt setting": (
        lambda model: model.generate("a", max_tokens=3),  # type: ignore[call-overload]
        "the nearest known one is max_new_tokens",
    ),
    "a policy and an option": (
        lambda model: model.generate("a", policy=Policy(), top_k=3),
        "give a policy or its options, not both (got policy and top_k)",
    ),
    "no policy": (lambda model: model.next("a", policy="greedy"), "must be a Policy"),  # type: ignore[arg-type]
    "no prompt": (lambda model: model.generate(5), "(got 5)"),  # type: ignore[call-overload]
    "a prompt in a list that is none": (
        lambda model: model.generate(["a", 5]),  # type: ignore[list-item]
        "a list of str or bytes (got ['a', 5])",
    ),
    "a seed that is a fraction": (lambda model: model.generate("a", seed=0.5), "(got 0.5)"),  # type: ignore[call-overload]
    "a seed below 0": (
        lambda model: model.stream("a", seed=-1, temperature=0),
        "seed must be a whole number of at least 0 (got -1)",
    ),
    "a seed in words": (lambda model: model.generate("a", seed="one"), "(got 'one')"),  # type: ignore[call-overload]
    "no sample": (lambda model: model.generate("a", num_samples=0), "num_samples must be"),
    "a draft that is a path": (
        lambda model: model.generate("a", draft="runs/small"),  # type: ignore[call-overload]
        "draft must be",
    ),
    "a count beyond words": (
        lambda model: model.generate("a", num_samples=-(10**5000)),
        "num_samples must be a whole number, at least 1 (got a number too long to show)",
    ),
    "a penalty beyond words": (
        lambda model: model.beams("a", length_penalty=10**5000),
        "length_penalty must be a number, finite (got a number too long to show)",
    ),
    "an option of samples beyond words": (
        lambda model: model.beams("a", top_k=10**5000),
        "(got top_k=a number too long to show)",
    ),
    "ids in an array of no dimension": (
        lambda model: model.generate("a", suppress_tokens=np.array(65)),
        "suppress_tokens must be a list of token ids (got array(65))",
    ),
    "a seed beyond words": (lambda model: model.generate("a", seed=10**5000), "4300 digits"),
    "a text and paths": (lambda model: model.evaluate("a", paths=["b"]), "not both"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_an_option_error_of_one_line(model: Generator, mistake: str) -> None:
    call, message = MISTAKES[mistake]
    with pytest.raises(OptionError) as caught:
        call(model)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# ── One list of options ──────────────────────────────────────────────────────────────────────────


def test_every_option_of_a_policy_is_a_keyword_with_its_type() -> None:
    assert get_type_hints(PolicyOptions) == {option.name: option.type for option in fields(Policy)}
    assert OPTIONS.keys() < SamplingTable.model_fields.keys()


def test_type_checkers_see_every_option_of_a_policy_as_a_keyword() -> None:
    seen: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(getsource(policy))):
        if isinstance(node, ast.ClassDef):
            hints = (ast.unparse(line) for line in node.body if isinstance(line, ast.AnnAssign))
            seen[node.name] = {hint.partition(" = ")[0] for hint in hints}
    assert seen["PolicyOptions"] == seen["Policy"]


def test_the_overloads_of_generate_name_each_of_its_keywords() -> None:
    own = signature(Generator.generate).parameters.keys() - {"self", "prompt", "options"}
    assert _Settings.__annotations__.keys() - PolicyOptions.__annotations__ == own - {"num_samples"}
    assert not _Settings.__required_keys__


@pytest.mark.parametrize(
    ("call", "not_its_own"),
    [
        (Generator.generate, set()),
        (Generator.stream, {"num_samples", "log_probabilities"}),
    ],
)
def test_help_and_completion_see_each_keyword_and_its_default(
    call: Callable[..., object], not_its_own: set[str]
) -> None:
    whole = {name: p.default for name, p in signature(Generator.pieces).parameters.items()}
    seen = {name: p.default for name, p in signature(call).parameters.items()}
    assert whole.keys() - {"prompts"} - not_its_own == seen.keys() - {"prompt"}
    assert all(seen[name] == whole[name] for name in seen.keys() & whole.keys() - {"num_samples"})


def test_what_is_not_asked_for_is_as_the_signatures_say(model: Generator) -> None:
    assert len(model.beams("a", max_new_tokens=3)) == 4
    assert len(model.generate(["a", "b"], max_new_tokens=3)) == 2
    assert model.generate("a", max_new_tokens=3).log_probabilities is None
    assert len(model.next("a").candidates) == 10
    assert repr(model).startswith("Generator(Model(")
    assert f"fingerprint {model.fingerprint[:12]}…" in repr(model)


def test_a_stream_of_text_refuses_what_it_could_not_show(model: Generator) -> None:
    with pytest.raises(OptionError, match="unknown option 'log_probabilities'"):
        model.stream("a", log_probabilities=True)  # type: ignore[call-arg]
