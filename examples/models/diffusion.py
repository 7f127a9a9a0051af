"""Trains a diffusion transformer (DiT) on videos; the patches of a video are sharded over the ranks.

    bash launch/torchrun.sh python examples/models/diffusion.py
    bash launch/torchrun.sh python examples/models/diffusion.py --tp 2     # weights over pairs of ranks, too

Attention exchanges tokens for heads (`nn.UlyssesAttention`); everything else is applied to a rank's tokens.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import overlap_gemm
from overlap_gemm.nn import (
    ParallelMLP,
    UlyssesAttention,
    clip_grad_norm_,
    sequence_parallel_parameters,
    sum_sequence_parallel_gradients,
)

CHANNELS, PATCH = 3, (1, 2, 2)
"""Extents of a patch: frames, height, width."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--video", type=int, nargs=3, default=(16, 64, 64), help="frames, height, width")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tp", type=int, default=1, help="ranks over which heads and weights are divided")
    return parser.parse_args()


def waves(positions: Tensor, size: int) -> Tensor:
    """Returns angles `[..., size]` of positions, each at its own frequency."""
    frequencies = torch.exp(-math.log(1e4) / size * torch.arange(size, device=positions.device))
    return positions[..., None] * frequencies


def rotary_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attends with rotary positions. A rank has all S tokens of its heads, so positions are 0 to S - 1."""
    angles = waves(torch.arange(q.shape[2], device=q.device), q.shape[3] // 2)
    cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
    rotated = []
    for one in (q, k):
        first, second = one.chunk(2, -1)
        rotated.append(torch.cat([first * cos - second * sin, first * sin + second * cos], -1))
    return F.scaled_dot_product_attention(*rotated, v)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift


class Block(nn.Module):
    """Attention and MLP, modulated by the timestep."""

    def __init__(self, hidden: int, heads: int, tokens: int, mesh: DeviceMesh, dtype: torch.dtype):
        super().__init__()
        tp = mesh["tp"] if mesh["tp"].size() > 1 else None
        self.attention = UlyssesAttention(
            hidden, heads, attention=rotary_attention, sequence_dim=1, group=mesh["sp"], tp_group=tp,
            rows=tokens, device=mesh.device_type, dtype=dtype,
        )  # fmt: skip
        self.mlp = ParallelMLP(hidden, 4 * hidden, tp_group=mesh["tp"], device=mesh.device_type, dtype=dtype)
        self.modulation = nn.Linear(hidden, 6 * hidden, device=mesh.device_type, dtype=dtype)
        nn.init.zeros_(self.modulation.weight)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Attends and multiplies: x `[B, tokens of this rank, hidden]`, condition `[B, hidden]`."""
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(condition)[:, None].chunk(6, -1)
        x = x + gate * self.attention(modulate(x, shift, scale))
        return x + mlp_gate * self.mlp(modulate(x, mlp_shift, mlp_scale))


class DiT(nn.Module):
    """Diffusion transformer of this rank's patches `[B, tokens of this rank, elements of a patch]`."""

    def __init__(
        self, hidden: int, heads: int, layers: int, tokens: int, mesh: DeviceMesh, dtype: torch.dtype
    ):
        super().__init__()
        where = {"device": mesh.device_type, "dtype": dtype}
        elements = CHANNELS * math.prod(PATCH)
        self.embedding = nn.Linear(elements, hidden, **where)
        self.time = nn.Sequential(
            nn.Linear(hidden, hidden, **where), nn.SiLU(), nn.Linear(hidden, hidden, **where), nn.SiLU()
        )
        self.blocks = nn.ModuleList(Block(hidden, heads, tokens, mesh, dtype) for _ in range(layers))
        self.modulation = nn.Linear(hidden, 2 * hidden, **where)
        self.head = nn.Linear(hidden, elements, **where)
        # Each rank applies these to its tokens. Attention sums its gradients itself.
        of_tokens = [self.embedding, self.time, self.modulation, self.head]
        for part in (*of_tokens, *(part for block in self.blocks for part in (block.mlp, block.modulation))):
            sequence_parallel_parameters(part)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Predicts the velocity of noisy patches x at times `[B]` from 0 to 1."""
        angles = waves(1000 * time, self.embedding.out_features // 2)
        condition = self.time(torch.cat([angles.cos(), angles.sin()], -1).to(x.dtype))
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x, condition)
        return self.head(modulate(x, *self.modulation(condition)[:, None].chunk(2, -1)))


def patches(video: Tensor) -> Tensor:
    """Returns the patches `[B, S, elements]` of videos `[B, C, frames, height, width]`."""
    for dim, size in enumerate(PATCH, 2):
        video = video.unflatten(2 * dim - 2, (-1, size))
    return video.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)


def videos(options: argparse.Namespace) -> Tensor:
    """Returns videos `[B, C, frames, height, width]` of waves that move."""
    frames, height, width = (torch.arange(size) for size in options.video)
    phase = frames[:, None, None] + height[:, None] / 2 + width
    speed = 1 + torch.rand(options.batch, CHANNELS, 1, 1, 1)
    return torch.sin(speed * phase)


def main(options: argparse.Namespace) -> None:
    world = overlap_gemm.init()
    shape = (world.size // options.tp, options.tp)
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=("sp", "tp"))
    sp, dtype = mesh["sp"], getattr(torch, options.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    torch.manual_seed(0)  # every rank draws the same weights, videos and noise
    tokens = math.prod(size // part for size, part in zip(options.video, PATCH, strict=True))
    model = DiT(options.hidden, options.heads, options.layers, tokens, mesh, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    for step in range(options.steps):
        clean = patches(videos(options))
        noise, time = torch.randn_like(clean), torch.rand(len(clean))
        noisy = clean.lerp(noise, time[:, None, None])
        local = [one.chunk(sp.size(), 1)[sp.get_local_rank()] for one in (noisy, noise - clean)]
        x, velocity = (one.to(world.device, dtype) for one in local)
        error = model(x, time.to(world.device, wide)) - velocity
        loss = error.square().sum(dtype=wide) / clean.numel()  # this rank's share of the mean
        loss.backward()
        sum_sequence_parallel_gradients(model, sp)
        norm = clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        torch.distributed.all_reduce(loss, group=sp.get_group())
        if world.rank == 0:
            print(f"step {step}: loss {loss:.12f}, gradient norm {norm:.12f}", flush=True)
    overlap_gemm.finalize()


if __name__ == "__main__":
    main(arguments())
