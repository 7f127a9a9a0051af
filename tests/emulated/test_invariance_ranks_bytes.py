"""`invariant="ranks"` of 8-bit operands with scales of blocks: leaves are whole k tiles of 128 elements."""

import pytest
import torch

import overlap_gemm
from cute_emulator import Emulator
from overlap_gemm.api.quantization import swizzle_scales
from overlap_gemm.backends.collectives import sum_in_tree
from overlap_gemm.backends.scales.scaling import blocks_named
from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.config.scale_blocks import MX, PROMOTED
from tests.support.emulated.float32_sums import spread
from tests.support.emulated.kernel_cases import KernelCase, compiled_kernel
from tests.support.emulated.op_runs import world_of
from tests.support.invariance import same_bits

TREES = [
    ("sm_90a", "pingpong", (64, 128), (1, 1), PROMOTED[0], 4, 256),
    pytest.param("sm_90a", "cooperative", (128, 256), (2, 1), PROMOTED[1], 4, 128, marks=pytest.mark.slow),
    ("sm_100a", "1cta", (128, 128), (1, 1), MX, 4, 256),
]


def product(config, a, b, scales):
    """Returns the float32 results of a plain kernel for two matrices and their scales."""
    case = KernelCase(config, rows=len(a), cols=len(b), depth=a.shape[1])
    case.a, case.b = [a.contiguous()], [b.contiguous()]
    case.scales = [[one.contiguous() for one in scales]]
    with Emulator(config.arch, sums="bitwise") as emulator:
        case.launch(emulator, compiled_kernel(config))
    return case.outs[0]


@pytest.mark.parametrize(("arch", "mma", "tile", "cluster", "blocks", "leaves", "leaf"), TREES)
def test_a_kernel_adds_the_sums_of_leaves_by_a_tree(arch, mma, tile, cluster, blocks, leaves, leaf):
    """Compares with the sums of each leaf by a kernel without leaves; every block has another scale."""
    fields = {"arch": arch, "mma": mma, "tile": tile, "cluster": cluster, "in_dtype": "e4m3"}
    fields |= {"blocks": blocks, "out_dtype": "f32", "slot_dtype": "f32"}
    tree, plain = GemmConfig(**fields, leaves=leaves), GemmConfig(**fields)
    rows, columns, depth = tile[0] + 8, tile[1] + 8, leaves * leaf
    a, b = spread(rows, depth, 1, "e4m3"), spread(columns, depth, 2, "e4m3")
    scales = KernelCase(tree, rows=rows, cols=columns, depth=depth).scales[0]
    parts = zip(*(one.chunk(leaves, 1) for one in (a, b, *scales)), strict=True)
    sums = [product(plain, a_leaf, b_leaf, of_leaf) for a_leaf, b_leaf, *of_leaf in parts]
    results = product(tree, a, b, scales)
    assert same_bits(results, sum_in_tree(sums))
    assert not same_bits(results, ((sums[0] + sums[1]) + sums[2]) + sums[3])


CALLS = [
    ("sm_90a", "gemm_reduce_scatter", 128),
    pytest.param("sm_100a", "gemm_all_reduce", "mx", marks=pytest.mark.slow),
]
OTHER = {
    "sm_90a": {"mma": "cooperative", "tile": (128, 128), "cluster": (1, 2)},
    "sm_100a": {"mma": "2cta", "tile": (256, 128), "cluster": (2, 1)},
}
"""Kernels of two ranks; one and four ranks have `FIRST`."""
FIRST = {
    "sm_90a": {"mma": "pingpong", "tile": (64, 128), "cluster": (1, 1)},
    "sm_100a": {"mma": "1cta", "tile": (128, 128), "cluster": (1, 1)},
}
ROWS, COLUMNS, DEPTH = 40, 128, 1024


def results_on(world, op, block, x, weight, scale_x, scale_w):
    """Returns the result of all ranks, and that of a call whose bias takes its first row away."""
    ranks, results = len(world.names), []
    in_layout = swizzle_scales if block == "mx" else torch.Tensor.contiguous
    for _ in range(2):
        bias = -results[0][0] if results else torch.zeros(COLUMNS, dtype=torch.bfloat16)
        parts = zip(*(one.chunk(ranks, 1) for one in (x, weight, scale_x, scale_w)), world.names, strict=True)
        outs = [
            getattr(overlap_gemm, op)(
                *(one.contiguous() for one in (x_part, weight_part)), bias=bias, group=group,
                scale_x=in_layout(of_x), scale_w=in_layout(of_weight), block=block, k=DEPTH,
                backend="fused", invariant="ranks",
            )
            for x_part, weight_part, of_x, of_weight, group in parts
        ]  # fmt: skip
        world.synchronize()
        results.append(torch.cat(outs) if op == "gemm_reduce_scatter" else outs[0])
    return results


@pytest.mark.parametrize(("arch", "op", "block"), CALLS)
def test_bits_do_not_depend_on_the_number_of_ranks_nor_on_the_kernel(arch, op, block):
    x, weight = spread(ROWS, DEPTH, 1, "e4m3"), spread(COLUMNS, DEPTH, 2, "e4m3")
    _, b_rows, along = blocks_named(block, x.dtype)
    generator, dtype = torch.Generator().manual_seed(3), torch.float8_e8m0fnu if block == "mx" else None
    scales = [
        torch.rand(rows, DEPTH // along, generator=generator).clamp_min(0.1).to(dtype)
        for rows in (ROWS, -(-COLUMNS // b_rows))
    ]
    results = []
    for ranks in (1, 2, 4):
        with world_of(
            arch, ranks, (OTHER if ranks == 2 else FIRST)[arch], num_sms=4, sums="bitwise"
        ) as world:
            results.append(results_on(world, op, block, x, weight, *scales))
    for other in results[1:]:
        assert all(map(same_bits, results[0], other))
    assert (results[0][1] != 0).float().mean() > 0.5


def test_leaves_that_are_no_whole_k_tiles_are_refused():
    x, weight = (torch.ones(rows, 256).to(torch.float8_e4m3fn) for rows in (2, 64))
    scales = {"scale_x": torch.ones(2, 8), "scale_w": torch.ones(2, 8), "block": 32}
    with world_of("sm_90a", 2) as world, pytest.raises(ValueError, match="8-bit operands are whole k tiles"):
        overlap_gemm.gemm_all_reduce(
            x, weight, group=world.names[0], backend="fused", invariant="ranks", **scales
        )
