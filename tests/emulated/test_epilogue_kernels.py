"""Epilogues in kernels: every kind of input and output, on complete and partial sums, against float64."""

from dataclasses import replace

import pytest
import torch

from overlap_gemm import epilogue, epilogues
from overlap_gemm.build import make_kernel
from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.config.visitors import Visitor, bias_of
from overlap_gemm.epilogues import silu, swiglu_e4m3, to_e4m3
from overlap_gemm.exchange.sums import Sums
from overlap_gemm.transports import PeerBulk
from tests.support.chosen import in_turn
from tests.support.emulated.kernel_cases import launched


def affine(x, residual, gamma, rstd, alpha):
    return alpha * x * rstd * gamma + residual


KINDS = {"residual": "element", "gamma": "columns", "rstd": "rows", "alpha": "scalar"}

READS = Visitor(epilogue(affine, inputs=KINDS), ("bf16", "f32", "f32", "f32"))


@epilogue(inputs={"residual": "element"}, outputs={"twice": "element", "sums": "row_sum", "most": "row_max"})
def stream(x, residual):
    y = x + residual
    return y, 2 * y, y * y, abs(y)


WRITES = Visitor(stream, ("f32", "f16"))

CONFIGS = [
    GemmConfig("sm_90a", (64, 128), mma="pingpong"),
    GemmConfig("sm_100a", (128, 64), mma="1cta"),
    GemmConfig("sm_90a", (128, 128), mma="cooperative", cluster=(2, 1)),
    GemmConfig("sm_100a", (256, 128), mma="2cta", cluster=(2, 1)),
    GemmConfig("sm_90a", (16, 64), mma="swap_ab"),
    GemmConfig("sm_90a", (64, 128), mma="pingpong", out_dtype="f32", slot_dtype="f32"),
    GemmConfig("sm_100a", (32, 64), mma="swap_ab"),
]
SIZES = {"rows": 150, "cols": 152, "depth": 72}


@pytest.mark.parametrize(
    "config", [one for one in CONFIGS if one.out_dtype != "f32"], ids=lambda config: config.name
)
def test_the_ring_reads_every_kind_of_input(config):
    launched(replace(config, epilogue=(READS,)), None, 1, **SIZES).check()


@pytest.mark.parametrize(
    ("config", "visitor", "world"),
    in_turn([one for one in CONFIGS if one.cluster == (1, 1)], (WRITES, READS), (2, 3, 4)),
    ids=lambda one: getattr(one, "name", str(one)),
)
def test_the_receive_role_reads_and_writes_every_kind(config, visitor, world):
    launched(replace(config, epilogue=(visitor,)), PeerBulk(), world, **SIZES).check()


@epilogue(inputs={"residual": "element", "gamma": "columns"}, pairs=True)
def gated(gate, up, residual, gamma):
    return silu(gate) * up * gamma + residual


@pytest.mark.parametrize("config", CONFIGS[1:3], ids=lambda one: one.name)
def test_pairs_of_columns(config):
    """The kinds of MMA that the next test has not."""
    visitors = bias_of("bf16"), Visitor(gated, ("bf16", "f32"))
    launched(replace(config, epilogue=visitors), None, 1, rows=150, cols=192, depth=72).check()


@pytest.mark.parametrize(
    ("config", "seed"),
    in_turn(CONFIGS[:4:3], [0, 1]),
    ids=lambda one: one.name if isinstance(one, GemmConfig) else ("gate-first", "up-first")[one],
)
def test_pairs_of_columns_of_two_weights(config, seed):
    config = replace(config, epilogue=(Visitor(gated, ("bf16", "f32"), of_two_weights=True),))
    launched(config, None, 1, rows=150, cols=192, depth=72, seed=seed).check()


@pytest.mark.parametrize(("config", "one", "world"), [
    (CONFIGS[0], swiglu_e4m3, 1), (CONFIGS[1], to_e4m3, 1), (CONFIGS[2], to_e4m3, 2),
], ids=lambda one: getattr(one, "name", str(one)))  # fmt: skip
def test_results_of_8_bits_are_rounded_once_and_saturated(config, one, world):
    """Checks TMA stores of subtiles, and the receive role's of chunks; the seed's scale is 0.0256."""
    config = replace(config, epilogue=(Visitor(one, ("f32",)),), out_dtype="e4m3")
    transport = None if world == 1 else PeerBulk()
    case = launched(config, transport, world, rows=150, cols=192, depth=72, seed=187)
    case.check()
    largest = torch.cat([out.float().abs() == 448 for out in case.outs])
    assert 0.1 < largest.float().mean() < 0.6


def test_pairs_are_of_kernels_with_narrow_subtiles():
    with pytest.raises(ValueError, match="an epilogue of pairs is the last one, .* not mma='swap_ab'"):
        GemmConfig("sm_90a", (16, 64), mma="swap_ab", epilogue=(Visitor(gated, ("bf16", "f32")),))
    with pytest.raises(ValueError, match="with epilogues gated, add_bias"):
        replace(CONFIGS[0], epilogue=(Visitor(gated, ("bf16", "f32")), bias_of("bf16")))
    with pytest.raises(ValueError, match="which sends result tiles"):
        make_kernel(replace(CONFIGS[0], epilogue=(Visitor(gated, ("bf16", "f32")),)), PeerBulk())


@pytest.mark.parametrize(
    ("arch", "dtype", "one", "window", "sent_on"),
    [
        ("sm_90a", "bf16", None, 4, 4),
        ("sm_90a", "bf16", "add_residual", 4, 2),
        ("sm_90a", "bf16", "add_residual_squared", 4, 2),
        ("sm_90a", "e4m3", None, 2, 2),
        ("sm_90a", "e4m3", "add_residual", 2, 1),
        ("sm_100a", "bf16", "add_residual", 4, 2),
        ("sm_100a", "bf16", "add_residual_squared", 2, 2),
    ],
)
def test_an_input_takes_no_chunk_in_flight_from_two_ranks_sums(arch, dtype, one, window, sent_on):
    # With half as many in flight, an 8-bit call took 1.13 of the op alone on an H200, not 1.07.
    visitors = () if one is None else (Visitor(getattr(epilogues, one), ("bf16",)),)
    tiles = {"mma": "cooperative" if arch == "sm_90a" else "1cta", "tile": (128, 128)}
    types = {"in_dtype": dtype, "out_dtype": "bf16", "slot_dtype": "bf16"}
    sums = Sums(GemmConfig(arch=arch, epilogue=visitors, **tiles, **types), None, 0, PeerBulk())
    assert sums._window(2) == window
    assert replace(sums, results=True)._window(2) == sent_on
