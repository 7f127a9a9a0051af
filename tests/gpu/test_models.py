"""Whole models, and torch's async tensor parallelism over our ops, on a GPU each."""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed._symmetric_memory as symm_mem
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from overlap_gemm.integrations import torch_symm_mem
from overlap_gemm.parallel import parallelize
from tests.support.models import VOCABULARY, tiny

WORLDS = [size for size in (2, 4, 8) if size <= torch.cuda.device_count()]


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def error(found, reference):
    return ((whole(found).double() - reference).abs().max() / reference.abs().max()).item()


def as_near_as_unsharded(rank, size, family, sequence_parallel, backend, device):
    """In bfloat16, against float64, beside the unsharded model in bfloat16; and the same text."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 16}
    plain = tiny(family, size, dtype=torch.bfloat16, **sizes).to(device)
    true = copy.deepcopy(plain).double()
    mesh = init_device_mesh(device, (size,))
    sharded = parallelize(copy.deepcopy(plain), mesh, sequence_parallel=sequence_parallel, backend=backend)
    torch.manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (2, 37)).to(device)
    results = []
    for model in (true, plain, sharded):
        out = model(ids, labels=ids)
        out.loss.backward()
        results.append({"logits": out.logits, **{name: p.grad for name, p in model.named_parameters()}})
    reference, expected, found = results
    for name, value in reference.items():
        if name in found:  # Phi3's packed projections have other names
            assert error(found[name], value) <= 3 * error(expected[name], value) + 0.02, name
    options = {"do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8, "pad_token_id": 0}
    with torch.no_grad():
        texts = [model.eval().generate(ids, **options) for model in (true, sharded.double())]
    assert torch.equal(*texts)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "phi3"])
@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence", "replicated"])
@pytest.mark.parametrize("backend", ["auto", "fused"])
@pytest.mark.parametrize("world", WORLDS)
def test_as_near_as_unsharded(ranks, world, backend, sequence_parallel, family):
    ranks(world).run(as_near_as_unsharded, family, sequence_parallel, backend, "cuda")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(1024, 2048, bias=False), nn.Linear(2048, 1024, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def async_tensor_parallelism(rank, size, backend, device):
    """torch.compile's pass finds the pairs, and ours carry all of them out, forward and backward."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Block().to(device)
    block = copy.deepcopy(plain).bfloat16()
    rows = Shard(0)
    plan = {"up": ColwiseParallel(input_layouts=rows), "down": RowwiseParallel(output_layouts=rows)}
    parallelize_module(block, init_device_mesh(device, (size,)), plan)
    x = torch.randn(256 * size, 4, 1024).to(device)
    own = x.chunk(size)[rank].bfloat16().requires_grad_()
    torch_symm_mem.install(backend=backend)
    try:
        with (
            mock.patch.object(torch_symm_mem, "_log_fallback") as said,
            symm_mem._test_mode(),  # every group may use them
            torch._inductor.config.patch(_micro_pipeline_tp=True, fx_graph_cache=False),
        ):
            out = torch.compile(block, fullgraph=True)(own)
            out.backward(torch.ones_like(out))
    finally:
        torch_symm_mem.uninstall()
    said.assert_not_called()
    true, rounded = plain.double(), copy.deepcopy(plain).bfloat16()
    expected, alike = true(x.double()), rounded(x.bfloat16())
    for product in (expected, alike):
        product.backward(torch.ones_like(product))
    mine = expected.chunk(size)[rank]
    assert error(out, mine) <= 3 * error(alike.chunk(size)[rank], mine) + 0.01
    for found, like, reference in zip(*map(nn.Module.parameters, (block, rounded, true)), strict=True):
        assert error(found.grad, reference.grad) <= 3 * error(like.grad, reference.grad) + 0.01


@pytest.mark.parametrize("backend", ["torch", "decomposed"])
@pytest.mark.parametrize("world", WORLDS)
def test_async_tensor_parallelism(ranks, world, backend):
    ranks(world).run(async_tensor_parallelism, backend, "cuda")
