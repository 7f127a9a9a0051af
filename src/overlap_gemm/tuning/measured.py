"""Measured choices: for each call signature the fastest backend and fused kernel on this machine.

`backends.autotuning` measures. Results are kept with the group, and in a file for later processes. An entry
is valid for one device name, number of SMs and power limit. The versions of this package, the DSL and torch
must be those of the measurement, and so must the number of ranks. Other entries stay in the file unused. If
the process ends (crashes) during the first call of a candidate, later processes refuse that candidate.

| variable | meaning |
|---|---|
| ``OVERLAP_GEMM_AUTOTUNE`` | when to measure (`POLICIES`) |
| ``OVERLAP_GEMM_MEASURED`` | another file, possibly shared by many nodes and read-only; ``off``: no file |
"""

from __future__ import annotations

import json
import logging
import math
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
"""Rule of `auto`: compare predicted times, or measure the candidates at the first call of a signature."""

POLICIES: tuple[Policy, ...] = get_args(Policy)

LOCK_TIMEOUT = 10.0
"""Seconds that a process waits for another one that writes the file; then its result is not stored."""

Seconds = tuple[tuple[str, float], ...]
"""(backend, seconds of a call) pairs."""


class Kernel(NamedTuple):
    """Difference of a fused kernel from the model's choice, as arguments of `configured`.

    Attributes:
        fields: (name, value) of fields of `GemmConfig`; empty: the model's choice.
        algorithm: Algorithm of an all-reduce; None: the model's choice.
    """

    fields: tuple[tuple[str, Any], ...] = ()
    algorithm: str | None = None

    def __str__(self) -> str:
        """Returns the values in one line."""
        values = (by(value) if isinstance(value, tuple) else str(value) for _, value in self.fields)
        words = [*values, self.algorithm or ""]
        return " ".join(word for word in words if word) or "the model's kernel"


@dataclass(frozen=True)
class Measured:
    """Measured times of the candidates for a call signature; equal on all ranks.

    Attributes:
        eager: Times of the backends, called from Python, in ascending order; `fused` with `kernel`.
        captured: Times in a CUDA graph; empty on CPUs.
        kernel: Fused kernel that was fastest on the device.
        candidates: Number of measured kernels and backends.
        date: ISO 8601 date of the measurement.
    """

    eager: Seconds
    captured: Seconds
    kernel: Kernel
    candidates: int
    date: str

    def seconds(self, captured: bool) -> Mapping[str, float]:
        """Returns the seconds of each backend, in a CUDA graph or eager."""
        return dict(self.captured if captured and self.captured else self.eager)

    def __str__(self) -> str:
        """Returns number of candidates and date."""
        return f"measured, {self.candidates} candidates, {self.date}"

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Measured:
        """Returns the contents of an entry of the file.

        Raises:
            KeyError, TypeError, ValueError: The entry is invalid.
        """

        def pairs(of: Any) -> Seconds:
            times = tuple((str(name), float(seconds)) for name, seconds in of)
            if not all(0 < seconds < math.inf for _, seconds in times):
                raise ValueError(f"times must be finite and positive, got {times}")
            return times

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
"""Facts on which measured times depend in addition to the call: the device and the versions."""


@cache
def conditions(device: torch.device, world: int) -> Conditions:
    """Returns the facts on which times in a group of `world` ranks depend, without the kernels' versions."""
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
    """Returns the file of measured choices; None: there is none."""
    named = os.environ.get(FILE_VARIABLE)
    if named is not None and named.lower() == OFF:
        return None
    return Path(named) if named else Path(platformdirs.user_cache_dir("overlap-gemm")) / "measured.json"


class Entries(NamedTuple):
    """Entries of a file under some conditions.

    Attributes:
        measured: Measured times by call signature.
        refused: (call signature, candidate) pairs during whose first call a process ended.
    """

    measured: Mapping[str, Measured]
    refused: frozenset[tuple[str, str]]


def read(under: Conditions) -> Entries:
    """Returns the file's entries under these conditions; none if there is no file.

    Rank 0 calls it, and sends the entries to the group. Candidates that ended a process on this host are
    moved into the file.

    Raises:
        ValueError: The file is damaged or cannot be read; the message names it.
    """
    file = measured_file()
    if file is None:
        return Entries({}, frozenset())
    fitting = [entry for entry in _entries(file) if entry.get("conditions") == dict(under)]
    try:
        measured = {entry["kind"]: Measured.of(entry) for entry in fitting if "eager" in entry}
        refused = {(entry["kind"], entry["refused"]) for entry in fitting if "refused" in entry}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is damaged: {error!r}; remove it, or set {FILE_VARIABLE}") from error
    return Entries(measured, frozenset(refused | _abandoned(file, under)))


def keep(under: Conditions, kind: str, measured: Measured) -> None:
    """Writes an entry to the file, in place of one with the same signature and conditions.

    Does not raise: if the file cannot be written, or is locked for `LOCK_TIMEOUT`, a warning is logged once.
    """
    _put({"kind": kind, "conditions": dict(under), **asdict(measured)})


@contextmanager
def trying(under: Conditions, kind: str, candidate: str) -> Iterator[None]:
    """Records a candidate in a file during the block; the file remains if the process ends in the block.

    An exception removes it. Only processes on the same host read it (`read`).
    """
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
    """Returns the candidates during which processes of this host ended, and moves them into the main file.

    The mark of a process that ended while it wrote it names none, and is removed.
    """
    refused: set[tuple[str, str]] = set()
    for mark in file.parent.glob(f"{file.name}.{_host()}.*.trying"):
        with suppress(OSError, ValueError):
            if _is_alive(int(mark.name.split(".")[-2])):
                continue
            try:
                note = json.loads(mark.read_text())
                entry = note["conditions"], (note["kind"], note["refused"])
            except (ValueError, KeyError, TypeError):
                mark.unlink()
                continue
            if entry[0] == dict(under):
                refused.add(entry[1])
            if _put(note):
                mark.unlink()
    return refused


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
    """Returns all entries of a file, or none if it does not exist.

    Raises:
        ValueError: The file is damaged or cannot be read.
    """
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    try:
        entries = json.loads(text)["entries"]
        if not all(isinstance(entry, dict) and "kind" in entry for entry in entries):
            raise TypeError("an entry without a kind")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged: {error!r}; remove it, or set {FILE_VARIABLE}") from error
    return list(entries)


def _put(entry: dict[str, Any]) -> bool:
    """Writes an entry to the file atomically; returns whether it was written."""
    file = measured_file()
    if file is None:
        return False
    place = "kind", "conditions", "refused"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{file}.lock", timeout=LOCK_TIMEOUT):
            others = [e for e in _entries(file) if any(e.get(name) != entry.get(name) for name in place)]
            replace_text(file, json.dumps({"entries": [*others, entry]}, indent=1))
    except (OSError, ValueError, filelock.Timeout) as error:
        _warn_not_stored(str(file), f"{type(error).__name__}: {error}")
        return False
    return True


@cache
def _warn_not_stored(file: str, why: str) -> None:
    logger.warning("measured times are not stored in %s: %s", file, why)
