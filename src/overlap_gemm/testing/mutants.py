"""Mutants of host code: the meaning of one place changed, to see whether the tests notice.

    for mutant in mutants(file):
        assert killed(mutant, ["tests/cpu/test_peers.py"])

What is changed: comparisons, `and` and `or`, `not`, `min` and `max`, arithmetic, numbers, truth values, `|=`,
calls made for their effect. A mutant that no test notices is either equivalent to the original or shows a
test that is missing. For kernels there is ``cute_emulator.mutate``.
"""

import ast
import copy
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
CHECKOUT = PACKAGE.parents[1]
LIMIT = 300.0
"""Seconds that the tests of a mutant may take; one that hangs has been noticed."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """One changed place.

    Attributes:
        file: Of the package, relative to it.
        line: Of the place.
        what: What was changed, as code: before and after.
        text: The whole changed file.
    """

    file: str
    line: int
    what: str
    text: str

    def __str__(self) -> str:
        """Stable as long as the file's code is."""
        return f"{self.file}:{self.line} {self.what}"


def mutants(file: str) -> list[Mutant]:
    """All mutants of a file of the package, in the order of its lines."""
    tree = ast.parse((PACKAGE / file).read_text())
    found = []
    places = sum(1 for _ in _changes(tree))
    for number in range(places):
        changed = copy.deepcopy(tree)
        node, change = next(place for i, place in enumerate(_changes(changed)) if i == number)
        line, before = getattr(node, "lineno", 0), _short(node)
        change()
        text = ast.unparse(ast.fix_missing_locations(changed))
        found.append(Mutant(file, line, f"{before} -> {_short(node)}", text))
    return sorted(found, key=lambda mutant: mutant.line)


def sample(file: str, count: int) -> list[Mutant]:
    """So many of a file's mutants, evenly over it; the same ones every time."""
    every = mutants(file)
    return [every[i * len(every) // count] for i in range(count)] if len(every) > count else every


def edited(file: str, before: str, after: str) -> Mutant:
    """The mutant of a file in which one piece of text is another; it must be there once."""
    text = (PACKAGE / file).read_text()
    assert text.count(before) == 1, f"{file} has {text.count(before)} times: {before}"
    line = text[: text.index(before)].count("\n") + 1
    return Mutant(file, line, f"{before.strip()} -> {after.strip()}", text.replace(before, after))


def killed(mutant: Mutant, tests: Sequence[str]) -> bool:
    """Whether tests fail, or do not end, with a mutant in the package's place."""
    with tempfile.TemporaryDirectory(prefix="overlap-gemm-mutant-") as folder:
        source = Path(folder) / "overlap_gemm"
        shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("__pycache__"))
        (source / mutant.file).write_text(mutant.text)
        paths = [folder, str(CHECKOUT / "emulator" / "src"), os.environ.get("PYTHONPATH", "")]
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        try:
            done = subprocess.run(
                command,
                cwd=CHECKOUT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                capture_output=True,
                timeout=LIMIT,
            )
        except subprocess.TimeoutExpired:
            return True
    return done.returncode != 0


def _changes(tree: ast.AST) -> Iterator[tuple[ast.AST, Callable[[], object]]]:
    """(place, what changes it) of every change that can be made."""
    for node in _code(tree):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
            yield node, partial(node.ops.__setitem__, 0, COMPARISONS[type(node.ops[0])]())
        elif isinstance(node, ast.BoolOp):
            yield node, partial(setattr, node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And())
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node, partial(setattr, node, "operand", ast.UnaryOp(ast.Not(), node.operand))
        elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not _is_text(node):
            yield node, partial(setattr, node, "op", ARITHMETIC[type(node.op)]())
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.BitOr):
            yield node, partial(setattr, node, "op", ast.BitAnd())
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield node, partial(setattr, node, "value", not node.value)
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield node, partial(setattr, node, "value", node.value + 1)
        elif isinstance(node, ast.Name) and node.id in NAMES:
            yield node, partial(setattr, node, "id", NAMES[node.id])
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield node, partial(setattr, node, "value", ast.Constant(None))


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that decide something: no annotations, and none of what an error is told in."""
    for name, field in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list") or isinstance(
            tree, (ast.Raise, ast.JoinedStr)
        ):
            continue
        for node in field if isinstance(field, list) else [field]:
            if isinstance(node, ast.AST):
                yield node
                yield from _code(node)


def _is_text(node: ast.BinOp) -> bool:
    return any(isinstance(side, (ast.JoinedStr, ast.List, ast.Tuple)) for side in (node.left, node.right))


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
