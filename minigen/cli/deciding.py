"""``next`` shows the distribution of one decision; ``head`` computes one by hand."""

import re
from dataclasses import asdict
from typing import Any

import click

import minigen
from minigen.cli import cli, options
from minigen.errors import OptionError


@cli.command("next", cls=options.PolicyCommand)
@options.model_argument
@options.prompt_argument
@options.count_option("--top", 10, "How many to show.")
@options.json_option
def next_(model: str, prompt: bytes | None, top: int, as_json: bool, **policy_options: Any) -> None:
    """Show the likeliest tokens to follow PROMPT.

    Probabilities are the model's own, or, where options are given, those that they leave.

    \b
    Example:
      minigen next runs/fables "Once" --top 5 --top-p 0.9
    """
    policy = options.build_policy(policy_options)

    from minigen.text.tokenizer import END_OF_TEXT

    decision = minigen.load(model).next(options.read_text(prompt), top=top, policy=policy)
    if as_json:
        told = {"greedy_token_id": decision.greedy_token_id, "entropy": decision.entropy}
        shown = [{**asdict(c), "text": c.text, "bytes": c.bytes.hex()} for c in decision.candidates]
        options.print_json({"candidates": shown, **told})
        return
    click.echo("    id  bytes                   logit  probability    −ln p")
    for c in decision.candidates:
        name = "<|endoftext|>" if c.token_id == END_OF_TEXT else options.quoted(c.bytes)
        mark = "  ← greedy" if c.token_id == decision.greedy_token_id else ""
        figures = f"{c.logit:10.4f}  {c.probability:11.6f} {c.negative_log_likelihood:8.4f}"
        click.echo(f"{c.token_id:6d}  {name:18s} {figures}{mark}")
    if decision.others:
        click.echo(f"{decision.others:6d}  others{decision.others_probability:36.6f}")
    click.echo(f"entropy {decision.entropy:.6f} nats")


# What ends in + gives nothing back, so that no text takes longer than its length.
_LOGIT = re.compile(
    r"([+-]?)\s*+(?:(?:ln|log)\s*+(?:\(\s*+)?([0-9.eE+-]++)\s*+\)?|(inf|[0-9.][0-9.eE+-]*+))"
)


def parse_logits(text: str) -> list[float]:
    """Read numbers, ``ln X`` and ``log X`` (both natural) between commas; −inf is "never".

    >>> parse_logits("0, ln 1, -2.5")
    [0.0, 0.0, -2.5]
    """
    from minigen.exact.arithmetic import log

    logits = []
    for part in map(str.strip, text.split(",")):
        match = _LOGIT.fullmatch(part)
        try:
            sign, argument, number = match.groups() if match else ("", None, part)
            value = float(log(float(argument))) if argument else float(number or "")
        except ValueError:
            value = float("nan")
        if value != value:
            got = part if len(part) <= 60 else f"{part[:60]}…"
            raise OptionError(
                f"a logit must be a number, 'ln X' or 'log X' with X > 0 (got {got!r})"
            )
        logits.append(-value if sign == "-" else value)
    return logits


@cli.command(cls=options.Command)
@click.option("--logits", required=True, metavar="LIST", help='As "0, ln2, ln3".')
@click.option("--target", type=int, metavar="I", help="0-based index of the token that came.")
@options.json_option
def head(logits: str, target: int | None, as_json: bool) -> None:
    """Compute softmax, loss and gradient of a logit vector by hand.

    \b
    Example:
      minigen head --logits "0, ln2, ln3" --target 2
    """
    import numpy as np

    from minigen.model.head import log_softmax, loss_and_gradient, softmax

    z = np.array(parse_logits(logits))
    if not np.isfinite(z.max()):
        raise OptionError(f"the largest logit must be finite (got {z.max():g})")
    greedy = minigen.Policy(temperature=0.0).choose(z)
    columns = {"logit": z, "probability": softmax(z), "ln p": log_softmax(z)}
    result: dict[str, Any] = {
        "probabilities": columns["probability"].tolist(),
        "log_probabilities": columns["ln p"].tolist(),
        "greedy": greedy,
    }
    if target is not None:
        loss, columns["gradient"] = loss_and_gradient(z, target)
        result |= {"loss": loss, "gradient": columns["gradient"].tolist()}
    if as_json:
        options.print_json(result)
        return
    click.echo("token" + "".join(f" {name:>12}" for name in columns))
    for i in range(len(z)):
        click.echo(f"{i:5d}" + "".join(f" {column[i]:12.6f}" for column in columns.values()))
    click.echo(f"greedy takes token {greedy}")
    if target is not None:
        click.echo(f"loss = −ln p[{target}] = {result['loss']:.6f} nats")
