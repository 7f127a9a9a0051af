"""The fused ops to peers beyond reach: on sm_90 a relay kernel beside the GEMM makes the puts.

Most of it by reduce-scatter; every op at the end of what is right, and in test_sequences.py.

Every own tile of a rank waits for tiles that a peer's relay puts, so a right result says that relay and GEMM
ran at the same time.
"""

from contextlib import contextmanager

import pytest
import torch

from cute_emulator import Emulator, Schedule
from cute_emulator.host.network import Network
from overlap_gemm.device.failure import Role
from overlap_gemm.exchange.geometry import EPOCH_OFFSET, RELAY_EPOCH_OFFSET
from overlap_gemm.integrations.cute_emulator import EmulatorExecutor
from overlap_gemm.runtime.failures import CommTimeoutError
from overlap_gemm.runtime.memory import workspace
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.testing.cases import Case
from overlap_gemm.testing.emulated import judge, run_launches
from overlap_gemm.tuning.settings import configured
from tests.support.emulated.op_runs import SMALL
from tests.support.emulated.put_cases import OPS, case_of, one_row, ragged

PINGPONG = {"mma": "pingpong", "tile": (64, 128), "cluster": (1, 1)}
KINDS = [
    PINGPONG,
    {"mma": "cooperative", "tile": (128, 128)},
    {"mma": "pingpong", "tile": (64, 128), "cluster": (2, 1), "slot_dtype": "f32"},
]
SHAPES = {
    "even": (256, 128, 128),
    "ragged": (200, 136, 72),
    "fewer-rows-than-ranks": (2, 64, 64),
}


def case(m, n, k):
    return Case("gemm_reduce_scatter", m, n, k, torch.bfloat16)


@contextmanager
def far_apart(ranks, mode="random", seed=0, fields=PINGPONG, arch="sm_90a", **options):
    """Ranks of which none reaches another by loads and stores."""
    with (
        configured(**fields),
        Emulator(arch, ranks, mode, seed, network=True, **options) as emulator,
        VirtualWorld(ranks, emulator=emulator, without_p2p=True) as world,
    ):
        yield world


def right(sizes, world, launches, slot=torch.bfloat16):
    verdicts = [judge(sizes, given, outs, slot) for given, outs in run_launches(sizes, world, launches)]
    assert len(verdicts) == launches
    assert all(verdict.holds for verdict in verdicts), verdicts


def held():
    return [space.memory.local[: space.size.zeroed].view(torch.int64) for space in workspace.workspaces()]


EVERY = [(shape, ranks) for shape in SHAPES for ranks in (2, 3, 4)]


@pytest.mark.parametrize(
    ("shape", "ranks"),
    [
        *EVERY[4::4],
        *(pytest.param(*each, marks=pytest.mark.slow) for each in EVERY if each not in EVERY[4::4]),
    ],
)
def test_every_shape_on_every_world(shape, ranks):
    with far_apart(ranks) as world:
        right(case(*SHAPES[shape]), world, 3)


def test_more_tiles_than_the_relay_has_warps():
    with far_apart(2) as world:
        right(case(512, 384, 64), world, 2)


@pytest.mark.parametrize(
    "fields",
    [pytest.param(KINDS[1], marks=pytest.mark.slow), KINDS[2]],
    ids=lambda fields: fields["mma"],
)
def test_every_kind_of_kernel(fields):
    slot = {"f32": torch.float32}.get(fields.get("slot_dtype"), torch.bfloat16)
    with far_apart(3, fields=fields) as world:
        right(case(*SHAPES["ragged"]), world, 3, slot)


@pytest.mark.parametrize(
    ("mode", "seed"),
    [
        ("random", 2),
        ("lazy", 1),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("immediate", 1), ("immediate", 2), ("random", 1), ("lazy", 2))
        ),
    ],
)
def test_whenever_asynchronous_operations_complete(mode, seed):
    schedule = Schedule(order="random", lanes=seed == 2)
    with far_apart(3, mode, seed, schedule=schedule, num_sms=3) as world:
        right(case(*SHAPES["ragged"]), world, 4)


@pytest.mark.parametrize("slow_rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_many_launches_with_a_rank_that_lags_behind(slow_rank):
    lagging = Schedule(starved=lambda rank, cta, warp: rank == slow_rank)
    with far_apart(2, "immediate", schedule=lagging) as world:
        right(case(128, 128, 64), world, 20)
        assert [[words[at // 8].item() for at in (EPOCH_OFFSET, RELAY_EPOCH_OFFSET)] for words in held()] == [
            [20, 20]
        ] * 2


def test_calls_of_different_shape_take_turns_on_one_workspace():
    with far_apart(3) as world:
        for shape in [*SHAPES.values()] * 2:
            right(case(*shape), world, 1)
        assert len(held()) == 3, "one workspace a rank"


@pytest.mark.parametrize(
    "op",
    ["reduce-scatter", *(pytest.param(op, marks=pytest.mark.slow) for op in ("one-shot", "output-gather"))],
)
def test_a_tile_may_be_put_as_late_as_behind_the_next_call_staging(op, monkeypatch):
    """The sender's own call does not wait for its puts: call e + 1 stages while call e's tiles are unread."""
    put, kept = Network._put_signal, {}

    def late(self, group, remote, local, nbytes, signal, epoch, *rest):
        if group.warp.grid.launch.rank == 0 and epoch % 2 == 1:
            kept[signal] = (remote, local, nbytes, signal, epoch, *rest)
            return
        if group.warp.grid.launch.rank == 0:
            put(self, group, *kept.pop(signal))
        put(self, group, remote, local, nbytes, signal, epoch, *rest)

    monkeypatch.setattr(Network, "_put_signal", late)
    with far_apart(2, "immediate", fields={**PINGPONG, "algorithm": OPS[op][1]}) as world:
        right(case_of(op, 256, 128, 64), world, 4)
    assert not kept


@pytest.mark.parametrize(
    ("op", "arch", "ranks", "mode"),
    [
        ("two-shot", "sm_90a", 2, "random"),
        *(
            pytest.param(op, arch, ranks, mode, marks=pytest.mark.slow)
            for op in OPS
            for arch in ("sm_90a", "sm_100a")
            for ranks, mode in ((2, "immediate"), (3, "random"), (4, "lazy"))
        ),
    ],
)
def test_every_op(op, arch, ranks, mode):
    with far_apart(ranks, mode, fields={**SMALL[arch], "algorithm": OPS[op][1]}, arch=arch) as world:
        right(ragged(op, ranks), world, 2)
        right(one_row(op, ranks), world, 2)
        assert len(held()) == ranks, "one workspace a rank"


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("op", OPS)
def test_neighbours_are_stored_to_and_the_others_put_to(op, arch, monkeypatch):
    allocate = VirtualWorld._allocate

    def with_neighbours(world, nbytes):
        views = allocate(world, nbytes)
        for rank, view in enumerate(views):
            near = [view.local.data_ptr() for view in views]
            reached = [near[p] if p == rank or (rank + p) % 2 else -1 - p for p in range(len(views))]
            view.bases = torch.tensor(reached)
            view.bases = world._emulator.register(view.bases, rank)
        return views

    monkeypatch.setattr(VirtualWorld, "_allocate", with_neighbours)
    fields = {**SMALL[arch], "algorithm": OPS[op][1]}
    with far_apart(4, "random", fields=fields, arch=arch) as world:
        right(ragged(op, 4), world, 3)
        right(one_row(op, 4), world, 2)
        right(ragged(op, 4), world, 1)


# --- what is launched ---


def launched(world, sizes=SHAPES["even"]):
    """What one call of the op submits, per rank: (GEMM, relay)."""
    machine, launches = world.executor(0).emulator.machine, []
    with pytest.MonkeyPatch.context() as patch:
        submit = machine.submit
        patch.setattr(machine, "submit", lambda launch: (launches.append(launch), submit(launch)))
        right(case(*sizes), world, 1)
    return list(zip(launches[::2], launches[1::2], strict=True))


@pytest.mark.parametrize("fields", [KINDS[0], KINDS[2]], ids=["c1x1", "c2x1"])
def test_the_gemm_leaves_the_relay_an_sm_and_stays_free_of_nvshmem(fields):
    with far_apart(2, fields={**fields, "slot_dtype": "bf16"}, num_sms=5) as world:
        for gemm, relay in launched(world, (512, 256, 64)):
            assert gemm.rank == relay.rank and gemm.stream != relay.stream
            assert (gemm.grid[0] * gemm.grid[1], relay.grid[0]) == (4 if fields == KINDS[0] else 2, 1)
            assert "nvshmem" not in gemm.ptx and "setmaxnreg" in gemm.ptx
            assert "nvshmem" in relay.ptx and "wgmma" not in relay.ptx


def test_a_signal_by_itself_is_behind_a_fence():
    """NVSHMEM's orders nothing: what the calling thread has observed is released by the fence."""
    with far_apart(2, num_sms=5) as world:
        text = launched(world, (512, 256, 64))[0][1].ptx.partition(".entry")[2]
    signals = text.split("nvshmemx_signal_op;")[:-1]
    assert signals
    for before in signals:
        assert "fence.acq_rel.sys;" in before[before.rindex("$L__") :], before[-2000:]


def test_a_device_without_room_for_both_is_refused():
    with far_apart(2, num_sms=1) as world, pytest.raises(ValueError, match="no room alongside the relay"):
        right(case(*SHAPES["even"]), world, 1)


@pytest.mark.parametrize("first", ["relay", pytest.param("gemm", marks=pytest.mark.slow)])
def test_one_behind_the_other_would_wait_for_ever(monkeypatch, first):
    """The control that they run at the same time: on one stream, the second never starts."""
    with far_apart(2, "immediate") as world:
        monkeypatch.setattr(EmulatorExecutor, "fork", EmulatorExecutor.active)
        if first == "relay":
            machine, kept = world.executor(0).emulator.machine, []
            submit = machine.submit

            def swap(launch):
                kept.append(launch)
                while len(kept) > 1:
                    submit(kept.pop())

            monkeypatch.setattr(machine, "submit", swap)
        with pytest.raises(CommTimeoutError) as caught:
            right(case(*SHAPES["even"]), world, 1)
    waited = (
        (Role.RECEIVE_PARTIAL, Role.CALL_ENTERED)
        if first == "gemm"
        else (Role.RELAY_STAGED, Role.CALL_ENTERED)
    )
    assert caught.value.failure.role in waited


# --- faults ---


@pytest.mark.parametrize(("lost", "source", "target"), [(0, 0, 2), (1, 2, 1)], ids=["first", "second"])
def test_a_lost_put_is_reported(monkeypatch, source, target, lost):
    sizes, put, made = case(384, 128, 64), Network._put_signal, []

    def losing(self, group, remote, local, nbytes, signal, value, operation, pe, *rest):
        if (group.warp.grid.launch.rank, pe) == (source, target):
            made.append(remote)
            if len(made) > 2 * lost:  # two tiles a call
                return
        put(self, group, remote, local, nbytes, signal, value, operation, pe, *rest)

    monkeypatch.setattr(Network, "_put_signal", losing)
    with far_apart(3, "immediate") as world, pytest.raises(CommTimeoutError) as caught:
        right(sizes, world, 2)
    failure = caught.value.failure
    assert (failure.rank, failure.source, failure.role) == (target, source, Role.RECEIVE_PARTIAL)
    assert (failure.expected, failure.seen) == (lost + 1, lost)
    assert failure.flag == failure.tile * 3 + source


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_the_last_put_of_a_call_that_is_lost_is_reported(op, monkeypatch):
    """Of a two-shot all-reduce a sum, of an all-gather GEMM a piece of a shard."""
    put, made, lost = Network._put_signal, [], []

    def losing(self, group, remote, local, nbytes, signal, value, operation, pe, *rest):
        if (group.warp.grid.launch.rank, pe) == (0, 2):
            made.append(signal)
            if len(made) == 2 * len(first) > 0:  # the second call's last
                lost.append(signal)
                return
        put(self, group, remote, local, nbytes, signal, value, operation, pe, *rest)

    monkeypatch.setattr(Network, "_put_signal", losing)
    with far_apart(3, "immediate", fields={**PINGPONG, "algorithm": OPS[op][1]}) as world:
        first = []
        right(ragged(op, 3), world, 1)
        first += made
        with pytest.raises(CommTimeoutError) as caught:
            right(ragged(op, 3), world, 1)
    failure = caught.value.failure
    assert len(lost) == 1 and (failure.rank, failure.source) == (2, 0)
    assert (failure.expected, failure.seen) == (2, 1)
    assert failure.role in (Role.RECEIVE_PARTIAL, Role.RECEIVE_RESULT, Role.LOAD_GATE)


def test_a_lost_entry_signal_is_reported(monkeypatch):
    """Rank 1's partials arrive, but nobody learns that it has entered the call."""
    signal = Network._atomic

    def losing(self, group, *arguments):
        if group.warp.grid.launch.rank != 1:
            signal(self, group, *arguments)

    monkeypatch.setattr(Network, "_atomic", losing)
    with far_apart(3, "immediate") as world, pytest.raises(CommTimeoutError) as caught:
        right(case(2, 64, 64), world, 1)
    failure = caught.value.failure
    assert (failure.source, failure.role) == (1, Role.CALL_ENTERED) and failure.rank in (0, 2)


def test_a_dead_rank_is_named(monkeypatch):
    with far_apart(3, "immediate") as world:
        emulator = world.executor(0).emulator
        run = emulator.run
        monkeypatch.setattr(emulator, "run", lambda: (emulator.faults.kill(1), run())[1])
        with pytest.raises(CommTimeoutError) as caught:
            right(case(*SHAPES["ragged"]), world, 1)
    assert caught.value.failure.source == 1
