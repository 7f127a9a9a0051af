"""The fused backend's compiled kernels: how tiles travel, which kernels that takes, where they are kept."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

from ...config.gemm_config import GemmConfig
from ...runtime.compile_cache import OPTIONS, CompileCache
from ...runtime.executor import Executor
from ...runtime.memory.symmetric import init_nvshmem_library
from ...runtime.order import forbid_capture
from .ways import Way


def compiled_kernel(executor: Executor, config: GemmConfig, way: Way | None, pattern: str) -> Any:
    """The kernel of a configuration and an exchange; without a way to peers a plain GEMM."""
    in_library = way is not None and way.in_library

    def build() -> Any:
        from ...build import DirectCall, compile_kernel, make_kernel
        from ...transports import DEVICE

        transport = None if way is None else DEVICE[way.device]()
        kernel = make_kernel(config, transport, cooperative, pattern)
        if in_library:
            return DirectCall(compile_kernel(kernel))
        return compile_kernel(kernel, OPTIONS)

    # A grid that cannot be resident at once is refused then, where it would wait for itself for ever.
    relayed = way is not None and way.relays
    cooperative = _is_cooperative(executor, config, relayed) and way is not None
    exchange = ("", "") if way is None else (way.device, pattern)
    return _from_cache(executor, (config, *exchange, cooperative), build, in_library)


def _is_cooperative(executor: Executor, config: GemmConfig, relayed: bool) -> bool:
    """Whether a launch is cooperative, dependent or not: drivers take that.

    Raises:
        ValueError: a relay kernel is ``relayed`` to, whose place a dependent kernel might take.
    """
    if config.is_dependent and relayed:
        raise ValueError(
            f"launch={config.launch!r} is for kernels that wait for no other one of their own rank; here "
            f"some peers are reached by a relay's puts: launch='ordered'"
        )
    return executor.is_whole_device


def compiled_gather(executor: Executor, config: GemmConfig, push: bool, keep: bool, puts: bool) -> Any:
    """The all-gather GEMM of a configuration.

    Args:
        executor: where.
        config: the configuration.
        push: as for `build.make_gather_kernel`.
        keep: likewise.
        puts: whether a relay kernel puts the shards.
    """

    def build() -> Any:
        from ...build import compile_kernel, make_gather_kernel
        from ...transports import PeerBulk, Staged

        transport = Staged() if puts else PeerBulk()
        return compile_kernel(make_gather_kernel(config, transport, push, keep, cooperative), OPTIONS)

    cooperative = _is_cooperative(executor, config, puts)
    return _from_cache(executor, (config, "gather", push, keep, puts, cooperative), build, puts=False)


def compiled_relay(executor: Executor) -> Any:
    """The relay kernel alongside any GEMM (`exchange.relay`)."""

    def build() -> Any:
        from ...build import DirectCall, compile_relay
        from ...transports import Nvshmem

        return DirectCall(compile_relay(executor.arch, Nvshmem()))

    return _from_cache(executor, ("relay",), build, puts=True)


def compiled_gate(executor: Executor, puts: bool = False) -> Any:
    """The kernel with which a stream waits for a shard (`gather.gate`); ``puts`` as `compiled_gather`'s."""

    def build() -> Any:
        from ...build import compile_gate
        from ...transports import PeerBulk, Staged

        return compile_gate(executor.arch, Staged() if puts else PeerBulk(), OPTIONS)

    return _from_cache(executor, ("gate", puts), build, puts=False)


def _from_cache(executor: Executor, key: tuple[Hashable, ...], build: Callable[[], Any], puts: bool) -> Any:
    """A compiled kernel from memory or disk; one that calls NVSHMEM (``puts``) is initialised.

    Such a one is not kept on disk, and called the DSL's own way: NVSHMEM initialises the library that a
    kernel is loaded from, and neither what comes from disk nor a TVM-FFI function tells it.
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
