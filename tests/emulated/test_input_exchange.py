"""All-to-all GEMM through the public op on virtual ranks: alone, between other ops, and its gradient."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

import overlap_gemm
from cute_emulator import EmulatorError
from cute_emulator.machine.inject import StoreFault
from overlap_gemm.backends.fused import exchange_plans
from overlap_gemm.device.failure import Role
from overlap_gemm.exchange.geometry import CONTROL_BYTES, FLAG_BYTES, MAX_WORLD, SHARD_PIECES, slots_offset
from overlap_gemm.gather import all_gather, input_exchange
from overlap_gemm.runtime.failures import CommTimeoutError
from overlap_gemm.runtime.memory.workspace import workspaces
from overlap_gemm.spec import ALL_TO_ALL_GEMM
from overlap_gemm.testing.emulated import poisoned_allocations
from overlap_gemm.tuning.machine import machine_for
from tests.support.chosen import in_turn
from tests.support.emulated.gather_world import KINDS, World

OP = "all_to_all_gemm"
WAYS = ("copy_engine", "peer_bulk")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Makes chunks of 128 rows: some calls of these tests have several."""
    monkeypatch.setattr(
        exchange_plans, "constants", lambda arch: replace(machine_for(arch), copy_bytes=1 << 14)
    )


@pytest.mark.parametrize(("ranks", "transport", "arch"), in_turn([4], WAYS, KINDS))
def test_every_world(arch, ranks, transport):
    """Rows are uneven, and no multiple of a tile, nor are the columns, nor K of a rank."""
    with World(arch, ranks, transport=transport) as world:
        world.call(300 * ranks - 1, 136, 72 * ranks, OP)
        world.run()


OTHERS = {f"{a}-{kind['mma']}": (a, kind) for a, kinds in KINDS.items() for kind in kinds[1:]}
OTHERS |= {
    "sm_90a-swapped": ("sm_90a", {"mma": "swap_ab", "tile": (32, 64), "cluster": (1, 1), "k_split": 1})
}


@pytest.mark.parametrize(("kind", "transport"), in_turn(OTHERS, WAYS))
def test_every_kernel(kind, transport):
    arch, fields = OTHERS[kind]
    with World(arch, 2, transport=transport, fields=fields, mode="random") as world:
        world.call(530, 272, 272, OP)
        world.run()


SHAPES = {
    "a row for each rank": (3, 264, 192),
    "several k tiles in a slice": (130, 64, 9 * 64),
    "a slice is smaller than a k tile": (258, 64, 3 * 8),
}


@pytest.mark.parametrize(("shape", "transport", "arch"), in_turn(SHAPES, WAYS, KINDS))
def test_every_shape(arch, shape, transport):
    """Calls twice; with copy engines, the second call has another type and no bias."""
    other = {"bias": False, "dtype": torch.float16} if transport == "copy_engine" else {}
    with World(arch, 3, transport=transport) as world:
        world.call(*SHAPES[shape], OP)
        world.call(*SHAPES[shape], OP, **other)
        world.run()


@pytest.mark.parametrize(
    ("slow_rank", "transport", "arch"), in_turn([(0, "copy_engine"), (2, "peer_bulk")], KINDS)
)
@pytest.mark.parametrize("mode", [pytest.param("random", marks=pytest.mark.slow), "lazy"])
def test_a_rank_that_lags_behind(arch, slow_rank, transport, mode):
    with World(arch, 3, transport=transport, mode=mode, seed=slow_rank, starved=slow_rank, sms=2) as world:
        for rows in (390, 3, 780, 390):
            world.call(rows, 72, 192, OP)
        world.run()


@pytest.mark.parametrize(("starved", "transport", "arch"), in_turn([()], (2, 1), WAYS, KINDS))
def test_between_other_ops_on_the_same_workspaces(arch, starved, transport):
    """Shares the buffer with all-gathers, whose flags are some of the chunks' flags."""
    with World(arch, 3, transport=transport, mode="random", starved=starved) as world:
        world.call(390, 192, 192, OP)
        for other in ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_to_all"):
            world.call(260, 192, 192, other)
            world.call(4 if other == "all_gather_gemm" else 130, 192, 192, other)
            world.call(260, 192, 192, OP)
        world.run()
        kinds = {workspace.size.kind for workspace in workspaces(world.world.names[0])}
        assert kinds == {"gather", "slots"}


def draw(*shape, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16()


@pytest.mark.parametrize(("transport", "arch"), in_turn(WAYS, KINDS))
def test_weights_share_an_exchange(arch, transport):
    x, weights, biases = draw(300, 128), [draw(64, 128) / 8, draw(72, 128) / 8], [draw(64), draw(72)]
    with World(arch, 2, transport=transport) as world, poisoned_allocations():
        outs = [
            overlap_gemm.all_to_all_gemm(part, weights, bias=biases, group=group, backend="fused")
            for part, group in zip(x.chunk(2, 1), world.world.names, strict=True)
        ]
        world.run()
    for number, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        exact = x.double() @ weight.double().t() + bias.double()
        torch.testing.assert_close(torch.cat([out[number] for out in outs]), exact.bfloat16())


@pytest.mark.parametrize(("transport", "arch"), in_turn([()], WAYS, KINDS))
def test_gradients_by_the_dual(arch, transport):
    """Compares that of x, the other op's result, and that of the weight, which reads the kept x."""
    x, weight, upstream, outs, grads = draw(300, 144), draw(64, 144) / 8, draw(300, 64), [], []
    with World(arch, 2, transport=transport) as world, poisoned_allocations():
        for rank, group in enumerate(world.world.names):
            local = x.chunk(2, 1)[rank].clone().requires_grad_(), weight.clone().requires_grad_()
            out = overlap_gemm.all_to_all_gemm(*local, group=group, backend="fused")
            grads.append(torch.autograd.grad(out, local, upstream.chunk(2)[rank]))
            outs.append(out.detach())
        world.run()
    close = {"rtol": 0.02, "atol": 0.05}
    grad_x = torch.cat([of_x for of_x, _ in grads], 1)
    torch.testing.assert_close(grad_x.double(), upstream.double() @ weight.double(), **close)
    of_weight = upstream.double().t() @ x.double()
    for _, grad in grads:
        torch.testing.assert_close(grad.double(), of_weight, rtol=0.02, atol=0.2)
    torch.testing.assert_close(torch.cat(outs).double(), x.double() @ weight.double().t(), **close)


@pytest.mark.parametrize(
    ("transport", "arch"),
    [("peer_bulk", "sm_90a"), pytest.param("copy_engine", "sm_100a", marks=pytest.mark.slow)],
)
def test_its_dual_s_gradient_is_this_op(arch, transport):
    """Sums over weights are added in the kernels: a virtual rank's results are complete after all calls."""
    x, weights = draw(200, 72), [draw(144, 72) / 8, draw(160, 72, seed=6) / 8]
    upstream, grads = [draw(200, len(weight), seed=7 + len(weight)) for weight in weights], []
    with World(arch, 2, transport=transport) as world, poisoned_allocations():
        for rank, group in enumerate(world.world.names):
            local = x.chunk(2)[rank].clone().requires_grad_()
            outs = overlap_gemm.gemm_all_to_all(local, weights, rows=200, group=group, backend="fused")
            grads += torch.autograd.grad(outs, local, [one.chunk(2, 1)[rank] for one in upstream])
        world.run()
    exact = sum(one.double() @ weight.double() for one, weight in zip(upstream, weights, strict=True))
    torch.testing.assert_close(torch.cat(grads).double(), exact, rtol=0.02, atol=0.05)


@pytest.mark.parametrize(
    ("scaled", "transport", "arch"),
    [(False, "peer_bulk", "sm_90a"), (False, "copy_engine", "sm_100a"), (True, "copy_engine", "sm_90a")],
)
def test_an_empty_sum_reads_nothing_beyond_its_operands(arch, transport, scaled):
    """Multiplies zeros in place of K; the last rows of the weight are the end of its memory."""
    x, weight, bias = draw(5, 0), draw(16, 0), draw(16)
    how = {"bias": bias, "backend": "fused"}
    if scaled:
        x, weight = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
        how |= {"block": 128, "scale_x": torch.ones(5, 1), "scale_w": torch.ones(1, 1)}
    with World(arch, 3, transport=transport) as world, poisoned_allocations():
        local = x.requires_grad_(not scaled), weight.requires_grad_(not scaled)
        outs = [overlap_gemm.all_to_all_gemm(*local, group=group, **how) for group in world.world.names]
        grads = [] if scaled else [torch.autograd.grad(out.sum(), local) for out in outs]
        world.run()
    assert torch.equal(torch.cat(outs), bias.expand(5, 16))
    assert all(of_x.shape == x.shape and of_weight.shape == weight.shape for of_x, of_weight in grads)


def test_an_empty_part_of_a_list_adds_nothing():
    """Computes the gradient of x for two weights, one without rows."""
    x, weights, grads = draw(6, 64), [draw(48, 64) / 8, draw(0, 64)], []
    with World("sm_90a", 3, transport="peer_bulk") as world, poisoned_allocations():
        for local, group in zip(x.chunk(3), world.world.names, strict=True):
            local = local.clone().requires_grad_()
            outs = overlap_gemm.gemm_all_to_all(local, weights, rows=6, group=group, backend="fused")
            grads += torch.autograd.grad([out.sum() for out in outs], local)
        world.run()
    exact = weights[0].double().sum(0).expand(6, 64)
    torch.testing.assert_close(torch.cat(grads).double(), exact, rtol=0.02, atol=0.05)


def test_a_call_takes_what_was_reserved_and_no_plan_after_a_warm_up(monkeypatch):
    m, n, k = 390, 72, 128
    with World("sm_90a", 2, transport="copy_engine") as world:
        names = world.world.names
        how = {"dtype": torch.bfloat16, "device": torch.device("cpu")}
        held = [overlap_gemm.reserve(OP, group=name, max_rows=m, columns=k, **how) for name in names]
        for name in names:
            overlap_gemm.warmup(OP, (m, n, k), group=name, backend="fused", **how)
        world.run()
        never = mock.Mock(side_effect=AssertionError("made after the warm-up"))
        monkeypatch.setattr(exchange_plans, "keep_plan", never)
        world.call(m, n, k, OP, bias=False)
        world.run()
        assert overlap_gemm.workspace_bytes() == sum(held)


# --- refusals ---


@pytest.mark.parametrize(
    ("sizes", "options", "reason"),
    [
        ((32, 16, 104), {}, "K=104 in 2 parts must be a multiple of 8 a rank"),
        ((1, 16, 128), {}, "1 rows or columns in shards of 1 leave some of the ranks without any"),
        ((32, 16, 128), {"invariant": "batch"}, "kernels sum K from a rank's own columns on"),
    ],
)
def test_what_it_does_not_take_is_named(sizes, options, reason):
    m, n, k = sizes
    with World("sm_90a", 2, transport=None) as world, pytest.raises(ValueError, match=reason):
        overlap_gemm.all_to_all_gemm(
            draw(m, k // 2), draw(n, k), group=world.world.names[0], backend="fused", **options
        )


def test_kernels_do_not_split_k_and_puts_are_named():
    x, weight = draw(32, 64), draw(16, 128)
    fields = {"mma": "swap_ab", "tile": (32, 64), "cluster": (1, 1), "k_split": 2}
    with (
        World("sm_90a", 2, transport=None, fields=fields) as world,
        pytest.raises(
            ValueError, match="k_split must be 1 and launch not 'dependent_weights', got k_split=2"
        ),
    ):
        overlap_gemm.all_to_all_gemm(x, weight, group=world.world.names[0], backend="fused")
    with (
        World("sm_90a", 2, transport="nvshmem") as world,
        pytest.raises(ValueError, match="transport='nvshmem' is for .*, not for all_to_all_gemm"),
    ):
        overlap_gemm.all_to_all_gemm(x, weight, group=world.world.names[0], backend="fused")


# --- faults ---


FLAGS = {"begin": CONTROL_BYTES, "end": slots_offset(SHARD_PIECES * MAX_WORLD)}


@pytest.mark.parametrize(("transport", "arch"), in_turn(WAYS, KINDS))
def test_a_lost_flag_of_a_chunk_is_named(arch, transport):
    with World(arch, 3, transport=transport) as world:
        world.call(768, 64, 192, OP)
        second = CONTROL_BYTES + FLAG_BYTES * 3  # of source 0
        world.emulator.faults.add(StoreFault("drop", 0, 1, begin=second, end=second + FLAG_BYTES))
        with pytest.raises(CommTimeoutError) as caught:
            world.run()
    failure = caught.value.failure
    assert (failure.rank, failure.source, failure.op) == (1, 0, ALL_TO_ALL_GEMM.code)
    assert (failure.role, failure.tile, failure.expected, failure.seen) == (Role.LOAD_GATE, 1, 1, 0)


@pytest.mark.parametrize(("transport", "arch"), in_turn(["peer_bulk"], KINDS))
def test_a_late_flag_does_no_harm(arch, transport):
    with World(arch, 3, transport=transport) as world:
        for _ in range(3):
            world.call(390, 64, 192, OP)
        late = StoreFault("delay", end=FLAGS["end"], instructions=5000)
        world.emulator.faults.add(late)
        world.run()
        assert world.emulator.faults.hits()[0][1] >= 3 * 3 * 2


def without_gate(patch):
    patch.setattr(input_exchange, "await_chunk", lambda *_: None)


def without_proxy_fence(patch):
    patch.setattr(input_exchange, "order_async_writes", lambda: None)


def without_readers(patch):
    patch.setattr(all_gather, "await_readers", lambda *_: None)


def with_flags_before_rows(patch):
    def send(copies, executor, second, local, exchange):
        for _, offset, target, nbytes, flag in copies.places:
            executor.copy(second, flag, copies.next_epoch, FLAG_BYTES)
            executor.copy(second, target, local[0] + offset, nbytes)

    patch.setattr(exchange_plans.RowCopies, "send", send)


MISTAKES = [without_gate, without_proxy_fence, without_readers, with_flags_before_rows]


@pytest.mark.slow
@pytest.mark.usefixtures("changed_kernels")
@pytest.mark.parametrize(("mistake", "arch"), in_turn(MISTAKES, KINDS))
def test_what_is_taken_out_is_missed(arch, mistake, monkeypatch):
    mistake(monkeypatch)
    with pytest.raises((EmulatorError, AssertionError)):  # noqa: PT012
        for seed, starved in enumerate((1, 0, 2)):
            how = {"mode": "lazy", "seed": seed, "starved": starved, "sms": 2}
            with World(arch, 3, transport="copy_engine", **how) as world:
                for rows in (390, 3, 390, 390):
                    world.call(rows, 64, 192, OP)
                world.run()
