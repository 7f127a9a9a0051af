"""Mutants of the host side: those that once survived (`-m slow`), and what a run over all files found."""

import ast
import json
from pathlib import Path

import pytest

from tests.support.forked import ForkedTests
from tests.support.mutants import (
    CHECKOUT,
    PACKAGE,
    PACKAGES,
    RULES,
    TESTS,
    Mutant,
    chosen_tests,
    drawn,
    edited,
    mutants,
    noticed_by,
)

DATA = Path(__file__).parent / "host_mutants.json"
ONCE_SURVIVED = [
    ("backends/op_call.py", "{\"backend\": with_fallback(self.backend), ",
     "{\"deterministic\": None, \"backend\": with_fallback(self.backend), ", RULES),
    ("backends/fused/launch_plan.py", "workspace.captured = True", "workspace.captured = False", RULES),
    ("backends/by_shards.py", "plan.workspace.captured |= plan", "plan.workspace.captured = plan", RULES),
    ("backends/fused/launch_plan.py", "            self.workspace.raise_if_failed()\n", "", RULES),
    ("backends/peer_access.py", "if known is None or known[0]() is not group:", "if known is None:", RULES),
    ("tuning/machine.py", "if arch in (machine := load(named)).archs:", "if machine := load(named):", RULES),
    ("dispatch/calls.py", "return settings(), torch._C._get_deterministic_algorithms(), where",
     "return settings(), torch._C._get_deterministic_algorithms()", RULES),
    ("config/orders.py", "Place((work.rank + t // tiles) % work.owners",
     "Place((work.rank + 1 + t // tiles) % work.owners", RULES),
    ("integrations/torch_symm_mem.py", "rows % (ranks := group_size(group)):", "False:", RULES),
    ("runtime/bootstrap.py", 'int(env["SLURM_JOB_ID"]) * 64 + int(env.get("SLURM_STEP_ID", 0))',
     'int(env["SLURM_JOB_ID"])', RULES),
    ("exchange/geometry.py", "ceil_div(shard, unit) * unit", "shard", RULES),
    ("integrations/megatron.py", "if self.gather_output if runtime_gather_output is None else",
     "if self.gather_output if True else", "tests/multi/test_megatron.py"),
    ("backends/by_shards.py", "            self.plan.workspace.raise_if_failed()\n", "", RULES),
    ("exchange/sums.py",
     "range_constexpr(len(sources)):\n            if first",
     "range_constexpr(len(sources) - 1, -1, -1):\n            if first",
     "tests/emulated/test_rank_order.py"),
    ("backends/fused/gather_calls.py",
     "(of_x, layout.of_b(*of_weight))", "(of_x, of_weight[0])",
     "tests/emulated/test_gather_calls.py"),
    ("dispatch/ops.py", "x[slice(*Shards(x.shape[0], ranks.size", "x[slice(*Shards(x.shape[1], ranks.size",
     "tests/multi/test_registration.py"),
    ("transports/nvshmem.py", "            cute.arch.fence_acq_rel_sys()\n            nv.signal_op",
     "            nv.signal_op", "tests/emulated/test_relay.py"),
]  # fmt: skip


@pytest.fixture(scope="module")
def runs():
    with ForkedTests() as runs:
        yield runs


@pytest.mark.parametrize(("file", "before", "after", "tests"), ONCE_SURVIVED, ids=lambda value: value[:40])
def test_what_once_survived_is_an_edit_of_the_source(file, before, after, tests):
    compile(edited(file, before, after).text, file, "exec")
    assert (Path(__file__).parents[2] / tests).is_file()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("file", "before", "after", "tests"), ONCE_SURVIVED, ids=lambda value: value[:40])
def test_what_once_survived_is_noticed_by_the_default_suite(file, before, after, tests, runs):
    assert noticed_by(edited(file, before, after), [tests], runs)


# --- what a run over drawn mutants found ---

DRAWS = json.loads(DATA.read_text())["draws"]
FOUND = [one for draw in DRAWS for one in draw["mutants"]]
PAGE = Path(__file__).parents[2] / "docs" / "design" / "testing.md"
EXCEPTED = ("equivalent: ", "on GPUs: ")
"""First words of reasons for which no test without a GPU can notice a mutant."""


def test_nearly_all_of_150_mutants_are_noticed():
    """Survivors say why they are; of those that are not excepted there are at most 5 %."""
    tried, left = FOUND, [one for one in FOUND if not one["noticed_by"]]
    assert len({one["mutant"] for one in tried}) == len(tried) >= 150
    assert all(len(one["why"]) > 20 for one in left), left
    equivalent, on_gpus = (sum(one["why"].startswith(why) for one in left) for why in EXCEPTED)
    assert len(tried) - len(left) >= 0.95 * (len(tried) - equivalent - on_gpus)
    counts = (
        f"{len(tried) - len(left)} of {len(tried)} are noticed, {equivalent} are equivalent, {on_gpus} need"
    )
    commits = ", ".join(draw["commit"] for draw in DRAWS)
    said = f"{counts} GPUs (commits {commits}, {DRAWS[-1]['date']};"
    assert said in " ".join(PAGE.read_text().split())


def test_mutants_of_every_package_were_tried_and_noticed_by_tests_that_exist():
    names = {one["mutant"].partition("/")[0] for one in FOUND}
    assert names == set(PACKAGES)
    noticed = {one["noticed_by"] for one in FOUND} - {None}
    assert all((CHECKOUT / test).is_file() for test in noticed)


# --- the tool ---


@pytest.mark.parametrize("file", ["runtime/environment.py", "runtime/identity.py"])
def test_every_mutant_is_a_program_and_none_is_the_original(file):
    original, found = ast.unparse(ast.parse((PACKAGE / file).read_text())), mutants(file)
    assert len({mutant.text for mutant in found}) == len(found) >= 5
    for mutant in found:
        assert mutant.text != original
        compile(mutant.text, file, "exec")


def test_a_mutant_runs_in_the_packages_place(tmp_path, runs):
    """One that breaks a rule is noticed, one that changes nothing is not."""
    test = tmp_path / "test_it.py"
    test.write_text(
        "from overlap_gemm.runtime import environment\n"
        "def test_it(monkeypatch):\n"
        "    monkeypatch.setenv('A', '3')\n"
        "    assert environment.count('A', 'things') == 3\n"
    )
    file = "runtime/environment.py"
    text = (PACKAGE / file).read_text()
    more = text.replace("lambda text: int(text)", "lambda text: int(text) + 1")
    assert noticed_by(Mutant(file, 1, 0, "nothing", text), [str(test)], runs) is None
    assert noticed_by(Mutant(file, 1, 0, "one more", more), [str(test)], runs) == str(test)
    _, entered = runs.entered(PACKAGE, str(test))
    assert f"{file}:{text[: text.index('def count')].count(chr(10)) + 1}" in entered


def test_a_longer_draw_begins_with_a_shorter_one():
    """Compares draws: one that was stopped continues with the mutants that it has not tried."""
    longer, other = ([str(mutant) for mutant in drawn(12, seed)] for seed in (1, 2))
    assert longer[:5] == [str(mutant) for mutant in drawn(5, 1)] and longer != other
    assert len(set(longer)) == 12


def test_tests_of_a_mutant_enter_its_function():
    """Checks also a place outside of functions, which belongs to all functions of its file."""
    text = (PACKAGE / "runtime/environment.py").read_text()
    first = text[: text.index("def count")].count("\n") + 1
    entries = [("a", 1.0, {f"runtime/environment.py:{first}"}), ("b", 2.0, {"runtime/environment.py:7"})]
    assert chosen_tests(Mutant("runtime/environment.py", first + 1, 0, "", ""), entries) == ["a"]
    assert chosen_tests(Mutant("runtime/environment.py", 1, 0, "", ""), entries) == ["a"]
    assert all((CHECKOUT / test).is_file() for test in TESTS)


@pytest.mark.parametrize(
    ("code", "changed"),
    [
        ("a < b", "a <= b"),
        ("a and b", "a or b"),
        ("not a", "not not a"),
        ("a + 1", "a - 1"),
        ("f(2)", "None"),
        ("x = f(y, a=b)", "x = f(y)"),
        (
            "def f(x):\n    return g(x)",
            "def f(x):\n    return globals().setdefault('returned at 2:4', g(x))",
        ),
        ("x = min(a)", "x = max(a)"),
        ("x |= y", "x &= y"),
        ("x = True", "x = False"),
        ("x = 4", "x = 5"),
    ],
)
def test_what_is_changed(tmp_path, monkeypatch, code, changed):
    (tmp_path / "a.py").write_text(code)
    monkeypatch.setattr("tests.support.mutants.PACKAGE", tmp_path)
    assert changed in [mutant.text for mutant in mutants("a.py")]
