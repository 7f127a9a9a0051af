"""Rate of bytes out of a rank by torch's symmetric memory: the bound of an op's communication.

Multicast objects are never created: on a shared machine they can make the GPUs unusable.
"""

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..runtime.group import Group
from ..runtime.memory.symmetric import NO_MULTICAST
from ..tuning.timing import measure

LINK_BYTES = 768 << 20
"""Bytes out of each rank in the measurement of the link.

They are enough for the start of three streams, and the wait for them, to cost a few percent. (At 96 MiB they
cost a third on four ranks: 228 GB/s, where the kernels have 300.)
"""


def symmetric_name(group: Group) -> str:
    """Returns the name of `group` in torch's symmetric memory."""
    import torch.distributed._symmetric_memory as symm_mem

    os.environ[NO_MULTICAST] = "1"
    assert group.process_group is not None
    name = group.process_group.group_name
    if hasattr(symm_mem, "enable_symm_mem_for_group"):  # newer versions of torch need no such call
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            symm_mem.enable_symm_mem_for_group(name)
    return name


def link_rates(group: Group, device: torch.device, rounds: int = 5) -> dict[str, float]:
    """Measures the rate out of each rank while all send to all. Collective.

    Args:
        group: Group of the ranks.
        device: Device of this rank.
        rounds: Samples per rate.

    Returns:
        `{"stores": ..., "copy engines": ...}` in bytes/s; empty for one rank, or on a CPU. Each call sends
        `LINK_BYTES`, 768 MiB, out of each rank; its symmetric memory has at least this size.
    """
    if group.size == 1 or device.type != "cuda":
        return {}
    import torch.distributed._symmetric_memory as symm_mem

    symmetric_name(group)
    chunk = LINK_BYTES // (group.size - 1) // 4096 * 1024  # elements; a multiple of 4 KiB, for alignment
    inbox = symm_mem.empty(group.size * chunk, dtype=torch.float32, device=device)
    handle = symm_mem.rendezvous(inbox, group.process_group)
    source = torch.ones(chunk, device=device)
    peers = [(group.rank + step) % group.size for step in range(1, group.size)]
    targets = [handle.get_buffer(peer, (chunk,), torch.float32, group.rank * chunk) for peer in peers]
    streams = [torch.cuda.Stream(device) for _ in peers]

    calls = {
        "stores": lambda: _on_streams(streams, targets, lambda out: torch.mul(source, 1.0, out=out)),
        "copy engines": lambda: _on_streams(streams, targets, lambda out: out.copy_(source)),
    }
    timings = measure(
        calls,
        group=group.process_group,
        device=device,
        rounds=rounds,
        burst_seconds=0.01,
    )
    sent = 4 * chunk * len(peers)
    return {name: sent / timings.median(name) for name in calls}


def _on_streams(streams: Sequence[Any], outs: Sequence[Tensor], write: Callable[[Tensor], object]) -> None:
    """Writes each of `outs` on its own stream, ordered after and before work on the current one."""
    current = torch.cuda.current_stream()
    for stream, out in zip(streams, outs, strict=True):
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            write(out)
    for stream in streams:
        current.wait_stream(stream)
