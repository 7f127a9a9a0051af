"""`invariant="batch"` of fused kernels on one GPU: the order in which a GPU sums is asked of the GPU."""

from dataclasses import replace

import pytest
import torch

import overlap_gemm
from overlap_gemm.nn import RowParallelLinear
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.testing.cases import LAYOUTS, Case
from tests.support.invariance import adversarial, same_bits
from tests.support.ops import SHARDED

SUMS = [name for name, op in SHARDED.items() if op.sums]


def results(op, whole, ranks, device, **options):
    """Rank 0's result; `bias` is one for all columns."""
    layout = LAYOUTS[op]
    with VirtualWorld(ranks, device=device) as world:
        outs = []
        for rank, group in enumerate(world.names):
            parts = (
                layout.part(one, dim, rank, ranks).to(device)
                for one, dim in ((whole.x, layout.x), (whole.weight, layout.weight))
            )
            outs.append(getattr(overlap_gemm, op)(*parts, group=group, backend="fused", **options))
        world.synchronize()
    return outs[0]


@pytest.mark.parametrize("op", SUMS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_row_has_the_same_bits_in_batches_of_any_size(device, op, ranks):
    """A second call, whose bias takes away what the first gave, shows the bits below those of the result."""
    case = Case(op, 4, 512, 4096, torch.bfloat16, bias=False)
    whole = adversarial(case)
    row, found = whole.x[:1], []
    for rows in (1, 3, 16, 65, 128, 1024, 4096):
        batch = type(whole)(row.expand(rows, -1).contiguous(), whole.weight, None, whole.grad)
        first = results(op, batch, ranks, device, invariant="batch")[0]
        below = results(op, batch, ranks, device, invariant="batch", bias=-first)[0]
        found.append((first, below))
    for first, below in found[1:]:
        assert same_bits(first, found[0][0])
        assert same_bits(below, found[0][1])
    assert found[0][1].any()


@pytest.mark.parametrize("op", SUMS)
@pytest.mark.parametrize("depth", [4096, 8 * 72])
def test_bits_do_not_depend_on_the_number_of_ranks(device, op, depth):
    """Compares numbers of ranks, each with the kernel that the model takes, and one with another."""
    inputs, seen = adversarial(Case(op, 264, 512, depth, torch.bfloat16, bias=False)), []
    wide = {"mma": "cooperative", "tile": (128, 256), "cluster": (1, 1)}
    is_hopper = torch.cuda.get_device_capability(device)[0] == 9
    for ranks, fields in [(1, {}), (2, {}), (4, {}), *([(2, wide)] if is_hopper else ())]:
        with overlap_gemm.configured(**fields):
            first = results(op, inputs, ranks, device, invariant="ranks")
            below = results(op, inputs, ranks, device, invariant="ranks", bias=-first[0])
        seen.append((first, below))
    rows = len(seen[2][0])  # rank 0's, of the most ranks
    for first, below in seen[1:]:
        assert same_bits(first[:rows], seen[0][0][:rows])
        assert same_bits(below[:rows], seen[0][1][:rows])
    assert (seen[0][1][1:] != 0).any()


def rows_of_layers(inputs, residual, ranks, device, **options):
    """Returns rank 0's rows of layers that add a residual, the same for all rows."""
    with VirtualWorld(ranks, device=device) as world:
        outs = []
        for rank, group in enumerate(world.names):
            layer = RowParallelLinear(
                inputs.x.shape[1], len(inputs.weight), bias=False, tp_group=group, backend="fused",
                dtype=inputs.weight.dtype, device=device, **options,
            )  # fmt: skip
            part = inputs.weight.chunk(ranks, 1)[rank].to(device)
            layer.weight = torch.nn.Parameter(part.contiguous(), requires_grad=False)
            x = inputs.x.chunk(ranks, 1)[rank].to(device)
            rows = len(x) // ranks if layer.sequence_parallel else len(x)
            outs.append(layer(x.contiguous(), residual.expand(rows, -1).contiguous()))
        world.synchronize()
    return outs[0]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("invariant", "counts"), [("batch", [2]), ("ranks", [1, 2, 4])])
def test_layers_add_a_residual_with_the_same_bits(device, sequence_parallel, invariant, counts):
    """Checks bits below those of the result: a second call's residual takes away the first one's result."""
    inputs, pairs = adversarial(Case("gemm_all_reduce", 4, 512, 4096, torch.bfloat16, bias=False)), []
    how = {"sequence_parallel": sequence_parallel, "invariant": invariant}
    nothing = torch.zeros(512, dtype=torch.bfloat16, device=device)
    for ranks in counts:
        for rows in (4, 16, 128, 2048):
            batch = replace(inputs, x=inputs.x[:1].expand(rows, -1).contiguous())
            first = rows_of_layers(batch, nothing, ranks, device, **how)[0]
            pairs.append((first, rows_of_layers(batch, -first, ranks, device, **how)[0]))
    for pair in pairs[1:]:
        assert all(map(same_bits, pair, pairs[0]))
    assert pairs[0][1].any()


def scaled_results(op, x, weight, scales, ranks, device, **options):
    """Returns all rows of a result, and those of a call whose bias takes the first one away."""
    pairs = []
    with VirtualWorld(ranks, device=device) as world:
        for _ in range(2):
            bias = -pairs[0][0] if pairs else torch.zeros(len(weight), dtype=torch.bfloat16, device=device)
            parts = [
                [one] * ranks if one.shape[1] == 1 else one.chunk(ranks, 1) for one in (x, weight, *scales)
            ]
            outs = [
                getattr(overlap_gemm, op)(
                    a.contiguous(), b.contiguous(), scale_x=of_a.contiguous(), scale_w=of_b.contiguous(),
                    bias=bias, group=group, backend="fused", **options,
                )
                for a, b, of_a, of_b, group in zip(*parts, world.names, strict=True)
            ]  # fmt: skip
            world.synchronize()
            pairs.append(torch.cat(outs) if op == "gemm_reduce_scatter" else outs[0])
    return pairs


def spread_bytes(rows, depth, along, device):
    """Returns e4m3 values of all exponents, and scales of rows or of blocks."""
    values = torch.randn(rows, depth) * 4.0 ** torch.randint(-3, 3, (rows, depth))
    values[:, depth // 2 :] = torch.where(
        torch.rand(rows, depth // 2) < 0.25, -values[:, : depth // 2], values[:, depth // 2 :]
    )
    scales = torch.rand(rows, 1 if along is None else depth // along).clamp_min(0.1)
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).to(device), scales.to(device)


@pytest.mark.parametrize("op", SUMS)
@pytest.mark.parametrize("block", [None, 128])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_row_of_bytes_has_the_same_bits_in_batches_of_any_size(device, op, block, ranks):
    torch.manual_seed(ranks)
    (x, scale_x), (weight, scale_w) = (spread_bytes(rows, 4096, block, device) for rows in (1, 512))
    scale_w = scale_w if block is None else scale_w[::128].contiguous()
    pairs = []
    for rows in (4, 16, 68, 128, 1024, 4096):
        of_batch = [one.expand(rows, one.shape[1]).contiguous() for one in (x, scale_x)]
        pairs.append(
            scaled_results(
                op, of_batch[0], weight, (of_batch[1], scale_w), ranks, device,
                block=block, k=4096, invariant="batch",
            )
        )  # fmt: skip
    for one, below in pairs:
        assert all(same_bits(row, pairs[0][0][0]) for row in one[[0, -1]])
        assert all(same_bits(row, pairs[0][1][0]) for row in below[[0, -1]])
    assert pairs[0][1].any()


@pytest.mark.parametrize("op", SUMS)
def test_bits_of_bytes_do_not_depend_on_the_number_of_ranks(device, op):
    """Checks scales of blocks: a leaf is of whole blocks."""
    torch.manual_seed(0)
    (x, scale_x), (weight, scale_w) = (spread_bytes(rows, 4096, 128, device) for rows in (264, 512))
    pairs = [
        scaled_results(
            op, x, weight, (scale_x, scale_w[::128].contiguous()), ranks, device,
            block=128, k=4096, invariant="ranks",
        )
        for ranks in (1, 2, 4)
    ]  # fmt: skip
    for other in pairs[1:]:
        assert all(map(same_bits, pairs[0], other))
    assert (pairs[0][1][1:] != 0).any()


@pytest.mark.parametrize("op", SHARDED)
def test_portable_products_in_blocks_serve_gpus(device, op):
    """In float32, which no fused kernel takes."""
    whole = adversarial(Case(op, 300, 256, 512, torch.float32, bias=False))
    call = getattr(overlap_gemm, op)
    x, weight = whole.x.to(device), whole.weight.to(device)
    everything = call(x, weight, invariant="ranks")
    for kept in ([0], [7, 100], list(range(20, 290))):
        assert same_bits(everything[kept], call(x[kept].contiguous(), weight, invariant="ranks"))
