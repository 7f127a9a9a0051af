"""`device="cuda"` on CPU memory: what is marked, copied, poisoned, registered and waited for."""

import numpy as np
import pytest
import torch

from cute_emulator import Emulator
from cute_emulator.host.torch import half_products
from cute_emulator.host.torch.torch_mode import CudaOnCpu, is_marked
from cute_emulator.units import mma

from .test_matrix_units import a_place, c_place, fragment


@pytest.fixture
def mode():
    """The mode, entered; `mode.adopted` lists (address, bytes), `mode.waits` counts waits."""

    class Recording(CudaOnCpu):
        def __init__(self):
            self.adopted, self.waits = [], 0
            emulator = Emulator(ranks=2)
            emulator.adopt = lambda s, rank, **_: self.adopted.append((s.data_ptr(), s.nbytes()))
            super().__init__(emulator, 1, self._count_wait)

        def _count_wait(self):
            self.waits += 1

    with Recording() as recording:
        yield recording


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3, device="cuda"),
        lambda: torch.zeros(3, device=torch.device("cuda", 1)),
        lambda: torch.zeros(3).cuda(),
        lambda: torch.zeros(3).to("cuda:1"),
        lambda: torch.zeros(3).to(device="cuda", dtype=torch.float16),
        lambda: torch.zeros(3).to(torch.ones(1, device="cuda")),
        lambda: torch.zeros(3, device="cuda") + 1,
        lambda: torch.zeros(3, device="cuda").view(3, 1)[1:],
        lambda: torch.empty_like(torch.zeros(3, device="cuda")),
        lambda: torch.empty_like(torch.zeros(3), device="cuda"),
        lambda: torch.tensor([1.0], device="cuda"),
        lambda: torch.arange(4, device="cuda").float(),
    ],
)
def test_device_tensors(mode, make):
    tensor = make()
    assert tensor.device == torch.device("cuda", 1)
    assert tensor.is_cuda and tensor.get_device() == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3),
        lambda: torch.zeros(3, device="cuda").cpu(),
        lambda: torch.zeros(3, device="cuda").to("cpu"),
        lambda: torch.zeros(3, device="cuda").to(device=torch.device("cpu")),
        lambda: torch.zeros(3, device="cuda").to(torch.ones(1)),
        lambda: torch.ones(3).copy_(torch.zeros(3, device="cuda")),
        lambda: torch.empty_like(torch.zeros(3, device="cuda"), device="cpu"),
    ],
)
def test_host_tensors(mode, make):
    tensor = make()
    assert tensor.device == torch.device("cpu")
    assert not tensor.is_cuda


def test_moves_between_host_and_device_copy_and_moves_within_do_not(mode):
    host = torch.arange(3.0)
    device = host.cuda()
    host.zero_()
    assert device.tolist() == [0, 1, 2]
    back = device.cpu()
    device.zero_()
    assert back.tolist() == [0, 1, 2]
    assert device.cuda().data_ptr() == device.data_ptr()
    assert back.cpu().data_ptr() == back.data_ptr()


def test_uninitialised_device_memory_is_poisoned(mode):
    assert torch.empty(5, device="cuda").isnan().all()
    assert torch.empty(5, device="cuda", dtype=torch.bfloat16).isnan().all()
    assert (torch.empty_like(torch.zeros(3, dtype=torch.int32, device="cuda")) == -1).all()
    assert torch.zeros(2, device="cuda").new_empty(4).isnan().all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(8, pin_memory=True),
        lambda: torch.zeros(8).pin_memory(),
        lambda: torch.empty_like(torch.zeros(8, device="cuda"), device="cpu", pin_memory=True).zero_(),
    ],
)
def test_pinned_memory_is_the_hosts_and_kernels_may_touch_it(mode, make):
    tensor = make()
    assert (tensor.device.type, tensor.is_cuda, tensor.is_pinned()) == ("cpu", False, True)
    assert (tensor.data_ptr(), 32) in mode.adopted and tensor.tolist() == [0] * 8
    assert tensor.pin_memory().data_ptr() == tensor.data_ptr()
    assert not torch.zeros(8).is_pinned()


def test_to_pin_memory_copies_it(mode):
    plain = torch.ones(8)
    pinned = plain.pin_memory()
    plain.zero_()
    assert pinned.tolist() == [1] * 8


def test_nobody_waits_for_kernels_to_read_what_is_pinned(mode):
    tensor, before = torch.zeros(8, pin_memory=True), mode.waits
    tensor.tolist()
    assert mode.waits == before


def test_device_memory_is_adopted_once_and_by_storage(mode):
    tensor = torch.zeros(8, device="cuda")
    tensor[2:].view(3, 2).add_(1)
    assert mode.adopted == [(tensor.data_ptr(), 32)]


def test_operations_wait_for_kernels_and_questions_about_shape_do_not(mode):
    tensor = torch.zeros(8, device="cuda")
    _ = tensor.shape, tensor.device, tensor.data_ptr(), tensor.view(2, 4).stride(), tensor.t().size(0)
    assert mode.waits == 0
    for touch in (
        lambda: tensor.cpu(),
        lambda: tensor.add_(1),
        lambda: tensor.tolist(),
        lambda: tensor[0].item(),
    ):
        before = mode.waits
        touch()
        assert mode.waits > before


def test_outside_the_mode_torch_is_as_it_was(mode):
    tensor = torch.zeros(2, device="cuda")
    mode.__exit__(None, None, None)
    try:
        assert tensor.device.type == "cpu" and is_marked(tensor)
    finally:
        mode.__enter__()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_products_are_a_tensor_cores_to_the_bit(mode, dtype):
    torch.manual_seed(0)
    k, kind = 80, {torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]
    a, b = torch.randn(16, k).to(dtype), torch.randn(8, k).to(dtype)
    left, right = (x.view(torch.int16).numpy().view(np.uint16) for x in (a, b))
    registers = np.zeros((4, 32), np.uint32)
    for at in range(0, k, 16):
        fa = fragment(left[:, at : at + 16], 4, a_place(2))
        fb = fragment(right[:, at : at + 16], 2, lambda i, t, e: (t // 4, 2 * (t % 4) + e + 8 * i))
        registers = mma.mma_sync(fa, fb, registers, kind, kind, "f32")
    sums = np.zeros((16, 8), np.float32)
    for i, lane in np.ndindex(4, 32):
        sums[c_place(i, lane, 0)] = registers[i : i + 1, lane].view(np.float32)[0]
    assert np.abs(sums - (a.double() @ b.double().T).numpy()).max() < 1e-4
    assert np.array_equal(half_products.product(a, b.T).numpy(), sums)
    c = torch.randn(16, 8).to(dtype)
    want, added = torch.from_numpy(sums).to(dtype), (torch.from_numpy(sums) + c.float()).to(dtype)
    x, y, z = a.cuda(), b.cuda(), c.cuda()
    for got in (
        x @ y.T,
        torch.mm(x, y.T),
        torch.einsum("mk,nk->mn", x, y),
        torch.bmm(x[None], y.T[None])[0],
        torch.nn.functional.linear(x, y),
    ):
        assert got.is_cuda and got.dtype == dtype
        torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0)
    for got in (torch.addmm(z, x, y.T), torch.baddbmm(z[None], x[None], y.T[None])[0]):
        torch.testing.assert_close(got.cpu(), added, rtol=0, atol=0)
    x.requires_grad_()
    (x @ y.T).sum().backward()
    torch.testing.assert_close(x.grad.cpu(), b.float().sum(0).expand(16, k).to(dtype), rtol=1e-2, atol=1e-2)


def test_an_mma_rounds_once(mode):
    """1 + 15 units of half an ulp of 1: each alone is lost, their sum is not."""
    a, b = np.full((16, 16), 2.0**-12, np.float16), np.full((8, 16), 2.0**-12, np.float16)
    a[:, 0], b[:, 0] = 1, 1
    fa = fragment(a.view(np.uint16), 4, a_place(2))
    fb = fragment(b.view(np.uint16), 2, lambda i, t, e: (t // 4, 2 * (t % 4) + e + 8 * i))
    got = mma.mma_sync(fa, fb, np.zeros((4, 32), np.uint32), "f16", "f16", "f32").view(np.float32)
    assert (got == np.float32(1 + 15 * 2.0**-24)).all() and got[0, 0] > 1
