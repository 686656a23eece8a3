"""``generate`` continues prompts: by sampling, greedily, with beams, or with a draft model."""

import secrets
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

import minigen
from minigen.cli import cli, options
from minigen.cli.progress import note

if TYPE_CHECKING:
    from minigen.decoding.generation import Continuation, Piece
    from minigen.decoding.policy import Policy


def _seed(text: str) -> int:
    """Read a number from 0 on; ``random`` picks one, which is said on stderr."""
    if text == "random":
        picked = secrets.randbits(32)
        note(f"seed {picked}")
        return picked
    try:
        if text.isascii() and text.isdigit():
            return int(text)
    except ValueError:  # Python reads no more than 4300 digits
        text = f"{text[:9]}…"
    raise click.BadParameter(f"must be a whole number, at least 0, or 'random' (got {text!r})")


def _prompts(prompt: bytes | None, path: str | None) -> list[bytes]:
    from minigen.text.documents import lines

    if path is None:
        return [options.read_text(prompt)]
    if prompt is not None:
        raise click.UsageError("PROMPT and --prompts exclude each other (got both)")
    prompts = lines(options.read_file(path))
    if not prompts:
        note(f"{path} holds no prompt, so there is no text")
    return prompts


def in_order(pieces: "Iterator[Piece]") -> "Iterator[Piece]":
    """Yield pieces text by text, in the order of the prompts, as soon as that is possible."""
    waiting: dict[int, list[Piece]] = {}
    row = 0
    for piece in pieces:
        waiting.setdefault(piece.row, []).append(piece)
        while ready := waiting.pop(row, []):
            yield from ready
            row += ready[-1].continuation is not None


def _refuse_what_does_nothing(context: click.Context, policy: "Policy") -> None:
    """Refuse options that were given and would change nothing: they are a mistake."""
    from minigen.decoding.policy import OPTIONS

    params = context.params
    given = {
        name
        for name in params
        if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
    }
    beams, samples = params["num_beams"] > 1, params["num_samples"] > 1
    draws = ["greedy", *(name for name in OPTIONS if OPTIONS[name].samples), "seed", "draft"]
    draws += ["num_samples"] * samples
    if beams and (named := [name for name in draws if name in given]):
        raise click.UsageError(
            f"beams take no sampling options (got --{named[0].replace('_', '-')}): "
            "leave it out, or use one beam"
        )
    if "length_penalty" in given and not beams:
        raise click.UsageError("--length-penalty ranks beams, and there is one: give --num-beams")
    if "num_draft_tokens" in given and params["draft"] is None:
        raise click.UsageError("--num-draft-tokens is for a draft, and there is none: give --draft")
    if policy.greedy and samples:
        raise click.UsageError(
            "a greedy text has no second sample "
            f"(got --num-samples {params['num_samples']}): leave it out, or draw"
        )


@cli.command(cls=options.PolicyCommand)
@options.model_argument
@options.prompt_argument
@options.count_option("--max-new-tokens", 200, "End after so many tokens.")
@options.count_option("--num-beams", 1, "Search for the likeliest text with so many beams.")
@click.option(
    "--length-penalty",
    default=1.0,
    show_default=True,
    help="Divide a beam's log-probability by its length to this power.",
)
@click.option(
    "--draft", type=options.PATH, metavar="MODEL", help="A smaller model that proposes tokens."
)
@options.count_option("--num-draft-tokens", 4, "How many tokens the draft proposes at a time.")
@options.count_option(
    "--num-samples", 1, "Texts for each prompt, each from random numbers of its own."
)
@click.option(
    "--seed",
    type=_seed,
    metavar="SEED",
    default="0",
    show_default=True,
    help="A number, or random.",
)
@click.option(
    "--stop",
    type=options.TYPED_BYTES,
    multiple=True,
    metavar="TEXT",
    help="End before this text, taken literally. May be repeated.",
)
@click.option(
    "--prompts",
    "prompts_path",
    type=options.PATH,
    metavar="FILE",
    help="Continue each line of a file; - is standard input.",
)
@click.option("--stream/--no-stream", default=True, help="Write text as soon as it is certain.")
@options.json_option
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
    stop: tuple[bytes, ...],
    prompts_path: str | None,
    stream: bool,
    as_json: bool,
    **policy_options: Any,
) -> None:
    """Continue PROMPT with MODEL; - reads it from standard input.

    Equal prompts get equal texts; further samples differ. A byte-order mark and the last line's end
    of what is read are no part of a prompt.

    \b
    Example:
      minigen generate runs/fables "Once" --temperature 0.8 --top-k 40
    """
    # It is there for what it prints, without end perhaps, and ends with its reader. Other commands
    # have work to do, or a verdict to give, whoever listens; or are soon done.
    outlet: Any = sys.stdout
    outlet.raises = True
    policy = options.build_policy(policy_options)
    _refuse_what_does_nothing(click.get_current_context(), policy)
    prompts = _prompts(prompt, prompts_path)

    from minigen.decoding.generation import Piece

    generator = minigen.load(model)
    drafter = minigen.load(draft) if draft is not None else None
    common: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop": stop, "policy": policy}
    facts = common | {
        "stop": [string.decode(errors="replace") for string in stop],
        "policy": policy.changed,
        "model": generator.fingerprint,
        "seed": None if policy.greedy or num_beams > 1 else seed,
    }
    common["log_probabilities"] = as_json
    if num_beams > 1:
        beam_options: dict[str, Any] = {"num_beams": num_beams, "length_penalty": length_penalty}
        facts |= beam_options
        best = (generator.beams(text, **beam_options, **common)[0] for text in prompts)
        pieces: Iterator[Piece] = (
            Piece(row, None, text.text, text) for row, text in enumerate(best)
        )
    else:
        draft_options: dict[str, Any] = {"draft": drafter, "num_draft_tokens": num_draft_tokens}
        if drafter:
            facts |= draft_options | {"draft": drafter.fingerprint}
        pieces = generator.pieces(
            prompts, num_samples=num_samples, seed=seed, **draft_options, **common
        )
    if as_json:
        _print_json_lines(_explained(pieces), prompts, num_samples, facts)
    else:
        _print_texts(_explained(pieces), prompts, num_samples, live=stream)


def _print_texts(
    pieces: "Iterator[Piece]", prompts: list[bytes], num_samples: int, live: bool
) -> None:
    """Write texts in order while they are made in any order: the first unfinished one live."""
    from minigen.text.tokenizer import TextDecoder

    is_new = True
    for piece in in_order(pieces):
        if is_new:  # of the prompt all whole characters
            sys.stdout.write("---\n" if piece.row else "")
            prompt = prompts[piece.row // num_samples]
            sys.stdout.write(TextDecoder().decode(prompt))
        is_new = piece.continuation is not None
        sys.stdout.write(piece.text + "\n" * is_new)
        if live:
            sys.stdout.flush()


def _print_json_lines(
    pieces: "Iterator[Piece]", prompts: list[bytes], num_samples: int, facts: dict[str, Any]
) -> None:
    """Print a line for each text, in order; stopped half-way, what was finished by then is out."""
    finished: dict[int, Continuation] = {}

    def show(row: int) -> None:
        text = finished[row]
        line = {
            "prompt": prompts[row // num_samples].decode(errors="replace"),
            "text": text.text,
            "token_ids": text.token_ids,
            "log_probabilities": text.log_probabilities,
            "finish_reason": text.finish_reason,
            "sample": row % num_samples,
            **facts,
        }
        if text.acceptance_rate is not None:
            line["acceptance_rate"] = text.acceptance_rate
        options.print_json(line)
        del finished[row]

    row = 0
    try:
        for piece in pieces:
            if piece.continuation:
                finished[piece.row] = piece.continuation
            while row in finished:
                show(row)
                row += 1
    finally:
        for row in sorted(finished):
            show(row)


def _explained(pieces: "Iterator[Piece]") -> "Iterator[Piece]":
    """Say why texts came to a dead end, each reason once."""
    said = set()
    for piece in pieces:
        yield piece
        why = piece.continuation and piece.continuation.explanation
        if why and why not in said:
            said.add(why)
            note(f"a text ended early: {options.as_typed(why)}")
