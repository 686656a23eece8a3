"""`prove` runs the reproducibility experiments; `verify` trains a checkpoint again."""

import textwrap
from dataclasses import asdict

import click

from minigen.cli import cli
from minigen.cli.options import (
    config_argument,
    json_option,
    model_argument,
    note,
    overrides,
    print_json,
    progress_option,
    set_option,
    shows_progress,
    text_option,
)
from minigen.cli.training import reading_progress
from minigen.errors import MinigenError


@cli.command()
@config_argument
@text_option
@set_option
@json_option
@progress_option
def prove(
    config: str | None,
    texts: tuple[str, ...],
    settings: tuple[str, ...],
    as_json: bool,
    progress: bool | None,
) -> int:
    """Prove by experiments what leaves the bits of a training alone.

    Each claim has a control: the same comparison on a set-up that is known to break it, which must
    be caught. Exit status 1 if a claim fails or a control is not caught.

    \b
    Example:
      minigen prove fables --text book.txt
    """
    changes = overrides(settings, texts)

    from minigen.proof import EXPERIMENTS, proven
    from minigen.proof import prove as prove_all
    from minigen.training.config import Config

    claims = []
    with reading_progress(progress) as reading:
        experiments = prove_all(Config.load(config or "fables", changes), progress=reading)
        for number, claim in enumerate(experiments, start=1):
            note(f"{number} of {len(EXPERIMENTS)} done: {claim.name}")
            claims.append(claim)
    holds = proven(claims)
    if as_json:
        print_json({"claims": [asdict(claim) for claim in claims], "holds": holds})
        return 0 if holds else 1
    verdicts = {True: "holds", False: "FAILS", None: "untested"}
    for claim in claims:
        missed = "untested" if claim.holds is None else "NOT CAUGHT"
        _row(claim.name, verdicts[claim.holds], claim.evidence)
        _row("  control", "caught" if claim.control.caught else missed, claim.control.description)
    everything = "Everything"
    if any(claim.holds is None for claim in claims):
        everything += " that could be tested here"
    click.echo(f"\n{everything} holds." if holds else "\nNot everything holds.")
    return 0 if holds else 1


def _row(name: str, verdict: str, text: str) -> None:
    lines = textwrap.wrap(text, 60) or [""]
    click.echo(f"{name:24s}{verdict:16s}{lines[0]}")
    for line in lines[1:]:
        click.echo(f"{'':40s}{line}")


@cli.command()
@model_argument
@text_option
@progress_option
def verify(model: str, texts: tuple[str, ...], progress: bool | None) -> int:
    """Train MODEL again, and compare every bit.

    The config is the one inside MODEL; weights, moments, merges and batches must come out the same.
    A text that is not the embedded one is found by the config.toml beside the file, or given with
    --text. Exit status 1 if anything differs.

    \b
    Example:
      minigen verify runs/fables
    """
    from tqdm import tqdm

    from minigen.proof.verification import Verification, compare
    from minigen.training.checkpoint import fingerprint

    with reading_progress(progress) as reading:
        verification = Verification(model, texts, progress=reading)
    saved = verification.saved
    steps = tqdm(
        verification.steps(), total=saved.step, unit="step", disable=not shows_progress(progress)
    )
    for _ in steps:
        pass
    again = verification.again()
    click.echo(f"file           {verification.path}, step {saved.step}")
    click.echo(f"fingerprint    {fingerprint(saved.tensors)}")
    click.echo(f"trained again  {fingerprint(again.tensors)}")
    found = compare(saved, again)
    if not found and saved.streams["inference"] != again.streams["inference"]:
        note("the stream inference stands elsewhere: text was asked for by hand, which is no fault")
    for line in found:
        click.echo(line)
    if found or verification.parting:
        click.echo(verification.parting or verification.agreement())
    if found:
        raise MinigenError(
            f"{verification.path} is not what its config gives: {len(found)} differences, "
            f"the first in {found[0]}"
        )
    click.echo("verified: the same weights, moments, merges and batches, bit for bit")
    return 0
