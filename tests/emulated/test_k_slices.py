"""All-gather GEMM whose shards come by slices of K (`kernels.k_slices`), through the public op."""

import pytest
import torch
from cutlass import Int32

from cute_emulator import EmulatorError
from overlap_gemm.kernels import k_slices
from overlap_gemm.runtime.agree import DisagreementError
from overlap_gemm.tuning.settings import configured

from .chosen import in_turn
from .test_all_gather import SMALLEST, World

KINDS = {
    "sm_90a": [
        {"mma": "swap_ab", "tile": (32, 64)},
        {"mma": "swap_ab", "tile": (16, 64), "launch": "dependent_weights"},
        {"mma": "cooperative", "tile": (128, 128), "cluster": (2, 1)},
        {"mma": "pingpong", "tile": (64, 128), "cluster": (1, 2)},
    ],
    "sm_100a": [
        {"mma": "swap_ab", "tile": (32, 64), "k_split": 2},
        {"mma": "1cta", "tile": (128, 64), "cluster": (2, 1), "launch": "dependent"},
        {"mma": "2cta", "tile": (256, 128), "cluster": (2, 1)},
    ],
}
SIMPLE = KINDS["sm_90a"][0]  # the others of its kind say more
OTHERS = [(arch, kind) for arch, kinds in KINDS.items() for kind in kinds]


def sliced(arch, ranks, **options):
    """Ranks whose shards come by slices."""
    return World(arch, ranks, transport="k_slices", **options)


@pytest.mark.parametrize(("ranks", "arch"), in_turn([1, 2, 3, 4], SMALLEST))
def test_every_world(arch, ranks):
    """12 k tiles in 6 slices; tiles that span all shards, and more tiles than CTAs."""
    with sliced(arch, ranks) as world:
        world.call(50, 136 * ranks, 712)
        world.call(200, 64, 330)
        world.run()


SHAPES = {
    "more than one row of tiles, a shard in two": (520, 136, 64),
    "the last shard is short": (200, 136, 128),
    "fewer rows than ranks": (2, 264, 64),
    "one row": (1, 136, 64),
    "K no multiple of 8": (130, 64, 61),
    "N no multiple of 8": (130, 39, 1030),
    "ranks without columns": (130, 1, 64),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
def test_every_shape(arch, shape):
    with sliced(arch, 3, mode="random") as world:
        world.call(*SHAPES[shape])
        world.call(*SHAPES[shape], bias=False, dtype=torch.float16)
        world.run()


@pytest.mark.parametrize(
    ("arch", "fields"),
    [
        pytest.param(
            arch,
            kind,
            id=f"{arch}-{'-'.join(map(str, kind.values()))}",
            marks=[pytest.mark.slow] if kind == SIMPLE else [],
        )
        for arch, kind in OTHERS
    ],
)
def test_every_kernel(arch, fields):
    with sliced(arch, 2, fields=fields, mode="random", seed=1, starved=0) as world:
        world.call(72, 272, 1480)
        world.call(33, 64, 64)
        world.call(72, 272, 1480)
        world.run()


@pytest.mark.parametrize(
    ("ranks", "mode", "seed"),
    [(3, "random", 1), (4, "lazy", 2), pytest.param(2, "lazy", 3, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
def test_calls_among_those_of_the_other_ways_on_one_workspace(arch, ranks, mode, seed):
    """One rank lags; slices' flags of any age, counters and buffer are the other forms', too."""
    with sliced(arch, ranks, mode=mode, seed=seed, starved=seed % ranks, sms=2) as world:
        for way in ("k_slices", "peer_bulk", "k_slices", "k_slices", "copy_engine", "k_slices"):
            with configured(shard_transport=way):
                world.call(70 + 9 * len(world.judged), 64, 320)
                if way == "k_slices":
                    world.call(2, 8, 64)
        world.several(70, [64, 13], 320, keep=False)
        world.call(40, 64, 64, "gemm_reduce_scatter")
        world.run()


def without_waits(patch):
    patch.setattr(k_slices, "await_piece", lambda *_: None)


def with_a_look_that_sees_everything(patch):
    patch.setattr(k_slices, "test_flag", lambda *_: Int32(1))


def with_one_slice_for_all(patch):
    patch.setattr(k_slices.Arrivals, "after", lambda *_: Int32(k_slices.ALL))


def without_proxy_fence(patch):
    patch.setattr(k_slices, "order_async_writes", lambda: None)


def with_flags_raised_by_every_warp(patch):
    patch.setattr(k_slices, "count_grid", lambda *_: Int32(1))


MISTAKES = [
    without_waits,
    with_a_look_that_sees_everything,
    with_one_slice_for_all,
    without_proxy_fence,
    with_flags_raised_by_every_warp,
]


@pytest.mark.usefixtures("changed_kernels")
@pytest.mark.parametrize(("mistake", "arch"), in_turn(MISTAKES, SMALLEST))
def test_what_is_wrong_is_missed(arch, mistake, monkeypatch):
    mistake(monkeypatch)
    with pytest.raises((EmulatorError, AssertionError)):  # noqa: PT012
        for seed, starved in enumerate((1, 0)):
            with sliced(arch, 2, mode="lazy", seed=seed, starved=starved, sms=2) as world:
                world.call(192, 64, 640)
                world.call(192, 64, 640)
                world.run()


def test_what_it_cannot_do_is_said():
    with (
        sliced("sm_90a", 2) as world,
        pytest.raises((ValueError, DisagreementError), match="by slices of K are not kept"),
    ):
        world.several(70, [64], 64, keep=True)
    with pytest.raises(ValueError, match="transport='k_slices' is for all_gather_gemm, not for gemm_all_re"):  # noqa: SIM117
        with World("sm_90a", 2, transport=None, fields={"transport": "k_slices"}) as world:
            world.call(64, 64, 64, "gemm_all_reduce")
