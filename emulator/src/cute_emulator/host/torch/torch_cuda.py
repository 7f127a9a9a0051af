"""Replacements of torch.cuda and torch.profiler."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from cute_emulator.host.device import L2_BYTES
from cute_emulator.host.graphs import classes
from cute_emulator.host.replace import replaced
from cute_emulator.host.torch.torch_streams import Streams

if TYPE_CHECKING:
    from cute_emulator.host.torch.cuda_device import CudaDevices

MEMORY_BYTES = 96 << 30


def changes(devices: CudaDevices) -> Iterator[contextlib.AbstractContextManager[None]]:
    """Yields every replacement as a context manager; its exit restores the original."""
    streams = devices.streams = Streams(devices)
    devices.open_timelines()
    for name, value in {**_of_devices(devices), **_of_memory(), **_of_streams(devices, streams)}.items():
        yield replaced(torch.cuda, name, value)
    yield replaced(torch._C, "_cuda_getCurrentRawStream", lambda *_: streams.current.cuda_stream)
    yield replaced(torch._C, "_cuda_getDevice", devices.current)
    yield replaced(
        torch.Tensor, "record_stream", lambda tensor, stream: devices.record_stream(tensor, stream)
    )
    for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
        yield replaced(torch.cuda.nvtx, name, _nothing())
    profile, cpu = torch.profiler.profile, torch.profiler.ProfilerActivity.CPU
    yield replaced(
        torch.profiler, "profile", lambda *_, activities=None, **options: profile(activities=[cpu], **options)
    )


def _of_devices(devices: CudaDevices) -> dict[str, Any]:
    """Returns the replacements that list devices and their properties."""

    def device_properties(device: Any = None) -> SimpleNamespace:
        major, minor = devices.properties.capability
        index = getattr(device, "index", device)
        return SimpleNamespace(
            uuid=uuid.UUID(int=devices.current() if index is None else index),
            name=f"cute_emulator {devices.properties.arch}",
            major=major,
            minor=minor,
            total_memory=MEMORY_BYTES,
            multi_processor_count=devices.properties.num_sms,
            L2_cache_size=L2_BYTES,
            warp_size=devices.attribute(10),
            max_threads_per_multi_processor=devices.attribute(39),
            shared_memory_per_block_optin=devices.attribute(97),
        )

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": _nothing(),
        "_lazy_init": _nothing(),
        "device_count": lambda: devices.count,
        "current_device": devices.current,
        "set_device": _nothing(),
        "device": lambda *_: contextlib.nullcontext(),
        "synchronize": lambda *_: devices.host_waits(),
        "get_device_capability": lambda *_: devices.properties.capability,
        "get_device_name": lambda *_: device_properties().name,
        "get_device_properties": device_properties,
        "can_device_access_peer": lambda *_: True,
        "manual_seed": _nothing(),
        "manual_seed_all": _nothing(),
        "default_generators": (torch.default_generator,) * devices.count,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
    }


def _of_memory() -> dict[str, Any]:
    """Returns the replacements that query torch's allocator."""
    return {
        "empty_cache": _nothing(),
        "mem_get_info": lambda *_: (MEMORY_BYTES, MEMORY_BYTES),
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "reset_peak_memory_stats": _nothing(),
    }


def _of_streams(devices: CudaDevices, streams: Streams) -> dict[str, Any]:
    """Returns the replacements of streams, events and graphs."""
    cuda_graph, graph = classes(devices.captures, devices.current, devices.synchronize, devices.timeline)
    return {
        "Stream": streams.Stream,
        "ExternalStream": lambda handle, *_: streams.Stream(handle=handle),
        "Event": streams.Event,
        "stream": streams.inside,
        "current_stream": lambda *_: streams.current,
        "default_stream": lambda *_: streams.default,
        "set_stream": streams.set,
        "CUDAGraph": cuda_graph,
        "graph": graph,
        "is_current_stream_capturing": lambda: devices.current() in devices.captures,
    }


def _nothing() -> Callable[..., None]:
    """Returns a new function that does nothing.

    Torch._dynamo distinguishes functions of torch by identity.
    """
    return lambda *_, **__: None
