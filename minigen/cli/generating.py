"""`generate` continues prompts: by sampling, greedily, with beams, or with a draft model."""

import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from minigen.cli import cli
from minigen.cli.options import (
    PATH,
    count_option,
    json_option,
    model_argument,
    note,
    print_json,
    prompt_argument,
    prompt_bytes,
    read_file,
)

if TYPE_CHECKING:
    from minigen.decoding.generation import Continuation, Piece
    from minigen.decoding.policy import Policy


class Seed(click.ParamType[int]):
    """A number from 0 on, or ``random``, which picks one."""

    name = "seed"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the seed; one that was picked is said on stderr."""
        if value == "random":
            picked = secrets.randbits(32)
            note(f"seed {picked}")
            return picked
        if isinstance(value, int):
            return value
        try:
            if value.isascii() and value.isdigit():
                return int(value)
        except ValueError:  # Python reads no more than 4300 digits
            value = f"{value[:9]}…"
        self.fail(f"must be a whole number, at least 0, or 'random' (got {value!r})")


class TokenBias(click.ParamType[tuple[int, float]]):
    """``ID=BIAS``: a token's id and what is added to its logit."""

    name = "ID=BIAS"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, float]:
        """Return (id, bias)."""
        token, _, bias = value.partition("=")
        try:
            return int(token), float(bias)
        except ValueError:
            self.fail(f"must be ID=BIAS, as 101=-2.5 (got {value!r})")


# option → (type, help): those of a Policy, by their names there
_POLICY_OPTIONS: dict[str, tuple[type, str]] = {
    "temperature": (float, "Divide logits by this; 0 is greedy.  [default: 1]"),
    "top_k": (int, "Keep the K likeliest tokens."),
    "top_p": (float, "Keep the likeliest tokens up to this probability."),
    "min_p": (float, "Keep tokens at least this times as likely as the best."),
    "typical_p": (float, "Keep the most typical tokens up to this probability."),
    "epsilon_cutoff": (float, "Keep tokens of at least this probability."),
    "eta_cutoff": (float, "The same, lowered where the distribution is flat."),
    "repetition_penalty": (float, "Divide logits of tokens that occurred.  [default: 1]"),
    "frequency_penalty": (float, "Subtract this for each occurrence.  [default: 0]"),
    "presence_penalty": (float, "Subtract this from tokens that occurred.  [default: 0]"),
    "no_repeat_ngram_size": (int, "Never repeat N tokens in a row."),
    "min_new_tokens": (int, "Do not end the text before so many tokens."),
}


def policy_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that make up a Policy; the command gets them as ``**policy``."""
    command = click.option(
        "--logit-bias",
        multiple=True,
        type=TokenBias(),
        metavar="ID=BIAS",
        help="Add BIAS to the logit of token ID. May be repeated.",
    )(command)
    command = click.option(
        "--suppress-token",
        multiple=True,
        type=int,
        metavar="ID",
        help="Never choose token ID. May be repeated.",
    )(command)
    for name, (kind, text) in reversed(_POLICY_OPTIONS.items()):
        option = click.option(f"--{name.replace('_', '-')}", type=kind, help=text)
        command = option(command)
    return click.option("--greedy", is_flag=True, help="Always choose the likeliest token.")(
        command
    )


def build_policy(options: dict[str, Any]) -> "Policy":
    """Make the Policy of the options given; those not given keep its defaults."""
    from minigen.decoding.policy import Policy

    given = {name: options[name] for name in _POLICY_OPTIONS if options[name] is not None}
    if options["greedy"]:
        if given.get("temperature"):
            raise click.UsageError(
                f"--greedy is temperature 0 (got --temperature {given['temperature']:g} too)"
            )
        given["temperature"] = 0.0
    return Policy(
        **given,
        suppress_tokens=options["suppress_token"],
        logit_bias=dict(options["logit_bias"]),
    )


def _prompts(prompt: bytes | None, path: str | None) -> list[bytes]:
    if path is None:
        return [prompt_bytes(prompt)]
    if prompt is not None:
        raise click.UsageError("PROMPT and --prompts exclude each other (got both)")
    lines = read_file(path).removesuffix(b"\n").split(b"\n")
    return [line.removesuffix(b"\r") for line in lines]


class Printer:
    """Writes texts in order while they are made in any order: the first unfinished one live."""

    def __init__(self, prompts: Sequence[bytes], live: bool):
        self._unwritten = [prompt.decode(errors="replace") for prompt in prompts]
        self._finished = [False] * len(prompts)
        self._current = 0
        self._live = live

    def push(self, piece: "Piece") -> None:
        """Take one piece of one text."""
        self._unwritten[piece.row] += piece.text
        self._finished[piece.row] = piece.continuation is not None
        while self._current < len(self._finished):
            i = self._current
            sys.stdout.write(self._unwritten[i])
            self._unwritten[i] = ""
            if not self._finished[i]:
                break
            is_last = i + 1 == len(self._finished)
            sys.stdout.write("\n" if is_last else "\n---\n")
            self._current += 1
        if self._live:
            sys.stdout.flush()


def _refuse_sampling(options: dict[str, Any], **others: Any) -> None:
    """Beams draw nothing, so an option that shapes a draw is a mistake."""
    from minigen.decoding.policy import SAMPLING_OPTIONS

    given = ["greedy"] * options["greedy"]
    given += [name for name in SAMPLING_OPTIONS if options[name] is not None]
    given += [name for name, value in others.items() if value]
    if given:
        raise click.UsageError(
            f"beams take no sampling options (got --{given[0].replace('_', '-')}): "
            "leave it out, or use one beam"
        )


def _json_line(continuation: "Continuation", sample: int, seed: int | None) -> dict[str, Any]:
    prompt = continuation.prompt
    line: dict[str, Any] = {
        "prompt": prompt.decode(errors="replace") if isinstance(prompt, bytes) else prompt,
        "text": continuation.text,
        "token_ids": continuation.token_ids,
        "log_probabilities": continuation.log_probabilities,
        "finish_reason": continuation.finish_reason,
        "seed": seed,
        "sample": sample,
    }
    if continuation.acceptance_rate is not None:
        line["acceptance_rate"] = continuation.acceptance_rate
    return line


@cli.command()
@model_argument
@prompt_argument
@count_option("--max-new-tokens", 200, "End after so many tokens.")
@policy_options
@count_option("--num-beams", 1, "Search for the likeliest text with so many beams.")
@click.option(
    "--length-penalty",
    type=float,
    default=1.0,
    show_default=True,
    help="Divide a beam's log-probability by its length to this power.",
)
@click.option("--draft", type=PATH, metavar="MODEL", help="A smaller model that proposes tokens.")
@count_option("--num-draft-tokens", 4, "How many tokens the draft proposes at a time.")
@count_option("--num-samples", 1, "Texts for each prompt, each from a stream of its own.")
@click.option("--seed", type=Seed(), default=0, show_default=True, help="A number, or random.")
@click.option(
    "--stop", multiple=True, metavar="TEXT", help="End before this text. May be repeated."
)
@click.option(
    "--prompts", "prompts_path", type=PATH, metavar="FILE", help="Continue each line of a file."
)
@click.option("--stream/--no-stream", default=True, help="Write text as soon as it is certain.")
@json_option
def generate(
    model: str,
    prompt: bytes | None,
    max_new_tokens: int,
    num_beams: int,
    length_penalty: float,
    draft: str | None,
    num_draft_tokens: int,
    num_samples: int,
    seed: int,
    stop: tuple[str, ...],
    prompts_path: str | None,
    stream: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Continue PROMPT with MODEL; - reads it from standard input.

    \b
    Example:
      minigen generate runs/fables "Once" --temperature 0.8 --top-k 40
    """
    if num_beams > 1:
        _refuse_sampling(options, num_samples=num_samples > 1, draft=draft)
    policy = build_policy(options)
    prompts = _prompts(prompt, prompts_path)

    from minigen.decoding.beams import beam_search
    from minigen.decoding.generation import Piece, complete
    from minigen.decoding.generation import generate as generate_pieces
    from minigen.decoding.speculation import speculate
    from minigen.exact.streams import Stream
    from minigen.training.checkpoint import load_model

    language_model, tokenizer = load_model(model)
    rows = [(text, sample) for text in prompts for sample in range(num_samples)]
    texts = [text for text, _ in rows]
    names = [f"inference/{sample}" if sample else "inference" for _, sample in rows]
    common: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "stop": stop,
        "log_probabilities": as_json,
    }
    pieces: Iterator[Piece]
    if num_beams > 1:
        beams = (
            beam_search(
                language_model,
                tokenizer,
                text,
                policy,
                num_beams=num_beams,
                length_penalty=length_penalty,
                **common,
            )
            for text in texts
        )
        pieces = (
            Piece(row, best.token_ids[-1], best.text, best) for row, (best, *_) in enumerate(beams)
        )
    elif draft is not None:
        pairs = [(Stream(seed, f"{name}/draft"), Stream(seed, f"{name}/accept")) for name in names]
        pieces = speculate(
            language_model,
            tokenizer,
            *load_model(draft),
            texts,
            policy,
            pairs,
            num_draft_tokens=num_draft_tokens,
            **common,
        )
    else:
        streams = [Stream(seed, name) for name in names]
        pieces = generate_pieces(language_model, tokenizer, texts, policy, streams, **common)

    if as_json:
        shown_seed = None if policy.greedy or num_beams > 1 else seed
        for (_, sample), continuation in zip(rows, complete(pieces), strict=True):
            print_json(_json_line(continuation, sample, shown_seed))
        return
    printer = Printer(texts, live=stream)
    for piece in pieces:
        printer.push(piece)
