"""Parallelized models in one graph: torch.compile with any sequence length; what torch.export takes."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from overlap_gemm.nn import ParallelMLP
from overlap_gemm.parallel import parallelize
from overlap_gemm.testing.models import FAMILIES, VOCABULARY, tiny


def compiles(rank, size, family, sequence_parallel, dynamic):
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (size,))
    model = parallelize(tiny(family, size), mesh, sequence_parallel=sequence_parallel)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    torch.manual_seed(1)
    for length in (8, 13) if dynamic else (8,):
        ids = torch.randint(VOCABULARY, (2, length))
        results = []
        for call in (model, compiled):
            out = call(ids, labels=ids, use_cache=False)
            model.zero_grad()
            out.loss.backward()
            gradients = [parameter.grad.to_local().clone() for parameter in model.parameters()]
            results.append([out.loss, out.logits, *gradients])
        for eager, found in zip(*results, strict=True):
            torch.testing.assert_close(found, eager)


def test_compile(ranks):
    ranks(2).run(compiles, "llama", True, True)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile_without_sequence_parallelism(ranks, dynamic):
    ranks(2).run(compiles, "llama", False, dynamic)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_compile_every_family(ranks, family):
    ranks(2).run(compiles, family, True, False)


def exports(rank, size):
    torch.manual_seed(0)
    model = ParallelMLP(8, 10, sequence_parallel=True, bias=True, rows="equal").eval()
    x = torch.randn(4, 2, 8)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=2)},))
    longer = torch.randn(6, 2, 8)
    torch.testing.assert_close(program.module()(longer), model(longer))
    called = {node.target for node in program.graph.nodes}
    assert torch.ops.overlap_gemm.all_gather_gemm.default in called

    whole = parallelize(tiny("llama", size).eval(), init_device_mesh("cpu", (size,)))
    with pytest.raises(RuntimeError, match="non-fx-graphable type .*DTensorSpec"):  # torch's own limit
        torch.export.export(whole, (torch.arange(8).view(1, 8),), {"use_cache": False}, strict=False)


def test_export(ranks):
    """Layers of `overlap_gemm.nn` can be exported; DTensor parameters cannot, whoever made them."""
    ranks(2).run(exports)
