"""Random sequences of calls on emulated ranks."""

import random
from typing import NamedTuple

import torch

from cute_emulator import Emulator, Schedule
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.testing.cases import Case
from overlap_gemm.testing.emulated import judge, queue_launch
from overlap_gemm.tuning.settings import configured

ARCHS = {
    "sm_100a": {"mma": "1cta", "tile": (128, 64)},
    "sm_90a": {"mma": "pingpong", "tile": (64, 128), "cluster": (1, 1)},
}


class Call(NamedTuple):
    """One call in a sequence."""

    m: int
    n: int
    op: str = "gemm_reduce_scatter"
    algorithm: str | None = None
    kernel: tuple[tuple[str, object], ...] = ()


def run_sequence(
    arch, ranks, calls, *, starved, mode="immediate", seed=0, network=False, num_sms=2, streams=1
):
    """Queues calls on every rank, runs them together and judges each by its values.

    Args:
        arch: of the kernels.
        ranks: P.
        calls: each a `Call`, or (M, N) of a reduce-scatter.
        starved: the rank that runs only when no other can.
        mode: when asynchronous operations complete.
        seed: of operands and schedule.
        network: whether no rank reaches a peer by loads and stores.
        num_sms: of each rank.
        streams: how many each rank spreads its calls over, in its own way.
    """
    lagging = Schedule(starved=lambda rank, cta, warp: rank == starved, grids="random")
    queued, draw = [], random.Random(seed)
    with (
        configured(**ARCHS[arch]),
        Emulator(arch, ranks, mode, seed, network=network, schedule=lagging, num_sms=num_sms) as emulator,
        VirtualWorld(ranks, emulator=emulator, without_p2p=network) as world,
    ):
        for number, call in enumerate(Call(*given) for given in calls):
            for rank in range(ranks):
                world.executor(rank).streams.handle = draw.randrange(streams)
            case = Case(call.op, call.m, call.n, 64, torch.bfloat16, seed=seed + number)
            with configured(algorithm=call.algorithm, **dict(call.kernel)):
                queued.append((case, *queue_launch(case, world), case.dtype))
        world.synchronize()
    verdicts = [judge(*call) for call in queued]
    wrong = [(call, calls[call], verdict) for call, verdict in enumerate(verdicts) if not verdict.holds]
    assert not wrong, wrong
