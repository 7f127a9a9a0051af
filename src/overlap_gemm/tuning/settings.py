"""What the caller asks of the fused backend: fields of the configuration, SMs left to others.

Settings belong to the thread that enters the block, and to the threads in which autograd runs a backward
pass that it starts there: they are kept in torch's thread-local state, which `backward` hands to its
threads. So what counts is the block around the call of the op or of `backward`, also for what activation
checkpointing recomputes, and for compiled graphs. A `ContextVar` does not reach those threads; settings of
the process would reach them, and calls of other threads as well, at a moment that differs from rank to
rank, where all ranks must have the same.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, get_args

import torch

_KEY = "overlap_gemm.settings"


Algorithm = Literal["one_shot", "two_shot"]
"""How a fused all-reduce exchanges tiles; see `kernels.all_reduce`."""

Transport = Literal["copy_engine", "peer_bulk", "peer_words", "nvshmem", "nvls"]
"""How tiles or shards travel; see `configured`."""


class Settings(NamedTuple):
    """What a block of `configured` asks for; hashable.

    Attributes:
        fields: (name, value) of `GemmConfig`'s fields; the same on all ranks.
        reserve_sms: SMs that kernels leave to others; None: what ``OVERLAP_GEMM_RESERVE_SMS`` says. It may
            differ between ranks.
        algorithm: which all-reduce; None: the model's choice. The same on all ranks.
        transport: how tiles or shards travel; None: by stores to whom they reach, few rows as words that are
            their own flag, and the shards of an all-gather GEMM as their size says. The same on all ranks,
            but for an all-gather GEMM's ``"copy_engine"`` and ``"peer_bulk"``.
    """

    fields: tuple[tuple[str, Any], ...] = ()
    reserve_sms: int | None = None
    algorithm: Algorithm | None = None
    transport: Transport | None = None


_DEFAULT = Settings()


def settings() -> Settings:
    """Those of the calling thread."""
    if torch._C._is_key_in_tls(_KEY):
        found: Settings = torch._C._get_obj_in_tls(_KEY)
        return found
    return _DEFAULT


def _keep(asked: Settings) -> None:
    """Makes them the calling thread's.

    torch 2.11 keeps the object without counting its reference, and counts one less when it lets go: the
    object would be freed in use. 2.13 counts.
    """
    before = sys.getrefcount(asked)
    torch._C._stash_obj_in_tls(_KEY, asked)
    if sys.getrefcount(asked) == before:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(asked))


@contextmanager
def configured(
    *,
    reserve_sms: int | None = None,
    algorithm: Algorithm | None = None,
    transport: Transport | None = None,
    **fields: Any,
) -> Iterator[None]:
    """Within the block, the fused backend's kernels are as asked. Blocks may be nested.

    Args:
        reserve_sms: SMs that their grids leave to others: to NCCL on another stream, to another pipeline
            stage's kernels. The choice of configuration does not look at it, so ranks may differ.
        algorithm: how `gemm_all_reduce` exchanges: ``"one_shot"``, every rank sends everything to all, or
            ``"two_shot"``, the sums of the owners of columns go on to all. The same on every rank.
        transport: how `all_gather_gemm` sends shards: ``"copy_engine"``, or ``"peer_bulk"``, by warps of the
            kernel; ranks may differ. How the other ops send tiles, the same on every rank: ``"peer_bulk"``,
            with flags behind them, or ``"peer_words"``, as words that are their own flag, which kernels for
            few rows do by themselves (and which 32-bit slots or outputs cannot: ValueError at the call). Or,
            of every op and on every rank, ``"nvshmem"``: what goes to peers is put to them by NVSHMEM, also
            to those within reach of stores, which is slower and there to be tested; the memory must be
            NVSHMEM's (``OVERLAP_GEMM_SYMMETRIC=nvshmem``), else the call raises RuntimeError. Or, of
            `gemm_all_reduce` alone (ValueError for others) and on every rank, ``"nvls"``: the NVLink switch
            sums partials, in its own order, and copies the sums; in the emulator alone (RuntimeError on
            GPUs, where no multicast object is created).
        **fields: of `GemmConfig`. Every rank must use the same ones; combinations no kernel exists for raise
            ValueError at the call.

    Raises:
        ValueError: ``reserve_sms`` is no number of SMs, or there is no such algorithm or transport.
    """
    check_reserve_sms(reserve_sms)
    for name, given, known in (("algorithm", algorithm, Algorithm), ("transport", transport, Transport)):
        if given not in (None, *get_args(known)):
            raise ValueError(f"{name}={given!r} must be one of {', '.join(get_args(known))}")
    before = settings()
    reserve = before.reserve_sms if reserve_sms is None else reserve_sms
    asked = tuple({**dict(before.fields), **fields}.items())
    _keep(Settings(asked, reserve, algorithm or before.algorithm, transport or before.transport))
    try:
        yield
    finally:
        _keep(before)


def check_reserve_sms(given: int | None) -> None:
    """Raises a ValueError unless ``given`` is a number of SMs, or None."""
    if given is not None and (not isinstance(given, int) or given < 0):
        raise ValueError(f"reserve_sms={given!r} must be a number of SMs, 0 or more")
