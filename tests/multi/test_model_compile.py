"""Parallelized models in one graph: torch.compile and torch.export, with any sequence length."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from overlap_gemm.parallel import exportable, parallelize
from tests.support.models import FAMILIES, VOCABULARY, tiny


def compiles(rank, size, family, sequence_parallel, dynamic, layers=2):
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (size,))
    model = tiny(family, size, num_hidden_layers=layers)
    parallelize(model, mesh, sequence_parallel=sequence_parallel)
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
    ranks(2).run(compiles, "llama", True, False, 1)  # compiling is slow: two layers, and any length, below


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile_without_sequence_parallelism(ranks, dynamic):
    ranks(2).run(compiles, "llama", False, dynamic)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_compile_every_family(ranks, family):
    ranks(2).run(compiles, family, True, False)


@pytest.mark.slow
def test_compile_dynamic(ranks):
    ranks(2).run(compiles, "llama", True, True)


def leaves_out_mixtures(rank, size):
    model = parallelize(tiny("mixtral", size), init_device_mesh("cpu", (size,)), sequence_parallel=False)
    mixture, x = (
        model.model.layers[0].mlp,
        torch.randn(1, 6, 24, generator=torch.Generator().manual_seed(0)).double(),
    )
    torch.testing.assert_close(torch.compile(mixture, backend="eager")(x), mixture(x))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="mixtures of experts .* are not compiled"):
        torch.compile(mixture, backend="eager", fullgraph=True)(x)


def test_mixtures_break_the_graph_and_are_named_in_one_graph(ranks):
    ranks(2).run(leaves_out_mixtures)


def exports_model(rank, size, family, options, dynamic, strict, layers=2):
    """This rank's program gives the model's logits, also for lengths that it was not traced with."""
    model = tiny(family, size, num_hidden_layers=layers).eval()
    model = parallelize(model, init_device_mesh("cpu", (size,)), **options)
    before = dict(model.named_parameters(remove_duplicate=False))
    shapes = {"input_ids": {1: torch.export.Dim.AUTO}, "use_cache": None} if dynamic else None
    ids = [torch.randint(VOCABULARY, (2, length)) for length in ((9, 14, 4) if dynamic else (9, 9))]
    with torch.no_grad(), exportable(model):
        program = torch.export.export(
            model, (ids[0],), {"use_cache": False}, strict=strict, dynamic_shapes=shapes
        )
    assert dict(model.named_parameters(remove_duplicate=False)) == before
    called = {str(node.target) for node in program.graph.nodes}
    wanted = "gemm_reduce_scatter" if options.get("sequence_parallel", True) else "gemm_all_reduce"
    assert f"overlap_gemm.{wanted}.default" in called
    for name, parameter in before.items():
        assert program.state_dict[name].shape == parameter.to_local().shape, name
    for one in ids:
        with torch.no_grad():
            wanted = model(one, use_cache=False).logits
        torch.testing.assert_close(program.module()(one, use_cache=False).logits, wanted)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_export(ranks, sequence_parallel):
    ranks(2).run(exports_model, "qwen3", {"sequence_parallel": sequence_parallel}, True, False, 1)


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_export_every_family(ranks, family, strict):
    ranks(2).run(exports_model, family, {}, False, strict)


def refuses_to_export(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    sharded = parallelize(tiny("llama", size), mesh, logits="sharded")
    torchs = parallelize_module(torch.nn.Sequential(torch.nn.Linear(4, 4)), mesh, {"0": ColwiseParallel()})
    for model, words in (
        (sharded, r"'lm_head' \(Linear\) cannot be exported: its output is a DTensor"),
        (torchs, r"'0' \(Linear\) cannot be exported: its forward takes DTensors"),
    ):
        with pytest.raises(ValueError, match=words), exportable(model):
            pass
    wide = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))
    both = fully_shard(parallelize(tiny("llama", size), wide["tp"]), mesh=wide["dp"])
    with pytest.raises(ValueError, match="a second dimension of the mesh"), exportable(both):
        pass


def test_what_cannot_be_exported_is_named(ranks):
    ranks(2).run(refuses_to_export)
