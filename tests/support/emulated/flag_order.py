"""A broken order of flags and scales in an all-gather."""

from overlap_gemm.backends.fused.launch_plan import Copies
from overlap_gemm.exchange.geometry import FLAG_BYTES


def with_flags_before_scales(patch):
    def send(copies, executor, second, own, exchange):
        rows = own.numel()
        for shard, flag in copies.places:
            executor.copy(second, shard, own.data_ptr(), rows)
            executor.copy(second, flag, copies.coming, FLAG_BYTES)
            executor.copy(second, shard + rows, own.data_ptr() + rows, copies.nbytes - rows)

    patch.setattr(Copies, "send", send)
