"""`device="cuda"` on CPU memory: what is marked, copied, poisoned, registered and waited for."""

import pytest
import torch

from overlap_gemm.emulator.host.torch_mode import CudaOnCpu, is_marked


@pytest.fixture
def mode():
    """The mode, entered; `mode.adopted` lists (address, bytes), `mode.waits` counts waits."""

    class Recording(CudaOnCpu):
        def __init__(self):
            self.adopted, self.waits = [], 0
            super().__init__(
                lambda s: self.adopted.append((s.data_ptr(), s.nbytes())), lambda: 1, self._count_wait
            )

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
