"""Products of 8-bit types, scaled by row and column: plain, and through the exchange of partial sums."""

import dataclasses

import pytest
import torch
from cutlass import cute

from cute_emulator import Emulator, EmulatorError
from overlap_gemm.config.arch import ARCHS
from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.config.visitors import SCALES, bias_of
from overlap_gemm.mainloop import blocks
from overlap_gemm.mainloop.blocks import StageScales, setup
from overlap_gemm.transports import PeerBulk
from tests.support.chosen import in_turn
from tests.support.emulated.kernel_cases import KernelCase, compiled_kernel, launched

SCALED = (SCALES,)
CONFIGS = [
    GemmConfig("sm_90a", (64, 128), mma="pingpong", in_dtype="e4m3", epilogue=SCALED),
    GemmConfig("sm_90a", (128, 256), (1, 2), mma="cooperative", in_dtype="e4m3", epilogue=SCALED),
    GemmConfig(
        "sm_90a", (32, 64), mma="swap_ab", in_dtype="e5m2", b_dtype="e4m3", epilogue=SCALED, k_split=2
    ),
    GemmConfig("sm_90a", (128, 128), mma="pingpong", in_dtype="e4m3", epilogue=SCALED, fast_accum=True),
    GemmConfig("sm_90a", (64, 128), mma="pingpong", in_dtype="e5m2", slot_dtype="f32", out_dtype="f32"),
    GemmConfig("sm_100a", (128, 128), mma="1cta", in_dtype="e4m3", epilogue=(*SCALED, bias_of("bf16"))),
    GemmConfig("sm_100a", (256, 128), (2, 1), mma="2cta", in_dtype="e4m3", epilogue=SCALED),
    GemmConfig("sm_100a", (32, 64), mma="swap_ab", in_dtype="e4m3", b_dtype="e5m2", epilogue=SCALED),
]


@pytest.mark.parametrize(
    ("config", "world"),
    [
        *in_turn([c for c in CONFIGS if not c.fast_accum], (3, 1)),
        *((c, 1) for c in CONFIGS if c.fast_accum),
    ],
    ids=lambda given: given.name if isinstance(given, GemmConfig) else f"P{given}",
)
def test_rows_and_columns_are_scaled(config, world):
    tile_m, tile_n = config.cluster_tile
    launched(
        config, PeerBulk() if world > 1 else None, world, rows=tile_m + 9, cols=tile_n + 24, depth=336
    ).check()


BLOCKS = (1, 128, 128)
BLOCKED = [
    GemmConfig("sm_90a", (64, 128), (2, 1), "pingpong", in_dtype="e4m3", blocks=BLOCKS),
    GemmConfig("sm_90a", (64, 128), (1, 1), "pingpong", in_dtype="e5m2", blocks=BLOCKS),
    GemmConfig(
        "sm_90a",
        (128, 128),
        (1, 2),
        "cooperative",
        in_dtype="e4m3",
        blocks=BLOCKS,
        epilogue=(bias_of("bf16"),),
    ),
    GemmConfig("sm_90a", (128, 256), (2, 1), "cooperative", in_dtype="e4m3", blocks=BLOCKS),
    GemmConfig("sm_90a", (64, 128), (2, 1), "pingpong", in_dtype="e4m3", blocks=(1, 32, 32)),
]


@pytest.mark.parametrize(
    ("config", "world"),
    [
        *in_turn(BLOCKED[1:4], (1, 3)),
        *((c, 1) for c in BLOCKED[4:]),
    ],
    ids=lambda given: given.name if isinstance(given, GemmConfig) else f"P{given}",
)
def test_blocks_are_scaled_as_they_are_promoted(config, world):
    """Rows, columns and K that end inside a block and inside a tile; the first kernel is in the next test."""
    tile_m, tile_n = config.cluster_tile
    transport = PeerBulk() if world > 1 else None
    launched(config, transport, world, rows=2 * tile_m + 9, cols=tile_n + 24, depth=464).check()


@pytest.mark.parametrize(
    "config",
    [BLOCKED[0], *(pytest.param(config, marks=pytest.mark.slow) for config in BLOCKED[1:3])],
    ids=lambda config: config.name,
)
def test_scales_follow_from_tile_to_tile(config):
    """More k tiles than stages, and several tiles for each group of warps."""
    launched(config, None, 1, rows=300, cols=280, depth=1232).check()


@pytest.mark.slow
@pytest.mark.usefixtures("changed_kernels")
def test_scales_without_a_stage_of_their_own_are_noticed(monkeypatch):
    """Copied over those that are still to be read."""

    def at_one_place(config, smem):
        of_a, of_b = setup(config, smem)
        layout = cute.make_layout(of_a.shape, stride=(*of_a.stride[:2], 0))
        return StageScales(cute.make_tensor(of_a.iterator, layout), of_b)

    monkeypatch.setattr(blocks, "setup", at_one_place)
    with pytest.raises((AssertionError, EmulatorError)):
        launched(BLOCKED[1], None, 1, rows=300, cols=280, depth=1232).check()


SPOILED = {
    "no scale of A": lambda a, b: (torch.ones_like(a), b),
    "no scale of B": lambda a, b: (a, torch.ones_like(b)),
    "the next row's": lambda a, b: (a.roll(1, 0), b),
    "the next block of columns'": lambda a, b: (a, b.roll(1, 0)),
    "the next block of K": lambda a, b: (a.roll(1, 1), b),
}


@pytest.mark.parametrize(
    ("way", "config"),
    in_turn(SPOILED, [BLOCKED[0], BLOCKED[3]]),
    ids=lambda given: given if isinstance(given, str) else given.name,
)
def test_a_scale_of_another_block_is_noticed(way, config):
    case = launched(config, None, 1, rows=64, cols=136, depth=272)
    case.check()
    case.scales = [SPOILED[way](*scales) for scales in case.scales]
    with pytest.raises(AssertionError, match="wrong, at"):
        case.check()


def lost(fast_accum):
    """What of positive sums over K = 28672 is lost, as a share."""
    config = GemmConfig("sm_90a", (64, 128), mma="pingpong", in_dtype="e4m3", fast_accum=fast_accum)
    case = KernelCase(dataclasses.replace(config, out_dtype="f32", slot_dtype="f32"), 64, 128, 28672)
    for operands in (case.a, case.b):
        operands[0] = operands[0].float().abs().clamp(0.5, 2).to(torch.float8_e4m3fn)
    with Emulator("sm_90a") as emulator:
        case.launch(emulator, compiled_kernel(case.config))
    exact = case.a[0].double() @ case.b[0].double().t()
    return float((1 - case.outs[0].double() / exact).max())


def test_long_sums_need_the_promotion():
    assert 0 <= lost(fast_accum=False) < 2**-10
    assert lost(fast_accum=True) > 0.2


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        (
            {"tile": (128, 128)},
            "1x1 has 128 accumulators a thread; where sums are promoted .* for 64, or for 128",
        ),
        ({"tile": (128, 256), "mma": "cooperative"}, "128 of cooperative kernels in clusters of two"),
        ({"tile": (64, 256), "cluster": (2, 1)}, "128 of cooperative kernels in clusters of two"),
        ({"blocks": (1, 64, 128)}, r"blocks must be one of .*; got \(1, 64, 128\)"),
        ({"blocks": BLOCKS, "fast_accum": True}, "for kernels that promote, .* fast_accum=True"),
        ({"blocks": BLOCKS, "mma": "swap_ab", "tile": (32, 64)}, "not swap_ab; got mma='swap_ab'"),
        ({"blocks": BLOCKS, "arch": "sm_100a", "mma": "1cta", "tile": (128, 128)}, "kernels that promote"),
        ({"b_dtype": "e4m3"}, "b_dtype where in_dtype='e4m3' must be one of None, e5m2; got e4m3"),
        ({"in_dtype": "bf16", "b_dtype": "e4m3"}, "b_dtype where in_dtype='bf16' must be one of None; got"),
        ({"a_major": "m"}, "a_major must be one of k; got m"),
        ({"b_major": "n"}, "b_major must be one of k; got n"),
        ({"out_dtype": "e4m3"}, "out_dtype for mma='pingpong' must be one of bf16, f16, f32; got e4m3"),
        ({"in_dtype": "bf16", "fast_accum": True}, "fast_accum is for 8-bit types; got in_dtype='bf16'"),
    ],
)
def test_what_there_is_no_kernel_for_is_refused_by_rule(fields, rule):
    base = {"arch": "sm_90a", "tile": (64, 128), "mma": "pingpong", "in_dtype": "e4m3"}
    with pytest.raises(ValueError, match=rule):
        GemmConfig(**{**base, **fields})


def test_blackwell_takes_either_major():
    assert not ARCHS["sm_100a"].bytes_k_major
    config = GemmConfig("sm_100a", (128, 64), in_dtype="e4m3", a_major="m", b_major="n", epilogue=SCALED)
    launched(config, None, 1, rows=144, cols=80, depth=192).check()
