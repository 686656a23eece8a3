"""``info`` says what a checkpoint holds."""

from typing import Any

import click

from minigen.cli import cli
from minigen.cli.options import json_option, model_argument, print_json


@cli.command()
@model_argument
@json_option
def info(model: str, as_json: bool) -> None:
    """Show step, shapes, streams, config and fingerprint of MODEL.

    \b
    Example:
      minigen info runs/fables --json
    """
    from minigen.training import checkpoint

    path = checkpoint.locate(model)
    saved = checkpoint.load(path, moments=False)
    shapes = {name: list(saved.tensors[name].shape) for name in checkpoint.PARAMETERS}
    facts: dict[str, Any] = {
        "fingerprint": checkpoint.fingerprint(saved.tensors),
        "step": saved.step,
        "parameters": shapes,
        "config": saved.config,
        "streams": saved.streams,
        "corpus_sha256": saved.corpus_sha256,
    }
    if as_json:
        print_json(facts)
        return
    size = sum(tensor.size for tensor in saved.tensors.values())
    click.echo(f"file         {path}")
    click.echo(f"fingerprint  {facts['fingerprint']}")
    click.echo(f"step         {saved.step}")
    listed = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
    click.echo(f"parameters   {size:,}: {listed}")
    for name, position in saved.streams.items():
        click.echo(f"stream       {name} at word {position:,}")
    click.echo(f"corpus       {saved.corpus_sha256}")
    for table, keys in saved.config.items():
        for key, value in keys.items():
            if value is not None:
                click.echo(f"config       {table}.{key} = {value!r}")
