"""`Emulator` as a library: calls, ranks, memory, errors."""

import sys
from pathlib import Path

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass.cute.runtime import from_dlpack
from cutlass.utils import HardwareInfo

from cute_emulator import Emulator, EmulatorError, FindingsError, poison_
from cute_emulator.errors import MemoryFault

from .kernels_simple import chain, scale, send_left, store_at

N = 300
STREAM = cuda.CUstream(0)


def dynamic(tensor):
    return from_dlpack(tensor).mark_layout_dynamic()


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_call_has_run_when_it_returns(emulate, arch):
    emu = emulate(arch)
    src, dst = torch.randn(N), poison_(torch.empty(N))
    compiled = cute.compile(scale, dynamic(src), dynamic(dst), 2.5, N, STREAM)
    compiled(dynamic(src), dynamic(dst), 2.5, N, STREAM)
    assert torch.equal(dst, src * 2.5)
    assert emu.report.instructions > 0 and emu.report.ok


def test_launches_of_one_call_run_in_order(emulate):
    emulate()
    src, mid, dst = torch.randn(N), poison_(torch.empty(N)), poison_(torch.empty(N))
    chain(*map(from_dlpack, (src, mid, dst)), N, STREAM)
    assert torch.equal(dst, src * 3 + 1)


def test_views_of_one_tensor_can_be_arguments_together(emulate):
    emulate()
    both = torch.randn(500)
    want = both[:100] * 2
    scale(dynamic(both[:300]), dynamic(both[200:]), 2.0, 100, STREAM)
    assert torch.equal(both[200:300], want)


def test_a_function_can_be_called_in_a_later_emulator():
    src, dst = torch.randn(N), poison_(torch.empty(N))
    with Emulator():
        compiled = cute.compile(scale, dynamic(src), dynamic(dst), 2.0, N, STREAM)
        compiled(dynamic(src), dynamic(dst), 2.0, N, STREAM)
    with Emulator(mode="lazy", seed=3) as second:
        compiled(dynamic(src), dynamic(dst), 5.0, N, STREAM)
        assert second.report.instructions > 0
    assert torch.equal(dst, src * 5)


def test_a_function_compiled_outside_is_refused():
    src, dst = torch.randn(N), torch.empty(N)
    compiled = cute.compile(scale, dynamic(src), dynamic(dst), 2.0, N, STREAM)
    with Emulator(), pytest.raises(EmulatorError, match=r"compiled.*outside.*with Emulator"):
        compiled(dynamic(src), dynamic(dst), 2.0, N, STREAM)


def test_access_beyond_an_argument_is_reported(emulate):
    emulate()
    src, dst = torch.randn(N), poison_(torch.empty(N))
    with pytest.raises(MemoryFault, match=r"out of bounds.*argument of rank 0"):
        scale(dynamic(src), dynamic(dst[:100]), 2.0, N, STREAM)


def test_memory_reached_by_address_must_be_registered(emulate):
    emu = emulate()
    hidden = torch.zeros(4, dtype=torch.int32)
    table = torch.tensor([hidden.data_ptr()])
    compiled = cute.compile(store_at, from_dlpack(table), cutlass.Int32(7), STREAM)
    with pytest.raises(MemoryFault, match=f"{hidden.data_ptr():#x}"):
        compiled(from_dlpack(table), 7, STREAM)
    emu.register(hidden, name="hidden")
    compiled(from_dlpack(table), 7, STREAM)
    assert hidden.tolist() == [7, 0, 0, 0]


def test_memory_that_a_function_was_compiled_with_is_no_argument_of_the_next_call(emulate):
    emulate()
    example, table = torch.randn(N), torch.zeros(1, dtype=torch.int64)
    table[0] = example.data_ptr()
    store = cute.compile(store_at, from_dlpack(table), cutlass.Int32(7), STREAM)
    cute.compile(scale, dynamic(example), dynamic(example), 2.0, N, STREAM)
    with pytest.raises(MemoryFault, match=f"{example.data_ptr():#x}"):
        store(from_dlpack(table), 7, STREAM)


def test_memory_of_an_argument_is_out_of_reach_after_the_call(emulate):
    emu = emulate()
    src, dst = torch.randn(N), poison_(torch.empty(N))
    scale(dynamic(src), dynamic(dst), 2.0, N, STREAM)
    assert emu.machine.memory.lookup(dst.data_ptr()) is None
    with pytest.raises(MemoryFault, match="argument of an earlier call of rank 0"):
        scale(dynamic(src), dynamic(dst[:100]), 2.0, N, STREAM)
    kept = emu.empty((3,), torch.float32)
    assert emu.machine.memory.lookup(kept.data_ptr()) is not None
    assert kept.isnan().all()


def test_several_ranks_are_queued_and_run_together(emulate):
    """Each rank waits for a flag that only its right neighbour's kernel sets."""
    ranks = 3
    emu = emulate(ranks=ranks)
    inbox = emu.symmetric((4,), torch.int32)
    flags = emu.symmetric((1,), torch.int32)
    for flag in flags.tensors:
        flag.zero_()
    outs = [poison_(torch.empty(4, dtype=torch.int32)) for _ in range(ranks)]
    tables = [
        torch.tensor([inbox.addresses[(r - 1) % ranks], flags.addresses[(r - 1) % ranks]])
        for r in range(ranks)
    ]

    def arguments(r):
        return *map(from_dlpack, (tables[r], inbox[r], flags[r], outs[r])), cutlass.Int32(100 + r), STREAM

    compiled = cute.compile(send_left, *arguments(0))
    for r in range(ranks):
        with emu.rank(r):
            compiled(*arguments(r))
    assert all((out == -1).all() for out in outs)
    emu.run()
    assert [out.tolist() for out in outs] == [[100 + (r + 1) % ranks] * 4 for r in range(ranks)]


def test_launches_of_one_rank_and_stream_run_in_order(emulate):
    emu = emulate(ranks=2)
    src, a, b = torch.randn(N), poison_(torch.empty(N)), poison_(torch.empty(N))
    compiled = cute.compile(scale, *map(dynamic, (src, a)), 2.0, N, STREAM)
    with emu.rank(1):
        compiled(dynamic(src), dynamic(a), 2.0, N, STREAM)
        compiled(dynamic(a), dynamic(b), 3.0, N, STREAM)
    emu.run()
    assert torch.equal(b, src * 2 * 3)


def test_a_call_must_say_its_rank(emulate):
    emu = emulate(ranks=2)
    src, dst = torch.randn(N), torch.empty(N)
    with pytest.raises(EmulatorError, match="the emulator has 2 ranks: call inside"):
        scale(dynamic(src), dynamic(dst), 2.0, N, STREAM)
    with pytest.raises(ValueError, match=r"rank=2 must be in 0..1"), emu.rank(2):
        pass


def test_forgotten_launches_are_an_error():
    src, dst = torch.randn(N), torch.empty(N)
    refused = pytest.raises(EmulatorError, match="1 queued launches were never run")
    with refused, Emulator(ranks=2) as emu, emu.rank(0):
        scale(dynamic(src), dynamic(dst), 2.0, N, STREAM)


def test_one_emulator_at_a_time(emulate):
    emulate()
    with pytest.raises(EmulatorError, match="open already"), Emulator():
        pass


def test_findings_are_raised_or_collected(emulate, monkeypatch):
    for collect in (False, True):
        emu = Emulator(collect=collect)
        monkeypatch.setattr(emu.machine, "run", lambda emu=emu: emu.report.add("race", "what happened", 12))
        if collect:
            assert emu.run().findings[0].line == 12
        else:
            with pytest.raises(FindingsError, match=r"(?s)1 finding.*\[race\] what happened") as caught:
                emu.run()
            assert caught.value.report is emu.report


def test_symmetric_memory_is_poisoned_apart_and_alike(emulate):
    emu = emulate(ranks=4)
    first, second = emu.symmetric((3, 5), torch.bfloat16), emu.symmetric((7,), torch.int32)
    for symmetric in (first, second):
        offsets = {a - b for a, b in zip(symmetric.addresses, first.addresses, strict=True)}
        assert len(offsets) == 1
        assert symmetric.multicast - first.multicast == offsets.pop()
    assert all(t.isnan().all() and t.shape == (3, 5) for t in first.tensors)
    assert second.addresses[0] % 512 == 0
    first[2].fill_(1.0)
    assert first[1].isnan().all()
    allocation = emu.machine.memory.lookup(second.addresses[3])
    assert (allocation.rank, allocation.kind, allocation.nbytes) == (3, "symmetric", 28)
    assert emu.machine.memory.multicast_targets(second.multicast + 4) == [a + 4 for a in second.addresses]


def test_a_full_heap_says_so(emulate):
    emu = emulate(ranks=2, heap_bytes=1 << 16)
    with pytest.raises(EmulatorError, match="heap of 65536 bytes per rank is full: 80000 bytes requested"):
        emu.symmetric((20_000,), torch.float32)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_unused_parts_of_heaps_are_not_reserved(emulate):
    """Checks the kernel's flags; otherwise a process with many heaps, of 1 GiB a rank, cannot fork."""
    address = emulate(ranks=2).symmetric((16,), torch.float32).addresses[0]
    flags = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first:
            begin, end = (int(bound, 16) for bound in first.split("-"))
        elif first == "VmFlags:" and begin <= address < end:
            flags = line.split()
    assert flags is not None and "nr" in flags and "ac" not in flags


def test_host_code_sees_the_device_it_was_told_of(emulate):
    emulate("sm_90a", num_sms=12)
    assert HardwareInfo().get_max_active_clusters(2) == 6
    assert HardwareInfo().get_device_multiprocessor_count() == 12


def test_unknown_targets_and_modes_are_refused():
    with pytest.raises(ValueError, match="arch='sm_80'"):
        Emulator("sm_80")
    with pytest.raises(ValueError, match="mode"):
        Emulator(mode="sometimes")


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_a_tensor_without_elements_is_registered(shape):
    with Emulator("sm_90a", ranks=2) as emulator:
        assert emulator.empty(shape, torch.float32, 1).shape == shape
