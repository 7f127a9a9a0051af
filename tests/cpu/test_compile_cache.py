"""The compile cache: one build per key, whole entries only, damaged ones replaced."""

import errno
import json
import logging
import os
import re
import time
import unittest
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from overlap_gemm.config.arch import ARCHS
from overlap_gemm.runtime import compile_cache
from overlap_gemm.runtime.compile_cache import CompileCache
from tests.support.ranks import Ranks

ARCH = "sm_90a"


@dataclass(frozen=True)
class Config:
    factor: int


@pytest.fixture(autouse=True)
def dumps_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("CUTE_DSL_DUMP_DIR", str(tmp_path))


def build(config: Config):
    import cuda.bindings.driver as cuda
    import cutlass
    from cutlass import cute

    @cute.kernel
    def scale(x: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        x[thread] = x[thread] * config.factor

    @cute.jit
    def launch(x: cute.Tensor, stream: cuda.CUstream):
        scale(x).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

    x = cute.runtime.make_fake_compact_tensor(cutlass.Float32, (cute.sym_int32(),), assumed_align=16)
    return cute.compile(launch, x, cuda.CUstream(0), options=f"--gpu-arch {ARCH} {compile_cache.OPTIONS}")


class CountedBuild:
    def __init__(self, config):
        self.config, self.calls = config, 0

    def __call__(self):
        self.calls += 1
        return build(self.config)


def fetch(cache, counted):
    return cache.get(counted.config, ARCH, counted)


def origins(cache):
    return [origin for origin, _, _ in cache.log]


def test_it_says_what_it_has_in_memory(tmp_path):
    cache = compile_cache.CompileCache(folder=None)
    assert not cache.has("a", "sm_90a")
    cache._loaded["a", "sm_90a"] = print
    assert cache.has("a", "sm_90a") and not cache.has("a", "sm_100a") and not cache.has("b", "sm_90a")
    assert compile_cache.LIMIT == 2**30, "as docs/fused.md says"


def test_the_facts_of_a_registered_architecture_are_part_of_the_key(tmp_path, monkeypatch):
    keys = []

    def find(self, key, name, build):
        keys.append(key)
        return build, "disk"

    monkeypatch.setattr(CompileCache, "_find", find)
    for smem_bytes in (1, 1, 2):
        arch = replace(ARCHS[ARCH], name="sm_90s", smem_bytes=smem_bytes)
        monkeypatch.setitem(ARCHS, arch.name, arch)
        CompileCache(tmp_path).get("a", arch.name, print)
    assert keys[0] == keys[1] != keys[2]


def test_one_build_per_configuration_and_process(tmp_path):
    cache, two, three = CompileCache(tmp_path), CountedBuild(Config(2)), CountedBuild(Config(3))
    assert fetch(cache, two) is fetch(cache, two)
    assert fetch(cache, three) is not fetch(cache, two)
    assert (two.calls, three.calls) == (1, 1)
    assert origins(cache) == ["compiled", "compiled"]
    assert all(0 <= seconds < 30 for _, seconds, _ in cache.log)


@pytest.fixture(scope="module")
def elsewhere():
    """Runs a body in another process.

    Loading an entry brings in the DSL's own CUDA runtime, for the whole process and for good. The emulator's
    tests share this one, and what the DSL's JIT makes in them would find it (see tests/conftest.py).
    """
    with Ranks(1) as ranks:
        yield ranks.run


def taken_from_disk(rank, size, folder):
    os.environ["CUTE_DSL_DUMP_DIR"] = str(folder / "dumps")
    cache, again = CompileCache(folder), CountedBuild(Config(2))
    assert callable(fetch(cache, again))
    assert again.calls == 0
    assert origins(cache) == ["disk"]


def test_a_new_process_takes_it_from_disk(tmp_path, elsewhere):
    fetch(CompileCache(tmp_path), CountedBuild(Config(2)))
    elsewhere(taken_from_disk, tmp_path)


def damage_object(folder):
    [binary] = folder.glob("*.o")
    content = bytearray(binary.read_bytes())
    content[len(content) // 2] ^= 0xFF
    binary.write_bytes(content)


def truncate_description(folder):
    [description] = folder.glob("*.json")
    description.write_text(description.read_text()[:10])


def forget_digest(folder):
    [description] = folder.glob("*.json")
    description.write_text(json.dumps({"kernel": "?"}))


def compiled_again_and_replaced(rank, size, folder):
    os.environ["CUTE_DSL_DUMP_DIR"] = str(folder / "dumps")
    cache, again = CompileCache(folder), CountedBuild(Config(2))
    with unittest.TestCase().assertLogs(compile_cache.logger, logging.WARNING) as logs:
        assert callable(fetch(cache, again))
    assert again.calls == 1
    assert "damaged" in "".join(logs.output)
    healed, third = CompileCache(folder), CountedBuild(Config(2))
    fetch(healed, third)
    assert third.calls == 0


@pytest.mark.parametrize("damage", [damage_object, truncate_description, forget_digest])
def test_a_damaged_entry_is_compiled_again_and_replaced(tmp_path, damage, elsewhere):
    fetch(CompileCache(tmp_path), CountedBuild(Config(2)))
    damage(tmp_path)
    elsewhere(compiled_again_and_replaced, tmp_path)


def test_the_key_covers_source_versions_and_the_cpu(tmp_path, monkeypatch):
    fetch(CompileCache(tmp_path), CountedBuild(Config(2)))
    for name in ("source_digest", "dsl_version", "host"):
        with monkeypatch.context() as patch:
            patch.setattr(compile_cache, name, lambda: "changed")
            again = CountedBuild(Config(2))
            fetch(CompileCache(tmp_path), again)
            assert again.calls == 1, name


def test_flavours_of_the_dsl_are_told_apart(monkeypatch):
    """Both of one version are installed beside each other, and the driver decides which is loaded."""
    from cutlass._mlir._mlir_libs import _cutlass_ir

    found = set()
    for flavour in ("cu12", "cu13"):
        with monkeypatch.context() as patch:
            patch.setattr(
                _cutlass_ir, "__file__", f"somewhere/_cutlass_ir.{flavour}.cpython-312-x86_64-linux-gnu.so"
            )
            compile_cache.dsl_version.cache_clear()
            found.add(compile_cache.dsl_version())
    compile_cache.dsl_version.cache_clear()
    assert {version.rsplit("+")[1] for version in found} == {"cu12", "cu13"}


def test_a_cpu_and_a_tvm_ffi_of_another_kind_are_another_host(monkeypatch):
    found = {compile_cache.host()}
    for patched, value in (("platform.machine", "aarch64"), ("importlib.metadata.version", "0.0.1")):
        with monkeypatch.context() as patch:
            patch.setattr(f"overlap_gemm.runtime.compile_cache.{patched}", lambda *_, value=value: value)
            compile_cache.host.cache_clear()
            found.add(compile_cache.host())
    compile_cache.host.cache_clear()
    assert len(found) == 3


def test_memory_only(tmp_path, monkeypatch):
    monkeypatch.setenv("OVERLAP_GEMM_CACHE", "0")
    assert compile_cache.cache_folder() is None
    cache, counted = CompileCache(), CountedBuild(Config(2))
    fetch(cache, counted), fetch(cache, counted)
    assert counted.calls == 1
    monkeypatch.setenv("OVERLAP_GEMM_CACHE", "1")
    monkeypatch.setenv("OVERLAP_GEMM_CACHE_DIR", str(tmp_path))
    assert compile_cache.cache_folder() == tmp_path


# --- folders and entries that may not be used ---


class Function:
    """Stands for a compiled function, whose object's bytes are its text."""

    def __init__(self, text):
        self.text = text

    def export_to_c(self, path, function_name):
        Path(path).write_text(self.text)


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """``cached()``: how a new process gets a function of the folder `tmp_path / "kernels"`."""
    loads = lambda binary: Function(binary.read_text())  # noqa: E731
    monkeypatch.setattr(compile_cache, "load_function", lambda binary: loads(binary))

    def origin(name="a", text="object", limit=None):
        if limit is not None:
            monkeypatch.setenv("OVERLAP_GEMM_CACHE_LIMIT", str(limit))
        cache = CompileCache(tmp_path / "kernels")
        assert cache.get(name, ARCH, lambda: Function(text)).text == text
        assert cache.get(name, ARCH, lambda: Function("another")).text == text
        return origins(cache)[0]

    return origin


def full(monkeypatch):
    def write(path, *_):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(compile_cache, "_replace", write)


def without_locks(monkeypatch):
    def acquire(self):
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(compile_cache.filelock.FileLock, "acquire", acquire)


def waited_for_in_vain(monkeypatch):
    def acquire(self):
        raise compile_cache.filelock.Timeout(str(self.lock_file))

    monkeypatch.setattr(compile_cache.filelock.FileLock, "acquire", acquire)


def read_only(monkeypatch):
    def mkdir(self, **_):
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "mkdir", mkdir)


def unreadable_limit(monkeypatch):
    monkeypatch.setenv("OVERLAP_GEMM_CACHE_LIMIT", "much")


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (full, "No space left on device"),
        (without_locks, "support flock"),
        (waited_for_in_vain, "could not be acquired"),
        (read_only, "Read-only file system"),
        (unreadable_limit, "OVERLAP_GEMM_CACHE_LIMIT must be a number of bytes"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_folder_that_cannot_be_written_costs_compile_time_alone(
    tmp_path, cached, monkeypatch, caplog, breaks, words
):
    breaks(monkeypatch)
    cache = CompileCache(tmp_path / "kernels")
    for name in ("a", "b"):
        assert cache.get(name, ARCH, lambda name=name: Function(name)).text == name
    assert origins(cache) == ["compiled", "compiled"]
    [warning] = caplog.records
    assert words in warning.message and str(tmp_path / "kernels") in warning.message


def test_a_file_in_the_folders_place_is_such_a_one(tmp_path, cached, caplog):
    (tmp_path / "kernels").write_text("not a folder")
    assert cached() == "compiled"
    assert "File exists" in caplog.text


def test_entries_of_a_folder_that_is_only_readable_are_used_without_a_word(cached, monkeypatch, caplog):
    assert cached() == "compiled"
    without_locks(monkeypatch)
    assert cached() == "disk" and not caplog.records


def test_a_build_that_fails_is_no_matter_of_the_folder(tmp_path, cached):
    def build():
        raise OSError("no compiler")

    with pytest.raises(OSError, match="no compiler"):
        CompileCache(tmp_path / "kernels").get("a", ARCH, build)
    assert cached() == "compiled" and cached() == "disk"


@pytest.mark.parametrize("what", ["folder", "object", "description"])
@pytest.mark.parametrize("how", ["group", "world", "owner"])
def test_what_others_could_have_written_is_not_executed(tmp_path, cached, monkeypatch, caplog, what, how):
    """As ssh does: the owner is this user or root, and nobody else may write."""
    assert cached() == "compiled" and cached() == "disk"
    folder = tmp_path / "kernels"
    path = {"folder": folder, "object": next(folder.glob("*.o")), "description": next(folder.glob("*.json"))}[
        what
    ]
    if how == "owner":
        real = Path.stat

        def stat(self, **options):
            found = list(real(self, **options))
            found[4] = os.geteuid() + 7 if self == path else found[4]
            return os.stat_result(found)

        monkeypatch.setattr(Path, "stat", stat)
        words = f"{path} must belong to user .* got user {os.geteuid() + 7}"
    else:
        path.chmod(path.stat().st_mode | {"group": 0o020, "world": 0o002}[how])
        words = f"other users may write to {path} .*chmod go-w"
    loads = []
    monkeypatch.setattr(compile_cache, "load_function", lambda binary: loads.append(binary))
    assert cached() == "compiled" and not loads
    assert re.search(words, caplog.text)


def test_what_root_wrote_is_trusted(cached, monkeypatch):
    assert cached() == "compiled"
    if os.geteuid() == 0:
        monkeypatch.setattr(compile_cache.os, "geteuid", lambda: 1000)
    assert cached() == "disk"


def test_a_new_entry_is_its_owners_alone(tmp_path, cached):
    before = os.umask(0o002)  # a user's private group: folders and files that a group may write
    try:
        assert cached() == "compiled" and cached() == "disk"
    finally:
        os.umask(before)


def test_an_object_that_does_not_load_is_compiled_anew_and_replaced(cached, monkeypatch, caplog):
    assert cached() == "compiled"

    def load(binary):
        if binary.read_text() == "object":
            raise RuntimeError("cannot load: Exec format error")
        return Function(binary.read_text())

    monkeypatch.setattr(compile_cache, "load_function", load)
    assert cached(text="made here") == "compiled"
    assert "Exec format error" in caplog.text
    assert cached(text="made here") == "disk"


def test_the_folder_is_bounded_and_what_was_used_last_stays(tmp_path, cached):
    folder, texts = tmp_path / "kernels", "x" * 5000
    for age, name in enumerate("abcd"):
        cached(name, texts)
        for file in folder.glob("*"):
            if file.stat().st_mtime > time.time() - 500:
                os.utime(file, (0, time.time() - 4000 + age))
    assert cached("a", texts) == "disk"  # used, so now the newest
    [entry, *_] = folder.glob("*.o")
    left = entry.with_name(f"{entry.name}.4711")
    left.write_text("of a process that died")
    os.utime(left, (0, time.time() - 2 * compile_cache.ABANDONED_AFTER))
    young = entry.with_name(f"{entry.name}.4712")
    young.write_text("of a process that is at it")
    cached("e", texts, limit="17 kB")
    assert sum(file.stat().st_size for file in folder.glob("*.o")) <= 17_000
    assert not left.exists() and young.exists()
    assert [cached(name, texts, limit="1 GB") for name in "ade"] == ["disk"] * 3
    assert [cached(name, texts) for name in "bc"] == ["compiled"] * 2


def test_files_of_the_user_in_the_folder_stay(tmp_path, cached, caplog):
    folder = tmp_path / "kernels"
    (folder / "results").mkdir(parents=True)
    for name in ("thesis.tex", "entry.o.4711", "notes.json", "kernel.o", f"{'a' * 64}.txt"):
        (folder / name).write_text("x" * 5000)
    for path in (users := sorted(folder.iterdir())):
        os.utime(path, (0, time.time() - 2 * compile_cache.ABANDONED_AFTER))
    assert [cached(name, "y" * 5000, limit="6 kB") for name in "aba"] == ["compiled"] * 3
    assert all(path.exists() for path in users) and not caplog.records
    assert len([*folder.glob("*.o")]) == 2, "the user's, and the last entry's"
