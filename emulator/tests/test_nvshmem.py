"""Kernels linked with NVSHMEM's device library, on peers within and beyond the reach of loads and stores."""

import struct

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import pytest
import torch
from cutlass.cute.runtime import from_dlpack

from cute_emulator import Emulator, EmulatorError, poison_
from cute_emulator.host import nvshmem

from .kernels_nvshmem import WAYS, exchange

RANKS, N = 3, 50
STREAM = cuda.CUstream(0)
COMMON = ("put_nbi_block", "put_signal_nbi_warp")  # each takes 7 s to link
_compiled: dict = {}


class Exchange:
    """One run of the kernel on all ranks."""

    def __init__(self, emu, ways, quiet=True, scribble=False):
        self.src = emu.symmetric((len(ways), N), torch.int32)
        self.dst = emu.symmetric((len(ways), N), torch.int32)
        self.signals = emu.symmetric((len(ways), 1), torch.uint64)
        self.outs = [poison_(torch.empty(len(ways), N, dtype=torch.int32)) for _ in range(RANKS)]
        self.who = [poison_(torch.empty(2, dtype=torch.int32)) for _ in range(RANKS)]
        for rank in range(RANKS):
            self.src[rank].copy_(torch.arange(len(ways) * N).view(len(ways), N) + 1000 * rank)
            self.signals[rank].zero_()
        self.sent = [self.src[rank].clone() for rank in range(RANKS)]
        key = ways, quiet, scribble
        if key not in _compiled:
            _compiled[key] = cute.compile(exchange, *self.arguments(0), *key, STREAM)
        for rank in range(RANKS):
            with emu.rank(rank):
                _compiled[key](*self.arguments(rank), STREAM)
        emu.run()

    def arguments(self, rank):
        columns = (self.src[rank], self.dst[rank], self.signals[rank], self.outs[rank])
        return [*(from_dlpack(t.t()) for t in columns), from_dlpack(self.who[rank])]

    def wrong(self):
        """(rank, slot) of everything that did not arrive before its signal."""
        return [
            (rank, slot)
            for rank in range(RANKS)
            for slot in range(len(self.src[0]))
            if not torch.equal(self.outs[rank][slot], self.sent[(rank - 1) % RANKS][slot])
        ]


@pytest.mark.parametrize("network", [False, True], ids=["p2p", "network"])
@pytest.mark.parametrize("mode", ["immediate", "random", "lazy"])
def test_puts_and_signals_arrive(network, mode):
    with Emulator(ranks=RANKS, mode=mode, seed=1, network=network) as emu:
        run = Exchange(emu, COMMON)
    assert run.wrong() == []
    assert [who.tolist() for who in run.who] == [[rank, RANKS] for rank in range(RANKS)]
    assert all((signal == 1).all() for signal in run.signals.tensors)


def test_a_missing_quiet_is_a_race_and_in_lazy_mode_wrong_data():
    """put_nbi, then a signal of its own, without quiet: the bytes need not be there when the signal is."""
    ways = ("put_nbi_block",)
    with Emulator(ranks=RANKS, mode="immediate", collect=True) as emu:
        assert Exchange(emu, ways, quiet=False).wrong() == []  # NVSHMEM stores to peers at once
    assert {finding.kind for finding in emu.report.findings} == {"race"}
    for network in (False, True):
        wrong = []
        for seed in range(4):
            with Emulator(ranks=RANKS, mode="lazy", seed=seed, network=network, collect=True) as emu:
                wrong += Exchange(emu, ways, quiet=False).wrong()
        assert wrong, f"{network=}"


@pytest.mark.slow
@pytest.mark.parametrize("ways", [WAYS[i : i + 3] for i in range(0, len(WAYS), 3)], ids="-".join)
@pytest.mark.parametrize("mode", ["immediate", "lazy"])
def test_every_way_to_reach_a_peer(ways, mode):
    with Emulator(ranks=RANKS, mode=mode) as emu:
        assert Exchange(emu, ways).wrong() == []


@pytest.mark.slow
@pytest.mark.parametrize("ways", [WAYS[i : i + 3] for i in range(0, 12, 3)], ids="-".join)
@pytest.mark.parametrize("mode", ["immediate", "lazy"])
def test_every_way_over_the_network(ways, mode):
    with Emulator(ranks=RANKS, mode=mode, seed=3, network=True) as emu:
        assert Exchange(emu, ways).wrong() == []


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [True, False], ids=["blocking", "nbi"])
def test_when_a_put_over_the_network_has_read_its_source(blocks):
    """A blocking put when it returns; put_nbi as late as quiet, so that scribbling on the source shows."""
    ways = ("put", "put_warp", "put_signal") if blocks else ("put_nbi", "put_nbi_warp", "put_signal_nbi")
    wrong = []
    for seed in range(4):
        with Emulator(ranks=RANKS, mode="lazy", seed=seed, network=True, collect=True) as emu:
            wrong += Exchange(emu, ways, scribble=True).wrong()
    assert (wrong == []) == blocks


def test_the_device_state_holds_what_the_device_code_reads():
    state = nvshmem.device_state(2, 4, 0x7000, 0x1000, 0x9000, reachable=True)
    assert len(state) == 848
    assert struct.unpack_from("<5i", state) == (1, 2, 4, 2, 4)
    assert struct.unpack_from("<i", state, 32) == (1,)
    assert struct.unpack_from("<QQQ", state, 40) == (0x7000, 0x1000, 0x9000)
    assert struct.unpack_from("<Q", state, 832) == (0x9000 + 8 * 4,)
    assert sum(state[64:832]) + sum(state[840:]) == 0
    assert struct.unpack_from("<i", nvshmem.device_state(0, 1, 0, 0, 0, reachable=False), 32) == (8,)


def test_the_bitcode_is_the_newest_not_above_the_target(tmp_path):
    for number in (75, 90, 100):
        (tmp_path / f"libnvshmem_device_sm_{number}.bc").touch()
    (tmp_path / "libnvshmem_device.bc").touch()
    chosen = {a: nvshmem.bitcode_for(a, tmp_path).name for a in ("sm_90a", "sm_100a", "sm_103a", "sm_89")}
    assert chosen == {
        "sm_90a": "libnvshmem_device_sm_90.bc",
        "sm_100a": "libnvshmem_device_sm_100.bc",
        "sm_103a": "libnvshmem_device_sm_100.bc",
        "sm_89": "libnvshmem_device_sm_75.bc",
    }
    with pytest.raises(EmulatorError, match=r"no NVSHMEM device library for sm_70.*\[75, 90, 100\]"):
        nvshmem.bitcode_for("sm_70", tmp_path)
