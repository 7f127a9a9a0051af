"""Epilogues in fused calls of all four ops, on virtual ranks: ragged rows, a lagging rank, mutations."""

from contextlib import suppress

import pytest
import torch

import overlap_gemm
from cute_emulator import EmulatorError
from overlap_gemm import epilogue, epilogues
from overlap_gemm.backends.epilogues import Applying
from overlap_gemm.backends.fused import compiled
from overlap_gemm.dispatch import choosing
from overlap_gemm.exchange import complete_rows
from overlap_gemm.exchange.tile_exchange import PartialExchange
from overlap_gemm.kernel import epilogue as device
from overlap_gemm.kernel.epilogue import Visits
from overlap_gemm.runtime.compile_cache import CompileCache
from overlap_gemm.spec.sharding import Shards
from overlap_gemm.testing.emulated import poisoned_allocations
from tests.support.chosen import in_turn
from tests.support.emulated.epilogue_cases import AR, ARCHITECTURES, RS, STREAM, Called, gated, refuse, worst
from tests.support.emulated.op_runs import SMALL, lagging, world_of
from tests.support.ops import SHARDED


@pytest.mark.parametrize(("op", "one", "world", "arch"), in_turn(
    [(op, one) for op in SHARDED for one in (gated, STREAM) if one is gated or op == RS],
    (2, 3, 4), ARCHITECTURES,
), ids=lambda given: getattr(given, "name", str(given)))  # fmt: skip
def test_kernels_apply_epilogues(op, one, world, arch):
    """Twice on changing data, the second time with the counts that the first left, and never by torch."""
    with world_of(arch, world) as ranks:
        for seed in range(2):
            assert worst(Called(op, world, one, seed=seed, otherwise=refuse), ranks) <= 1


@pytest.mark.parametrize(("op", "one", "world", "arch"), [
    (RS, epilogues.to_e4m3, 2, "sm_90a"),
    pytest.param(AR, epilogues.to_e4m3, 3, "sm_100a", marks=pytest.mark.slow),
    ("all_gather_gemm", epilogues.swiglu_e4m3, 2, "sm_90a"),
], ids=lambda one: getattr(one, "name", str(one)))  # fmt: skip
def test_results_of_8_bits(op, one, world, arch):
    """Checks kernels of ragged rows; two weights where the function takes pairs."""
    sizes = (70, 192 * (world if one.pairs else 1), 72)
    order = "gate-first" if one.pairs else ""
    case = Called(op, world, one, sizes, otherwise=refuse, two_weights=order)
    with world_of(arch, world) as ranks:
        assert worst(case, ranks) <= 1
        outs = [case.call(rank, name) for rank, name in enumerate(ranks.names)]
        assert {out.dtype for out in outs} == {torch.float8_e4m3fn}
        ranks.synchronize()


@pytest.mark.parametrize(
    ("op", "world", "arch", "fields"),
    [
        ("gemm_all_to_all", 3, "sm_90a", {}),
        pytest.param("gemm_all_to_all", 2, "sm_100a", {}, marks=pytest.mark.slow),
        pytest.param("gemm_all_to_all", 2, "sm_90a", {"tile_transport": "ll"}, marks=pytest.mark.slow),
        pytest.param("all_to_all_gemm", 3, "sm_90a", {}, marks=pytest.mark.slow),
        ("all_to_all_gemm", 2, "sm_100a", {}),
    ],
)
def test_kernels_that_exchange_apply_epilogues_to_this_ranks_rows_and_columns(op, world, arch, fields):
    """Checks calls with a bias, of all columns, which is added where these are computed."""
    sizes = 70, 48 * world, 72 if op == "gemm_all_to_all" else 72 * world
    with world_of(arch, world, {**SMALL[arch], **fields}, mode="random") as ranks:
        assert worst(Called(op, world, gated, sizes, has_bias=True), ranks) <= 1


@pytest.mark.parametrize(("world", "arch"), in_turn([1, 3], ARCHITECTURES))
def test_pairs_of_columns_are_made_in_the_all_gather_gemm(world, arch):
    with world_of(arch, world) as ranks:
        case = Called("all_gather_gemm", world, epilogues.swiglu, (70, 192 * world, 72))
        assert worst(case, ranks) <= 1


@pytest.mark.parametrize(
    ("order", "world", "arch"), in_turn([("gate-first", 3), ("up-first", 2)], ARCHITECTURES)
)
def test_pairs_of_two_weights_that_lie_in_any_order(order, world, arch):
    with world_of(arch, world) as ranks:
        sizes = (70, 192 * world, 72)
        case = Called("all_gather_gemm", world, epilogues.geglu_tanh, sizes, 0, "cpu", refuse, order)
        assert worst(case, ranks) <= 1


@pytest.mark.parametrize("order", [(1, 0), pytest.param((0, 1), marks=pytest.mark.slow)])
def test_pairs_of_two_weights_with_biases_and_the_gathered_operand(order):
    x, *both = (torch.randn(shape).bfloat16() for shape in ((20, 72), (2, 64, 72)))
    gate, up = (both[0][i] for i in order)
    biases = [torch.randn(64).bfloat16() for _ in range(2)]
    with world_of("sm_90a", 1) as ranks:
        out, gathered = overlap_gemm.all_gather_gemm(
            x, [gate, up], bias=biases, group=ranks.names[0], backend="fused", return_gathered=True,
            columns=128, epilogue=epilogues.swiglu(),
        )  # fmt: skip
        ranks.synchronize()
    wide = [x.double() @ w.double().t() + b.double() for w, b in zip((gate, up), biases, strict=True)]
    expected = torch.nn.functional.silu(wide[0]) * wide[1]
    torch.testing.assert_close(out.double(), expected, rtol=2**-7, atol=1e-3)
    assert torch.equal(gathered, x)


@pytest.mark.parametrize("widths", [(64, 64), (64, 40), pytest.param((40, 96), marks=pytest.mark.slow)])
def test_a_rank_that_knows_its_own_weights_alone_makes_pairs_of_them(widths, monkeypatch):
    """Checks calls without `columns=`: each rank decides for itself, since the exchange is the same."""
    monkeypatch.setattr(choosing, "_refuse_virtual", lambda *_: None)  # what torch returns is not compared
    seen, after = [], Applying.on_sums
    monkeypatch.setattr(Applying, "on_sums", lambda *call: seen.append(call[1][0].shape[1]) or after(*call))
    x = torch.randn(20, 72).bfloat16()
    both = [torch.randn(2, width, 72).bfloat16() for width in widths]
    with world_of("sm_90a", 2) as ranks:
        outs = [
            overlap_gemm.all_gather_gemm(
                one, list(weights), group=name, backend="fused", epilogue=epilogues.swiglu()
            )
            for one, weights, name in zip(x.chunk(2), both, ranks.names, strict=True)
        ]
        ranks.synchronize()
    for out, (gate, up) in zip(outs, both, strict=True):
        if len(gate) % 32:
            continue
        wide = [x.double() @ weight.double().t() for weight in (gate, up)]
        expected = torch.nn.functional.silu(wide[0]) * wide[1]
        torch.testing.assert_close(out.double(), expected, rtol=2**-7, atol=1e-3)
    assert seen == [width for width in widths if width % 32]


@epilogue(inputs={"row": "rows", "shift": "element"}, of="partial")
def of_partial(x, row, shift):
    return epilogues.relu(x * row - shift)


@pytest.mark.parametrize(("world", "op"), [(1, RS), (2, AR), (3, RS)])
def test_epilogues_of_partial_sums_read_inputs_of_each_ranks_product(op, world):
    rows, columns, k = 70, 144, 72
    each = [
        [torch.randn(shape).bfloat16() for shape in ((rows, k), (columns, k), (rows,), (rows, columns))]
        for _ in range(world)
    ]
    with world_of("sm_90a", world) as ranks, poisoned_allocations():
        outs = [
            getattr(overlap_gemm, op)(
                x, w, group=name, backend="fused", epilogue=of_partial(row=row, shift=shift)
            )
            for (x, w, row, shift), name in zip(each, ranks.names, strict=True)
        ]
        ranks.synchronize()
    wide = [[one.double() for one in tensors] for tensors in each]
    parts = [torch.relu(x @ w.t() * row[:, None] - shift) for x, w, row, shift in wide]
    total, bound = sum(parts), 2**-7 * sum(part.abs() for part in parts) + 1e-2
    for rank, out in enumerate(outs):
        local = slice(*Shards.even(rows, world).range(rank)) if op == RS else slice(None)
        assert ((out.double() - total[local]).abs() <= bound[local]).all()


@pytest.mark.parametrize("op", SHARDED)
def test_one_rank_alone(op):
    with world_of("sm_90a", 1) as ranks:
        assert worst(Called(op, 1, gated), ranks) <= 1


@pytest.mark.parametrize(("op", "late"), in_turn([RS, AR], [0, 1]))
def test_row_statistics_wait_for_a_lagging_rank(op, late):
    with world_of("sm_90a", 2, mode="random", schedule=lagging(late)) as ranks:
        for seed in range(3):
            assert worst(Called(op, 2, STREAM, seed=seed), ranks) <= 1


def test_row_statistics_are_bitwise_the_same_whoever_is_last():
    found = []
    for seed in range(3):
        with world_of("sm_90a", 2, mode="random", seed=seed) as ranks:
            case = Called(RS, 2, STREAM, (70, 400, 72))
            outs = [case.call(rank, name) for rank, name in enumerate(ranks.names)]
            ranks.synchronize()
            found.append([one for out in outs for one in out])
    assert all(
        torch.equal(one, other) for others in found for one, other in zip(found[0], others, strict=True)
    )


def test_more_rows_than_owners_and_no_rows_at_all():
    with world_of("sm_90a", 4) as ranks:
        assert worst(Called(RS, 4, STREAM, (5, 144, 72)), ranks) <= 1


def test_all_reduces_of_many_rows_read_their_own_rows():
    """In two shots: each owner of columns reads its part of every input."""
    with world_of("sm_90a", 2, algorithm="two_shot") as ranks:
        assert worst(Called(AR, 2, gated, (200, 144, 72)), ranks) <= 1


def statistics_of_the_next_row(patch):
    store = Visits.store_row_parts
    patch.setattr(Visits, "store_row_parts", lambda self, parts, row, *others: store(
        self, parts, row ^ 1, *others
    ))  # fmt: skip


def residual_added_by_every_rank(patch):
    both = property(lambda op: Visits(op.config, ("partial", "complete")))
    patch.setattr(PartialExchange, "visits", both)


def residual_of_the_next_row(patch):
    load = Visits.load_chunk
    patch.setattr(Visits, "load_chunk", lambda self, loaded, row, *others: load(
        self, loaded, row ^ 1, *others
    ))  # fmt: skip


def norm_before_the_last_part(patch):
    """Waits for half the units: a warp counts all of its own at once, so one unit less may be no less."""
    wait = complete_rows.await_units
    patch.setattr(complete_rows, "await_units", lambda word, units, *others: wait(word, units // 2, *others))


def parts_of_other_chunks(patch):
    reduce = device.reduced_by_lanes
    patch.setattr(device, "reduced_by_lanes", lambda kind, values, width: reduce(kind, values[::-1], width))


MUTANTS = {
    statistics_of_the_next_row: STREAM, residual_added_by_every_rank: epilogues.add_residual,
    residual_of_the_next_row: STREAM, norm_before_the_last_part: STREAM, parts_of_other_chunks: STREAM,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutations_are_noticed(mutant, monkeypatch):
    """By the values, or by the emulator: what is read out of bounds, or too early."""
    mutant(monkeypatch)
    monkeypatch.setattr(compiled, "_cache", lambda on_disk: CompileCache(folder=None))
    with world_of("sm_90a", 2, mode="random", schedule=lagging(1)) as ranks, suppress(EmulatorError):
        assert worst(Called(RS, 2, MUTANTS[mutant], (70, 400, 72)), ranks) > 1  # several CTAs


def test_what_torch_would_apply_after_a_virtual_ranks_kernel_is_refused():
    # The kernel runs at `synchronize`: torch would read memory that nothing has written.
    with world_of("sm_90a", 2) as ranks:
        x, weight = torch.ones(8, 64).bfloat16(), torch.ones(16, 64).bfloat16()
        for name in ranks.names:
            squared = STREAM(residual=torch.ones(16, 8).bfloat16())
            with pytest.raises(
                ValueError, match="virtual rank.*cannot apply the epilogue .*squared after it"
            ):
                overlap_gemm.gemm_all_to_all(
                    x, weight, group=name, backend="fused", rows="equal", epilogue=squared
                )
