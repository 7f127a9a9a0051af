"""Constants of a machine for the time model: measured (`overlap-gemm tune`), scaled, or estimated.

The file of a machine is JSON with the fields of `Machine`. The first of these that exists is used:

1. `OVERLAP_GEMM_MACHINE`: a path, or the name of a shipped file. If it has no constants for the
   architecture, the next source is used, or ValueError is raised if this process's device has it.
2. A file in the user's configuration folder, named by the device; `tune` writes it.
3. A file of the package (`machines/`): measured for H200 and H100, estimated for B200 (source
   "expected"). Without a device, as on a laptop, the architecture's first in `SOURCES`: for sm_90a H200.

A file that is damaged, or that the variable names and that does not exist, raises ValueError.

Constants are valid for one device name. For another name they are scaled from a measured device of the same
architecture, by the figures that the driver reports of both (`scaled`). Scaled constants are a prior: they
propose candidates, which are then measured (`backends.autotuning`). Without a measurement they must not
decide that our kernel is faster than torch (`why_uncalibrated`).

All ranks of a group must use the same constants: compare `Machine.digest`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sys
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
"""(bytes sent by each rank, seconds) pairs, by increasing bytes."""


@dataclass(frozen=True, eq=False)
class Machine:
    """Constants of a GPU and its links. Rates are sustained rates, not a data sheet's.

    Two objects are equal (`==`) only if they are the same object: caches of predictions have one as a key.

    Attributes:
        name: Name of the device, for example ``"NVIDIA H200"``.
        archs: Architectures that the constants are used for; the first is the device's.
        sms: SMs of the full device, to which `mma_rate` refers.
        source: ``"measured"``; ``"scaled"`` from a measured device of the architecture; ``"expected"`` if
            none has been measured.
        version: Version of this package that wrote the file.
        date: ISO 8601 date.
        mma_rate: FLOP/s of the best kernel on a large product with 16-bit operands.
        bytes_rate: Ratio of the 8-bit rate to `mma_rate`, for torch and for kernels whose sums stay in the
            tensor cores.
        promoted_rate: Ratio of the 8-bit rate to `mma_rate`, for kernels whose sums are promoted to float32.
        blocks_rate: Ratio of the 8-bit rate to `mma_rate`, for torch with block scales.
        memory_rate: Bytes/s of device memory.
        link_rate: Bytes/s out of each GPU by SM stores to all peers at once: the bound of an op.
        bulk_rate: Bytes/s out of each GPU by the fused kernel's bulk stores.
        copy_rate: Bytes/s out of each GPU by copy engines.
        launch: Seconds of a kernel in addition to its tiles: launch, prologue, first loads.
        epilogue: Seconds per element of a CTA tile between accumulator and ring.
        arrival: Seconds between a peer's last store and the first load of the stored data.
        step: Seconds of a point-to-point transfer of `decomposed` in addition to its bytes.
        efficiency: ``"MMA_KIND TILE CLUSTER"`` -> share of `mma_rate`. A ``"swap_ab"`` kernel waits for its
            loads. Its share is computed from the load rate of one SM (59 GB/s of A and B on H200, expected to
            be equal on B200). With block scales ``"MMA_KIND TILE CLUSTER BLOCKS"`` -> share of `mma_rate`
            times the kernel's `promoted_rate` or `bytes_rate`.
        collectives: Collective -> ranks -> curve. ``"sum"`` is all-to-all followed by a float32 sum.
        host: Backend or ``"product"`` -> seconds of host time of an eager call.
        stream: Share of `memory_rate` at which a kernel reads its operands if nothing else is slower.
        swap_ab_stream: Share of `memory_rate` at which a ``"swap_ab"`` kernel reads its operands.
        ll_arrival: `arrival` of LL packets.
        flag_step: Minimum of seconds between two tiles of a CTA that sends a flag for each: stores, their
            completion, release of the flag.
        small_tile: Elements of the largest tile to which `small_tile_rate` applies.
        small_tile_rate: Share of `bulk_rate` of kernels with small tiles.
        handover: Seconds in which each part of a split K but the first passes its sums on: in each wave, and
            once more after the last.
        copy_host: Host seconds to queue a shard and its flag for one peer's copy engine.
        copy_start: Seconds until a copy engine's shard and flag arrive, in addition to its bytes.
        gate: Seconds of a gate kernel between the products of two shards, and after the last.
        shard_host: Host seconds per shard of an all-gather GEMM by copies: copies, gate, product.
        copy_bytes: Minimum size of an operand's shards that are sent by copy engines; the kernel's warps send
            smaller ones.
        copies_world: Maximum number of ranks for which the model of all-gather GEMMs by copies was verified;
            with more ranks it is not used.
        few_rows: Maximum number of rows for which ops that exchange tiles get a ``"swap_ab"`` kernel by
            default.
        ar_rows: Maximum number of rows of a reduce-scatter that may run as an all-reduce.
        ar_gain: Maximum ratio of the all-reduce's to the reduce-scatter's expected time in that case.
        provenance: Field -> source of its value, for fields that `tune` does not measure.
        one_wave: Like `efficiency`, for measured kernels in calls with one wave of tiles. Such tiles share
            their loads in L2 without multicast, and draw less power.
        driver: Fields of `driver.DriverFacts` -> figures that the driver reports of such a device; empty if
            they were not recorded.
        leaf: Seconds per element of a CTA tile in which a leaf's sums are added to a node in memory
            (`GemmConfig.leaves`). The default, like those below, was measured on H200 and is expected of
            others.
        last_inputs: Seconds to read an epilogue's inputs of an SM's last tile, after its sums.
        row_handover: Seconds in which CTAs combine their parts of an output with a value for each row.
        row_value: Seconds per element of an SM to reduce a row's values.
        block_value: Seconds per element of an SM to scale blocks of an 8-bit result.
        exposed_visits: Factor of the time of a sum's inputs, outputs and row values if operands have 8 bits:
            their product takes half the time, which hides less.
        special: Seconds per element of an SM and instruction of its special function units.
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
    ar_rows: int
    ar_gain: float
    bytes_rate: float
    promoted_rate: float
    blocks_rate: float
    provenance: Mapping[str, str]
    one_wave: Mapping[str, float] = field(default_factory=dict)
    driver: Mapping[str, float] = field(default_factory=dict)
    leaf: float = 2.6e-10
    last_inputs: float = 3e-6
    row_handover: float = 1.2e-6
    row_value: float = 9.8e-11
    block_value: float = 4.8e-10
    exposed_visits: float = 2.6
    special: float = 4.4e-11

    def is_of(self, device: str) -> bool:
        """Returns whether these are measured constants of devices of that name."""
        return self.source == "measured" and self.name == device

    def why_uncalibrated_bytes(self, blocks: Blocks | None = None) -> str | None:
        """Returns why times of 8-bit operands with block scales (None: row scales) are not known, or None.

        For the largest blocks the times with row scales are close enough; for other blocks they are not
        (`missing_block_timings`).
        """
        if blocks != PROMOTED[0] and (reason := self.missing_block_timings(blocks)):
            return reason
        if self.source == "expected":
            return f"products of 8-bit operands have not been timed on {self.name}"
        return None

    def efficiencies(self, blocks: Blocks | None) -> dict[str, float]:
        """Returns the entries of `efficiency` for block scales; None: for kernels without."""
        words = [blocks_name(blocks)] if blocks else []
        return {name: share for name, share in self.efficiency.items() if name.split()[3:] == words}

    def missing_block_timings(self, blocks: Blocks | None) -> str | None:
        """Returns why kernels with block scales are modeled with the times of row scales, or None."""
        if blocks is None or self.efficiencies(blocks):
            return None
        return f"kernels with scales of {in_words(blocks)} have not been timed on {self.name}"

    @cached_property
    def digest(self) -> str:
        """Returns a text that is equal if all fields are, also date, version and provenance.

        Ranks compare it before they choose by the constants.
        """
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:12]

    def to_json(self) -> str:
        """Returns the text of the file: numbers with four digits, one list per line."""
        text = json.dumps(_rounded(asdict(self)), indent=1)
        for _ in range(2):  # points of curves, then curves
            text = re.sub(r"\[([^][{}]|\[[^][\n]*\])*\]", lambda match: " ".join(match[0].split()), text)
        return text.replace("[ ", "[").replace(" ]", "]") + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Machine:
        """Returns the machine of a file's text.

        Raises:
            ValueError: The text is not JSON, fields are missing or unknown, or a number is not valid.
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
            machine = cls(**fields)
            _check_numbers(machine)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a machine's constants: {error}") from error
        return machine


def _check_numbers(machine: Machine) -> None:
    """Raises a ValueError unless numbers are finite and positive; times and thresholds may be 0."""
    for name, kind in Machine.__annotations__.items():
        value, least = getattr(machine, name), 0.0
        if kind in ("int", "float"):
            numbers = [value]
        elif kind == "Mapping[str, float]" and name != "driver":
            numbers = list(value.values())
        elif name == "collectives":
            curves = [curve for by in value.values() for curve in by.values()]
            numbers = [number for curve in curves for point in curve or ((None,),) for number in point]
        else:
            continue
        if name == "sms" or name.endswith(("rate", "stream")) or name in ("efficiency", "one_wave"):
            least = sys.float_info.min
        for number in numbers:
            if not isinstance(number, (int, float)) or not least <= number < math.inf:
                raise ValueError(
                    f"{name} must be finite {'positive numbers' if least else 'numbers, 0 or more'}; "
                    f"got {number!r}"
                )


def _rounded(value: Any) -> Any:
    """Returns the value with all floats rounded to four digits."""
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def load(name_or_path: str) -> Machine:
    """Returns a shipped machine by its name, such as ``"h200"``, or one from a file.

    Raises:
        ValueError: There is no such file, or it contains no machine; the message names it.
    """
    shipped = SHIPPED / f"{name_or_path}.json"
    file = shipped if shipped.exists() else Path(name_or_path)
    try:
        text = file.read_bytes()
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
    """Writes a machine's file atomically: a reader sees the old or the new file."""
    replace_text(file, machine.to_json())


def device_name(arch: str) -> str:
    """Returns the name of this process's CUDA device; empty without one, or with another architecture."""
    if not torch.cuda.is_available():
        return ""
    arch_of_device = arch_of_capability(torch.cuda.get_device_capability())
    return torch.cuda.get_device_name() if arch_of_device is not None and arch_of_device.name == arch else ""


def user_file(device: str) -> Path:
    """Returns the file of the constants that this user has measured on devices of a name."""
    stem = re.sub("[^a-z0-9]+", "-", device.lower()).strip("-")
    return Path(platformdirs.user_config_dir("overlap-gemm")) / "machines" / f"{stem}.json"


SOURCES = ("h200", "h100", "b200")
"""Shipped files; the first one of an architecture is used for unnamed (emulated) devices."""

TENSOR_PEAKS = {"NVIDIA H20": 148e12}
"""Published 16-bit peaks (FLOP/s) of devices with limited tensor cores, which drivers do not report."""

REACHED = 0.95
"""Maximum share of such a peak that products reach."""

PCIE_RATE = 50e9
"""Bytes/s out of a GPU without NVLink, by PCIe 5.0 x16."""


@lru_cache(maxsize=16)
def machine_for(arch: str, device: str | None = None) -> Machine | None:
    """Returns the constants for the kernels of an architecture, or None.

    Cached by the arguments: later changes of files and of `OVERLAP_GEMM_MACHINE` have no effect in this
    process. The constants are those of the device's name, measured by this user or shipped, otherwise
    `scaled` ones.

    Args:
        arch: Target architecture.
        device: Name of the device; default `device_name`.

    Raises:
        ValueError: A file of constants is damaged, or the user's file is not for this process's device.
    """
    here = device_name(arch)
    device = here if device is None else device
    if named := os.environ.get(MACHINE_VARIABLE):
        if arch in (machine := load(named)).archs:
            return machine
        if here:  # constants of other architectures are read, too: kernels are compiled for absent devices
            raise ValueError(
                f"{MACHINE_VARIABLE}={named} has constants for {', '.join(machine.archs)}, and {here} is "
                f"{arch}: name a file for {arch}, or unset the variable"
            )
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
        min(known, key=lambda machine: _distance(machine.driver["memory"], driver.memory)), device, driver
    )


def facts_of_device(arch: str, device: str) -> DriverFacts | None:
    """Returns the driver's figures of this process's device; None if its name is different or it has none."""
    if not device or device != device_name(arch):
        return None
    return driver_facts(torch.cuda.current_device())


def _distance(rate: float, other: float) -> float:
    return max(rate / other, other / rate)


def scaled(base: Machine, device: str, driver: DriverFacts) -> Machine:
    """Returns constants of an unmeasured device, scaled from `base`'s by the driver's figures of both.

    Products scale with SMs times clock, or with the power limit if that ratio is smaller. Memory scales with
    its bus, and links with their number. Latencies, host times and the kernels' efficiencies are `base`'s.

    Args:
        base: Measured constants of the same architecture, with `Machine.driver`.
        device: Name of the device.
        driver: The driver's figures of the device.
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
    why = f"scaled from {base.name}'s by the driver's figures"
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
    """Returns a number with four digits, so that slightly different drivers give equal constants."""
    return float(f"{number:.4g}")


def why_uncalibrated(arch: str, device: str) -> str | None:
    """Returns why times on devices of a name cannot be predicted, or None if their constants are measured.

    Args:
        arch: Architecture of the devices.
        device: Name of the devices.

    Raises:
        ValueError: A file of constants is damaged.
    """
    machine = machine_for(arch, device)
    if machine is not None and machine.is_of(device):
        return None
    if machine is None:
        nearest = ""
    elif machine.source == "scaled":
        nearest = f", and those {machine.provenance['mma_rate']} are a prior for measurements"
    else:
        nearest = f", and those of {machine.name} ({machine.source}) are not valid for it"
    return (
        f"the model's constants have not been measured on {device}{nearest}: "
        f"run `overlap-gemm tune` to measure them"
    )
