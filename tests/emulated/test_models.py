"""Tensor-parallel models as scripts of several ranks: gradients through the fused kernels."""

from pathlib import Path

import pytest

from tests.support.emulated.rank_scripts import lines_of_ranks

MODEL = """
    import sys
    import torch, overlap_gemm
    from overlap_gemm.parallel import parallelize
    from tests.support.models import tiny
    from torch.distributed import init_device_mesh

    world = overlap_gemm.init()
    assert (world.rank, world.size, world.device.index) == (torch.distributed.get_rank(), 2, world.rank)

    def make(family):
        return tiny(family, world.size, dtype=torch.bfloat16, hidden_size=64, intermediate_size=64,
                    head_dim=16, num_hidden_layers=1, vocab_size=96)

    def run(model, ids):
        loss = model(ids, labels=ids).loss
        loss.backward()
        return loss.item(), model.model.embed_tokens.weight.grad, model.model.norm.weight.grad

    for family in sys.argv[1].split(","):
        ids = torch.randint(3, 96, (2, 19), generator=torch.Generator().manual_seed(1))
        right_loss, *right = run(make(family).double(), ids)
        _, *rounded = run(make(family), ids)  # what bfloat16 costs without shards
        model = make(family).to(world.device)
        mesh = init_device_mesh("cuda", (world.size,))
        parallelize(model, mesh, sequence_parallel=sys.argv[2] == "shards", backend="fused")
        loss, *gradients = run(model, ids.to(world.device))
        assert abs(loss - right_loss) < 0.01 * right_loss, (loss, right_loss)
        for gradient, plain, reference in zip(gradients, rounded, right):
            found = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            error, usual = (
                (it.cpu().double() - reference).norm() / reference.norm() for it in (found, plain)
            )
            assert error < 1.5 * usual, (family, error, usual)
    overlap_gemm.finalize()
    print("RIGHT", world.rank)
"""


@pytest.mark.parametrize(
    ("arch", "families", "rows"),
    [
        ("sm_90a", "phi3", "whole"),
        pytest.param("sm_90a", "llama,qwen3,gemma3,phi3", "whole", marks=pytest.mark.slow),
        pytest.param("sm_90a", "llama,phi3", "shards", marks=pytest.mark.slow),
        pytest.param("sm_100a", "llama", "shards", marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_the_unsharded_model(tmp_path, arch, families, rows):
    support = {"PYTHONPATH": str(Path(__file__).parents[2])}
    lines = lines_of_ranks(tmp_path, MODEL, families, rows, arch=arch, env=support)
    assert [line for line in lines if "RIGHT" in line] == ["RIGHT 0", "RIGHT 1"]


BLOCK = """
    import torch, overlap_gemm
    from overlap_gemm.nn import ParallelBlock
    from torch.distributed import new_group

    world = overlap_gemm.init()
    alone = [new_group([rank]) for rank in range(world.size)][world.rank]

    def make(dtype, **options):
        block = ParallelBlock(64, 4, 64, head_dim=16, num_kv_heads=2, dtype=dtype, **options)
        block.load_state_dict(state)
        return block

    torch.manual_seed(0)
    state = ParallelBlock(64, 4, 64, head_dim=16, num_kv_heads=2, tp_group=alone).state_dict()
    x = torch.randn(20, 1, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    blocks = (
        make(torch.float64, tp_group=alone),
        make(torch.bfloat16, tp_group=alone),  # what bfloat16 costs without shards
        make(torch.bfloat16, device=world.device, sequence_parallel=True, backend="fused", fuse=True),
    )
    inputs = x.double(), x, x.chunk(world.size)[world.rank].to(world.device)

    def run(block, x):
        with torch.no_grad():
            inferred = block(x, is_causal=True)
        out = block(x.requires_grad_(), is_causal=True)
        out.backward(torch.cos(3 * x).detach())
        return inferred, out.detach(), x.grad

    for right, rounded, out in zip(*map(run, blocks, inputs)):
        right, rounded = (one.chunk(world.size)[world.rank].double() for one in (right, rounded))
        error, usual = ((one.cpu().double() - right).norm() for one in (out, rounded))
        assert error < 1.5 * usual < 0.02 * right.norm(), (error, usual)
    overlap_gemm.finalize()
    print("RIGHT", world.rank)
"""


def test_block_with_epilogues_in_kernels_equals_the_unsharded_one(tmp_path):
    lines = lines_of_ranks(tmp_path, BLOCK)
    assert [line for line in lines if "RIGHT" in line] == ["RIGHT 0", "RIGHT 1"]
