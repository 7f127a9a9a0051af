"""The constants of a machine that the model computes with: measured once (`overlap-gemm tune`) or expected.

A machine's file is JSON with the fields of `Machine`. The package ships one for Hopper and one for Blackwell
(`machines/`); `tune` writes one into the user's configuration folder, which goes before the shipped one of
its architecture; `OVERLAP_GEMM_MACHINE`, a path or the name of a shipped file, goes before both.

All ranks of a group must choose with the same constants: compare `Machine.digest`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

import platformdirs

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
        source: ``"measured"``, or ``"expected"`` where no such device has been measured.
        version: Of this package that wrote the file.
        date: When, ISO 8601.
        mma_rate: FLOP/s of the best kernel on a large product, 16-bit operands.
        memory_rate: Bytes/s of device memory.
        link_rate: Bytes/s out of each GPU, by SM stores to all peers at once: the bound of an op.
        bulk_rate: The same as the fused kernel's bulk stores reach.
        copy_rate: The same by copy engines.
        launch: Seconds that a kernel costs beside its tiles: launch, prologue, first loads.
        epilogue: Seconds per element of a CTA tile between accumulator and ring.
        arrival: Seconds between a peer's last store and the first load of what it stored.
        step: Seconds that a point-to-point transfer of `decomposed` costs beside its bytes.
        efficiency: ``"MMA_KIND TILE CLUSTER"`` -> share of `mma_rate`. A ``"swapped"`` kernel's follows from
            what one SM loads, for which it waits (on H200 59 GB/s of A and B together; of B200 the same is
            expected).
        collectives: Collective -> ranks -> curve. ``"sum"`` is all-to-all with a float32 sum behind it.
        host: Backend or ``"product"`` -> seconds of host time of an eager call.
        one_wave: The same as `efficiency` where a call's tiles all run at once, of kernels of which that was
            measured: then they share what they load in the L2 without being told to, and draw no more power.
    """

    name: str
    archs: tuple[str, ...]
    sms: int
    source: Literal["measured", "expected"]
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
    one_wave: Mapping[str, float] = field(default_factory=dict)

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
        return Machine.from_json(file.read_text())
    except (OSError, ValueError) as error:
        names = ", ".join(sorted(path.stem for path in SHIPPED.glob("*.json")))
        raise ValueError(f"no machine {name_or_path!r} (shipped: {names}): {error}") from error


def save(machine: Machine, file: Path) -> None:
    """Writes a machine's file at once: a reader sees the old one or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.{os.getpid()}")
    part.write_text(machine.to_json())
    part.replace(file)


def user_file(arch: str) -> Path:
    """Where `tune` keeps the constants of this user's machine of an architecture."""
    return Path(platformdirs.user_config_dir("overlap-gemm")) / "machines" / f"{arch}.json"


@lru_cache(maxsize=16)
def machine_for(arch: str) -> Machine | None:
    """The constants for a target, None where there are none. Read once per process.

    Raises:
        ValueError: A file that should hold them does not.
    """
    named = os.environ.get(MACHINE_VARIABLE)
    if named and arch in (machine := load(named)).archs:
        return machine
    if user_file(arch).exists():
        return load(str(user_file(arch)))
    every = [load(file.stem) for file in sorted(SHIPPED.glob("*.json"))]
    return next((machine for machine in every if arch in machine.archs), None)
