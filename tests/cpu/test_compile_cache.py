"""The compile cache: one build per key, whole entries only, damaged ones replaced."""

import json
import logging
import os
import unittest
from dataclasses import dataclass

import pytest

from overlap_gemm.runtime import compile_cache
from overlap_gemm.runtime.compile_cache import CompileCache
from overlap_gemm.testing.ranks import Ranks

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


def test_one_build_per_configuration_and_process(tmp_path):
    cache, two, three = CompileCache(tmp_path), CountedBuild(Config(2)), CountedBuild(Config(3))
    assert fetch(cache, two) is fetch(cache, two)
    assert fetch(cache, three) is not fetch(cache, two)
    assert (two.calls, three.calls) == (1, 1)
    assert origins(cache) == ["compiled", "compiled"]


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


def test_the_key_covers_source_and_dsl_version(tmp_path, monkeypatch):
    fetch(CompileCache(tmp_path), CountedBuild(Config(2)))
    for name in ("source_digest", "dsl_version"):
        with monkeypatch.context() as patch:
            patch.setattr(compile_cache, name, lambda: "changed")
            again = CountedBuild(Config(2))
            fetch(CompileCache(tmp_path), again)
            assert again.calls == 1, name


def test_memory_only(tmp_path, monkeypatch):
    monkeypatch.setenv("OVERLAP_GEMM_CACHE", "0")
    assert compile_cache.cache_folder() is None
    cache, counted = CompileCache(), CountedBuild(Config(2))
    fetch(cache, counted), fetch(cache, counted)
    assert counted.calls == 1
    monkeypatch.setenv("OVERLAP_GEMM_CACHE", "1")
    monkeypatch.setenv("OVERLAP_GEMM_CACHE_DIR", str(tmp_path))
    assert compile_cache.cache_folder() == tmp_path
