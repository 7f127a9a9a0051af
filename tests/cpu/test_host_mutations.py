"""Mutants of the host side: those that once survived, and a sample of all (`-m slow`; an hour)."""

import ast

import pytest

from overlap_gemm.testing.forked import ForkedTests
from overlap_gemm.testing.mutants import NOTICED_BY, PACKAGE, RULES, Mutant, edited, mutants, noticed_by

ONCE_SURVIVED = [
    ("options.py", "self._replace(backend=preferring(self.backend))",
     "self._replace(backend=preferring(self.backend), deterministic=None)", RULES),
    ("backends/plans.py", "workspace.captured |= order", "workspace.captured = order", RULES),
    ("backends/gather.py", "self.workspace.captured |= order", "self.workspace.captured = order", RULES),
    ("backends/copies.py", "self.workspace.captured |= self", "self.workspace.captured = self", RULES),
    ("backends/plans.py", "            workspace.raise_if_failed()\n", "", RULES),
    ("backends/gather.py", "            self.workspace.raise_if_failed()\n", "", RULES),
    ("backends/reach.py", "if known is None or known[0] is not group:", "if known is None:", RULES),
    ("tuning/machine.py", "if named and arch in (machine := load(named)).archs:",
     "if named and (machine := load(named)):", RULES),
    ("calls.py", "return settings(), torch._C._get_deterministic_algorithms(), where",
     "return settings(), torch._C._get_deterministic_algorithms()", RULES),
    ("schedules/orders.py", "Place((work.rank + t // tiles) % work.owners",
     "Place((work.rank + 1 + t // tiles) % work.owners", RULES),
    ("integrations/torch_symm_mem.py", "A.shape[scatter_dim] % ranks:", "False:", RULES),
    ("runtime/bootstrap.py", 'int(env["SLURM_JOB_ID"]) * 64 + int(env.get("SLURM_STEP_ID", 0))',
     'int(env["SLURM_JOB_ID"])', RULES),
    ("kernels/geometry.py", "ceil_div(shard, unit) * unit", "shard", RULES),
    ("integrations/megatron.py", "if self.gather_output if runtime_gather_output is None else",
     "if self.gather_output if True else", "tests/multi/test_megatron.py"),
    ("backends/copies.py",
     "            self.workspace.raise_if_failed()\n            with", "            with", RULES),
    ("backends/copies.py",
     "            self.workspace.raise_if_failed()\n            try:", "            try:", RULES),
    ("kernels/sums.py",
     "range_constexpr(len(sources)):\n            if first",
     "range_constexpr(len(sources) - 1, -1, -1):\n            if first",
     "tests/emulated/test_rank_order.py"),
    ("transports/nvshmem.py", "            cute.arch.fence_acq_rel_sys()\n            nv.signal_op",
     "            nv.signal_op", "tests/emulated/test_relay.py"),
]  # fmt: skip


@pytest.fixture(scope="module")
def runs():
    with ForkedTests() as runs:
        yield runs


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("file", "before", "after", "tests"), ONCE_SURVIVED, ids=lambda value: value[:40])
def test_what_once_survived_is_noticed_by_the_default_suite(file, before, after, tests, runs):
    assert noticed_by(edited(file, before, after), [tests], runs)


# --- the tool ---


@pytest.mark.parametrize(
    "file", ["runtime/environment.py", *(pytest.param(f, marks=pytest.mark.slow) for f in NOTICED_BY)]
)
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
    more = text.replace("return int(text)", "return int(text) + 1")
    assert noticed_by(Mutant(file, 1, 0, "nothing", text), [str(test)], runs) is None
    assert noticed_by(Mutant(file, 1, 0, "one more", more), [str(test)], runs) == str(test)


@pytest.mark.parametrize(
    ("code", "changed"),
    [
        ("a < b", "a <= b"),
        ("a and b", "a or b"),
        ("not a", "not not a"),
        ("a + 1", "a - 1"),
        ("f(2)", "None"),
        ("x = min(a)", "x = max(a)"),
        ("x |= y", "x &= y"),
        ("x = True", "x = False"),
        ("x = 4", "x = 5"),
    ],
)
def test_what_is_changed(tmp_path, monkeypatch, code, changed):
    (tmp_path / "a.py").write_text(code)
    monkeypatch.setattr("overlap_gemm.testing.mutants.PACKAGE", tmp_path)
    assert changed in [mutant.text for mutant in mutants("a.py")]
