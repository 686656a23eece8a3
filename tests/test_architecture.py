"""The source itself: exact constructs only, imports that lead downwards, and light ones."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "minigen"
FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = [file.relative_to(PACKAGE).as_posix() for file in FILES]

# (a) What may stand on the path from seed to bits


def words(text: str) -> set[str]:
    return set(text.split())


# Functions whose last bit is left to a library, or whose order of summation is.
INEXACT_NUMPY = words("""
    exp exp2 expm1 log log2 log10 log1p logaddexp logaddexp2 power float_power pow cbrt hypot
    sin cos tan sinh cosh tanh arcsin arccos arctan arctan2 sinc
    sum nansum mean nanmean average median std var prod nanprod cumsum cumprod trapezoid
    matmul dot vdot inner tensordot einsum vecdot linalg fft convolve correlate interp polyval
    partition argpartition random
""")
INEXACT_MATH = words("""
    exp exp2 expm1 log log2 log10 log1p pow cbrt hypot dist fsum sumprod erf erfc gamma lgamma
    sin cos tan sinh cosh tanh asin acos atan atan2
""")
INEXACT_METHODS = words("sum mean std var prod cumsum cumprod dot argpartition")
INEXACT_MODULES = {"random", "statistics", "cmath", "numpy.random", "numpy.linalg", "numpy.fft"}
SCIPY_ALLOWED = ("scipy.sparse",)
SORTS = {"sort", "argsort"}
SETS = words("set frozenset union difference intersection symmetric_difference")
REDUCTIONS = {"reduce", "accumulate", "reduceat", "at"}

# What only looks at a finished run, or is there to show how plain floats fail.
OFF_THE_PATH = ("report/", "proof/plain.py")

# (file, function, construct): why it is exact all the same.
ALLOWED = {
    ("exact/arithmetic.py", "exact_matmul", "np.matmul"): "the one product: integers within 2^53",
    ("exact/arithmetic.py", "exact_sum", "np.add.reduce"): "the one sum: integers within 2^53",
    ("exact/selfcheck.py", "_multiplies_exactly", "np.matmul"): "int64",
    ("exact/streams.py", "Stream._words_from", "np.random.Philox"): "raw words of a counter",
    ("model/kernels.py", "gradients", "@"): "sparse ones times integers",
    ("model/gradient.py", "Batch._by_table", "np.cumsum"): "counts",
    ("model/kernels.py", "scatter", "@"): "sparse ones times integers",
    (
        "decoding/filters.py",
        "keep_top_k",
        "np.partition",
    ): "yields a value, the same for all ties",
    ("decoding/beams.py", "best_first", "np.partition"): "yields a value, as in keep_top_k",
    ("decoding/filters.py", "keep_top_p", ".sort() not stable"): "yields values, equal ones alike",
    ("decoding/filters.py", "keep_top_p", "np.add.accumulate"): "integer weights within 2^52",
    (
        "decoding/filters.py",
        "running_sum",
        "np.add.accumulate",
    ): "integers within 2^52, in int64",
    ("decoding/scoring.py", "in_units", "sum()"): "Python integers",
    ("decoding/scoring.py", "evaluate", "sum()"): "Python integers",
    ("cli/info.py", "info", "sum()"): "sizes",
    ("cli/proving.py", "_check_all", "sum()"): "steps",
    ("cli/sweep.py", "_train_all", "sum()"): "steps",
    ("proof/verification.py", "Verification.steps", "sum()"): "steps",
    ("training/checkpoint.py", "save", "sum()"): "sizes",
    ("text/documents.py", "Reader.__init__", "sum()"): "sizes",
    ("training/pool.py", "pool", "order of a set"): "processes, all of which are ended",
    ("training/sweep.py", "", "import statistics"): "exact fractions, for a table",
}


_GREEDY_GROUP = re.compile(r"\(\?>|\)[*+?]\+")


class Finder(ast.NodeVisitor):
    """Collect (line, function, construct) for all that could leave bits to a library."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str, str]] = []
        self.scope: list[str] = []
        self.in_function = False
        self.modules = {"np": "numpy", "numpy": "numpy", "math": "math"}  # local name -> module
        self.names: dict[str, str] = {}  # local name -> module.function

    def note(self, node: ast.AST, construct: str) -> None:
        self.found.append((node.lineno, ".".join(self.scope), construct))  # type: ignore[attr-defined]

    def visit_scope(self, node: ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef) -> None:
        for decorator in node.decorator_list:
            self.visit(decorator)
        is_nested = self.in_function  # what stands inside counts as the outermost function's
        self.in_function = is_nested or not isinstance(node, ast.ClassDef)
        if not is_nested:
            self.scope.append(node.name)
        for field, value in ast.iter_fields(node):
            if field != "decorator_list":
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        self.visit(child)
        if not is_nested:
            self.scope.pop()
        self.in_function = is_nested

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = visit_scope

    def check_module(self, node: ast.AST, module: str) -> None:
        is_scipy = module.split(".")[0] == "scipy"
        if module in INEXACT_MODULES or (is_scipy and not module.startswith(SCIPY_ALLOWED)):
            self.note(node, f"import {module}")

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.check_module(node, alias.name)
            if alias.name in ("numpy", "math"):
                self.modules[alias.asname or alias.name] = alias.name

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module and not node.level:
            if node.module != "scipy":
                self.check_module(node, node.module)
            for alias in node.names:
                if node.module in ("numpy", "math"):
                    self.names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                elif node.module == "scipy":
                    self.check_module(node, f"scipy.{alias.name}")

    def dotted(self, node: ast.AST) -> str:
        """Name a.b.c with its imports resolved; '' for any other expression."""
        if isinstance(node, ast.Attribute):
            before = self.dotted(node.value)
            return f"{before}.{node.attr}" if before else ""
        if isinstance(node, ast.Name):
            return self.names.get(node.id) or self.modules.get(node.id, node.id)
        return ""

    def check_name(self, node: ast.AST) -> bool:
        module, _, rest = self.dotted(node).partition(".")
        function, _, method = rest.partition(".")
        if module == "numpy" and function == "random" and not method:
            return False  # named in full one level up, or not used
        adds_up = function in ("add", "multiply") and method in REDUCTIONS
        if module == "numpy" and (function in INEXACT_NUMPY or adds_up):
            self.note(node, f"np.{rest}")
        elif module == "math" and function in INEXACT_MATH:
            self.note(node, f"math.{function}")
        else:
            return False
        return True

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not self.check_name(node):
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in self.names:
            self.check_name(node)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        for called in (function, *node.args):  # f(x), and map(f, x)
            if isinstance(called, ast.Name) and called.id in ("sum", "pow"):
                self.note(node, f"{called.id}()")
        if isinstance(function, ast.Attribute):
            module = self.dotted(function).partition(".")[0]
            is_module = module in ("numpy", "math")
            on_text = node.args and isinstance(node.args[0], ast.Constant)
            if function.attr in INEXACT_METHODS and not is_module:
                self.note(node, f".{function.attr}()")
            if function.attr == "partition" and not is_module and not on_text:
                self.note(node, ".partition()")
            if function.attr in SORTS and not self.is_stable(node):
                self.note(node, f".{function.attr}() not stable")
            for joined in node.args if function.attr == "join" else ():
                self.check_order(joined)
            if function.attr == "default_rng" and not is_module:
                self.note(node, ".default_rng()")
        for keyword in node.keywords:
            off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            if keyword.arg == "fastmath" and not off:
                self.note(node, "fastmath")
        self.generic_visit(node)

    @staticmethod
    def is_stable(node: ast.Call) -> bool:
        kinds = {k.arg: k.value for k in node.keywords}
        kind = kinds.get("kind")
        return (isinstance(kind, ast.Constant) and kind.value == "stable") or "key" in kinds

    def check_order(self, node: ast.AST) -> None:
        if self.is_set(node):
            self.note(node, "order of a set")

    def is_set(self, node: ast.AST, *, of_keys: bool = False) -> bool:
        if isinstance(node, ast.BinOp):  # of two dicts' keys, too
            return any(self.is_set(part, of_keys=True) for part in (node.left, node.right))
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute):
            return called.attr in SETS or (of_keys and called.attr == "keys")
        is_named = isinstance(called, ast.Name) and called.id in SETS
        return is_named or isinstance(node, ast.Set | ast.SetComp)

    def visit_For(self, node: ast.For | ast.comprehension) -> None:
        self.check_order(node.iter)
        self.generic_visit(node)

    visit_comprehension = visit_For

    def check_operator(self, node: ast.BinOp | ast.AugAssign, left: ast.expr) -> None:
        right = node.right if isinstance(node, ast.BinOp) else node.value
        if isinstance(node.op, ast.MatMult):
            self.note(node, "@")
        if isinstance(node.op, ast.Pow):
            base, exponent = self.literal(left), self.literal(right)
            is_exact = isinstance(exponent, int) and (isinstance(base, int) or base == 2.0)
            if not is_exact:
                self.note(node, "**")  # x**3 too: only powers of literals are exact everywhere
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.check_operator(node, node.left)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Python 3.11 before .5 reads such a group of a regular expression in another way."""
        if isinstance(node.value, str | bytes) and _GREEDY_GROUP.search(str(node.value)):
            self.note(node, "group that gives nothing back")

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.check_operator(node, node.target)

    @staticmethod
    def literal(node: ast.expr) -> object:
        try:
            return ast.literal_eval(node)
        except ValueError:
            return None


def findings(source: str) -> list[tuple[int, str, str]]:
    finder = Finder()
    finder.visit(ast.parse(source))
    return finder.found


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(OFF_THE_PATH)])
def test_nothing_on_the_path_from_seed_to_bits_leaves_them_to_a_library(name):
    found = findings((PACKAGE / name).read_text(encoding="utf-8"))
    culprits = [
        f"{name}:{line}: {construct} in {scope or 'the module'}"
        for line, scope, construct in found
        if (name, scope, construct) not in ALLOWED
    ]
    assert not culprits, "use arithmetic.py, sort, or allow it here with the reason why it is exact"


def test_every_exception_is_still_needed():
    needed = {
        (name, scope, construct)
        for name in NAMES
        for _, scope, construct in findings((PACKAGE / name).read_text(encoding="utf-8"))
    }
    assert {entry for entry in ALLOWED if entry[0] in NAMES} <= needed


@pytest.mark.parametrize(
    ("line", "construct"),
    [
        ("np.exp(x)", "np.exp"),
        ("import numpy\nnumpy.log1p(x)", "np.log1p"),
        ("import numpy as n\nn.tanh(x)", "np.tanh"),
        ("from numpy import exp as e\ne(x)", "np.exp"),
        ("from numpy import random\nrandom.rand()", "np.random.rand"),
        ("f = np.power", "np.power"),
        ("np.einsum('ij,jk', a, b)", "np.einsum"),
        ("np.dot(a, b)", "np.dot"),
        ("np.linalg.norm(a)", "np.linalg.norm"),
        ("np.mean(x)", "np.mean"),
        ("np.sum(x)", "np.sum"),
        ("np.cumsum(x)", "np.cumsum"),
        ("np.add.reduce(x)", "np.add.reduce"),
        ("np.add.accumulate(x)", "np.add.accumulate"),
        ("np.add.at(x, i, y)", "np.add.at"),
        ("(x * y).sum(axis=0)", ".sum()"),
        ("x.mean()", ".mean()"),
        ("x.dot(y)", ".dot()"),
        ("X @ T", "@"),
        ("x @= y", "@"),
        ("math.exp(1)", "math.exp"),
        ("from math import fsum\nfsum(x)", "math.fsum"),
        ("from math import log as ln\nmap(ln, x)", "math.log"),
        ("sum(x)", "sum()"),
        ("list(map(sum, x))", "sum()"),
        ("pow(x, y)", "pow()"),
        ("x ** y", "**"),
        ("x ** 0.5", "**"),
        ("x ** 3", "**"),
        ("x **= 3", "**"),
        ("0.9 ** 7", "**"),
        ("2.0 ** bits", "**"),
        ("np.argsort(x)", ".argsort() not stable"),
        ("x.argsort(kind='quicksort')", ".argsort() not stable"),
        ("np.sort(x)", ".sort() not stable"),
        ("x.sort()", ".sort() not stable"),
        ("np.argpartition(x, 3)", "np.argpartition"),
        ("np.partition(x, k)", "np.partition"),
        ("x.partition(k)", ".partition()"),
        ("np.random.default_rng(0)", "np.random.default_rng"),
        ("np.random.seed(0)", "np.random.seed"),
        ("np.random.Generator(bits)", "np.random.Generator"),
        ("from numpy.random import default_rng", "import numpy.random"),
        ("import random", "import random"),
        ("from random import choice", "import random"),
        ("import statistics", "import statistics"),
        ("from scipy.special import logsumexp", "import scipy.special"),
        ("from scipy import stats", "import scipy.stats"),
        ("njit(f, fastmath=True)", "fastmath"),
        ("for name in {x, y}: pass", "order of a set"),
        ("[name for name in set(x).union(y)]", "order of a set"),
        ("', '.join(x.keys() - y.keys())", "order of a set"),
        ("re.compile(r'(?>a|b)c')", "group that gives nothing back"),
        ("re.compile(rb'(?:ab?)*+c')", "group that gives nothing back"),
    ],
)
def test_the_search_catches(line, construct):
    body = "".join(f"    {part}\n" for part in line.split("\n"))
    found = findings(f"class A:\n  def f(x):\n{body}")
    assert [(scope, what) for _, scope, what in found] == [("A.f", construct)]


@pytest.mark.parametrize(
    "line",
    [
        "# np.exp(x) + sum(y)",
        '"""np.sum(x) @ math.exp(1)"""',
        "text = 'np.exp(x)'",
        "np.sqrt(x) * np.rint(y)",
        "math.sqrt(x) + math.ldexp(1.0, 3) + math.prod(shape)",
        "2.0 ** -53 + 2 ** 32 + 10**6",
        "f(**options)",
        "np.argsort(x, kind='stable')",
        "names.sort(key=len)",
        "[name for name in sorted(x.keys() | y)]",
        "for name in x.keys(): pass",
        "sorted(names)",
        "key.partition('=')",
        "from minigen.exact.arithmetic import exp, log\nexp(x) + log(y)",
        "from minigen.model.kernels import gradients",
        "from scipy.sparse import csr_array",
        "statistics.sum_of_losses",
        "np.maximum(x, y).max()",
        "njit(f, fastmath=False)",
        "arithmetic.exact_sum(x)",
        "@decorated\ndef f(): pass",
    ],
)
def test_the_search_lets_pass(line):
    assert findings(line) == []


def test_the_search_names_the_outermost_function():
    source = "class A:\n  def f():\n    def g(): a @ b\n    c @ d\n  x = sum(y)\nz @ z"
    assert [scope for _, scope, _ in findings(source)] == ["A.f", "A.f", "A", ""]


# (b) One way to write code in a docstring: what no rule of ruff's asks for


@pytest.mark.parametrize("name", NAMES)
def test_code_in_a_docstring_stands_in_double_backticks(name):
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    tree = ast.parse((PACKAGE / name).read_text(encoding="utf-8"))
    texts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
    assert not [text for text in texts if "`" in text.replace("``", "")]


# (c) Imports that lead downwards: what import-linter, set up in pyproject.toml, refuses


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        ("exact/streams.py", "from minigen.text import tokenizer", "between the rooms"),
        ("exact/streams.py", "from minigen import Run", "between the rooms"),
        ("model/head.py", "def f(): from minigen.training.run import Run", "between the rooms"),
        ("errors.py", "import minigen.exact.streams", "between the rooms"),
        ("report/facts.py", "from minigen.proof import floats", "between the rooms"),
        ("extra/__init__.py", "", "between the rooms"),
        ("text/tokenizer.py", "from minigen.text import corpus", "within a room"),
        ("model/head.py", "def f(): import minigen.model.model", "within a room"),
    ],
)
def test_an_import_upwards_or_in_a_circle_is_refused(file, line, broken, tmp_path):
    copy = tmp_path / "minigen"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "corpora"))
    shutil.copy(PACKAGE.parent / "pyproject.toml", tmp_path)
    (copy / file).parent.mkdir(exist_ok=True)
    with open(copy / file, "a", encoding="utf-8") as source:
        source.write(f"\n{line}\n")
    command = [Path(sys.executable).parent / "lint-imports", "--no-logo", "--no-cache"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    verdicts = [text for text in done.stdout.splitlines() if text.endswith(("KEPT", "BROKEN"))]
    assert done.returncode == 1
    assert [text.endswith(f"{broken} BROKEN") for text in verdicts].count(True) == 1, done.stdout


# (d) Light imports


@pytest.mark.parametrize(
    "module",
    [
        "minigen",
        "minigen.decoding.generation",
        "minigen.model.model",
        "minigen.training.checkpoint",
    ],
)
def test_generation_imports_neither_scipy_nor_numba_nor_pydantic(module):
    heavy = ("scipy", "numba", "pydantic")
    script = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (found.stdout, found.stderr) == ("[]\n", "")


# (d) What is handed out stays as it is


def test_every_dataclass_is_frozen():
    loose = [
        node.name
        for file in FILES
        for node in ast.walk(ast.parse(file.read_bytes()))
        if isinstance(node, ast.ClassDef)
        for decorator in map(ast.unparse, node.decorator_list)
        if decorator.startswith("dataclass") and "frozen=True" not in decorator
    ]
    assert loose == []
