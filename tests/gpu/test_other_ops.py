"""The other three fused ops on GPUs: virtual ranks on one, a GPU per rank; among each other, in graphs."""

import random

import pytest
import torch

from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.testing.cases import LAYOUTS, Case, operands
from overlap_gemm.testing.emulated import judge, run_launches
from overlap_gemm.tuning.settings import configured
from tests.support.gradients import forward_and_backward
from tests.support.hopper import HOPPER_KERNELS
from tests.support.launches import replays, sequence
from tests.support.ops import SHARDED
from tests.support.references import reference
from tests.support.shares import own_device
from tests.support.tolerances import tolerance

OTHERS = {
    "all_gather_gemm-copy_engine": ("all_gather_gemm", {"shard_transport": "copy_engine"}),
    "all_gather_gemm-peer_bulk": ("all_gather_gemm", {"shard_transport": "peer_bulk"}),
    "gemm_all_reduce-one_shot": ("gemm_all_reduce", {"algorithm": "one_shot"}),
    "gemm_all_reduce-two_shot": ("gemm_all_reduce", {"algorithm": "two_shot"}),
    "gemm_all_gather": ("gemm_all_gather", {}),
}
WORLDS = [size for size in (2, 4, 8) if size <= torch.cuda.device_count()]
SHAPES = {"even": (1024, 512, 512), "ragged": (200, 128, 72), "fewer-rows-than-ranks": (1, 64, 64)}
MANY_TILES = 4096, 4096, 2048

others = pytest.mark.parametrize("other", OTHERS)
worlds = pytest.mark.parametrize("world", WORLDS)


# --- virtual ranks on one GPU ---


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("kernel", HOPPER_KERNELS)
@others
def test_virtual_ranks(device, other, kernel, size):
    op, fields = OTHERS[other]
    case = Case(op, 520, 512, 200, torch.bfloat16)
    slot = torch.float32 if HOPPER_KERNELS[kernel].get("slot_dtype") == "f32" else torch.bfloat16
    with configured(**fields, **HOPPER_KERNELS[kernel]), VirtualWorld(size, device=device) as world:
        verdicts = [judge(case, given, outs, slot) for given, outs in run_launches(case, world, 4)]
    assert all(verdict.holds for verdict in verdicts), verdicts


# --- a GPU per rank ---


def random_cases(seed, size, count=24, ops=tuple(SHARDED)):
    """Calls of any op and shape, each likely to follow each other."""
    draw = random.Random(seed)
    rows = [1, 2, size - 1, size, 64, 130, 256 * size, 2048]
    shapes = [
        (draw.choice(rows), draw.choice([8, 64, 512]) * size, draw.choice([64, 200])) for _ in range(count)
    ]
    return [Case(draw.choice(ops), *shape, torch.bfloat16, seed=i) for i, shape in enumerate(shapes)]


def ways_of(cases, transport):
    """Returns the settings of each case; the copy engine only gathers x."""
    is_for_all = transport != "copy_engine"
    return [{"transport": transport} if is_for_all or case.op == "all_gather_gemm" else {} for case in cases]


def gradients(rank, size, case, fields):
    """Forward and input gradient against float64."""
    given, layout = operands(case).to(own_device(rank)), LAYOUTS[case.op]
    exact, baseline = reference(given), reference(given, case.dtype)
    with configured(**fields):
        results = list(forward_and_backward(case.op, given, rank, size, "fused"))
    for name, result, dim, roundings in results:
        if name == "weight":
            continue  # torch's own product, of another shape than the reference's: test_many_gpus judges it
        truth = layout.part(getattr(exact, name), dim, rank, size)
        allowed = tolerance(getattr(baseline, name), getattr(exact, name), roundings)
        error = (result.double() - truth).abs().max().item() if truth.numel() else 0.0
        assert error <= allowed, f"{name}: largest error {error:.3g}, allowed {allowed:.3g}"


@worlds
@pytest.mark.parametrize("shape", [*SHAPES, "many-tiles"])
@others
def test_shapes(ranks, other, shape, world):
    op, fields = OTHERS[other]
    cases = [Case(op, *{**SHAPES, "many-tiles": MANY_TILES}[shape], torch.bfloat16, seed=i) for i in range(4)]
    ranks(world).run(sequence, cases, [fields])


@worlds
@pytest.mark.parametrize("late", [None, 0, 1])
@pytest.mark.parametrize("transport", ["copy_engine", "peer_bulk"])
@pytest.mark.parametrize("seed", range(3))
def test_random_sequences_of_all_ops(ranks, seed, transport, late, world):
    cases = random_cases(seed, world)
    ranks(world).run(sequence, cases, ways_of(cases, transport), late)


@worlds
@pytest.mark.parametrize("transport", ["copy_engine", "peer_bulk"])
def test_replays_of_all_ops(ranks, transport, world):
    cases = [Case(op, 512, 256, 200, torch.bfloat16, bias=False) for op in (*SHARDED, "all_gather_gemm")]
    ranks(world).run(replays, cases, ways_of(cases, transport), 10)


@worlds
@pytest.mark.parametrize("shape", SHAPES)
@others
def test_gradients(ranks, other, shape, world):
    op, fields = OTHERS[other]
    ranks(world).run(gradients, Case(op, *SHAPES[shape], torch.bfloat16), fields)
