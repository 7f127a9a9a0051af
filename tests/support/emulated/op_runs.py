"""Runs an op through the public API on virtual ranks and judges every launch."""

from contextlib import contextmanager

import torch

from cute_emulator import Emulator, Schedule
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.testing.cases import Case
from overlap_gemm.testing.emulated import judge, run_launches
from overlap_gemm.tuning.settings import configured

SMALL = {
    "sm_100a": {"mma": "1cta", "tile": (128, 64)},
    "sm_90a": {"mma": "pingpong", "tile": (64, 128), "cluster": (1, 1)},
}
LARGER = [
    ("sm_100a", {"mma": "2cta", "tile": (256, 128), "cluster": (2, 1)}),
    ("sm_90a", {"mma": "cooperative", "tile": (128, 128), "cluster": (1, 2)}),
    ("sm_90a", {"mma": "pingpong", "tile": (128, 128), "cluster": (2, 1)}),
]


def name(kind):
    arch, fields = kind
    return "-".join([arch, fields["mma"], *("x".join(map(str, fields[f])) for f in ("tile", "cluster"))])


def lagging(rank):
    """The rank runs only when no other can, so the others get as far ahead as the protocol lets them."""
    return Schedule(starved=lambda running, cta, warp: running == rank)


@contextmanager
def world_of(
    arch, ranks, fields=None, *, algorithm=None, transport=None, mode="immediate", seed=0, **options
):
    """An open world of virtual ranks, whose kernels are as asked."""
    with (
        configured(**(fields or SMALL[arch]), algorithm=algorithm, transport=transport),
        Emulator(arch, ranks, mode, seed, **options) as emulator,
        VirtualWorld(ranks, emulator=emulator) as world,
    ):
        yield world


def slots_of(case, fields):
    """Dtype in which partials travel."""
    return torch.float32 if (fields or {}).get("slot_dtype") == "f32" else case.dtype


def run(
    op,
    arch,
    ranks,
    sizes,
    fields=None,
    *,
    dtype=torch.bfloat16,
    bias=True,
    launches=1,
    seed=0,
    **options,
):
    """Launches queued together on changing data, each judged; options as `world_of`'s."""
    case = Case(op, *sizes, dtype, bias=bias, seed=seed)
    with world_of(arch, ranks, fields, seed=seed, **options) as world:
        verdicts = [
            judge(case, given, outs, slots_of(case, fields))
            for given, outs in run_launches(case, world, launches)
        ]
    assert len(verdicts) == launches
    assert all(verdict.holds for verdict in verdicts), verdicts
