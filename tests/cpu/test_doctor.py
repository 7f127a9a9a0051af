import json

import pytest
import torch
from typer.testing import CliRunner

from overlap_gemm.backends.select import BACKENDS
from overlap_gemm.cli import app, doctor


@pytest.fixture
def run():
    return lambda *arguments: CliRunner().invoke(app, ["doctor", *arguments])


def findings(result) -> dict[str, dict]:
    return {finding["name"]: finding for finding in json.loads(result.stdout)}


def test_a_sound_machine(run):
    result = run("--json")
    assert result.exit_code == 0, result.output
    found = findings(result)
    assert (
        found["torch"]["value"] == torch.__version__.split("+")[0]
        or found["torch"]["value"] == torch.__version__
    )
    assert found["gloo"]["status"] == "ok"
    assert "Open MPI" in found["mpi4py"]["value"]
    assert "sm_90" in found["NVSHMEM device code"]["value"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_no_gpu_is_absent_with_a_reason_not_broken(run):
    found = findings(run("--json"))
    assert found["GPU"]["status"] == "absent"
    assert "torch" in found["GPU"]["value"]
    assert "peer access" not in found


def test_every_backend_of_the_library_is_listed(run):
    found = findings(run("--json"))
    assert found["sequential"]["value"].startswith("usable on")
    assert found["decomposed"]["value"].startswith("usable on")
    assert {backend.name for backend in BACKENDS} <= set(found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_the_fused_backend_says_what_it_needs(run):
    fused = findings(run("--json"))["fused"]
    assert fused["status"] == "absent"
    assert "GPU" in fused["value"]


def test_the_table_names_every_finding(run):
    result = run()
    assert result.exit_code == 0
    for finding in doctor.examine():
        assert finding.name in result.output


def test_something_broken_makes_the_command_fail(run, monkeypatch):
    broken = doctor.Finding("communication", "mpi4py", "finds no MPI library", "broken")
    monkeypatch.setattr(doctor, "PROBES", (lambda: iter([broken]),))
    assert run().exit_code == 1


def test_a_missing_distribution_is_named_as_such():
    assert doctor._distribution("versions", "no-such-distribution").status == "absent"


def test_gpus_peers_and_multicast(monkeypatch):
    class Gpu:
        name, major, minor, total_memory, multi_processor_count = "NVIDIA H200", 9, 0, 141 << 30, 132

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Gpu)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: {a, b} != {0, 2})
    monkeypatch.setattr(
        torch._C._distributed_c10d._SymmetricMemory, "has_multicast_support", lambda kind, index: index != 1
    )
    found = {finding.name: finding for finding in doctor.devices()}
    assert found["GPU 2"].value == "NVIDIA H200, sm_90, 141 GiB, 132 SMs"
    assert found["peer access"].value == "not 0->2, 2->0"
    assert found["NVLS multicast"].value == "not on GPU 1"
