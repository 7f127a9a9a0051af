"""Kernels launched while the one before them in their stream still runs (`kernel.dependent_launch`)."""

from contextlib import contextmanager

import pytest
import torch
from cuda.bindings.driver import CUstream
from cutlass import cute
from cutlass.cute.runtime import from_dlpack

from cute_emulator import Emulator, EmulatorError, FindingsError, Schedule, mutate
from cute_emulator.execution.grid import Grid
from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.runtime.agree import DisagreementError
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.testing.cases import Case
from overlap_gemm.testing.emulated import judge, queue_launch
from overlap_gemm.tuning.settings import configured
from tests.support.chosen import in_turn
from tests.support.emulated.kernel_cases import KernelCase, compiled_kernel

FEW = {"mma": "swap_ab", "tile": (16, 64)}
KINDS = {
    "sm_100a": {"dependent": {"mma": "1cta", "tile": (128, 64)}, "dependent_weights": FEW},
    "sm_90a": {
        "dependent": {"mma": "pingpong", "tile": (64, 128), "cluster": (1, 1)},
        "dependent_weights": FEW,
    },
}
launches = pytest.mark.parametrize(("launch", "arch"), in_turn(["dependent", "dependent_weights"], KINDS))
one = pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
CALLS = [
    ("gemm_reduce_scatter", 40, 128, 320),
    ("gemm_all_reduce", 20, 64, 704),
    ("all_gather_gemm", 33, 64, 64),
    ("gemm_all_gather", 20, 144, 72),
    ("gemm_reduce_scatter", 1, 64, 64),
]
NEVER = Schedule(starved=lambda rank, cta, warp: False)


@pytest.fixture
def beside(monkeypatch):
    """The launches that may have run beside the one before."""
    found, depend = [], Grid.depend
    monkeypatch.setattr(Grid, "depend", lambda grid, before: (found.append(grid), depend(grid, before)))
    return found


@contextmanager
def ranks(arch, launch, world=2, schedule=NEVER, **options):
    """Virtual ranks with SMs for two launches."""
    with (
        configured(launch=launch, **KINDS[arch][launch]),
        Emulator(arch, world, num_sms=6, schedule=schedule, **options) as emulator,
        VirtualWorld(world, emulator=emulator) as virtual,
    ):
        yield virtual


def run(virtual, calls):
    """Queues calls one after the other, then judges their results."""
    queued = []
    for seed, (op, *sizes) in enumerate(calls):
        case = Case(op, *sizes, torch.bfloat16, seed=seed)
        queued.append((case, *queue_launch(case, virtual)))
    virtual.synchronize()
    for case, given, outs in queued:
        assert judge(case, given, outs, torch.bfloat16).holds, str(case)


@pytest.mark.parametrize(
    ("arch", "launch", "world", "mode", "starved"),
    [
        ("sm_90a", "dependent", 2, "random", 1),
        pytest.param("sm_90a", "dependent_weights", 3, "lazy", 0, marks=pytest.mark.slow),
        pytest.param("sm_100a", "dependent", 3, "lazy", 2, marks=pytest.mark.slow),
        pytest.param("sm_100a", "dependent_weights", 2, "random", 0, marks=pytest.mark.slow),
    ],
)
def test_calls_of_every_op_one_after_the_other(arch, launch, world, mode, starved, beside):
    """A rank lags; its peers' launches begin while their own last one still runs."""
    lagging = Schedule(starved=lambda rank, cta, warp: rank == starved)
    with ranks(arch, launch, world, lagging, mode=mode) as virtual, configured(shard_transport="peer_bulk"):
        run(virtual, [*CALLS, CALLS[0]])
    assert len(beside) > 2 * world


@one
def test_copies_between_launches_keep_them_apart(arch, beside):
    """What copy engines send begins after the last call, and its own kernel after that."""
    with ranks(arch, "dependent", mode="random") as virtual, configured(shard_transport="copy_engine"):
        run(virtual, [CALLS[2], CALLS[2], CALLS[0], CALLS[2]])


@pytest.mark.slow
@launches
def test_without_the_wait_calls_race(arch, launch):
    def check(options):
        with ranks(arch, launch, **options) as virtual:
            run(virtual, [CALLS[1], CALLS[1]])

    outcomes = mutate.run(check, [mutate.Setting("immediate")], select="griddepcontrol.wait*")
    assert [outcome.verdict for outcome in outcomes] == ["detected"], outcomes


def test_weights_come_early_for_few_rows_alone():
    with pytest.raises(ValueError, match="launch for mma='pingpong' must be one of ordered, dependent; got"):
        GemmConfig(arch="sm_90a", mma="pingpong", launch="dependent_weights")


def test_a_relay_has_no_dependents():
    options = {"launch": "dependent", "mma": "pingpong", "tile": (64, 128)}
    with (
        Emulator("sm_90a", 2, network=True) as emulator,
        VirtualWorld(2, emulator=emulator, without_p2p=True) as virtual,
        configured(**options),
        pytest.raises((ValueError, DisagreementError), match="reached by a relay's puts"),
    ):
        queue_launch(Case("gemm_reduce_scatter", 40, 128, 64, torch.bfloat16), virtual)


# -- the kernel before is the caller's


@cute.kernel
def _copy(source: cute.Tensor, target: cute.Tensor):
    cute.arch.griddepcontrol_launch_dependents()
    thread, _, _ = cute.arch.thread_idx()
    for i in range(thread, cute.size(source), 32):
        target[i] = source[i]


@cute.jit
def copy(source: cute.Tensor, target: cute.Tensor, stream: CUstream):
    _copy(source, target).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


def run_after_a_writer(arch, launch, operand):
    """A GEMM whose operand a kernel has just begun to write, which lets it go at once."""
    fields = KINDS[arch][launch]
    config = GemmConfig(arch=arch, launch=launch, **fields)
    case = KernelCase(config, 16, 64, 192)
    target = getattr(case, operand)[0]
    source = target.clone().view(torch.int16).flatten()
    with Emulator(arch, 2, mode="random") as emulator, emulator.rank(0):  # of one rank calls run at once
        compiled = compiled_kernel(config)
        views = [from_dlpack(t).mark_layout_dynamic() for t in (source, target.view(torch.int16).flatten())]
        target.zero_()
        write = cute.compile(copy, *views, CUstream(0), options=f"--gpu-arch {arch}")
        write(*views, CUstream(0))
        case.launch(emulator, compiled)
        emulator.run()
    target.copy_(source.view(torch.bfloat16).view_as(target))
    case.check()


@launches
def test_rows_that_the_kernel_before_writes_are_waited_for(arch, launch, beside):
    run_after_a_writer(arch, launch, "a")
    assert len(beside) == 1


@one
def test_weights_that_the_kernel_before_writes_are_waited_for_unless_they_come_early(arch, beside):
    run_after_a_writer(arch, "dependent", "b")
    assert len(beside) == 1
    with pytest.raises((FindingsError, EmulatorError, AssertionError), match=r"\[race\]"):
        run_after_a_writer(arch, "dependent_weights", "b")
