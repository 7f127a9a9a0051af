"""All-gather GEMM through the public op on virtual ranks: compiled PTX and copy engines, in the emulator."""

import random
from dataclasses import replace
from itertools import product

import pytest
import torch

import overlap_gemm
from cute_emulator import EmulatorError
from cute_emulator.machine.inject import StoreFault
from overlap_gemm.backends.fused import gather_plans as gather
from overlap_gemm.device.failure import Role
from overlap_gemm.exchange.geometry import (
    CONTROL_BYTES,
    MAX_WORLD,
    READ_OFFSET,
    SENDERS_OFFSET,
    SHARD_PIECES,
    slots_offset,
)
from overlap_gemm.gather import all_gather
from overlap_gemm.runtime.failures import CommTimeoutError
from overlap_gemm.runtime.memory.workspace import workspaces
from overlap_gemm.spec import ALL_GATHER_GEMM
from overlap_gemm.spec.sharding import Shards
from overlap_gemm.tuning.machine import machine_for
from tests.support.chosen import in_turn
from tests.support.emulated.gather_world import KINDS, World

WAYS = ("copy_engine", "peer_bulk")
both = pytest.mark.parametrize("arch", KINDS)
transports = pytest.mark.parametrize("transport", WAYS)


@pytest.mark.parametrize(("ranks", "transport", "arch"), in_turn([4], WAYS, KINDS))
def test_every_world(arch, ranks, transport):
    with World(arch, ranks, transport=transport) as world:
        world.call(200, 136 * ranks, 72)
        world.run()


OTHERS = {f"{a}-{kind['mma']}": (a, kind) for a, kinds in KINDS.items() for kind in kinds[1:]}


@pytest.mark.parametrize(("kind", "transport"), in_turn(OTHERS, WAYS))
def test_every_kernel(kind, transport):
    arch, fields = OTHERS[kind]
    with World(arch, 2, transport=transport, fields=fields, mode="random") as world:
        world.call(520, 272, 100)
        world.run()


SHAPES = {
    "fewer rows than ranks": (2, 264, 64),
    "K no multiple of 8": (130, 64, 61),
    "ranks without columns": (130, 1, 64),
}


@pytest.mark.parametrize(("shape", "transport", "arch"), in_turn(SHAPES, WAYS, KINDS))
def test_every_shape(arch, shape, transport):
    """Calls twice; with copy engines, the second call has another type and no bias."""
    other = {"bias": False, "dtype": torch.float16} if transport == "copy_engine" else {}
    with World(arch, 3, transport=transport) as world:
        world.call(*SHAPES[shape])
        world.call(*SHAPES[shape], **other)
        world.run()


QUICK_MODES = [(("random", 1), "copy_engine", "sm_100a"), (("lazy", 3), "peer_bulk", "sm_90a")]


@pytest.mark.parametrize(
    ("mode", "seed", "transport", "arch"),
    [
        pytest.param(*mode, way, arch, marks=[] if (mode, way, arch) in QUICK_MODES else pytest.mark.slow)
        for mode, way, arch in product([("random", 1), ("lazy", 3)], WAYS, KINDS)
    ],
)
def test_whenever_operations_complete(arch, mode, seed, transport):
    """Calls queued one after the other, one rank after the others."""
    with World(arch, 3, transport=transport, mode=mode, seed=seed, starved=seed % 3) as world:
        for _ in range(3):
            world.call(190, 64, 64)
        world.several(190, [64, 13], 64, keep=True)
        world.run()


@pytest.mark.parametrize(("keep", "transport", "arch"), in_turn([(True, "peer_bulk")], KINDS))
def test_weights_share_a_gather(arch, keep, transport):
    with World(arch, 2, transport=transport) as world:
        world.several(150, [64, 24, 8], 64, keep)
        world.several(150, [16], 64, keep)
        world.several(150, [0, 16], 60, keep)
        world.run()


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
def test_what_is_kept_is_read_before_the_next_shards_come(arch):
    """One CTA, so each of its warps keeps several units, and each of its lanes reads at the end."""
    with World(arch, 2, transport="peer_bulk", sms=1) as world:
        world.several(384, [128], 64, keep=True)
        world.call(384, 256, 64)
        world.run()


def random_calls(world, seed, calls):
    """Any op that there is a kernel for, any shape: each likely to follow each other."""
    draw, ranks = random.Random(seed), world.ranks
    few, many = [1, 2, ranks - 1, ranks], [64, 130, 256 * ranks]
    for _ in range(calls):
        m, n = draw.choice(draw.choice([few, many])), draw.choice([8, 64, 136])
        if draw.random() < 0.3:
            world.several(m, [n, draw.choice([0, 8, 13])], 64, draw.random() < 0.5)
        else:
            world.call(m, n, 64, draw.choice(["all_gather_gemm", "gemm_reduce_scatter"]))


def run_random_calls(arch, seed, calls=6):
    draw = random.Random(seed)
    ranks = draw.choice([2, 3, 3, 4])
    how = {
        "transport": draw.choice(["copy_engine", "peer_bulk"]),
        "mode": draw.choice(["immediate", "random", "lazy"]),
        "starved": draw.randrange(ranks),
        "sms": draw.choice([2, 3]),
    }
    with World(arch, ranks, seed=seed, **how) as world:
        random_calls(world, seed, calls)
        world.run()


@pytest.mark.parametrize(("seed", "arch"), in_turn(range(2), KINDS))
def test_random_sequences_with_other_ops(arch, seed):
    run_random_calls(arch, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
@both
def test_more_random_sequences(arch, seed):
    run_random_calls(arch, seed, calls=12)


@pytest.mark.slow
@transports
@both
def test_fifty_calls(arch, transport):
    with World(arch, 4, transport=transport, mode="random", starved=2) as world:
        for i in range(50):
            world.call(130 + i, 64, 64)
        world.run()


def test_small_shards_are_pushed_and_large_ones_copied(monkeypatch):
    other = replace(machine_for("sm_90a"), copy_bytes=1 << 20)
    monkeypatch.setattr(gather, "constants", lambda arch: other)
    with World("sm_90a", 2, transport=None) as world:
        submitted = []
        submit = world.emulator.machine.submit
        world.emulator.machine.submit = lambda launch: (submitted.append(launch), submit(launch))
        world.call(64, 16, 64)
        assert [launch.engine for launch in submitted].count(True) == 0
        world.call(256, 16, 4096)
        assert [launch.engine for launch in submitted].count(True) == 4
        world.run()


def test_its_workspace_is_its_own():
    with World("sm_90a", 2, transport="copy_engine") as world:
        world.call(64, 16, 64)
        world.call(64, 16, 64, "gemm_reduce_scatter")
        world.run()
        kinds = [workspace.size.kind for workspace in workspaces(world.world.names[0])]
        assert sorted(kinds) == ["gather", "slots"]


# --- faults ---


FLAGS = {"begin": CONTROL_BYTES, "end": slots_offset(SHARD_PIECES * MAX_WORLD)}
READ_WORDS = {"begin": READ_OFFSET, "end": SENDERS_OFFSET}


@pytest.mark.parametrize(("transport", "arch"), in_turn(WAYS, KINDS))
def test_a_lost_flag_is_named(arch, transport):
    with World(arch, 3, transport=transport) as world:
        world.call(192, 64, 64)
        world.emulator.faults.add(StoreFault("drop", 2, 1, **FLAGS))
        with pytest.raises(CommTimeoutError) as caught:
            world.run()
    failure = caught.value.failure
    assert (failure.rank, failure.source, failure.op) == (1, 2, ALL_GATHER_GEMM.code)
    assert (failure.role, failure.expected, failure.seen) == (Role.LOAD_GATE, 1, 0)


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
def test_a_lost_word_that_a_peer_has_read_is_named(arch):
    with World(arch, 3, transport="copy_engine") as world:
        world.call(192, 64, 64)
        world.emulator.faults.add(StoreFault("drop", 2, 1, **READ_WORDS))
        with pytest.raises(CommTimeoutError) as caught:
            world.run()
    assert (caught.value.failure.rank, caught.value.failure.source) == (1, 2)
    assert caught.value.failure.role == Role.CALL_READ


@pytest.mark.parametrize(("transport", "arch"), in_turn(["copy_engine"], KINDS))
def test_a_late_flag_does_no_harm(arch, transport):
    with World(arch, 3, transport=transport) as world:
        for _ in range(3):
            world.call(192, 64, 64)
        late = StoreFault("delay", end=FLAGS["end"], instructions=5000)
        world.emulator.faults.add(late)
        world.run()
        assert world.emulator.faults.hits()[0][1] >= 3 * 3 * 2


@pytest.mark.parametrize(("transport", "arch"), in_turn(["peer_bulk"], KINDS))
def test_a_dead_rank_is_named(arch, transport):
    with World(arch, 3, transport=transport) as world:
        world.call(192, 64, 64)
        world.emulator.faults.kill(1)
        with pytest.raises(CommTimeoutError) as caught:
            world.run()
    assert caught.value.failure.source == 1


# --- each part taken out is noticed ---


def without_gate(patch):
    patch.setattr(all_gather, "await_shard", lambda *_: None)


def without_proxy_fence(patch):
    patch.setattr(all_gather, "order_async_writes", lambda: None)


def without_readers(patch):
    patch.setattr(all_gather, "await_readers", lambda *_: None)


@pytest.mark.slow
@pytest.mark.usefixtures("changed_kernels")
@pytest.mark.parametrize(
    ("mistake", "arch"), in_turn([without_gate, without_proxy_fence, without_readers], KINDS)
)
def test_what_is_taken_out_is_missed(arch, mistake, monkeypatch):
    mistake(monkeypatch)
    with pytest.raises((EmulatorError, AssertionError)):  # noqa: PT012
        for seed, starved in enumerate((1, 0, 2)):
            how = {"mode": "lazy", "seed": seed, "starved": starved, "sms": 2}
            with World(arch, 3, transport="copy_engine", **how) as world:
                world.call(192, 64, 64)
                world.call(1, 8, 64)
                world.call(192, 1, 64)
                world.call(192, 64, 64)
                world.run()


# --- gradients ---


@pytest.mark.parametrize(("transport", "arch"), in_turn([()], WAYS, KINDS))
def test_gradients_by_the_duals(arch, transport):
    """That of the one op's x is the other op.

    Virtual ranks' kernels run when told to, so what autograd multiplies itself must be there by then.
    """
    ranks, (m, n, k) = 2, (130, 64, 64)
    generator = torch.Generator().manual_seed(5)
    draw = lambda *shape: torch.randn(shape, generator=generator).bfloat16()  # noqa: E731
    x, up, hidden, down, grads = (
        draw(m, k),
        draw(n, k) / 8,
        draw(m, n),
        draw(k, n) / 8,
        [draw(m, n), draw(m, k)],
    )
    rows = [slice(*Shards.even(m, ranks).range(rank)) for rank in range(ranks)]
    columns = [slice(*Shards.even(n, ranks).range(rank)) for rank in range(ranks)]
    with World(arch, ranks, transport=transport) as world:
        own = [
            (x[part].clone().requires_grad_(), up[c].clone().requires_grad_())
            for part, c in zip(rows, columns, strict=True)
        ]
        parts = [(hidden[:, c].clone().requires_grad_(), down[:, c].clone()) for c in columns]
        how = [{"group": name, "backend": "fused"} for name in world.world.names]
        gathered = [
            overlap_gemm.all_gather_gemm(*own[r], rows=m, save_gathered=True, **how[r]) for r in range(ranks)
        ]
        scattered = [overlap_gemm.gemm_reduce_scatter(*parts[r], **how[r]) for r in range(ranks)]
        world.world.synchronize()
        of_gather = [torch.autograd.grad(gathered[r], own[r], grads[0][:, columns[r]]) for r in range(ranks)]
        of_scatter = [torch.autograd.grad(scattered[r], parts[r][0], grads[1][rows[r]]) for r in range(ranks)]
        world.world.synchronize()
    close = {"rtol": 0.02, "atol": 0.05}
    found = torch.cat([grad_x for grad_x, _ in of_gather])
    torch.testing.assert_close(found.double(), grads[0].double() @ up.double(), **close)
    found = torch.cat([grad_up for _, grad_up in of_gather])
    torch.testing.assert_close(found.double(), grads[0].double().t() @ x.double(), rtol=0.02, atol=0.2)
    found = torch.cat([grad for (grad,) in of_scatter], 1)
    torch.testing.assert_close(found.double(), grads[1].double() @ down.double(), **close)
