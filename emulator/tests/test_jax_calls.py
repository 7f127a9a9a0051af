"""Kernels called from JAX: what XLA hands over, field by field, and JAX itself where it is installed."""

import ctypes
import struct

import numpy as np
import pytest
import torch

from cute_emulator.host.dsl import jax_calls


class Frames:
    """Builds what `xla/ffi/api/c_api.h` describes, by offsets; keeps it alive."""

    def __init__(self):
        self._kept, self.errors = [], []

        def create(error):
            text, code = struct.unpack_from("<Qi", ctypes.string_at(error, 32), 16)
            self.errors.append((ctypes.string_at(text).decode(), code))
            return 0x77

        make = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(create)
        self._kept.append(make)
        version = struct.pack("<QQii", 24, 0, 0, 3)
        self.api = self.put(
            struct.pack("<QQ", 160, 0)
            + version
            + struct.pack("<QQ", 0, ctypes.cast(make, ctypes.c_void_p).value)
        )

    def put(self, content):
        kept = ctypes.create_string_buffer(content, len(content))
        self._kept.append(kept)
        return ctypes.addressof(kept)

    def table(self, addresses):
        return self.put(struct.pack(f"<{len(addresses)}Q", *addresses))

    def buffer(self, array, dtype):
        dims = self.put(struct.pack(f"<{array.ndim}q", *array.shape))
        return self.put(struct.pack("<QQi4xQqQ", 48, 0, dtype, array.ctypes.data, array.ndim, dims))

    def span(self, text):
        return self.put(struct.pack("<QQ", self.put(text), len(text)))

    def frame(self, inputs, results, attributes, extension=0):
        parts = [struct.pack("<QQQQi4x", 152, extension, self.api, 0, 3)]
        parts += [
            struct.pack("<QQqQQ", 40, 0, len(values), 0, self.table(values)) for values in (inputs, results)
        ]
        names = self.table([self.span(n.encode()) for n in attributes])
        spans = self.table([self.span(v) for v in attributes.values()])
        parts.append(struct.pack("<QQqQQQ", 48, 0, len(attributes), 0, names, spans))
        return self.put(b"".join(parts))


@pytest.fixture
def frames():
    return Frames()


def call(calls, frame):
    return calls._handler(ctypes.cast(frame, ctypes.POINTER(jax_calls._Frame)))


def test_a_call_gets_stream_and_arrays(frames, monkeypatch):
    seen, packed = {}, []

    class Function:
        def run_compiled_program(self, pointers):
            assert struct.unpack("<Q", ctypes.string_at(pointers[0], 8)) == (0,)
            for name, at in zip("abc", pointers[1:], strict=True):
                (pair,) = struct.unpack("<Q", ctypes.string_at(at, 8))
                seen[name] = struct.unpack("<QQ", ctypes.string_at(pair, 16))

    monkeypatch.setattr(jax_calls, "_loaded", lambda image: Function() if image == b"an object" else None)
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((0, 5), np.int8)
    c = np.arange(4, dtype=np.uint16)
    frame = frames.frame(
        [frames.buffer(a, 11), frames.buffer(b, 2)],
        [frames.buffer(c, 16)],
        {"key": b"k", "module": b"an object"},
    )
    calls = jax_calls.JaxCalls()
    with calls.served(packed.append):
        assert call(calls, frame) is None
    for name, array in zip("abc", (a, b, c), strict=True):
        data, dims = seen[name]
        assert data == array.ctypes.data
        assert struct.unpack(f"<{array.ndim}q", ctypes.string_at(dims, 8 * array.ndim)) == array.shape
    assert [t.numel() for t in packed] == [24, 0, 8]
    assert packed[0].data_ptr() == a.ctypes.data and torch.equal(
        packed[2].view(torch.int16)[1:2], torch.tensor([1])
    )
    assert not frames.errors

    assert call(calls, frame) == 0x77  # no emulator is open
    ((message, code),) = frames.errors
    assert "no emulator is open" in message and code == 13


def test_what_a_kernel_raises_is_an_error_of_xla(frames, monkeypatch):
    monkeypatch.setattr(jax_calls, "_loaded", lambda image: 1 // 0)
    calls = jax_calls.JaxCalls()
    with calls.served(lambda tensor: None):
        assert call(calls, frames.frame([], [], {"module": b""})) == 0x77
    assert frames.errors == [("ZeroDivisionError: integer division or modulo by zero", 13)]


def test_the_handler_has_the_version_of_who_asks(frames):
    metadata = frames.put(struct.pack("<QQQii", 48, 24, 0, -1, -1) + bytes(16))
    extension = frames.put(struct.pack("<Qi4xQQ", 32, 1, 0, metadata))
    assert call(jax_calls.JaxCalls(), frames.frame([], [], {}, extension)) is None
    assert struct.unpack_from("<ii", ctypes.string_at(metadata, 32), 24) == (0, 3)


@pytest.mark.slow
def test_a_kernel_in_a_jitted_function(emulate):
    jax = pytest.importorskip("jax")
    import cuda.bindings.driver as cuda
    import cutlass
    import cutlass.cute as cute

    emulate("sm_100a")
    import cutlass.jax as cjax

    @cute.kernel
    def kernel(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, factor: cutlass.Constexpr):
        tid, _, _ = cute.arch.thread_idx()
        c[tid] = a[tid] * factor + b[tid]

    @cute.jit
    def launch(
        stream: cuda.CUstream, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, *, factor: cutlass.Constexpr
    ):
        kernel(a, b, c, factor).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)

    @jax.jit
    def twice(a, b):
        shape = jax.ShapeDtypeStruct(a.shape, a.dtype)
        out = cjax.cutlass_call(launch, output_shape_dtype=shape, factor=3)(a, b)
        return cjax.cutlass_call(launch, output_shape_dtype=shape, factor=2)(out, b + 1)

    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(64).astype(np.float32) for _ in range(2))
    np.testing.assert_allclose(np.asarray(twice(a, b)), 2 * (3 * a + b) + b + 1, rtol=1e-5)
