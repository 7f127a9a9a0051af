"""Layers as programs of `torch.export`, saved and loaded, and as packages of AOTInductor: right, any rows."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from overlap_gemm.nn import ColumnParallelLinear, Float8, ParallelMLP, RMSNorm, RowParallelLinear
from overlap_gemm.parallel import exportable, parallelize
from tests.support.chosen import in_turn
from tests.support.models import tiny

AUTO = torch.export.Dim.AUTO
LAYERS = {
    "column": lambda: ColumnParallelLinear(32, 48),
    "column, rows": lambda: ColumnParallelLinear(32, 48, sequence_parallel=True),
    "column, no bias": lambda: ColumnParallelLinear(32, 48, bias=False, sequence_parallel=True),
    "row": lambda: RowParallelLinear(32, 48),
    "row, rows": lambda: RowParallelLinear(32, 48, sequence_parallel=True),
    "MLP": lambda: ParallelMLP(32, 64),
    "MLP, rows": lambda: ParallelMLP(32, 64, sequence_parallel=True, rows="equal"),
    "MLP, biases": lambda: ParallelMLP(32, 64, bias=True, sequence_parallel=True, rows="equal"),
    "float8": lambda: ColumnParallelLinear(32, 48, sequence_parallel=True, float8=Float8()),
    "norm": lambda: RMSNorm(32),
}


def layer_of(which, rank, size):
    torch.manual_seed(rank)
    layer = LAYERS[which]().eval()
    width = 32 // size if which.startswith("row") else 32
    return layer, [torch.randn(rows, 2, width) for rows in (4, 6)]


def exported(rank, size, which, strict, folder):
    layer, (x, longer) = layer_of(which, rank, size)
    with torch.no_grad():
        program = torch.export.export(layer, (x,), strict=strict, dynamic_shapes=({0: AUTO},))
        path = f"{folder}/{rank}.pt2"
        torch.export.save(program, path)
        loaded = torch.export.load(path)
        for one in (program, loaded):
            for rows in (x, longer):
                torch.testing.assert_close(one.module()(rows), layer(rows))
        ours = [str(node.target) for node in loaded.graph.nodes if "overlap_gemm." in str(node.target)]
        assert ours or which == "norm"


@pytest.mark.parametrize(("which", "strict"), in_turn(LAYERS, [False, True]))
def test_exported_saved_and_loaded(ranks, tmp_path, which, strict):
    ranks(2).run(exported, which, strict, str(tmp_path))


def packaged(rank, size, which, folder):
    layer, (x, longer) = layer_of(which, rank, size)
    with torch.no_grad():
        program = torch.export.export(layer, (x,), dynamic_shapes=({0: AUTO},))
        path = torch._inductor.aoti_compile_and_package(program, package_path=f"{folder}/{rank}.pt2")
        package = torch._inductor.aoti_load_package(path)
        for rows in (x, longer):
            torch.testing.assert_close(package(rows), layer(rows), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "which",
    [which if which == "MLP, rows" else pytest.param(which, marks=pytest.mark.slow) for which in LAYERS],
)
def test_packaged_by_aot_inductor(ranks, tmp_path, which):
    ranks(2).run(packaged, which, str(tmp_path))


def model_packaged(rank, size, folder):
    model = parallelize(
        tiny("llama", 2, dtype=torch.float32, num_hidden_layers=1), init_device_mesh("cpu", (size,))
    )
    ids = torch.arange(8).view(1, 8)
    with torch.no_grad(), exportable(model.eval()):
        program = torch.export.export(model, (ids,), {"use_cache": False})
        path = torch._inductor.aoti_compile_and_package(program, package_path=f"{folder}/{rank}.pt2")
        found = torch._inductor.aoti_load_package(path)(ids, use_cache=False)
        torch.testing.assert_close(found.logits, model(ids, use_cache=False).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_model_packaged_by_aot_inductor(ranks, tmp_path):
    ranks(2).run(model_packaged, str(tmp_path))
