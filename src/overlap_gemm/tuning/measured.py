"""What was measured of calls of a kind on this machine: which backend was fastest, and by which fused kernel.

`backends.autotuning` measures. What it finds is kept with the group until that ends, and in a file, so that a
later process need not measure again. An entry holds on one device name, number of SMs and power limit, for
the versions of this package, of the DSL and of torch that it was measured with; entries of others stay in the
file and are not used. A candidate during whose first call the process ended is refused from then on.

Environment: ``OVERLAP_GEMM_AUTOTUNE`` says when to measure (`POLICIES`); ``OVERLAP_GEMM_MEASURED`` names
another file, which may be shared by many nodes and read-only, or is ``off``: nothing is read or written.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import filelock
import platformdirs
import torch

from ..config.naming import by
from .driver import power_limit
from .files import replace_text

logger = logging.getLogger(__name__)

AUTOTUNE_VARIABLE = "OVERLAP_GEMM_AUTOTUNE"
FILE_VARIABLE = "OVERLAP_GEMM_MEASURED"
OFF = "off"

Policy = Literal["model", "measure"]
"""Whether `auto` compares predicted times or measures its candidates at the first call of a kind."""

POLICIES: tuple[Policy, ...] = get_args(Policy)

PATIENCE = 10.0
"""Seconds that a process waits for another one that writes the file; then what it found is not kept."""

Seconds = tuple[tuple[str, float], ...]
"""(backend, seconds of a call)."""


class Kernel(NamedTuple):
    """How a fused kernel differs from the one that the model chooses: what `configured` would be told.

    Attributes:
        fields: (name, value) of `GemmConfig`; none: the model's choice.
        algorithm: Of an all-reduce; None: the model's choice.
    """

    fields: tuple[tuple[str, Any], ...] = ()
    algorithm: str | None = None

    def __str__(self) -> str:
        """Its values, in one line."""
        values = (by(value) if isinstance(value, tuple) else str(value) for _, value in self.fields)
        words = [*values, self.algorithm or ""]
        return " ".join(word for word in words if word) or "the model's kernel"


@dataclass(frozen=True)
class Measured:
    """The times of the candidates for calls of a kind; equal on all ranks.

    Attributes:
        eager: Of each backend, called from Python, by growing time; of `fused` by `kernel`.
        captured: The same in a CUDA graph; empty on CPUs.
        kernel: The fused kernel that was fastest on the device.
        candidates: How many were measured, kernels and backends.
        date: When, ISO 8601.
    """

    eager: Seconds
    captured: Seconds
    kernel: Kernel
    candidates: int
    date: str

    def seconds(self, captured: bool) -> Mapping[str, float]:
        """Returns the seconds of each backend, in a CUDA graph or outside of one."""
        return dict(self.captured if captured and self.captured else self.eager)

    def __str__(self) -> str:
        """How many candidates were measured, and when."""
        return f"measured, {self.candidates} candidates, {self.date}"

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Measured:
        """Returns what an entry of the file says.

        Raises:
            KeyError, TypeError, ValueError: It is no entry.
        """

        def pairs(of: Any) -> Seconds:
            return tuple((str(name), float(seconds)) for name, seconds in of)

        fields, algorithm = entry["kernel"]
        named = tuple(
            (str(name), tuple(value) if isinstance(value, list) else value) for name, value in fields
        )
        kernel = Kernel(named, None if algorithm is None else str(algorithm))
        eager, captured = pairs(entry["eager"]), pairs(entry["captured"])
        if not eager:
            raise ValueError("no backend has a time")
        return cls(eager, captured, kernel, int(entry["candidates"]), str(entry["date"]))


Conditions = Mapping[str, Any]
"""What else measured times depend on: the device and the versions."""


@cache
def conditions(device: torch.device, world: int) -> Conditions:
    """Returns what times on a device in a group of so many ranks depend on, but for the kernels' versions."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        properties = torch.cuda.get_device_properties(index)
        place = {
            "device": properties.name,
            "sms": properties.multi_processor_count,
            "watts": power_limit(index),
        }
    else:
        place = {"device": device.type, "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    return {**place, "ranks": world, "torch": str(torch.__version__)}


def measured_file() -> Path | None:
    """Returns where measured choices are kept; None: nowhere."""
    named = os.environ.get(FILE_VARIABLE)
    if named == OFF:
        return None
    return Path(named) if named else Path(platformdirs.user_cache_dir("overlap-gemm")) / "measured.json"


class Entries(NamedTuple):
    """What a file says under some conditions.

    Attributes:
        measured: By kind of call.
        refused: (kind of call, candidate), during whose first call a process ended.
    """

    measured: Mapping[str, Measured]
    refused: frozenset[tuple[str, str]]


def read(under: Conditions) -> Entries:
    """Returns the file's entries under these conditions; none where there is no file.

    Raises:
        ValueError: The file is damaged, or cannot be read; the message names it.
    """
    file = measured_file()
    if file is None:
        return Entries({}, frozenset())
    fitting = [entry for entry in _entries(file) if entry.get("conditions") == dict(under)]
    try:
        found = {entry["kind"]: Measured.of(entry) for entry in fitting if "eager" in entry}
        refused = {(entry["kind"], entry["refused"]) for entry in fitting if "refused" in entry}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is damaged: {error!r}; remove it, or set {FILE_VARIABLE}") from error
    return Entries(found, frozenset(refused | _abandoned(file, under)))


def keep(under: Conditions, kind: str, found: Measured) -> None:
    """Puts an entry into the file, in place of another one of the same kind and conditions."""
    _put({"kind": kind, "conditions": dict(under), **asdict(found)})


@contextmanager
def trying(under: Conditions, kind: str, candidate: str) -> Iterator[None]:
    """Notes in a file of its own what is tried, until the block ends: a process that ends in it leaves it."""
    file, note = measured_file(), {"kind": kind, "conditions": dict(under), "refused": candidate}
    mark = None if file is None else file.with_name(f"{file.name}.{_host()}.{os.getpid()}.trying")
    if mark is not None:
        with suppress(OSError):
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.write_text(json.dumps(note))
    try:
        yield
    finally:
        if mark is not None:
            with suppress(OSError):
                mark.unlink(missing_ok=True)


def _abandoned(file: Path, under: Conditions) -> set[tuple[str, str]]:
    """Returns what processes of this host tried and did not survive; moves it into the file where it can."""
    found: set[tuple[str, str]] = set()
    for mark in file.parent.glob(f"{file.name}.{_host()}.*.trying"):
        with suppress(OSError, ValueError, KeyError):
            if _is_alive(int(mark.name.split(".")[-2])):
                continue
            note = json.loads(mark.read_text())
            if note["conditions"] == dict(under):
                found.add((note["kind"], note["refused"]))
            if _put(note):
                mark.unlink()
    return found


def _host() -> str:
    return re.sub("[^A-Za-z0-9-]", "-", socket.gethostname())


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _entries(file: Path) -> list[dict[str, Any]]:
    """Returns all entries of a file, none where there is none.

    Raises:
        ValueError: It is damaged, or cannot be read.
    """
    try:
        text = file.read_text()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    try:
        found = json.loads(text)["entries"]
        if not all(isinstance(entry, dict) and "kind" in entry for entry in found):
            raise TypeError("an entry without a kind")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged: {error!r}; remove it, or set {FILE_VARIABLE}") from error
    return list(found)


def _put(entry: dict[str, Any]) -> bool:
    """Puts an entry into the file, which readers see as it was or as it is then; returns whether it did."""
    file = measured_file()
    if file is None:
        return False
    place = "kind", "conditions", "refused"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{file}.lock", timeout=PATIENCE):
            others = [e for e in _entries(file) if any(e.get(name) != entry.get(name) for name in place)]
            replace_text(file, json.dumps({"entries": [*others, entry]}, indent=1))
    except (OSError, ValueError, filelock.Timeout) as error:
        _say_unkept(str(file), f"{type(error).__name__}: {error}")
        return False
    return True


@cache
def _say_unkept(file: str, why: str) -> None:
    logger.warning("what was measured is not kept in %s: %s", file, why)
