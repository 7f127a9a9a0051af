"""What torch offers for any device, served on the emulated one: generators, operators, gradients."""

import pytest
import torch

from cute_emulator import Emulator
from cute_emulator.host.script import one_device
from cute_emulator.testing import emulator_command


@pytest.fixture
def device():
    with Emulator() as emulator, one_device(emulator):
        yield emulator


def test_the_accelerator_is_cuda(device):
    assert torch.accelerator.is_available() and torch.accelerator.device_count() == 1
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch.accelerator.current_device_index() == 0
    assert torch.accelerator.current_stream() is torch.cuda.current_stream()
    with torch.accelerator.device_index(0):
        torch.accelerator.synchronize()
    assert torch.cuda.get_device_name().startswith("cute_emulator")
    torch.cuda.nvtx.range_push("a")
    torch.ones(1, device="cuda").record_stream(torch.cuda.current_stream())


def test_generators_of_the_device(device):
    generators = torch.Generator("cuda"), torch.Generator(device=torch.device("cuda", 0))
    assert all(isinstance(g, torch.Generator) and g.device == torch.device("cuda", 0) for g in generators)
    drawn = [torch.randn(5, device="cuda", generator=g.manual_seed(3)) for g in generators]
    assert torch.equal(*drawn) and drawn[0].is_cuda
    assert not torch.equal(drawn[0], torch.randn(5, device="cuda", generator=generators[0]))
    assert torch.Generator().device.type == "cpu" and isinstance(torch.default_generator, torch.Generator)


def test_the_default_device_is_where_tensors_are_made(device):
    torch.set_default_device("cuda")
    assert torch.ones(2).is_cuda and not torch.ones(2, device="cpu").is_cuda
    torch.set_default_device(None)
    with torch.device("cuda"):
        assert torch.arange(3).is_cuda
    assert not torch.ones(2).is_cuda


def test_the_default_device_ends_with_the_run():
    with Emulator() as emulator, one_device(emulator):
        torch.set_default_device("cuda")
    assert not torch.ones(2).is_cuda


def test_what_is_compiled_runs(device):
    @torch.compile(fullgraph=True)
    def twice(x):
        return 2 * x

    x = torch.ones(3, device="cuda")
    assert twice(x).tolist() == torch.compile(lambda x: x + x)(x).tolist() == [2] * 3
    assert twice(x).is_cuda


PRODUCTS = {
    "mm": lambda a, b, c: torch.mm(a, b, out_dtype=torch.float32),
    "bmm": lambda a, b, c: torch.bmm(a[None], b[None], out_dtype=torch.float32)[0],
    "addmm": lambda a, b, c: torch.addmm(c, a, b, beta=0.5, alpha=2, out_dtype=torch.float32),
    "baddbmm": lambda a, b, c: torch.baddbmm(c[None], a[None], b[None], out_dtype=torch.float32)[0],
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_into_a_wider_type_are_not_rounded_to_the_narrow_one(device, name):
    torch.manual_seed(0)
    a, b = torch.randn(8, 48, device="cuda").bfloat16(), torch.randn(48, 24, device="cuda").bfloat16()
    c = torch.randn(8, 24, device="cuda")
    out = PRODUCTS[name](a, b, c)
    beta, alpha = {"addmm": (0.5, 2), "baddbmm": (1, 1)}.get(name, (0, 1))
    exact = beta * c.cpu().double() + alpha * (a.cpu().double() @ b.cpu().double())
    assert out.dtype is torch.float32 and out.is_cuda
    torch.testing.assert_close(out.cpu().double(), exact, rtol=1e-5, atol=1e-5)


def make_operators(library):
    """One with a kernel for CUDA alone, one for CUDA and CPU, one for any device."""
    seen = []

    @torch.library.custom_op(f"{library}::cuda_alone", mutates_args={"y"}, device_types="cuda")
    def cuda_alone(x: torch.Tensor, y: torch.Tensor) -> None:
        seen.append(x.device.type)
        y.copy_(x * torch.full((), 2.0, device=x.device))

    @torch.library.custom_op(f"{library}::any_device", mutates_args=())
    def any_device(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.device.type)
        return x * torch.full((), 2.0, device=x.device)

    low = torch.library.Library(library, "FRAGMENT")
    low.define("both(Tensor x) -> Tensor")
    low.impl("both", lambda x: x * 10, "CPU")
    low.impl("both", lambda x: x * 100, "CUDA")
    return cuda_alone, any_device, low, seen


@pytest.mark.parametrize("when", ["before", "inside"])
def test_operators_of_a_library_run_their_kernel_for_cuda(when):
    library = f"emulator_test_{when}"
    made = make_operators(library) if when == "before" else None
    for _ in range(2):
        with Emulator() as emulator, one_device(emulator):
            cuda_alone, any_device, _, seen = made = made or make_operators(library)
            seen.clear()
            x, y = torch.ones(3, device="cuda"), torch.empty(3, device="cuda")
            cuda_alone(x, y)
            assert y.tolist() == [2] * 3
            assert any_device(x).tolist() == [2] * 3 and any_device(x).is_cuda
            assert seen == ["cuda"] * 3
            both = getattr(torch.ops, library).both
            assert both(x).tolist() == [100] * 3 and both(torch.ones(3)).tolist() == [10] * 3
            assert any_device(torch.ones(3)).tolist() == [2] * 3 and seen[-1] == "cpu"
    assert both(torch.ones(3)).tolist() == [10] * 3
    with pytest.raises(NotImplementedError):
        cuda_alone(torch.ones(3), torch.ones(3))


def test_gradients_of_one_rank_are_on_the_device(device):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            assert gradient.is_cuda and x.is_cuda
            return gradient * 2

    x = torch.ones(3, device="cuda", requires_grad=True)
    Twice.apply(x).sum().backward()
    assert x.grad.is_cuda and x.grad.tolist() == [2] * 3


TABLES = """
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.runtime import from_dlpack

@cute.kernel
def tell_kernel(tables: Int64, offset: Int32, value: Int32, world: cutlass.Constexpr):
    lane, _, _ = cute.arch.thread_idx()
    words = cute.make_ptr(Int64, tables, cute.AddressSpace.gmem, assumed_align=8)
    if lane < world:
        there = cute.make_tensor(words, cute.make_layout(world))[lane]
        pad = cute.make_ptr(Int32, there, cute.AddressSpace.gmem, assumed_align=4)
        cute.make_tensor(pad, cute.make_layout(64))[offset] = value

@cute.jit
def tell(tables: Int64, offset: Int32, value: Int32, world: cutlass.Constexpr):
    tell_kernel(tables, offset, value, world).launch(grid=(1, 1, 1), block=(32, 1, 1))

dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
buffer = symm_mem.empty(64, dtype=torch.int32, device="cuda")
handle = symm_mem.rendezvous(buffer, dist.group.WORLD)
tell(handle.buffer_ptrs_dev, rank, 10 + rank, world)
tell(handle.signal_pad_ptrs_dev, rank, 20 + rank, world)
torch.cuda.synchronize()
dist.barrier()
assert buffer[:world].tolist() == [10 + r for r in range(world)], buffer
pad = handle.get_signal_pad(rank, (64,), torch.int32)
assert pad[: world + 1].tolist() == [*(20 + r for r in range(world)), 0], pad
"""


def test_symmetric_memory_has_tables_of_addresses_for_kernels(tmp_path):
    script = tmp_path / "tables.py"
    script.write_text(TABLES.replace("import cutlass.cute", "import cutlass, cutlass.cute"))
    done = emulator_command("--ranks", 2, script)
    assert done.returncode == 0, done.stderr
