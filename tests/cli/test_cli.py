"""The command line: what each command prints, where, with which status, and each user's mistake."""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import pytest

from minigen import cli
from minigen.cli import config
from tests.conftest import PATIENCE, TINY_SETTINGS, Result, not_as_root

Command = Callable[..., Result]
COMMANDS = cli.cli.list_commands(click.Context(cli.cli))


def subprocess_run(*arguments: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "minigen", *arguments]
    return subprocess.run(command, capture_output=True, timeout=PATIENCE, **options)  # type: ignore[call-overload,no-any-return]


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- Help


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(minigen: Command, name: str) -> None:
    result = minigen(name, "--help")
    assert (result.status, minigen(name, "-h")) == (0, result)
    assert result.out.startswith(f"Usage: minigen {name} [OPTIONS]")
    assert "Example:\n    minigen " in result.out


def test_help_lists_every_command_and_imports_no_library_of_training() -> None:
    code = "import sys; from minigen.cli import run; run(['--help']); print(sorted(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert all(f"  {name} " in out for name in COMMANDS)
    assert not any(f"'{name}'" in out for name in ("numpy", "scipy", "numba", "pydantic"))


def test_a_command_is_registered_once_where_it_is_written(
    minigen: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "saluting.py").write_text(
        "from minigen.cli import cli\n\n\n"
        '@cli.command()\ndef salute():\n    """Say hello."""\n    print(\'hello\')\n'
    )
    monkeypatch.setattr(cli, "__path__", [*cli.__path__, str(tmp_path)])
    monkeypatch.setattr(cli.cli, "commands", dict(cli.cli.commands))
    assert "  salute    Say hello.\n" in minigen("--help").out
    assert minigen("salute").out == "hello\n"


def test_no_command_shows_the_help(minigen: Command) -> None:
    result = minigen()
    assert (result.status, result.err) == (0, "")
    assert result.out == minigen("--help").out


def test_version_is_the_package_version(minigen: Command) -> None:
    assert minigen("--version").out == f"minigen {version('minigen')}\n"


def test_help_says_the_default_of_every_option_that_has_one() -> None:
    shown = {}
    parent = click.Context(cli.cli, **cli.cli.context_settings)
    for name in COMMANDS:
        context = click.Context(cli.cli.get_command(parent, name), parent)  # type: ignore[arg-type]
        for parameter in context.command.get_params(context):
            help_ = " ".join((parameter.get_help_record(context) or ("", ""))[1].split())
            if parameter.opts[0] == "--progress":  # on a terminal alone
                assert parameter.default is None
            if "[default: " in help_:
                shown[f"{name} {parameter.opts[0]}"] = help_.split("[default: ")[1].split("]")[0]
    policy = {
        "--repetition-penalty": "1",
        "--frequency-penalty": "0",
        "--presence-penalty": "0",
        "--min-new-tokens": "0",
        "--temperature": "1",
    }
    assert shown == {
        **{
            f"{name} {flag}": value
            for name in ("generate", "next")
            for flag, value in policy.items()
        },
        "demo --out": "runs/demo",
        "generate --length-penalty": "1.0",
        "generate --max-new-tokens": "200; x>=1",
        "generate --num-beams": "1; x>=1",
        "generate --num-draft-tokens": "4; x>=1",
        "generate --num-samples": "1; x>=1",
        "generate --seed": "0",
        "next --top": "10; x>=1",
        "report --out": "report.html in RUN",
        "sweep --out": "runs/<config>-sweep",
        "sweep --seeds": "CONFIG's",
        "train --out": "runs/<config>",
        "verify --seed": "0",
    }


# ---- train


def test_train_writes_a_run_folder_and_prints_its_fingerprint(minigen: Command) -> None:
    result = minigen("train", "fables", *TINY_SETTINGS, "--out", "run")
    assert result.status == 0
    assert {path.name for path in Path("run").iterdir()} == {
        "config.toml",
        "metrics.jsonl",
        "samples.jsonl",
        "timing.jsonl",
        "step-000000.safetensors",
        "step-000004.safetensors",
        "step-000006.safetensors",
    }
    last = read_jsonl(Path("run/metrics.jsonl"))[-1]
    assert result.out == (
        f"trained 6 steps: run/step-000006.safetensors\nfingerprint {last['fingerprint']}\n"
    )


def test_metrics_hold_one_line_a_step_with_exact_losses(tiny_run: Path) -> None:
    lines = read_jsonl(tiny_run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(float.fromhex(line["loss_bits"]) == line["loss"] for line in lines)
    assert [line["optimizer_position"] for line in lines] == [16 * step for step in range(1, 7)]
    assert ["validation_loss" in line for line in lines] == [False, False, True] * 2
    first, peak, *_, last = [line["learning_rate"] for line in lines]  # a warm-up of two steps
    assert first == peak / 2
    assert 0.0 < last < peak


def test_samples_hold_step_prompt_text_and_ids(tiny_run: Path) -> None:
    lines = read_jsonl(tiny_run / "samples.jsonl")
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert all(list(line) == ["step", "prompt", "text", "token_ids"] for line in lines)


def test_train_reads_text_from_stdin(tmp_path: Path) -> None:
    command = ["train", *TINY_SETTINGS, "--text", "-", "--out", str(tmp_path / "run")]
    assert subprocess_run(*command, input=b"to be or not to be").returncode == 0
    resume = ["train", "--resume", "--out", str(tmp_path / "run")]
    other = subprocess_run(*resume, "--text", "-", input=b"not it")
    assert other.returncode == 1
    assert b"SHA-256" in other.stderr
    for command in (resume, ["evaluate", str(tmp_path / "run")]):
        unread = subprocess_run(*command, input=b"to be or not to be")
        assert unread.returncode == 1
        assert b"give t" in unread.stderr
    same = subprocess_run(*resume, "--text", "-", input=b"to be or not to be")
    assert b"nothing left to do" in same.stderr


def test_resuming_a_finished_run_says_that_nothing_is_left(minigen: Command) -> None:
    minigen("train", "fables", *TINY_SETTINGS, "--out", "run")
    before = {path.name: path.read_bytes() for path in Path("run").iterdir()}
    result = minigen("train", "--resume", "--out", "run")
    assert (result.status, result.err) == (0, "nothing left to do: all 6 steps are done\n")
    assert before == {path.name: path.read_bytes() for path in Path("run").iterdir()}


def test_a_run_without_decay_may_be_trained_longer(minigen: Command) -> None:
    constant = ("--set", "optimizer.decay=constant")
    minigen("train", "fables", *TINY_SETTINGS, *constant, "--out", "run")
    longer = minigen("train", "--resume", "--out", "run", "--set", "training.steps=8")
    straight = minigen(
        "train", *TINY_SETTINGS, *constant, "--set", "training.steps=8", "--out", "straight"
    )
    assert longer.out.splitlines()[1] == straight.out.splitlines()[1]


def test_a_path_that_begins_with_a_tilde_starts_from_home(
    minigen: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    Path("home").mkdir()
    Path("home/text.txt").write_text("to be or not to be")
    Path("home/one.toml").write_text('[corpus]\ntext = ["~/text.txt"]')
    assert minigen("train", "~/one.toml", *TINY_SETTINGS, "--out=~/run").status == 0
    for command in (
        ["evaluate", "~/run", "--text=~/text.txt"],
        ["info", "~/run"],
        ["next", "~/run"],
        ["score", "~/run", "--file=~/text.txt"],
        ["generate", "~/run", "--prompts=~/text.txt", "--draft=~/run", "--max-new-tokens=2"],
        ["diff", "~/run", "~/run"],
        ["report", "~/run", "--out=~/page.html"],
        ["verify", "~/run", "--text=~/text.txt"],
    ):
        assert minigen(*command).status == 0
    line = minigen("generate", "~/run", "--draft=~/run", "--json").out
    Path("home/lines.jsonl").write_text(line)
    assert minigen("verify", "~/run", "--texts=~/lines.jsonl", "--draft=~/run").status == 0
    monkeypatch.setenv("HOME", "")
    result = minigen("train", *TINY_SETTINGS, "--out=~/run")
    assert (result.status, result.err.count("\n")) == (1, 1)
    assert "for want of HOME" in result.err
    assert not Path("~").exists()


def test_a_run_of_one_byte_trains(minigen: Command) -> None:
    Path("one.txt").write_bytes(b"x")
    result = minigen("train", *TINY_SETTINGS, "--text", "one.txt", "--out", "run")
    assert result.status == 0
    assert "no text is left for validation" in result.err


def test_a_warm_up_that_never_ends_is_said(minigen: Command) -> None:
    settings = (*TINY_SETTINGS, "--set", "optimizer.warmup_steps=7")
    assert "warmup_steps = 7 is more than the 6 steps" in minigen("train", *settings).err
    settings = (*TINY_SETTINGS, "--set", "optimizer.warmup_steps=6", "--out", "other")
    assert "warmup" not in minigen("train", *settings).err


BAD_TRAININGS = {
    "a missing text": (["--text", "missing.txt"], 1, "missing.txt: No such file"),
    "an empty text": (["--text", "empty.txt"], 1, "at least one byte (got 0 bytes"),
    "an unknown config": (["fabels"], 2, "'fabels': there are fables"),
    "a missing config file": (["none.toml"], 1, "cannot read config none.toml"),
    "a file that is not TOML": (["broken.toml"], 1, "line 1"),
    "a misspelt key": (["misspelt.toml"], 1, "the nearest known one is training.steps"),
    "several faults": (["faulty.toml"], 1, "training.steps must be"),
    "a setting out of range": (["--set", "training.batch_size=0"], 2, "(got 0)"),
    "a setting without value": (["--set", "training.steps"], 2, "KEY=VALUE"),
    "an unknown setting": (
        ["--set", "training.stepps=3"],
        2,
        "nearest known one is training.steps",
    ),
    "a setting that is not Unicode": (["--set", "\udc80=1"], 2, "a key is a printable text"),
    "an empty folder's name": (["--out", ""], 2, "'--out': a path must not be empty (got '')"),
    "a run that is there": (["--out", "taken"], 1, "not a new or empty folder"),
    "a setting, whatever the folder": (
        ["--out", "taken", "--set", "a.b=1"],
        2,
        "unknown table 'a'",
    ),
    "a text for a config": (["book.txt"], 2, "that of a text stands behind --text"),
    "a config without name": ([""], 2, "'[CONFIG]': a path must not be empty (got '')"),
    "a text without name": (["--text", ""], 2, "a path must not be empty"),
    "standard input twice": (["--text", "-", "--text", "-"], 2, "can be read once"),
    "a run that diverges": (["--set", "optimizer.learning_rate=1e9"], 1, "diverged at step 2"),
    "nothing to resume": (["--resume", "--out", "nothing"], 1, "no run to resume"),
    "a config to resume with": (["fables", "--resume"], 2, "CONFIG must go (got 'fables')"),
}


@pytest.mark.parametrize("mistake", BAD_TRAININGS)
def test_a_mistake_in_training_gets_one_line(minigen: Command, mistake: str) -> None:
    Path("empty.txt").touch()
    Path("broken.toml").write_text("steps = = 3")
    Path("misspelt.toml").write_text("[training]\nstps = 3")
    Path("faulty.toml").write_text("[training]\nsteps = -1\n[model]\ncontext_length = 0")
    Path("taken").mkdir()
    Path("taken/precious.txt").touch()
    arguments, status, message = BAD_TRAININGS[mistake]
    config, options = (arguments[:1], arguments[1:]) if arguments[0][:1] != "-" else ([], arguments)
    settings = [] if config or "--resume" in options else TINY_SETTINGS
    result = minigen("train", *config, *settings, *options)
    assert result.status == status
    *begun, error = result.err.splitlines()
    assert message in error
    assert error.startswith("Error: ")
    assert begun in ([], ["training: steps 1 to 6"])  # some show while it trains alone
    assert result.out == ""


def test_all_faults_of_a_config_are_listed(minigen: Command) -> None:
    Path("faulty.toml").write_text("[training]\nsteps = -1\n[model]\ncontext_length = 0")
    err = minigen("train", "faulty.toml").err
    assert "training.steps" in err
    assert "model.context_length" in err


@pytest.mark.parametrize(
    "setting",
    [
        "optimizer.learning_rate=0.5",
        "training.batch_size=3",
        "run.seed=1",
        "training.steps=9",
        "training.steps=5",
        "corpus.documents=line",
        "corpus.validation_fraction=0.2",
    ],
)
def test_what_decided_the_weights_cannot_change_on_resume(minigen: Command, setting: str) -> None:
    minigen("train", "fables", *TINY_SETTINGS, "--out", "run")
    result = minigen("train", "--resume", "--out", "run", "--set", setting)
    assert result.status == 1
    assert setting.partition("=")[0] in result.err


@not_as_root
def test_a_folder_that_cannot_be_written_is_named(minigen: Command, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    result = minigen("train", *TINY_SETTINGS, "--out", "locked/run")
    assert result.status == 1
    assert "locked/run" in result.err


def test_a_model_that_the_machine_cannot_hold_is_refused_before_it_is_made(
    minigen: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minigen.model import memory

    monkeypatch.setattr(memory, "available", lambda: 2**30)
    wide = ["--set", "model.context_length=1", "--set", "model.embedding_dim=2097152"]
    result = minigen("train", *TINY_SETTINGS, *wide, "--out", "run")
    assert (result.status, result.out) == (1, "")
    assert result.err == (
        "Error: training 1,077,936,385 weights needs 48.2 GiB of memory, and there is 1.0 GiB: "
        "lower model.embedding_dim, model.context_length or tokenizer.vocab_size\n"
    )
    assert not Path("run").exists()


def test_what_a_training_cannot_read_is_not_blamed_on_its_folder(
    minigen: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minigen.training.run import Run

    def steps(_: Run) -> Iterator[None]:
        raise OSError(5, "Input/output error", "text.txt")
        yield

    monkeypatch.setattr(Run, "steps", steps)
    result = minigen("train", *TINY_SETTINGS, "--out", "run")
    assert "\nError: text.txt: Input/output error; the last checkpoint, run/" in result.err


def test_how_much_memory_there_is_is_known_here() -> None:
    from minigen.model import memory

    there = memory.available()
    assert there is None or 2**20 < there < 2**60


# ---- generate


def test_generate_is_the_same_streamed_or_not(minigen: Command, tiny_run: Path) -> None:
    texts = {
        minigen("generate", str(tiny_run), "Once", option).out
        for option in ("--stream", "--no-stream")
    }
    assert len(texts) == 1


def test_several_texts_come_in_order_with_a_line_between(minigen: Command, tiny_run: Path) -> None:
    Path("prompts.txt").write_bytes(b"a\r\nb\n")
    options = ("--prompts", "prompts.txt", "--num-samples", "2", "--max-new-tokens", "4")
    lines = minigen("generate", str(tiny_run), *options, "--json").out.splitlines()
    results = [json.loads(line) for line in lines]
    assert [(r["prompt"], r["sample"]) for r in results] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    plain = minigen("generate", str(tiny_run), *options).out
    assert plain == "---\n".join(f"{r['prompt']}{r['text']}\n" for r in results)


def test_a_text_does_not_depend_on_its_neighbours(minigen: Command, tiny_run: Path) -> None:
    def texts(*prompts: str) -> dict[str, str]:
        Path("prompts.txt").write_text("\n".join(prompts))
        out = minigen("generate", str(tiny_run), "--prompts", "prompts.txt", "--json").out
        return {line["prompt"]: line["text"] for line in map(json.loads, out.splitlines())}

    alone = texts("a")["a"]
    assert texts("a", "b")["a"] == texts("b", "a")["a"] == alone


def test_any_bytes_are_a_prompt(tiny_run: Path) -> None:
    result = subprocess_run(
        "generate", str(tiny_run), "-", "--max-new-tokens", "1", input=b"\xff\xc3\xa9\n"
    )
    assert result.returncode == 0
    assert result.stdout.startswith("\ufffdé".encode())


def test_output_is_utf8_in_any_locale(tiny_run: Path) -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    result = subprocess_run(
        "generate", str(tiny_run), "é", "--max-new-tokens", "1", env=environment
    )
    assert result.stdout.startswith("é".encode())
    missing = subprocess_run("info", "é", env=environment)
    assert missing.stderr.decode().startswith("Error: cannot load é")


def test_a_closed_pipe_ends_quietly(tiny_run: Path) -> None:
    command = f"{sys.executable} -m minigen generate {tiny_run} a --max-new-tokens 20000"
    shell = ["bash", "-c", f"set -o pipefail; {command} | head -c 5"]
    result = subprocess.run(shell, capture_output=True, timeout=PATIENCE)
    assert (result.returncode, result.stderr) == (0, b"")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
@pytest.mark.parametrize(("model", "status"), [("", 0), ("-missing", 1)])
def test_a_stream_that_is_closed_is_like_an_empty_one(
    tiny_run: Path, closed: str, model: str, status: int
) -> None:
    command = [sys.executable, "-m", "minigen", "generate", f"{tiny_run}{model}", "-"]
    script = ["sh", "-c", f'exec "$@" {closed}', "sh", *command]
    result = subprocess.run(script, capture_output=True, timeout=PATIENCE, stdin=subprocess.DEVNULL)
    assert result.returncode == status
    assert (result.stdout != b"") == (status == 0 and closed != ">&-")
    assert result.stderr.count(b"\n") == (status == 1 and closed != "2>&-")


def test_a_random_seed_is_said_and_gives_the_same_text_again(
    minigen: Command, tiny_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = {minigen("generate", str(tiny_run), "a", "--seed", "random").err for _ in range(3)}
    assert len(seeds) == 3
    monkeypatch.setattr("secrets.randbits", lambda bits: 2**bits - 1)
    result = minigen("generate", str(tiny_run), "a", "--seed", "random")
    assert result.err == "seed 4294967295\n"
    assert minigen("generate", str(tiny_run), "a", "--seed", "4294967295").out == result.out


def test_a_dead_end_is_said_once_and_takes_no_other_text_with_it(
    minigen: Command, tiny_run: Path
) -> None:
    every = b"".join(bytes([value]) for value in range(256) if value not in b"\r\n")
    Path("prompts.txt").write_bytes(every + b"\na\n" + every)
    rules = ("--no-repeat-ngram-size", "1", "--suppress-token", "10", "--suppress-token", "13")
    options = ("--prompts", "prompts.txt", *rules, "--min-new-tokens", "5", "--max-new-tokens", "5")
    for how in ((), ("--num-beams", "2"), ("--draft", str(tiny_run)), ("--greedy",)):
        result = minigen("generate", str(tiny_run), *options, *how, "--json")
        lines = [json.loads(line) for line in result.out.splitlines()]
        assert [line["finish_reason"] for line in lines] == ["dead_end", "length", "dead_end"]
        assert [len(line["token_ids"]) for line in lines] == [0, 5, 0]
        assert result.status == 0
        assert result.err.count("\n") == 1
        assert "--suppress-token and --min-new-tokens=5 together" in result.err
        plain = minigen("generate", str(tiny_run), *options, *how)
        assert len(plain.out.split("\n---\n")) == 3


def test_json_says_what_a_text_depends_on(minigen: Command, tiny_run: Path) -> None:
    model = json.loads(minigen("info", str(tiny_run), "--json").out)["fingerprint"]
    stops = ("--stop", "zz", "--stop", os.fsdecode(b"\xff"))
    options = ("--top-k", "5", "--logit-bias", "97=1", *stops, "--max-new-tokens", "3")
    line = json.loads(minigen("generate", str(tiny_run), "a", *options, "--json").out)
    assert line["model"] == model
    assert line["policy"] == {"logit_bias": {"97": 1.0}, "top_k": 5}
    assert (line["max_new_tokens"], line["stop"], line["seed"]) == (3, ["zz", "\ufffd"], 0)
    plain = json.loads(minigen("generate", str(tiny_run), "a", "--json").out)
    assert plain["policy"] == {}
    beams = json.loads(minigen("generate", str(tiny_run), "a", "--num-beams", "2", "--json").out)
    assert (beams["num_beams"], beams["length_penalty"]) == (2, 1.0)
    draft = ("--draft", str(tiny_run), "--json")
    assert json.loads(minigen("generate", str(tiny_run), "a", *draft).out)["draft"] == model


def test_greedy_speculation_prints_the_greedy_text(minigen: Command, tiny_run: Path) -> None:
    draft = ("--draft", str(tiny_run / "step-000000.safetensors"))
    command = ("generate", str(tiny_run), "a", "--greedy", "--max-new-tokens", "20")
    assert minigen(*command, *draft).out == minigen(*command).out


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        ("gener", "plain,generate"),
        ("generate runs/f", "file,runs/f"),
        ("score model --file READ", "file,READ"),
        ("train fab", "plain,fables"),
        ("train my.t", "file,my.t"),
        ("train --text READ", "file,READ"),
        ("report ru", "file,ru"),
        ("diff ru", "file,ru"),
        ("config training.st", "plain,training.steps"),
        ("sweep --set evaluation.", "plain,evaluation.every"),
    ],
)
def test_the_shell_completes_commands_and_file_names(words: str, completions: str) -> None:
    variables = {"COMP_WORDS": f"minigen {words}", "COMP_CWORD": str(len(words.split()))}
    environment = {**os.environ, **variables, "_MINIGEN_COMPLETE": "bash_complete"}
    done = subprocess_run(env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode().splitlines() == [completions]


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [
        (["traim"], "Did you mean 'train'?"),
        (["resume", "{run}"], "there is minigen train --resume or minigen sweep --resume"),
        (["help", "train"], "there is minigen --help or "),
        (["nothing"], "No such command 'nothing'.\n"),
        (["generate", "{run}", "once", "upon", "a", "time"], "words that belong together stand in"),
        (["train", "--learning-rate", "1"], "a key of the config is given as --set KEY=VALUE"),
        (["head", "--logits", "0, 1", "--target", "2"], "Error: --target must be an index of"),
        (["generate", "{run}", "- item"], "a text that begins with - comes last, behind --"),
        (["generate", "{run}", "--temprature", "1"], "Did you mean '--temperature'?"),
        (["generate", "models"], "name a file in it, as models/only.safetensors"),
    ],
)
def test_a_slip_is_told_its_cure(
    minigen: Command, tiny_run: Path, arguments: list[str], cure: str
) -> None:
    Path("models").mkdir()
    Path("models/only.safetensors").touch()
    result = minigen(*(argument.format(run=tiny_run) for argument in arguments))
    assert result.status in (1, 2)
    assert cure in result.err
    assert result.err.count("\n") == 1


# What the command line alone shows to be wrong is 2; what a file or a model shows, 1.
STATUSES = [
    ("traim", 2),
    ("generate", 2),
    ("generate {run} a b", 2),
    ("generate missing", 1),
    ("generate {run} a --prompts nothing.txt", 2),
    ("generate {run} --prompts missing.txt", 1),
    ("generate {run} a --draft missing", 1),
    ("generate {run} a --num-samples 0", 2),
    ("generate {run} a --logit-bias 300=1", 1),
    ("generate {run} a --num-beams 2 --length-penalty nan", 2),
    ("next {run} a --top 0", 2),
    ("next {run} a --top-p 2", 2),
    ("next missing a", 1),
    ("score {run}", 2),
    ("score {run} a --file nothing.txt", 2),
    ("score {run} --file nothing.txt", 2),
    ("score {run} --file missing.txt", 1),
    ("evaluate {run} --text missing.txt", 1),
    ("evaluate {run} --text -- --text", 2),
    ("evaluate missing", 1),
    ("head", 2),
    ("head --logits 0,x", 2),
    ("head --logits -inf", 2),
    ("head --logits 0,1 --target 2", 2),
    ("info missing", 1),
    ("info nothing.txt", 1),
    ("config training.stpes", 2),
    ("diff {run} missing", 1),
    ("diff {run}", 2),
    ("report missing", 1),
    ("verify missing", 1),
    ("verify {run} --seed 1", 2),
    ("verify {run} --segments 0", 2),
    ("verify {run} --segments 1 --seed -1", 2),
    ("verify {run} --draft {run}", 2),
    ("verify {run} --texts nothing.txt --segments 1", 2),
    ("verify {run} --texts nothing.txt --text nothing.txt", 2),
    ("verify {run} --texts nothing.txt", 1),
    ("prove --share --text -", 2),
    ("prove --set training.stpes=1", 2),
    ("prove missing.toml", 1),
    ("sweep --resume fables --out {run}", 2),
    ("sweep --resume --set run.seed=1 --out {run}", 2),
    ("sweep --resume --out missing", 1),
    ("sweep --seeds 3:x", 2),
    ("sweep --seeds 3:3", 2),
    ("sweep --out {run}", 1),
    ("demo --out {run}", 1),
    ("demo --set training.steps=0.5", 2),
    ("train --resume --set training.steps=7 --out {run}", 1),
]


@pytest.mark.parametrize(("command", "status"), STATUSES)
def test_the_status_says_where_a_mistake_lies(
    minigen: Command, tiny_run: Path, command: str, status: int
) -> None:
    Path("nothing.txt").touch()
    result = minigen(*(word.format(run=tiny_run) for word in command.split()))
    assert (result.status, result.out) == (status, ""), result.err
    assert result.err.startswith("Error: ")
    assert result.err.count("\n") == 1


def test_a_text_that_begins_with_a_hyphen_comes_behind_two(
    minigen: Command, tiny_run: Path
) -> None:
    result = minigen("generate", str(tiny_run), "--max-new-tokens", "1", "--", "- item")
    assert result.out.startswith("- item")


BAD_GENERATIONS = {
    "a beam search that samples": (["--num-beams", "2", "--temperature", "1"], "--temperature"),
    "a beam search with samples": (["--num-beams", "2", "--num-samples", "2"], "--num-samples"),
    "a negative temperature": (["--temperature", "-1"], "Error: --temperature must be"),
    "a NaN": (["--temperature", "nan"], "(got nan)"),
    "top_p above 1": (["--top-p", "1.5"], "Error: --top-p must be"),
    "a negative top_k": (["--top-k", "-1"], "Error: --top-k must be"),
    "a negative seed": (["--seed", "-1"], "(got '-1')"),
    "a seed without end": (["--seed", "9" * 5000], "(got '999999999…')"),
    "an empty stop string": (["--stop", ""], "stop string must not be empty"),
    "a malformed bias": (["--logit-bias", "5"], "ID=BIAS"),
    "greedy at a temperature": (["--greedy", "--temperature", "2"], "temperature 0"),
}


@pytest.mark.parametrize("mistake", BAD_GENERATIONS)
def test_a_mistake_in_generating_gets_one_line(
    minigen: Command, tiny_run: Path, mistake: str
) -> None:
    options, message = BAD_GENERATIONS[mistake]
    result = minigen("generate", str(tiny_run), "a", *options)
    assert (result.status, result.out) == (2, "")
    assert message in result.err
    assert result.err.count("\n") == 1


def test_a_dead_end_names_its_rules_as_they_were_typed(minigen: Command, tiny_run: Path) -> None:
    every = [word for token in range(256) for word in ("--suppress-token", str(token))]
    result = minigen("next", str(tiny_run), "a", *every, "--min-new-tokens", "3")
    told = "Error: --suppress-token and --min-new-tokens=3 together leave no token to choose from; "
    assert (result.status, result.out) == (1, "")
    assert result.err.startswith(told)


def test_an_unknown_token_is_refused(minigen: Command, tiny_run: Path) -> None:
    result = minigen("generate", str(tiny_run), "a", "--suppress-token", "9999")
    assert (result.status, result.out) == (1, "")
    assert result.err.startswith("Error: --suppress-token takes ids below 257, ")


def test_a_file_that_is_no_checkpoint_is_refused(minigen: Command) -> None:
    Path("model.pt").write_bytes(b"PK\x03\x04")
    result = minigen("generate", "model.pt")
    assert result.status == 1
    assert "only .safetensors files are read" in result.err


# ---- next, head, score, evaluate, info


def test_next_lists_candidates_with_probabilities_that_add_up(
    minigen: Command, tiny_run: Path
) -> None:
    result = json.loads(minigen("next", str(tiny_run), "a", "--top", "257", "--json").out)
    candidates = result["candidates"]
    assert sum(candidate["probability"] for candidate in candidates) == pytest.approx(1.0)
    assert candidates[0]["token_id"] == result["greedy_token_id"]


def test_next_says_how_many_others_there_are_and_how_likely_together(
    minigen: Command, tiny_run: Path
) -> None:
    lines = minigen("next", str(tiny_run), "a", "--top", "256").out.splitlines()
    last = minigen("next", str(tiny_run), "a", "--top", "257").out.splitlines()[-2]
    assert lines[-2].split() == ["1", "others", last.split()[-2]]
    assert "others" not in last


@pytest.mark.parametrize(
    "arguments",
    [
        ["0, x"],
        ["nan, 1"],
        [""],
        ["0, inf"],
        ["ln 0"],
        ["-inf, -inf"],
        ["0, ln -1"],
        ["ln" + " " * 200_000 + "x"],  # in no time, too
        ["0,1", "--target", "2"],
        ["0,1", "--target", "-1"],
    ],
)
def test_head_refuses_what_it_cannot_read(minigen: Command, arguments: list[str]) -> None:
    result = minigen("head", "--logits", *arguments)
    assert (result.status, result.out) == (2, "")
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("logit", "shown"),
    [("y" * 60, "y" * 60), ("y" * 61, "y" * 60 + "…")],
)
def test_of_a_long_logit_that_cannot_be_read_the_beginning_is_shown(
    minigen: Command, logit: str, shown: str
) -> None:
    assert minigen("head", "--logits", f"0, {logit}").err.endswith(f"(got {shown!r})\n")


def test_a_table_of_a_key_is_toml() -> None:
    value = {"101": 1.5, "7": [True, "a"]}
    assert tomllib.loads(f"key = {config._toml(value)}") == {"key": value}


def test_score_applies_the_chain_rule(minigen: Command, tiny_run: Path) -> None:
    result = json.loads(minigen("score", str(tiny_run), "abc", "--json").out)
    assert result["token_ids"] == [97, 98, 99]
    assert result["total_nats"] == pytest.approx(-sum(result["log_probabilities"]))


@pytest.mark.parametrize("arguments", [[""], [], ["a", "--file", "b"]])
def test_score_takes_one_text_that_is_not_empty(
    minigen: Command, tiny_run: Path, arguments: list[str]
) -> None:
    assert minigen("score", str(tiny_run), *arguments).status == 2


def test_evaluate_agrees_with_the_validation_loss_of_training(
    minigen: Command, tiny_run: Path
) -> None:
    result = json.loads(minigen("evaluate", str(tiny_run), "--json").out)
    last = read_jsonl(tiny_run / "metrics.jsonl")[-1]
    assert result["loss"] == last["validation_loss"]
    assert set(result["baselines"]) == {"uniform", "unigram", "bigram"}


def test_evaluate_finds_the_text_after_what_may_change_has_changed(minigen: Command) -> None:
    Path("text.txt").write_text("to be or not to be\n" * 9)
    minigen("train", *TINY_SETTINGS, "--text", "text.txt", "--out", "run")
    expected = minigen("evaluate", "run")
    assert expected.status == 0
    assert minigen("train", "--resume", "--set", "sampling.every=1", "--out", "run").status == 0
    assert minigen("evaluate", "run") == expected


def test_a_token_that_a_short_text_does_not_have_is_refused_before_training(
    minigen: Command,
) -> None:
    Path("one.txt").write_bytes(b"x")
    result = minigen("train", "--text", "one.txt", "--set", "sampling.suppress_tokens=[300]")
    assert (result.status, result.out) == (1, "")
    assert "suppress_tokens takes ids below 257" in result.err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("before", "after"),
    [("signal.default_int_handler", "SIG_DFL"), ("signal.SIG_IGN", "SIG_IGN")],  # as under nohup
)
def test_while_python_imports_ctrl_c_ends_the_process_unless_it_is_ignored(before, after):
    code = (
        f"import signal; signal.signal(signal.SIGINT, {before})\n"
        "import minigen.__main__; print(signal.getsignal(signal.SIGINT).name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{after}\n"
