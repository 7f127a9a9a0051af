"""Compile each kernel configuration once: in memory for the process, on disk for the machine.

A disk entry is the DSL's own export of a compiled function (an ELF object with host launcher and cubin)
beside a JSON file that says what it is. The JSON is written last, so an entry that has it is whole;
its digest is checked before the object is loaded, because a damaged ELF object would bring the process down.
Functions are TVM-FFI functions (``OPTIONS``): their calls cost a few microseconds, where the DSL's own
argument conversion costs about a hundred, and they check the arguments they are given.

The key is everything that could change the machine code: the configuration's ``repr`` (a frozen dataclass
prints its fields), the architecture, the DSL version, and the text of all source that makes device code.

Environment: ``OVERLAP_GEMM_CACHE_DIR`` moves the folder (default: the user cache folder),
``OVERLAP_GEMM_CACHE=0`` keeps everything in memory.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import filelock
import platformdirs

logger = logging.getLogger(__name__)

DEVICE_ROOMS = ("device", "pipelines", "kernels", "transports", "schedules")
"""Folders of the package whose source text decides what a kernel compiles to."""

OPTIONS = "--enable-tvm-ffi"
"""What to pass to ``cute.compile`` for a function that this cache shall keep."""

SYMBOL = "overlap_gemm"
"""Name of the exported function; each entry is its own object, so one name serves all."""


@cache
def source_digest() -> str:
    """SHA-256 over the source files of ``DEVICE_ROOMS``, by path and text."""
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for room in DEVICE_ROOMS:
        for file in sorted((package / room).rglob("*.py")):
            digest.update(f"{file.relative_to(package)}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


@cache
def dsl_version() -> str:
    """Version of the installed CuTe DSL."""
    return importlib.metadata.version("nvidia-cutlass-dsl")


def cache_folder() -> Path | None:
    """Where entries live on disk, or None where the disk cache is switched off."""
    if os.environ.get("OVERLAP_GEMM_CACHE", "1") == "0":
        return None
    if folder := os.environ.get("OVERLAP_GEMM_CACHE_DIR"):
        return Path(folder)
    return platformdirs.user_cache_path("overlap_gemm") / "kernels"


@dataclass
class CompileCache:
    """Maps a configuration to its compiled host function.

    Attributes:
        folder: folder of the disk cache; None for memory only.
        log: one line per function obtained: (where it came from, seconds, configuration).
    """

    folder: Path | None = field(default_factory=cache_folder)
    log: list[tuple[str, float, str]] = field(default_factory=list)
    _loaded: dict[tuple[Hashable, str], Any] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def has(self, config: Hashable, arch: str) -> bool:
        """Whether `get` would find the function in memory."""
        return (config, arch) in self._loaded

    def get(self, config: Hashable, arch: str, build: Callable[[], Any]) -> Any:
        """The compiled function of ``config`` for ``arch``.

        Args:
            config: anything hashable whose ``repr`` states every compile-time choice.
            arch: target, e.g. ``"sm_90a"``.
            build: compiles it (``cute.compile`` with `OPTIONS`); called at most once per process and key, and
                not at all where the disk has the entry.

        Returns:
            The DSL's callable, from memory, from disk or fresh.
        """
        if (function := self._loaded.get((config, arch))) is not None:
            return function
        name = f"{arch} {config!r}"
        key = hashlib.sha256("\0".join((name, dsl_version(), source_digest())).encode()).hexdigest()
        with self._lock:
            if (config, arch) not in self._loaded:
                start = time.perf_counter()
                self._loaded[config, arch], origin = self._find(key, name, build)
                self.log.append((origin, time.perf_counter() - start, name))
            return self._loaded[config, arch]

    def _find(self, key: str, name: str, build: Callable[[], Any]) -> tuple[Any, str]:
        if self.folder is None:
            return build(), "compiled"
        self.folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(self.folder / f"{key}.lock"):
            if (function := self._load(key)) is not None:
                return function, "disk"
            function = build()
            self._store(key, name, function)
        return function, "compiled"

    def _load(self, key: str) -> Any | None:
        """The function of a whole entry; None where there is no entry or it is damaged (and said so)."""
        assert self.folder is not None
        description, binary = self.folder / f"{key}.json", self.folder / f"{key}.o"
        try:
            digest = json.loads(description.read_text())["sha256"]
            if hashlib.sha256(binary.read_bytes()).hexdigest() != digest:
                raise ValueError(f"{binary.name} does not match its recorded digest")
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, OSError) as error:
            logger.warning("compile cache: entry %s is damaged (%s); compiling it again", key[:12], error)
            return None
        from cutlass.cute.runtime import load_module

        return load_module(str(binary), enable_tvm_ffi=True)[SYMBOL]

    def _store(self, key: str, name: str, function: Any) -> None:
        assert self.folder is not None
        with tempfile.TemporaryDirectory() as scratch:
            exported = Path(scratch) / "kernel.o"
            function.export_to_c(str(exported), function_name=SYMBOL)
            content = exported.read_bytes()
        description = {
            "kernel": name,
            "dsl": dsl_version(),
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
        _replace(self.folder / f"{key}.o", content)
        _replace(self.folder / f"{key}.json", json.dumps(description, indent=1).encode())


def _replace(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old text or the new, never a part."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(path)
