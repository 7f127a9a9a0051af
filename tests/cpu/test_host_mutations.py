"""Mutants of the host side: those that once survived, and a sample of all (`-m slow`; an hour)."""

import ast

import pytest

from overlap_gemm.testing.mutants import PACKAGE, Mutant, edited, killed, mutants, sample

RULES = "tests/cpu/test_host_rules.py"
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
]  # fmt: skip

NOTICED_BY = {
    "calls.py": ["tests/cpu/test_calls.py", RULES],
    "sharding.py": ["tests/cpu/test_sharding.py"],
    "runtime/agree.py": ["tests/multi/test_disagree.py", "tests/multi/test_one_rank_fails.py"],
    "runtime/bootstrap.py": ["tests/cpu/test_alone.py", RULES],
    "runtime/compile_cache.py": ["tests/cpu/test_compile_cache.py"],
    "runtime/environment.py": ["tests/cpu/test_environment.py"],
    "runtime/peers.py": ["tests/cpu/test_peers.py", "tests/multi/test_one_rank_fails.py"],
    "runtime/symmetric.py": ["tests/cpu/test_workspace.py", "tests/multi/test_one_rank_fails.py"],
    "runtime/workspace.py": ["tests/cpu/test_workspace.py", "tests/multi/test_one_rank_fails.py"],
    "backends/reach.py": ["tests/cpu/test_select.py", "tests/multi/test_reach.py", RULES],
    "backends/select.py": ["tests/cpu/test_select.py", "tests/cpu/test_fused_backend.py"],
    "backends/torch_backend.py": ["tests/multi/test_ops.py"],
    "backends/plans.py": ["tests/cpu/test_fused_backend.py", RULES, "tests/multi/test_one_rank_fails.py"],
    "tuning/machine.py": ["tests/cpu/test_select.py", "tests/cpu/test_tune_command.py", RULES],
    "tuning/settings.py": ["tests/cpu/test_settings.py"],
}
COUNT = 8
EQUIVALENT: dict[str, str] = {}
"""Mutants that no test can notice, and why."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("file", "before", "after", "tests"), ONCE_SURVIVED, ids=lambda value: value[:40])
def test_what_once_survived_is_noticed_by_the_default_suite(file, before, after, tests):
    assert killed(edited(file, before, after), [tests])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("file", NOTICED_BY)
def test_mutants_are_noticed(file):
    left = [str(m) for m in sample(file, COUNT) if not killed(m, NOTICED_BY[file])]
    assert not set(left) - EQUIVALENT.keys(), "\n".join(left)


# --- the tool ---


@pytest.mark.slow
def test_there_are_a_hundred_to_try():
    assert sum(len(sample(file, COUNT)) for file in NOTICED_BY) >= 100


@pytest.mark.parametrize(
    "file", ["runtime/environment.py", *(pytest.param(f, marks=pytest.mark.slow) for f in NOTICED_BY)]
)
def test_every_mutant_is_a_program_and_none_is_the_original(file):
    original, found = ast.unparse(ast.parse((PACKAGE / file).read_text())), mutants(file)
    assert len({mutant.text for mutant in found}) == len(found) >= 5
    for mutant in found:
        assert mutant.text != original
        compile(mutant.text, file, "exec")


def test_a_mutant_runs_in_the_packages_place(tmp_path):
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
    assert not killed(Mutant(file, 1, "nothing", text), [str(test)])
    assert killed(
        Mutant(file, 1, "one more", text.replace("return int(text)", "return int(text) + 1")), [str(test)]
    )


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
