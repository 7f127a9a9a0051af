"""examples/models/diffusion.py: sharded by sequence, and by heads and weights, it is the unsharded model."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from overlap_gemm.nn import full_state_dict, sum_sequence_parallel_gradients
from overlap_gemm.spec.sharding import Shards
from tests.support.scripts import load, run_program

FILE = Path(__file__).parents[2] / "examples" / "models" / "diffusion.py"
HIDDEN, HEADS, LAYERS = 16, 4, 2
SMALL = ("--hidden", HIDDEN, "--layers", LAYERS, "--heads", HEADS, "--dtype", "float64", "--lr", 0.01)


class PlainAttention(nn.Module):
    """Unsharded attention, with the names of the children of `UlyssesAttention`."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(HIDDEN, HIDDEN, bias=False, dtype=torch.float64))

    def forward(self, x):
        parts = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        return self.o_proj(self.attention(q, k, v).transpose(1, 2).flatten(2))


class PlainMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (
            nn.Linear(HIDDEN, 4 * HIDDEN, bias=False, dtype=torch.float64) for _ in range(2)
        )
        self.down_proj = nn.Linear(4 * HIDDEN, HIDDEN, bias=False, dtype=torch.float64)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def equals_the_unsharded_one(rank, size, tp, tokens):
    """Compares output and gradients, of the input and of each parameter or shard."""
    program = load(FILE)
    mesh = init_device_mesh("cpu", (size // tp, tp), mesh_dim_names=("sp", "tp"))
    torch.manual_seed(0)
    model = program.DiT(HIDDEN, HEADS, LAYERS, tokens, mesh, torch.float64)
    with torch.no_grad():
        for block in model.blocks:
            block.modulation.weight.normal_()  # zeros otherwise, and so would be most gradients
    plain = program.DiT(HIDDEN, HEADS, LAYERS, tokens, mesh, torch.float64)
    for block in plain.blocks:
        block.attention, block.mlp = PlainAttention(program.rotary_attention), PlainMlp()
    plain.load_state_dict(full_state_dict(model))

    x = torch.randn(3, tokens, 12, dtype=torch.float64, requires_grad=True)
    time, factor = torch.rand(3, dtype=torch.float64), torch.randn(3, tokens, 12, dtype=torch.float64)
    wanted = plain(x, time)
    (wanted * factor).sum().backward()
    place = slice(*Shards.even(tokens, size // tp).range(mesh["sp"].get_local_rank()))
    local = x.detach()[:, place].requires_grad_()
    out = model(local, time)
    (out * factor[:, place]).sum().backward()
    sum_sequence_parallel_gradients(model, mesh["sp"])
    torch.testing.assert_close(out, wanted[:, place])
    torch.testing.assert_close(local.grad, x.grad[:, place])
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in model.named_parameters():
        exact = gradients[name]
        assert exact.abs().max() > 1e-3, name
        if parameter.shape != exact.shape:
            dim = 1 if "o_proj" in name or "down_proj" in name else 0
            exact = exact.chunk(tp, dim)[mesh["tp"].get_local_rank()]
        torch.testing.assert_close(parameter.grad, exact, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("world", "tp", "tokens"), [(2, 1, 9), (4, 2, 9), (1, 1, 4)], ids=str)
def test_model_and_gradients_are_the_unsharded_models(ranks, world, tp, tokens):
    ranks(world).run(equals_the_unsharded_one, tp, tokens)


def printed(text):
    """Returns loss and norm of each step."""
    return torch.tensor(
        [[float(one) for one in pair] for pair in re.findall(r"loss (\S+), gradient norm (\S+)", text)]
    )


def test_program_trains_on_all_shapes_of_the_mesh_as_on_one_rank(ranks):
    options = (*SMALL, "--video", 3, 4, 6, "--steps", 8)
    alone = printed(ranks(1).run(run_program, str(FILE), options)[0])
    assert alone.shape == (8, 2)
    assert alone[-1, 0] < 0.8 * alone[0, 0]
    of_two = ranks(2).run(run_program, str(FILE), options)[0]
    in_pairs = ranks(4).run(run_program, str(FILE), (*options, "--tp", 2))[0]
    for text in (of_two, in_pairs):
        torch.testing.assert_close(printed(text), alone, rtol=1e-6, atol=1e-6)
