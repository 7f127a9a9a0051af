"""Writes `data/ptx`: `python emulator/tests/record_ptx.py`, with Triton and NVRTC installed, without a GPU.

What the compilers make is kept, so that tests run it without them: a file of PTX for each architecture, and a
launch for both.
"""

import json
import re
from pathlib import Path

import torch

from cute_emulator import Emulator, compile_cuda

DATA = Path(__file__).parent / "data" / "ptx"


def shortened(ptx):
    """Without debugging information but lines, without comments but those around inline assembly."""
    ptx = re.sub(r"\n\t\.section\s+\.debug_\w+\s*\{[^}]*\}", "", ptx)
    ptx = re.sub(r'(\.file\s+\d+ )"(?:.*/(triton/language/|include/))?(?:.*/)?([^/"]+)"', r'\1"\2\3"', ptx)
    ptx = re.sub(r"[ \t]*//(?! (begin|end) inline asm)[^\n]*", "", ptx)
    return re.sub(r"\n\s*\n+", "\n", ptx).strip() + "\n"


def without_unused(ptx):
    """Without the constants of headers, which no kernel names."""
    lines = ptx.splitlines(keepends=True)
    names = [re.match(r"\.global \S+ \d+ \S+ (_Z\w+)", line) for line in lines]
    return "".join(
        line for line, name in zip(lines, names, strict=True) if not name or ptx.count(name[1]) > 1
    )


def argument(name, value):
    """An argument as a launch file has it."""
    if not isinstance(value, torch.Tensor):
        return value
    described = {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if "scratch" in name:
        return described
    return described | ({} if name == "out" else {"fill": "random"}) | {"save": f"{name}.npy"}


def record_triton(arch):
    """The kernels of `kernels_triton.py`."""
    from kernels_triton import RUNS

    with Emulator(arch) as emulator:
        launch = emulator.launch
        for name, run in RUNS.items():

            def keep(ptx, entry, grid, block, args, *, name=name, **rest):
                (DATA / f"triton-{name}-{arch}.ptx").write_text(shortened(ptx))
                arguments = {key: argument(key, value) for key, value in args.items()}
                write_launch(f"triton-{name}", grid, block, arguments, rest["shared"])
                launch(ptx, entry, grid, block, args, **rest)

            emulator.launch = keep
            out, want = run()
            torch.testing.assert_close(out.float(), want.float(), rtol=1e-2, atol=3e-2)


def record_cuda(arch):
    """The files of CUDA C++ there; their launches are written by hand."""
    for file in DATA.glob("*.cu"):
        ptx = compile_cuda(file.read_text(), arch, file.name)
        (DATA / f"cuda-{file.stem}-{arch}.ptx").write_text(shortened(without_unused(ptx)))


def write_launch(name, grid, block, arguments, shared):
    """The launch of a kernel; its architectures differ in shared memory alone, and the larger one is kept."""
    path = DATA / f"{name}.json"
    before = json.loads(path.read_text())["shared"] if path.exists() else 0
    launch = {"grid": grid, "block": block, "shared": max(shared, before), "args": arguments}
    text = re.sub(
        r"\[\s+([^\[\]]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", json.dumps(launch, indent=1)
    )
    path.write_text(text + "\n")


if __name__ == "__main__":
    torch.manual_seed(0)
    for file in DATA.glob("triton-*"):
        file.unlink()
    for arch in ("sm_90a", "sm_100a"):
        record_triton(arch)
        record_cuda(arch)
