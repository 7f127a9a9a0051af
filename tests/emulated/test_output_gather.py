"""GEMM all-gather, fused, through the public op on virtual ranks."""

import pytest
import torch

import overlap_gemm
from overlap_gemm.backends.fused.fused_backend import Fused
from overlap_gemm.backends.op_call import CallOperands
from overlap_gemm.backends.scales.product_types import ProductTypes
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.spec import GEMM_ALL_GATHER
from overlap_gemm.spec.sharding import Shards
from overlap_gemm.testing.cases import Case, operands
from overlap_gemm.testing.emulated import judge, poisoned_allocations
from overlap_gemm.tuning.settings import configured
from tests.support.chosen import in_turn
from tests.support.emulated.op_runs import LARGER, SMALL, lagging, name, run, world_of

OP = "gemm_all_gather"
both = pytest.mark.parametrize("arch", SMALL)


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
@pytest.mark.parametrize("ranks", [3, *(pytest.param(p, marks=pytest.mark.slow) for p in (1, 2, 4))])
def test_every_world(arch, ranks):
    """M and n are no multiples of a tile, nor K of a stage."""
    run(OP, arch, ranks, (200, 136 * ranks, 72))


@pytest.mark.slow
@both
@pytest.mark.parametrize("rows", [1, 5, 130])
def test_eight_ranks(arch, rows):
    run(OP, arch, 8, (rows, 8 * 72, 64), launches=2)


@pytest.mark.slow
@both
def test_fewer_rows_than_ranks(arch):
    run(OP, arch, 3, (2, 3 * 64, 40), launches=2)


@pytest.mark.parametrize(
    "kind", [LARGER[0], *(pytest.param(k, marks=pytest.mark.slow) for k in LARGER[1:])], ids=lambda k: name(k)
)
def test_larger_tiles_and_clusters(kind):
    arch, fields = kind
    run(OP, arch, 2, (300, 2 * 264, 72), fields, mode="random", seed=1)


@both
@pytest.mark.slow
@pytest.mark.parametrize("slot", ["same", "f32"])
def test_f16_without_bias(arch, slot):
    """A type of slots that is asked for is that of partial sums, of which there are none here."""
    fields = {**SMALL[arch], **({"slot_dtype": "f32"} if slot == "f32" else {})}
    run(OP, arch, 2, (70, 2 * 72, 72), fields, dtype=torch.float16, bias=False)


@pytest.mark.parametrize(("mode", "arch"), in_turn(["lazy"], SMALL))
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_whenever_asynchronous_operations_complete(arch, mode, seed):
    run(OP, arch, 2, (200, 272, 72), mode=mode, seed=seed, launches=2, num_sms=1 + seed)


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
@pytest.mark.parametrize("slow_rank", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_rank_that_lags_behind(arch, slow_rank):
    run(OP, arch, 3, (130, 3 * 64, 64), launches=6, schedule=lagging(slow_rank), num_sms=1)


@pytest.mark.slow
@both
@pytest.mark.parametrize("mode", ["immediate", "random", "lazy"])
def test_fifty_launches_with_a_rank_that_lags_behind(arch, mode):
    run(OP, arch, 2, (130, 128, 64), launches=50, schedule=lagging(1), mode=mode, num_sms=1)


# --- shards of any size: what torch.chunk cuts for more ranks than one emulates often ---


def with_shards(world: VirtualWorld, case, chunk):
    """The op of the backend, with `chunk` columns in a full shard."""
    ranks = len(world.ranks)
    shards, given = Shards(case.n, ranks, chunk), operands(case)
    outs = []
    with poisoned_allocations():
        for rank, group in enumerate(world.ranks):
            own = slice(*shards.range(rank))
            types, passed = ProductTypes(given.x.dtype), (given.x, given.weight[own], given.bias[own])
            outs.append(Fused().call(GEMM_ALL_GATHER, types, CallOperands(*passed), shards, group))
    return given, outs


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("ranks", "columns", "chunk"), [(3, 72, 64), pytest.param(3, 208, 136, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("transport", [None, pytest.param("nvshmem", marks=pytest.mark.slow)])
def test_short_and_empty_shards(arch, ranks, columns, chunk, transport):
    """(64, 8, none) and (136, 72, none) columns: the empty ones still receive."""
    case = Case(OP, 200, columns, 72, torch.bfloat16)
    with configured(transport=transport), world_of(arch, ranks, mode="random") as world:
        launched = [with_shards(world, case.with_seed(seed), chunk) for seed in range(3)]
        world.synchronize()
    verdicts = [judge(case, given, outs, case.dtype) for given, outs in launched]
    assert all(verdict.holds for verdict in verdicts), verdicts


@pytest.mark.slow
@both
def test_ten_ranks_of_which_the_last_has_no_columns(arch):
    """72 columns: `torch.chunk` cuts nine eights."""
    run(OP, arch, 10, (40, 72, 64), launches=2)


@pytest.mark.parametrize(("rows", "columns", "depth"), [(0, 64, 8), (3, 16, 0)])
def test_empty_extents(rows, columns, depth):
    x, weight = torch.randn(rows, depth).bfloat16(), torch.randn(columns // 2, depth).bfloat16()
    with world_of("sm_100a", 2) as world, poisoned_allocations():
        outs = [
            overlap_gemm.gemm_all_gather(x, weight, group=group, columns=columns, backend="fused")
            for group in world.names
        ]
        world.synchronize()
    for out in outs:
        assert out.shape == (rows, columns)
        assert not out.any()


@pytest.mark.parametrize(
    ("columns", "dtype", "reason"),
    [
        (24, torch.bfloat16, "12 columns a rank, which must be a multiple of 8"),
        (30, torch.bfloat16, "N=30 must be a multiple of 8"),
        (32, torch.float32, "not torch.float32"),
    ],
)
def test_what_it_does_not_take_is_named(columns, dtype, reason):
    x, weight = torch.randn(4, 16, dtype=dtype), torch.randn(columns // 2, 16, dtype=dtype)
    with world_of("sm_100a", 2) as world, pytest.raises(ValueError, match=reason):
        overlap_gemm.gemm_all_gather(x, weight, group=world.names[0], columns=columns, backend="fused")
