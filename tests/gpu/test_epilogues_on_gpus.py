"""Epilogues on virtual ranks of one GPU: the cases of the emulator, many times."""

import pytest
import torch

from overlap_gemm import epilogues
from overlap_gemm.backends.epilogues import ONE_SHOT_ROWS
from overlap_gemm.runtime.virtual import VirtualWorld
from tests.support.emulated.epilogue_cases import Called, errors_of_blocks, gated, refuse, worst
from tests.support.ops import SHARDED

SIZES = {"few-rows": (16, 1024, 512), "even": (1024, 1024, 512), "ragged": (1000, 1088, 520)}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("op", SHARDED)
def test_inputs_of_every_kind(device, op, sizes, ranks):
    with VirtualWorld(ranks, device=device) as world:
        for seed in range(8):
            assert worst(Called(op, ranks, gated, SIZES[sizes], seed, device), world) <= 1


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("op", ["gemm_reduce_scatter", "gemm_all_reduce"])
def test_row_statistics(device, op, sizes, ranks):
    rows, *others = SIZES[sizes]
    if op == "gemm_all_reduce":
        rows = min(rows, ONE_SHOT_ROWS)  # kernels sum no rows of more
    with VirtualWorld(ranks, device=device) as world:
        for seed in range(8):
            case = Called(op, ranks, epilogues.add_residual_squared, (rows, *others), seed, device)
            assert worst(case, world) <= 1


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("sizes", [(1, 1024, 512), (16, 8192, 512), (70, 1088, 520), (128, 8192, 512)])
@pytest.mark.parametrize("one", [epilogues.add_residual_rms_norm, epilogues.add_residual_rms_norm_e4m3])
def test_norms_of_complete_rows(device, one, sizes, ranks):
    """Checks calls of one plan one after the other, whose counts of rows each call leaves at zero."""
    with VirtualWorld(ranks, device=device) as world:
        for seed in range(16):
            case = Called("gemm_all_reduce", ranks, one, sizes, seed, device, refuse)
            assert worst(case, world) <= 1


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_pairs_of_columns(device, ranks):
    with VirtualWorld(ranks, device=device) as world:
        for seed in range(8):
            case = Called("all_gather_gemm", ranks, epilogues.swiglu, (1000, 1024, 520), seed, device)
            assert worst(case, world) <= 1


SCALED = {
    "rows": ("all_gather_gemm", "rows", gated),
    "blocks": ("all_gather_gemm", 128, epilogues.swiglu),
    "8-bit-result": ("all_gather_gemm", "rows", epilogues.swiglu_e4m3),
    "summed": ("gemm_reduce_scatter", "rows", epilogues.add_residual_squared),
    "blocks-summed": ("gemm_all_reduce", 128, gated),
    "exchanged": ("gemm_all_to_all", "rows", gated),
    "exchanged-operand": ("all_to_all_gemm", 128, gated),
}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("case", SCALED)
def test_operands_with_scales(device, case, ranks):
    """Checks the kernels: what takes the place of an epilogue that no kernel applies raises here."""
    op, scales, one = SCALED[case]
    with VirtualWorld(ranks, device=device) as world:
        for seed in range(4):
            how = {"scales": scales, "otherwise": refuse}
            assert worst(Called(op, ranks, one, (1000, 1024, 1024), seed, device, **how), world) <= 1


@pytest.mark.parametrize("scales", [None, "rows"])
@pytest.mark.parametrize(
    "one", [epilogues.to_e4m3_blocks, epilogues.swiglu_e4m3_blocks], ids=lambda one: one.name
)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_8_bit_results_with_scales_of_blocks(device, ranks, one, scales):
    with VirtualWorld(ranks, device=device) as world:
        for seed in range(4):
            case = Called(
                "all_gather_gemm", ranks, one, (1000, 1024, 528), seed, device, refuse, scales=scales
            )
            assert errors_of_blocks(case, world) <= 1


def copy_inputs(target, source):
    """Copies operands and epilogue inputs of all ranks in place, from one `Called` to another."""
    for (x, weight, inputs, _), (new_x, new_weight, new_inputs, _) in zip(
        target.given, source.given, strict=True
    ):
        for old, new in zip((x, weight, *inputs), (new_x, new_weight, *new_inputs), strict=True):
            old.copy_(new)


def captured(case, world, device):
    """Returns a CUDA graph of one call on every rank, and the tensors that it writes."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outs = [case.call(rank, name) for rank, name in enumerate(world.names)]
        for rank in range(len(world.names)):  # each rank's stream was forked from the captured one
            torch.cuda.current_stream(device).wait_stream(world.executor(rank).stream)
    return graph, outs


CAPTURED = {
    "reduce-scatter-residual": ("gemm_reduce_scatter", epilogues.add_residual, "ragged"),
    "reduce-scatter-statistics": ("gemm_reduce_scatter", epilogues.add_residual_squared, "even"),
    "all-reduce-residual": ("gemm_all_reduce", epilogues.add_residual, "even"),
    "all-reduce-statistics": ("gemm_all_reduce", epilogues.add_residual_squared, "few-rows"),
    "all-reduce-norm": ("gemm_all_reduce", epilogues.add_residual_rms_norm, "few-rows"),
    "all-reduce-norm-8-bits": ("gemm_all_reduce", epilogues.add_residual_rms_norm_e4m3, "few-rows"),
    "all-gather-swiglu": ("all_gather_gemm", epilogues.swiglu, "even"),
}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("case", CAPTURED)
def test_a_captured_call_reads_operands_and_inputs_at_each_replay(device, case, ranks):
    op, one, sizes = CAPTURED[case]
    if ranks == 1 and one.outputs:
        pytest.skip("a rank alone has no kernel with outputs")
    with VirtualWorld(ranks, device=device) as world:
        first = Called(op, ranks, one, SIZES[sizes], 0, device)
        assert worst(first, world) <= 1  # compiles and allocates
        graph, outs = captured(first, world, device)
        for seed in (1, 2, 2, 3):
            source = Called(op, ranks, one, SIZES[sizes], seed, device)
            copy_inputs(first, source)
            for out in outs:
                for tensor in out if isinstance(out, tuple) else (out,):
                    tensor.fill_(torch.nan)
            torch.cuda.synchronize(device)
            graph.replay()
            world.synchronize()
            assert source.worst(outs) <= 1, seed
