"""A kernel of an op in the emulator comes from disk, as on a device."""

from overlap_gemm.backends.fused import compiled
from tests.support.emulated.op_runs import run


def test_an_op_s_kernel_is_compiled_once_for_all_emulators_and_processes(tmp_path, monkeypatch):
    """From disk it runs, too; a CUDA device's kernel of the same configuration is another entry."""
    monkeypatch.setenv("OVERLAP_GEMM_CACHE_DIR", str(tmp_path))
    compiled._cache.cache_clear()
    try:
        for origin in ("compiled", "disk"):
            run("gemm_reduce_scatter", "sm_100a", 2, (128, 64, 64), bias=False)
            assert [entry[0] for entry in compiled._cache(True).log] == [origin]
            compiled._cache.cache_clear()
        (entry,) = tmp_path.glob("*.json")
        assert "'emulated'" in entry.read_text()
        monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
        run("gemm_reduce_scatter", "sm_100a", 2, (128, 64, 64), bias=False)
        assert [entry[0] for entry in compiled._cache(True).log] == ["compiled"]
    finally:
        compiled._cache.cache_clear()
