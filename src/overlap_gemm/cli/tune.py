"""`overlap-gemm tune`: measures the model's constants on this machine's GPUs and stores them in a file."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.table import Table
from torch import Tensor

import overlap_gemm

from ..backends.collectives import reduce_scatter_rows
from ..backends.fused.fused_backend import Fused
from ..backends.op_call import CallOperands
from ..backends.scales.product_types import ProductTypes
from ..backends.scales.scale_layouts import LAYOUTS
from ..backends.torch_backend import reduce_scatter_single
from ..config.gemm_config import GemmConfig
from ..runtime.group import LOCAL, Group, find
from ..spec import GEMM_REDUCE_SCATTER
from ..spec.sharding import Shards
from ..testing.workload import Call
from ..tuning.calibrate import calibrate
from ..tuning.machine import (
    MACHINE_VARIABLE,
    Machine,
    device_name,
    load,
    machine_for,
    save,
    user_file,
)
from ..tuning.settings import configured
from ..tuning.timing import captured, measure, slowest
from .console import rank_zero_console
from .link_rates import link_rates
from .this_machine import describe, this_arch

ALONE = Group(LOCAL, 0, 1)
"""Group of this rank only, for products without communication.

It is passed to the backend directly; public ops accept it only in jobs of one rank.
"""

SMALL = (512, 1024, 1024)
"""M, N, K of the calls whose host time is measured: the GPU finishes before the host."""

HOST_CALLS = 50
COLUMNS = 64
"""Columns of the tensors in collectives."""


def tune(
    out: Annotated[
        Path | None, typer.Option(help="File to write. [default: in the user's configuration folder]")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Samples per measurement.")] = 5,
) -> None:
    """Measures the constants of the time model, on one GPU or under a launcher on several; takes minutes.

    `bash launch/torchrun.sh overlap-gemm tune` uses all GPUs. One GPU measures kernels, memory and the host
    time of a product; the link, collectives and other host times need several. Constants that are not
    measured are unchanged. `auto`, `plan` and `bench` use the file from then on (it must be the same for
    every rank). OVERLAP_GEMM_MACHINE selects another file, such as one of `--out`, which is not used
    otherwise. A folder that cannot be created is an error before the measurements.
    """
    arch = this_arch()
    if arch is None:
        typer.echo("tune measures Hopper or Blackwell GPUs, and torch sees none here", err=True)
        raise typer.Exit(1)
    device = device_name(arch)
    file = out or user_file(device)
    file.parent.mkdir(parents=True, exist_ok=True)  # fail before the measurements, not after
    base = machine_for(arch)
    assert base is not None, "every architecture of kernels has constants"
    world = overlap_gemm.init(device="cuda")
    console = rank_zero_console(world.rank)
    group = find(None)
    started = time.perf_counter()

    def log(line: str) -> None:
        console.print(f"{time.perf_counter() - started:6.1f} s  {line}")

    measured = calibrate(GpuProbe(group, world.device, rounds), base, arch, log)
    facts = describe(world)
    measured = replace(
        measured,
        provenance=_provenance(base, measured, device),
        driver=base.driver if base.name == device else {},
        name=device,
        archs=(arch, *(other for other in base.archs if other != arch)),
        source="measured",
        version=facts["overlap_gemm"],
        date=facts["date"],
    )
    if world.rank == 0:
        save(measured, file)
        load(str(file))
    overlap_gemm.finalize()
    console.print(changes(base, measured))
    console.print(f"wrote {file}")
    if out is not None or os.environ.get(MACHINE_VARIABLE):
        console.print(f"to use it: {MACHINE_VARIABLE}={file}")


def _provenance(base: Machine, measured: Machine, device: str) -> dict[str, str]:
    """Returns the sources of constants that were not measured; 8-bit rates are ratios to 16-bit rates."""
    kept = {
        name: why for name, why in base.provenance.items() if getattr(measured, name) == getattr(base, name)
    }
    if device != base.name:
        kept |= dict.fromkeys(("bytes_rate", "promoted_rate", "blocks_rate"), f"scaled: {base.name}'s ratio")
    return kept


def changes(base: Machine, measured: Machine) -> Table:
    """Returns a table of the constants before and after.

    For collectives it has the largest size on the most ranks.
    """
    table = Table("constant", "before", "now", box=None, pad_edge=False)
    before, now = _flat(base), _flat(measured)
    for name, value in now.items():
        if value != before.get(name):
            table.add_row(name, _short(before.get(name)), _short(value))
    return table


def _flat(machine: Machine) -> dict[str, object]:
    """Returns a machine's constants by name, curves by their last point."""
    flat: dict[str, object] = {}
    for field in fields(machine):
        value = getattr(machine, field.name)
        if field.name == "collectives":
            for name, curves in value.items():
                ranks = max(curves)
                size, seconds = curves[ranks][-1]
                flat[f"{name} GB/s, {ranks} ranks, {size / 2**20:.0f} MiB"] = size / seconds / 1e9
        elif isinstance(value, dict):
            flat |= {f"{field.name} {name}": each for name, each in value.items()}
        else:
            flat[field.name] = value
    return flat


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)


@dataclass(frozen=True)
class GpuProbe:
    """`calibrate.Probe` for the GPUs of a group. Every method is collective.

    Attributes:
        group: Group of the ranks.
        device: CUDA device of this rank.
        rounds: Samples per measurement.
    """

    group: Group
    device: torch.device
    rounds: int

    @property
    def world(self) -> int:
        """Returns the number of ranks."""
        return self.group.size

    @property
    def sms(self) -> int:
        """Returns the number of SMs of the device."""
        return torch.cuda.get_device_properties(self.device).multi_processor_count

    def empty(self) -> float:
        """Returns the time of a kernel without work, here a very small product."""
        return self.product(128, 128, 64)

    def product(self, m: int, n: int, k: int) -> float:
        """Returns the time of one rank's product by cuBLAS."""
        x, weight = self._operands(m, n, k)
        return self._seconds(lambda: torch.mm(x, weight.t()))

    def gemm(self, config: GemmConfig, m: int, n: int, k: int) -> float:
        """Returns the time of one rank's product by one of our kernels."""
        x, weight = self._operands(m, n, k)
        operands, types = CallOperands(x, weight), ProductTypes(x.dtype)
        if config.blocks is not None:
            x, weight = (operand.to(torch.float8_e4m3fn) for operand in (x, weight))
            scales = LAYOUTS[config.blocks].unit((m, k), (n, k), self.device)
            operands = CallOperands(x, weight, None, *scales)
            types = ProductTypes(x.dtype, weight.dtype, torch.bfloat16, config.blocks)
        arguments = GEMM_REDUCE_SCATTER, types, operands, Shards.even(m, 1), ALONE, k
        with configured(mma=config.mma, tile=config.tile, cluster=config.cluster, k_split=1):
            return self._seconds(lambda: Fused().call(*arguments))

    def fused(self, config: GemmConfig, m: int, n: int, k: int) -> float:
        """Returns the time of a fused reduce-scatter."""
        x, weight = self._operands(m, n, k // self.world)
        group = self.group.process_group
        with configured(mma=config.mma, tile=config.tile, cluster=config.cluster, k_split=1):
            return self._seconds(
                lambda: overlap_gemm.gemm_reduce_scatter(x, weight, group=group, backend="fused")
            )

    def link(self) -> tuple[float, float]:
        """Returns bytes/s out of each rank: by SM stores, and by copy engines."""
        rates = link_rates(self.group, self.device, self.rounds)
        return rates["stores"], rates["copy engines"]

    def collective(self, name: str, bytes_out: int) -> float:
        """Returns the time of a collective that sends about `bytes_out` bytes out of each rank."""
        total_bytes = bytes_out * self.world / (self.world - 1) / (2 if name == "all_reduce" else 1)
        rows = max(1, round(total_bytes / 2 / COLUMNS / self.world))
        shard, full = self._random(rows, COLUMNS), self._random(rows * self.world, COLUMNS)
        shards = Shards.even(rows * self.world, self.world)
        calls: dict[str, Call] = {
            "reduce_scatter": lambda: reduce_scatter_single(shard, full, group=self.group.process_group),
            "all_gather": lambda: self.group.all_gather(full, shard),
            "all_reduce": lambda: dist.all_reduce(full, group=self.group.process_group),
            "sum": lambda: reduce_scatter_rows(full, shards, self.group),
        }
        return self._seconds(calls[name])

    def host(self, backend: str) -> float:
        """Returns the host time of an eager call."""
        m, n, k = SMALL
        x, weight = self._operands(m, n, k // self.world)
        group = self.group.process_group
        options: dict[str, Any] = {"group": group, "backend": backend}
        call: Call = lambda: overlap_gemm.gemm_reduce_scatter(x, weight, **options)  # noqa: E731
        if backend == "product":
            call = lambda: torch.mm(x, weight.t())  # noqa: E731
        samples = []
        for _ in range(1 + self.rounds):  # the first one warms up
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(HOST_CALLS):
                call()
            torch.cuda.synchronize()
            samples.append((time.perf_counter() - began) / HOST_CALLS)
        (seconds,) = slowest([min(samples[1:])], self.device, self.group.process_group)
        return seconds

    def _seconds(self, call: Callable[[], object]) -> float:
        """Returns the time of a call in graphs: the median of the slowest rank's times."""
        timings = measure(
            {"call": captured(call)},
            group=self.group.process_group,
            device=self.device,
            rounds=self.rounds,
            burst_seconds=0.004,
        )
        return timings.median("call")

    def _operands(self, m: int, n: int, k: int) -> tuple[Tensor, Tensor]:
        return self._random(m, k), self._random(n, k) / k**0.5

    def _random(self, rows: int, columns: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(self.group.rank)
        return torch.randn(rows, columns, generator=generator, device=self.device, dtype=torch.bfloat16)
