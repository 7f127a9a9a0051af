"""Compiled kernels of the fused backend: which kernels a transport needs, and the cache that keeps them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

from ...config.gemm_config import GemmConfig
from ...runtime.compile_cache import OPTIONS, CompileCache
from ...runtime.executor import Executor
from ...runtime.memory.symmetric import init_nvshmem_library
from ...runtime.order import forbid_capture
from ...spec import ALL_GATHER_GEMM, OpSpec
from .ways import Way


def compiled_kernel(executor: Executor, config: GemmConfig, way: Way | None, pattern: str) -> Any:
    """Returns the kernel of a configuration and an exchange; a plain GEMM if `way` is None."""
    in_library = way is not None and way.in_library

    def build() -> Any:
        from ...build import DirectCall, compile_kernel, make_kernel
        from ...transports import DEVICE

        transport = None if way is None else DEVICE[way.device]()
        kernel = make_kernel(config, transport, cooperative, pattern)
        if in_library:
            return DirectCall(compile_kernel(kernel))
        return compile_kernel(kernel, OPTIONS)

    # A grid that cannot be resident at once is refused by a cooperative launch; otherwise it would deadlock.
    relayed = way is not None and way.relays
    cooperative = _is_cooperative(executor, config, relayed) and way is not None
    exchange = ("", "") if way is None else (way.device, pattern)
    return _from_cache(executor, (config, *exchange, cooperative), build, in_library)


def _is_cooperative(executor: Executor, config: GemmConfig, relayed: bool) -> bool:
    """Returns whether a launch is cooperative, dependent or not: drivers accept both together.

    Raises:
        ValueError: The kernel needs a relay kernel (`relayed`), whose place a dependent kernel might take.
    """
    if config.is_dependent and relayed:
        raise ValueError(
            f"launch={config.launch!r} is for kernels that wait for no other one of their own rank; here "
            f"some peers are reached by a relay's puts: launch='ordered'"
        )
    return executor.is_whole_device


def compiled_gather(
    executor: Executor,
    config: GemmConfig,
    push: bool,
    keep: bool,
    puts: bool,
    op: OpSpec = ALL_GATHER_GEMM,
) -> Any:
    """Returns the kernel of an op whose operand is sent.

    Args:
        executor: Executor that launches the kernel.
        config: Configuration of the kernel.
        push: Whether the kernel sends the shards, as in `build.make_gather_kernel`.
        keep: Whether the kernel stores the gathered operand, as in `build.make_gather_kernel`.
        puts: Whether a relay kernel puts the shards.
        op: The op.
    """

    def build() -> Any:
        from ...build import compile_kernel, make_gather_kernel
        from ...transports import PeerBulk, Staged

        transport = Staged() if puts else PeerBulk()
        return compile_kernel(make_gather_kernel(config, transport, push, keep, cooperative, op), OPTIONS)

    cooperative = _is_cooperative(executor, config, puts)
    return _from_cache(executor, (config, op.name, push, keep, puts, cooperative), build, puts=False)


def compiled_relay(executor: Executor) -> Any:
    """Returns the relay kernel that runs alongside a GEMM (`exchange.relay`)."""

    def build() -> Any:
        from ...build import DirectCall, compile_relay
        from ...transports import Nvshmem

        return DirectCall(compile_relay(executor.arch, Nvshmem()))

    return _from_cache(executor, ("relay",), build, puts=True)


def compiled_gate(executor: Executor, puts: bool = False) -> Any:
    """Returns the kernel that waits for a shard on a stream (`gather.gate`).

    Args:
        executor: Executor that launches the kernel.
        puts: Whether a relay kernel puts the shards.
    """

    def build() -> Any:
        from ...build import compile_gate
        from ...transports import PeerBulk, Staged

        return compile_gate(executor.arch, Staged() if puts else PeerBulk(), OPTIONS)

    return _from_cache(executor, ("gate", puts), build, puts=False)


def _from_cache(executor: Executor, key: tuple[Hashable, ...], build: Callable[[], Any], puts: bool) -> Any:
    """Returns a compiled kernel from memory or disk; initialises one that calls NVSHMEM (`puts`).

    A kernel that calls NVSHMEM is not kept on disk, and is called by the DSL's argument path. NVSHMEM must
    initialise the library that a kernel is loaded from. Neither a kernel from disk nor a TVM-FFI function
    exposes its library.
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
