"""`next` shows the distribution of one decision; `head` computes one by hand."""

import re
from dataclasses import replace
from typing import Any

import click

from minigen.cli import cli
from minigen.cli.options import (
    PolicyCommand,
    build_policy,
    count_option,
    json_option,
    model_argument,
    print_json,
    prompt_argument,
    read_text,
    shown,
)
from minigen.errors import OptionError


@cli.command("next", cls=PolicyCommand)
@model_argument
@prompt_argument
@count_option("--top", 10, "How many to show.")
@json_option
def next_(model: str, prompt: bytes | None, top: int, as_json: bool, **options: Any) -> None:
    """Show the likeliest tokens to follow PROMPT.

    Probabilities are the model's own, or, where options are given, those that they leave.

    \b
    Example:
      minigen next runs/fables "Once" --top 5 --top-p 0.9
    """
    policy = build_policy(options)
    text = read_text(prompt)

    import numpy as np

    from minigen.decoding.generation import padded_contexts
    from minigen.decoding.policy import Policy
    from minigen.decoding.scoring import entropy
    from minigen.exact.arithmetic import exact_sum, log
    from minigen.model import head
    from minigen.text.tokenizer import END_OF_TEXT
    from minigen.training.checkpoint import load_model

    language_model, tokenizer = load_model(model)
    history = tokenizer.encode(text).ids
    z = language_model.logits(padded_contexts([history], language_model.context_length))[0]  # (V,)
    p = policy.probabilities(z, history, prompt_length=len(history))  # (V,)
    best = replace(policy, temperature=0.0)
    greedy = best.choose(z, history, prompt_length=len(history))
    # Weights of 0 have a finite log-probability in the model, but none behind a filter.
    nats = 0.0 - (head.log_softmax(z) if policy == Policy() else log(p))
    ranking = np.argsort(-p, kind="stable")[:top].tolist()
    order = [token for token in ranking if p[token] > 0.0 or policy == Policy()]
    if as_json:
        candidates = [
            {
                "token_id": token,
                "text": tokenizer.token_bytes(token).decode(errors="replace"),
                "bytes": tokenizer.token_bytes(token).hex(),
                "logit": float(z[token]),
                "probability": float(p[token]),
                "negative_log_likelihood": float(nats[token]),
            }
            for token in order
        ]
        print_json({"candidates": candidates, "greedy_token_id": greedy, "entropy": entropy(p)})
        return
    click.echo("    id  bytes                   logit  probability    −ln p")
    for token in order:
        name = "<|endoftext|>" if token == END_OF_TEXT else shown(tokenizer.token_bytes(token))
        mark = "  ← greedy" if token == greedy else ""
        figures = f"{z[token]:10.4f}  {p[token]:11.6f} {nats[token]:8.4f}"
        click.echo(f"{token:6d}  {name:18s} {figures}{mark}")
    others = np.delete(p, order)
    if others.any():
        together = float(exact_sum(np.rint(others * 2.0**40))) * 2.0**-40
        click.echo(f"{np.count_nonzero(others):6d}  others{together:36.6f}")
    click.echo(f"entropy {entropy(p):.6f} nats")


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
    for part in text.split(","):
        match = _LOGIT.fullmatch(part.strip())
        try:
            sign, argument, number = match.groups() if match else ("", None, part)
            value = float(log(float(argument))) if argument else float(number or "")
        except ValueError:
            value = float("nan")
        if value != value:
            got = part.strip() if len(part) < 60 else f"{part.strip()[:60]}…"
            raise OptionError(
                f"a logit must be a number, 'ln X' or 'log X' with X > 0 (got {got!r})"
            )
        logits.append(-value if sign == "-" else value)
    return logits


@cli.command()
@click.option("--logits", required=True, metavar="LIST", help='As "0, ln2, ln3".')
@click.option("--target", type=int, metavar="I", help="0-based index of the token that came.")
@json_option
def head(logits: str, target: int | None, as_json: bool) -> None:
    """Compute softmax, loss and gradient of a logit vector by hand.

    \b
    Example:
      minigen head --logits "0, ln2, ln3" --target 2
    """
    import numpy as np

    from minigen.decoding.policy import Policy
    from minigen.model.head import log_softmax, loss_and_gradient, softmax

    z = np.array(parse_logits(logits))
    if not np.isfinite(z.max()):
        raise OptionError(f"the largest logit must be finite (got {z.max():g})")
    greedy = Policy(temperature=0.0).choose(z)
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
        print_json(result)
        return
    click.echo("token" + "".join(f" {name:>12}" for name in columns))
    for i in range(len(z)):
        click.echo(f"{i:5d}" + "".join(f" {column[i]:12.6f}" for column in columns.values()))
    click.echo(f"greedy takes token {greedy}")
    if target is not None:
        click.echo(f"loss = −ln p[{target}] = {result['loss']:.6f} nats")
