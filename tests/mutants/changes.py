"""What can be wrong in a line: each small bug that a source file can be given.

Words of messages, help and docstrings are no behaviour, so only strings without a space are
changed: the names of streams, options, keys and files. Nor are type annotations.

The kinds: a ``comparison``; a ``constant``, a number or a truth value; a ``name``; an
``exit status``, where an error becomes one of another status; an ``operator`` of arithmetic or
logic; a ``condition`` turned round; a ``statement`` left out; an ``argument`` left out or swapped
with its neighbour.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple


class Change(NamedTuple):
    """One bug: the bytes from ``start`` to ``end`` of a file are replaced."""

    start: int
    end: int
    line: int
    text: str
    old: str
    new: str
    kind: str
    number: int = 1  # of those that look alike in a line

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]

    @property
    def name(self) -> str:
        """The change as it is listed: on one line, without what stays the same."""
        old, new = (" ".join(part.split()) for part in (self.old, self.new))
        short = len(old) + len(new) < 160
        name = f"{old} → {new}".strip() if short else f"{old[:75]}… → {new[:75]}…"
        return name if self.number == 1 else f"{name} (no. {self.number})"


def lines_of(equivalent: dict[str, Any]) -> list[str]:
    """The line of an entry of equivalent.toml, or each of several that share their changes."""
    line = equivalent["line"]
    return [line] if isinstance(line, str) else list(line)


def _numbered(changes: list[Change]) -> list[Change]:
    """Tell apart those that look alike in a line."""
    seen: Counter[tuple[str, str, int]] = Counter()
    found = []
    for change in sorted(changes):
        key = change.old, change.new, change.line
        seen[key] += 1
        found.append(change._replace(number=seen[key]))
    return found


_COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
_SWAPPED_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_SYMMETRIC = ("min", "max", "isinstance", "maximum", "minimum", "add", "multiply", "gcd")
_SYMMETRIC += ("suppress", "array_equal")
_ERRORS = {  # exit status 1 in place of 2, and 2 in place of 1
    "OptionError": "MinigenError",
    "click.UsageError": "MinigenError",
    "click.BadParameter": "MinigenError",
    "MinigenError": "OptionError",
}
_OF_HELP = ("help", "metavar", "cure", "comment", "short_help")
_OPERATIONS = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "*",
    ast.Pow: "*",
    ast.LShift: ">>",
    ast.RShift: "<<",
    ast.BitAnd: "|",
    ast.BitOr: "&",
}


def of_python(source: bytes) -> list[Change]:
    """Every bug that a Python file can be given, in the order of its lines."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def place(node: ast.AST) -> tuple[int, int]:
        first, last = node.lineno, node.end_lineno  # type: ignore[attr-defined]
        return (
            starts[first - 1] + node.col_offset,  # type: ignore[attr-defined]
            starts[last - 1] + node.end_col_offset,  # type: ignore[attr-defined]
        )

    def text(node: ast.AST) -> str:
        start, end = place(node)
        return source[start:end].decode()

    def change(node: ast.AST, new: str, kind: str) -> Change:
        start, end = place(node)
        line = node.lineno  # type: ignore[attr-defined]
        return Change(start, end, line, lines[line - 1].decode().strip(), text(node), new, kind)

    def between(left: ast.AST, right: ast.AST, new: str, kind: str) -> Change:
        """Replace the operator that stands between two operands."""
        start, end = place(left)[1], place(right)[0]
        gap = source[start:end].decode()
        old = gap.strip("() \n\t\\")
        position = start + len(gap[: gap.index(old)].encode())
        line = source[:position].count(b"\n") + 1
        whole = lines[line - 1].decode().strip()
        return Change(position, position + len(old.encode()), line, whole, old, new, kind)

    def bugs(node: ast.AST) -> Iterator[Change]:
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for i, operator in enumerate(node.ops):
                new = _COMPARISONS[type(operator)]
                yield between(operands[i], operands[i + 1], new, "comparison")
        elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            yield between(node.left, node.right, _OPERATIONS[type(node.op)], "operator")
        elif isinstance(node, ast.AugAssign) and type(node.op) in _OPERATIONS:
            yield between(node.target, node.value, _OPERATIONS[type(node.op)] + "=", "operator")
        elif isinstance(node, ast.BoolOp):
            new = "or" if isinstance(node.op, ast.And) else "and"
            for left, right in pairwise(node.values):
                yield between(left, right, new, "operator")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            yield change(node, f"({text(node.operand)})", "operator")
        elif isinstance(node, ast.Constant):
            if node not in lengths:
                yield from constants(node)
        elif isinstance(node, ast.JoinedStr):
            yield from templates(node)
        elif isinstance(node, ast.Raise):
            yield change(node, "pass", "statement")
            if isinstance(node.exc, ast.Call) and text(node.exc.func) in _ERRORS:
                error = _ERRORS[text(node.exc.func)]
                new = f'__import__("minigen.errors").errors.{error}'
                yield change(node.exc.func, new, "exit status")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Yield):
            yield change(node, "pass", "statement")
        elif isinstance(node, ast.Assign):
            if isinstance(node.targets[0], ast.Attribute | ast.Subscript):
                yield change(node, "pass", "statement")
        elif isinstance(node, ast.Return) and node.value is not None:
            if not (isinstance(node.value, ast.Constant) and node.value.value is None):
                yield change(node, "return None", "statement")
        elif isinstance(node, ast.Break):
            yield change(node, "continue", "statement")
        elif isinstance(node, ast.Continue):
            yield change(node, "break", "statement")
        elif isinstance(node, ast.Call):
            yield from calls(node)
        tests = node.ifs if isinstance(node, ast.comprehension) else []
        tests += [node.test] if isinstance(node, ast.If | ast.IfExp | ast.While) else []
        for test in tests:
            if not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.Constant):
                yield change(test, f"not ({text(test)})", "condition")

    def constants(node: ast.Constant) -> Iterator[Change]:
        value = node.value
        if value is True or value is False:
            yield change(node, str(not value), "constant")
        elif isinstance(value, int):
            yield change(node, str(value + 1), "constant")
        elif isinstance(value, float):
            yield change(node, repr(value * 2.0 if value else 1.0), "constant")
        elif isinstance(value, str | bytes) and value and len(value.split()) == 1:
            mark: str | bytes = "X" if isinstance(value, str) else b"X"
            # numpy reads no more than the first letter of a way to sort
            new = "quicksort" if value == "stable" else value + mark  # type: ignore[operator]
            yield change(node, repr(new), "name")

    def templates(node: ast.JoinedStr) -> Iterator[Change]:
        """An f-string that is a name, as of a file, and no message."""
        fixed = "".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
        if fixed and not re.search(r"\s", fixed):
            written = text(node)
            yield change(node, f"{written[:-1]}X{written[-1]}", "name")

    def calls(node: ast.Call) -> Iterator[Change]:
        name = text(node.func)
        if name in _SWAPPED_CALLS:
            yield change(node.func, _SWAPPED_CALLS[name], "operator")
        for keyword in node.keywords:
            if keyword.arg and keyword.arg not in _OF_HELP:
                yield dropped(keyword)
        if name.rpartition(".")[2] not in _SYMMETRIC:
            for left, right in pairwise(node.args):
                if not isinstance(left, ast.Starred) and not isinstance(right, ast.Starred):
                    (start, _), (_, end), line = place(left), place(right), left.lineno
                    gap = source[place(left)[1] : place(right)[0]].decode()
                    old, new = source[start:end].decode(), text(right) + gap + text(left)
                    whole = lines[line - 1].decode().strip()
                    yield Change(start, end, line, whole, old, new, "argument")

    def dropped(keyword: ast.keyword) -> Change:
        start, end = place(keyword)
        end += len(re.match(rb"\s*,?", source[end:])[0])  # type: ignore[index]
        line = keyword.lineno
        whole = lines[line - 1].decode().strip()
        return Change(start, end, line, whole, source[start:end].decode(), "", "argument")

    found = []
    whole = ast.parse(source)
    lengths = {  # numpy takes any negative number for the length that is left
        length.operand
        for call in ast.walk(whole)
        if isinstance(call, ast.Call) and text(call.func).endswith(".reshape")
        for length in call.args
        if isinstance(length, ast.UnaryOp) and isinstance(length.op, ast.USub)
    }
    dumped = ast.dump(whole)
    for node in _behaviour(whole):
        for bug in bugs(node):
            try:
                tree = ast.parse(bug.apply(source))
            except SyntaxError:  # what Python 3.11 says of the places in an f-string is wrong
                continue
            if ast.dump(tree) != dumped:
                found.append(bug)
    return _numbered(list(set(found)))


def _behaviour(node: ast.AST) -> Iterator[ast.AST]:
    """Walk over all that runs: no annotations, docstrings, help or blocks for type checks.

    Nor the inside of an f-string, whose places Python 3.11 does not know.
    """
    yield node
    for name, value in ast.iter_fields(node) if not isinstance(node, ast.JoinedStr) else ():
        if name in ("annotation", "returns", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST):
                continue
            if isinstance(child, ast.keyword) and child.arg in _OF_HELP:
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Assign) and ast.unparse(child.targets[0]) in ("__all__", "T"):
                continue
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue
            yield from _behaviour(child)


_JAVASCRIPT = re.compile(
    r"""(?P<skip>//[^\n]*|/\*.*?\*/|(?<=[=(,])\s*/(?![/*])[^/\n]+/\w*)
    |(?P<name>`[^`\s]+`|"[^"\s]+"|'[^'\s]+')
    |(?P<message>`[^`]*`|"[^"\n]*"|'[^'\n]*')
    |(?P<comparison>===|!==|<=|>=|(?<![<>=])[<>](?![<>=]))
    |(?P<operator><<|>>>|>>|&&|\|\||=>|\+\+|--|[-+*/]=|\*\*|[-+*/%&|^]|!|Math\.(?:min|max))
    |(?P<truth>\b(?:true|false)\b)
    |(?P<number>\b(?:0x[0-9a-fA-F]+n?|\d+(?:\.\d+)?(?:e-?\d+)?n?)\b)""",
    re.VERBOSE | re.DOTALL,
)
_SWAPPED = {
    "===": "!==",
    "!==": "===",
    "<=": "<",
    ">=": ">",
    "<": "<=",
    ">": ">=",
    "<<": ">>",
    ">>": "<<",
    ">>>": "<<",
    "&&": "||",
    "||": "&&",
    "+": "-",
    "-": "+",
    "*": "/",
    "/": "*",
    "%": "*",
    "&": "|",
    "|": "&",
    "^": "|",
    "**": "*",
    "!": "",
    "+=": "-=",
    "-=": "+=",
    "*=": "/=",
    "/=": "*=",
    "true": "false",
    "false": "true",
    "Math.min": "Math.max",
    "Math.max": "Math.min",
}


def of_javascript(source: bytes) -> list[Change]:
    """Every operator, number, truth value and name of a JavaScript file, changed."""
    text, found = source.decode(), []
    lines = text.splitlines()
    for match in _JAVASCRIPT.finditer(text):
        old, kind = match[0], str(match.lastgroup)
        if kind in ("comparison", "operator", "truth"):
            new = _SWAPPED.get(old)
        elif kind == "number":
            new = f"({old} + 1n)" if old.endswith("n") else f"({old} + 1)"
        elif kind == "name":
            new = f"{old[:-1]}X{old[-1]}"
        else:
            new = None
        if new is not None:
            kind = "constant" if kind in ("truth", "number") else kind
            line = text.count("\n", 0, match.start())
            start = len(text[: match.start()].encode())
            end = start + len(old.encode())
            found.append(Change(start, end, line + 1, lines[line].strip(), old, new, kind))
    return _numbered(found)
