"""Tensor-parallel models as scripts of several ranks: gradients through the fused kernels."""

import textwrap
from pathlib import Path

import pytest

from cute_emulator.testing import emulator_command

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
    script = tmp_path / "model.py"
    script.write_text(textwrap.dedent(MODEL))
    support = {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = emulator_command("--arch", arch, "--ranks", 2, script, families, rows, env=support)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(line for line in done.stdout.splitlines() if "RIGHT" in line) == ["RIGHT 0", "RIGHT 1"]
