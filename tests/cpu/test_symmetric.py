"""Symmetric memory, with stand-ins for NVSHMEM, torch and CUDA: who has which address, what goes when."""

import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed._symmetric_memory as symm_mem

from overlap_gemm.runtime.group import Group
from overlap_gemm.runtime.memory import symmetric

CPU = torch.device("cpu")


class Pair(Group):
    """Rank 0 of two, which are the job's ranks 4 and 7."""

    def __init__(self):
        super().__init__("pair", 0, 2)

    def global_rank(self, rank):
        return (4, 7)[rank]

    def all_gather_object(self, own):
        return [own, own]


@pytest.fixture
def nvshmem(monkeypatch):
    """Modules in which PE 4 is here and PE 7 beyond reach; `.log` has what was called."""
    log = []
    status = SimpleNamespace(STATUS_IS_INITIALIZED=2)
    core = ModuleType("nvshmem.core")
    core.log, core.status = log, 2
    core.init_status, core.InitStatus = lambda: core.status, status
    core.tensor = lambda shape, dtype: torch.zeros(shape, dtype=dtype)
    core.free_tensor = lambda tensor: log.append("free")
    core.get_unique_id = lambda: "uid"
    core.init = lambda **given: log.append(("init", given["uid"], given["rank"], given["nranks"]))
    bindings = ModuleType("nvshmem.bindings")
    bindings.ptr = lambda address, pe: address if pe == 4 else 0
    package = ModuleType("nvshmem")
    package.core, package.bindings = core, bindings
    for name, module in (("nvshmem", package), ("nvshmem.core", core), ("nvshmem.bindings", bindings)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("synchronize"))
    return core


def test_nvshmems_ranks_are_the_jobs_and_what_is_beyond_reach_is_a_pe(nvshmem):
    block = symmetric.NvshmemSymmetric(Pair(), 64, CPU)
    own = block.local.data_ptr()
    assert block.local.shape == (64,)
    assert block.bases.tolist() == [own, -8] and block.by_put.tolist() == [own, -8]
    block.close()
    assert nvshmem.log == ["synchronize", "free"], "nobody is at work on it when it is freed"


def test_puts_go_to_those_within_reach_too(nvshmem):
    with mock.patch.object(sys.modules["nvshmem"].bindings, "ptr", lambda address, pe: address + pe):
        block = symmetric.NvshmemSymmetric(Pair(), 64, CPU)
    own = block.local.data_ptr()
    assert block.bases.tolist() == [own + 4, own + 7] and block.by_put.tolist() == [own, -8]


@pytest.mark.parametrize("beyond", [True, False])
def test_all_are_reached_where_every_address_is_one(nvshmem, beyond):
    with mock.patch.object(
        sys.modules["nvshmem"].bindings, "ptr", lambda address, pe: 0 if beyond else address
    ):
        assert symmetric.NvshmemSymmetric.has_p2p(Pair(), CPU) is not beyond
    assert nvshmem.log == ["synchronize", "free"]


@pytest.mark.parametrize("rank", [0, 1])
def test_nvshmem_is_initialised_once_with_the_first_ranks_id(nvshmem, rank, monkeypatch):
    nvshmem.status = 0
    driver = ModuleType("cuda.core")
    driver.Device = lambda index: SimpleNamespace(set_current=lambda: nvshmem.log.append("current"))
    monkeypatch.setitem(sys.modules, "cuda.core", driver)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: nvshmem.log.append("device"))
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: nvshmem.log.append("context"))
    monkeypatch.setattr(symmetric.dist, "get_rank", lambda: rank)
    monkeypatch.setattr(symmetric.dist, "get_world_size", lambda: 2)

    def broadcast(box, src):
        assert src == 0 and box == (["uid"] if rank == 0 else [None])
        box[0] = "the first's"

    monkeypatch.setattr(symmetric.dist, "broadcast_object_list", broadcast)
    monkeypatch.setenv("NVSHMEM_DISABLE_NVLS", "0")
    symmetric.init_nvshmem(CPU)
    assert nvshmem.log == ["device", "context", "current", ("init", "the first's", rank, 2)]
    nvshmem.status = 2
    symmetric.init_nvshmem(CPU)
    assert len(nvshmem.log) == 4


@pytest.mark.parametrize(
    ("version", "may"), [("3.4.5", False), ("3.7.1", False), ("3.7.2", True), ("3.8.0.1", True)]
)
def test_puts_are_linked_from_the_version_on_that_the_compiler_reads(version, may, monkeypatch):
    monkeypatch.setattr(symmetric.importlib.metadata, "version", lambda name: version)
    why = symmetric.why_no_puts()
    assert (why is None) == may and (may or ">=3.7.2" in why)


def test_torchs_blocks_begin_where_the_tensor_does(monkeypatch):
    """Its handle has the addresses of allocations, in which the block may lie further on."""
    log, block = [], torch.zeros(64, dtype=torch.uint8)
    handle = SimpleNamespace(buffer_ptrs=[block.data_ptr() - 16, 4000])
    monkeypatch.setattr(symm_mem, "empty", lambda nbytes, dtype, device: block[:nbytes])
    monkeypatch.setattr(symm_mem, "rendezvous", lambda tensor, group: handle)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("synchronize"))
    monkeypatch.setattr(symmetric.dist, "barrier", lambda group: log.append(group))
    group = SimpleNamespace(process_group="ranks", rank=0, size=2)
    with mock.patch.object(symmetric, "together", lambda group, what, attempt, error: attempt()):
        memory = symmetric.TorchSymmetric(group, 64, CPU)
    assert memory.bases.tolist() == [block.data_ptr(), 4016]
    assert symmetric.TorchSymmetric.has_p2p(group, CPU) is True
    memory.close()
    assert log == ["synchronize", "ranks"], "every rank's work has ended before anybody's block goes"


def test_a_kernels_device_state_is_given_before_its_kernels_are_loaded(nvshmem, monkeypatch):
    loaded = []
    driver = ModuleType("driver")
    driver.cuLibraryGetKernelCount = lambda library: (0, 2)
    driver.cuLibraryEnumerateKernels = lambda count, library: (0, list(range(count)))
    driver.cuKernelGetFunction = lambda kernel: (0, f"function {kernel}")
    driver.cuFuncLoad = lambda function: loaded.append(function) or (0,)
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    nvshmem.NvshmemKernelObject = SimpleNamespace(from_handle=lambda library: library)
    nvshmem.library_init = loaded.append
    symmetric.init_nvshmem_library(SimpleNamespace(library="17"))
    assert loaded == [17, "function 0", "function 1"]
    driver.cuFuncLoad = lambda function: (719,)
    with pytest.raises(RuntimeError, match="CUDA driver: 719"):
        symmetric.init_nvshmem_library(SimpleNamespace(library="17"))
