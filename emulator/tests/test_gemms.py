"""Whole GEMM kernels: compiled by CuTe DSL, launched through its host code, compared with torch."""

from itertools import product

import cutlass
import pytest
import torch

from cute_emulator.execution.scheduler import Schedule
from cute_emulator.host.emulator import Emulator
from cute_emulator.numbers import formats
from cute_emulator.units import smem_desc

from .kernels import build
from .kernels.gemm_sm90 import GemmSm90
from .kernels.gemm_sm100 import GemmSm100

BF16, F16, F32, TF32 = cutlass.BFloat16, cutlass.Float16, cutlass.Float32, cutlass.TFloat32
E4M3, E5M2 = cutlass.Float8E4M3FN, cutlass.Float8E5M2

CASES = {
    "sm100": GemmSm100(),
    "sm100-m64": GemmSm100(tile=(64, 64)),
    "sm100-m64-f32-m": GemmSm100(F16, F16, F32, tile=(64, 128), c_major="m"),
    "sm100-2cta": GemmSm100(tile=(256, 128), two_cta=True, cluster=(2, 1)),
    "sm100-2cta-m128": GemmSm100(tile=(128, 64), two_cta=True, cluster=(2, 2)),
    "sm100-2cta-multicast": GemmSm100(tile=(256, 64), two_cta=True, cluster=(4, 2), a_major="m"),
    "sm100-multicast": GemmSm100(cluster=(2, 2), a_major="m", b_major="n"),
    "sm100-column-major": GemmSm100(c_major="m"),
    "sm100-f16-accumulator": GemmSm100(F16, F16, F16, acc_type=F16),
    "sm100-tf32": GemmSm100(TF32, TF32, F32),
    "sm100-tf32-mn": GemmSm100(TF32, TF32, F32, a_major="m", b_major="n"),
    "sm100-f8": GemmSm100(E4M3, E5M2, BF16),
    "sm100-f8-mn": GemmSm100(E4M3, E4M3, BF16, a_major="m", b_major="n"),
    "sm90": GemmSm90(),
    "sm90-multicast": GemmSm90(cluster=(2, 2)),
    "sm90-mn": GemmSm90(a_major="m", b_major="n"),
    "sm90-column-major": GemmSm90(c_major="m"),
    "sm90-f32-out": GemmSm90(c_type=F32, cluster=(2, 1)),
    "sm90-a-registers": GemmSm90(a_registers=True),
    "sm90-f8": GemmSm90(E4M3, E5M2, BF16),
    "sm90-f16-accumulator": GemmSm90(F16, F16, F16, acc_type=F16, tile=(64, 256)),
    "sm90-three-groups": GemmSm90(F16, F16, F32, cluster=(1, 2), tile=(192, 32)),
}
# Relative to sum |a| |b|: the rounding of C, and what an operand or an f16 accumulator loses on the way.
UNIT = {BF16: 2**-8, F16: 2**-11, F32: 2**-20}
MODES = "immediate", "random", "lazy"


@pytest.fixture(autouse=True)
def dumps(tmp_path, monkeypatch):
    monkeypatch.setenv("CUTE_DSL_DUMP_DIR", str(tmp_path))


def run(gemm, m, n, k, num_clusters, **options):
    """Runs a GEMM in the emulator; the largest error in units of what rounding may do."""
    with Emulator(gemm.arch, **options) as emulator:
        compiled = build.compile_gemm(gemm)
        a, b, c = build.operands(gemm, m, n, k)
        build.call(compiled, gemm, (a, b, c), num_clusters)
    assert emulator.report.instructions > 1000
    return error(gemm, a, b, c)


def error(gemm, a, b, c):
    a, b, c = a.float(), b.float(), c.float()
    unit = UNIT[gemm.c_type] + (2**-10 if gemm.a_type is TF32 else 0) + (2**-8 if gemm.acc_type is F16 else 0)
    scale = a.abs() @ b.abs().t()
    worst = ((c - a @ b.t()).abs() / (unit * scale)).max().item()
    return worst if worst == worst else float("inf")  # a poisoned element of C that nobody wrote


ALIKE = {"sm100-m64", "sm100-column-major", "sm100-tf32", "sm100-f8", "sm90-f32-out"}
"""What is particular to each, others of the default run have, too."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in ALIKE else name for name in CASES]
)
def test_ragged_problem(name):
    """Edges in all three dimensions, several tiles per cluster, several k tiles."""
    assert run(CASES[name], 200, 136, 208, 1) < 1


@pytest.mark.parametrize("seeds", [(0, 1), pytest.param((2,), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "sm100",
        "sm90-multicast",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("sm100-2cta-multicast", "sm90-a-registers")
        ),
    ],
)
def test_any_order_of_asynchronous_work(name, seeds):
    gemm = CASES[name]
    with Emulator(gemm.arch):
        compiled = build.compile_gemm(gemm)
    for mode, seed in product(MODES, seeds):
        if (mode, seed) == ("immediate", 0):
            continue  # as all other tests
        tensors = build.operands(gemm, 264, 136, 264)
        schedule = Schedule(order="random" if seed else "round_robin", lanes=seed > 0)
        with Emulator(gemm.arch, mode=mode, seed=seed, schedule=schedule):
            build.call(compiled, gemm, tensors, 1)
        assert error(gemm, *tensors) < 1, (mode, seed)


def test_a_run_is_a_function_of_its_seed():
    gemm = CASES["sm100"]
    counts = []
    for seed in (3, 3, 4):
        with Emulator(
            gemm.arch, mode="random", seed=seed, schedule=Schedule("random", lanes=True)
        ) as emulator:
            tensors = build.operands(gemm, 200, 72, 200)
            build.call(build.compile_gemm(gemm), gemm, tensors, 1)
        counts.append(emulator.report.instructions)
    assert counts[0] == counts[1] != counts[2]


def _no_swizzle(monkeypatch):
    """Of the matrix units alone: TMA and they would cancel out."""
    plan = smem_desc._tile_plan.__wrapped__
    monkeypatch.setattr(
        smem_desc, "_tile_plan", lambda lbo, sbo, mode, *rest: plan(lbo, sbo, _Plain(mode), *rest)
    )


def _one_percent(monkeypatch):
    widen = formats.widen
    monkeypatch.setattr(formats, "widen", lambda bits, kind: widen(bits, kind) * 0.99)


@pytest.mark.parametrize("broken", [_no_swizzle, _one_percent])
@pytest.mark.parametrize("name", ["sm100", "sm90"])
def test_a_broken_emulator_is_noticed(broken, name, monkeypatch):
    broken(monkeypatch)
    assert run(CASES[name], 200, 72, 200, 1) > 1


class _Plain:
    """A swizzle mode that permutes nothing."""

    def __init__(self, mode):
        self.bits, self.base, self.row_bytes = mode.bits, mode.base, mode.row_bytes

    def apply(self, address):
        return address


def test_the_tolerance_is_tight():
    """The error measure itself: an output off by one bf16 step somewhere must count."""
    gemm = CASES["sm100"]
    a, b, c = build.operands(gemm, 64, 64, 64)
    c.copy_((a.float() @ b.float().t()).to(torch.bfloat16))
    assert error(gemm, a, b, c) < 1
    c[3, 5] += 0.1 * (a.float().abs() @ b.float().abs().t())[3, 5].item()
    assert error(gemm, a, b, c) > 1
