"""GEMM all-reduce, fused, one-shot and two-shot, through the public op on virtual ranks.

`judge` also wants the same bytes on all ranks.
"""

from dataclasses import replace

import pytest
import torch

import overlap_gemm
from overlap_gemm.backends.fused import plan_cache as plans
from overlap_gemm.exchange.all_reduce import TwoShot
from overlap_gemm.runtime.failures import CommTimeoutError
from overlap_gemm.testing.cases import Case
from overlap_gemm.testing.emulated import judge, poisoned_allocations, run_launches
from tests.support.chosen import in_turn
from tests.support.emulated.op_runs import LARGER, SMALL, lagging, name, run, world_of

OP = "gemm_all_reduce"
both = pytest.mark.parametrize("arch", SMALL)
each_way = pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])


@pytest.mark.parametrize(("algorithm", "arch"), in_turn(["two_shot", "one_shot"], SMALL))
@pytest.mark.parametrize("ranks", [3, *(pytest.param(p, marks=pytest.mark.slow) for p in (2, 4))])
def test_every_world(arch, algorithm, ranks):
    """M, N and M / P are no multiples of a tile, nor K of a stage."""
    run(OP, arch, ranks, (200, 136, 72), algorithm=algorithm)


@pytest.mark.slow
@both
def test_one_rank_multiplies(arch):
    run(OP, arch, 1, (70, 72, 72))


@pytest.mark.slow
@both
@each_way
@pytest.mark.parametrize("rows", [1, 5, 9, 130])
def test_eight_ranks_of_whom_some_own_no_row(arch, algorithm, rows):
    run(OP, arch, 8, (rows, 72, 64), algorithm=algorithm, launches=2)


@pytest.mark.slow
@pytest.mark.timeout(900)
@each_way
def test_more_ranks_than_loads_in_flight(algorithm):
    run(OP, "sm_100a", 9, (130, 64, 72), algorithm=algorithm)


@pytest.mark.parametrize(
    ("arch", "algorithm"),
    [
        ("sm_90a", "two_shot"),
        *(
            pytest.param(*way, marks=pytest.mark.slow)
            for way in (("sm_90a", "one_shot"), ("sm_100a", "two_shot"))
        ),
    ],
)
def test_fewer_rows_than_ranks(arch, algorithm):
    """Two-shot, rank 2 owns nothing: it sums nothing and receives everything."""
    run(OP, arch, 3, (2, 72, 40), algorithm=algorithm, launches=3)


@pytest.mark.parametrize("algorithm", ["two_shot", pytest.param("one_shot", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind", [LARGER[0], *(pytest.param(k, marks=pytest.mark.slow) for k in LARGER[1:])], ids=lambda k: name(k)
)
def test_larger_tiles_and_clusters(kind, algorithm):
    arch, fields = kind
    run(OP, arch, 2, (600, 136, 72), fields, algorithm=algorithm, mode="random", seed=1)


@pytest.mark.parametrize("algorithm", ["two_shot", pytest.param("one_shot", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("arch", "dtype", "slot"),
    [
        ("sm_90a", torch.float16, "f32"),
        pytest.param("sm_100a", torch.bfloat16, "f32", marks=pytest.mark.slow),
        pytest.param("sm_90a", torch.float16, "f16", marks=pytest.mark.slow),
    ],
)
def test_types(arch, algorithm, dtype, slot):
    """Without a bias. Slots of float32 make results of half a slot's width."""
    fields = {**SMALL[arch], "slot_dtype": slot}
    run(OP, arch, 3, (200, 72, 72), fields, algorithm=algorithm, dtype=dtype, bias=False)


@pytest.mark.parametrize(("algorithm", "arch"), in_turn(["one_shot", "two_shot"], SMALL))
@pytest.mark.parametrize("mode", [pytest.param("random", marks=pytest.mark.slow), "lazy"])
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_whenever_asynchronous_operations_complete(arch, algorithm, mode, seed):
    run(OP, arch, 2, (200, 136, 72), algorithm=algorithm, mode=mode, seed=seed, launches=2, num_sms=1 + seed)


@pytest.mark.parametrize(("algorithm", "arch"), in_turn(["two_shot", "one_shot"], SMALL))
@pytest.mark.parametrize("slow_rank", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_a_rank_that_lags_behind(arch, algorithm, slow_rank):
    schedule = lagging(slow_rank)
    run(OP, arch, 3, (130, 64, 64), algorithm=algorithm, launches=6, schedule=schedule, num_sms=1)


@pytest.mark.slow
@both
@each_way
@pytest.mark.parametrize("mode", ["immediate", "random", "lazy"])
def test_fifty_launches_with_a_rank_that_lags_behind(arch, algorithm, mode):
    run(
        OP,
        arch,
        2,
        (130, 64, 64),
        algorithm=algorithm,
        launches=50,
        schedule=lagging(1),
        mode=mode,
        num_sms=1,
    )


@pytest.mark.slow
@pytest.mark.parametrize("buffers", [1, 2])
def test_a_peer_that_runs_ahead_needs_the_second_buffer(monkeypatch, buffers):
    """The control that the lagging rank really lags: with one buffer, results are wrong."""
    if buffers == 1:
        double = plans.exchange_arguments
        monkeypatch.setattr(
            plans, "exchange_arguments", lambda *given: double(*given)._replace(buffer_bytes=0)
        )
    case = Case(OP, 256, 128, 64, torch.bfloat16)
    with world_of("sm_100a", 2, algorithm="one_shot", schedule=lagging(1), collect=True, num_sms=1) as world:
        launched = list(run_launches(case, world, 4))
    try:
        verdicts = [judge(case, given, outs, torch.bfloat16).holds for given, outs in launched]
    except AssertionError:  # the ranks' results differ
        verdicts = [False]
    assert all(verdicts) == (buffers == 2)


@pytest.mark.slow
@both
def test_copies_before_sums_wait_for_each_other(arch, monkeypatch, changed_kernels):
    """Each rank's warps wait for sums that the other rank's warps would make after their copies."""
    receive = TwoShot.receive.fget

    def reversed_parts(op):
        receiver = receive(op)
        return replace(receiver, parts=receiver.parts[::-1])

    monkeypatch.setattr(TwoShot, "receive", property(reversed_parts))
    with pytest.raises(CommTimeoutError, match="receive_result"):
        run(OP, arch, 2, (256, 256, 64), SMALL[arch], launches=1, algorithm="two_shot", num_sms=1)


@pytest.mark.parametrize(("rows", "columns", "depth"), [(0, 64, 8), (3, 0, 8), (3, 16, 0)])
def test_empty_extents(rows, columns, depth):
    x, weight = torch.randn(rows, depth).bfloat16(), torch.randn(columns, depth).bfloat16()
    with world_of("sm_100a", 2) as world, poisoned_allocations():
        outs = [overlap_gemm.gemm_all_reduce(x, weight, group=g, backend="fused") for g in world.names]
        world.synchronize()
    for out in outs:
        assert out.shape == (rows, columns)
        assert not out.any()


@pytest.mark.parametrize(("rows", "expected"), [(1, "one_shot"), (4096, "two_shot")])
def test_few_rows_travel_in_one_shot_and_many_in_two(monkeypatch, rows, expected):
    seen = []
    monkeypatch.setattr(plans, "compiled_kernel", lambda *given: seen.append(given[-1]) or (lambda *_: None))
    x, weight = torch.zeros(rows, 8).bfloat16(), torch.zeros(1024, 8).bfloat16()
    with world_of("sm_100a", 4) as world:
        overlap_gemm.gemm_all_reduce(x, weight, group=world.names[0], backend="fused")
    with world_of("sm_100a", 4, algorithm="one_shot") as world:
        overlap_gemm.gemm_all_reduce(x, weight, group=world.names[0], backend="fused")
    assert seen == [expected, "one_shot"]


def test_an_algorithm_that_is_none_is_refused():
    with pytest.raises(ValueError, match="three_shot"), world_of("sm_100a", 2, algorithm="three_shot"):
        pass
