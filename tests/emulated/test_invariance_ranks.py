"""`invariant="ranks"` of fused kernels: leaves of K by a tree, whatever the number of ranks and the tile."""

import pytest
import torch

import overlap_gemm
from cute_emulator import Emulator
from overlap_gemm.backends.collectives import sum_in_tree
from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.testing.cases import LAYOUTS, Case
from overlap_gemm.testing.emulated import joined_results
from tests.support.chosen import in_turn
from tests.support.emulated.kernel_cases import KernelCase, compiled_kernel
from tests.support.emulated.op_runs import SMALL, world_of
from tests.support.invariance import adversarial, rows_and_what_is_below, same_bits

LEAF = 40
"""K of a leaf: no whole k tile, nor whole instructions."""

TREES = [
    ("sm_90a", "pingpong", (64, 128), (1, 1), 2),
    ("sm_90a", "pingpong", (128, 128), (1, 2), 2),
    ("sm_90a", "pingpong", (64, 128), (2, 1), 8),
    ("sm_90a", "cooperative", (128, 256), (2, 1), 4),
    ("sm_100a", "1cta", (128, 64), (1, 1), 8),
    ("sm_100a", "1cta", (128, 256), (1, 1), 2),
    ("sm_100a", "2cta", (256, 128), (2, 1), 4),
]
QUICK = TREES[2], TREES[6]
WIDE = {
    "sm_100a": {"mma": "2cta", "tile": (256, 128), "cluster": (2, 1)},
    "sm_90a": {"mma": "cooperative", "tile": (128, 128), "cluster": (1, 2)},
}
"""Other kernels than `SMALL`: with as many ranks as not, each has another."""

SUMS = {
    "gemm_reduce_scatter": (None,),
    "gemm_all_reduce": ("one_shot", "two_shot"),
}


def product(config, a, b):
    """Returns what a plain kernel makes of two matrices."""
    case = KernelCase(config, rows=len(a), cols=len(b), depth=a.shape[1])
    case.a, case.b = [a.contiguous()], [b.contiguous()]
    with Emulator(config.arch, sums="bitwise") as emulator:
        case.launch(emulator, compiled_kernel(config))
    return case.outs[0]


@pytest.mark.parametrize(
    ("arch", "mma", "tile", "cluster", "leaves"),
    [pytest.param(*tree, marks=[] if tree in QUICK else pytest.mark.slow) for tree in TREES],
)
def test_a_kernel_adds_the_sums_of_leaves_by_a_tree(arch, mma, tile, cluster, leaves):
    """Compares float32 results of several tiles; each leaf's sum is that of a kernel without leaves.

    Two leaves, which have one order alone, are slow cases; so is the largest tile.
    """
    case = Case("gemm_all_reduce", 2 * tile[0] + 8, 2 * tile[1] + 8, leaves * LEAF, torch.bfloat16)
    inputs = adversarial(case)
    kernel = GemmConfig(arch=arch, mma=mma, tile=tile, cluster=cluster, out_dtype="f32", slot_dtype="f32")
    results = product(GemmConfig(**{**vars_of(kernel), "leaves": leaves}), inputs.x, inputs.weight)
    parts = zip(inputs.x.chunk(leaves, 1), inputs.weight.chunk(leaves, 1), strict=True)
    sums = [product(kernel, *part) for part in parts]
    assert same_bits(results, sum_in_tree(sums))
    in_order = sums[0].clone()
    for other in sums[1:]:
        in_order += other
    assert leaves == 2 or not same_bits(results, in_order)


def vars_of(config):
    """Returns the fields that these tests choose."""
    return {
        name: getattr(config, name) for name in ("arch", "mma", "tile", "cluster", "out_dtype", "slot_dtype")
    }


@pytest.mark.parametrize(("op", "arch"), in_turn(SUMS, SMALL))
def test_bits_do_not_depend_on_the_number_of_ranks_nor_on_the_kernel(arch, op):
    """Compares results with bias and residual, which act on the complete float32 sum."""
    case = Case(op, 75, 72, 8 * LEAF, torch.bfloat16)
    results = []
    for ranks in (1, 2, 4):
        for algorithm in SUMS[op]:
            fields = WIDE[arch] if ranks == 2 else SMALL[arch]
            with world_of(arch, ranks, fields, algorithm=algorithm, num_sms=4, sums="bitwise") as world:
                results.append(rows_and_what_is_below(case, world, with_residual=True, invariant="ranks"))
    for other in results[1:]:
        assert all(map(same_bits, results[0], other))
    assert (results[0][1] != 0).float().mean() > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("arch", SMALL)
@pytest.mark.parametrize("op", SUMS)
@pytest.mark.parametrize(
    ("invariant", "worlds"), [("ranks", (1, 8)), ("ranks:4", (1, 2, 4)), ("ranks:2", (1, 2))]
)
def test_bits_do_not_depend_on_the_number_of_ranks_up_to_leaves(arch, op, invariant, worlds):
    case = Case(op, 21, 72, 8 * LEAF, torch.bfloat16, bias=False)
    results = []
    for ranks in worlds:
        with world_of(arch, ranks, num_sms=4, sums="bitwise") as world:
            results.append(rows_and_what_is_below(case, world, invariant=invariant))
    assert all(
        same_bits(one, other) for later in results[1:] for one, other in zip(results[0], later, strict=True)
    )


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
def test_rows_have_the_same_bits_in_batches_of_any_size(arch):
    """Compares two kernels: a reduce-scatter of few rows exchanges tiles as an all-reduce does."""
    everything = Case("gemm_reduce_scatter", 75, 72, 8 * LEAF, torch.bfloat16, bias=False)
    inputs = adversarial(everything)
    results = []
    for rows in (75, 2):
        of = type(inputs)(inputs.x[:rows], inputs.weight, None, inputs.grad[:rows])
        with world_of(arch, 2, {}, num_sms=4, sums="bitwise") as world:
            results.append(rows_and_what_is_below(everything, world, of, invariant="ranks"))
    many, few = results
    assert all(same_bits(one[:2], other) for one, other in zip(many, few, strict=True))


@pytest.mark.parametrize(("op", "arch"), in_turn(["all_gather_gemm", "gemm_all_gather"], SMALL))
def test_input_gradients_of_gathering_ops_sum_columns_by_the_tree(arch, op):
    case, layout = Case(op, 24, 8 * LEAF, 72, torch.bfloat16, bias=False), LAYOUTS[op]
    inputs, results = adversarial(case), {}
    for invariant in ("ranks", None):
        for ranks in (1, 2, 4) if invariant else (1, 2):
            outs, grads = [], []
            with world_of(arch, ranks, {}, num_sms=4, sums="bitwise") as world:
                for rank, group in enumerate(world.names):
                    x, weight, grad = (
                        layout.part(one, dim, rank, ranks)
                        for one, dim in (
                            (inputs.x, layout.x),
                            (inputs.weight, layout.weight),
                            (inputs.grad, layout.out),
                        )
                    )
                    x = x.clone().requires_grad_()
                    with overlap_gemm.promising(invariant=invariant):
                        out = getattr(overlap_gemm, op)(
                            x, weight, group=group, backend="fused", columns=case.n
                        )
                    outs.append(out.detach())
                    grads += torch.autograd.grad(out, x, grad)
                world.synchronize()
            results[invariant, ranks] = joined_results(outs, layout.out), joined_results(grads, layout.x)
    for ranks in (2, 4):
        assert all(map(same_bits, results["ranks", 1], results["ranks", ranks]))
    assert not same_bits(results[None, 1][1], results[None, 2][1])


@pytest.mark.parametrize(
    ("fields", "rows", "depth", "why"),
    [
        ({"mma": "swap_ab", "tile": (16, 64)}, 2, 128, r"mma=swap_ab.* kernels with float32 partial sums"),
        ({"mma": "swap_ab", "tile": (16, 64), "k_split": 2}, 2, 128, "k_split=2.* k_split=1"),
        ({"slot_dtype": "bf16"}, 2, 128, "slot_dtype=bf16.* slot_dtype=f32"),
    ],
)
def test_kernels_that_sum_otherwise_are_refused(fields, rows, depth, why):
    with world_of("sm_90a", 2, fields) as world, pytest.raises(overlap_gemm.InvarianceError, match=why):
        x, weight = torch.ones(rows, depth).bfloat16(), torch.ones(64, depth).bfloat16()
        overlap_gemm.gemm_all_reduce(x, weight, group=world.names[0], backend="fused", invariant="ranks")


def test_leaves_whose_rows_are_not_whole_16_bytes_are_refused():
    with world_of("sm_90a", 2) as world, pytest.raises(ValueError, match="8 equal leaves of multiples of 8"):
        x, weight = torch.ones(2, 80).bfloat16(), torch.ones(64, 80).bfloat16()
        overlap_gemm.gemm_all_reduce(x, weight, group=world.names[0], backend="fused", invariant="ranks")
