"""GEMM all-to-all, fused, through the public op on virtual ranks, alone and between other ops."""

import pytest
import torch

import overlap_gemm
from cute_emulator import mutate
from overlap_gemm.testing.cases import Case
from overlap_gemm.testing.emulated import judge, poisoned_allocations, run_launches
from tests.support.chosen import in_turn
from tests.support.emulated.mutated_words import FLAGS_AND_WAITS, REASONS, TWO_CALLS
from tests.support.emulated.op_runs import LARGER, SMALL, lagging, name, run, world_of
from tests.support.emulated.scaled_cases import Scaled, queue
from tests.support.emulated.sequences import ARCHS, Call, run_sequence

OP = "gemm_all_to_all"
both = pytest.mark.parametrize("arch", SMALL)


@pytest.mark.parametrize(("ranks", "arch"), in_turn([1, 4], SMALL))
def test_every_world(arch, ranks):
    """Rows are uneven; they and an owner's columns are no multiples of a tile, nor K of a stage."""
    run(OP, arch, ranks, (201, 136 * ranks, 72))


@pytest.mark.slow
@both
def test_eight_ranks_of_few_rows_by_words(arch):
    run(OP, arch, 8, (15, 8 * 72, 64), launches=2, transport="ll")


@pytest.mark.parametrize(
    "kind",
    [LARGER[1], *(pytest.param(k, marks=pytest.mark.slow) for k in LARGER[::2])],
    ids=lambda k: name(k),
)
def test_larger_tiles_and_clusters(kind):
    arch, fields = kind
    run(OP, arch, 2, (300, 2 * 264, 72), fields, mode="random", seed=1)


@pytest.mark.parametrize(("mode", "arch"), in_turn(["lazy"], SMALL))
def test_whenever_asynchronous_operations_complete(arch, mode):
    run(OP, arch, 2, (200, 272, 72), mode=mode, seed=1, launches=2, num_sms=2)


@pytest.mark.parametrize(("slow_rank", "transport", "arch"), in_turn([(0, "peer_bulk"), (2, "ll")], SMALL))
def test_a_rank_that_lags_behind(arch, slow_rank, transport):
    run(
        OP, arch, 3, (130, 3 * 64, 64),
        launches=5, schedule=lagging(slow_rank), num_sms=1, transport=transport,
    )  # fmt: skip


@pytest.mark.parametrize(("starved", "arch"), in_turn([2], ARCHS))
def test_between_other_ops_on_the_same_workspaces(arch, starved):
    """Reuses buffers around a call of one row, in which ranks 1 and 2 shard nothing."""
    ops = ("gemm_reduce_scatter", None), ("gemm_all_reduce", "two_shot"), ("gemm_all_gather", None)
    others = [Call(130, 192, op, how) for op, how in ops]
    call = Call(200, 192, OP)
    run_sequence(
        arch, 3, [call, Call(1, 64), call, *others, call, Call(5, 24, OP), *others[:1]], starved=starved
    )


@pytest.mark.slow
@both
def test_by_puts(arch):
    run(OP, arch, 2, (70, 2 * 72, 72), launches=2, transport="nvshmem")


def calls_of(world, x, weight, **options):
    """Calls the op on every virtual rank."""
    with poisoned_allocations():
        return [
            overlap_gemm.gemm_all_to_all(
                shard, weight, group=group, rows=len(x), backend="fused", deterministic=False, **options
            )
            for shard, group in zip(x.chunk(len(world.names)), world.names, strict=True)
        ]


def test_heads_of_a_batch_with_several_weights():
    """Projects to queries and half as many keys, of heads with 72 columns, in [s, b, h, d]."""
    torch.manual_seed(0)
    x = torch.randn(50, 2, 72).bfloat16()
    weights = [torch.randn(heads * 72, 72).bfloat16() for heads in (4, 2)]
    with world_of("sm_90a", 2) as world:
        outs = calls_of(world, x, weights)
        world.synchronize()
    for i, weight in enumerate(weights):
        exact = x.double() @ weight.double().t()
        made = torch.cat([of_rank[i].double() for of_rank in outs], -1)
        assert made.shape == exact.shape
        assert ((made - exact).abs() <= 2**-8 * exact.abs() + 1e-4).all()


def test_few_heads_are_replicated_and_no_head_is_cut():
    """Compares one head of 72 columns on both ranks, and three of 40, of which the first rank has two."""
    torch.manual_seed(0)
    x, weights = torch.randn(50, 72).bfloat16(), [torch.randn(n, 72).bfloat16() for n in (72, 120)]
    with world_of("sm_90a", 2) as world:
        outs = calls_of(world, x, weights, heads=[1, 3])
        world.synchronize()
    columns = (slice(0, 72), slice(0, 80)), (slice(0, 72), slice(80, 120))
    for of_rank, of_each in zip(outs, columns, strict=True):
        for out, weight, of in zip(of_rank, weights, of_each, strict=True):
            exact = (x.double() @ weight.double().t())[:, of]
            assert out.shape == exact.shape
            assert ((out.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-4).all()


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "reason"),
    [
        (32, 24, torch.bfloat16, "12 columns a rank, which must be a multiple of 8"),
        (1, 32, torch.bfloat16, "1 rows or columns in shards of 1 leave some of the ranks without any"),
        (32, 32, torch.float32, "not torch.float32"),
    ],
)
def test_what_it_does_not_take_is_named(rows, columns, dtype, reason):
    x, weight = torch.randn(rows, 16, dtype=dtype).chunk(2)[0], torch.randn(columns, 16, dtype=dtype)
    with world_of("sm_100a", 2) as world, pytest.raises(ValueError, match=reason):
        overlap_gemm.gemm_all_to_all(x, weight, group=world.names[0], rows=rows, backend="fused")


def test_columns_that_do_not_begin_with_a_block_of_scales_are_refused():
    """Checks a width for which a kernel would read the scales of the block before."""
    case = Scaled(OP, 32, 2 * 136, 128, blocks=128)
    with world_of("sm_90a", 2) as world, pytest.raises(ValueError, match="136 columns a rank, .* of 128: a"):
        queue(case, world)


def two_calls(options):
    """Checks two calls of two ranks, one CTA each, for `mutate.run`."""
    case = Case(OP, 128, 256, 64, torch.bfloat16)
    with world_of("sm_90a", 2, num_sms=1, **options) as world:
        for tensors, outs in run_launches(case, world, 2):
            assert judge(case, tensors, outs, torch.bfloat16).holds


@pytest.mark.slow
def test_every_weakened_flag_and_bulk_wait_shows():
    tried = [mutate.Setting("lazy", 0), mutate.Setting("immediate"), mutate.Setting("lazy", 1)]
    outcomes = mutate.run(two_calls, tried, select=FLAGS_AND_WAITS, reasons=REASONS | TWO_CALLS)
    print(*outcomes, sep="\n")
    assert outcomes
    assert [str(o) for o in outcomes if o.verdict == "NOT DETECTED"] == []
