"""A broken order of flags and scales in an all-gather."""

from overlap_gemm.backends.fused.launch_plan import Copies
from overlap_gemm.exchange.geometry import FLAG_BYTES


def with_flags_before_scales(patch):
    def send(copies, executor, second, own, exchange):
        rows, scales = own
        _, scale_bytes, offset = copies.shard
        for target, flag in copies.places:
            copies.shard._replace(scale_bytes=0).copy(executor, second, target, (rows, scales))
            executor.copy(second, flag, copies.next_epoch, FLAG_BYTES)
            executor.copy(second, target + offset, scales, scale_bytes)

    patch.setattr(Copies, "send", send)
