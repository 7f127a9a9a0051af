"""`overlap-gemm doctor`: reports the machine's devices and libraries, and the backends that are usable."""

import importlib.metadata
import json
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import rich
import torch
import torch.distributed as dist
import typer
from rich.table import Table

from ..api.statistics import stats
from ..backends.base import Problem
from ..backends.op_call import OpCall
from ..backends.select import BACKENDS
from ..config.arch import arch_of_capability
from ..runtime.memory.symmetric import numbers, why_no_puts
from ..runtime.memory.workspace import memory_provider, workspace_limit
from ..spec import GEMM_REDUCE_SCATTER
from ..tuning.machine import machine_for, why_uncalibrated

Status = Literal["ok", "absent", "broken"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: Checked item.
        value: Result, or the reason why the item is missing.
        status: "ok"; "absent": missing or limited, but no error; "broken": installed, and must be repaired.
    """

    name: str
    value: str
    status: Status = "ok"


def versions() -> Iterator[Finding]:
    """Yields the versions of this package, Python, and its main dependencies."""
    yield Finding("Python", f"{platform.python_version()} ({sys.executable})")
    for name in ("overlap-gemm", "torch", "nvidia-cutlass-dsl", "transformers"):
        yield _distribution(name)
    yield Finding("torch's CUDA", torch.version.cuda or "none (a CPU build)")


def devices() -> Iterator[Finding]:
    """Yields the devices, peer access between them, and whether the model has their constants."""
    cpu = f"{platform.machine()}, {torch.get_num_threads()} threads"
    yield Finding("CPU", cpu)
    if not torch.cuda.is_available():
        why = "torch is a CPU build" if torch.version.cuda is None else "torch sees no CUDA device"
        yield Finding("GPU", why, "absent")
        return
    count = torch.cuda.device_count()
    for index in range(count):
        facts = torch.cuda.get_device_properties(index)
        memory = f"{facts.total_memory / 2**30:.0f} GiB, {facts.multi_processor_count} SMs"
        yield Finding(f"GPU {index}", f"{facts.name}, sm_{facts.major}{facts.minor}, {memory}")
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    blocked = [f"{a}->{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    if not pairs:
        yield Finding("peer access", "one GPU has no peer", "absent")
    elif blocked:
        yield Finding("peer access", f"not {', '.join(blocked)}", "absent")
    else:
        yield Finding("peer access", f"all {len(pairs)} pairs")
    yield _mps(count)
    every = [torch.cuda.get_device_properties(index) for index in range(count)]
    for name, capability in sorted({(facts.name, (facts.major, facts.minor)) for facts in every}):
        yield _constants(name, capability)


def _mps(count: int) -> Finding:
    """Returns whether processes share a GPU's SMs; a fused kernel that fills the SMs must not share them."""
    from cuda.bindings import driver

    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MPS_ENABLED
    shared = [str(i) for i in range(count) if driver.cuDeviceGetAttribute(attribute, i) == (0, 1)]
    if not shared:
        return Finding("MPS", "off")
    return Finding(
        "MPS",
        f"on GPU {', '.join(shared)}: fused kernels of two jobs that share SMs can wait for each other until "
        f"they time out; run one job per GPU",
        "absent",
    )


def _constants(device: str, capability: tuple[int, int]) -> Finding:
    """Returns whether `auto` may use predicted times on devices of a name."""
    arch = arch_of_capability(capability)
    if arch is None:
        return Finding("the model's constants", f"none: no fused kernel runs on {device}", "absent")
    try:
        why_not = why_uncalibrated(arch.name, device)
    except ValueError as error:
        return Finding("the model's constants", str(error), "broken")
    if why_not:
        return Finding("the model's constants", f"`auto` measures each call signature: {why_not}", "absent")
    machine = machine_for(arch.name, device)
    assert machine is not None
    return Finding("the model's constants", f"measured on {device}, {machine.date}")


def symmetric_memory() -> Iterator[Finding]:
    """Yields the limit of workspaces and their provider; then what each owner in this process has."""
    name = "limit of a process"
    try:
        gibibytes, provider = workspace_limit() / 2**30, memory_provider().name
    except ValueError as error:
        yield Finding(name, str(error), "broken")
        return
    yield Finding(
        name,
        f"{gibibytes:.3g} GiB of {provider}'s memory (OVERLAP_GEMM_WORKSPACE_LIMIT, OVERLAP_GEMM_SYMMETRIC); "
        f"explain(model, max_rows=...) computes the bytes that a model's groups take",
    )
    owned = stats().symmetric_bytes
    for owner, nbytes in owned.items():
        yield Finding(f"group {owner}", f"{nbytes / 2**20:.1f} MiB")
    if not owned:
        yield Finding("groups", "none in this process: stats() reports those of a process by owner", "absent")


def communication() -> Iterator[Finding]:
    """Yields torch.distributed's backends, MPI and NVSHMEM."""
    for name, available in (("gloo", dist.is_gloo_available()), ("NCCL", dist.is_nccl_available())):
        yield Finding(name, "in this torch" if available else "not in this torch", _status(available))
    yield _mpi()
    mpirun = shutil.which("mpirun")
    yield Finding("mpirun", mpirun or "not on PATH", _status(mpirun is not None))
    yield _distribution("nvshmem4py-cu13")
    yield _nvshmem_library()
    yield _nvshmem_bitcode()


def _mpi() -> Finding:
    try:
        import mpi4py
    except ImportError:
        return Finding("mpi4py", "not installed (extra `mpi`)", "absent")
    mpi4py.rc.initialize = False  # the import alone would start MPI
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        return Finding("mpi4py", f"finds no MPI library: {error}", "broken")
    library = MPI.Get_library_version().split(",")[0].strip()
    return Finding("mpi4py", f"{mpi4py.__version__} on {library}")


def _nvshmem_library() -> Finding:
    """Returns the NVSHMEM host library of a process: the one that torch has loaded, if it has."""
    name = "NVSHMEM library"
    try:
        import nvshmem.core as nvshmem

        loaded = str(nvshmem.get_version().libnvshmem_version)
        device = importlib.metadata.version("nvidia-nvshmem-cu13")
    except Exception as error:  # errors of several packages, if one of them or the library is missing
        return Finding(name, f"cannot be loaded: {error}", "absent")
    if numbers(loaded)[:2] < numbers(device)[:2]:
        older = f"{loaded}, which refuses kernels linked with the device code of {device}"
        return Finding(name, older, "broken")
    return Finding(name, loaded)


def _nvshmem_bitcode() -> Finding:
    """Returns the NVSHMEM device code.

    Puts are compiled from the bitcode of the newest architecture that is not above the GPU's.
    """
    name = "NVSHMEM device code"
    try:
        files = importlib.metadata.files("nvidia-nvshmem-cu13") or []
        version = importlib.metadata.version("nvidia-nvshmem-cu13")
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "not installed (extra `nvshmem`)", "absent")
    matches = (re.fullmatch(r"libnvshmem_device_sm_(\d+)\.bc", Path(file).name) for file in files)
    archs = sorted(int(match[1]) for match in matches if match)
    if reason := why_no_puts():
        return Finding(name, f"puts: no, {reason}", "absent")
    if not archs:
        return Finding(name, f"{version} has no bitcode per architecture", "broken")
    return Finding(name, f"{version}, for sm_{', sm_'.join(map(str, archs))}")


def backends() -> Iterator[Finding]:
    """Yields the backends for two ranks on this machine, in the order in which "auto" tries them."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    problem = Problem(GEMM_REDUCE_SCATTER.name, OpCall(rows=4096, columns=4096), torch.bfloat16, device, 2)
    for backend in BACKENDS:
        why_not = backend.why_not(problem)
        yield Finding(backend.name, why_not or f"usable on {device}", _status(why_not is None))


def _distribution(name: str) -> Finding:
    try:
        return Finding(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "not installed", "absent")


def _status(present: bool) -> Status:
    return "ok" if present else "absent"


PROBES: dict[str, Callable[[], Iterator[Finding]]] = {
    "versions": versions,
    "devices": devices,
    "symmetric memory": symmetric_memory,
    "communication": communication,
    "backends": backends,
}
"""Probes by the section of their findings."""


def examine() -> list[tuple[str, Finding]]:
    """Returns (section, finding) pairs of all probes, in the order of the report."""
    return [(section, finding) for section, probe in PROBES.items() for finding in probe()]


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Reports devices, libraries and versions, the usable backends, and why others are not usable.

    Exits with 1 if something is installed but broken: constants that are damaged or of another architecture;
    an invalid variable of symmetric memory; mpi4py without an MPI library; NVSHMEM without bitcode, or whose
    host library is older than its device code. A missing GPU or library, and MPS, are no errors.
    """
    findings = examine()
    if as_json:
        print(
            json.dumps([{"section": section, **asdict(finding)} for section, finding in findings], indent=2)
        )
    else:
        _print(findings)
    if any(finding.status == "broken" for _, finding in findings):
        raise typer.Exit(1)


def _print(findings: list[tuple[str, Finding]]) -> None:
    color = {"ok": "green", "absent": "yellow", "broken": "red"}
    table = Table(box=None, pad_edge=False)
    for heading in ("", "what", "found"):
        table.add_column(heading, overflow="fold")
    above = ""
    for section, finding in findings:
        status = f"[{color[finding.status]}]{finding.value}[/]"
        table.add_row(f"[bold]{section if section != above else ''}[/]", finding.name, status)
        above = section
    rich.print(table)
