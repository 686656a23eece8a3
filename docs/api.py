"""Make docs/api.md of the docstrings: `python -m docs.api`, as `make docs` does; a test holds it.

It reads signatures off the source, so that the page is the same whatever Python makes it.
"""

import ast
import inspect
import re
from pathlib import Path

import minigen

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).with_suffix(".md")

HEAD = """\
# The library

Everything that `import minigen` gives, from its docstrings (`help(minigen.Run)` shows the same). A
script that uses nearly all of it is [examples/library.py](examples/library.py). A mistake of the
caller raises `minigen.OptionError`, a kind of `minigen.MinigenError`, which is for what was read
and is wrong; both say it in one line.

## Words

- A *token* is what the model reads and writes one at a time: a byte or some bytes, with an id.
- *Logits* are its scores of all tokens, before the softmax makes probabilities of them.
- A *nat* is a unit of information, 1/ln 2 bits; a *loss* is −ln of what a model gave the token that
  came, in nats. *Perplexity* is the exponential of the mean loss: among how many equal choices the
  model was undecided. *Bits per byte* is the loss that does not depend on how a text was cut.
- A *policy* says how the next token is chosen; a *draft* is a small model that guesses ahead.
- A *stream* is a sequence of random words with a seed and a name, its *position* how many are used.
- A *document* is a text that no context reaches across; a *batch* is the predictions of one step.
- *Moments* are the optimizer's running averages of the gradient and of its square.
- *Warm-up* is the first steps, over which the learning rate rises.
- A *checkpoint* is a run in a file; a *fingerprint* is the SHA-256 of the weights.
- A *control* is a set-up known to break a claim: a comparison that does not catch it is worth
  nothing.
"""


def public_names() -> dict[str, str]:
    """Return each name that a type checker sees, and its module."""
    tree = ast.parse((ROOT / "minigen/__init__.py").read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {
        alias.name: str(node.module)
        for node in imports
        for alias in node.names
        if str(node.module).startswith("minigen.") and alias.asname == alias.name
    }


def _signature(node: ast.FunctionDef) -> str:
    arguments = ast.unparse(node.args).removeprefix("self, ").removeprefix("cls, ")
    arguments = "" if arguments in ("self", "cls") else arguments
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{node.name}({arguments}){returns}".replace("'", '"')


def _document(node: ast.AST) -> str:
    assert isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)
    return f"{(ast.get_docstring(node) or '').split('>>>')[0].rstrip()}\n"


def _decorators(node: ast.FunctionDef) -> list[str]:
    return [ast.unparse(decorator) for decorator in node.decorator_list]


def _methods(node: ast.ClassDef) -> list[ast.FunctionDef]:
    """Return the public ones; of an overloaded one, what stands last, of a property its getter."""
    functions = [m for m in node.body if isinstance(m, ast.FunctionDef)]
    methods = {m.name: m for m in functions if f"{m.name}.setter" not in _decorators(m)}
    return [method for name, method in methods.items() if name[0] != "_"]


def _section(name: str, module: str) -> str:
    path = ROOT / module.replace(".", "/")
    package = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if (path / f"{name}.py").is_file():
        tree = ast.parse((path / f"{name}.py").read_text(encoding="utf-8"))
        functions = [f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name[0] != "_"]
        return _page(f"minigen.{name}", _document(tree), functions)
    tree = ast.parse(package.read_text(encoding="utf-8"))
    (node,) = [n for n in tree.body if getattr(n, "name", "") == name]
    if isinstance(node, ast.FunctionDef):
        return f"## minigen.{_signature(node)}\n\n{_document(node)}"
    assert isinstance(node, ast.ClassDef)
    made = [m for m in node.body if isinstance(m, ast.FunctionDef) and m.name == "__init__"]
    title = _signature(made[0]).removeprefix("__init__").removesuffix(" -> None") if made else ""
    text = inspect.getdoc(getattr(minigen, name)) or ""  # with the options that are listed in it
    text = re.sub(
        r"^([\w.]+ = .*?): ", r"- `\1`: ", text.split(">>>")[0].rstrip(), flags=re.MULTILINE
    )
    return _page(f"minigen.{name}{title}", f"{text}\n", _methods(node))


def _page(title: str, text: str, functions: list[ast.FunctionDef]) -> str:
    parts = [f"## {title}\n\n{text}"]
    for function in functions:
        is_property = any(kind.endswith("property") for kind in _decorators(function))
        shown = function.name if is_property else _signature(function)
        parts.append(f"**`{shown}`**\n\n{_document(function)}")
    return "\n".join(parts)


def page() -> str:
    """Return the page."""
    sections = [_section(name, module) for name, module in sorted(public_names().items())]
    return "\n".join([HEAD, *sections])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
