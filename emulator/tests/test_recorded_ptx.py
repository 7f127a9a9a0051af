"""Kernels that Triton and NVRTC compiled (`data/ptx`, by `record_ptx.py`): right, clean, bugs are found."""

import re
from pathlib import Path

import numpy as np
import pytest

import cute_emulator
from cute_emulator import Emulator, EmulatorError
from cute_emulator.host.kernels import device_of
from cute_emulator.host.launch_files import run_file
from cute_emulator.settings import settings

DATA = Path(__file__).parent / "data" / "ptx"
KERNELS = sorted(path.stem for path in DATA.glob("*.ptx"))


def softmax(x):
    powers = np.exp(x - x.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


WANT = {
    "cuda-sum": lambda x: x.sum(keepdims=True),
    "cuda-transpose": lambda x: x.T,
    "triton-add": lambda x, y: x + y,
    "triton-softmax": softmax,
    "triton-matmul": lambda a, b: a.astype(np.float32) @ b.astype(np.float32),
}
WANT["triton-matmul_tma"] = WANT["triton-matmul"]


def run(kernel, folder, change=lambda text: text, **options):
    """Runs a recorded kernel; returns its findings, and checks what came out where nothing was changed."""
    name = kernel.rpartition("-")[0]
    text = (DATA / f"{kernel}.ptx").read_text()
    (folder / "k.ptx").write_text(change(text))
    (folder / "launch.json").write_text((DATA / f"{name}.json").read_text())
    for left in folder.glob("*.npy"):
        left.unlink()
    emulator = Emulator(device_of(text), collect=True, **options)
    run_file(emulator, str(folder / "k.ptx"), str(folder / "launch.json"))
    out, *inputs = (
        np.load(folder / f"{key}.npy") for key in ("out", *"xyab") if (folder / f"{key}.npy").exists()
    )
    if change(text) == text:
        np.testing.assert_allclose(out.astype(np.float32), WANT[name](*inputs), rtol=1e-2, atol=3e-2)
    return emulator.report.findings


def test_each_kernel_is_recorded_for_both_architectures():
    assert len(KERNELS) == 2 * len(WANT)
    assert {kernel.rpartition("-")[0] for kernel in KERNELS} == set(WANT)


@pytest.mark.parametrize("kernel", KERNELS)
def test_results_are_right_and_nothing_is_found(kernel, tmp_path):
    for setting in settings(seeds=1)[:6]:
        assert run(kernel, tmp_path, **setting.options()) == [], setting


NOTICED = {
    "triton-softmax-sm_90a": (3, 3),
    "triton-softmax-sm_100a": (3, 3),
    "triton-matmul-sm_90a": (4, 2),
    "triton-matmul-sm_100a": (17, 9),
    "triton-matmul_tma-sm_90a": (13, 1),
    "triton-matmul_tma-sm_100a": (22, 3),
}
"""Barriers that there are, and those whose absence is found; Triton sets several in a row."""


@pytest.mark.parametrize("kernel", NOTICED)
def test_a_barrier_that_is_missing_is_found(kernel, tmp_path):
    text = (DATA / f"{kernel}.ptx").read_text()
    places = [m.start() for m in re.finditer(r"bar(rier)?\.sync\s", text)]
    noticed = 0
    for place in places:
        try:
            noticed += bool(run(kernel, tmp_path, lambda _, a=place: text[:a] + "//" + text[a:]))
        except EmulatorError:
            noticed += 1
    assert (len(places), noticed) == NOTICED[kernel]


MISSING = {
    "a fence before the counter": ("membar.gl;", 1, "race", "sum.cu:21"),
    "both fences": ("membar.gl;", 2, "race", "sum.cu:28"),
    "a barrier around the parts of a sum": ("bar.sync 	0;", 1, "shared-race", "sum.cu:"),
}


@pytest.mark.parametrize("what", MISSING)
def test_what_is_missing_in_cuda_is_found_at_its_line(what, tmp_path):
    words, count, kind, line = MISSING[what]
    found = run("cuda-sum-sm_90a", tmp_path, lambda text: text.replace(words, "", count))
    assert any(finding.kind == kind and line in str(finding) for finding in found), found


def test_a_finding_names_the_line_of_the_source(tmp_path):
    missing = run("triton-softmax-sm_90a", tmp_path, lambda text: re.sub(r"bar\.sync\s+0;", "", text))
    said = "\n".join(map(str, missing))
    assert "shared-race" in said and "kernels_triton.py:21" in said and "standard.py" not in said


def test_a_kernel_of_tilelang_lacks_the_fence_before_its_last_tile():
    text = (DATA.parent / "tilelang-matmul-sm_90a.ptx").read_text()
    fence = "fence.proxy.async.shared::cta;"
    assert text.count(fence) == 3 and text.count("wgmma.fence.sync.aligned;") == 4
    a, b = np.random.default_rng(0).standard_normal((2, 128, 128)).astype(np.float16)
    for kernel, kinds in (
        (text, {"proxy-fence"}),
        (text.replace("cp.async.wait_all;", f"cp.async.wait_all; {fence}"), set()),
    ):
        out = np.zeros((128, 128), np.float32)
        report = cute_emulator.run(kernel, "matmul_kernel", (2, 2), 128, [a, b, out], shared=16384)
        assert {finding.kind for finding in report.findings} == kinds
        np.testing.assert_allclose(out, a.astype(np.float64) @ b, atol=1e-4)
