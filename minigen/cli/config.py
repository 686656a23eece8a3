"""``config`` prints the keys of a config: the file ``configs/fables.toml`` is what it prints."""

import json
import textwrap
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from minigen.cli import cli
from minigen.cli.options import complete_key, json_option, print_json
from minigen.errors import OptionError, listed

if TYPE_CHECKING:
    from minigen.training.keys import Key

_INTRODUCTION = """\
The default config, and the default of every key: another config file, or --set TABLE.KEY=VALUE, \
lists only what it changes. The keys of {free} leave the fingerprint as it is; every other key \
decides it. A key behind a # is off; those of [sampling] are options of `minigen generate`, in the \
order in which they apply. (`minigen config` prints this file.)"""


@cli.command()
@click.argument("key", required=False, shell_complete=complete_key)
@json_option
def config(key: str | None, as_json: bool) -> None:
    """Show every config key, or KEY or the keys of a table: comment and default.

    All of them together are the default config, as a file to start from.

    \b
    Example:
      minigen config optimizer.decay
    """
    from minigen.training.config import unknown_key
    from minigen.training.keys import KEYS

    chosen = {name: entry for name, entry in KEYS.items() if key in (None, name, _table(name))}
    if not chosen:
        raise OptionError(unknown_key(str(key)))
    if as_json:
        print_json({name: asdict(entry) for name, entry in chosen.items()})
        return
    if key is None:
        click.echo(_comment(_INTRODUCTION.format(free=_free(KEYS))))
    for table, names in groupby(chosen, _table):
        click.echo(("" if key else "\n") + f"[{table}]")
        for name in names:
            click.echo(_comment(chosen[name].comment))
            click.echo(_line(name.removeprefix(f"{table}."), chosen[name]))


def _table(name: str) -> str:
    return name.partition(".")[0]


def _comment(text: str) -> str:
    return textwrap.fill(text, 100, initial_indent="# ", subsequent_indent="# ")


def _line(name: str, key: "Key") -> str:
    if key.example is None:
        return f"{name} = {_toml(key.default)} # {key.rule}"
    return f"# {name} = {_toml(key.example)} # {key.rule}"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_toml(name)} = {_toml(v)}" for name, v in value.items()) + " }"
    return json.dumps(value)


def _free(keys: dict[str, "Key"]) -> str:
    """Say which keys do not decide the weights: whole tables, and single keys of others."""
    free: list[str] = []
    for table, group in groupby(keys, _table):
        names = list(group)
        single = [name for name in names if not keys[name].decides_weights]
        free += [f"[{table}]"] if single == names else single
    return listed(free, "and")
