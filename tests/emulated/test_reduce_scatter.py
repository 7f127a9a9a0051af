"""GEMM reduce-scatter through the public op on virtual ranks: compiled PTX, run in the emulator."""

import pytest
import torch

from cute_emulator import Emulator
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.testing.cases import Case
from overlap_gemm.testing.emulated import judge, run_launches
from overlap_gemm.tuning.settings import configured
from tests.support.chosen import in_turn

KINDS = {
    "sm_100a": [
        {"mma": "1cta", "tile": (128, 64)},
        {"mma": "1cta", "tile": (128, 128)},
        {"mma": "2cta", "tile": (256, 128), "cluster": (2, 1)},
    ],
    "sm_90a": [
        {"mma": "pingpong", "tile": (64, 128), "cluster": (1, 1)},
        {"mma": "cooperative", "tile": (128, 128)},
        {"mma": "pingpong", "tile": (128, 128), "cluster": (2, 1)},
        {"mma": "cooperative", "tile": (128, 256), "cluster": (1, 2)},
    ],
}
CONFIGS = [(arch, fields) for arch, choices in KINDS.items() for fields in choices]


def name(arch, fields):
    sizes = ("x".join(map(str, fields[field])) for field in ("tile", "cluster") if field in fields)
    return "-".join((arch, fields["mma"], *sizes))


NAMES = [name(arch, fields) for arch, fields in CONFIGS]

ONE_OF_EACH = [NAMES[number] for number in (0, 2, 3, 6)]
"""Each kind of MMA once."""

QUICK = [(NAMES[-1], 4)]
"""One rank's kernel is a plain GEMM, as in test_kernels.py; two and three ranks have the tests below."""

RAGGED = (200, 136, 72)
SHAPES = {
    "fewer-rows-than-ranks": (2, 64, 64),
    "narrow": (130, 8, 64),
}


def run(arch, fields, ranks, sizes, *, mode="immediate", seed=0, launches=1, dtype=torch.bfloat16, **options):
    case = Case("gemm_reduce_scatter", *sizes, dtype, seed=seed)
    slot = {"f32": torch.float32}.get(fields.get("slot_dtype", ""), dtype)
    with (
        configured(**fields),
        Emulator(arch, ranks, mode, seed, **options) as emulator,
        VirtualWorld(ranks, emulator=emulator) as world,
    ):
        verdicts = [judge(case, given, outs, slot) for given, outs in run_launches(case, world, launches)]
    assert len(verdicts) == launches
    assert all(verdict.holds for verdict in verdicts), verdicts
    return emulator.report


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        pytest.param(kind, ranks, marks=[] if (kind, ranks) in QUICK else pytest.mark.slow)
        for kind in NAMES
        for ranks in (1, 2, 3, 4)
    ],
)
def test_every_kernel_on_every_world(kind, ranks):
    run(*CONFIGS[NAMES.index(kind)], ranks, RAGGED)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "fields"), CONFIGS, ids=NAMES)
def test_every_kernel_in_f16(arch, fields):
    """With a bias, as all of these; the last of N = 136 columns fill no tile, nor half of a subtile.

    The other kinds of MMA in f16 are `test_types`'.
    """
    run(arch, fields, 2, RAGGED, dtype=torch.float16)


@pytest.mark.parametrize(("shape", "kind"), in_turn(SHAPES, NAMES[::3]))
def test_every_shape(shape, kind):
    run(*CONFIGS[NAMES.index(kind)], 3, SHAPES[shape])


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *in_turn(ONE_OF_EACH, ["random", "lazy"]),
        *(
            pytest.param(kind, mode, marks=pytest.mark.slow)
            for kind in NAMES
            if kind not in ONE_OF_EACH
            for mode in ("random", "lazy")
        ),
    ],
)
def test_whenever_asynchronous_operations_complete(kind, mode, seed):
    run(*CONFIGS[NAMES.index(kind)], 2, RAGGED, mode=mode, seed=seed, launches=2)


@pytest.mark.parametrize(
    ("slot", "dtype", "arch"),
    in_turn([("same", torch.float16), ("f32", torch.bfloat16), ("f32", torch.float16)], KINDS),
    ids=str,
)
def test_types(arch, slot, dtype):
    name = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    fields = {**KINDS[arch][0], "slot_dtype": name if slot == "same" else slot}
    run(arch, fields, 3, RAGGED, dtype=dtype)
