"""Kernels for compute-sanitizer, which runs one kernel at a time:

    for tool in memcheck racecheck synccheck; do
        compute-sanitizer --tool $tool --error-exitcode 1 python tests/gpu/under_sanitizer.py
    done

Ranks that wait for each other would wait for ever under it. So the flags of peers are set beforehand, as if
every partial had arrived and every peer had entered the call, and the ranks run one after another; all the
data they sum is there but for the first's. tests/emulated/test_under_sanitizer.py runs it without a GPU.
"""

from unittest import mock

import torch

import overlap_gemm
from overlap_gemm.backends.fused import launch_plan
from overlap_gemm.backends.fused import plan_cache as plans
from overlap_gemm.exchange.geometry import CONTROL_BYTES, ENTERED_OFFSET, READ_OFFSET
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.tuning.settings import configured

M, N, K = 264, 200, 136
KERNELS = (
    {"mma": "pingpong", "tile": (64, 128), "cluster": (1, 1)},
    {"mma": "cooperative", "tile": (128, 256), "cluster": (2, 1)},
)


class ArrivedWorld(VirtualWorld):
    """Virtual ranks where the peers' flags are born as those of epoch 1, and slots are zero."""

    def symmetric(self, key, rank, nbytes, prepare):
        """As the parent's."""
        known = key in self._blocks
        view = super().symmetric(key, rank, nbytes, lambda block: block.zero_())
        if not known:
            for own, block in enumerate(self._blocks[key]):
                for first, end in ((ENTERED_OFFSET, READ_OFFSET), (CONTROL_BYTES, key.zeroed)):
                    block.local[first:end].view(torch.int64).fill_(1)
                block.local[CONTROL_BYTES : key.zeroed].view(torch.int64)[own :: len(self.ranks)] = 0
        return view


def check(fields, open_world, device):
    """A plain GEMM and a GEMM reduce-scatter on two ranks by a kernel; the last rank's sum is whole."""
    x, weight = torch.randn(2, M, K, device=device).bfloat16(), torch.randn(2, N, K, device=device).bfloat16()
    bias = torch.randn(N, device=device).bfloat16()
    with (
        configured(**fields),
        # So that an identity is its epoch.
        mock.patch.object(plans, "signature_of", lambda *_: 0),
        mock.patch.object(launch_plan, "with_options", lambda signature, _: signature),
        open_world() as world,
    ):
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


def main():
    """Every kernel, on the first GPU."""
    device = torch.device("cuda", 0)
    for fields in KERNELS:
        check(fields, lambda: ArrivedWorld(2, device=device), device)
        print(fields, "right")


if __name__ == "__main__":
    main()
