"""Kernels for compute-sanitizer, which runs one kernel at a time:

    for tool in memcheck racecheck synccheck; do
        compute-sanitizer --tool $tool --error-exitcode 1 python tests/gpu/under_sanitizer.py
    done

Ranks that wait for each other would wait for ever under it. So all flags are set beforehand, as if every
partial had arrived, and the ranks run one after another; all the data they sum is there but for the first's.
"""

import torch

import overlap_gemm
from overlap_gemm.kernels.geometry import CONTROL_BYTES
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.tuning.settings import configured

M, N, K = 264, 200, 136
KERNELS = (
    {"mma": "pingpong", "tile": (64, 128), "cluster": (1, 1)},
    {"mma": "cooperative", "tile": (128, 256), "cluster": (2, 1)},
)


class ArrivedWorld(VirtualWorld):
    """Virtual ranks whose flags are born as those of epoch 1, and whose slots are zero."""

    def symmetric(self, key, rank, nbytes, prepare):
        """As the parent's."""
        known = key in self._blocks
        view = super().symmetric(key, rank, nbytes, lambda block: block.zero_())
        if not known:
            for block in self._blocks[key]:
                block.local[CONTROL_BYTES : key.zeroed].view(torch.int64).fill_(1)
        return view


def main():
    """A plain GEMM and a GEMM reduce-scatter on two ranks with each kernel; the last rank's sum is whole."""
    device = torch.device("cuda", 0)
    x, weight = torch.randn(2, M, K, device=device).bfloat16(), torch.randn(2, N, K, device=device).bfloat16()
    bias = torch.randn(N, device=device).bfloat16()
    for fields in KERNELS:
        with configured(**fields), ArrivedWorld(2, device=device) as world:
            single = overlap_gemm.gemm_reduce_scatter(x[0], weight[0], bias=bias, backend="fused")
            first, last = world.names
            overlap_gemm.gemm_reduce_scatter(x[0], weight[0], bias=bias, group=first, backend="fused")
            world.synchronize()
            out = overlap_gemm.gemm_reduce_scatter(x[1], weight[1], bias=bias, group=last, backend="fused")
            world.synchronize()
        product = x.double() @ weight.double().mT
        for got, exact in ((single, product[0]), (out, product.sum(0)[M // 2 :])):
            error = (got.double() - exact - bias.double()).abs().max().item()
            assert error < 0.01 * product.abs().max().item(), (fields, error)
        print(fields, "right")


if __name__ == "__main__":
    main()
