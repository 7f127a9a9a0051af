"""`invariant="batch"` of 8-bit operands: every kernel sums K in one order and promotes the same parts."""

import pytest
import torch

import overlap_gemm
from cute_emulator import Emulator
from overlap_gemm.backends.scales.scale_layouts import LAYOUTS
from overlap_gemm.backends.scales.scaling import blocks_named
from overlap_gemm.config.scale_blocks import MX, PROMOTED
from overlap_gemm.runtime.virtual import VirtualWorld
from tests.support.emulated.float32_sums import float32_sums, spread
from tests.support.emulated.op_runs import world_of
from tests.support.invariance import same_bits

KERNELS = {
    ("sm_90a", None): [
        ("pingpong", (64, 128), (1, 1)),
        ("cooperative", (128, 128), (1, 2)),
        ("cooperative", (128, 256), (2, 1)),
        ("swap_ab", (32, 64), (1, 1)),
    ],
    ("sm_90a", PROMOTED[0]): [
        ("pingpong", (64, 128), (1, 1)),
        ("cooperative", (128, 256), (2, 1)),
        ("cooperative", (128, 128), (1, 1)),
    ],
    ("sm_90a", PROMOTED[1]): [("pingpong", (64, 128), (2, 1)), ("cooperative", (128, 128), (1, 1))],
    ("sm_100a", None): [
        ("1cta", (128, 128), (1, 1)),
        ("2cta", (256, 128), (2, 1)),
        ("swap_ab", (32, 64), (1, 1)),
    ],
    ("sm_100a", MX): [("1cta", (128, 128), (1, 1)), ("2cta", (256, 256), (2, 1))],
}
DEPTH = 336
"""Three k tiles, the last one not full: kernels that promote two at a time add one of zeros."""


@pytest.mark.parametrize("in_dtype", ["e4m3", pytest.param("e5m2", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("arch", "scaled"),
    [pytest.param(*one, marks=pytest.mark.slow if one[1] == PROMOTED[1] else []) for one in KERNELS],
)
def test_every_kernel_of_bytes_sums_k_in_one_order(arch, scaled, in_dtype):
    one, *others = KERNELS[arch, scaled]
    fields = {"in_dtype": in_dtype, "blocks": scaled}
    reference = float32_sums((arch, *one), 136, 72, DEPTH, **fields)
    for other in others:
        assert same_bits(reference, float32_sums((arch, *other), 136, 72, DEPTH, **fields)), other
    for kernel in (one, others[-1]):
        assert same_bits(reference[:5], float32_sums((arch, *kernel), 5, 72, DEPTH, **fields)), kernel


def test_kernels_that_do_not_promote_have_other_bits():
    kernel = ("sm_90a", "pingpong", (64, 128), (1, 1))
    promoted, fast = (
        float32_sums(kernel, 72, 72, DEPTH, in_dtype="e4m3", fast_accum=fast) for fast in (False, True)
    )
    assert (promoted != fast).float().mean() > 0.5


@pytest.mark.parametrize("parts", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_kernels_that_split_k_have_other_bits(parts):
    kernel = ("sm_100a", "swap_ab", (32, 64), (1, 1))
    in_one, split = (
        float32_sums(kernel, 8, 72, 4 * DEPTH, in_dtype="e4m3", k_split=number) for number in (1, parts)
    )
    assert (in_one != split).float().mean() > 0.05


CALLS = [
    ("sm_90a", "gemm_all_reduce", None),
    ("sm_90a", "gemm_reduce_scatter", 128),
    pytest.param("sm_100a", "gemm_reduce_scatter", None, marks=pytest.mark.slow),
    ("sm_100a", "gemm_all_reduce", "mx"),
]


@pytest.mark.parametrize(("arch", "op", "block"), CALLS)
def test_rows_of_a_call_with_scales_do_not_depend_on_the_batch(arch, op, block):
    """Compares calls whose kernels the model chooses: swapped ones for few rows where there are some.

    A second call's bias takes away what the first one gave and shows the bits below those of the result.
    The first call's is zero, so that one kernel serves both.
    """
    ranks, columns, depth = 2, 128, 192
    layout = LAYOUTS[blocks_named(block, torch.float8_e4m3fn)]
    xs, weights = (
        [spread(rows, depth, 10 * seed + rank, "e4m3") for rank in range(ranks)]
        for rows, seed in ((1, 1), (columns, 2))
    )
    results = {}
    with (
        Emulator(arch, ranks, num_sms=4, sums="bitwise") as emulator,
        VirtualWorld(ranks, emulator=emulator) as world,
    ):

        def call(count, bias):
            outs = []
            for x, weight, group in zip(xs, weights, world.names, strict=True):
                rows = x.view(torch.uint8).expand(count, depth).contiguous().view(x.dtype)
                of_x, of_weight = layout.unit((count, depth), (columns, depth), x.device)
                scale_x, scale_w = of_x, of_weight if block == "mx" else of_weight * 1.7
                outs.append(
                    getattr(overlap_gemm, op)(
                        rows, weight, bias=bias, group=group, backend="fused", invariant="batch",
                        scale_x=scale_x if block == "mx" else scale_x.expand(count, scale_x.shape[1]) * 0.3,
                        scale_w=scale_w if block else scale_w.expand(columns, 1), block=block,
                        k=depth * ranks,
                    )
                )  # fmt: skip
            world.synchronize()
            return outs[0]

        for count in (2, 72):
            first = call(count, torch.zeros(columns, dtype=torch.bfloat16))
            results[count] = first[0], call(count, -first[0])[0]
    for few, many in zip(results[2], results[72], strict=True):
        assert same_bits(few, many)
    assert results[2][1].any()


def test_kernels_that_keep_fewer_bits_are_refused():
    x, weight = (torch.ones(rows, 64).to(torch.float8_e4m3fn) for rows in (2, 64))
    scales = {"scale_x": torch.ones(2, 1), "scale_w": torch.ones(64, 1)}
    with (
        world_of("sm_90a", 2, {"fast_accum": True}) as world,
        pytest.raises(overlap_gemm.InvarianceError, match="or where they are rounded; use fast_accum=False"),
    ):
        overlap_gemm.gemm_all_reduce(
            x, weight, group=world.names[0], backend="fused", invariant="batch", **scales
        )
