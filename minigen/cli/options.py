"""What several commands share: arguments, options, and how JSON is shown."""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from minigen.errors import MinigenError
from minigen.files import explained
from minigen.paths import expand

if TYPE_CHECKING:
    from minigen.decoding.policy import Policy

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _texts(_ctx: click.Context, _param: click.Parameter, paths: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse a second standard input."""
    if paths.count("-") > 1:
        raise click.BadParameter("standard input can be read once (got - more than once)")
    return paths


def _require_report(_ctx: click.Context, _param: click.Parameter, wanted: bool) -> bool:
    """Refuse --report, before any training, where what it needs is not installed."""
    if wanted:
        from minigen.report.page import require

        require()
    return wanted


class _Path(click.Path):
    """A path that is not empty, which would mean the current folder; ``~`` is the home folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the path."""
        if not value:
            self.fail("a path must not be empty (got '')", param, ctx)
        return expand(value)


def _complete_config(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete the names of the shipped configs, and else those of files."""
    from minigen.training.config import shipped

    names = [CompletionItem(name) for name in shipped() if name.startswith(incomplete)]
    return names or PATH.shell_complete(ctx, param, incomplete)


def complete_key(
    _ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete the dotted keys of a config."""
    from minigen.training.keys import KEYS

    return [CompletionItem(key) for key in KEYS if key.startswith(incomplete)]


PATH = _Path()
model_argument = click.argument("model", type=PATH)
TYPED_BYTES = os.fsencode  # of an argument, UTF-8 or not
prompt_argument = click.argument("prompt", required=False, type=TYPED_BYTES)
_config_argument = click.argument(
    "config", required=False, type=PATH, shell_complete=_complete_config
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
text_option = click.option(
    "--text",
    "texts",
    multiple=True,
    type=PATH,
    metavar="PATH",
    callback=_texts,
    help="Where the text is, if not where the config says: a file, a folder, or - for stdin. May "
    "be repeated.",
)
set_option = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    shell_complete=complete_key,
    help="Override a config key, as training.steps=500; the value is TOML. May be repeated.",
)
report_option = click.option(
    "--report",
    is_flag=True,
    callback=_require_report,
    help="Write report.html into the folder at the end.",
)


def config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Ask for a config and for what is to be changed in it: CONFIG, --text, --set."""
    return _config_argument(text_option(set_option(command)))


def out_option(default: str) -> Decorator:
    """Return the option that names the folder to fill."""
    text = f"Folder to fill, new or empty.  [default: {default}]"
    return click.option("--out", type=PATH, metavar="DIR", help=text)


def count_option(name: str, default: int | None, text: str) -> Decorator:
    """Return an option that takes a whole number from 1 on."""
    kind = click.IntRange(min=1)
    return click.option(name, type=kind, metavar="N", default=default, show_default=True, help=text)


def print_json(value: object) -> None:
    """Print one JSON value on a line; infinities, which JSON does not know, are null."""
    finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
    click.echo(json.dumps(finite, ensure_ascii=False))


def quoted(data: bytes) -> str:
    """Return bytes as a quoted text for a table: escapes for what cannot be seen."""
    try:
        return repr(data.decode())
    except UnicodeDecodeError:
        return repr(data)[1:]


def read_file(path: str) -> bytes:
    """Return a file's bytes, ``-`` being standard input; MinigenError names the cause."""
    if path == "-":
        return sys.stdin.buffer.read()
    with explained(f"cannot read {path}"), open(path, "rb") as file:
        return file.read()


def read_text(text: bytes | None, path: str | None = None) -> bytes:
    """Return the text that was meant: an argument, or a file; ``-`` is standard input.

    A byte-order mark at its start is no part of it, nor is the end of a file's last line. Nothing
    is the empty text.
    """
    from minigen.text.documents import MARK, whole

    if path is not None or text == b"-":
        return whole(read_file(path or "-"))
    return (text or b"").removeprefix(MARK)


def _token_bias(text: str) -> tuple[int, float]:
    """Read a token's id and what is added to its logit."""
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise click.BadParameter(f"must be ID=BIAS, as 101=-2.5 (got {text!r})") from None


class Command(click.Command):
    """A command whose errors name its options as they are typed."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except MinigenError as error:
            error.args = (as_typed(str(error)),)
            raise


class PolicyCommand(Command):
    """A command that takes every option of a Policy as well, in the order in which they apply.

    They are read off the Policy when they are needed: that imports numpy.
    """

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the command's own parameters, then the policy's, then --help."""
        *own, last = super().get_params(ctx)
        return [*own, *_policy_options(), last]


def _policy_options() -> Iterator[click.Parameter]:
    from minigen.decoding.policy import OPTIONS, Biases, Ids

    for name, option in OPTIONS.items():
        flag, repeated = f"--{name.replace('_', '-')}", f"{option.help} May be repeated."
        if isinstance(option.kind, Ids):
            flags = [flag.removesuffix("s"), name]
            yield click.Option(flags, multiple=True, type=int, metavar="ID", help=repeated)
        elif isinstance(option.kind, Biases):
            how: dict[str, Any] = {"type": _token_bias, "metavar": "ID=BIAS", "help": repeated}
            yield click.Option([flag], multiple=True, callback=lambda _, __, v: dict(v), **how)
        else:
            default = "" if option.default is None else f"  [default: {option.default:g}]"
            kind = int if option.kind.is_whole else float
            yield click.Option([flag], type=kind, help=option.help + default)
    yield click.Option(
        ["--greedy"], is_flag=True, help="Always choose the likeliest token: temperature 0."
    )


def as_typed(message: str) -> str:
    """Return a message that names this command's options as they are typed: --top-p for top_p."""
    ctx = click.get_current_context()
    typed = {str(param.name): param.opts[0] for param in ctx.command.get_params(ctx)}
    return re.sub(r"(?:^|(?<=, )|(?<= and ))\w+", lambda word: typed.get(word[0], word[0]), message)


def build_policy(options: dict[str, Any]) -> "Policy":
    """Make the Policy of the options given; those not given keep its defaults."""
    from minigen.decoding.policy import OPTIONS, Policy

    given = {name: options[name] for name in OPTIONS}
    if options["greedy"]:
        if given["temperature"]:
            raise click.UsageError(
                f"--greedy is temperature 0 (got --temperature {given['temperature']:g} too)"
            )
        given["temperature"] = 0.0
    return Policy(**given)


def overrides(settings: tuple[str, ...], texts: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return what --set and --text change, by dotted key."""
    from minigen.training.config import parse_override

    changes = dict(parse_override(setting) for setting in settings)
    if texts:
        changes["corpus.text"] = list(texts)
    return changes
