"""What can be allocated ahead of the first fused call: enough for the largest one."""

from __future__ import annotations

import torch

from ..kernels.geometry import SLOT_BUFFERS, STAGING_BUFFERS, ExchangeShape
from ..runtime.group import Group
from ..runtime.workspace import SizeClass, obtain
from ..tuning.settings import settings
from ..tuning.space import possible
from .plans import DTYPES, peers_for, size_class


def reserve(group: Group, device: torch.device, dtype: torch.dtype, shape: ExchangeShape) -> int:
    """Allocates one workspace for all calls up to a shape, whichever configurations they get. Collective.

    Calls of fewer rows or columns then allocate nothing, and share it.

    Args:
        group: the ranks.
        device: where this one's tensors will be.
        dtype: of them.
        shape: the largest.

    Returns:
        Bytes that this rank's workspace holds.

    Raises:
        DisagreementError, SymmetricMemoryError: on every rank, if one of them cannot.
    """
    if group.size == 1:
        return 0
    peers = peers_for(group, device)
    configs = possible(peers.agreed.arch, DTYPES[dtype], settings().fields)
    classes = [size_class(config, shape) for config in configs]
    largest = SizeClass(
        max(size.zeroed for size in classes),
        max(size.buffer for size in classes),
        SLOT_BUFFERS,
        STAGING_BUFFERS,
    )
    return obtain(peers, largest).memory.local.numel()
