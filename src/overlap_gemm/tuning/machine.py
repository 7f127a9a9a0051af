"""The constants of a machine that the model computes with: measured once (`overlap-gemm tune`) or expected.

A machine's file is JSON with the fields of `Machine`. The package ships those of H200 and H100, and expected
ones of B200 (`machines/`); `tune` writes one into the user's configuration folder, named by its device, which
goes before the shipped ones; `OVERLAP_GEMM_MACHINE`, a path or the name of a shipped file, goes before both.

Constants belong to a device's name. For another name they are scaled from those of a measured device of its
architecture by what the driver states of both (`scaled`): a prior, by which candidates are proposed and
measured (`backends.autotuning`). That a kernel of ours is faster than torch's way may not be concluded from
it without a measurement (`why_untimed`).

All ranks of a group must choose with the same constants: compare `Machine.digest`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

import platformdirs
import torch

from ..config.arch import arch_of_capability
from ..config.naming import blocks_name
from ..config.scale_blocks import PROMOTED, Blocks, in_words
from .driver import DriverFacts, driver_facts
from .files import replace_text

MACHINE_VARIABLE = "OVERLAP_GEMM_MACHINE"
SHIPPED = Path(__file__).with_name("machines")

Curve = tuple[tuple[float, float], ...]
"""(bytes out of each rank, seconds), by growing bytes."""


@dataclass(frozen=True, eq=False)
class Machine:
    """What the model needs to know of a GPU and its links. Rates are those sustained, not a data sheet's.

    Attributes:
        name: The device, e.g. ``"NVIDIA H200"``.
        archs: Targets it stands for; the first is its own.
        sms: SMs of the whole device, to which `mma_rate` belongs.
        source: ``"measured"``; ``"scaled"`` from a measured device of the architecture; ``"expected"`` where
            none has been measured.
        version: Of this package that wrote the file.
        date: When, ISO 8601.
        mma_rate: FLOP/s of the best kernel on a large product, 16-bit operands.
        bytes_rate: How many times that 8-bit operands are multiplied, by torch and by kernels whose sums the
            tensor cores keep.
        promoted_rate: The same by kernels whose sums are promoted to float32.
        blocks_rate: The same by torch with scales of blocks.
        memory_rate: Bytes/s of device memory.
        link_rate: Bytes/s out of each GPU, by SM stores to all peers at once: the bound of an op.
        bulk_rate: The same as the fused kernel's bulk stores reach.
        copy_rate: The same by copy engines.
        launch: Seconds that a kernel costs in addition to its tiles: launch, prologue, first loads.
        epilogue: Seconds per element of a CTA tile between accumulator and ring.
        arrival: Seconds between a peer's last store and the first load of what it stored.
        step: Seconds that a point-to-point transfer of `decomposed` costs in addition to its bytes.
        efficiency: ``"MMA_KIND TILE CLUSTER"`` -> share of `mma_rate`. A ``"swap_ab"`` kernel's follows from
            what one SM loads, for which it waits (on H200 59 GB/s of A and B together; of B200 the same is
            expected). With scales of blocks ``"MMA_KIND TILE CLUSTER BLOCKS"`` -> share of `mma_rate` times
            `promoted_rate`, or `bytes_rate`, whichever the kernel has.
        collectives: Collective -> ranks -> curve. ``"sum"`` is all-to-all with a float32 sum after it.
        host: Backend or ``"product"`` -> seconds of host time of an eager call.
        stream: Share of `memory_rate` at which a kernel reads its operands, where nothing else is slower.
        swap_ab_stream: The same of a ``"swap_ab"`` kernel.
        ll_arrival: `arrival` where data is its own flag.
        flag_step: Seconds between two tiles of a CTA that tells a peer of each by a flag: stores, their
            completion, the flag's release.
        small_tile: Elements of the largest tile that `small_tile_rate` is for.
        small_tile_rate: Share of `bulk_rate` that kernels of small tiles reach.
        handover: Seconds in which each part but the first of a tile whose K is cut hands its sums over: in
            each wave, and once more after the last.
        copy_host: Seconds of the host to queue a shard and its flag for one peer's copy engine.
        copy_start: Seconds before a copy engine's shard and its flag come, in addition to its bytes.
        gate: Seconds of a gate kernel between the products of two shards, and after the last.
        shard_host: Seconds of the host for each shard of an all-gather GEMM by copies: copies, gate, product.
        copy_bytes: Shards of an operand of at least so many bytes are sent by copy engines, smaller ones by
            the kernel's own warps.
        copies_world: Ranks up to which all-gather GEMMs by copies have been compared with the model, and so
            are believed.
        few_rows: Most rows for which ops that exchange tiles get a ``"swap_ab"`` kernel by themselves.
        whole_rows: Most rows of which a reduce-scatter may be executed as an all-reduce.
        whole_gain: And it must be expected to take at most this part of the reduce-scatter's time.
        provenance: Field -> where its number is from, of those that `tune` does not measure.
        one_wave: The same as `efficiency` where a call's tiles all run at once, of kernels of which that was
            measured: then they share what they load in the L2 without being told to, and draw no more power.
        driver: Fields of `driver.DriverFacts` -> what the driver states of such a device; empty where that
            is not recorded.
    """

    name: str
    archs: tuple[str, ...]
    sms: int
    source: Literal["measured", "scaled", "expected"]
    version: str
    date: str
    mma_rate: float
    memory_rate: float
    link_rate: float
    bulk_rate: float
    copy_rate: float
    launch: float
    epilogue: float
    arrival: float
    step: float
    efficiency: Mapping[str, float]
    collectives: Mapping[str, Mapping[int, Curve]]
    host: Mapping[str, float]
    stream: float
    swap_ab_stream: float
    ll_arrival: float
    flag_step: float
    small_tile: int
    small_tile_rate: float
    handover: float
    copy_host: float
    copy_start: float
    gate: float
    shard_host: float
    copy_bytes: int
    copies_world: int
    few_rows: int
    whole_rows: int
    whole_gain: float
    bytes_rate: float
    promoted_rate: float
    blocks_rate: float
    provenance: Mapping[str, str]
    one_wave: Mapping[str, float] = field(default_factory=dict)
    driver: Mapping[str, float] = field(default_factory=dict)

    def is_of(self, device: str) -> bool:
        """Returns whether these are the measured constants of devices of that name."""
        return self.source == "measured" and self.name == device

    def why_untimed_bytes(self, blocks: Blocks | None = None) -> str | None:
        """Why times of 8-bit operands with scales of blocks (None: of rows) are not known, None if they are.

        Of the largest blocks those with scales of rows are near enough (`why_as_rows`); others stop for each.
        """
        if blocks != PROMOTED[0] and (reason := self.why_as_rows(blocks)):
            return reason
        if self.source == "expected":
            return f"products of 8-bit operands have not been timed on {self.name}"
        return None

    def efficiencies(self, blocks: Blocks | None) -> dict[str, float]:
        """Those of `efficiency` with scales of these blocks; None: of kernels without."""
        words = [blocks_name(blocks)] if blocks else []
        return {name: share for name, share in self.efficiency.items() if name.split()[3:] == words}

    def why_as_rows(self, blocks: Blocks | None) -> str | None:
        """Why kernels with scales of blocks are taken to be as fast as those with scales of rows.

        None if they are not.
        """
        if blocks is None or self.efficiencies(blocks):
            return None
        return f"kernels with scales of {in_words(blocks)} have not been timed on {self.name}"

    @cached_property
    def digest(self) -> str:
        """Equal for equal constants: what ranks compare before they choose by them."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:12]

    def to_json(self) -> str:
        """The file's text: numbers of four digits, a list to a line."""
        text = json.dumps(_rounded(asdict(self)), indent=1)
        for _ in range(2):  # points of curves, then curves
            text = re.sub(r"\[([^][{}]|\[[^][\n]*\])*\]", lambda found: " ".join(found[0].split()), text)
        return text.replace("[ ", "[").replace(" ]", "]") + "\n"

    @classmethod
    def from_json(cls, text: str) -> Machine:
        """The machine of a file's text.

        Raises:
            ValueError: It is not JSON, or fields are missing or unknown.
        """
        fields = json.loads(text)
        try:
            fields["archs"] = tuple(fields["archs"])
            fields["collectives"] = {
                name: {
                    int(ranks): tuple((float(b), float(s)) for b, s in curve) for ranks, curve in by.items()
                }
                for name, by in fields["collectives"].items()
            }
            return cls(**fields)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a machine's constants: {error}") from error


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(found) for name, found in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(found) for found in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def load(name_or_path: str) -> Machine:
    """A shipped machine by its name, such as ``"h200"``, or one from a file.

    Raises:
        ValueError: There is no such file, or it holds no machine; the message names it.
    """
    shipped = SHIPPED / f"{name_or_path}.json"
    file = shipped if shipped.exists() else Path(name_or_path)
    try:
        text = file.read_text()
    except OSError as error:
        names = ", ".join(sorted(path.stem for path in SHIPPED.glob("*.json")))
        raise ValueError(f"no machine {name_or_path!r} (shipped: {names}): {error}") from error
    try:
        return Machine.from_json(text)
    except ValueError as error:
        raise ValueError(
            f"{file} is damaged: {error}. Write it again with `overlap-gemm tune`, or remove it"
        ) from error


def save(machine: Machine, file: Path) -> None:
    """Writes a machine's file at once: a reader sees the old one or the new one."""
    replace_text(file, machine.to_json())


def device_name(arch: str) -> str:
    """The name of this process's CUDA device; empty if there is none, or it is not of that architecture."""
    if not torch.cuda.is_available():
        return ""
    own = arch_of_capability(torch.cuda.get_device_capability())
    return torch.cuda.get_device_name() if own is not None and own.name == arch else ""


def user_file(device: str) -> Path:
    """Where `tune` keeps the constants that this user has measured on devices of a name."""
    stem = re.sub("[^a-z0-9]+", "-", device.lower()).strip("-")
    return Path(platformdirs.user_config_dir("overlap-gemm")) / "machines" / f"{stem}.json"


SOURCES = ("h200", "h100", "b200")
"""Shipped files: the first of an architecture stands for devices without a name of their own, as emulated."""

TENSOR_PEAKS = {"NVIDIA H20": 148e12}
"""Published peaks (FLOP/s, 16 bits) of devices whose tensor cores are limited where no driver states it."""

REACHED = 0.95
"""Share of such a peak that products reach at most."""

PCIE_RATE = 50e9
"""Bytes/s out of a GPU without NVLink, by PCIe 5.0 x16."""


@lru_cache(maxsize=16)
def machine_for(arch: str, device: str | None = None) -> Machine | None:
    """Returns the constants that kernels for a target are chosen with, None where there are none. Read once.

    Those of the device's own name, measured by this user or shipped; where there are none, `scaled` ones.

    Args:
        arch: the target.
        device: the device's name; default `device_name`.

    Raises:
        ValueError: A file that should hold them does not.
    """
    device = device_name(arch) if device is None else device
    named = os.environ.get(MACHINE_VARIABLE)
    if named and arch in (machine := load(named)).archs:
        return machine
    if device and user_file(device).exists():
        return load(str(user_file(device)))
    fitting = [machine for machine in map(load, SOURCES) if arch in machine.archs]
    for machine in fitting:
        if machine.name == device:
            return machine
    driver = facts_of_device(arch, device)
    known = [machine for machine in fitting if machine.source == "measured" and machine.driver]
    if driver is None or not driver.memory or not known:
        return next(iter(fitting), None)
    return scaled(
        min(known, key=lambda machine: _apart(machine.driver["memory"], driver.memory)), device, driver
    )


def facts_of_device(arch: str, device: str) -> DriverFacts | None:
    """Returns what the driver states of this process's device, None where that has another name or none."""
    if not device or device != device_name(arch):
        return None
    return driver_facts(torch.cuda.current_device())


def _apart(rate: float, other: float) -> float:
    return max(rate / other, other / rate)


def scaled(base: Machine, device: str, driver: DriverFacts) -> Machine:
    """Returns constants of a device that was not measured, by the driver's figures of it and of `base`'s.

    Products scale with SMs times clock, or with the power limit where that is less; memory with its bus, and
    links with their number. Latencies, host times and the kernels' efficiencies stay `base`'s.

    Args:
        base: Measured constants of the same architecture, with `Machine.driver`.
        device: The device's name.
        driver: The driver's figures of it.
    """
    of_base = base.driver
    compute = driver.sms * driver.clock / (of_base["sms"] * of_base["clock"])
    if driver.power:
        compute = min(compute, driver.power / of_base["power"])
    mma_rate = base.mma_rate * compute
    if device in TENSOR_PEAKS:
        mma_rate = min(mma_rate, REACHED * TENSOR_PEAKS[device])
    links = driver.links / of_base["links"] if driver.links >= 0 else 1.0
    links = links or PCIE_RATE / base.link_rate

    def along(curve: Curve) -> Curve:
        start = curve[0][1]
        return tuple((size, _digits(start + (seconds - start) / links)) for size, seconds in curve)

    collectives = {
        name: {ranks: along(curve) for ranks, curve in curves.items()}
        for name, curves in base.collectives.items()
    }
    rates: dict[str, Any] = {
        name: _digits(getattr(base, name) * links) for name in ("link_rate", "bulk_rate", "copy_rate")
    }
    why = f"scaled from {base.name}'s by what the driver states"
    return replace(
        base,
        name=device,
        source="scaled",
        sms=driver.sms,
        mma_rate=_digits(mma_rate),
        memory_rate=_digits(base.memory_rate * driver.memory / of_base["memory"]),
        collectives=collectives,
        provenance=dict.fromkeys((*base.provenance, "mma_rate", "memory_rate", *rates), why),
        driver=driver._asdict(),
        **rates,
    )


def _digits(number: float) -> float:
    """Four digits: ranks whose drivers differ by less come to the same constants."""
    return float(f"{number:.4g}")


def why_untimed(arch: str, device: str) -> str | None:
    """Returns why times on devices of a name cannot be predicted, None if their constants are measured.

    Args:
        arch: their architecture.
        device: their name.

    Raises:
        ValueError: As `machine_for`.
    """
    machine = machine_for(arch, device)
    if machine is not None and machine.is_of(device):
        return None
    if machine is None:
        nearest = ""
    elif machine.source == "scaled":
        nearest = f", and those {machine.provenance['mma_rate']} are a prior for measurements"
    else:
        nearest = f", and those of {machine.name} ({machine.source}) are not its"
    return (
        f"the model's constants have not been measured on {device}{nearest}: "
        f"`overlap-gemm tune` measures them, then they decide"
    )
