"""``score`` measures one text by the chain rule; ``evaluate`` measures a model on many."""

from dataclasses import asdict

import click

import minigen
from minigen.cli import cli, options
from minigen.cli.progress import clock


@cli.command()
@options.model_argument
@click.argument("text", required=False, type=options.TYPED_BYTES)
@click.option(
    "--file", "path", type=options.PATH, metavar="PATH", help="Score a file instead of TEXT."
)
@options.json_option
def score(model: str, text: bytes | None, path: str | None, as_json: bool) -> None:
    """Show how likely MODEL holds TEXT to be, token by token.

    TEXT may be -, for standard input. A byte-order mark and the last line's end of what is read are
    no part of the text.

    \b
    Example:
      minigen score runs/fables "Once there was a fox"
    """
    if (text is None) == (path is None):
        raise click.UsageError("give TEXT or --file, one of the two")
    data = options.read_text(text, path)

    from minigen.exact.arithmetic import exp

    generator = minigen.load(model)
    with clock("scoring"):
        result = generator.score(data)
    if as_json:
        options.print_json(asdict(result))
        return
    click.echo("    id  bytes             probability       −ln p")
    for token, log_p in zip(result.token_ids, result.log_probabilities, strict=True):
        name = options.quoted(generator.tokenizer.token_bytes(token))
        click.echo(f"{token:6d}  {name:16s} {float(exp(log_p)):12.6g} {0.0 - log_p:11.6f}")
    click.echo(f"total          {result.total_nats:.6f} nats, the sum of −ln p")
    click.echo(f"probability    {result.probability:.6g}, the product")
    click.echo(f"perplexity     {result.perplexity:.6g} per token")
    click.echo(f"bits per byte  {result.bits_per_byte:.6f} over {result.bytes} bytes")


@cli.command()
@options.model_argument
@options.text_option
@options.json_option
def evaluate(model: str, texts: tuple[str, ...], as_json: bool) -> None:
    """Measure loss and calibration of MODEL on its validation text.

    Another text is given with --text. Beside the loss stand the entropies of that text's own counts
    of single tokens and of pairs.

    \b
    Example:
      minigen evaluate runs/fables --text book.txt
    """
    with clock("evaluating"):
        result = minigen.load(model).evaluate(paths=texts)
    if as_json:
        options.print_json(asdict(result))
        return
    click.echo(f"loss           {result.loss:.6f} nats per token over {result.tokens:,} tokens")
    click.echo(
        f"bits per byte  {result.bits_per_byte:.6f} over {result.bytes:,} bytes of documents, "
        "without the line ends between them"
    )
    click.echo(f"perplexity     {result.perplexity:.6g} per token")
    for name, loss in result.baselines.items():
        source = "" if name == "uniform" else ", had this text's counts been known"
        click.echo(f"{name:13s}  {loss:.6f} nats per token{source}")
    click.echo(f"calibration    {result.calibration_error:.6f} expected error")
    click.echo("\ntop probability     tokens  confidence  accuracy")
    for row in result.reliability:
        click.echo(
            f"{row.lowest:.3f} to {row.highest:.3f} {row.count:10,} {row.confidence:11.4f} "
            f"{row.accuracy:9.4f}"
        )
