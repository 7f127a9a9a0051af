"""Compiled kernels of the fused backend, each made once per process and architecture (`CompileCache`).

A cache key is everything that changes the kernel: configuration, transport, communication pattern and kind of
launch, plus `Executor.flavour`. Kernels that call NVSHMEM are kept in memory only, all others on disk, too.
Compilation is local; plans wrap it in `Peers.prepare`, so that all ranks raise if one rank fails. Every
public function raises CaptureError if a kernel is not in memory yet during the capture of a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

from ...config.gemm_config import GemmConfig
from ...runtime.compile_cache import OPTIONS, CompileCache
from ...runtime.executor import Executor
from ...runtime.memory.symmetric import init_nvshmem_library
from ...runtime.order import forbid_capture
from ...spec import ALL_GATHER_GEMM, PATTERNS, OpSpec
from .transport_hosts import TransportHost


def compiled_kernel(
    executor: Executor, config: GemmConfig, transport: TransportHost | None, pattern: str
) -> Any:
    """Returns the kernel of an op that exchanges tiles; of a plain GEMM if `transport` is None.

    Args:
        executor: Executor that launches the kernel.
        config: Configuration of the kernel.
        transport: Host part of the transport, or None.
        pattern: Communication pattern, a name of `spec.PATTERNS`.

    Raises:
        ValueError: A dependent launch is configured, and the kernel needs a relay kernel.
    """
    in_library = transport is not None and transport.in_library

    def build() -> Any:
        from ...build import DirectCall, compile_kernel, make_kernel
        from ...transports import device_part

        part = None if transport is None else device_part(transport.device)
        kernel = make_kernel(config, part, cooperative, pattern)
        if in_library:
            return DirectCall(compile_kernel(kernel))
        return compile_kernel(kernel, OPTIONS)

    # CTAs wait for each other. CUDA refuses a cooperative launch whose grid cannot be resident at once.
    relayed = transport is not None and transport.relays
    cooperative = _is_cooperative(executor, config, relayed) and transport is not None
    key: tuple[Hashable, ...] = (config, "", "", cooperative)
    if transport is not None:
        registered = source_of(transport.device), source_of(PATTERNS[pattern].kernel)
        key = (config, transport.device, pattern, cooperative, *filter(None, registered))
    return _from_cache(executor, key, build, in_library)


def source_of(path: str) -> str:
    """Returns a digest of the file of a ``module:class`` that is registered from outside of the package.

    The cache on disk has the text of the package in each key (`compile_cache.source_digest`). Of another
    package it has that of the class's module alone. "" for names and classes of this package.
    """
    module, _, name = path.partition(":")
    if not name or module.partition(".")[0] == __name__.partition(".")[0]:
        return ""
    file = import_module(module).__file__
    return sha256(Path(file).read_bytes() if file else b"").hexdigest()


def _is_cooperative(executor: Executor, config: GemmConfig, relayed: bool) -> bool:
    """Returns whether the launch is cooperative: on a full device, not on a share of it (virtual ranks).

    A launch may be cooperative and dependent at once.

    Args:
        executor: Executor that launches the kernel.
        config: Configuration of the kernel.
        relayed: Whether a relay kernel runs alongside.

    Raises:
        ValueError: A dependent launch is configured, and `relayed` is True. The next kernel could then occupy
            the SM of the relay kernel.
    """
    if config.is_dependent and relayed:
        raise ValueError(
            f"launch={config.launch!r} is for kernels that wait for no other one of their own rank; here "
            f"some peers are reached by a relay's puts: launch='ordered'"
        )
    return executor.is_full_device


def compiled_gather(
    executor: Executor,
    config: GemmConfig,
    push: bool,
    keep: bool,
    puts: bool,
    op: OpSpec = ALL_GATHER_GEMM,
    joins: bool = False,
) -> Any:
    """Returns the kernel of an op whose operand x is sent.

    Args:
        executor: Executor that launches the kernel.
        config: Configuration of the kernel.
        push: Whether warps of the kernel store the local shard in the peers' memory. False: copy engines or a
            relay kernel send it.
        keep: Whether the kernel also copies the gathered x to a tensor of the caller.
        puts: Whether a relay kernel puts the shards by NVSHMEM.
        op: Definition of the op.
        joins: Whether tiles have rows of several shards (`gather.few_rows`).

    Raises:
        ValueError: A dependent launch is configured, and `puts` is True.
    """

    def build() -> Any:
        from ...build import compile_kernel, make_gather_kernel
        from ...transports import PeerBulk, Staged

        transport = Staged() if puts else PeerBulk()
        return compile_kernel(
            make_gather_kernel(config, transport, push, keep, cooperative, op, joins), OPTIONS
        )

    cooperative = _is_cooperative(executor, config, puts)
    return _from_cache(executor, (config, op.name, push, keep, puts, cooperative, joins), build, puts=False)


def compiled_relay(executor: Executor) -> Any:
    """Returns the relay kernel (`exchange.relay`), one for all ops and shapes; it calls NVSHMEM."""

    def build() -> Any:
        from ...build import DirectCall, compile_relay
        from ...transports import Nvshmem

        return DirectCall(compile_relay(executor.arch, Nvshmem()))

    return _from_cache(executor, ("relay",), build, puts=True)


def compiled_gate(executor: Executor, puts: bool = False) -> Any:
    """Returns the gate kernel (`gather.gate`): it lets a stream wait for a rank's shard, or ends a call.

    Args:
        executor: Executor that launches the kernel.
        puts: Whether a relay kernel puts the shards, in pieces with a flag each.
    """

    def build() -> Any:
        from ...build import compile_gate
        from ...transports import PeerBulk, Staged

        return compile_gate(executor.arch, Staged() if puts else PeerBulk(), OPTIONS)

    return _from_cache(executor, ("gate", puts), build, puts=False)


def _from_cache(executor: Executor, key: tuple[Hashable, ...], build: Callable[[], Any], puts: bool) -> Any:
    """Returns the kernel of a key from memory, else from disk, else from `build`.

    Args:
        executor: Executor that launches the kernel, for its architecture and flavour.
        key: Hashable whose `repr` contains every compile-time choice.
        build: Function that compiles the kernel.
        puts: Whether the kernel calls NVSHMEM. NVSHMEM must then initialise the CUDA library of the kernel.
            Only a newly compiled `DirectCall` exposes this library, not a TVM-FFI function or a kernel from
            disk.

    Raises:
        CaptureError: The kernel is not in memory, and a CUDA graph is being captured.
    """

    def build_and_initialise() -> Any:
        compiled = build()
        if puts and executor.device.type == "cuda":
            init_nvshmem_library(compiled)
        return compiled

    kept = _cache(not puts)
    key = (*key, executor.flavour) if executor.flavour else key
    if not kept.has(key, executor.arch):
        forbid_capture(executor.device, "a kernel cannot be compiled or loaded")
    return kept.get(key, executor.arch, build_and_initialise)


@cache
def _cache(on_disk: bool) -> CompileCache:
    return CompileCache() if on_disk else CompileCache(folder=None)
