"""`invariant=` and `partials=` of fused kernels: in which order a kernel sums K, and what it sends."""

from contextlib import contextmanager

import pytest
import torch

import overlap_gemm
from cute_emulator import Emulator
from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.runtime.virtual import VirtualWorld
from tests.support.chosen import in_turn
from tests.support.emulated.float32_sums import float32_sums
from tests.support.emulated.kernel_cases import KernelCase, compiled_kernel
from tests.support.emulated.op_runs import world_of
from tests.support.invariance import same_bits

SHAPES = {
    "sm_90a": [
        ("pingpong", (64, 128), (1, 1)),
        ("pingpong", (128, 128), (1, 1)),
        ("cooperative", (128, 256), (2, 1)),
    ],
    "sm_100a": [("1cta", (128, 64), (1, 1)), ("1cta", (128, 256), (1, 1)), ("2cta", (256, 128), (2, 1))],
}
DEPTHS = (136, 640)


def spread(rows, depth, seed):
    """Exponents far apart, and halves that cancel each other, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, depth, generator=generator)
    values *= 4.0 ** torch.randint(-4, 5, values.shape, generator=generator)
    half = depth // 2
    values[:, half : 2 * half] = -values[:, :half] * (1 + 2.0**-7)
    return values.bfloat16()


def float32_product(arch, shape, rows, columns, depth, **fields):
    """What a kernel of this shape gives for the first rows of the same x and the same weight."""
    mma, tile, cluster = shape
    config = GemmConfig(arch=arch, mma=mma, tile=tile, cluster=cluster, out_dtype="f32", **fields)
    case = KernelCase(config, rows=rows, cols=columns, depth=depth)
    case.a, case.b = [spread(200, depth, 1)[:rows].contiguous()], [spread(columns, depth, 2).abs()]
    with Emulator(arch, sums="bitwise") as emulator:
        case.launch(emulator, compiled_kernel(config))
    return case.outs[0]


@contextmanager
def chosen_by_the_model(arch):
    """A world of two virtual ranks that name no kernel."""
    with (
        Emulator(arch, 2, num_sms=4, sums="bitwise") as emulator,
        VirtualWorld(2, emulator=emulator) as world,
    ):
        yield world


@pytest.mark.parametrize(("depth", "arch"), in_turn(DEPTHS, SHAPES))
def test_every_kernel_sums_k_in_one_order(arch, depth):
    found = [float32_product(arch, shape, 200, 136, depth) for shape in SHAPES[arch]]
    found += [float32_product(arch, SHAPES[arch][0], rows, 136, depth) for rows in (1, 72)]
    reference = found[0]
    assert reference.isfinite().all()
    for other in found[1:]:
        assert same_bits(reference[: len(other)], other)


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
def test_another_order_of_k_shows_in_these_operands(arch):
    """That of the same products, with the k tiles in another order."""
    depth, shape = 640, SHAPES[arch][0]
    a, b = spread(200, depth, 1), spread(136, depth, 2).abs()
    turned = [torch.cat([one[:, 320:], one[:, :320]], 1) for one in (a, b)]
    mma, tile, cluster = shape
    config = GemmConfig(arch=arch, mma=mma, tile=tile, cluster=cluster, out_dtype="f32")
    case = KernelCase(config, rows=200, cols=136, depth=depth)
    case.a, case.b = [turned[0].contiguous()], [turned[1].contiguous()]
    with Emulator(arch, sums="bitwise") as emulator:
        case.launch(emulator, compiled_kernel(config))
    assert (case.outs[0] != float32_product(arch, shape, 200, 136, depth)).float().mean() > 0.1


@pytest.mark.parametrize(("op", "arch"), in_turn(["gemm_reduce_scatter", "gemm_all_reduce"], SHAPES))
def test_rows_of_a_fused_call_do_not_depend_on_the_batch(arch, op):
    """Few rows are swapped products, split along K by default.

    A second call, whose bias takes away what the first one gave, shows the bits below those of the result.
    The first call's is zero, so that one kernel serves both.
    """
    ranks, columns, depth = 2, 64, 192
    xs, weights = ([spread(rows, depth, 10 * seed + rank) for rank in range(ranks)] for rows, seed in
                   ((1, 1), (columns, 2)))  # fmt: skip
    results = {}
    with chosen_by_the_model(arch) as world:

        def call(count, bias):
            of_rows = [x.expand(count, depth).contiguous() for x in xs]
            outs = [
                getattr(overlap_gemm, op)(
                    x, weight, bias=bias, group=group, backend="fused", invariant="batch", k=depth * ranks
                )
                for x, weight, group in zip(of_rows, weights, world.names, strict=True)
            ]
            world.synchronize()
            return outs[0]

        for count in (2, 72):
            first = call(count, torch.zeros(columns, dtype=torch.bfloat16))
            results[count] = first[0], call(count, -first[0])[0]
    assert same_bits(results[2][0], results[72][0])
    assert same_bits(results[2][1], results[72][1])
    assert results[2][1].any()


def test_both_all_reduces_sum_three_ranks_in_one_order():
    """Checks sums of which two cancel: only in rank order does the third, 2^-18 of them, keep its bits."""
    ranks, rows, columns, depth, results = 3, 16, 64, 128, []
    x, weight = spread(rows, depth, 1), spread(columns, depth, 2)
    xs, weights = (x, x, spread(rows, depth, 3)), (weight, -weight, weight * 2.0**-18)
    for algorithm in ("one_shot", "two_shot"):
        with world_of("sm_90a", ranks, None, algorithm=algorithm) as world:
            operands = zip(xs, weights, world.names, strict=True)
            how = {"backend": "fused", "invariant": "batch"}
            results += [overlap_gemm.gemm_all_reduce(*two, group=group, **how) for *two, group in operands]
            world.synchronize()
    assert results[0].any() and all(same_bits(results[0], one) for one in results[1:])


@pytest.mark.parametrize(("op", "arch"), in_turn(["gemm_all_reduce"], SHAPES))
def test_float32_partial_sums_are_rounded_once(arch, op):
    """Of 1 + 2**-8 and 2**-8, which bfloat16 holds apart but not their first: 1 + 2**-7 it does."""
    sums = {None: 1.0, "float32": 1 + 2.0**-7}
    with chosen_by_the_model(arch) as world:
        for rows in (2, 64):
            x = torch.zeros(rows, 64)
            x[:, :2] = torch.tensor([1.0, 2.0**-8])
            weights = torch.zeros(2, 64, 64)
            weights[0, :, :2], weights[1, :, 1] = 1.0, 1.0
            for partials, wanted in sums.items():
                outs = [
                    getattr(overlap_gemm, op)(
                        x.bfloat16(), weight.bfloat16(), group=group, backend="fused", partials=partials
                    )
                    for weight, group in zip(weights, world.names, strict=True)
                ]
                world.synchronize()
                for out in outs:
                    assert (out == wanted).all(), (rows, partials, out.unique())


def test_a_kernel_that_cuts_k_is_refused():
    with (
        world_of("sm_90a", 2, {"mma": "swap_ab", "tile": (16, 64), "k_split": 2}) as world,
        pytest.raises(overlap_gemm.InvarianceError, match="changes the order of sums over K.*use k_split=1"),
    ):
        x, weight = torch.ones(2, 64).bfloat16(), torch.ones(64, 64).bfloat16()
        overlap_gemm.gemm_all_reduce(x, weight, group=world.names[0], backend="fused", invariant="batch")


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
def test_swapped_kernels_sum_k_in_the_same_order_unless_they_split_it(arch):
    """Compares float32 sums, of which bfloat16 hides most differences."""
    sizes, swapped = (8, 72, 640), ("swap_ab", (16, 64), (1, 1))
    reference = float32_sums((arch, *SHAPES[arch][0]), *sizes)
    assert same_bits(reference, float32_sums((arch, *swapped), *sizes))
    split = [float32_sums((arch, *swapped), *sizes, k_split=parts) for parts in (2, 4)]
    for one, other in ((reference, split[0]), (reference, split[1]), (split[0], split[1])):
        assert (one != other).float().mean() > 0.05
