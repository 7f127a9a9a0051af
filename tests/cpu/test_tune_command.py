"""`overlap-gemm tune` around a probe that needs no GPU; the GPUs' own runs in tests/gpu."""

import json

import pytest
import torch
from typer.testing import CliRunner

import overlap_gemm
from overlap_gemm.cli import app, tune
from overlap_gemm.runtime.bootstrap import World
from overlap_gemm.tuning import machine
from overlap_gemm.tuning.calibrate import HOSTS
from overlap_gemm.tuning.machine import load, machine_for, why_uncalibrated


@pytest.fixture(autouse=True)
def _fresh_constants(monkeypatch, tmp_path):
    monkeypatch.setattr(machine.platformdirs, "user_config_dir", lambda name: str(tmp_path / name))
    machine_for.cache_clear()
    yield
    machine_for.cache_clear()


class SlowHost:
    """A GPU whose kernels take a second and whose host takes ten; nothing else can be measured."""

    def __init__(self, group, device, rounds):
        self.world, self.sms = group.size, 100

    def empty(self):
        return 1e-6

    def product(self, m, n, k):
        return 1.0

    def gemm(self, config, m, n, k):
        return 1.0 if config.mma == "pingpong" else 2.0

    def host(self, way):
        return 10.0


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(tune, "this_arch", lambda: "sm_90a")
    monkeypatch.setattr(tune, "device_name", lambda arch: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(tune, "GpuProbe", SlowHost)
    world = World(0, 1, 0, torch.device("cpu"), "alone")
    monkeypatch.setattr(overlap_gemm, "init", lambda device: world)


def run(*arguments):
    return CliRunner().invoke(app, ["tune", *map(str, arguments)])


def test_without_a_gpu_one_line_says_so():
    result = run()
    assert result.exit_code == 1
    assert result.output.strip() == "tune measures Hopper or Blackwell GPUs, and torch sees none here"


def test_the_file_is_the_users_and_read_from_then_on(gpu):
    result = run()
    assert result.exit_code == 0, result.output
    file = machine.user_file("NVIDIA H100 80GB HBM3")
    assert file.name == "nvidia-h100-80gb-hbm3.json"
    found = load(str(file))
    assert (found.source, found.sms, found.host["product"]) == ("measured", 100, 10.0)
    assert found.link_rate == load("h200").link_rate, "one rank measures no link"
    assert set(found.host) == set(HOSTS)
    assert not list(file.parent.glob(".*")), "written at once"
    machine_for.cache_clear()
    assert machine_for("sm_90a", "NVIDIA H100 80GB HBM3").digest == found.digest
    assert machine_for("sm_90a", "NVIDIA H20").digest == load("h200").digest
    assert why_uncalibrated("sm_90a", "NVIDIA H100 80GB HBM3") is None
    assert "host product" in result.output


def test_a_named_file_is_written_and_said_how_to_use(gpu, tmp_path):
    result = run("--out", tmp_path / "mine.json")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "mine.json").read_text())["sms"] == 100
    assert "OVERLAP_GEMM_MACHINE=" in result.output
    assert not machine.user_file("NVIDIA H100 80GB HBM3").exists()


def test_a_folder_that_cannot_be_is_refused_before_anything_is_measured(gpu, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(tune, "calibrate", lambda *_: pytest.fail("measured"))
    result = run("--out", tmp_path / "file" / "mine.json")
    assert result.exit_code == 1
    assert str(tmp_path / "file") in result.output
