"""What can be wrong in a line: each small bug that a source file can be given.

Words of messages, help and docstrings are no behaviour, so only strings without a space are
changed: the names of streams, options, keys and files. Nor are type annotations.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple


class Change(NamedTuple):
    """One bug: the bytes from ``start`` to ``end`` of a file are replaced."""

    start: int
    end: int
    line: int
    text: str
    old: str
    new: str
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

    def change(node: ast.AST, new: str) -> Change:
        start, end = place(node)
        line = node.lineno  # type: ignore[attr-defined]
        return Change(start, end, line, lines[line - 1].decode().strip(), text(node), new)

    def between(node: ast.AST, left: ast.AST, right: ast.AST, new: str) -> Change:
        """Replace the operator that stands between two operands."""
        start, end = place(left)[1], place(right)[0]
        gap = source[start:end].decode()
        old = gap.strip("() \n\t\\")
        position = start + len(gap[: gap.index(old)].encode())
        line = source[:position].count(b"\n") + 1
        whole = lines[line - 1].decode().strip()
        return Change(position, position + len(old.encode()), line, whole, old, new)

    def bugs(node: ast.AST) -> Iterator[Change]:
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for i, operator in enumerate(node.ops):
                yield between(node, operands[i], operands[i + 1], _COMPARISONS[type(operator)])
        elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            yield between(node, node.left, node.right, _OPERATIONS[type(node.op)])
        elif isinstance(node, ast.AugAssign) and type(node.op) in _OPERATIONS:
            yield between(node, node.target, node.value, _OPERATIONS[type(node.op)] + "=")
        elif isinstance(node, ast.BoolOp):
            new = "or" if isinstance(node.op, ast.And) else "and"
            yield between(node, node.values[0], node.values[1], new)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            yield change(node, f"({text(node.operand)})")
        elif isinstance(node, ast.Constant):
            yield from constants(node)
        elif isinstance(node, ast.Raise) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        ):
            yield change(node, "pass")
        elif isinstance(node, ast.Return) and node.value is not None:
            if not (isinstance(node.value, ast.Constant) and node.value.value is None):
                yield change(node, "return None")
        elif isinstance(node, ast.Break):
            yield change(node, "continue")
        elif isinstance(node, ast.Continue):
            yield change(node, "break")
        elif isinstance(node, ast.Call) and len(node.keywords) + len(node.args) > 1:
            for keyword in node.keywords:
                if keyword.arg and keyword.arg not in ("help", "metavar", "cure", "comment"):
                    yield dropped(keyword)

    def constants(node: ast.Constant) -> Iterator[Change]:
        value = node.value
        if value is True or value is False:
            yield change(node, str(not value))
        elif isinstance(value, int):
            yield change(node, str(value + 1))
        elif isinstance(value, float):
            yield change(node, repr(value * 2.0 if value else 1.0))
        elif isinstance(value, str | bytes) and value and len(value.split()) == 1:
            mark: str | bytes = "X" if isinstance(value, str) else b"X"
            yield change(node, repr(value + mark))  # type: ignore[operator]

    def dropped(keyword: ast.keyword) -> Change:
        start, end = place(keyword)
        end += len(re.match(rb"\s*,?", source[end:])[0])  # type: ignore[index]
        line = keyword.lineno
        whole = lines[line - 1].decode().strip()
        return Change(start, end, line, whole, source[start:end].decode(), "")

    found = []
    whole = ast.parse(source)
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
    """Walk over all that runs: no annotations, docstrings, f-strings or blocks for type checks."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Assign) and ast.unparse(child.targets[0]) in ("__all__", "T"):
                continue
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue
            yield from _behaviour(child)


_JAVASCRIPT = re.compile(
    r"""(?P<skip>//[^\n]*|/\*.*?\*/|`[^`]*`|"[^"\n]*"|'[^'\n]*'|(?<=[=(,])\s*/(?![/*])[^/\n]+/\w*)
    |(?P<operator>===|!==|<=|>=|<<|>>>|>>|&&|\|\||=>|\+\+|--|[-+*/]=|\*\*|[-+*/<>])
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
    "&&": "||",
    "||": "&&",
    "+": "-",
    "-": "+",
    "*": "/",
    "/": "*",
    "+=": "-=",
    "-=": "+=",
}


def of_javascript(source: bytes) -> list[Change]:
    """Every operator and number of a JavaScript file, changed."""
    text, found = source.decode(), []
    lines = text.splitlines()
    for match in _JAVASCRIPT.finditer(text):
        old = match[0]
        if match["operator"]:
            new = _SWAPPED.get(old)
        elif match["number"]:
            new = f"({old} + 1n)" if old.endswith("n") else f"({old} + 1)"
        else:
            new = None
        if new is not None:
            line = text.count("\n", 0, match.start())
            start = len(text[: match.start()].encode())
            end = start + len(old.encode())
            found.append(Change(start, end, line + 1, lines[line].strip(), old, new))
    return _numbered(found)
