"""Which candidates are measured on GPUs, and that a measured kernel is the one that runs."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from cute_emulator import Emulator
from overlap_gemm.backends import autotuning
from overlap_gemm.backends.autotuning import Candidate, bind_as, policy_of
from overlap_gemm.backends.base import Problem
from overlap_gemm.backends.fused.fused_backend import Fused
from overlap_gemm.backends.group_measurements import GroupMeasurements
from overlap_gemm.backends.op_call import CallOperands
from overlap_gemm.backends.peer_access import PeerAccess
from overlap_gemm.backends.select import choose
from overlap_gemm.config.orders import joins_shards
from overlap_gemm.runtime.group import resolve
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.spec import OPS
from overlap_gemm.spec.sharding import Shards
from overlap_gemm.tuning import space
from overlap_gemm.tuning.machine import load
from overlap_gemm.tuning.measured import Kernel, Measured
from overlap_gemm.tuning.settings import configured
from overlap_gemm.tuning.time_model import Facts
from tests.support.ops import SHARDED
from tests.support.problems import changed
from tests.support.problems import problem as problem_of

HOPPER = PeerAccess("sm_90a", 132, None)
SHAPES = [(8192, 8192, 28672), (2048, 8192, 8192), (512, 10240, 8192), (16, 8192, 8192)]


def on_hopper(
    op="gemm_reduce_scatter", shape=SHAPES[1], peer_access=HOPPER, dtype=torch.bfloat16, **facts
) -> Problem:
    return problem_of(op, *shape, dtype, "cuda", 2, peer_access=peer_access, **facts)


def candidates(problem: Problem) -> list[Candidate]:
    with mock.patch.object(Fused, "why_not", return_value=None):
        return list(autotuning._candidates(problem, None))


@pytest.mark.parametrize("op", SHARDED)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_models_kernel_and_torchs_way_come_first_then_kernels_that_it_does_not_tell_apart(op, shape):
    names = [candidate.name for candidate in candidates(on_hopper(op, shape))]
    assert names[0] == "fused: the model's kernel"
    assert names[1:].index("torch") < len([name for name in names if not name.startswith("fused")])
    assert len(names) == len(set(names)) <= 4 + space.MOST_KERNELS
    assert sum(name.startswith("fused") for name in names) >= 2 or shape[0] == 16


@pytest.mark.parametrize("op", SHARDED)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("machine", ["h100", "h200"])
def test_a_proposal_is_what_configured_makes_a_call_get(op, shape, machine):
    constants = load(machine)
    facts = Facts(op, *shape, "bf16", 2)
    (own, least), *others = space.proposals(facts, constants, "sm_90a", 132)
    assert own == Kernel()
    assert len(others) <= space.MOST_KERNELS
    for kernel, seconds in others:
        assert seconds <= (1 + space.MODEL_ERROR) * least
        with configured(algorithm=kernel.algorithm, **dict(kernel.fields)):
            config, time = space.expected(facts, constants, "sm_90a", 132)
        assert {name: getattr(config, name) for name, _ in kernel.fields} == dict(kernel.fields)
        assert time.total == pytest.approx(seconds)


@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
@pytest.mark.parametrize("machine", ["h100", "h200"])
def test_gathers_measure_divided_k_for_few_rows_and_wide_tiles_for_many(machine, dtype):
    """Checks that the model chooses a swapped kernel for few rows of a gather only if it joins shards."""
    constants, few = load(machine), Facts("all_gather_gemm", 64, 10240, 8192, dtype, 2)
    many = replace(few, m=8192)
    proposed = [dict(kernel.fields) for kernel, _ in space.proposals(few, constants, "sm_90a", 132)]
    assert any(kernel.get("k_split", 1) > 1 for kernel in proposed)
    config = space.expected(few, constants, "sm_90a", 132)[0]
    assert config.mma != "swap_ab" or (joins_shards(config, few.m, few.full_shard) and config.k_split == 1)
    tiles = [space.expected(many, constants, "sm_90a", 132)[0].tile]
    tiles += [dict(k.fields).get("tile") for k, _ in space.proposals(many, constants, "sm_90a", 132)]
    assert (128, 256) in tiles


def test_kernels_beyond_the_models_error_are_not_proposed():
    facts, constants = Facts("gemm_reduce_scatter", 8192, 8192, 28672, "bf16", 2), load("h100")
    with mock.patch.object(space, "MODEL_ERROR", 0.0):
        assert len(space.proposals(facts, constants, "sm_90a", 132)) == 1
    with mock.patch.object(space, "MOST_KERNELS", 1):
        assert len(space.proposals(facts, constants, "sm_90a", 132)) == 2


def test_backends_that_are_expected_to_be_far_slower_are_not_measured():
    few = on_hopper(shape=(16, 8192, 8192))
    with mock.patch.object(autotuning, "FARTHEST", 0.0):
        names = [candidate.name for candidate in candidates(few)]
    assert [name for name in names if not name.startswith("fused")] == ["torch"]


def test_only_backends_that_keep_a_promise_are_measured():
    names = {candidate.name for candidate in candidates(on_hopper(deterministic=True))}
    assert "torch" not in names
    assert "sequential" in names


def test_where_ranks_do_not_reach_each_other_no_fused_kernel_is():
    apart = replace(HOPPER, why_not="not all ranks have P2P access to each other's memory")
    assert not any(c.backend.name == "fused" for c in candidates(on_hopper(peer_access=apart)))


def test_what_fused_kernels_do_not_take_is_left_to_the_others():
    names = {candidate.name for candidate in candidates(on_hopper(dtype=torch.float32))}
    assert "torch" in names
    assert not any(name.startswith("fused") for name in names)


@pytest.mark.parametrize(
    ("peer_access", "policy"),
    [
        (HOPPER, "model"),
        (replace(HOPPER, uncalibrated="nobody has measured"), "measure"),
        (replace(HOPPER, uncalibrated="nobody has measured", why_not="apart"), "model"),
        (None, "model"),
    ],
)
def test_by_default_kinds_are_measured_on_gpus_without_constants(peer_access, policy):
    assert policy_of(on_hopper(peer_access=peer_access), GroupMeasurements({}, None, 0)) == policy
    assert policy_of(on_hopper(peer_access=peer_access), GroupMeasurements({}, "model", 0)) == "model"
    with (known := GroupMeasurements({}, "model", 0)).with_policy("measure"):
        assert policy_of(on_hopper(peer_access=peer_access), known) == "measure"


def measured(eager, graph, kernel) -> Measured:
    return Measured(tuple(eager), tuple(graph), kernel, 2, "2026-11-25")


def test_a_measurement_stands_above_the_model_and_above_missing_constants():
    kernel = Kernel((("mma", "cooperative"), ("tile", (128, 256))))
    found = measured([("torch", 1e-4), ("fused", 2e-4)], [("fused", 1e-4), ("torch", 1.5e-4)], kernel)
    asked = on_hopper(peer_access=replace(HOPPER, uncalibrated="nobody has measured"))
    asked = replace(asked, measurements={asked.kind: found})
    with mock.patch.object(Fused, "why_not", return_value=None):
        eager, graph = choose(asked), choose(replace(asked, captured=True))
        assert (eager.backend.name, graph.backend.name) == ("torch", "fused")
        assert (eager.kernel, graph.kernel) == (Kernel(), kernel)
        assert choose(asked, "fused").kernel == kernel  # also where it is asked for
        assert "fused by cooperative 128x256" in str(graph)
        assert "[100 us measured]" in str(graph)
    with mock.patch.object(Fused, "why_not", return_value="not here"):  # as of a kept operand
        assert choose(replace(asked, captured=True)).backend.name == "torch"
    assert changed(asked, rows=asked.m + 1).measured is None


def test_a_kernel_takes_the_models_place_if_it_is_clearly_faster():
    own, other = Candidate(Fused()), Candidate(Fused(), Kernel((("tile", (128, 256)),)))
    assert autotuning._fastest({own: 1.0, other: 0.995}) == Kernel()
    assert autotuning._fastest({own: 1.0, other: 0.98}) == other.kernel
    assert autotuning._fastest({other: 1.0}) == other.kernel
    assert autotuning._fastest({}) == Kernel()


@pytest.mark.parametrize("op", SHARDED)
def test_a_measured_kernel_is_the_one_that_runs(op):
    fields = (("mma", "cooperative"), ("tile", (128, 256)), ("cluster", (2, 1)), ("k_split", 1))
    taken = []

    def compiled(executor, config, *_, **__):
        taken.append(config)
        return lambda *_: None

    problem = problem_of(op, 512, 512, 512, chunk=256)
    names = [
        "overlap_gemm.backends.fused.gather_plans.compiled_gather",
        "overlap_gemm.backends.fused.plan_cache.compiled_kernel",
    ]
    with (
        mock.patch(names[0], compiled),
        mock.patch(names[1], compiled),
        Emulator("sm_90a", 2) as emulator,
        VirtualWorld(2, emulator=emulator) as world,
    ):
        for rank, name in enumerate(world.names):
            group, own = resolve(name), Shards.owned_by(2, rank)
            shapes = OPS[op].shapes(512, 512, 512, own)
            x, weight = (torch.ones(shape, dtype=torch.bfloat16) for shape in shapes)
            lists = OPS[op].gathers_operand
            given = (
                problem,
                CallOperands(x, [weight] if lists else weight),
                Shards.even(512, 2),
                group,
            )
            bind_as(Kernel(fields), Fused(), *given)
    assert len(taken) == 2
    assert all(getattr(config, name) == value for config in taken for name, value in fields)
