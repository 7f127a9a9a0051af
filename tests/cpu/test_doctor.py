import importlib.metadata
import json
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from overlap_gemm.api import statistics
from overlap_gemm.backends.select import BACKENDS
from overlap_gemm.cli import app, doctor


@pytest.fixture
def run():
    return lambda *arguments: CliRunner().invoke(app, ["doctor", *arguments])


def findings(result) -> dict[tuple[str, str], dict]:
    return {(finding["section"], finding["name"]): finding for finding in json.loads(result.stdout)}


def test_a_sound_machine(run):
    result = run("--json")
    assert result.exit_code == 0, result.output
    found = findings(result)
    assert (
        found["versions", "torch"]["value"] == torch.__version__.split("+")[0]
        or found["versions", "torch"]["value"] == torch.__version__
    )
    assert found["communication", "gloo"]["status"] == "ok"
    assert "Open MPI" in found["communication", "mpi4py"]["value"]
    assert "sm_90" in found["communication", "NVSHMEM device code"]["value"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_no_gpu_is_absent_with_a_reason_not_broken(run):
    found = findings(run("--json"))
    assert found["devices", "GPU"]["status"] == "absent"
    assert "torch" in found["devices", "GPU"]["value"]
    assert ("devices", "peer access") not in found


def test_every_backend_of_the_library_is_listed(run):
    found = findings(run("--json"))
    assert found["backends", "sequential"]["value"].startswith("usable on")
    assert found["backends", "decomposed"]["value"].startswith("usable on")
    assert {("backends", backend.name) for backend in BACKENDS} <= set(found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_the_fused_backend_says_what_it_needs(run):
    fused = findings(run("--json"))["backends", "fused"]
    assert fused["status"] == "absent"
    assert "GPU" in fused["value"]


def test_symmetric_memory_is_listed_by_owner_with_its_limit(run, monkeypatch):
    monkeypatch.setenv("OVERLAP_GEMM_WORKSPACE_LIMIT", "3GiB")
    report = findings(run("--json"))
    assert report["symmetric memory", "limit of a process"]["value"].startswith("3 GiB of torch's memory")
    assert report["symmetric memory", "groups"]["status"] == "absent"
    held = [
        SimpleNamespace(
            group=SimpleNamespace(name="0"),
            size=SimpleNamespace(kind=kind),
            memory=SimpleNamespace(local=torch.empty(mebibytes << 20, dtype=torch.uint8)),
        )
        for kind, mebibytes in (("slots", 2), ("slots", 1), ("gathered", 4))
    ]
    monkeypatch.setattr(statistics, "workspaces", lambda: held)
    report = findings(run("--json"))
    assert report["symmetric memory", "group 0: slots"]["value"] == "3.0 MiB"
    assert report["symmetric memory", "group 0: gathered"]["value"] == "4.0 MiB"
    assert ("symmetric memory", "groups") not in report


@pytest.mark.parametrize(
    ("variable", "rule"),
    [("OVERLAP_GEMM_WORKSPACE_LIMIT", "a number of bytes"), ("OVERLAP_GEMM_SYMMETRIC", "torch or nvshmem")],
)
def test_an_invalid_variable_of_symmetric_memory_is_broken(run, monkeypatch, variable, rule):
    monkeypatch.setenv(variable, "much")
    result = run("--json")
    report = findings(result)["symmetric memory", "limit of a process"]
    assert report["status"] == "broken" and f"{variable} must be {rule}" in report["value"]
    assert result.exit_code == 1


def test_the_table_names_every_finding(run):
    result = run()
    assert result.exit_code == 0
    for _, finding in doctor.examine():
        assert finding.name in result.output


def test_something_broken_makes_the_command_fail(run, monkeypatch):
    broken = doctor.Finding("mpi4py", "finds no MPI library", "broken")
    monkeypatch.setattr(doctor, "PROBES", {"communication": lambda: iter([broken])})
    assert run().exit_code == 1


def test_a_missing_distribution_is_named_as_such():
    assert doctor._distribution("no-such-distribution").status == "absent"


@pytest.mark.parametrize(
    ("version", "status", "words"),
    [
        ("3.8.0", "ok", "3.8.0, for sm_"),
        ("3.7.2", "ok", "3.7.2, for sm_"),
        (
            "3.4.5",
            "absent",
            "cannot link the device code of NVSHMEM 3.4.5: install nvidia-nvshmem-cu13>=3.7.2",
        ),
    ],
)
def test_device_code_that_cannot_be_linked_is_named_with_what_to_install(monkeypatch, version, status, words):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    found = doctor._nvshmem_bitcode()
    assert (found.status, words in found.value) == (status, True), found


@pytest.mark.parametrize(("device", "status"), [("3.8.0", "ok"), ("3.7.2", "ok"), ("3.9.1", "broken")])
def test_a_library_older_than_the_device_code_is_broken(monkeypatch, device, status):
    nvshmem = pytest.importorskip("nvshmem.core")
    monkeypatch.setattr(nvshmem, "get_version", lambda: SimpleNamespace(libnvshmem_version="3.8.0"))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: device)
    found = doctor._nvshmem_library()
    assert (found.status, found.value.startswith("3.8.0")) == (status, True), found


def test_gpus_and_peers(monkeypatch):
    class Gpu:
        name, major, minor, total_memory, multi_processor_count = "NVIDIA H200", 9, 0, 141 << 30, 132
        uuid = "none"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Gpu)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: {a, b} != {0, 2})
    from cuda.bindings import driver

    monkeypatch.setattr(driver, "cuDeviceGetAttribute", lambda what, index: (0, int(index == 2)))
    found = {finding.name: finding for finding in doctor.devices()}
    assert found["MPS"].value.startswith("on GPU 2: ")
    assert found["the model's constants"].value == "measured on NVIDIA H200, 2026-11-22"
    monkeypatch.setattr(Gpu, "name", "NVIDIA H20")
    monkeypatch.setattr(driver, "cuDeviceGetAttribute", lambda what, index: (0, 0))
    other = {finding.name: finding for finding in doctor.devices()}
    assert other["MPS"].value == "off"
    assert "`auto` measures each call signature: " in other["the model's constants"].value
    assert found["GPU 2"].value == "NVIDIA H200, sm_90, 141 GiB, 132 SMs"
    assert found["peer access"].value == "not 0->2, 2->0"
