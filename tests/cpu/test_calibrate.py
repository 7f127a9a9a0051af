"""Calibration: a probe that answers with the model's own times gets the model's constants back."""

import math
from dataclasses import replace

import pytest

from overlap_gemm.config.scale_blocks import PROMOTED, OperandTypes
from overlap_gemm.tuning.calibrate import COLLECTIVES, CURVE_BYTES, HOSTS, calibrate
from overlap_gemm.tuning.machine import load
from overlap_gemm.tuning.space import candidates
from overlap_gemm.tuning.time_model import (
    Facts,
    collective_seconds,
    efficiency_key,
    fused_time,
    product_seconds,
)


class ModelProbe:
    """Times of a machine, by the model, and optionally what it cannot measure."""

    def __init__(self, machine, world, without=()):
        self.machine, self.world, self.sms, self.without = machine, world, machine.sms, without

    def _may(self, what):
        if what in self.without:
            raise RuntimeError(f"no {what} here\nand a log")

    def empty(self):
        return self.machine.launch

    def product(self, m, n, k):
        return product_seconds(Facts("gemm_reduce_scatter", m, n, k, "bf16", 1), self.machine, self.sms)

    def gemm(self, config, m, n, k):
        return self.fused(config, m, n, k, world=1)

    def fused(self, config, m, n, k, world=None):
        self._may("fused")
        facts = Facts("gemm_reduce_scatter", m, n, k, config.in_dtype, world or self.world)
        return fused_time(config, facts, self.machine, self.sms).total

    def link(self):
        self._may("link")
        return self.machine.link_rate, self.machine.copy_rate

    def collective(self, name, bytes_out):
        return collective_seconds(name, bytes_out, self.world, self.machine)

    def host(self, way):
        return self.machine.step * (self.world - 1) if way == "decomposed" else self.machine.host[way]


@pytest.fixture
def truth():
    """A machine unlike the shipped one in everything that is measured."""
    machine = load("h200")
    efficiency = {name: round(0.9 * share, 3) for name, share in machine.efficiency.items()}
    efficiency["pingpong 128x128 2x1"] = 1.0
    alone = {name: round(share + 0.1, 3) for name, share in efficiency.items() if "swap_ab" not in name}
    with_blocks = {
        efficiency_key(config): round(0.3 + 0.05 * i, 3)
        for blocks in PROMOTED
        for i, config in enumerate(candidates("sm_90a", OperandTypes("e4m3", blocks), machine))
    }
    return replace(
        machine,
        sms=114,
        mma_rate=500e12,
        memory_rate=2.7e12,
        link_rate=200e9,
        bulk_rate=180e9,
        copy_rate=190e9,
        launch=25e-6,
        arrival=9e-6,
        step=1e-4,
        efficiency=efficiency | with_blocks,
        one_wave=alone | {name: round(share + 0.2, 3) for name, share in with_blocks.items()},
        host={way: (i + 1) * 1e-5 for i, way in enumerate(HOSTS)},
    )


@pytest.mark.parametrize("world", [2, 4, 8])
def test_the_constants_are_found_again(truth, world):
    found = calibrate(ModelProbe(truth, world), load("h200"), "sm_90a")
    assert found.sms == 114
    for name in ("mma_rate", "memory_rate", "link_rate", "copy_rate", "launch", "step"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=1e-3), name
    assert found.bulk_rate == pytest.approx(truth.bulk_rate, rel=0.1)
    assert found.arrival == pytest.approx(truth.arrival, abs=3e-6)
    for name, share in truth.efficiency.items():
        assert found.efficiency[name] == pytest.approx(share, abs=0.003), name
    assert found.one_wave == pytest.approx(truth.one_wave, abs=0.003)
    assert found.host["fused"] == truth.host["fused"]
    for name in COLLECTIVES:
        assert [b for b, _ in found.collectives[name][world]] == list(CURVE_BYTES)
        expected = collective_seconds(name, CURVE_BYTES[-1], world, truth)
        assert collective_seconds(name, CURVE_BYTES[-1], world, found) == pytest.approx(expected)


def test_curves_of_other_worlds_stay(truth):
    found = calibrate(ModelProbe(truth, 2), load("h200"), "sm_90a")
    assert set(found.collectives["reduce_scatter"]) == {2, 4, 8}
    assert found.collectives["reduce_scatter"][8] == load("h200").collectives["reduce_scatter"][8]


def test_one_gpu_measures_what_it_has(truth):
    base = load("h200")
    found = calibrate(ModelProbe(truth, 1), base, "sm_90a")
    assert found.mma_rate == pytest.approx(truth.mma_rate, rel=0.02)
    assert found.host["product"] == truth.host["product"]
    for name in ("link_rate", "bulk_rate", "copy_rate", "arrival", "step", "collectives"):
        assert getattr(found, name) == getattr(base, name)


def test_what_cannot_be_measured_stays_and_is_said(truth):
    base, lines = load("h200"), []
    found = calibrate(ModelProbe(truth, 4, without=("link",)), base, "sm_90a", lines.append)
    assert found.link_rate == base.link_rate
    assert found.mma_rate == pytest.approx(truth.mma_rate, rel=0.02)
    assert "  not measured, unchanged: no link here" in lines


def test_a_curve_never_falls(truth):
    class Noisy(ModelProbe):
        def collective(self, name, bytes_out):
            return 1e-5 if bytes_out == CURVE_BYTES[2] else 1e-4 * math.log2(bytes_out)

    curve = calibrate(Noisy(truth, 4), load("h200"), "sm_90a").collectives["all_gather"][4]
    assert list(curve) == sorted(curve) and curve[2][1] == curve[1][1]


def test_times_that_contradict_each_other_change_nothing(truth):
    class Backwards(ModelProbe):
        def fused(self, config, m, n, k, world=None):
            return 1e-3 if m == 8192 and world is None else super().fused(config, m, n, k, world) + 2e-3

    base, lines = load("h200"), []
    found = calibrate(Backwards(truth, 4), base, "sm_90a", lines.append)
    assert found.bulk_rate == base.bulk_rate
    assert any("contradict each other" in line for line in lines)


def test_single_waves_that_cannot_be_told_apart_leave_the_kernels_rates(truth):
    class Flat(ModelProbe):
        def gemm(self, config, m, n, k):
            return super().gemm(config, m, n, 8192 if m < 4096 else k)

    base, lines = load("h200"), []
    found = calibrate(Flat(truth, 4), base, "sm_90a", lines.append)
    assert found.one_wave == base.one_wave
    assert (found.sms, found.mma_rate) == (114, pytest.approx(truth.mma_rate, rel=1e-3))
    said = lines.index("kernels, one wave")
    assert "contradict each other" in lines[said + 1]
