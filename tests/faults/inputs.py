"""Ten thousand inputs that are nearly right: each is taken, or refused in one line."""

import contextlib
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minigen import cli, load
from minigen.errors import MinigenError
from minigen.training import checkpoint
from minigen.training.config import Config, parse_override
from minigen.training.logs import read_lines
from minigen.training.run import Run
from tests.conftest import TINY
from tests.faults.campaign import Campaign

EACH = 2_000
JUNK: list[Any] = [
    None, True, -1, 0, 2**63, 2**70, 10**400, 1e308, -0.0, 1e-320, "", "x" * 300, "\ud800", "\x00",
    "é", [], {}, [[]], [None], {"": {}}, "nan", [1e9] * 3, "fables", ["/dev/zero"], [0, 0],
]  # fmt: skip
TEXTS = [
    "", " ", "=", ".", "[", "]", "{", '"', "'", "\\", "\n", "\r", "\t", "\x00", "\x1b[31m", "#",
    "nan", "inf", "-inf", "1e999", "0x10", "9" * 400, "[" * 2_000, "a." * 600, "\udc80", "é", "😀",
    "run.seed", "training.steps", "1979-05-27", "true", "--", "-", "~", "/dev/null", "$HOME",
]  # fmt: skip


def mutated(campaign: Campaign, text: str) -> str:
    """Return a text with a few parts deleted, doubled, exchanged, or replaced by junk."""
    draw = campaign.random
    for _ in range(draw.randint(1, 4)):
        start = draw.randrange(len(text) + 1)
        stop = min(len(text), start + draw.choice((0, 1, 2, 9, 40)))
        middle = draw.choice(
            ("", text[start:stop] * 2, draw.choice(TEXTS), chr(draw.randrange(256)))
        )
        text = text[:start] + middle + text[stop:]
    return text


def altered(campaign: Campaign, value: Any) -> Any:
    """Return a copy of what JSON holds with one thing in it replaced, dropped or added."""
    draw = campaign.random
    value = json.loads(json.dumps(value))
    place, steps = value, draw.randint(0, 3)
    for _ in range(steps):
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        inner = [key for key in keys if isinstance(place[key], dict | list) and place[key]]
        if not inner:
            break
        place = place[draw.choice(inner)]
    keys = list(place) if isinstance(place, dict) else list(range(len(place)))
    key = draw.choice(keys)
    if draw.random() < 0.2:
        del place[key]
    elif isinstance(place, dict) and draw.random() < 0.2:
        place[draw.choice(("", "x", "é", "__proto__"))] = draw.choice(JUNK)
    else:
        place[key] = draw.choice(JUNK)
    return value


def inputs(campaign: Campaign) -> None:
    """Configs, settings, prompts, lines of metrics, headers of checkpoints."""
    folder = campaign.fresh("inputs")
    run = Run(Config.load("fables", TINY))
    run.train(2)
    model = campaign.fresh("model")
    run.save(model)

    def attempt(kind: str, given: object, work: Callable[[], object]) -> None:
        campaign.counts["inputs"] += 1
        try:
            work()
        except MinigenError as error:
            message = str(error)
            campaign.expect("\n" not in message, f"{kind} {given!r:.300}: {message!r:.300}")
            campaign.expect(len(message) < 20_000, f"{kind} {given!r:.300}: a line without end")
        except BaseException as error:
            campaign.expect(False, f"{kind} {given!r:.600}: {type(error).__name__}: {error!s:.300}")

    folder.mkdir()
    toml, path = Config.load("fables", TINY).to_toml(), folder / "config.toml"
    for _ in range(EACH):
        text = mutated(campaign, toml)
        path.write_bytes(text.encode(errors="surrogateescape"))
        attempt("config", text, lambda: Config.load(path))
    settings = [f"{key}={json.dumps(value)}" for key, value in TINY.items()]
    settings += ["sampling.logit_bias={'65' = 1.5}", "optimizer.betas=[0.9, 0.99]"]
    base = Config.load("fables", TINY)
    for _ in range(EACH):
        setting = mutated(campaign, campaign.random.choice(settings))
        attempt("--set", setting, lambda s=setting: base.override(dict([parse_override(s)])))
    for _ in range(EACH):
        prompt = mutated(campaign, "Once there was a fox") + campaign.random.choice(TEXTS)
        attempt("prompt", prompt, lambda p=prompt: _generate(campaign, model, p))
    lines = [record.metrics() for record in Run(base).steps(3)]
    log = folder / "metrics.jsonl"
    for _ in range(EACH):
        if campaign.random.random() < 0.5:
            log.write_text("".join(json.dumps(altered(campaign, line)) + "\n" for line in lines))
        else:
            text = mutated(campaign, "".join(json.dumps(line) + "\n" for line in lines))
            log.write_bytes(text.encode(errors="surrogateescape"))
        attempt("metrics", log.read_bytes(), lambda: read_lines(log))
    whole, damaged = model.read_bytes(), folder / "model.safetensors"
    size = int.from_bytes(whole[:8], "little")
    header, rest = json.loads(whole[8 : 8 + size]), whole[8 + size :]
    for _ in range(EACH):
        changed = _headed(campaign, header)
        damaged.write_bytes(len(changed).to_bytes(8, "little") + changed + rest)
        attempt("header", changed, lambda: _load(damaged))
    shutil.rmtree(folder)


def _generate(campaign: Campaign, model: Path, prompt: str) -> None:
    """As on a command line, where an argument is bytes without NUL."""
    prompt = os.fsdecode(prompt.encode(errors="surrogateescape").replace(b"\0", b""))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.run(["generate", str(model), "--max-new-tokens", "2", "--", prompt])
    if prompt != "-" and (status or err.getvalue()):
        raise RuntimeError(f"status {status}: {err.getvalue()}")


def _headed(campaign: Campaign, header: dict[str, Any]) -> bytes:
    """Return a header that is altered: outside, or inside with a checksum that is right again."""
    if campaign.random.random() < 0.3:
        return json.dumps(altered(campaign, header)).encode()
    description = json.loads(header["__metadata__"]["minigen"])
    description.pop("checksum")
    description = altered(campaign, description)
    with contextlib.suppress(MinigenError):  # what JSON cannot hold has no checksum
        description["checksum"] = checkpoint._checksum(description)
    text = json.dumps(description, sort_keys=True, separators=(",", ":"))
    return json.dumps({**header, "__metadata__": {"minigen": text}}).encode()


def _load(path: Path) -> None:
    load(path)
    Run.load(path)
