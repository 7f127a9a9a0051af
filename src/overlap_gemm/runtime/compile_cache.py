"""Compile each kernel configuration once: in memory for the process, on disk for the machine.

A disk entry is the DSL's own export of a compiled function (an ELF object with host launcher and cubin)
alongside a JSON file that says what it is. The JSON is written last, so an entry that has it is whole;
its digest is checked before the object is loaded, because a damaged ELF object would bring the process down.
Functions are TVM-FFI functions (``OPTIONS``): their calls cost a few microseconds, where the DSL's own
argument conversion costs about a hundred, and they check the arguments they are given.

The key is everything that could change the machine code: the configuration's ``repr`` (a frozen dataclass
prints its fields), the GPU's and the CPU's architecture, the versions of the DSL and of TVM-FFI, and the text
of all source that makes device code.

An entry is executed, so it must be this user's or root's, and nobody else may be able to write to it or to
its folder (the rule of ssh for its keys). A folder that may not be used, or cannot be written (read-only, a
full disk), costs compile time and nothing else: functions are kept in memory, and one warning names the
folder and the cause. What is in the folder is kept below a limit; entries not used for longest go first.

Environment: ``OVERLAP_GEMM_CACHE_DIR`` moves the folder (default: the user cache folder),
``OVERLAP_GEMM_CACHE=0`` keeps everything in memory, ``OVERLAP_GEMM_CACHE_LIMIT`` bounds it (bytes, or
``"500 MB"``; default 1 GiB).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import filelock
import platformdirs

from .environment import nbytes

logger = logging.getLogger(__name__)

DEVICE_SOURCES = (
    "build.py", "config", "device", "epilogues", "exchange", "gather",
    "kernel", "mainloop", "pipelines", "spec", "transports",
)  # fmt: skip
"""Files and folders of the package whose source text decides what a kernel compiles to."""

OPTIONS = "--enable-tvm-ffi"
"""What to pass to ``cute.compile`` for a function that this cache shall keep."""

SYMBOL = "overlap_gemm"
"""Name of the exported function; each entry is its own object, so one name serves all."""

LIMIT = 1 << 30
"""Bytes that the folder may hold; an entry takes 50 to 200 KiB."""

PATIENCE = 120.0
"""Seconds that a process waits for another one that compiles the same; then it compiles by itself."""

ABANDONED = 3600.0
"""Seconds after which a file that is neither object nor description has been left by a process that died."""


@cache
def source_digest() -> str:
    """SHA-256 over the source files of ``DEVICE_SOURCES``, by path and text."""
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for source in DEVICE_SOURCES:
        path = package / source
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(f"{file.relative_to(package)}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


@cache
def dsl_version() -> str:
    """Version and flavour of the installed CuTe DSL, ``4.8.1+cu12``: each flavour has its own ptxas."""
    from cutlass._mlir._mlir_libs import _cutlass_ir

    flavour = Path(_cutlass_ir.__file__).name.split(".")[1]
    return f"{importlib.metadata.version('nvidia-cutlass-dsl')}+{flavour}"


@cache
def host() -> str:
    """What the host half of an entry is made for: the CPU's architecture, and TVM-FFI's version."""
    return f"{platform.machine()} tvm-ffi {importlib.metadata.version('apache-tvm-ffi')}"


def cache_folder() -> Path | None:
    """Where entries live on disk, or None where the disk cache is switched off."""
    if os.environ.get("OVERLAP_GEMM_CACHE", "1") == "0":
        return None
    if folder := os.environ.get("OVERLAP_GEMM_CACHE_DIR"):
        return Path(folder)
    return platformdirs.user_cache_path("overlap_gemm") / "kernels"


def load_function(binary: Path) -> Any:
    """The function of an object file."""
    from cutlass.cute.runtime import load_module

    return load_module(str(binary), enable_tvm_ffi=True)[SYMBOL]


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
    _warned: bool = False

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
        key = hashlib.sha256("\0".join((name, dsl_version(), host(), source_digest())).encode()).hexdigest()
        with self._lock:
            if (config, arch) not in self._loaded:
                start = time.perf_counter()
                self._loaded[config, arch], origin = self._find(key, name, build)
                self.log.append((origin, time.perf_counter() - start, name))
            return self._loaded[config, arch]

    def _find(self, key: str, name: str, build: Callable[[], Any]) -> tuple[Any, str]:
        with self._entry(key) as (folder, reason):
            if folder is not None and (function := self._load(folder, key)) is not None:
                return function, "disk"
            function = build()
            try:
                if reason is None and folder is not None:
                    limit = nbytes("OVERLAP_GEMM_CACHE_LIMIT", LIMIT)
                    store(folder, key, name, function)
                    prune(folder, limit, keep=key)
            except Exception as error:  # whatever it is, the function is there
                reason = error
            if reason is not None:
                self._keep_in_memory(reason)
        return function, "compiled"

    @contextmanager
    def _entry(self, key: str) -> Iterator[tuple[Path | None, Exception | None]]:
        """The folder, None where it may not be read; and why its entry is not this process's to write."""
        folder, lock = self.folder, None
        reason: Exception | None = None
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                check_owner(folder)
                lock = filelock.FileLock(folder / f"{key}.lock", timeout=PATIENCE)
                lock.acquire()
            except (OSError, NotImplementedError) as error:  # the latter where a file system has no locks
                reason, lock = error, None
                folder = None if isinstance(error, OwnerError) else folder
        try:
            yield folder, reason
        finally:
            if lock is not None:
                lock.release()

    def _keep_in_memory(self, reason: Exception) -> None:
        if not self._warned:
            logger.warning(
                "compile cache: folder %s cannot be used (%s: %s); compiled kernels stay in this process's "
                "memory. OVERLAP_GEMM_CACHE_DIR names another folder, OVERLAP_GEMM_CACHE=0 none",
                self.folder,
                type(reason).__name__,
                reason,
            )
            self._warned = True

    def _load(self, folder: Path, key: str) -> Any | None:
        """The function of a whole entry; None where there is none or it cannot be used (and said so)."""
        description, binary = folder / f"{key}.json", folder / f"{key}.o"
        try:
            check_owner(description)
            check_owner(binary)
            digest = json.loads(description.read_text())["sha256"]
            if hashlib.sha256(binary.read_bytes()).hexdigest() != digest:
                raise ValueError(f"{binary.name} does not match its recorded digest")
            function = load_function(binary)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:  # of many kinds where an object does not load
            logger.warning(
                "compile cache: entry %s in %s is damaged (%s); compiling it again", key[:12], folder, error
            )
            return None
        with suppress(OSError):
            os.utime(description)  # used now, so not the next one to go
        return function


class OwnerError(OSError):
    """Somebody else could have written what would be executed."""


def check_owner(path: Path) -> None:
    """Raises unless a file or folder is this user's or root's, and only its owner may write to it.

    Raises:
        OwnerError: it is not; the message says what would mend it.
        OSError: it cannot be looked at.
    """
    found, user = path.stat(), os.geteuid()
    if found.st_uid not in (user, 0):
        raise OwnerError(f"{path} belongs to user {found.st_uid}, and this process is user {user}'s")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OwnerError(f"others may write to {path} (mode {found.st_mode & 0o777:o}): chmod go-w it")


def store(folder: Path, key: str, name: str, function: Any) -> None:
    """Writes an entry.

    Raises:
        OSError: it could not be written.
    """
    with tempfile.TemporaryDirectory() as scratch:
        exported = Path(scratch) / "kernel.o"
        function.export_to_c(str(exported), function_name=SYMBOL)
        content = exported.read_bytes()
    description = {
        "kernel": name,
        "dsl": dsl_version(),
        "host": host(),
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    _replace(folder / f"{key}.o", content)
    _replace(folder / f"{key}.json", json.dumps(description, indent=1).encode())


def prune(folder: Path, limit: int, keep: str) -> None:
    """Removes what dead processes left, and the entries not used for longest, until a limit holds.

    Args:
        folder: of the entries.
        limit: bytes that may stay.
        keep: an entry that stays.

    Raises:
        OSError: the folder cannot be read.
    """
    entries: dict[str, list[Path]] = {}
    sizes: dict[str, int] = {}
    used: dict[str, float] = {}
    for file in folder.iterdir():
        with suppress(FileNotFoundError):  # another process is at it, too
            found, name = file.stat(), file.name.partition(".")[0]
            if file.suffix not in (".o", ".json", ".lock"):
                if time.time() - found.st_mtime > ABANDONED:
                    file.unlink()
                continue
            entries.setdefault(name, []).append(file)
            sizes[name] = sizes.get(name, 0) + found.st_size
            used[name] = max(used.get(name, 0.0), found.st_mtime)
    total = sum(sizes.values())
    for name in sorted(entries, key=lambda name: used[name]):
        if total <= limit:
            return
        if name != keep:
            total -= sizes[name]
            for file in sorted(entries[name], key=lambda file: file.suffix != ".json"):  # no entry by halves
                file.unlink(missing_ok=True)


def _replace(path: Path, content: bytes) -> None:
    """Write a file, for its owner alone, so that a reader sees the old text or the new, never a part."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
