"""README and docs are claims that run: every command, its output, every Python block, every link.

A page is rendered anew, its blocks run in order in one temporary folder, and compared with itself.
In a ```console block, `$ ` starts a command and what follows is its output; a line `…` stands for
any lines, `…` inside a line for any characters. A ```python block is plain code, or holds `>>>`
prompts with their output. A ```diff block is applied to a copy of the package, which the commands
behind it use; its first line names the file, in which its context must be unique.
`python -m tests.test_documents [PAGE…]` writes the outputs anew.
"""

import ast
import contextlib
import difflib
import doctest
import importlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class StandIn(NamedTuple):
    """What is run for a command: in the quick test, where its output is not compared, and in the
    slow one and when the page is written anew, where it is; None: its output is never compared.
    """

    quick: str
    slow: str | None = None


_SHORT = "--set training.steps=4 --set evaluation.every=2 --set sampling.every=2"
STAND_INS = {  # command, as a pattern → what is run instead
    r"git clone \S+": StandIn("true"),
    r"cd \S+": StandIn("true"),
    r"pip install \S+": StandIn(f"test -f {ROOT}/pyproject.toml"),
    r"make ([a-z-]+)": StandIn(rf"make --dry-run -C {ROOT} \1"),
    r"minigen demo( .*)?": StandIn(rf"minigen demo\1 {_SHORT}", r"minigen demo\1"),
    # The published checkpoint is the result of this very training.
    r"minigen train(?: fables)?(?: --out (\S+))?": StandIn(
        r"f=\1; f=${f:-runs/fables}; mkdir -p $f; cp checkpoints/fables.safetensors "
        "$f/step-001000.safetensors",
        r"\g<0>",
    ),
    r"minigen prove( .*)?": StandIn(rf"minigen prove\1 {_SHORT}", r"minigen prove\1"),
    r"minigen verify checkpoints/fables.safetensors": StandIn(
        "minigen info checkpoints/fables.safetensors", r"\g<0>"
    ),
}
_NEVER_RUN = {"git", "cd", "pip", "pip3", "make", "apt", "apt-get", "curl", "docker", "sudo", "ssh"}


def commands_of(block: str) -> list[tuple[str, str]]:
    """The commands of a console block, each with its output; `\\` at the end continues one."""
    parts = re.split(r"^\$ ((?:.*\\\n)*.*\n)", block, flags=re.MULTILINE)
    assert not parts[0].strip(), f"a console block must open with a command (got {parts[0]!r})"
    return list(zip(parts[1::2], parts[2::2], strict=True))


def to_run(command: str, slow: bool) -> tuple[str, bool]:
    """What is run for a command, and whether its output is compared."""
    for pattern, stand_in in STAND_INS.items():
        match = re.fullmatch(pattern, command)
        if match:
            instead = stand_in.slow if slow else None
            return match.expand(instead or stand_in.quick), instead is not None
    words = set(re.findall(r"(?:^|[|;&(]\s*)([\w-]+)", command))
    forbidden = words & _NEVER_RUN
    assert not forbidden, f"{command!r} is not run here: give it a line in STAND_INS"
    return command, True


def run_command(command: str, folder: Path, environment: dict[str, str]) -> tuple[str, int]:
    """What a terminal would show, stdout and stderr, and the exit status."""
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=600,
    )
    output = done.stdout.decode(errors="replace")
    return output + "\n" * (output[-1:] not in ("", "\n")), done.returncode


def lines_of(text: str) -> list[str]:
    """Lines with their ends; only a line feed ends one, whatever else a model writes."""
    return re.findall("[^\n]*\n", text)


def matches(expected: str, output: str) -> bool:
    """Whether an output is what was expected, `…` being anything."""
    patterns = [
        "(?:.*\n)*?" if line == "…\n" else re.escape(line).replace("…", ".*?")
        for line in lines_of(expected)
    ]
    return re.fullmatch("".join(patterns), output) is not None


def merged(expected: str, output: str) -> str:
    """The expected output where it holds, else the new one, shortened as the old one was."""
    if matches(expected, output):
        return expected
    old, new = lines_of(expected), lines_of(output)
    if old.count("…\n") == 1:
        before = old.index("…\n")
        after = len(old) - before - 1
        if before + after < len(new):
            new[before : len(new) - after] = ["…\n"]
    patterns = [line for line in old if "…" in line and line != "…\n"]
    return "".join(next((p for p in patterns if matches(p, line)), line) for line in new)


def console(block: str, folder: Path, environment: dict[str, str], slow: bool) -> str:
    """A console block with the outputs that its commands have now.

    A command that fails must be shown to fail: no `…` may hide it.
    """
    rendered = ""
    for command, expected in commands_of(block):
        instead, is_compared = to_run(command.rstrip("\n"), slow)
        output, status = run_command(instead, folder, environment)
        if status:
            is_explained = re.search("^Error: ", output, re.MULTILINE)
            shown = output if is_explained else f"{output}[exit status {status}]\n"
        else:
            shown = merged(expected, output) if is_compared else expected
        rendered += f"$ {command}{shown}"
    return rendered


def python(block: str, page: Path, line: int, names: dict[str, Any]) -> str:
    """A Python block with the outputs that its prompts have now; plain code stays as it is."""
    if not re.search(r"^>>> ", block, re.MULTILINE):
        exec(compile("\n" * line + block, str(page), "exec"), names)
        return block
    rendered = ""
    for part in doctest.DocTestParser().parse(block):
        if isinstance(part, str):
            rendered += part
            continue
        code = compile("\n" * (line + part.lineno) + part.source, str(page), "single")
        with contextlib.redirect_stdout(io.StringIO()) as written:
            exec(code, names)
        prompts = (f">>> {part.source}".rstrip("\n").replace("\n", "\n... ")).splitlines()
        if hasattr(ast.parse(part.source).body[0], "body"):  # the prompt waits for a line
            prompts.append("...")
        rendered += "".join(f"{prompt.rstrip()}\n" for prompt in prompts)
        rendered += merged(part.want, re.sub("(?m)^\n", "<BLANKLINE>\n", written.getvalue()))
    return rendered


def apply(diff: str, tree: Path) -> None:
    """Change one file of a tree: what stands there without the + lines becomes what has them."""
    header, *lines = lines_of(diff)
    path = tree / header.removeprefix("--- ").strip()
    old, new = ("".join(line[1:] for line in lines if line[0] != sign) for sign in "+-")
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    assert text.count(old) == 1 or not old, f"{path.name} must hold once what stands around\n{diff}"
    path.write_text(text.replace(old, new) if old else text + new, encoding="utf-8")


def render(page: Path, folder: Path, slow: bool) -> str:
    """A page with every output as it is now."""
    for name in ("checkpoints", "configs", "docs"):
        (folder / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "NO_COLOR": "1", "COLUMNS": "80"}
    text = page.read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": page.stem}
    rendered, end = "", 0
    for match in _BLOCK.finditer(text):
        language, block = match.groups()
        start = match.start(2)
        rendered += text[end:start]
        end = match.end(2)
        if language == "diff":
            tree = folder / "tree"
            if not tree.exists():
                for name in ("minigen", "configs"):
                    shutil.copytree(ROOT / name, tree / name)
                environment["PYTHONPATH"] = str(tree)
            apply(block, tree)
        elif language == "console":
            block = console(block, folder, environment, slow)
        elif language == "python":
            with contextlib.chdir(folder):
                block = python(block, page, text.count("\n", 0, start), names)
        rendered += block
    return rendered + text[end:]


def assert_current(page: Path, folder: Path, slow: bool) -> None:
    """Fail with a diff where a page's outputs are not what its commands give."""
    text, rendered = page.read_text(encoding="utf-8"), render(page, folder, slow)
    if text != rendered:
        lines = [version.splitlines() for version in (text, rendered)]
        diff = difflib.unified_diff(*lines, page.name, "what its commands give", lineterm="")
        cure = f"to write the outputs anew: python -m tests.test_documents {page.name}"
        pytest.fail("\n".join([*diff, cure]), pytrace=False)


@each_page
def test_commands_of_a_page_give_the_outputs_that_it_shows(page: Path, tmp_path: Path) -> None:
    assert_current(page, tmp_path, slow=False)


@pytest.mark.slow
@each_page
def test_long_commands_of_a_page_give_the_outputs_that_it_shows(page: Path, tmp_path: Path) -> None:
    assert_current(page, tmp_path, slow=True)


# ---- What a page points to

_TOP = {path.name for path in ROOT.iterdir()}


def prose_of(page: Path) -> str:
    """A page without its fenced blocks."""
    return _BLOCK.sub("", page.read_text(encoding="utf-8"))


def anchors_of(page: Path) -> set[str]:
    """The names that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:|mailto:)([^)\s]*)\)", prose_of(page)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), f"{page.name} links to {link}, which is not there"
        if anchor:
            assert anchor in anchors_of(target), f"{page.name} links to {link}: no such heading"


@each_page
def test_files_that_a_page_names_are_there(page: Path) -> None:
    for name in re.findall(r"`([\w.*/-]+)`", prose_of(page)):
        if "/" in name and name.split("/")[0] in _TOP:
            assert list(ROOT.glob(name.rstrip("/"))), f"{page.name} names {name}, not there"
        elif name.endswith(".py"):
            assert list(ROOT.glob(f"[!.]*/**/{name}")), f"{page.name} names {name}, not there"


@each_page
def test_shell_blocks_are_console_blocks(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for language, block in _BLOCK.findall(text):
        runs = language == "console" or not block.startswith("$ ")
        assert runs, f"{page.name} has commands in a block that is not ```console:\n{block}"
        assert language not in {"bash", "sh", "shell"}, f"{page.name}: write ```console\n{block}"


# ---- Examples in docstrings

_PACKAGE = ROOT / "minigen"
_WITH_EXAMPLES = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for file in sorted(_PACKAGE.rglob("*.py"))
    if ">>> " in file.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("module", _WITH_EXAMPLES)
def test_examples_in_docstrings_hold(module: str) -> None:
    found = doctest.testmod(importlib.import_module(module))
    assert (found.failed, found.attempted > 0) == (0, True)


# ---- The mechanism itself


@pytest.mark.parametrize(
    ("expected", "output", "result"),
    [
        ("a 1\nb\n", "a 1\nb\n", "a 1\nb\n"),
        ("a 1\nb\n", "a 2\nb\n", "a 2\nb\n"),
        ("a …\nb\n", "a 2\nb\n", "a …\nb\n"),
        ("a …\nb\n", "a 2\nc\n", "a …\nc\n"),
        ("a\n…\nz\n", "a\n1\n2\nz\n", "a\n…\nz\n"),
        ("a\n…\nz\n", "b\n1\n2\nz\n", "b\n…\nz\n"),
        ("", "new\n", "new\n"),
    ],
)
def test_an_output_is_kept_where_it_holds_and_else_replaced(
    expected: str, output: str, result: str
) -> None:
    assert merged(expected, output) == result


@pytest.mark.parametrize("command", ["make everything && ls", "git push", "ls; pip download x"])
def test_a_command_that_is_neither_run_nor_in_the_table_fails(command: str) -> None:
    with pytest.raises(AssertionError, match="STAND_INS"):
        to_run(command, slow=False)


def test_a_page_with_a_wrong_output_fails_with_a_diff(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```console\n$ echo right\nwrong\n$ false\n…\n```\n```python\n>>> 1 + 1\n3\n```\n"
    )
    with pytest.raises(pytest.fail.Exception) as failure:
        assert_current(page, tmp_path, slow=False)
    lines = str(failure.value).splitlines()
    changes = [line for line in lines[2:] if line[0] in "+-"]
    assert changes == ["-wrong", "+right", "-…", "+[exit status 1]", "-3", "+2"]


if __name__ == "__main__":
    for page in [Path(name).absolute() for name in sys.argv[1:]] or PAGES:
        with tempfile.TemporaryDirectory() as folder:
            page.write_text(render(page, Path(folder), slow=True), encoding="utf-8")
