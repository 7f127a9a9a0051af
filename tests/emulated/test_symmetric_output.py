"""GEMM all-gather into outputs to which all ranks store (`kernels.symmetric_output`)."""

import pytest
import torch

import overlap_gemm
from cute_emulator import Emulator, EmulatorError, Schedule
from overlap_gemm.backends.symmetric_output import (
    gemm_all_gather_into,
    gemm_all_reduce_into,
    symmetric_output,
)
from overlap_gemm.kernels import symmetric_output as device
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.spec.sharding import Shards
from overlap_gemm.testing.cases import Case
from overlap_gemm.testing.emulated import judge, queue_launch
from overlap_gemm.tuning.settings import configured

from .chosen import in_turn

KINDS = {
    "sm_90a": [
        {"mma": "pingpong", "tile": (64, 128), "cluster": (1, 1)},
        {"mma": "cooperative", "tile": (128, 128), "cluster": (2, 1), "launch": "dependent"},
        {"mma": "swap_ab", "tile": (16, 64), "launch": "dependent_weights"},
    ],
    "sm_100a": [
        {"mma": "1cta", "tile": (128, 64)},
        {"mma": "2cta", "tile": (256, 128), "cluster": (2, 1)},
        {"mma": "swap_ab", "tile": (16, 64), "k_split": 2},
    ],
}


class World:
    """Virtual ranks with outputs of their own."""

    def __init__(self, arch, ranks, fields=None, starved=None, sms=4, **options):
        lagging = Schedule(starved=lambda rank, cta, warp: rank == starved)
        self.fields = fields or KINDS[arch][0]
        self.given = Emulator(arch, ranks, num_sms=sms, schedule=lagging, **options)
        self.ranks, self.checks, self.seed = ranks, [], 0

    def __enter__(self):
        self.asked = configured(**self.fields)
        self.asked.__enter__()
        self.emulator = self.given.__enter__()
        self.world = VirtualWorld(self.ranks, emulator=self.emulator).__enter__()
        return self

    def __exit__(self, *error):
        self.world.__exit__(*error)
        self.emulator.__exit__(*error)
        self.asked.__exit__(*error)

    def outputs(self, rows, columns):
        """One output on every rank."""
        outputs = [symmetric_output(rows, columns, torch.bfloat16, group=name) for name in self.world.names]
        for output in outputs:
            output.tensor.fill_(torch.nan)
        return outputs

    def call(self, outputs, depth, bias=True):
        """Queues one call on every rank; what it must give is looked at after `run`."""
        self.seed += 1
        draw = torch.Generator().manual_seed(self.seed)
        rows, columns = outputs[0].tensor.shape
        x, weight, added = (
            torch.randn(size, generator=draw).bfloat16()
            for size in ((rows, depth), (columns, depth), (columns,))
        )
        shards = Shards.even(columns, self.ranks)
        for rank, output in enumerate(outputs):
            own = slice(*shards.range(rank))
            given = added[own].clone() if bias else None
            gemm_all_gather_into(output, x.clone(), weight[own].clone(), given)
        exact = x.double() @ weight.double().t() + (added.double() if bias else 0)
        self.checks.append((outputs, exact, 2**-18 * depth))

    def reduce(self, outputs, depth, bias=True):
        """The same of an all-reduce; every rank's partials are rounded."""
        self.seed += 1
        draw = torch.Generator().manual_seed(self.seed)
        rows, columns = outputs[0].tensor.shape
        added, exact = torch.randn(columns, generator=draw).bfloat16(), torch.zeros(rows, columns)
        for output in outputs:
            x, weight = (torch.randn(n, depth, generator=draw).bfloat16() for n in (rows, columns))
            exact = exact + x.double() @ weight.double().t()
            gemm_all_reduce_into(output, x, weight, added.clone() if bias else None)
        exact = exact + added.double() if bias else exact
        self.checks.append((outputs, exact, 2**-9 * self.ranks * 6 * depth**0.5))

    def other(self, op, *sizes):
        """Queues a call of another op in between."""
        case = Case(op, *sizes, torch.bfloat16, seed=self.seed)
        return case, *queue_launch(case, self.world)

    def run(self):
        """Runs everything; the last call into each output is what it holds."""
        self.world.synchronize()
        for outputs, exact, lost in {
            id(outputs): (outputs, *rest) for outputs, *rest in self.checks
        }.values():
            for output in outputs:
                torch.testing.assert_close(output.tensor.double(), exact, rtol=2**-8, atol=lost)
                assert torch.equal(output.tensor, outputs[0].tensor)


@pytest.mark.parametrize(
    ("ranks", "mode", "starved", "arch"),
    [
        *in_turn([(2, "random", 1), (3, "lazy", 0)], KINDS),
        *(pytest.param(4, "immediate", 2, arch, marks=pytest.mark.slow) for arch in KINDS),
    ],
)
def test_outputs_in_turn_among_other_calls(arch, ranks, mode, starved):
    """Two outputs, one of them twice; a rank lags."""
    with World(arch, ranks, mode=mode, starved=starved) as world:
        one, two = world.outputs(150, 72 * ranks), world.outputs(40, 8 * ranks)
        world.call(one, 72)
        queued = world.other("gemm_all_reduce", 20, 64, 64)
        world.call(two, 320, bias=False)
        world.call(one, 64)
        world.run()
        assert judge(*queued, torch.bfloat16).holds


@pytest.mark.parametrize(
    ("ranks", "sizes", "mode", "starved", "arch"),
    [
        *in_turn([(3, (70, 264), "random", 2), (4, (130, 72), "immediate", 1)], KINDS),
        *(pytest.param(2, (150, 200), "lazy", 0, arch, marks=pytest.mark.slow) for arch in KINDS),
    ],
)
def test_reduced_outputs_in_turn_among_other_calls(arch, ranks, sizes, mode, starved):
    """Owners with few columns, or none; another call's slots are the same."""
    with World(arch, ranks, mode=mode, starved=starved, sms=2) as world:
        one, two = world.outputs(*sizes), world.outputs(33, 64 * ranks)
        world.reduce(one, 72)
        queued = world.other("gemm_all_reduce", 70, 72, 64 * ranks)
        world.reduce(two, 64, bias=False)
        if ranks == 3:
            world.call(one, 64)
        world.reduce(one, 64)
        world.reduce(two, 72)
        world.run()
        assert judge(*queued, torch.bfloat16).holds


@pytest.mark.parametrize(
    ("arch", "fields"),
    [
        pytest.param(arch, kind, id=f"{arch}-{kind['mma']}")
        for arch, kinds in KINDS.items()
        for kind in kinds[1:]
    ],
)
def test_every_kernel(arch, fields):
    with World(arch, 2, fields, mode="random", seed=2, sms=8) as world:
        outputs = world.outputs(300, 272)
        world.call(outputs, 136)
        world.call(outputs, 712)
        world.run()
        if fields["mma"] == "swap_ab":
            with pytest.raises(ValueError, match="own_last"):
                world.reduce(outputs, 136)
        else:
            world.reduce(outputs, 136)
            world.run()


def test_a_known_call_asks_the_device_for_nothing():
    """Whoever asked for the table of peers again would wait for the device, and could not be captured."""
    with World("sm_90a", 2) as world:
        outputs = world.outputs(64, 128)
        world.call(outputs, 64)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "tolist", lambda self: pytest.fail("asked the device"))
            world.call(outputs, 64)
        world.run()


def read_the_output(arch, call, seed, starved):
    """An output is the next op's operand, whose last tiles a rank may read when its peer goes on."""
    with World(arch, 2, mode="lazy", seed=seed, starved=starved, sms=2) as world:
        outputs, results = world.outputs(130, 128), []
        for _ in range(3):
            getattr(world, call)(outputs, 64)
            for rank, name in enumerate(world.world.names):
                x, weight = outputs[rank].tensor, torch.eye(128).bfloat16()
                results.append(overlap_gemm.gemm_reduce_scatter(x, weight, group=name, backend="fused"))
        world.run()
        torch.testing.assert_close(torch.cat(results[-2:]), 2 * outputs[0].tensor)


@pytest.mark.parametrize(("call", "arch"), in_turn(["call", "reduce"], KINDS))
def test_results_are_read_by_the_next_call(arch, call):
    read_the_output(arch, call, 0, 1)


def without_entries(patch):
    patch.setattr(device, "await_peers", lambda *_: None)


def without_the_last_word(patch):
    patch.setattr(device, "await_readers", lambda *_: None)


def told_by_every_warp(patch):
    patch.setattr(device, "count_grid", lambda *_: 1)


@pytest.mark.usefixtures("changed_kernels")
@pytest.mark.parametrize(
    ("call", "mistake"),
    [
        ("call", without_entries),
        ("call", without_the_last_word),
        ("call", told_by_every_warp),
        ("reduce", without_the_last_word),
        pytest.param("reduce", told_by_every_warp, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
def test_what_is_taken_out_is_missed(arch, call, mistake, monkeypatch):
    mistake(monkeypatch)
    with pytest.raises((EmulatorError, AssertionError)):  # noqa: PT012
        for seed, starved in enumerate((1, 0, 1)):
            read_the_output(arch, call, seed, starved)


def test_what_does_not_fit_is_said():
    with World("sm_90a", 2) as world:
        with pytest.raises(ValueError, match="must be multiples of 8"):
            symmetric_output(64, 20, torch.bfloat16, group=world.world.names[0])
        with pytest.raises(ValueError, match="a rank's 12 columns"):
            world.call(world.outputs(64, 24), 8)
        outputs = world.outputs(64, 32)
        with pytest.raises(ValueError, match="takes x and weight of"):
            half = torch.zeros(16, 8).bfloat16()
            gemm_all_reduce_into(outputs[0], torch.zeros(64, 8).bfloat16(), half)
        with pytest.raises(ValueError, match="takes x and weight of"):
            gemm_all_gather_into(outputs[0], torch.zeros(64, 8).bfloat16(), torch.zeros(8, 8).bfloat16())
