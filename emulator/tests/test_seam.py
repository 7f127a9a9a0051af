"""The seam alone: what arrives when a compiled function is called, with a list in place of the machine."""

import ctypes
import os
import shutil
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass.cute.runtime import from_dlpack, load_module

from cute_emulator.errors import EmulatorError
from cute_emulator.host.dsl import elf, seam
from cute_emulator.host.dsl.runtime_api import DeviceProperties, static_shared_bytes
from cute_emulator.units import swizzle
from cute_emulator.units.tma import TensorMap

from .kernels_simple import chain, cluster_ranks, scale

N = 300
STREAM = cuda.CUstream(0x70)


@pytest.fixture
def calls():
    """Opens the seam; the kernel calls that arrive, `calls.packed` the tensors and `calls.ends` the call
    ends."""

    class Calls(list):
        packed: list = []
        ends: list = []

    calls = Calls()
    calls.packed, calls.ends = [], []
    seam.SEAM.open(
        lambda: DeviceProperties("sm_100a", 148),
        calls.append,
        calls.packed.append,
        lambda: calls.ends.append(len(calls)),
    )
    yield calls
    seam.SEAM.close()


def tensors(count=2):
    return [torch.randn(N) for _ in range(count)]


def dynamic(tensor):
    return from_dlpack(tensor).mark_layout_dynamic()


def test_a_call_arrives_with_its_grid_stream_and_parameter_bytes(calls):
    src, dst = tensors()
    compiled = cute.compile(scale, from_dlpack(src), from_dlpack(dst), 2.5, N, STREAM)
    compiled(from_dlpack(src), from_dlpack(dst), 2.5, N, STREAM)
    (call,) = calls
    assert (call.grid, call.block, call.cluster) == ((3, 1, 1), (128, 1, 1), (1, 1, 1))
    assert (call.stream, call.dynamic_smem, call.cooperative, call.programmatic) == (0x70, 0, False, False)
    assert call.params == (
        struct.pack("<Q", src.data_ptr()),
        struct.pack("<Q", dst.data_ptr()),
        struct.pack("<f", 2.5),
        struct.pack("<i", N),
    )
    assert f".entry {call.entry}" in call.ptx and ".target sm_100a" in call.ptx
    assert [t.data_ptr for t in calls.packed[-2:]] == [src.data_ptr(), dst.data_ptr()]
    assert calls.ends == [0, 1]  # the compile, the call


def test_dynamic_layouts_travel_in_the_parameters(calls):
    src, dst = tensors()
    compiled = cute.compile(scale, dynamic(src), dynamic(dst), 1.0, N, STREAM)
    other = torch.randn(77)
    compiled(dynamic(other), dynamic(dst), 1.0, 77, STREAM)
    assert struct.unpack_from("<Qi", calls[0].params[0]) == (other.data_ptr(), 77)
    assert calls[0].grid == (1, 1, 1)


def test_direct_calls_of_a_jit_function_arrive_and_are_compiled_once(calls):
    src, dst = tensors()
    for factor in (2.0, 3.0):
        scale(from_dlpack(src), from_dlpack(dst), factor, N, STREAM)
    assert [struct.unpack("<f", c.params[2])[0] for c in calls] == [2.0, 3.0]
    assert calls[0].ptx == calls[1].ptx


def test_two_launches_of_one_host_function_arrive_in_order(calls):
    src, mid, dst = tensors(3)
    compiled = cute.compile(chain, *map(from_dlpack, (src, mid, dst)), N, STREAM)
    compiled(*map(from_dlpack, (src, mid, dst)), N, STREAM)
    assert ["scale" in c.entry for c in calls] == [True, False]
    assert calls[0].ptx == calls[1].ptx
    assert calls.ends == [0, 2]


def test_kernels_of_the_same_name_keep_their_own_ptx(calls):
    """Two specialisations on a constexpr have one entry name and one dump file name."""
    dst = torch.zeros(8, dtype=torch.int32)
    compiled = [cute.compile(cluster_ranks, from_dlpack(dst), step, 8, STREAM) for step in (5, 7)]
    for function in (*compiled, compiled[0]):
        function(from_dlpack(dst), 8, STREAM)
    assert calls[0].ptx == calls[2].ptx
    assert calls[0].ptx != calls[1].ptx


def test_cluster_and_shared_memory_arrive(calls):
    dst = torch.zeros(8, dtype=torch.int32)
    cute.compile(cluster_ranks, from_dlpack(dst), 1, 8, STREAM)(from_dlpack(dst), 8, STREAM)
    assert (calls[0].cluster, calls[0].dynamic_smem) == ((4, 1, 1), 1024)


def test_a_grid_that_is_no_multiple_of_the_cluster_is_refused(calls):
    dst = torch.zeros(8, dtype=torch.int32)
    compiled = cute.compile(cluster_ranks, from_dlpack(dst), 1, 8, STREAM)
    with pytest.raises(EmulatorError, match=r"grid=\(6, 1, 1\) is not a multiple of cluster=\(4, 1, 1\)"):
        compiled(from_dlpack(dst), 6, STREAM)


def test_an_empty_grid_is_refused(calls):
    src, dst = tensors()
    compiled = cute.compile(scale, from_dlpack(src), from_dlpack(dst), 1.0, N, STREAM)
    with pytest.raises(EmulatorError, match=r"grid=\(0, 1, 1\)"):
        compiled(from_dlpack(src), from_dlpack(dst), 1.0, 0, STREAM)


def test_an_error_of_the_receiver_reaches_the_caller(calls):
    src, dst = tensors()
    compiled = cute.compile(scale, from_dlpack(src), from_dlpack(dst), 1.0, N, STREAM)
    seam.SEAM.api.launch = lambda call: 1 // 0
    with pytest.raises(ZeroDivisionError):
        compiled(from_dlpack(src), from_dlpack(dst), 1.0, N, STREAM)


def test_an_exported_function_carries_its_ptx(calls, tmp_path):
    src, dst = tensors()
    compiled = cute.compile(scale, from_dlpack(src), from_dlpack(dst), 1.0, N, STREAM)
    (tmp_path / "scale.o").write_bytes(compiled.dump_to_object("scale"))
    compiled(from_dlpack(src), from_dlpack(dst), 1.0, N, STREAM)
    load_module(str(tmp_path / "scale.o")).scale(from_dlpack(src), from_dlpack(dst), 1.0, N, STREAM)
    assert calls[0] == calls[1]


def test_an_export_made_without_an_emulator_is_refused(tmp_path, calls):
    src, dst = tensors()
    seam.SEAM.close()
    compiled = cute.compile(scale, from_dlpack(src), from_dlpack(dst), 1.0, N, STREAM)
    (tmp_path / "plain.o").write_bytes(compiled.dump_to_object("plain"))
    seam.SEAM.open(lambda: DeviceProperties("sm_100a", 148), calls.append, lambda _: None, lambda: None)
    with pytest.raises(EmulatorError, match="compiled .or exported. while no emulator was open"):
        load_module(str(tmp_path / "plain.o")).plain(from_dlpack(src), from_dlpack(dst), 1.0, N, STREAM)


def test_a_call_after_the_seam_closed_says_so(calls, capfd):
    src, dst = tensors()
    compiled = cute.compile(scale, from_dlpack(src), from_dlpack(dst), 1.0, N, STREAM)
    compiled(from_dlpack(src), from_dlpack(dst), 1.0, N, STREAM)
    seam.SEAM.close()
    with pytest.raises(Exception, match="cudaErrorLaunchFailure"):
        compiled(from_dlpack(src), from_dlpack(dst), 1.0, N, STREAM)
    assert "no emulator is open" in capfd.readouterr().err
    assert len(calls) == 1


def test_the_target_of_an_open_seam_is_the_default_and_others_run_too(calls):
    src, dst = tensors()
    args = (from_dlpack(src), from_dlpack(dst), 1.0, N, STREAM)
    cute.compile(scale, *args, options="--gpu-arch sm_90a")(*args)
    cute.compile(scale, *args)(*args)
    assert [".target sm_90a" in c.ptx for c in calls] == [True, False]


def test_a_user_who_keeps_the_ptx_gets_it(calls, tmp_path):
    src, dst = tensors()
    args = (from_dlpack(src), from_dlpack(dst), 1.0, N, STREAM)
    compiled = cute.compile(scale, *args, options=f"--keep-ptx --dump-dir={tmp_path}")
    compiled(*args)
    assert compiled.__ptx__ == calls[0].ptx


def test_closing_leaves_the_dsl_as_it_was(calls):
    from cutlass.base_dsl.compiler import Compiler
    from cutlass.cute.runtime import _Tensor
    from cutlass.cutlass_dsl import CuTeDSL

    during = (Compiler.compile, _Tensor.__c_pointers__, CuTeDSL._get_dsl().envar.shared_libs)
    seam.SEAM.close()
    after = (Compiler.compile, _Tensor.__c_pointers__, CuTeDSL._get_dsl().envar.shared_libs)
    assert not any(d is a or d == a for d, a in zip(during, after, strict=True))
    assert Compiler.compile.__module__ == "cutlass.base_dsl.compiler"
    assert not hasattr(Compiler.compile, "__wrapped__") and not hasattr(_Tensor.__c_pointers__, "__wrapped__")


def test_one_seam_at_a_time(calls):
    with pytest.raises(EmulatorError, match="open already"):
        seam.SEAM.open(lambda: DeviceProperties("sm_100a", 148), calls.append, lambda _: None, lambda: None)


def test_the_self_test_names_symbols_that_are_not_served(calls, monkeypatch):
    src, dst = tensors()
    monkeypatch.delitem(seam.SEAM.api._callbacks, "_cudaLaunchKernelEx")
    with pytest.raises(EmulatorError, match=rf"_cudaLaunchKernelEx.*tested with .* {seam.TESTED_DSL}"):
        cute.compile(scale, from_dlpack(src), from_dlpack(dst), 4.0, N, STREAM)


def test_absolute_symbols_are_found_at_their_addresses(tmp_path):
    symbols = {"first": 0x1234_5678_9ABC, "second": 0x42, "third": 2**63}
    path = tmp_path / "names.so"
    path.write_bytes(elf.absolute_symbols(symbols, "names.so"))
    library = ctypes.CDLL(str(path))
    found = {name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in symbols}
    assert found == symbols
    assert not hasattr(library, "fourth")


@pytest.mark.parametrize("number", [7, 12, 99])
def test_launch_events_are_taken_and_unknown_attributes_refused(calls, monkeypatch, number):
    """An event of a launch may fire late: who waits for it waits for the kernel."""
    launched = []
    monkeypatch.setattr(seam.SEAM.api, "_submit", lambda *arguments: launched.append(arguments))
    attribute = ctypes.create_string_buffer(struct.pack("<I4xIII52x", number, 1, 0, 0), 72)
    where = ctypes.addressof(attribute)
    config = ctypes.create_string_buffer(struct.pack("<6IQQQI", 1, 1, 1, 32, 1, 1, 0, 5, where, 1))
    if number == 99:
        with pytest.raises(EmulatorError, match="cudaLaunchAttribute 99"):
            seam.SEAM.api._launch_ex(ctypes.addressof(config), 1, 0)
    else:
        seam.SEAM.api._launch_ex(ctypes.addressof(config), 1, 0)
        assert len(launched) == 1


def test_device_attributes():
    device = DeviceProperties("sm_90a", 132)
    assert (device.capability, device.attribute(16), device.attribute(97)) == ((9, 0), 132, 232_448)
    assert DeviceProperties("sm_103a", 148).capability == (10, 3)
    with pytest.raises(EmulatorError, match="cudaDeviceAttr 9999"):
        device.attribute(9999)


def test_the_driver_function_for_tensor_maps_writes_the_hardware_layout():
    """`cuTensorMapEncodeTiled`, called as host code would: a 64 x 32 box of a bf16 [100, 200] matrix."""
    out, address = (ctypes.c_uint8 * 128)(), 0x7F00_0000_1000
    dims, strides = (ctypes.c_uint64 * 2)(200, 100), (ctypes.c_uint64 * 1)(400)
    box, steps = (ctypes.c_uint32 * 2)(64, 32), (ctypes.c_uint32 * 2)(1, 1)
    library = ctypes.CDLL(str(seam.SEAM.library()))
    address_of = ctypes.c_void_p(address)
    assert library._cuTensorMapEncodeTiled(out, 9, 2, address_of, dims, strides, box, steps, 0, 3, 2, 0) == 0
    got = TensorMap.decode(bytes(out))
    assert (got.address, got.type, got.dims, got.strides, got.box) == (
        address, "bf16", (200, 100), (400,), (64, 32),
    )  # fmt: skip
    assert got.swizzle == swizzle.SW128


def test_static_shared_memory_is_counted_without_the_dynamic_array():
    ptx = """.extern .shared .align 16 .b8 dyn[];
    .shared .align 8 .b8 a[24];
    .shared .align 16 .b8 b$1[100];
    """
    assert static_shared_bytes(ptx) == 124


def test_it_works_when_the_dsl_was_imported_first_and_in_a_process_of_its_own(tmp_path):
    """The fixture's process has opened the seam many times; this one imports cutlass, then opens it once."""
    script = tmp_path / "late.py"
    script.write_text(
        textwrap.dedent("""
        import cutlass, cutlass.cute as cute, torch
        import cuda.bindings.driver as cuda
        from cutlass.cute.runtime import from_dlpack
        from kernels_simple import scale
        from cute_emulator.host.device import DeviceProperties
        from cute_emulator.host.dsl.seam import SEAM
        calls = []
        SEAM.open(lambda: DeviceProperties("sm_90a", 132), calls.append, lambda _: None, lambda: None)
        a, b = from_dlpack(torch.ones(5)), from_dlpack(torch.ones(5))
        scale(a, b, 2.0, 5, cuda.CUstream(0))
        print(calls[0].grid, ".target sm_90a" in calls[0].ptx)
        """)
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    result = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert result.stdout.strip() == "(1, 1, 1) True", result.stderr


def test_tvm_ffi_functions_arrive_after_something_was_compiled_for_the_device(tmp_path):
    """By then the process has the DSL's own runtime library loaded, whose functions have the same names."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import cuda.bindings.driver as cuda
            import cutlass
            import cutlass.cute as cute
            import torch
            from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
            from cute_emulator import Emulator
            from emulator.tests.kernels_simple import scale

            def compiled(options):
                x = make_fake_compact_tensor(cutlass.Float32, (cute.sym_int32(),))
                y = make_fake_compact_tensor(cutlass.Float32, (cute.sym_int32(),))
                given = (cutlass.Float32(0), cutlass.Int32(0), make_fake_stream())
                return cute.compile(scale, x, y, *given, options=options)

            compiled("")
            x, y = torch.arange(100.0), torch.full((100,), torch.nan)
            with Emulator() as emu:
                compiled("--enable-tvm-ffi")(x, y, 2.0, 100, 0)
            assert torch.equal(y, 2 * x), y
            """
        )
    )
    root = Path(__file__).parents[2]
    env = {
        **os.environ,
        "PYTHONPATH": f"{root / 'src'}:{root / 'emulator' / 'src'}:{root}",
        "CUTE_DSL_DUMP_DIR": str(tmp_path),
    }
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="a C compiler links the library")
def test_a_tvm_ffi_library_is_loaded_called_and_unloaded_when_python_has_ended(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import subprocess
            import cutlass
            import cutlass.cute as cute
            import torch
            from cutlass.cute.runtime import find_runtime_libraries, load_module
            from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
            from cute_emulator import Emulator
            from emulator.tests.kernels_simple import scale

            x, y = torch.arange(100.0), torch.full((100,), torch.nan)
            with Emulator() as emu:
                fake = make_fake_compact_tensor(cutlass.Float32, (cute.sym_int32(),))
                given = (cutlass.Float32(0), cutlass.Int32(0), make_fake_stream())
                compiled = cute.compile(scale, fake, fake, *given, options="--enable-tvm-ffi")
                compiled.export_to_c("scale.o", function_name="scale")
                libraries = find_runtime_libraries(enable_tvm_ffi=True)
                subprocess.run(["cc", "-shared", "-o", "scale.so", "scale.o", *libraries], check=True)
                loaded = load_module("./scale.so", enable_tvm_ffi=True)
                loaded.scale(x, y, 3.0, 100, 0)
            assert torch.equal(y, 3 * x), y
            """
        )
    )
    root = Path(__file__).parents[2]
    env = {
        **os.environ,
        "PYTHONPATH": f"{root / 'src'}:{root / 'emulator' / 'src'}:{root}",
        "CUTE_DSL_DUMP_DIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, script], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr


def test_unloading_a_library_calls_no_python():
    api = seam.SEAM.api
    for name in ("_cudaLibraryUnload", "cuda_dialect_unload_library_once"):
        assert name not in api._callbacks
        assert ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(api.symbols()[name])(64) == 0


@pytest.mark.skipif(shutil.which("cc") is None, reason="the object file of this test comes from a C compiler")
def test_renaming_touches_undefined_symbols_of_object_files_only(tmp_path):
    source, built = tmp_path / "x.s", tmp_path / "x.o"
    source.write_text(".globl here\nhere:\n call far_away\n call near_by\n")
    subprocess.run(["cc", "-c", source, "-o", built], check=True)
    names = {"far_away": "own_away", "here": "gone"}
    renamed = elf.rename_undefined(built.read_bytes(), names)
    assert b"own_away\0" in renamed and b"far_away" not in renamed
    assert b"here\0" in renamed and b"near_by\0" in renamed
    assert len(renamed) == built.stat().st_size
    assert elf.rename_undefined(b"no object", names) == b"no object"


def test_tvm_ffi_functions_arrive_with_cpu_tensors(calls):
    """Their wrapper asks for CUDA tensors and loads the library by itself."""
    src, dst = tensors()
    fake = cute.runtime.make_fake_compact_tensor(cutlass.Float32, (cute.sym_int(),))
    stream = cute.runtime.make_fake_stream()
    compiled = cute.compile(scale, fake, fake, 1.0, N, stream, options="--enable-tvm-ffi")
    for _ in range(2):
        compiled(src, dst, 4.0, N, 0x70)
    for call in calls:
        arrived = [struct.unpack_from("<Qi", p) for p in call.params[:2]]
        assert arrived == [(src.data_ptr(), N), (dst.data_ptr(), N)]
        assert struct.unpack("<f", call.params[2]) == (4.0,)
    assert len(calls) == 2
    assert calls.packed[-2] is src and calls.packed[-1] is dst


def test_tvm_ffi_functions_compiled_from_real_tensors_arrive_too(calls):
    src, dst = tensors()

    def runtime_tensors():
        return [from_dlpack(t, enable_tvm_ffi=True) for t in (src, dst)]

    stream = cute.runtime.make_fake_stream()
    compiled = cute.compile(scale, *runtime_tensors(), 1.0, N, stream, options="--enable-tvm-ffi")
    compiled(src, dst, 4.0, N, 0x70)
    compiled(*runtime_tensors(), 5.0, N, 0x70)
    for call, factor in zip(calls, (4.0, 5.0), strict=True):
        assert struct.unpack_from("<Q", call.params[0]) == (src.data_ptr(),)
        assert struct.unpack("<f", call.params[2]) == (factor,)
    assert [t.data_ptr for t in calls.packed[-2:]] == [src.data_ptr(), dst.data_ptr()]


def test_tvm_ffi_functions_from_object_files_arrive_in_whichever_emulator_is_open(calls, tmp_path):
    src, dst = tensors()
    fake = cute.runtime.make_fake_compact_tensor(cutlass.Float32, (cute.sym_int(),))
    stream = cute.runtime.make_fake_stream()
    compiled = cute.compile(scale, fake, fake, 1.0, N, stream, options="--enable-tvm-ffi")
    compiled.export_to_c(str(tmp_path / "scale.o"), function_name="scale")
    loaded = load_module(str(tmp_path / "scale.o"), enable_tvm_ffi=True).scale
    loaded(src, dst, 4.0, N, 0x70)
    (call,) = calls
    arrived = [struct.unpack_from("<Qi", p) for p in call.params[:2]]
    assert arrived == [(src.data_ptr(), N), (dst.data_ptr(), N)] and ".visible .entry" in call.ptx
    assert calls.packed[0] is src and calls.packed[1] is dst
    seam.SEAM.close()
    later: list = []
    seam.SEAM.open(lambda: DeviceProperties("sm_100a", 148), later.append, later.append, lambda: None)
    loaded(src, dst, 4.0, N, 0x70)
    assert later[0] is src and later[1] is dst and later[2].ptx == call.ptx and len(calls) == 1
