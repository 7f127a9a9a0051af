"""Between two collectives nothing raises on one rank alone: every rank is told who failed, and why, at once.

On CPUs, with a made-up device and its memory; ranks, messages and the order of things are real.
"""

import contextlib
import os
import re
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

import overlap_gemm
from overlap_gemm.backends import by_shards, peer_access
from overlap_gemm.backends.fused import gather_plans as gather
from overlap_gemm.backends.fused import plan_cache as plans
from overlap_gemm.backends.fused.fused_backend import Fused
from overlap_gemm.backends.scales.product_types import ProductTypes
from overlap_gemm.device.failure import RECORD_WORDS
from overlap_gemm.exchange.geometry import ExchangeShape
from overlap_gemm.runtime import peers
from overlap_gemm.runtime.agree import DisagreementError, together
from overlap_gemm.runtime.agree import gather as gather_from
from overlap_gemm.runtime.group import group_name, resolve
from overlap_gemm.runtime.memory.workspace import SizeClass
from overlap_gemm.spec.sharding import Shards
from overlap_gemm.tuning import machine
from overlap_gemm.tuning.settings import configured

CPU, BF16 = torch.device("cpu"), torch.bfloat16
PROMPT = 10.0
"""Seconds; the groups' time-out is 60."""


class Planted(RuntimeError):
    pass


def fails(*_, **__):
    raise Planted("planted here")


def device():
    """A rank's executor."""
    order = SimpleNamespace(word=torch.zeros(1, dtype=torch.int32))
    return SimpleNamespace(
        arch="sm_90a", num_sms=132, device=CPU, is_open=True, flavour="", is_full_device=True, order=order,
        max_clusters=lambda size: 132 // size, record=torch.zeros(RECORD_WORDS, dtype=torch.int32),
    )  # fmt: skip


def rendezvous(block, group):
    addresses = [None] * dist.get_world_size()
    dist.all_gather_object(addresses, block.data_ptr())
    return SimpleNamespace(buffer_ptrs=addresses)


@contextlib.contextmanager
def made_up():
    """A group of whose device and memory nothing is known yet."""
    machine.machine_for.cache_clear()
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (peers, "executor_for", lambda group, where: device()),
            (peers, "_peers", {}),
            (peer_access, "_known", {}),
            (symm_mem, "empty", lambda nbytes, dtype, device: torch.empty(nbytes, dtype=dtype)),
            (symm_mem, "rendezvous", rendezvous),
            (torch.cuda, "synchronize", lambda device: None),
            (plans, "compiled_kernel", lambda *_: "kernel"),
            (gather, "compiled_gather", lambda *_, **__: "kernel"),
            (gather, "compiled_gate", lambda *_: "gate"),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield resolve(group_name(None))
    machine.machine_for.cache_clear()


def scatter(group):
    shape = ExchangeShape.even(512, 512, group.size)
    return plans.plan_for(group, CPU, ProductTypes(BF16), shape, "k", "k", ())


def gathering(group):
    weight = torch.empty(64, 64, dtype=BF16)
    return gather.plan_for(
        group, ProductTypes(BF16), CPU, 64, [weight], (), Shards.even(64 * group.size, group.size), False
    )


def copying(group):
    return by_shards.plan_for(group, torch.empty(64, 64), Shards.even(64 * group.size, group.size))


def reaching(group):
    gpu = {"major": 9, "minor": 0, "multi_processor_count": 132, "uuid": f"gpu-{group.rank}"}
    facts = SimpleNamespace(**gpu, name="NVIDIA H200")
    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
        mock.patch.object(torch.cuda, "get_device_properties", lambda index: facts),
        mock.patch.object(peer_access, "why_no_cuda", lambda index: None),
        mock.patch.object(peer_access, "_why_no_access", lambda device, everyone: None),
    ):
        return peer_access.peer_access_of(group, torch.device("cuda", 0))


def variable(name, value):
    return lambda: mock.patch.dict(os.environ, {name: value})


def broken(owner, name):
    return lambda: mock.patch.object(owner, name, fails)


def damaged_file():
    return mock.patch.dict(os.environ, {machine.MACHINE_VARIABLE: __file__})


TIMEOUT, LIMIT = "OVERLAP_GEMM_TIMEOUT", "OVERLAP_GEMM_WORKSPACE_LIMIT"
RESERVE, MEMORY = "OVERLAP_GEMM_RESERVE_SMS", "OVERLAP_GEMM_SYMMETRIC"
PLANTS = {
    "a time-out that is none": (scatter, variable(TIMEOUT, "soon"), "ValueError: .*'soon'"),
    "a reserve that is none": (scatter, variable(RESERVE, "many"), "ValueError: .*'many'"),
    "a reserve of everything": (
        scatter,
        variable(RESERVE, "132"),
        "ValueError: .*=132 must be less than the 132 SMs",
    ),
    "a call's reserve": (scatter, lambda: configured(reserve_sms=132), "ValueError: no room"),
    "a device": (scatter, broken(peers, "executor_for"), "Planted"),
    "a damaged machine file": (scatter, damaged_file, "ValueError: .*test_one_rank_fails.py is damaged"),
    "no such memory": (scatter, variable(MEMORY, "shm"), "ValueError: .*'shm'"),
    "a limit that is none": (scatter, variable(LIMIT, "lots"), "ValueError: .*'lots'"),
    "a limit": (scatter, variable(LIMIT, "1"), "ValueError: .*the limit is 1 "),
    "allocating": (scatter, broken(symm_mem, "empty"), "Planted"),
    "mapping": (scatter, lambda: late(symm_mem, "rendezvous"), "Planted"),
    "clearing": (scatter, broken(SizeClass, "prepare"), "Planted"),
    "compiling": (scatter, broken(plans, "compiled_kernel"), "Planted"),
    "compiling a gather": (gathering, broken(gather, "compiled_gather"), "Planted"),
    "compiling a gate": (copying, broken(gather, "compiled_gate"), "Planted"),
    "looking at a GPU": (reaching, broken(machine, "load"), "Planted"),
    "a damaged machine file, for auto": (
        reaching,
        damaged_file,
        "ValueError: .*test_one_rank_fails.py is damaged",
    ),
}


@contextlib.contextmanager
def late(owner, name):
    """Fails behind what it communicates."""
    real = getattr(owner, name)

    def run(*given):
        real(*given)
        fails()

    with mock.patch.object(owner, name, run):
        yield


def memory_of_two_kinds(rank, size):
    kind = variable(MEMORY, "nvshmem" if rank else "torch")
    words = "rank 0 has torch, rank 1 has nvshmem"
    with made_up() as group, kind(), pytest.raises(DisagreementError, match=words):
        scatter(group)


def test_ranks_with_memory_of_different_kinds_are_told(ranks):
    ranks(2).run(memory_of_two_kinds)


def part_of_the_job(rank, size):
    parts = [dist.new_group([0]), dist.new_group([1, 2])]
    with made_up(), mock.patch.dict(os.environ, {"OVERLAP_GEMM_SYMMETRIC": "nvshmem"}):
        part = resolve(group_name(parts[rank > 0]))
        if rank:  # the other part of the job does not take part, and is not waited for
            with pytest.raises(
                ValueError, match="all 3 ranks of the job at once, but this group is ranks 1, 2"
            ):
                scatter(part)
    for group in parts:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def test_nvshmem_is_refused_to_a_part_of_the_job(ranks):
    """Its allocation waits for all ranks, without a bound."""
    ranks(3).run(part_of_the_job)


def no_kernel_on_one(rank, size):
    x, weight = torch.ones(16, 8, dtype=BF16), torch.ones(8, 8, dtype=BF16)
    for why in ("too old a GPU", None):
        with (
            mock.patch.object(Fused, "why_not", lambda self, problem: why if rank == 1 else None),  # noqa: B023
            mock.patch.object(Fused, "bind", lambda *_: lambda *_: x),
        ):
            if why is None:
                overlap_gemm.gemm_reduce_scatter(x, weight, backend="fused")
                continue
            with pytest.raises(DisagreementError, match="rank 1 failed in .*too old"):
                overlap_gemm.gemm_reduce_scatter(x, weight, backend="fused")


def test_a_backend_that_one_rank_cannot_run_is_told_to_all(ranks):
    ranks(3).run(no_kernel_on_one)


def attempts(rank, size):
    group = resolve(group_name(None))
    assert gather_from(group, "counting", lambda: rank) == list(range(size))
    mine = object()
    assert together(group, "making", lambda: mine) is mine  # what cannot travel stays
    with pytest.raises(ZeroDivisionError):  # all fail alike: what each raised
        together(group, "dividing", lambda: 1 / 0)
    with pytest.raises(DisagreementError, match=f"dividing failed on {size} of {size} ranks"):
        together(group, "dividing", lambda: int(f"{rank} of them"))


def test_what_all_do_alike_is_each_ones_own(ranks):
    ranks(3).run(attempts)


def one_fails(rank, size, plant):
    call, planted, words = PLANTS[plant]
    for _ in range(2):  # again, as nothing is kept of a failure
        with made_up() as group:
            began = time.monotonic()
            with (
                planted() if rank == 1 else contextlib.nullcontext(),
                pytest.raises(DisagreementError) as caught,
            ):
                call(group)
            assert time.monotonic() - began < PROMPT
            message = str(caught.value)
            assert "1 of 3 ranks (rank 1: " in message, message
            assert re.search(f"rank 1: {words}", message), message
            messages = [None] * size
            dist.all_gather_object(messages, message)
            assert len(set(messages)) == 1
            machine.machine_for.cache_clear()
            assert call(group) is not None  # the ranks are in step, and go on


@pytest.mark.parametrize("plant", PLANTS)
def test_every_rank_is_told_of_the_one_that_fails(ranks, plant):
    ranks(3).run(one_fails, plant)
