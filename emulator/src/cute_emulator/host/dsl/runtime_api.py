"""CUDA runtime functions that CuTe DSL's host code calls, implemented in Python.

Signatures and struct layouts are those of the CUDA runtime API: `cudaLaunchKernelExC`, `cudaLaunchConfig_t`,
`cudaLaunchAttribute`, `cuTensorMapEncodeTiled`. The DSL calls them with an underscore in front of the name.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from cute_emulator.errors import EmulatorError
from cute_emulator.execution.launch import Dim3
from cute_emulator.host.device import DeviceProperties
from cute_emulator.host.dsl.capture import ptx_of
from cute_emulator.machine.residency import Footprint
from cute_emulator.ptx.parse import entry_params
from cute_emulator.translate.program import program
from cute_emulator.units.tma_encode import encode_tiled

SUCCESS = 0
LAUNCH_FAILURE = 719

_INT, _U32, _U64, _PTR = ctypes.c_int, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p


@dataclass(frozen=True)
class KernelCall:
    """Kernel launch requested by the host code, before it is assigned to a rank.

    Attributes:
        ptx: PTX text of the module; `entry` is the name of the kernel in it.
        grid, block, cluster: CTAs, threads of a CTA, CTAs of a cluster along x, y, z.
        dynamic_smem: Bytes of dynamic shared memory.
        stream: Handle of the stream.
        params: Bytes of each kernel parameter.
        cooperative, programmatic: Launch attributes of these names.
        ignore: Kinds of findings that are discarded for this module.
    """

    ptx: str
    entry: str
    grid: Dim3
    block: Dim3
    cluster: Dim3
    dynamic_smem: int
    stream: int
    params: tuple[bytes, ...]
    cooperative: bool = False
    programmatic: bool = False
    ignore: frozenset[str] = frozenset()


@dataclass
class RuntimeApi:
    """Functions by symbol name, for the DSL's JIT to call.

    An exception inside a callback cannot cross the C frames above it: it is stored for `reraise`, and the
    callback returns a CUDA error code, which makes the host code return.

    Attributes:
        launch: Receiver of every kernel call.
        device: Function that returns the properties of the calling rank's device.
    """

    launch: Callable[[KernelCall], None] | None = None
    device: Callable[[], DeviceProperties] | None = None
    _modules: dict[int, str] = field(default_factory=dict)
    _kernels: dict[int, tuple[str, str]] = field(default_factory=dict)
    _handles: itertools.count[int] = field(default_factory=lambda: itertools.count(0x1000, 0x10))
    _local: threading.local = field(default_factory=threading.local)
    _callbacks: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, function, argument_types in (
            ("_cudaLibraryLoadData", self._library_load, (_PTR, _PTR, _PTR, _PTR, _U32, _PTR, _PTR, _U32)),
            ("_cudaLibraryGetKernel", self._library_get_kernel, (_PTR, _PTR, ctypes.c_char_p)),
            ("_cuKernelGetAttribute", self._kernel_get_attribute, (_PTR, _INT, _PTR, _INT)),
            ("_cudaDeviceGetAttribute", self._device_get_attribute, (_PTR, _INT, _INT)),
            ("_cudaKernelSetAttributeForDevice", self._kernel_set_attribute, (_PTR, _INT, _INT, _INT)),
            ("_cudaFuncSetAttribute", self._kernel_set_attribute, (_PTR, _INT, _INT)),
            ("_cudaGetDevice", self._get_device, (_PTR,)),
            ("_cudaGetDeviceCount", self._get_device_count, (_PTR,)),
            ("_cudaSetDevice", self._set_device, (_INT,)),
            ("_cudaLaunchKernelEx", self._launch_ex, (_PTR, _PTR, _PTR)),
            ("_cudaLaunchKernel", self._launch, (_PTR, *(_U32,) * 6, _PTR, _U64, _PTR)),
            (
                "_cudaOccupancyMaxActiveBlocksPerMultiprocessor",
                self._occupancy,
                (_PTR, _PTR, _INT, ctypes.c_size_t),
            ),
            (
                "_cuTensorMapEncodeTiled",
                self._encode_tiled,
                (_PTR, _INT, _U32, _PTR, _PTR, _PTR, _PTR, _PTR, _INT, _INT, _INT, _INT),
            ),
            ("cuda_dialect_init_library_once", self._init_library_once, (_PTR, _PTR, _PTR, _PTR)),
        ):
            prototype = ctypes.CFUNCTYPE(_INT, *argument_types)
            self._callbacks[name] = prototype(self._guarded(function))

    def symbols(self) -> dict[str, int]:
        """Returns the address of each implemented function by symbol name."""
        addresses = {}
        for name, callback in self._callbacks.items():
            addresses[name] = ctypes.cast(callback, ctypes.c_void_p).value or 0
        for name in _UNLOADS:
            addresses[name] = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0
        return addresses

    def reraise(self) -> None:
        """Raises the stored exception of a callback of this thread, if any."""
        error = self._local.__dict__.pop("error", None)
        if error is not None:
            raise error

    def fail(self, message: str) -> NoReturn:
        """Raises an `EmulatorError` that is preserved by frames which replace exceptions."""
        self._local.error = EmulatorError(message)
        raise self._local.error

    def _guarded(self, function: Callable[..., None]) -> Callable[..., int]:
        def call(*args: Any) -> int:
            try:
                function(*args)
            except BaseException as error:  # Ctrl-C too
                if self.device is None:  # closed: there is no later call of `reraise`
                    print(f"cute_emulator: {error}", file=sys.stderr)
                else:
                    self._local.error = error
                return LAUNCH_FAILURE
            return SUCCESS

        return call

    # --- libraries and kernels

    def _library_load(self, out: int, image: int, *options: Any) -> None:
        handle = next(self._handles)
        self._modules[handle] = ptx_of(image)
        _store(out, _U64, handle)

    def _library_get_kernel(self, out: int, library: int, name: bytes) -> None:
        if library not in self._modules:
            raise EmulatorError(
                f"kernel {name.decode()} requested from library {library:#x}, which is not loaded"
            )
        handle = next(self._handles)
        self._kernels[handle] = (self._modules[library], name.decode())
        _store(out, _U64, handle)

    def _kernel_get_attribute(self, out: int, attribute: int, kernel: int, _device: int) -> None:
        ptx, _ = self._kernels[kernel]
        if attribute != 1:  # the DSL reads only CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
            raise EmulatorError(f"the emulator has no value for CUfunction_attribute {attribute}")
        _store(out, _INT, static_shared_bytes(ptx))

    def _kernel_set_attribute(self, kernel: int, attribute: int, value: int, _device: int = 0) -> None:
        """Does nothing.

        The machine checks shared memory at launch, and allows every cluster size that fits.
        """

    def _init_library_once(self, state: int, init: int, load_to_device: int, _set_error: int) -> None:
        """Loads the library of a TVM-FFI function once; `state` is a word of its module, 0 before."""
        if ctypes.c_uint64.from_address(state).value:
            return
        ctypes.CFUNCTYPE(_INT, _PTR)(init)(state)
        self.reraise()
        ctypes.CFUNCTYPE(_INT, _PTR, _INT)(load_to_device)(state, 0)
        self.reraise()

    # --- device

    def _open_device(self) -> DeviceProperties:
        if self.device is None:
            raise EmulatorError("no emulator is open: call the function inside `with Emulator(...)`")
        return self.device()

    def _device_get_attribute(self, out: int, attribute: int, _device: int) -> None:
        _store(out, _INT, self._open_device().attribute(attribute))

    def _get_device(self, out: int) -> None:
        _store(out, _INT, 0)

    def _get_device_count(self, out: int) -> None:
        _store(out, _INT, 1)

    def _set_device(self, device: int) -> None:
        if device != 0:
            raise EmulatorError(f"the emulator has one device, 0; cudaSetDevice({device})")

    def _occupancy(self, out: int, kernel: int, threads: int, dynamic_smem: int) -> None:
        code = program(*self._kernels[kernel])
        need = Footprint.of(code.entry, max(threads, 1), code.static_smem + dynamic_smem)
        _store(out, _INT, need.per_sm())

    # --- launches

    def _launch_ex(self, config: int, kernel: int, arguments: int) -> None:
        """Launches by a `cudaLaunchConfig_t`.

        Its fields are grid u32[3], block u32[3], u64 dynamic bytes, stream, attributes, count.
        """
        gx, gy, gz, bx, by, bz, smem, stream, attributes, count = struct.unpack(
            "<6IQQQI", ctypes.string_at(config, 52)
        )
        cluster, cooperative, programmatic = (1, 1, 1), False, False
        for i in range(count):
            # cudaLaunchAttribute: u32 id, u32 padding, 64-byte union
            number, x, y, z = struct.unpack_from("<I4xIII", ctypes.string_at(attributes + 72 * i, 20))
            if number == 2:  # cudaLaunchAttributeCooperative
                cooperative = bool(x)
            elif number == 4:  # cudaLaunchAttributeClusterDimension
                cluster = (x, y, z)
            elif number == 6:  # cudaLaunchAttributeProgrammaticStreamSerialization
                programmatic = bool(x)
            elif number not in _HINTS:
                raise EmulatorError(f"the emulator does not model cudaLaunchAttribute {number}")
        self._submit(
            kernel, arguments, (gx, gy, gz), (bx, by, bz), cluster, smem, stream, cooperative, programmatic
        )

    def _launch(
        self, kernel: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, arguments: int, smem: int,
        stream: int | None,
    ) -> None:  # fmt: skip
        self._submit(
            kernel, arguments, (gx, gy, gz), (bx, by, bz), (1, 1, 1), smem, stream or 0, False, False
        )

    def _submit(
        self, kernel: int, arguments: int, grid: Dim3, block: Dim3, cluster: Dim3, smem: int, stream: int,
        cooperative: bool, programmatic: bool,
    ) -> None:  # fmt: skip
        if self.launch is None:
            raise EmulatorError("no emulator is open: call the function inside `with Emulator(...)`")
        ptx, entry = self._kernels[kernel]
        if 0 in grid or 0 in block:
            raise EmulatorError(
                f"kernel {entry}: launched with {grid=}, {block=}; every extent must be positive"
            )
        if any(g % c for g, c in zip(grid, cluster, strict=True)):
            raise EmulatorError(f"kernel {entry}: {grid=} is not a multiple of {cluster=}")
        params = []
        for i, (size, _) in enumerate(entry_params(ptx, entry)):
            pointer = ctypes.c_uint64.from_address(arguments + 8 * i).value
            params.append(ctypes.string_at(pointer, size))
        self.launch(
            KernelCall(
                ptx, entry, grid, block, cluster, smem, stream, tuple(params), cooperative, programmatic
            )
        )

    def _encode_tiled(
        self, out: int, dtype: int, rank: int, address: int | None, dims: int, strides: int, box: int,
        element_strides: int, interleave: int, swizzle: int, promotion: int, fill: int,
    ) -> None:  # fmt: skip
        encoded = encode_tiled(
            dtype,
            address or 0,
            (_U64 * rank).from_address(dims)[:],
            (_U64 * (rank - 1)).from_address(strides)[:] if rank > 1 else (),
            (_U32 * rank).from_address(box)[:],
            (_U32 * rank).from_address(element_strides)[:],
            interleave,
            swizzle,
            promotion,
            fill,
        ).encode()
        ctypes.memmove(out, encoded, len(encoded))


_UNLOADS = ("_cudaLibraryUnload", "cuda_dialect_unload_library_once")
"""Implemented by a C function that does nothing: a shared library unloads when Python has ended."""

_HINTS = {
    1,  # access policy window
    3,  # synchronization policy
    5,  # cluster scheduling policy preference
    8,  # priority
    7,  # programmatic event: a wait for it waits for the kernel here
    11,  # preferred cluster dimension
    12,  # launch completion event: a wait for it waits for the kernel here
    14,  # preferred shared memory carveout
}
"""Launch attributes (`cudaLaunchAttributeID`) that only affect speed."""

_STATIC_SHARED = re.compile(r"^(?!.*\.extern).*\.shared\s+\.align\s+\d+\s+\.b8\s+[\w$]+\[(\d+)\]", re.M)


def static_shared_bytes(ptx: str) -> int:
    """Returns the bytes of statically allocated shared memory of a PTX module."""
    return sum(int(size) for size in _STATIC_SHARED.findall(ptx))


def _store(address: int, kind: Any, value: int) -> None:
    kind.from_address(address).value = value
