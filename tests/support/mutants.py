"""Mutants of host code: the meaning of one place changed, to see whether the tests notice.

    with ForkedTests() as runs:
        for mutant in mutants(file):
            assert noticed_by(mutant, ["tests/cpu/test_peers.py"], runs)

What is changed: comparisons, `and` and `or`, `not`, `min` and `max`, arithmetic, numbers, truth values, `|=`,
calls made for their effect. A mutant that no test notices is either equivalent to the original or shows a
test that is missing. For kernels there is ``cute_emulator.mutate``.

    python -m tests.support.mutants tests/cpu/host_mutants.json 8

tries eight mutants of each file in `NOTICED_BY` and writes who noticed them. Those that the data has are not
tried again, but for survivors without a reason ("why", written by hand); so it may be stopped at any time.
"""

import ast
import copy
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.forked import ForkedTests

PACKAGE = Path(__file__).parents[2] / "src" / "overlap_gemm"

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip
RULES = "tests/cpu/test_host_rules.py"
NOTICED_BY = {
    "dispatch/calls.py": ["tests/cpu/test_calls.py", RULES],
    "spec/sharding.py": ["tests/cpu/test_sharding.py"],
    "runtime/agree.py": [
        RULES,
        "tests/multi/test_disagree.py",
        "tests/multi/test_one_rank_fails.py",
        "tests/multi/test_faults.py",
    ],
    "runtime/bootstrap.py": [RULES, "tests/cpu/test_alone.py", "tests/multi/test_launchers.py"],
    "runtime/compile_cache.py": ["tests/cpu/test_compile_cache.py"],
    "runtime/environment.py": ["tests/cpu/test_environment.py"],
    "runtime/peers.py": ["tests/cpu/test_peers.py", RULES, "tests/multi/test_one_rank_fails.py"],
    "runtime/memory/symmetric.py": [
        "tests/cpu/test_symmetric.py",
        "tests/cpu/test_workspace.py",
        "tests/multi/test_one_rank_fails.py",
    ],
    "runtime/memory/workspace.py": [
        "tests/cpu/test_workspace.py",
        RULES,
        "tests/multi/test_one_rank_fails.py",
    ],
    "backends/peer_access.py": [RULES, "tests/cpu/test_select.py", "tests/multi/test_peer_access.py"],
    "backends/select.py": [
        "tests/cpu/test_select.py",
        "tests/cpu/test_fused_backend.py",
        "tests/multi/test_logging.py",
    ],
    "backends/torch_backend.py": ["tests/cpu/test_select.py", "tests/multi/test_ops.py"],
    "backends/fused/plan_cache.py": [
        RULES,
        "tests/cpu/test_fused_backend.py",
        "tests/multi/test_one_rank_fails.py",
    ],
    "tuning/machine.py": [RULES, "tests/cpu/test_select.py", "tests/cpu/test_tune_command.py"],
    "tuning/settings.py": ["tests/cpu/test_settings.py"],
}
"""Files of the package, and the tests to ask for their mutants, those that take longest last."""

NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """One changed place.

    Attributes:
        file: Of the package, relative to it.
        line: Of the place.
        column: Of the place.
        what: What was changed, as code: before and after.
        text: The whole changed file.
    """

    file: str
    line: int
    column: int
    what: str
    text: str

    def __str__(self) -> str:
        """Stable as long as the file's code is."""
        return f"{self.file}:{self.line}:{self.column} {self.what}"


def mutants(file: str) -> list[Mutant]:
    """All mutants of a file of the package, in the order of its lines."""
    tree = ast.parse((PACKAGE / file).read_text())
    found = []
    places = sum(1 for _ in _changes(tree))
    for number in range(places):
        changed = copy.deepcopy(tree)
        node, change = next(place for i, place in enumerate(_changes(changed)) if i == number)
        line, column = getattr(node, "lineno", 0), getattr(node, "col_offset", 0)
        before = _short(node)
        change()
        text = ast.unparse(ast.fix_missing_locations(changed))
        found.append(Mutant(file, line, column, f"{before} -> {_short(node)}", text))
    return sorted(found, key=lambda mutant: (mutant.line, mutant.column))


def sample(file: str, count: int) -> list[Mutant]:
    """So many of a file's mutants, evenly over it; the same ones every time."""
    every = mutants(file)
    return [every[i * len(every) // count] for i in range(count)] if len(every) > count else every


def edited(file: str, before: str, after: str) -> Mutant:
    """The mutant of a file in which one piece of text is another; it must be there once."""
    text = (PACKAGE / file).read_text()
    assert text.count(before) == 1, f"{file} has {text.count(before)} times: {before}"
    line = text[: text.index(before)].count("\n") + 1
    return Mutant(file, line, 0, f"{before.strip()} -> {after.strip()}", text.replace(before, after))


def noticed_by(mutant: Mutant, tests: Sequence[str], runs: ForkedTests) -> str | None:
    """The first of some test files that fails, or does not end, with a mutant in the package's place."""
    with tempfile.TemporaryDirectory(prefix="overlap-gemm-mutant-") as folder:
        source = Path(folder) / "overlap_gemm"
        shutil.copytree(PACKAGE, source)
        (source / mutant.file).write_text(mutant.text)
        for compiled in (source / mutant.file).parent.glob(f"__pycache__/{Path(mutant.file).stem}.*"):
            compiled.unlink()
        return next((test for test in tests if runs.fail(folder, test)), None)


def try_all(data: Path, count: int) -> None:
    """Tries mutants of every file, and keeps in `data` who noticed which, as the module says."""
    known: dict[str, dict[str, Any]] = {}
    if data.exists():
        every = json.loads(data.read_text())["mutants"]
        known = {one["mutant"]: one for one in every if one["noticed_by"] or one.get("why")}
    found: list[dict[str, Any]] = list(known.values())
    with ForkedTests(limit=120) as runs:
        for file, tests in NOTICED_BY.items():
            for mutant in sample(file, count):
                if str(mutant) not in known:
                    found.append({"mutant": str(mutant), "noticed_by": noticed_by(mutant, tests, runs)})
                    print(*found[-1].values(), flush=True)
                    _keep(data, found)


def _keep(data: Path, found: list[dict[str, Any]]) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=PACKAGE, capture_output=True, text=True
    )
    report = {"commit": commit.stdout.strip(), "date": str(date.today()), "mutants": found}
    data.write_text(json.dumps(report, indent=1) + "\n")


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


if __name__ == "__main__":
    try_all(Path(sys.argv[1]), int(sys.argv[2]))
