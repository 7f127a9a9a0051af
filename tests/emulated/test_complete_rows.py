"""All-reduces with a norm in the kernel: sequences of calls, lagging ranks, special rows, mutations."""

from contextlib import suppress

import pytest
import torch

import overlap_gemm
from cute_emulator import EmulatorError
from overlap_gemm.backends.fused import compiled
from overlap_gemm.device.failure import Role
from overlap_gemm.epilogues import add_residual_rms_norm, add_residual_rms_norm_e4m3, epilogue
from overlap_gemm.exchange import complete_rows
from overlap_gemm.kernel.epilogue import RowVisit, Visits
from overlap_gemm.runtime.compile_cache import CompileCache
from overlap_gemm.runtime.failures import CommTimeoutError
from overlap_gemm.testing.emulated import poisoned_allocations
from tests.support.emulated.epilogue_cases import AR, Called, refuse, worst
from tests.support.emulated.op_runs import lagging, world_of

SWAPPED = {"mma": "swap_ab", "tile": (16, 64), "tile_transport": "ll"}
SHAPES = [(70, 144, 72), (1, 400, 72), (70, 144, 72), (128, 72, 136)]
"""Ragged rows and columns; sums of one part, and of more than a lane has in flight; one shape again."""


@pytest.mark.parametrize(
    ("arch", "world", "fields", "late"),
    [
        ("sm_90a", 2, None, 1),
        ("sm_90a", 4, SWAPPED, 0),
        ("sm_100a", 3, None, None),
        pytest.param("sm_90a", 8, SWAPPED, 7, marks=pytest.mark.slow),
    ],
)
def test_sequences_of_calls_of_different_shapes(arch, world, fields, late):
    """Checks that counts of rows are zeros again: each shape's plan keeps its own."""
    schedule = {} if late is None else {"schedule": lagging(late)}
    with world_of(arch, world, fields, mode="random", **schedule) as ranks:
        for seed, sizes in enumerate(SHAPES[: 3 if world > 3 else None]):
            case = Called(AR, world, add_residual_rms_norm, sizes, seed=seed, otherwise=refuse)
            assert worst(case, ranks) <= 1


def test_more_tiles_than_clusters_and_bits_that_depend_on_no_order():
    results = []
    for seed in range(2):
        with world_of("sm_90a", 2, SWAPPED, mode="random", seed=seed, num_sms=2) as ranks:
            case = Called(AR, 2, add_residual_rms_norm, (20, 1352, 72))
            outs = [case.call(rank, name) for rank, name in enumerate(ranks.names)]
            ranks.synchronize()
            assert case.worst(outs) <= 1
            results.append([one for out in outs for one in out])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_a_rank_that_never_calls_is_named_by_a_sum(monkeypatch):
    """Checks that the warps that wait for complete rows, whose limit is longer, are not the first."""
    monkeypatch.setenv("OVERLAP_GEMM_TIMEOUT", "0.001")
    with world_of("sm_90a", 2, SWAPPED, mode="random") as ranks:
        Called(AR, 2, add_residual_rms_norm, (20, 144, 72)).call(0, ranks.names[0])
        with pytest.raises(CommTimeoutError) as caught:
            ranks.synchronize()
    failure = caught.value.failure
    assert (failure.rank, failure.source) == (0, 1)
    assert failure.role in (Role.RECEIVE_PARTIAL, Role.CALL_ENTERED)


def test_rows_of_zeros_and_rows_with_a_nan_are_those_of_torch():
    torch.manual_seed(0)
    x, weight = torch.randn(2, 20, 72).bfloat16(), torch.randn(2, 144, 72).bfloat16()
    residual, gamma = torch.randn(20, 144).bfloat16(), torch.randn(144).bfloat16()
    x[:, :2], residual[:2] = 0, 0
    residual[4, 143], residual[5, 0] = torch.nan, torch.inf
    applied = add_residual_rms_norm(residual=residual, weight=gamma, eps=torch.tensor([1e-6]))
    with world_of("sm_90a", 2, SWAPPED) as ranks:
        outs = [
            overlap_gemm.gemm_all_reduce(*each, group=name, backend="fused", epilogue=applied)
            for *each, name in zip(x, weight, ranks.names, strict=True)
        ]
        ranks.synchronize()
    for normed, stream in outs:
        expected = torch.nn.functional.rms_norm(stream.float(), (144,), gamma.float(), 1e-6)
        torch.testing.assert_close(normed.float(), expected, rtol=2**-7, atol=2**-9, equal_nan=True)
        assert (normed[:2] == 0).all()
        assert normed[4].isnan().all()
        assert normed[5].isnan().sum() == 1, "infinity times zero; the others are divided by infinity"


def scaled(stream, largest, total, gain, shift):
    return stream / largest * gain + (total + shift)


@epilogue(
    inputs={"residual": "element", "gain": "rows", "shift": "scalar"},
    outputs={"largest": "row_max", "total": "row_sum"},
    then=scaled,
)
def scaled_by_the_largest(x, residual, shift):
    stream = x + residual
    return stream, abs(stream), stream * shift


def test_a_function_of_rows_takes_several_values_and_inputs_of_every_kind():
    """Checks an input that both functions take; the row's input is of a type of its own."""
    torch.manual_seed(0)
    x, weight = torch.randn(2, 20, 72).bfloat16(), torch.randn(2, 144, 72).bfloat16()
    residual, gain, shift = torch.randn(20, 144).bfloat16(), torch.randn(20), torch.tensor([0.5])
    applied = scaled_by_the_largest(residual=residual, gain=gain, shift=shift)
    with world_of("sm_100a", 2) as ranks:
        outs = [
            overlap_gemm.gemm_all_reduce(*each, group=name, backend="fused", epilogue=applied)
            for *each, name in zip(x, weight, ranks.names, strict=True)
        ]
        ranks.synchronize()
    for result, stream in outs:
        wide = stream.double()
        total = (wide * 0.5).sum(1, keepdim=True) + 0.5
        expected = wide / wide.abs().amax(1, keepdim=True) * gain.double()[:, None] + total
        roundings = 2**-10 * wide.abs().sum(1, keepdim=True)  # of the values in the sum
        assert ((result.double() - expected).abs() <= 2**-7 * expected.abs() + roundings).all()


@pytest.mark.parametrize(("arch", "world", "fields"), [("sm_90a", 2, SWAPPED), ("sm_100a", 3, None)])
def test_normed_rows_in_8_bits_have_the_scales_of_their_rows(arch, world, fields):
    """Checks that the stream has the bits of a call whose normed rows have 16 bits."""
    with world_of(arch, world, fields, mode="random", schedule=lagging(world - 1)) as ranks:
        for seed, sizes in enumerate([(20, 144, 72), (1, 400, 72), (20, 144, 72)][: 5 - world]):
            wide, narrow = (
                Called(AR, world, one, sizes, seed=seed, otherwise=refuse)
                for one in (add_residual_rms_norm, add_residual_rms_norm_e4m3)
            )
            with poisoned_allocations():
                pairs = [
                    [case.call(rank, name) for case in (wide, narrow)]
                    for rank, name in enumerate(ranks.names)
                ]
            ranks.synchronize()
            for (normed, same), (values, scale, stream) in pairs:
                assert torch.equal(stream, same)
                assert values.dtype == torch.float8_e4m3fn and scale.shape == (sizes[0],)
                assert (values.float().abs().amax(1) == 448).all()
                wide_values = values.double() * scale.double()[:, None]
                error = (wide_values - normed.double()).abs()
                assert (error <= (2**-4 + 2**-7) * normed.double().abs() + 2**-9 * scale[:, None]).all()
                largest = normed.double().abs().amax(1)
                torch.testing.assert_close(scale.double() * 448, largest, rtol=2**-6, atol=0)


def in_static_scale(stream, largest, total, scale, gain):
    return stream / scale * gain, largest * gain, total + scale


@epilogue(
    inputs={"residual": "element", "scale": "scalar", "gain": "rows"},
    outputs={"most": "rows", "largest": "row_max", "shifted": "rows", "total": "row_sum"},
    result="e4m3",
    then=in_static_scale,
)
def scaled_by_the_caller(x, residual):
    stream = x + residual
    return stream, abs(stream), stream


def test_values_of_rows_are_those_of_complete_rows():
    torch.manual_seed(0)
    x, weight = torch.randn(2, 20, 72).bfloat16(), torch.randn(2, 144, 72).bfloat16()
    residual, gain = torch.randn(20, 144).bfloat16(), 0.5 + torch.rand(20)
    residual[4, 143] = torch.nan
    residual[5, 143] = 2.0**20
    applied = scaled_by_the_caller(residual=residual, scale=0.25, gain=gain)
    with world_of("sm_90a", 2, SWAPPED) as ranks:
        outs = [
            overlap_gemm.gemm_all_reduce(*each, group=name, backend="fused", epilogue=applied)
            for *each, name in zip(x, weight, ranks.names, strict=True)
        ]
        ranks.synchronize()
    for values, most, shifted, stream in outs:
        wide = stream.double()
        expected = (wide * 4 * gain.double()[:, None]).clamp(-448, 448)
        assert values[4].isnan().sum() == 1 and (values[5, 143].float() == 448).all()
        error = (values.double() - expected).abs().nan_to_num(0.0)
        assert (error <= 2**-4 * 1.02 * expected.abs().nan_to_num(0.0) + 2**-10).all()
        torch.testing.assert_close(
            most.double(), wide.abs().amax(1) * gain, rtol=2**-7, atol=0, equal_nan=True
        )
        roundings = 2**-8 * wide.abs().sum(1).nan_to_num(0.0)
        error = (shifted.double() - wide.sum(1) - 0.25).abs()
        assert (error.nan_to_num(0.0) <= roundings).all() and shifted.isnan().sum() == most.isnan().sum() == 1


def statistics_of_the_next_row(patch):
    of = complete_rows.value_of
    patch.setattr(complete_rows, "value_of", lambda totals, row: of(totals, row ^ 1))


def weight_of_the_next_columns(patch):
    load = RowVisit.load
    patch.setattr(RowVisit, "load", lambda self, loaded, row, column: load(self, loaded, row, column ^ 8))


def residual_added_by_both_ranks(patch):
    visit = Visits.on_chunk

    def twice(self, *arguments):
        visit(self, *arguments)
        visit(self, *arguments)

    patch.setattr(Visits, "on_chunk", twice)


def norm_before_the_last_part(patch):
    wait = complete_rows.await_units
    patch.setattr(complete_rows, "await_units", lambda word, units, *others: wait(word, units - 1, *others))


def no_wait(patch):
    patch.setattr(complete_rows, "await_units", lambda *_: None)


def counts_are_not_reset(patch):
    patch.setattr(complete_rows, "reset_count", lambda *_: None)


MUTANTS = [
    statistics_of_the_next_row, weight_of_the_next_columns, residual_added_by_both_ranks,
    norm_before_the_last_part, no_wait, counts_are_not_reset,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutations_are_noticed(mutant, monkeypatch):
    """Checks values; the emulator notices what is read too early."""
    mutant(monkeypatch)
    monkeypatch.setattr(compiled, "_cache", lambda on_disk: CompileCache(folder=None))
    with world_of("sm_90a", 2, mode="random", schedule=lagging(1)) as ranks, suppress(EmulatorError):
        cases = [Called(AR, 2, add_residual_rms_norm, (70, 400, 72), seed=seed) for seed in range(2)]
        assert max(worst(case, ranks) for case in cases) > 1
