"""The emulator against the GPU: the same kernels on the same operands.

A tensor core may add the products of an MMA in any order and at any internal width, so results are compared
bit for bit on operands that leave it no choice: small integers, whose sums are exact, and one nonzero
element per row of A, so that a partial is one exact product while the sum over ranks still rounds.
"""

import pytest
import torch

import overlap_gemm
from cute_emulator import Emulator
from overlap_gemm.runtime.executor import cuda_executor
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.tuning.settings import configured
from tests.support.ranks import Ranks

ARCH = cuda_executor(0).arch if torch.cuda.is_available() else ""
M, N, K = 264, 200, 328
KERNELS = {
    "sm_90a": [
        {"mma": "pingpong", "tile": (64, 128), "cluster": (1, 1)},
        {"mma": "pingpong", "tile": (128, 128), "cluster": (2, 1)},
        {"mma": "cooperative", "tile": (128, 256), "cluster": (1, 2)},
    ],
    "sm_100a": [{"mma": "1cta", "tile": (128, 128)}, {"mma": "2cta", "tile": (256, 256), "cluster": (2, 1)}],
}


@pytest.fixture(scope="module")
def apart():
    """A process without CUDA: an emulator serves the kernels of the one it lives in."""
    with Ranks(1) as ranks:
        yield ranks


def operands(kind, ranks):
    """Per rank x `[M, K]` and weight `[N, K]`, and a bias `[N]`, bfloat16."""
    generator = torch.Generator().manual_seed(7)
    if kind == "integers":
        x, weight = (torch.randint(-4, 5, (ranks, rows, K), generator=generator) for rows in (M, N))
    else:
        x = torch.zeros(ranks, M, K)
        chosen = torch.randint(K, (ranks, M, 1), generator=generator)
        x.scatter_(2, chosen, torch.randn(ranks, M, 1, generator=generator))
        weight = torch.randn(ranks, N, K, generator=generator)
    return x.bfloat16(), weight.bfloat16(), torch.randn(N, generator=generator).bfloat16()


def results(world, fields, x, weight, bias):
    """All ranks' rows, one below the other, two calls in a row."""
    with configured(**fields):
        calls = [
            [
                overlap_gemm.gemm_reduce_scatter(
                    x[r], weight[r], bias=bias, group=group.name, backend="fused"
                )
                for r, group in enumerate(world.ranks)
            ]
            for _ in range(2)
        ]
        world.synchronize()
    return [torch.cat(call).cpu() for call in calls]


def emulated(rank, size, arch, fields, kind, ranks):
    with Emulator(arch, ranks) as emulator, VirtualWorld(ranks, emulator=emulator) as world:
        return results(world, fields, *operands(kind, ranks))


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("kind", ["integers", "one-product"])
@pytest.mark.parametrize("fields", KERNELS.get(ARCH, []), ids=lambda fields: fields["mma"])
def test_bit_for_bit(device, apart, fields, kind, ranks):
    (wanted,) = apart.run(emulated, ARCH, fields, kind, ranks)
    with VirtualWorld(ranks, device=device) as world:
        given = [operand.to(device) for operand in operands(kind, ranks)]
        outs = results(world, fields, *given)
    for out, want in zip(outs, wanted, strict=True):
        assert torch.equal(out, want), f"{(out != want).sum()} of {out.numel()} elements differ"
