"""Constants of devices without a file of their own: shipped for H100, scaled by the driver for others."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from overlap_gemm.tuning import driver, machine
from overlap_gemm.tuning.driver import DriverFacts, driver_facts
from overlap_gemm.tuning.machine import SHIPPED, SOURCES, load, machine_for, scaled, why_uncalibrated
from overlap_gemm.tuning.prediction import predict_on
from overlap_gemm.tuning.time_model import Facts

H100 = "NVIDIA H100 80GB HBM3"
H20 = DriverFacts(78, 1.98e9, 4.0e12, 500.0, 18)
PCIE = DriverFacts(114, 1.755e9, 2.04e12, 350.0, 0)


@pytest.fixture(autouse=True)
def _fresh_constants(monkeypatch, tmp_path):
    monkeypatch.setattr(machine.platformdirs, "user_config_dir", lambda name: str(tmp_path / name))
    machine_for.cache_clear()
    yield
    machine_for.cache_clear()


def present(monkeypatch, name, facts):
    """A machine whose device has that name, and whose driver states these figures."""
    monkeypatch.setattr(machine, "device_name", lambda arch: name)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(machine, "driver_facts", lambda index: facts)
    machine_for.cache_clear()


def test_every_shipped_file_is_a_source():
    assert {file.stem for file in SHIPPED.glob("*.json")} == set(SOURCES)
    assert machine_for("sm_90a", "").name == "NVIDIA H200", "of no device, as in the emulator"


def test_the_shipped_constants_of_h100_are_those_of_its_name():
    found = machine_for("sm_90a", H100)
    assert (found.name, found.source) == (H100, "measured") and why_uncalibrated("sm_90a", H100) is None
    assert found.why_uncalibrated_bytes() is None, "8-bit calls are compared"
    assert all(found.provenance[name] for name in ("bytes_rate", "promoted_rate", "blocks_rate"))


def test_constants_of_h100_choose_wide_tiles_for_a_long_k():
    """H200's choose ping-pong 128x128, which took 3902 us on two H100 where cooperative 128x256 took 2959."""
    call = Facts("gemm_reduce_scatter", 8192, 8192, 28672, "bf16", 2)
    config = predict_on(call, load("h100"), "sm_90a", 132, captured=True).config
    assert (config.mma, config.tile) == ("cooperative", (128, 256))


def test_constants_of_an_h20_are_scaled_by_its_driver(monkeypatch):
    present(monkeypatch, "NVIDIA H20", H20)
    found, base = machine_for("sm_90a", "NVIDIA H20"), load("h100")
    assert (found.name, found.source, found.sms) == ("NVIDIA H20", "scaled", 78)
    assert found.memory_rate == pytest.approx(base.memory_rate * 4.0 / 3.352, rel=1e-3)
    assert found.mma_rate < 148e12, "tensor cores are limited, which the driver does not state"
    assert found.link_rate == pytest.approx(base.link_rate) and found.efficiency == base.efficiency
    why = why_uncalibrated("sm_90a", "NVIDIA H20")
    assert f"scaled from {H100}'s by the driver's figures are a prior for measurements" in why


def test_a_card_without_nvlink_has_links_of_pcie_and_its_power_limit(monkeypatch):
    present(monkeypatch, "NVIDIA H100 PCIe", PCIE)
    found, base = machine_for("sm_90a", "NVIDIA H100 PCIe"), load("h100")
    assert found.link_rate == pytest.approx(machine.PCIE_RATE)
    assert found.mma_rate == pytest.approx(base.mma_rate * 350 / 700, rel=1e-3), "less than SMs times clock"
    points = [curves["all_reduce"][2] for curves in (found.collectives, base.collectives)]
    assert points[0][0][1] == points[1][0][1], "a latency stays"
    assert points[0][-1][1] > 5 * points[1][-1][1]


def test_without_nvml_power_and_links_stay_those_of_the_measured_device():
    base = load("h200")
    found = scaled(base, "NVIDIA H200 NVL", DriverFacts(132, 1.98e9, 4.917e12))
    assert (found.mma_rate, found.link_rate) == (base.mma_rate, base.link_rate)
    assert found.digest != base.digest and found.is_of("NVIDIA H200 NVL") is False


def test_memory_says_which_measured_device_is_nearest(monkeypatch):
    for memory, nearest in ((3.9e12, "h100"), (4.9e12, "h200")):
        present(monkeypatch, "NVIDIA GH200", DriverFacts(132, 1.98e9, memory, 900.0, 18))
        assert machine_for("sm_90a", "NVIDIA GH200").efficiency == load(nearest).efficiency


class Nvml:
    """Stands for the library: 400 W, links 0 to 11 are up."""

    def __init__(self, status=0):
        self.status = status

    def nvmlInit_v2(self):
        return self.status

    def nvmlShutdown(self):
        return 0

    def nvmlDeviceGetHandleByUUID(self, name, device):
        return 0 if name.value == b"GPU-u" else 6

    def nvmlDeviceGetPowerManagementDefaultLimit(self, device, limit):
        limit._obj.value = 400_000
        return 0

    def nvmlDeviceGetEnforcedPowerLimit(self, device, limit):
        limit._obj.value = 350_000
        return 0

    def nvmlDeviceGetNvLinkState(self, device, link, state):
        state._obj.value = 1
        return 0 if link.value < 12 else 3


@pytest.mark.parametrize(
    ("library", "power", "links", "limit"),
    [(Nvml(), 400.0, 12, 350), (Nvml(status=9), 0.0, -1, 0), (None, 0.0, -1, 0)],
)
def test_the_drivers_figures_are_read_with_and_without_nvml(monkeypatch, library, power, links, limit):
    gpu = SimpleNamespace(
        multi_processor_count=114,
        clock_rate=1755000,
        memory_clock_rate=1593000,
        memory_bus_width=5120,
        uuid="u",
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)

    def load_library(name):
        if library is None:
            raise OSError("no such library")
        return library

    monkeypatch.setattr(ctypes, "CDLL", load_library)
    found = driver_facts(0)
    assert found == DriverFacts(114, 1.755e9, pytest.approx(2.039e12, rel=1e-3), power, links)
    assert driver.power_limit(0) == limit
