"""Mutants of host code: the meaning of one place changed, to see whether the tests notice.

    with ForkedTests() as runs:
        for mutant in mutants(file):
            assert noticed_by(mutant, ["tests/cpu/test_peers.py"], runs)

Changed are comparisons, `and` and `or`, `not`, `min` and `max`, arithmetic, numbers, truth values and `|=`.
Calls made for their effect and keyword arguments are dropped, and a `return` repeats its first value. A
mutant that no test notices is either equivalent to the original or shows a test that is missing. For kernels
there is ``cute_emulator.mutate``.

    python -m tests.support.mutants tests/cpu/host_mutants.json 50 2811

draws 50 mutants of `PACKAGES` and writes which test file noticed each, next to other seeds' draws. For each
mutant those files of `TESTS` run that enter its function, the fastest first. The functions that each enters
are recorded once, in a file next to the data. Mutants that the draw has are not tried again, but for
survivors without a reason ("why", written by hand); so it may be stopped at any time.
"""

import ast
import copy
import json
import math
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from tests.support.forked import ForkedTests

CHECKOUT = Path(__file__).parents[2]
PACKAGE = CHECKOUT / "src" / "overlap_gemm"

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip
RULES = "tests/cpu/test_host_rules.py"
PACKAGES = ("api", "backends", "dispatch", "runtime", "spec", "tuning")
TESTS = tuple(
    f"tests/{folder}/test_{name}.py"
    for folder, names in (
        ("cpu", "alone autotuned_times autotuning block_scales calibrate calls compile_cache constants "
                "environment epilogue_gradients epilogue_time epilogues fused_backend host_rules kept_ranks "
                "kernel_config local manners model model_of_few_rows order peers plan_command priors "
                "promise_costs quantization scaled_arguments schedules select settings sharding signature "
                "spans spec symmetric timing tune_command watcher workspace"),
        ("multi", "all_to_all autotuning call_identity disagree epilogues float8 gradients groups invariance "
                  "kept_weights launchers ledger nn one_rank_fails ops peer_access registration retry scaled "
                  "shard_lengths stats"),
        ("emulated", "ahead fused_calls gather_calls virtual_world"),
    )
    for name in names.split()
)  # fmt: skip
"""Test files that may notice a mutant."""

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
    """Returns all mutants of a file of the package, in the order of its lines."""
    tree = ast.parse((PACKAGE / file).read_text())
    found = [_mutant(file, tree, number) for number in range(_places(tree))]
    return sorted(found, key=lambda mutant: (mutant.line, mutant.column))


def drawn(count: int, seed: int) -> list[Mutant]:
    """Draws mutants of all files of `PACKAGES`; the same ones as long as these are."""
    files = sorted(path for name in PACKAGES for path in (PACKAGE / name).rglob("*.py"))
    trees = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in files}
    every = [(file, number) for file, tree in trees.items() for number in range(_places(tree))]
    return [_mutant(file, trees[file], number) for file, number in random.Random(seed).sample(every, count)]


def _places(tree: ast.AST) -> int:
    return sum(1 for _ in _changes(tree))


def _mutant(file: str, tree: ast.AST, number: int) -> Mutant:
    """Returns the mutant that has change `number` of a file's."""
    changed = copy.deepcopy(tree)
    node, change = next(islice(_changes(changed), number, None))
    line, column = getattr(node, "lineno", 0), getattr(node, "col_offset", 0)
    before = _short(node)
    change()
    text = ast.unparse(ast.fix_missing_locations(changed))
    return Mutant(file, line, column, f"{before} -> {_short(node)}", text)


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


def chosen_tests(mutant: Mutant, entries: Sequence[tuple[str, float, set[str]]]) -> list[str]:
    """Returns the test files that enter a mutant's function, or, outside of functions, any of its file."""
    functions = [
        (node.end_lineno or 0, min(one.lineno for one in (node, *node.decorator_list)))
        for node in ast.walk(ast.parse((PACKAGE / mutant.file).read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    around = [first for last, first in functions if first <= mutant.line <= last]
    places = {f"{mutant.file}:{first}" for first in ([max(around)] if around else dict(functions).values())}
    return [test for test, _, entered in entries if entered & places]


def try_all(data: Path, count: int, seed: int) -> None:
    """Tries drawn mutants, and stores in `data` which test file noticed each, as the module says."""
    draws: list[dict[str, Any]] = json.loads(data.read_text())["draws"] if data.exists() else []
    others = [draw for draw in draws if draw["seed"] != seed]
    every = [one for draw in draws if draw["seed"] == seed for one in draw["mutants"]]
    found = [one for one in every if one["noticed_by"] or one.get("why")]
    known = {one["mutant"] for one in found}
    with ForkedTests() as runs:
        entries = _entries(data.with_suffix(".entries"), runs)
        for mutant in drawn(count, seed):
            if str(mutant) not in known:
                noticed = noticed_by(mutant, chosen_tests(mutant, entries), runs)
                found.append({"mutant": str(mutant), "noticed_by": noticed})
                print(*found[-1].values(), flush=True)
                _keep(data, others, found, seed)


def _entries(path: Path, runs: ForkedTests) -> list[tuple[str, float, set[str]]]:
    """(test file, seconds, functions that it enters) of `TESTS` that pass, the fastest first."""
    known = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for test in TESTS:
        if test not in [one[0] for one in known]:
            known.append([test, *runs.entered(PACKAGE, test)])
            with path.open("a") as lines:
                print(json.dumps(known[-1]), file=lines)
    passed = [(test, seconds, set(entered)) for test, seconds, entered in known if seconds < math.inf]
    return sorted(passed, key=lambda one: one[1])


def _keep(data: Path, others: list[dict[str, Any]], found: list[dict[str, Any]], seed: int) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=PACKAGE, capture_output=True, text=True
    )
    draw = {"commit": commit.stdout.strip(), "date": str(date.today()), "seed": seed, "mutants": found}
    data.write_text(json.dumps({"draws": [*others, draw]}, indent=1) + "\n")


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
        elif isinstance(node, ast.Return) and node.value is not None and not _is_fixed(node.value):
            yield node, partial(_repeat, node)
        if isinstance(node, ast.Call):
            for number in _keywords(node):
                yield node, partial(node.keywords.pop, number)


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


def _keywords(call: ast.Call) -> list[int]:
    """The numbers of a call's keyword arguments; `strict` is an assertion."""
    return [number for number, one in enumerate(call.keywords) if one.arg != "strict"]


def _repeat(node: ast.Return) -> None:
    """Makes a `return` repeat the first value that it has ever returned."""
    assert node.value is not None
    place = ast.Constant(f"returned at {node.lineno}:{node.col_offset}")
    node.value = ast.Call(ast.parse("globals().setdefault", mode="eval").body, [place, node.value], [])


def _is_fixed(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) or (isinstance(value, ast.Name) and value.id == "self")


def _is_text(node: ast.BinOp) -> bool:
    return any(isinstance(side, (ast.JoinedStr, ast.List, ast.Tuple)) for side in (node.left, node.right))


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


if __name__ == "__main__":
    try_all(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
