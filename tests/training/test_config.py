"""The config: what is refused, in which words, and what comes back as it went in."""

import copy
import json
import pickle
import re
import tomllib
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from minigen.decoding.policy import OPTIONS, Policy
from minigen.errors import MinigenError, OptionError
from minigen.training import config as module
from minigen.training.config import Config, differences, located, parse_override, shipped
from minigen.training.keys import KEYS

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def load(tmp_path):
    """Load a config from TOML text."""

    def load(toml, overrides=None):
        path = tmp_path / "my.toml"
        path.write_text(toml, encoding="utf-8")
        return Config.load(path, overrides)

    return load


@pytest.fixture
def refusal(load):
    """Load a config that must be refused; returns the message, which must be one line."""

    def refusal(toml, overrides=None, error=MinigenError):
        with pytest.raises(error) as caught:
            load(toml, overrides)
        assert type(caught.value) is error
        message = str(caught.value)
        assert "\n" not in message
        return message

    return refusal


# ── Values ───────────────────────────────────────────────────────────────────────────────────────


def test_fables_toml_is_what_the_keys_say(minigen):
    """Where this fails: `minigen config > configs/fables.toml`, or `make docs`."""
    assert (CONFIGS / "fables.toml").read_text(encoding="utf-8") == minigen("config").out
    assert tomllib.loads(minigen("config").out)["training"]["steps"] == Config.load().training.steps


def test_every_key_defaults_to_its_value_in_fables_toml(load):
    assert load("") == Config.load("fables") == Config.load()


def test_the_options_behind_a_comment_sign_in_fables_toml_work(load):
    switched_on, count = re.subn(r"(?m)^# (\w+ = )", r"\1", (CONFIGS / "fables.toml").read_text())
    assert len(differences(load(switched_on), Config.load())) == count > 0


def test_every_key_has_a_comment_and_a_rule_which_errors_tell(refusal):
    assert all(key.comment.endswith(".") and key.rule for key in KEYS.values())
    for name in OPTIONS:
        told = f"sampling.{name} must be {KEYS[f'sampling.{name}'].rule} (got True); "
        assert told in refusal(f"[sampling]\n{name} = true")


def test_config_shows_one_key_or_one_table_or_json(minigen):
    assert minigen("config", "optimizer.decay").out == (
        "[optimizer]\n# How the learning rate falls from its peak to the last step.\n"
        'decay = "cosine" # "constant", "linear" or "cosine"\n'
    )
    assert minigen("config", "run").out.startswith("[run]\n# Names the streams")
    assert json.loads(minigen("config", "sampling.top_k", "--json").out) == {
        "sampling.top_k": {
            "default": None,
            "comment": KEYS["sampling.top_k"].comment,
            "rule": "a whole number, at least 0",
            "decides_weights": False,
            "example": 40,
        }
    }
    assert list(json.loads(minigen("config", "--json").out)) == list(KEYS)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("training.step", "training.steps"),
        ("step", "training.steps"),
        ("modle", "model"),
        ("optimizer.lr", "optimizer.learning_rate"),  # the table counts
        ("optimizer.steps", "training.steps"),  # but not for as much as the name
    ],
)
def test_config_of_an_unknown_key_names_the_nearest(minigen, wrong, right):
    result = minigen("config", wrong)
    assert (result.status, result.out) == (2, "")
    assert result.err == f"Error: unknown key '{wrong}': the nearest known one is {right}\n"


@pytest.mark.parametrize("name", ["fables", "bigram", "names"])
def test_a_shipped_config_loads_by_name_and_by_path(name):
    assert Config.load(name) == Config.load(str(CONFIGS / f"{name}.toml"))


def test_the_configs_of_a_wheel_lie_in_the_package(tmp_path, monkeypatch):
    path = tmp_path / "minigen" / "configs" / "x.toml"
    path.parent.mkdir(parents=True)
    path.touch()
    monkeypatch.setattr(module, "__file__", str(tmp_path / "minigen" / "training" / "config.py"))
    assert module.shipped() == {"x": path}


def test_the_bigram_config_sees_one_byte():
    config = Config.load("bigram")
    assert (config.model.context_length, config.tokenizer.vocab_size) == (1, 257)


def test_the_names_config_takes_lines_as_documents():
    assert Config.load("names").corpus.documents == "line"


def test_a_file_changes_only_what_it_lists_and_an_override_comes_last(load):
    config = load("[training]\nsteps = 7\nbatch_size = 8", {"training.steps": 9})
    assert differences(config, Config.load()) == [
        ("training.steps", 9, Config.load().training.steps),
        ("training.batch_size", 8, Config.load().training.batch_size),
    ]


@pytest.mark.parametrize(
    "overrides",
    [
        {"training": {"steps": 3}},
        {"training": {"steps": 3}, "model": {}},
        dict([parse_override("training={steps=3}")]),
    ],
)
def test_overrides_of_a_table_are_merged_into_it(overrides):
    assert Config.load("fables", overrides) == Config.load("fables", {"training.steps": 3})


def test_a_fault_in_a_table_of_overrides_is_the_callers(refusal):
    message = refusal("", {"training": {"stepps": 3, "batch_size": 0}}, OptionError)
    assert "unknown key 'training.stepps': the nearest known one is training.steps" in message
    assert "training.batch_size must be" in message


def test_a_fault_of_the_file_is_not_blamed_on_an_override_beside_it(refusal):
    message = refusal('evaluation = "never"', {"evaluation.every": 3})
    assert "my.toml: evaluation must be a table of keys" in message


@pytest.mark.parametrize("text", ["1984", "true", "2024-01-01", "[1]", "{a=1}", "1e3"])
def test_a_string_key_takes_what_toml_would_read_as_something_else(text):
    key, value = parse_override(f"sampling.prompt={text}")
    assert Config.load(overrides={key: value}).sampling.prompt == text


def test_a_quoted_string_is_what_stands_in_the_quotes():
    assert parse_override('sampling.prompt="19\\n84"') == ("sampling.prompt", "19\n84")


def test_sampling_takes_every_option_of_a_policy(load):
    config = load('[sampling]\ntop_k = 4\nsuppress_tokens = [3]\nlogit_bias = { "65" = 1.5 }')
    temperature = Config.load().sampling.policy.temperature
    assert config.sampling.policy == Policy(
        temperature=temperature, top_k=4, suppress_tokens=(3,), logit_bias={65: 1.5}
    )
    assert {option.name for option in fields(Policy)} < set(type(config.sampling).model_fields)


def test_a_config_is_frozen():
    config = Config.load()
    with pytest.raises(ValueError, match="frozen"):
        config.training.steps = 3
    with pytest.raises(ValueError, match="frozen"):
        config.sampling.top_k = 3


def test_a_config_is_read_and_says_so_and_lists_its_keys():
    with pytest.raises(OptionError, match=r'^a config is read: Config\.load\("fables", overrides='):
        Config(training={"steps": 3})
    with pytest.raises(FrozenInstanceError):
        KEYS["run.seed"].default = 1
    with pytest.raises(ValidationError, match="frozen"):
        del Config.load().training.steps
    line = "steps = 1000: Updates of the parameters.\n"
    assert f"\ntraining.{line}" in Config.__doc__
    assert f"\ntraining.{line}" in type(Config.load().training).__doc__
    assert line not in type(Config.load().optimizer).__doc__


def test_a_config_can_be_copied_and_pickled():
    config = Config.load()
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config


# ── Faults ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run.seed", "-1"),
        ("run.seed", "1.0"),
        ("run.seed", "0x" + 5000 * "f"),
        ("corpus.text", '"book.txt"'),
        ("corpus.text", "[]"),
        ("corpus.text", '[""]'),
        ("corpus.text", "[3]"),
        ("corpus.documents", '"word"'),
        ("corpus.validation_fraction", "1.0"),
        ("corpus.validation_fraction", "-0.1"),
        ("tokenizer.vocab_size", "256"),
        ("model.context_length", "0"),
        ("model.embedding_dim", "0"),
        ("training.steps", '"5"'),
        ("training.steps", "1.5"),
        ("training.steps", "true"),
        ("training.steps", "-1"),
        ("training.steps", "1979-05-27"),
        ("training.batch_size", "0"),
        ("training.micro_batches", "0"),
        ("optimizer.name", '"adam"'),
        ("optimizer.learning_rate", "0"),
        ("optimizer.learning_rate", "nan"),
        ("optimizer.learning_rate", "inf"),
        ("optimizer.learning_rate", "true"),
        ("optimizer.learning_rate", '"0.1"'),
        ("optimizer.betas", "[0.9]"),
        ("optimizer.betas", "[0.9, 0.99, 0.999]"),
        ("optimizer.betas", "[0.9, 1.0]"),
        ("optimizer.betas", '[0.9, "x"]'),
        ("optimizer.betas", "0.9"),
        ("optimizer.momentum", "1"),
        ("optimizer.weight_decay", "-1"),
        ("optimizer.gradient_clip", "nan"),
        ("optimizer.warmup_steps", "-1"),
        ("optimizer.decay", '"exponential"'),
        ("evaluation.every", "-1"),
        ("sampling.every", "0.5"),
        ("sampling.prompt", "3"),
        ("sampling.max_new_tokens", "-1"),
        ("sampling.temperature", "-1"),
        ("sampling.temperature", "nan"),
        ("sampling.top_k", "1.5"),
        ("sampling.top_p", '"x"'),
        ("sampling.suppress_tokens", "5"),
        ("sampling.suppress_tokens", "[-1]"),
        ("sampling.logit_bias", "[1]"),
        ("sampling.logit_bias", "{ a = 1.0 }"),
        ("checkpoint.every", "-1"),
    ],
)
def test_a_value_outside_its_rule_is_refused_with_key_rule_and_value(refusal, key, value):
    table, name = key.split(".")
    message = refusal(f"[{table}]\n{name} = {value}")
    assert re.search(rf"my\.toml: {key}:? .*must be .*\(got .+\)", message)


SIZE = 2**21
ENDS = [  # of each key's range: the last value inside, the first one beyond
    *((key, 0, -1) for key in KEYS if key.endswith(("seed", "steps", "every"))),
    *((key, 2**63 - 1, 2**63) for key in KEYS if key.endswith(("seed", "steps", "every"))),
    *((key, 1, 0) for key in KEYS if key.endswith(("context_length", "_dim", "batch_size"))),
    *((key, 1, 0) for key in KEYS if key.endswith(("_batches", "max_new_tokens"))),
    ("corpus.text", ["a"], []),
    ("corpus.text", ["a"], [""]),
    ("corpus.text", "external", "internal"),
    ("corpus.validation_fraction", 0, -5e-324),
    ("corpus.validation_fraction", 0.99, 1),
    ("tokenizer.vocab_size", 257, 256),
    ("tokenizer.vocab_size", SIZE, SIZE + 1),
    ("model.context_length", SIZE, SIZE + 1),
    ("model.embedding_dim", SIZE, SIZE + 1),
    ("training.batch_size", SIZE, SIZE + 1),
    ("training.micro_batches", SIZE, SIZE + 1),
    ("sampling.max_new_tokens", SIZE, SIZE + 1),
    ("optimizer.learning_rate", 5e-324, 0),
    ("optimizer.betas", [0, 0], [-5e-324, 0]),
    ("optimizer.betas", [0, 0], [0, -5e-324]),
    ("optimizer.betas", [0.99, 0.99], [1, 0.99]),
    ("optimizer.betas", (0.99, 0.99), (0.99, 1)),
    ("optimizer.momentum", 0, -5e-324),
    ("optimizer.momentum", 0.99, 1),
    ("optimizer.weight_decay", 0, -5e-324),
    ("optimizer.gradient_clip", 0, -5e-324),
    ("sampling.logit_bias", {"0": 1, 300: 2}, {"-1": 1}),
]


@pytest.mark.parametrize(("key", "inside", "outside"), ENDS)
def test_the_last_value_of_a_range_is_taken_and_the_next_refused(key, inside, outside):
    smallest = {"model.context_length": 1, "model.embedding_dim": 1, "training.batch_size": 1}
    base = Config.load(overrides={**smallest, "tokenizer.vocab_size": 400})
    if key == "tokenizer.vocab_size":
        base = Config.load(overrides=smallest)
    base.override({key: inside})
    with pytest.raises(OptionError, match=rf"^{key}:? .*must be .*\(got "):
        base.override({key: outside})


def test_a_number_written_without_a_point_is_a_float_all_the_same(load):
    assert load("[optimizer]\nlearning_rate = 1").optimizer.learning_rate == 1.0


def test_an_unknown_key_names_the_nearest_known_one(refusal):
    """Field report 28."""
    assert "'training.step': the nearest known one is training.steps" in refusal(
        "[training]\nstep = 3"
    )
    told = "'sampling.logit_bias.65': the nearest known one is sampling.logit_bias"
    assert told in refusal("", {"sampling.logit_bias.65": 3}, OptionError)
    assert "'sampling.top_pp': the nearest known one is sampling.top_p" in refusal(
        "[sampling]\ntop_pp = 3"
    )


def test_a_key_in_the_wrong_table_names_the_right_one(refusal):
    assert "the nearest known one is optimizer.learning_rate" in refusal(
        "[training]\nlearning_rate = 1"
    )
    assert "'steps': the nearest known one is training.steps" in refusal("steps = 3")


def test_an_unknown_table_names_the_nearest_known_one(refusal):
    assert "unknown table 'trainign': the nearest known one is [training]" in refusal("[trainign]")


def test_a_table_that_is_none_is_refused(refusal):
    assert "training must be a table of keys, as [training] (got 5)" in refusal("training = 5")


def test_a_name_with_a_line_break_still_gives_one_line(refusal):
    assert "unknown key" in refusal('[training]\n"a\\nb.c" = 1\n["x\\ny"]\n')


def test_all_faults_of_a_config_stand_in_one_error(refusal):
    message = refusal(
        '[training]\nstep = 5\nsteps = "5"\nbatch_size = 0\n[optimizer]\nbetas = [2, 3]\n'
        "[sampling]\ntop_k = -1\ntop_p = 7\n[modle]\n",
        {"run.seed": -1},
    )
    assert re.findall(r"(\w+(?:\.\w+)?)'? (?:must be)|unknown \w+ '(.*?)'", message) == [
        ("run.seed", ""),
        ("training.steps", ""),
        ("training.batch_size", ""),
        ("", "training.step"),
        ("optimizer.betas", ""),
        ("sampling.top_k", ""),
        ("sampling.top_p", ""),
        ("", "modle"),
    ]


def test_shapes_whose_products_would_not_be_exact_are_refused(load, refusal):
    load("[model]\ncontext_length = 2048\nembedding_dim = 1024")
    message = refusal("[model]\ncontext_length = 2048\nembedding_dim = 1025")
    assert "model.context_length * model.embedding_dim must be at most 2097152" in message
    assert "(got 2048 * 1025)" in message


def test_a_policy_for_tokens_that_do_not_exist_is_refused(refusal):
    toml = "[tokenizer]\nvocab_size = 300\n[sampling]\n"
    assert refusal(toml + "suppress_tokens = [299, 300]").endswith(
        "sampling.suppress_tokens takes ids below 300, the size of this vocabulary (got 300)"
    )
    assert "sampling.logit_bias takes ids below 300" in refusal(
        toml + 'logit_bias = { "300" = 1.0 }'
    )


def test_bad_toml_is_refused_with_file_and_line(refusal, tmp_path):
    assert re.search(r"my\.toml is not TOML: .*line 2", refusal("[training]\nsteps = =\n"))
    path = tmp_path / "latin.toml"
    path.write_bytes(b"# a\n# caf\xe9\n")
    with pytest.raises(MinigenError, match=r"latin\.toml, line 2: TOML must be UTF-8"):
        Config.load(path)


def test_nesting_without_end_is_refused(refusal):
    refusal("[training]\nsteps = " + 100_000 * "[")


def test_a_missing_file_is_an_error_of_what_was_read(tmp_path):
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(MinigenError, match="cannot read config") as caught:
            Config.load(f"{path}/" if path == tmp_path else str(path))
        assert not isinstance(caught.value, OptionError)


def test_what_ends_in_toml_or_holds_a_slash_or_is_a_path_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("none.toml", "none/none", Path("fables")):
        with pytest.raises(MinigenError, match=f"^cannot read config {name}: No such file"):
            Config.load(name)


@pytest.mark.parametrize(
    ("lay", "said"),
    [
        (lambda path: path.write_bytes(b""), r"config\.toml is empty: put back into it the config"),
        (lambda path: path.symlink_to("/dev/null"), r"config\.toml: it is not a regular file$"),
        (lambda path: None, r"config\.toml: No such file or directory$"),
    ],
)
def test_the_config_of_a_run_is_a_regular_file_that_says_something(lay, said, tmp_path):
    lay(tmp_path / "config.toml")
    with pytest.raises(MinigenError, match=said):
        Config.of_run(tmp_path)


def test_an_external_text_is_found_by_the_config_beside_the_checkpoint(load, tmp_path):
    embedded, step = Config.load(), tmp_path / "step-000000.safetensors"
    external = embedded.override({"corpus.text": "external"})
    assert located(external, step) == external  # there is no config
    for text in (["/a.txt", "/b"], ["-"]):
        config = embedded.override({"corpus.text": text})
        (tmp_path / "config.toml").write_text(config.to_toml(), encoding="utf-8")
        assert located(external, step) == (external if text == ["-"] else config)
        assert located(embedded, step) == embedded


@pytest.mark.parametrize("key", ["a\nb", "training.\x80", "\udcff", 3])
def test_a_key_that_is_no_printable_text_is_unknown(key):
    with pytest.raises(OptionError, match=r"^unknown key .*: a key is a printable text$"):
        Config.load("fables", {key: 1})


def test_an_unknown_name_lists_the_shipped_ones_nearest_first():
    with pytest.raises(OptionError, match="'fabels': there are fables, "):
        Config.load("fabels")
    with pytest.raises(OptionError, match="'bigrams': there are bigram, "):
        Config.load("bigrams")


@pytest.mark.parametrize("name", ["fables.safetensors", "runs/a/step-000012.safetensors"])
def test_a_model_in_place_of_a_config_is_told_what_takes_one(name):
    with pytest.raises(
        OptionError, match=f"{re.escape(repr(name))} is a model, which minigen info"
    ):
        Config.load(name)


def test_a_fault_of_overrides_alone_is_wrong_usage(refusal):
    assert refusal("", {"training.steps": "5"}, OptionError).startswith("training.steps must be")
    refusal("", {"training.step": 5}, OptionError)
    refusal("", {"steps": 5}, OptionError)
    refusal("", {"training": 5}, OptionError)
    refusal("", {"model.context_length": 2**20, "model.embedding_dim": 3}, OptionError)
    refusal("", {"sampling.suppress_tokens": [10**6]}, OptionError)
    refusal("[training]\nbatch_size = 0", {"training.steps": "5"}, MinigenError)


def test_text_that_no_file_could_hold_is_refused(refusal):
    refusal("", {"sampling.prompt": "\udcff"}, OptionError)
    refusal("", {"corpus.text": ["\udcff"]}, OptionError)


# ── Paths ────────────────────────────────────────────────────────────────────────────────────────


def test_paths_start_from_the_config_file_and_those_of_overrides_from_the_current_folder(
    load, tmp_path, monkeypatch
):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    config = load('[corpus]\ntext = ["a.txt", "-", "../b", "/c"]')
    assert config.corpus.text == (f"{tmp_path}/a.txt", "-", f"{tmp_path}/../b", "/c")
    config = load('[corpus]\ntext = ["a.txt"]', {"corpus.text": ["d", "-"]})
    assert config.corpus.text == (f"{here}/d", "-")
    tables = config.model_dump()
    config = Config.from_dict(tables | {"corpus": {**tables["corpus"], "text": ["d", "-"]}})
    assert config.corpus.text == (f"{here}/d", "-")


def test_what_is_above_a_link_is_above_the_folder_that_it_leads_to(load, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("far/inside").mkdir(parents=True)
    Path("link").symlink_to("far/inside")
    for name in ("far/book.txt", "book.txt"):
        Path(name).write_text(name)
    in_file = load('[corpus]\ntext = ["link/../book.txt"]')
    overridden = load("", {"corpus.text": ["link/../book.txt"]})
    for config in (in_file, overridden):
        assert Path(config.corpus.text[0]).read_text() == "far/book.txt"


# ── There and back ───────────────────────────────────────────────────────────────────────────────


@given(
    prompt=st.text(st.characters(exclude_categories=["Cs"])),
    learning_rate=st.floats(min_value=5e-324, allow_infinity=False),
    bias=st.dictionaries(st.integers(0, 511), st.floats(-1e6, 1e6)),
    top_k=st.none() | st.integers(0, 10**6),
)
def test_a_config_written_as_toml_reads_back_the_same(
    tmp_path_factory, prompt, learning_rate, bias, top_k
):
    config = Config.load().override(
        {
            "sampling.prompt": prompt,
            "optimizer.learning_rate": learning_rate,
            "sampling.logit_bias": bias,
            "sampling.top_k": top_k,
            "corpus.text": ["/a b", "-"],
        }
    )
    path = tmp_path_factory.getbasetemp() / "round-trip.toml"
    path.write_bytes(config.to_toml().encode())
    assert Config.load(path) == config
    assert Config.load(path).to_toml() == config.to_toml()


def test_a_checkpoint_gets_a_config_without_paths_that_json_keeps(load):
    config = load('[corpus]\ntext = ["secret.txt"]\n[sampling]\nlogit_bias = {"9" = 1, "10" = 2}')
    tables = config.portable()
    assert json.loads(json.dumps(tables)) == tables
    assert "secret" not in str(tables)
    back = Config.from_dict(tables)
    assert [key for key, _, _ in differences(config, back)] == ["corpus.text"]
    assert back.corpus.text == "external"
    assert Config.load().portable()["corpus"]["text"] == "fables"


OFF = {  # what a saved config means that was written before a key existed
    "corpus.validation_fraction": 0.0,
    "training.micro_batches": 1,
    "optimizer.momentum": 0.0,
    "optimizer.weight_decay": 0.0,
    "optimizer.gradient_clip": 0.0,
    "optimizer.warmup_steps": 0,
    "optimizer.decay": "constant",
    "evaluation.every": 0,
    "sampling.every": 0,
    "sampling.prompt": "",
    "sampling.max_new_tokens": 100,
    "checkpoint.every": 0,
    **{f"sampling.{name}": option.default for name, option in OPTIONS.items()},
}


def without(config, dotted):
    tables = config.portable()
    table, _, name = dotted.partition(".")
    del tables[table][name]
    return tables


@pytest.mark.parametrize("dotted", OFF)
def test_a_key_that_a_saved_config_lacks_means_as_it_was_before_the_key(dotted, load, tmp_path):
    """Never today's default: not in a checkpoint, and not in the config of its run folder."""
    config = load("")
    tables = without(config, dotted)
    listed = {
        name: {key: value for key, value in table.items() if value is not None}
        for name, table in tables.items()
    }
    (tmp_path / "config.toml").write_text(tomli_w.dumps(listed), encoding="utf-8")
    for old in (Config.from_dict(tables), Config.of_run(tmp_path)):
        assert old == config.override({dotted: OFF[dotted]})


@pytest.fixture
def old():
    """The config of a run whose steps break what became a rule later on."""
    tables = Config.load("fables", {"model.context_length": 32}).model_dump()
    tables["training"]["batch_size"] = 2**21
    return Config.from_dict(tables, is_saved=True)


def test_a_saved_config_is_held_to_no_rule_that_is_younger_than_its_run(old, tmp_path):
    (tmp_path / "config.toml").write_text(old.to_toml(), encoding="utf-8")
    assert Config.of_run(tmp_path).override({"run.seed": 1}) == old.override({"run.seed": 1})


@pytest.mark.parametrize("change", [{"training.batch_size": 2**21}, {"model.context_length": 32}])
def test_what_is_changed_in_a_saved_config_is_held_to_every_rule(old, change):
    with pytest.raises(OptionError, match=r"^batch_size and context_length must leave"):
        old.override(change)


def test_the_config_of_a_run_on_standard_input_reads_it_again(load, tmp_path):
    toml = load("", {"corpus.text": ["-"]}).to_toml()
    (tmp_path / "step-000000.safetensors").touch()
    (tmp_path / "config.toml").write_text(toml, encoding="utf-8")
    assert Config.load(tmp_path / "config.toml").corpus.text == ("-",)


def test_a_table_that_a_saved_config_lacks_means_that_none_of_its_keys_existed():
    tables = Config.load().portable()
    del tables["sampling"], tables["checkpoint"]
    old = Config.from_dict(tables)
    assert (old.sampling.every, old.sampling.policy, old.checkpoint.every) == (0, Policy(), 0)


def test_a_saved_config_that_lacks_what_every_run_had_is_refused():
    tables = Config.load().portable()
    del tables["training"]["steps"], tables["run"]
    with pytest.raises(MinigenError, match=r"^x: run.seed is missing; training.steps is missing$"):
        Config.from_dict(tables, "x")


def test_each_key_says_what_it_meant_before_it_existed_or_was_always_there():
    always = {"run.seed", "corpus.text", "corpus.documents", "tokenizer.vocab_size"}
    always |= {"model.context_length", "model.embedding_dim", "training.steps"}
    always |= {"training.batch_size", "optimizer.name", "optimizer.learning_rate"}
    always |= {"optimizer.betas"}
    assert KEYS.keys() - OFF.keys() == always


def test_a_changed_config_is_checked_like_any_other():
    config = Config.load()
    assert config.override({"training.steps": 3}).training.steps == 3
    with pytest.raises(OptionError, match=r"^training.steps must be"):
        config.override({"training.steps": -3})


# ── KEY=VALUE ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("500", 500),
        ("1e-3", 1e-3),
        ("true", True),
        ('"a b"', "a b"),
        ("Once upon", "Once upon"),
        ("a=b", "a=b"),
        ("", ""),
        ("[0.9, 0.99]", [0.9, 0.99]),
        ('{"65" = 1.5}', {"65": 1.5}),
        ("1\nrun.seed = 3", "1\nrun.seed = 3"),
        (100_000 * "[", 100_000 * "["),
    ],
)
def test_the_value_of_a_setting_is_read_as_toml_else_as_a_string(text, value):
    assert parse_override(f"training.steps={text}") == ("training.steps", value)


@pytest.mark.parametrize("text", ["training.steps", "=3", " =3", ""])
def test_a_setting_without_key_or_equals_sign_is_wrong_usage(text):
    with pytest.raises(OptionError, match="a setting must be KEY=VALUE"):
        parse_override(text)


def test_a_byte_order_mark_before_toml_is_no_fault(tmp_path):
    path = tmp_path / "marked.toml"
    path.write_text("[training]\nsteps = 3\n", encoding="utf-8-sig")
    assert Config.load(path).training.steps == 3


def test_a_step_too_large_for_the_exact_gradient_is_refused_with_the_rule():
    largest = {"training.batch_size": 2**21, "model.context_length": 16, "model.embedding_dim": 1}
    assert Config.load("fables", largest).training.batch_size == 2**21
    for key in ("training.batch_size", "model.context_length"):
        larger = largest | {"training.batch_size": 2**20, "model.context_length": 32}
        with pytest.raises(OptionError) as raised:
            Config.load("fables", larger | {key: 2 * larger[key]})
        sizes = [(larger | {key: 2 * larger[key]})[name] for name in larger][:2]
        assert str(raised.value).startswith(
            "batch_size and context_length must leave the exact gradient at least 10 bits for a "
            f"weight and 16 for a prediction's error (got {sizes[0]} and {sizes[1]}, which leave "
        )


def test_an_integer_of_numpy_is_an_integer():
    for value in (np.int64(3), np.uint8(3)):
        config = Config.load("fables", {"training.steps": value, "run.seed": value})
        assert (config.training.steps, type(config.run.seed)) == (3, int)
    with pytest.raises(OptionError, match=r"training\.steps must be an integer"):
        Config.load("fables", {"training.steps": np.bool_(True)})


@pytest.mark.parametrize(
    "overrides",
    [
        {"a" * 100_000: 1},
        {f"{'a' * 100_000}.b": 1},
        {f"training.{'a' * 100_000}": 1},
        {f"\x00{'a' * 100_000}": 1},
        {f"sampling.{i}": 1 for i in range(1000)},
        {"sampling.logit_bias": {"9" * 5000: 1.0}},
    ],
    ids=["table", "tables", "key", "unprintable", "many", "digits"],
)
def test_what_is_endless_has_a_short_error(overrides):
    with pytest.raises(OptionError) as caught:
        Config.load("fables", overrides)
    assert len(str(caught.value)) < 4000
    assert "\n" not in str(caught.value)
    assert re.match("unknown|sampling", str(caught.value))


@pytest.mark.parametrize(
    ("faults", "end"), [(20, "[^;]*"), (21, "; and 1 more"), (23, "; and 3 more")]
)
def test_of_many_faults_the_first_are_told_and_the_others_counted(faults, end):
    with pytest.raises(OptionError, match=rf"'sampling\.19'[^;]*{end}$"):
        Config.load("fables", {f"sampling.{i}": 1 for i in range(faults)})


def test_a_package_without_its_configs_is_told(monkeypatch):
    monkeypatch.setattr(Path, "is_dir", lambda _: False)  # as in a zip
    with pytest.raises(MinigenError, match=r"there are no configs in .*: install minigen again"):
        shipped()
