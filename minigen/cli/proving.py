"""``prove`` runs the reproducibility experiments; ``verify`` trains a checkpoint again."""

import textwrap
from collections import deque
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

import minigen
from minigen.cli import cli, options
from minigen.cli.progress import bar, note, notes_of_libraries, progress_option, reading_progress
from minigen.cli.training import one_voice
from minigen.errors import MinigenError

if TYPE_CHECKING:
    from minigen.proof.verification import Outcome, Segment, Verification
    from minigen.training.workers import Workers


@cli.command()
@options.config_options
@click.option(
    "--share",
    is_flag=True,
    help="Add a block that states environment and fingerprints, to paste into an issue.",
)
@options.json_option
@progress_option
def prove(
    config: str | None,
    texts: tuple[str, ...],
    settings: tuple[str, ...],
    share: bool,
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
    changes = options.overrides(settings, texts)
    if share and "-" in texts:
        raise click.UsageError("--share reads the text once more: give a file (got --text -)")

    from minigen.proof.proving import EXPERIMENTS, proven
    from minigen.proof.proving import prove as prove_all

    claims = []
    loaded = minigen.Config.load(config or "fables", changes)
    with reading_progress(progress) as reading:
        experiments = prove_all(loaded, progress=reading)
    for number, experiment in enumerate(EXPERIMENTS, start=1):
        what = f"{number} of {len(EXPERIMENTS)}: {experiment.__name__.replace('_', ' ')}"
        with bar(progress, what, bar_format=f"{what} [{{elapsed}}]"):
            claims.append(next(experiments))
    holds = proven(claims)
    row: dict[str, str] = {}
    if share:
        from minigen.proof.sharing import facts

        row = facts(loaded, claims)
    if as_json:
        told = {"claims": [asdict(claim) for claim in claims], "holds": holds}
        options.print_json(told | ({"share": row} if share else {}))
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
    if share:
        lines = [f"{name:13s} {value}" for name, value in row.items()]
        click.echo("\n".join(["", "```", *lines, "```"]))
    return 0 if holds else 1


def _row(name: str, verdict: str, text: str) -> None:
    start = f"{name:24s}{verdict:16s}"
    told = textwrap.fill(text, 100, initial_indent=start, subsequent_indent=" " * 40)
    click.echo(told or start)


@cli.command()
@options.model_argument
@options.text_option
@options.count_option("--segments", None, "Check so many segments, drawn, instead of all.")
@click.option(
    "--seed", type=click.IntRange(min=0), metavar="N", help="Which are drawn.  [default: 0]"
)
@click.option(
    "--texts",
    "lines",
    type=options.PATH,
    metavar="FILE",
    help="Write each line of generate --json again instead; - is standard input.",
)
@click.option(
    "--draft",
    type=options.PATH,
    metavar="MODEL",
    help="With --texts: the draft that had a say in them.",
)
@options.json_option
@progress_option
def verify(
    model: str,
    texts: tuple[str, ...],
    segments: int | None,
    seed: int | None,
    lines: str | None,
    draft: str | None,
    as_json: bool,
    progress: bool | None,
) -> int:
    """Train MODEL again, and compare every bit.

    The config is the one inside MODEL; weights, moments, merges and batches must come out the same.
    Of a run folder every checkpoint is checked: each must follow from the one before. These
    segments are trained side by side, on all cores or by the processes of mpiexec. A text that is
    not the embedded one is found by the config.toml beside the file, or given with --text.

    With --texts nothing is trained: texts that MODEL is said to have written are written again,
    and compared token by token. Exit status 1 if anything differs.

    \b
    Example:
      minigen verify runs/fables
      minigen generate runs/fables "Once" --json | minigen verify runs/fables --texts -
    """
    if lines is not None:
        others = {"--text": texts, "--segments": segments is not None, "--seed": seed is not None}
        if given := [name for name, value in others.items() if value]:
            raise click.UsageError(f"--texts trains nothing, so {given[0]} has no meaning with it")
        return _verify_texts(model, lines, draft, as_json)
    if draft is not None:
        raise click.UsageError("--draft is for texts that a draft had a say in: give --texts too")
    if seed is not None and segments is None:
        raise click.UsageError("--seed says which segments are drawn: give --segments too")

    from minigen.proof.verification import Verification

    with one_voice() as workers:
        verifications: list[Verification] = []  # of the first worker alone

        def find() -> None:
            verifications.append(Verification(model, texts))
            if segments is not None:
                verifications[0].draw(segments, seed or 0)

        workers.from_first(find)
        try:
            outcomes = _check_all(verifications, workers, progress)
            workers.from_first(lambda: _judge(verifications[0], outcomes, as_json))
        except BrokenProcessPool:
            raise MinigenError(
                "a process of the verification was killed, for want of memory most often"
            ) from None
    return 0


def _verify_texts(model: str, lines: str, draft: str | None, as_json: bool) -> int:
    from minigen.proof.texts import check

    verdicts = []
    for verdict in check(
        options.read_file(lines), minigen.load(model), minigen.load(draft) if draft else None
    ):
        verdicts.append(verdict)
        if not as_json:
            mark = {True: "true", False: "NOT TRUE", None: "cannot be told"}[verdict.holds]
            told = verdict.reason or f"{verdict.tokens} tokens"
            click.echo(f"line {verdict.line}: {mark}, {told}")
    true = len([verdict for verdict in verdicts if verdict.holds])
    if as_json:
        facts = [
            {"line": one.line, "holds": one.holds, "first_token": one.first_token}
            for one in verdicts
        ]
        options.print_json({"verified": true == len(verdicts) > 0, "texts": facts})
    if not verdicts:
        raise MinigenError(f"{lines} holds no text: give what generate --json printed")
    if not as_json:
        click.echo(f"{true} of {len(verdicts)} texts are what the model writes, token by token")
    return 0 if true == len(verdicts) else 1


def _judge(verification: "Verification", outcomes: "list[Outcome]", as_json: bool) -> None:
    """Show what came of each segment; raise MinigenError for the first that does not hold."""
    from minigen.training.checkpoint import fingerprint

    checked = list(zip(verification.segments, outcomes, strict=True))
    if as_json:
        listed = [{"from": s.first, "to": s.last, "holds": o.holds} for s, o in checked]
        verified = all(outcome.holds for outcome in outcomes)
        options.print_json({"verified": verified, "segments": listed, "share": verification.share})
    else:
        click.echo(f"file           {verification.path}, step {verification.saved.step}")
        click.echo(f"fingerprint    {fingerprint(verification.saved.tensors)}")
        _show(verification, checked)
    for segment, outcome in checked:
        if not outcome.holds:
            origin = segment.origin if outcome.path == segment.end else "its config gives"
            raise MinigenError(
                f"{outcome.path} is not what {origin}: {len(outcome.found)} differences in the "
                f"segment from step {segment.first} to {segment.last}, the first in "
                f"{outcome.found[0]}"
            )
    if any(outcome.is_asked for outcome in outcomes):
        note("the stream inference stands elsewhere: text was asked for by hand, which is no fault")


def _show(verification: "Verification", checked: "list[tuple[Segment, Outcome]]") -> None:
    last, outcome = checked[-1]
    if last.end == verification.path and outcome.fingerprint:
        click.echo(f"trained again  {outcome.fingerprint}")
    for segment, outcome in checked:
        if len(checked) > 1 or verification.share < 1.0:
            verdict = "the same" if outcome.holds else f"differs, in {outcome.path.name}"
            click.echo(f"segment        step {segment.first} to {segment.last}: {verdict}")
        for line in outcome.found:
            click.echo(line)
        if outcome.log:
            click.echo(outcome.log)
    if all(outcome.holds for _, outcome in checked):
        share = verification.share
        what = "" if share == 1.0 else f"{share:.0%} of the steps: "
        click.echo(f"verified: {what}the same weights, moments, merges and batches, bit for bit")


def _check_all(
    verifications: "list[Verification]", workers: "Workers", progress: bool | None
) -> "list[Outcome]":
    """Check the segments, side by side where that is worth it; helpers take the longest first.

    They start while this process reads the text. It takes part, and between two of its own steps
    gives them what they do next. Once none of them has anything to do it has their threads.
    """
    from minigen.model.parallel import cores, use_threads
    from minigen.proof.verification import check
    from minigen.training.pool import helpers, pool

    def read() -> None:
        with reading_progress(progress) as reading:
            verifications[0].read(reading)

    segments = [segment for one in verifications for segment in one.segments]
    total = sum(segment.steps for segment in segments)
    most = helpers(workers)
    if workers.size > 1:
        workers.from_first(read)  # as long as the others can hear of its failure
    elif not verifications[0].is_worth_processes():
        most = 0
    waiting = deque(sorted(segments, key=lambda segment: (-segment.steps, -segment.first)))
    outcomes: dict[int, Outcome] = {}
    futures: dict[int, Future[Outcome]] = {}
    executor: Any
    with (
        bar(progress, "", total=total, unit="step") as shown,
        nullcontext()
        if not most
        else pool(workers, len(segments), joins=True, within=notes_of_libraries) as executor,
    ):
        if workers.rank > 0:
            return []

        def hand_out(segment: "Segment") -> None:
            futures[segment.last] = executor.submit(check, segment)
            futures[segment.last].add_done_callback(lambda _: shown.update(segment.steps))

        def keep_helpers_busy() -> None:
            working = len([future for future in futures.values() if not future.done()])
            for _ in range(min(most - working, len(waiting))):
                hand_out(waiting.popleft())
            if all(future.done() for future in futures.values()):
                use_threads(len(cores()))

        def on_step(_record: object) -> None:
            shown.update()
            keep_helpers_busy()

        keep_helpers_busy()
        if workers.size == 1:
            read()
        if shown.disable:
            note(f"training {total} steps again")
        while waiting:
            segment = waiting.pop()
            outcomes[segment.last] = check(segment, verifications[0].run, on_step)
        outcomes |= {last: future.result() for last, future in futures.items()}
    return [outcomes[segment.last] for segment in segments]
