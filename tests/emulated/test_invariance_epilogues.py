"""`invariant="batch"` with an epilogue: it acts on the same float32 sum in every kernel."""

import pytest
import torch

import overlap_gemm
from cute_emulator import Emulator
from overlap_gemm.epilogues import add_residual
from overlap_gemm.nn import RowParallelLinear
from overlap_gemm.runtime.virtual import VirtualWorld
from tests.support.chosen import in_turn
from tests.support.invariance import same_bits


def operands(rows, depth, seed):
    values = torch.randn(rows, depth, generator=torch.Generator().manual_seed(seed))
    return values.bfloat16()


OPS = ["gemm_reduce_scatter", "gemm_all_reduce", "all_gather_gemm"]


@pytest.mark.parametrize(("op", "arch"), in_turn(OPS, ["sm_90a", "sm_100a"]))
def test_rows_with_a_residual_do_not_depend_on_the_batch(arch, op):
    """Checks bits below those of the result: a second residual takes away the first call's result.

    Ops that sum are called by layers, whose default adds a residual in the kernel.
    """
    ranks, columns, depth, results = 2, 64, 192, {}
    xs = [operands(1, depth, 7 + (rank if op != "all_gather_gemm" else 0)) for rank in range(ranks)]
    weights = [operands(columns, depth, 20 + rank) for rank in range(ranks)]
    with (
        Emulator(arch, ranks, num_sms=4, sums="bitwise") as emulator,
        VirtualWorld(ranks, emulator=emulator) as world,
    ):
        how = {"backend": "fused", "invariant": "batch"}
        layers = [
            RowParallelLinear(
                ranks * depth, columns, bias=False, sequence_parallel=op == "gemm_reduce_scatter",
                tp_group=group, dtype=torch.bfloat16, **how,
            )
            for group in world.names
        ]  # fmt: skip
        for layer, weight in zip(layers, weights, strict=True):
            layer.weight = torch.nn.Parameter(weight, requires_grad=False)

        def call_of(rank, x, residual):
            if op != "all_gather_gemm":
                return layers[rank](x, residual)
            how_added = {**how, "group": world.names[rank], "epilogue": add_residual(residual=residual)}
            return overlap_gemm.all_gather_gemm(x, weights[rank], **how_added)

        def call(count, row):
            local = count // ranks if op == "all_gather_gemm" else count
            rows = {"gemm_reduce_scatter": count // ranks}.get(op, count)
            residual = row.expand(rows, columns).contiguous()
            outs = [call_of(rank, x.expand(local, depth).contiguous(), residual) for rank, x in enumerate(xs)]
            world.synchronize()
            return outs[0]

        for count in (2, 144):
            first = call(count, torch.zeros(columns, dtype=torch.bfloat16))
            results[count] = first[0], call(count, -first[0])[0]
    assert same_bits(results[2][0], results[144][0])
    assert same_bits(results[2][1], results[144][1])
    assert results[2][1].any()
