"""8-bit operands with scales through the public ops, on virtual ranks: fused kernels against float64."""

from dataclasses import replace

import pytest
import torch

import overlap_gemm
from overlap_gemm.backends.scales.scale_layouts import ScaleVectors
from overlap_gemm.config.visitors import Visitor
from overlap_gemm.gather import all_gather
from overlap_gemm.gather.all_gather import ArrivalGate
from overlap_gemm.kernel import epilogue
from overlap_gemm.kernel.fused_gemm import FusedGemm
from overlap_gemm.testing.emulated import poisoned_allocations
from overlap_gemm.tuning.settings import configured
from tests.support.chosen import in_turn
from tests.support.emulated.flag_order import with_flags_before_scales
from tests.support.emulated.op_runs import SMALL, lagging, world_of
from tests.support.emulated.scaled_cases import (
    A2A,
    AG,
    AR,
    DUAL,
    E4M3,
    E5M2,
    GATHER,
    RS,
    Scaled,
    check,
    gathers_hold,
    of_rank,
    queue,
    share_of_bound,
)


@pytest.mark.parametrize(
    ("arch", "ranks", "case"),
    [
        ("sm_90a", 3, Scaled(RS, 130, 136, 432)),
        ("sm_90a", 2, Scaled(AR, 70, 72, 160, E5M2, torch.float16, bias=False)),
        ("sm_90a", 4, Scaled(AG, 40, 128, 144)),
        ("sm_100a", 3, Scaled(RS, 100, 72, 240)),
        pytest.param("sm_90a", 1, Scaled(RS, 66, 24, 48), marks=pytest.mark.slow),
        ("sm_90a", 3, Scaled(GATHER, 130, 72, 144)),
        ("sm_100a", 2, Scaled(GATHER, 130, 40, 48)),
        pytest.param("sm_90a", 2, Scaled(RS, 70, 72, 96, E5M2, weight=E4M3), marks=pytest.mark.slow),
        pytest.param("sm_90a", 2, Scaled(GATHER, 70, 72, 48, E4M3, weight=E5M2), marks=pytest.mark.slow),
        pytest.param("sm_90a", 2, Scaled(A2A, 101, 2 * 72, 144), marks=pytest.mark.slow),
        pytest.param("sm_100a", 3, Scaled(A2A, 100, 3 * 72, 240), marks=pytest.mark.slow),
        ("sm_100a", 2, Scaled(AR, 70, 72, 96, E5M2, weight=E4M3)),
        ("sm_90a", 3, Scaled(RS, 70, 72, 3 * 145 - 1)),  # rank 2 has another K, padded as far
        pytest.param("sm_90a", 2, Scaled(AR, 20, 72, 2 * 17, E5M2), marks=pytest.mark.slow),
        pytest.param("sm_90a", 2, Scaled(AG, 40, 48, 45), marks=pytest.mark.slow),
        pytest.param("sm_90a", 3, Scaled(GATHER, 40, 72, 145), marks=pytest.mark.slow),
        pytest.param("sm_90a", 1, Scaled(RS, 66, 24, 33), marks=pytest.mark.slow),
        pytest.param("sm_100a", 2, Scaled(GATHER, 40, 72, 1), marks=pytest.mark.slow),
        pytest.param("sm_90a", 1, Scaled(GATHER, 66, 20, 33), marks=pytest.mark.slow),
        pytest.param("sm_100a", 2, Scaled(RS, 70, 72, 2 * 33), marks=pytest.mark.slow),
        pytest.param("sm_100a", 3, Scaled(GATHER, 70, 72, 48, E4M3, weight=E5M2), marks=pytest.mark.slow),
        pytest.param("sm_90a", 1, Scaled(GATHER, 66, 20, 48), marks=pytest.mark.slow),
        pytest.param("sm_90a", 4, Scaled(GATHER, 3, 100, 48, E5M2), marks=pytest.mark.slow),
        pytest.param("sm_100a", 3, Scaled(GATHER, 300, 96, 272), marks=pytest.mark.slow),
        pytest.param("sm_100a", 4, Scaled(AR, 129, 64, 192), marks=pytest.mark.slow),
        pytest.param("sm_100a", 2, Scaled(AG, 129, 144, 144), marks=pytest.mark.slow),
    ],
    ids=lambda given: f"{given.op}-{given.m}" if isinstance(given, Scaled) else str(given),
)
def test_every_partial_has_its_own_ranks_scales(arch, ranks, case):
    with world_of(arch, ranks, mode="random") as world:
        for tensorwise in (False, True):
            check(replace(case, tensorwise=tensorwise, seed=int(tensorwise)), world)


@pytest.mark.parametrize(
    ("ranks", "case"),
    [
        (3, Scaled(RS, 130, 136, 3 * 272, blocks=128)),
        pytest.param(3, Scaled(GATHER, 130, 3 * 128, 272, blocks=128), marks=pytest.mark.slow),
        pytest.param(3, Scaled(RS, 70, 136, 3 * 144, blocks=32), marks=pytest.mark.slow),
        (2, Scaled(GATHER, 70, 2 * 160, 144, E5M2, blocks=32)),
        (2, Scaled(AR, 70, 264, 2 * 144, E5M2, torch.float16, bias=False, blocks=128)),
        (2, Scaled(A2A, 101, 2 * 128, 272, blocks=128)),
        pytest.param(2, Scaled(RS, 70, 136, 2 * 270 - 1, blocks=128), marks=pytest.mark.slow),
        pytest.param(2, Scaled(GATHER, 70, 2 * 128, 259, blocks=128), marks=pytest.mark.slow),
        pytest.param(2, Scaled(GATHER, 70, 2 * 32, 145, blocks=32), marks=pytest.mark.slow),
        pytest.param(2, Scaled(AG, 40, 2 * 128, 257, blocks=128), marks=pytest.mark.slow),
        pytest.param(2, Scaled(RS, 70, 136, 2 * 272, E5M2, blocks=128, weight=E4M3), marks=pytest.mark.slow),
        pytest.param(2, Scaled(AG, 40, 256, 400, blocks=128), marks=pytest.mark.slow),
        pytest.param(1, Scaled(RS, 66, 24, 272, blocks=128), marks=pytest.mark.slow),
    ],
    ids=lambda given: f"{given.op}-{given.m}" if isinstance(given, Scaled) else str(given),
)
def test_scales_of_blocks(ranks, case):
    """Calls of blocks, then of rows, on the same workspaces; the last rank lags."""
    cases = [case, replace(case, blocks=0, seed=1), replace(case, seed=2)]
    fields = {"mma": "cooperative", "tile": (128, 128), "cluster": (1, 1)}
    with world_of("sm_90a", ranks, fields, mode="random", schedule=lagging(ranks - 1)) as world:
        queued = [queue(one, world) for one in cases]
        world.synchronize()
        for one, outs in zip(cases, queued, strict=True):
            assert share_of_bound(one, outs) <= 1
        for which in (3, 4) if case.op in (RS, GATHER, A2A) and ranks > 1 else ():
            spoil = lambda _, given, at=which: (*given[:at], given[at].roll(1, 1), *given[at + 1 :])  # noqa: E731
            changed = queue(case, world, spoil)
            world.synchronize()
            assert share_of_bound(case, changed) > 1


@pytest.mark.parametrize(
    ("ranks", "case", "transport"),
    [
        (3, Scaled(DUAL, 301, 136, 3 * 384, blocks=128), "peer_bulk"),
        pytest.param(
            2,
            Scaled(DUAL, 101, 72, 2 * 256, E5M2, torch.float16, bias=False, blocks=32),
            "copy_engine",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_parts_of_k_are_sent_with_their_scales_of_blocks(ranks, case, transport):
    """Queues calls with other scales, the last rank lagging; a scale of another place is noticed."""
    changes = [lambda _, operands: operands] * 2
    for which in (3, 4):
        changes.append(lambda _, args, at=which: (*args[:at], args[at].roll(1, 1), *args[at + 1 :]))
    with world_of("sm_90a", ranks, transport=transport, mode="lazy", schedule=lagging(ranks - 1)) as world:
        cases = [replace(case, seed=seed) for seed in range(len(changes))]
        queued = [queue(one, world, change) for one, change in zip(cases, changes, strict=True)]
        world.synchronize()
    shares = [share_of_bound(one, outs) for one, outs in zip(cases, queued, strict=True)]
    assert [share <= 1 for share in shares] == [True, True, False, False]


WIDE = [{"mma": "cooperative", "tile": (128, 256), "cluster": cluster} for cluster in ((2, 1), (1, 2))]


@pytest.mark.parametrize(
    ("ranks", "fields", "transport"),
    [
        pytest.param(2, WIDE[0], None, marks=pytest.mark.slow),
        (2, WIDE[1], "copy_engine"),
        pytest.param(4, WIDE[0], "copy_engine", marks=pytest.mark.slow),
    ],
)
def test_wide_tiles_of_a_gather_have_the_bits_of_narrow_ones(ranks, fields, transport):
    """Compares bits of ragged shards, columns and K: both kernels add the sums of k tiles in one order."""
    case = Scaled(GATHER, 140 * ranks - 3, 264 * ranks, 400, seed=ranks)
    results = []
    for one in (fields, SMALL["sm_90a"]):
        with world_of("sm_90a", ranks, one, transport=transport, mode="random") as world:
            results.append(queue(case, world))
            world.synchronize()
    assert share_of_bound(case, results[0]) <= 1
    assert all(torch.equal(*outs) for outs in zip(*results, strict=True))


def test_scales_of_blocks_that_no_kernel_has_are_refused_by_name():
    x, weight = (torch.ones(rows, 256).to(torch.float8_e4m3fn) for rows in (16, 136))
    scales = {"scale_x": torch.ones(16, 2), "scale_w": torch.ones(2, 2), "block": 128}
    words = "blocks of 128 x 128 are for kernels of sm_90a"
    with world_of("sm_100a", 2) as world, pytest.raises(ValueError, match=words):
        overlap_gemm.gemm_reduce_scatter(x, weight, group=world.names[0], backend="fused", **scales)


@pytest.fixture
def three():
    """Three ranks whose last one lags."""
    with world_of("sm_90a", 3, schedule=lagging(2)) as world:
        yield world


def test_bf16_and_fp8_calls_share_workspaces(three):
    """Queued together: rows on every rank, then on two, then bf16's; ranks run ahead of the last."""
    cases = [Scaled(RS, m, 72, 96, seed=m) for m in (70, 2, 40)]
    queued = []
    for case in cases:
        queued.append(queue(case, three))
        with poisoned_allocations():
            for name in three.names:
                plain = torch.ones(40, 32, dtype=torch.bfloat16), torch.ones(72, 32, dtype=torch.bfloat16)
                queued.append(
                    overlap_gemm.gemm_reduce_scatter(*plain, group=name, backend="fused", deterministic=False)
                )
    three.synchronize()
    for case, first in zip(cases, range(0, len(queued), 4), strict=True):
        assert share_of_bound(case, queued[first]) <= 1
        assert all((out == 96).all() for out in queued[first + 1 : first + 4])


@pytest.mark.parametrize(
    "transport", [None, *(pytest.param(t, marks=pytest.mark.slow) for t in ("copy_engine", "nvshmem"))]
)
def test_gathers_of_either_kind_share_a_buffer(transport):
    """Calls queued together; a rank that lags reads scales of a call that others have left behind."""
    with world_of("sm_90a", 3, transport=transport, schedule=lagging(2)) as world:
        queued = []
        for seed, m in enumerate((70, 2, 40)):
            case = Scaled(GATHER, m, 72, 96, seed=seed)
            queued.append((case, queue(case, world)))
            with poisoned_allocations():
                x, weight = (torch.full((rows, 32), 0.5, dtype=torch.bfloat16) for rows in (24, 8))
                plain = [
                    overlap_gemm.all_gather_gemm(x, weight, rows=72, group=name, backend="fused")
                    for name in world.names
                ]
            queued.append((None, plain))
        world.synchronize()
        for case, outs in queued:
            if case is None:
                assert all((out == 8).all() for out in outs)
            else:
                assert share_of_bound(case, outs) <= 1


@pytest.mark.parametrize("k", [45, pytest.param(48, marks=pytest.mark.slow)])
def test_gathered_rows_come_back_and_weights_share_a_gather(three, k):
    x, scale = torch.randn(30, k).to(torch.float8_e4m3fn), torch.rand(30, 1) + 0.5
    weights = [torch.randn(n, k).to(torch.float8_e4m3fn) for n in (16, 0)]
    scales = [torch.rand(1, 16) + 0.5, torch.ones(0, 1)]
    found = [
        overlap_gemm.all_gather_gemm(
            x[10 * r : 10 * r + 10], weights, scale_x=scale[10 * r : 10 * r + 10], scale_w=scales, rows=30,
            group=name, backend="fused", return_gathered=True,
        )
        for r, name in enumerate(three.names)
    ]  # fmt: skip
    three.synchronize()
    exact = (x.double() * scale) @ (weights[0].double().t() * scales[0])
    for (out, none), gathered in found:
        assert torch.equal(gathered.view(torch.uint8), x.view(torch.uint8)) and none.shape == (30, 0)
        assert (out.double() - exact).abs().max() <= 2**-8 * exact.abs().max() + 2**-7


SPOILED = {
    "no scale of x": lambda r, g: (*g[:3], torch.ones_like(g[3]), g[4]) if r == 1 else g,
    "no scale of the weight": lambda r, g: (*g[:4], torch.ones_like(g[4])) if r == 1 else g,
    "the next row's scale": lambda r, g: (*g[:3], g[3].roll(1, 0), g[4]) if r == 1 else g,
    "the next column's scale": lambda r, g: (*g[:4], g[4].roll(1, 0)) if r == 1 else g,
}


@pytest.mark.slow
@pytest.mark.parametrize(("way", "op"), in_turn(SPOILED, [RS, GATHER]))
def test_what_is_judged_notices(three, way, op):
    case = Scaled(op, 70, 72, 96, seed=7)
    outs = queue(case, three, SPOILED[way])
    three.synchronize()
    assert share_of_bound(case, outs) > 1


@pytest.mark.parametrize("which", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_shard_with_another_ranks_scales_is_noticed(three, which, monkeypatch):
    """As if scales were taken from the rank before."""
    case, name, loaded = Scaled(RS, 70, 136, 96, seed=9), ("of_a", "of_b")[which], []
    load = getattr(ScaleVectors, name)

    def late(*operands):
        loaded.append(load(*operands))
        return loaded[max(len(loaded) - 2, 0)]

    monkeypatch.setattr(ScaleVectors, name, late)
    outs = queue(case, three)
    three.synchronize()
    assert share_of_bound(case, outs) > 1


def without_a_scale(patch):
    patch.setattr(Visitor, "apply", lambda self, sums, inputs: sums[0] * inputs[0])


def with_the_next_rows(patch):
    elements = epilogue._elements
    patch.setattr(epilogue, "_elements", lambda operand, tensor, places, row, column: elements(
        operand, tensor, places, row + (operand.kind == "rows"), column
    ))  # fmt: skip


def with_the_next_shards(patch):
    rows = ArrivalGate.with_rows
    patch.setattr(ArrivalGate, "with_rows", lambda self, tile, *others: rows(
        self, tile._replace(owner=(tile.owner + 1) % others[-1].call.exchange.world), *others
    ))  # fmt: skip


def without_the_epilogue_as_a_reader(patch):
    patch.setattr(FusedGemm, "_epilogue_ends", False)
    patch.setattr(all_gather, "readers", lambda config, keep: 1 + keep * config.receive_warps)


@pytest.mark.slow
@pytest.mark.usefixtures("changed_kernels")
@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(without_a_scale, marks=pytest.mark.slow),
        with_the_next_rows,
        with_the_next_shards,
        with_flags_before_scales,
        without_the_epilogue_as_a_reader,
    ],
)
def test_what_is_taken_out_of_a_gather_is_missed(mistake, monkeypatch):
    mistake(monkeypatch)
    assert not gathers_hold()


def test_gathers_hold_with_nothing_taken_out():
    assert gathers_hold()


def test_scales_that_lie_anywhere(three):
    """[1, N], every second element of something, one element beside many, rows of several dimensions."""
    case = Scaled(RS, 70, 136, 96, seed=11)

    def apart(rank, given):
        x, weight, bias, scale_x, scale_w = given
        apart = scale_x.repeat(1, 2).reshape(-1, 1)[::2]
        assert not apart.is_contiguous()
        return x, weight, bias, apart, scale_w.t()

    outs = queue(case, three, apart)
    three.synchronize()
    assert share_of_bound(case, outs) <= 1
    x, weight, bias, scale_x, scale_w = zip(*(of_rank(case, rank, 3) for rank in range(3)), strict=True)
    deep = [
        overlap_gemm.gemm_reduce_scatter(
            x[r].view(2, 35, -1), weight[r], group=name, bias=bias[r], dim=1, backend="fused",
            scale_x=scale_x[r].view(2, 35, 1), scale_w=scale_w[r],
        )
        for r, name in enumerate(three.names)
    ]  # fmt: skip
    three.synchronize()
    flat = torch.cat(deep, 1).reshape(70, 136)
    assert share_of_bound(replace(case, op=AR), [flat]) == 0 or torch.equal(flat, torch.cat(outs))


def test_fast_accumulation_is_for_8_bit_operands(three):
    x = torch.ones(16, 32, dtype=torch.bfloat16)
    with configured(fast_accum=True), pytest.raises(ValueError, match="fast_accum is for 8-bit types"):
        overlap_gemm.gemm_reduce_scatter(x, x, group=three.names[0], backend="fused")


def test_weights_of_two_types_share_a_gather(three):
    x, scale = torch.randn(30, 48).to(E4M3), torch.rand(30, 1) + 0.5
    weights = [torch.randn(16, 48).to(dtype) for dtype in (E4M3, E5M2)]
    scales = [torch.rand(1, 16) + 0.5 for _ in weights]
    found = [
        overlap_gemm.all_gather_gemm(
            x[10 * r : 10 * r + 10], weights, scale_x=scale[10 * r : 10 * r + 10], scale_w=scales, rows=30,
            group=name, backend="fused",
        )
        for r, name in enumerate(three.names)
    ]  # fmt: skip
    three.synchronize()
    for outs in found:
        for out, weight, own in zip(outs, weights, scales, strict=True):
            exact = (x.double() * scale) @ (weight.double().t() * own)
            assert (out.double() - exact).abs().max() <= 2**-8 * exact.abs().max() + 2**-7


def test_an_empty_result_has_the_requested_type():
    x, weight = (torch.zeros(rows, 64).to(torch.float8_e4m3fn) for rows in (0, 64))
    scales = {"scale_x": torch.ones(0, 1), "scale_w": torch.ones(64, 1), "out_dtype": torch.float16}
    with world_of("sm_90a", 2) as world:
        out = overlap_gemm.gemm_reduce_scatter(x, weight, group=world.names[0], backend="fused", **scales)
    assert out.dtype == torch.float16 and out.shape == (0, 64)


def test_what_fused_kernels_have_not_is_refused_by_name(three):
    x, scale = torch.ones(16, 32).to(torch.float8_e4m3fn), torch.ones(())
    how = {"group": three.names[0], "backend": "fused", "scale_x": scale, "scale_w": scale}
    with pytest.raises(ValueError, match="give bfloat16 or float16, not torch.float32"):
        overlap_gemm.gemm_reduce_scatter(x, x, out_dtype=torch.float32, **how)
