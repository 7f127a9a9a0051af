"""Cache of compiled kernels: in memory for the process, on disk for the machine.

**Entry.** The DSL's export of a compiled function (an ELF object with host launcher and cubin), and a JSON
file that describes it. The JSON is written last, so an entry with a JSON is complete. The object's digest is
checked before it is loaded, because a damaged ELF object would crash the process. Functions are TVM-FFI
functions (``OPTIONS``). A call of one costs a few microseconds and checks the arguments; the DSL's own
argument conversion costs about a hundred microseconds.

**Key.** All inputs that may change the machine code:

- the configuration's ``repr`` (a frozen dataclass prints its fields)
- the architectures of GPU and CPU
- the versions of the DSL and of TVM-FFI
- the text of all source that makes device code

**Trust.** Entries are executed. Therefore an entry and its folder must belong to this user or root, and no
other user may have write permission (ssh's rule for keys). If the folder cannot be trusted or written
(read-only, full disk), functions are kept in memory, and one warning names the folder and the cause. The only
cost is compile time.

**Failures.** A process that needs a kernel which another one compiles waits for the lock of the key, then
loads the entry. If there is none after `LOCK_TIMEOUT`, it compiles without storing, and warns once. A damaged
entry is logged as a warning, compiled again and replaced. A folder that other users may write is neither read
nor written.

**Size.** The folder is kept below a limit; entries that were not used for longest are removed first.

| variable | meaning |
|---|---|
| ``OVERLAP_GEMM_CACHE_DIR`` | folder; default: the user's cache folder |
| ``OVERLAP_GEMM_CACHE=0`` | memory only |
| ``OVERLAP_GEMM_CACHE_LIMIT`` | limit in bytes, or ``"500 MB"``; default 1 GiB |
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import re
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

from ..config.arch import ARCHS
from .environment import choice, nbytes

logger = logging.getLogger(__name__)

DEVICE_SOURCES = (
    "build.py", "config", "device", "epilogues", "exchange", "gather",
    "kernel", "mainloop", "pipelines", "spec", "transports",
)  # fmt: skip
"""Files and folders of the package whose source text determines the compiled kernels."""

OPTIONS = "--enable-tvm-ffi"
"""Options of ``cute.compile`` for functions that this cache stores."""

SYMBOL = "overlap_gemm"
"""Name of the exported function; each entry is an object of its own, so all use the same name."""

LIMIT = 1 << 30
"""Limit of the folder in bytes; an entry takes 50 to 200 KiB."""

LOCK_TIMEOUT = 120.0
"""Seconds (2 minutes) that a process waits for another one that compiles the same kernel."""

ENTRY_FILE = re.compile(r"(?P<key>[0-9a-f]{64})\.(o|json|lock)(?P<partial>\.\d+)?")
"""Names of the files of entries; a partial file's name ends with its process. All others are the user's."""

ABANDONED_AFTER = 3600.0
"""Age in seconds after which a partial file belongs to a process that has died."""


@cache
def source_digest() -> str:
    """Returns the SHA-256 over the source files of ``DEVICE_SOURCES``, by path and text."""
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
    """Returns version and flavour of the CuTe DSL, ``4.8.1+cu12``: each flavour has its own ptxas."""
    from cutlass._mlir._mlir_libs import _cutlass_ir

    flavour = Path(_cutlass_ir.__file__).name.split(".")[1]
    return f"{importlib.metadata.version('nvidia-cutlass-dsl')}+{flavour}"


@cache
def host() -> str:
    """Returns the target of an entry's host code: the CPU's architecture and TVM-FFI's version."""
    return f"{platform.machine()} tvm-ffi {importlib.metadata.version('apache-tvm-ffi')}"


def cache_folder() -> Path | None:
    """Returns the folder of the disk cache, or None if it is disabled.

    Raises:
        ValueError: ``OVERLAP_GEMM_CACHE`` is neither 0 nor 1.
    """
    if choice("OVERLAP_GEMM_CACHE", ("1", "0")) == "0":
        return None
    if folder := os.environ.get("OVERLAP_GEMM_CACHE_DIR"):
        return Path(folder)
    return platformdirs.user_cache_path("overlap_gemm") / "kernels"


def load_function(binary: Path) -> Any:
    """Returns the function of an object file."""
    from cutlass.cute.runtime import load_module

    return load_module(str(binary), enable_tvm_ffi=True)[SYMBOL]


@dataclass
class CompileCache:
    """Map from a configuration to its compiled host function.

    Attributes:
        folder: Folder of the disk cache; None: memory only.
        log: One entry per function: (origin, seconds, configuration).
    """

    folder: Path | None = field(default_factory=cache_folder)
    log: list[tuple[str, float, str]] = field(default_factory=list)
    _loaded: dict[tuple[Hashable, str], Any] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _warned: bool = False

    def has(self, config: Hashable, arch: str) -> bool:
        """Returns whether `get` would return the function from memory."""
        return (config, arch) in self._loaded

    def get(self, config: Hashable, arch: str, build: Callable[[], Any]) -> Any:
        """Returns the compiled function of ``config`` for ``arch``, from memory, from disk or newly compiled.

        Args:
            config: Hashable whose ``repr`` contains every compile-time choice.
            arch: Target architecture, for example ``"sm_90a"``.
            build: Function that compiles it (``cute.compile`` with `OPTIONS`). It is called at most once per
                process and key, and not if the disk has the entry.

        Returns:
            The DSL's callable.
        """
        if (function := self._loaded.get((config, arch))) is not None:
            return function
        name = f"{arch} {config!r}"
        facts = repr(ARCHS.get(arch))  # of a registered architecture the source does not contain them
        parts = (name, facts, dsl_version(), host(), source_digest())
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        with self._lock:
            if (config, arch) not in self._loaded:
                start = time.perf_counter()
                self._loaded[config, arch], origin = self._find(key, name, build)
                self.log.append((origin, time.perf_counter() - start, name))
            return self._loaded[config, arch]

    def _find(self, key: str, name: str, build: Callable[[], Any]) -> tuple[Any, str]:
        """Returns a function from disk, or builds and stores it; and where it is from."""
        with self._entry(key) as (folder, reason):
            if folder is not None and (function := self._load(folder, key)) is not None:
                return function, "disk"
            function = build()
            try:
                if reason is None and folder is not None:
                    limit = nbytes("OVERLAP_GEMM_CACHE_LIMIT", LIMIT)
                    store(folder, key, name, function)
                    prune(folder, limit, keep=key)
            except Exception as error:  # any failure to store: the function is compiled and usable
                reason = error
            if reason is not None:
                self._keep_in_memory(reason)
        return function, "compiled"

    @contextmanager
    def _entry(self, key: str) -> Iterator[tuple[Path | None, Exception | None]]:
        """Yields (folder to read an entry from, reason not to store one there); locks the entry.

        The folder is None if nothing must be read. The reason is None if the entry may be stored.
        """
        folder, lock = self.folder, None
        reason: Exception | None = None
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                check_owner(folder)
                lock = filelock.FileLock(folder / f"{key}.lock", timeout=LOCK_TIMEOUT)
                lock.acquire()
            except (
                OSError,
                NotImplementedError,
            ) as error:  # the latter: no file locks
                reason, lock = error, None
                folder = None if isinstance(error, OwnerError) else folder
        try:
            yield folder, reason
        finally:
            if lock is not None:
                lock.release()

    def _keep_in_memory(self, reason: Exception) -> None:
        """Warns, once, that the folder is unusable."""
        if not self._warned:
            logger.warning(
                "compile cache: folder %s cannot be used (%s: %s); compiled kernels stay in this process's "
                "memory. Set OVERLAP_GEMM_CACHE_DIR to another folder, or OVERLAP_GEMM_CACHE=0",
                self.folder,
                type(reason).__name__,
                reason,
            )
            self._warned = True

    def _load(self, folder: Path, key: str) -> Any | None:
        """Returns the function of a complete entry, or None; logs a warning if the entry is damaged."""
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
        except Exception as error:  # loading an object may raise errors of many types
            logger.warning(
                "compile cache: entry %s in %s is damaged (%s); compiling it again", key[:12], folder, error
            )
            return None
        with suppress(OSError):
            os.utime(description)  # time of the last use, for `prune`
        return function


class OwnerError(OSError):
    """A file or folder of executable entries that another user could have written."""


def check_owner(path: Path) -> None:
    """Raises unless a file or folder belongs to this user or root and only its owner may write to it.

    Raises:
        OwnerError: The owner or the permissions are wrong; the message names the fix.
        OSError: The file cannot be read.
    """
    status, user = path.stat(), os.geteuid()
    if status.st_uid not in (user, 0):
        raise OwnerError(f"{path} must belong to user {user} of this process, got user {status.st_uid}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OwnerError(
            f"other users may write to {path} (mode {status.st_mode & 0o777:o}): run chmod go-w on it"
        )


def store(folder: Path, key: str, name: str, function: Any) -> None:
    """Writes an entry: object file ``{key}.o`` and description ``{key}.json``.

    Args:
        folder: Folder of the entries.
        key: Key of the entry.
        name: Name of the kernel, for the description.
        function: Compiled function of the DSL.

    Raises:
        OSError: The entry could not be written.
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
    """Removes partial files of dead processes, and the least recently used entries until the limit holds.

    Files with other names than `ENTRY_FILE` are neither removed nor counted.

    Args:
        folder: Folder of the entries.
        limit: Bytes that may remain.
        keep: Key of an entry that is not removed.

    Raises:
        OSError: The folder cannot be read.
    """
    entries: dict[str, list[Path]] = {}
    sizes: dict[str, int] = {}
    used: dict[str, float] = {}
    for file in folder.iterdir():
        if (match := ENTRY_FILE.fullmatch(file.name)) is None:
            continue
        with suppress(FileNotFoundError):  # another process may prune at the same time
            status, name = file.stat(), match["key"]
            if match["partial"]:
                if time.time() - status.st_mtime > ABANDONED_AFTER:
                    file.unlink()
                continue
            entries.setdefault(name, []).append(file)
            sizes[name] = sizes.get(name, 0) + status.st_size
            used[name] = max(used.get(name, 0.0), status.st_mtime)
    total = sum(sizes.values())
    for name in sorted(entries, key=lambda name: used[name]):
        if total <= limit:
            return
        if name != keep:
            total -= sizes[name]
            for file in sorted(entries[name], key=lambda file: file.suffix != ".json"):  # JSON first
                file.unlink(missing_ok=True)


def _replace(path: Path, content: bytes) -> None:
    """Writes a file that only its owner may read; readers see the old or the new text, never a part."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
