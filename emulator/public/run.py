"""Runs kernels of public packages in the emulator, and keeps what came out: `python emulator/public/run.py`.

Each case of `CASES` whose package can be imported (`pip install --target FOLDER`, or an unpacked wheel, in
PYTHONPATH) runs once per architecture and mode, in a process of its own, `SECONDS` at most; `--dsl FOLDER`
with the CuTe DSL that was installed there. The rows replace those of the same case and compiler in
`results.json`, from which the counts in `docs/public.md` are written. `--table` prints all rows, and writes
the counts. Cases in Triton need triton (its tutorials: `python/tutorials` of a checkout in PYTHONPATH), those
in CUDA C++ nvidia-cuda-nvcc, nvidia-nvvm, nvidia-cuda-crt, nvidia-cuda-runtime, nvidia-cuda-cccl and
nvidia-curand.
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
PAGE = HERE.parent / "docs" / "public.md"
BEGIN, END = "<!-- table of results.json -->\n", "<!-- end of the table -->\n"
BOTH = ("sm_90a", "sm_100a")
CASES = [
    ("cute-emulator", "cute_emulator", "readme.py", "first-kernel", BOTH, 1),
    ("quack-kernels", "quack", "quack_rows.py", "rmsnorm", BOTH, 1),
    ("quack-kernels", "quack", "quack_rows.py", "softmax", BOTH, 1),
    ("quack-kernels", "quack", "quack_rows.py", "cross-entropy", BOTH, 1),
    ("quack-kernels", "quack", "quack_gemm.py", "gemm", BOTH, 1),
    ("quack-kernels", "quack", "quack_gemm.py", "ragged-k", BOTH, 1),
    ("flash-attn-4", "flash_attn.cute", "fa4.py", "forward", BOTH, 1),
    ("flash-attn-4", "flash_attn.cute", "fa4.py", "backward", BOTH, 1),
    ("vllm", "vllm", "vllm_gemm_rs_ar.py", "gemm-rs", ("sm_100a",), 2),
    ("vllm", "vllm", "vllm_gemm_rs_ar.py", "gemm-ar", ("sm_100a",), 2),
    ("sglang", "sglang", "sglang_gemm.py", "dsv3-fused-a-1024", BOTH, 1),
    ("sglang", "sglang", "sglang_gemm.py", "dsv3-fused-a-2048", BOTH, 1),
    ("sglang", "sglang", "sglang_collectives.py", "all-gather-gemm", ("sm_100a",), 2),
    ("sglang", "sglang", "sglang_collectives.py", "gemm-reduce-scatter", ("sm_100a",), 2),
    ("tilelang", "tilelang", "tilelang_kernels.py", "add", BOTH, 1),
    ("tilelang", "tilelang", "tilelang_kernels.py", "matmul-tma", ("sm_90a",), 1),
    ("tilelang", "tilelang", "tilelang_kernels.py", "matmul-cp-async", ("sm_90a",), 1),
    ("flashinfer-python", "flashinfer", "flashinfer_rows.py", "rmsnorm", BOTH, 1),
    ("flashinfer-python", "flashinfer", "flashinfer_rows.py", "layernorm", BOTH, 1),
    *[
        (package, module, script, case, BOTH, 1)
        for package, module, script, cases in (
            ("triton", "01-vector-add", "triton_tutorials.py", "add softmax matmul layer-norm attention"),
            (
                "liger-kernel", "liger_kernel", "triton_liger.py",
                "rms-norm add-rms-norm layer-norm softmax sparsemax cross-entropy swiglu geglu rope jsd",
            ),
            (
                "liger-kernel", "liger_kernel", "liger_cute.py",
                "cute-rms-norm cute-add-rms-norm cute-layer-norm cute-softmax cute-swiglu cute-geglu "
                "cute-rope",
            ),
            ("fla-core", "fla", "triton_fla.py", "linear simple-gla gla delta-rule gated-delta-rule"),
            (
                "vllm", "vllm", "triton_vllm.py",
                "decode-attention prefill-attention merge-attention moe-sum scaled-matmul gated-norm",
            ),
            (
                "flashinfer-python", "flashinfer", "cuda_flashinfer.py",
                "cuda-rmsnorm cuda-add-rmsnorm silu-and-mul pack-bits topk-mask softmax merge-states rope",
            ),
            ("sglang", "sglang", "cuda_sglang.py", "moe-align moe-softmax moe-topk topk"),
        )
        for case in cases.split()
    ],
]  # fmt: skip
"""Distribution, what is imported of it, script of `cases/`, its argument, architectures, ranks."""
COMPILERS = {
    "triton_": ("Triton", "triton"),
    "cuda_": ("nvcc", "nvidia-cuda-nvcc"),
    "tilelang_": ("TileLang", "tilelang"),
}
"""Name and distribution of the compiler of a script, by the beginning of its name; of others the CuTe DSL."""
SECONDS = 600


def verdict(
    script: Path, *arguments: str, arch: str, mode: str, ranks: int = 1, dsl: Path | None = None,
    seconds: int = SECONDS,
) -> tuple[str, str]:  # fmt: skip
    """`pass`, `reported` (findings, and right numbers) or `stops`; and what was found, or the last words."""
    words = ["--collect", "--arch", arch, "--mode", mode, "--ranks", str(ranks), str(script), *arguments]
    path = os.environ.get("PYTHONPATH", "")
    if dsl is not None:
        path = os.pathsep.join([str(dsl), str(dsl / "nvidia_cutlass_dsl" / "dsl_packages"), path])
    try:
        done = subprocess.run(
            [sys.executable, "-m", "cute_emulator", *words],
            capture_output=True,
            text=True,
            timeout=seconds,
            # Packages keep compiled kernels, which an emulator of another process cannot run.
            env={**os.environ, "QUACK_CACHE_ENABLED": "0", "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        return "stops", f"after {seconds} s"
    return classify(done.returncode, done.stderr)


def classify(code: int, said: str) -> tuple[str, str]:
    """The verdict on a run that ended with an exit code and said something on stderr."""
    found = [line for line in said.splitlines() if line.startswith("emulator: [")]
    failed = "Traceback (most recent call last)" in said or "Error: " in said
    if code == 0:
        return "pass", ""
    if code == 1 and found:
        kinds = [line.partition("[")[2].partition("]")[0] for line in found]
        places = [re.search(r"\((\w+\.py:\d+)\)", line) for line in found]
        each = [f"{kind} at {at[1]}" if at else kind for kind, at in zip(kinds, places, strict=True)]
        return "stops" if failed else "reported", "; ".join(dict.fromkeys(each))
    return "stops", (said.strip().splitlines() or [f"exit code {code}"])[-1][:160]


def installed(dsl: Path | None) -> str:
    """Version and CUDA of the CuTe DSL in a folder, or of that which is installed, as `4.8.1 cu12`."""
    found = {
        d.name.lower(): d.version
        for d in importlib.metadata.distributions(**({} if dsl is None else {"path": [str(dsl)]}))
        if d.name.lower().startswith("nvidia-cutlass-dsl")
    }
    flavours = [f for f in ("cu12", "cu13") if f"nvidia-cutlass-dsl-libs-{f}" in found]
    return " ".join([found["nvidia-cutlass-dsl"], *flavours])


def compiler(script: str, dsl: Path | None) -> str:
    """Returns name and version of the compiler of a script's kernels."""
    for begin, (name, package) in COMPILERS.items():
        if script.startswith(begin):
            return f"{name} {importlib.metadata.version(package)}"
    return f"CuTe DSL {installed(dsl)}"


def table(rows: list[dict]) -> str:
    """Returns a Markdown table with a line for each run."""
    lines = [
        "| package | compiler | case | arch, mode | verdict | seconds | on |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        said = f"{r['verdict']}: {r['what']}" if r["what"] else r["verdict"]
        lines.append(
            f"| {r['package']} {r['version']} | {r['compiler']} | {r['case']} | {r['arch']}, {r['mode']} "
            f"| {said} | {r['seconds']} | {r['date']} |"
        )
    return "\n".join(lines) + "\n"


def counts(rows: list[dict]) -> str:
    """Returns a Markdown table with a line for each package: its runs by verdict."""
    lines = [
        "|package|compiler|kernels|runs|pass|reported|stops|",
        "|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        name = re.sub(r" \d.*", "", row["compiler"])
        groups.setdefault((f"{row['package']} {row['version']}", name), []).append(row)
    for (package, name), runs in groups.items():
        versions = dict.fromkeys(re.search(r"\d\S*", r["compiler"])[0] for r in runs)
        kernels = len({r["case"] for r in runs})
        number = [sum(r["verdict"] == one for r in runs) for one in ("pass", "reported", "stops")]
        cells = [package, f"{name} {', '.join(versions)}", kernels, len(runs), *(n or "" for n in number)]
        lines.append(f"|{'|'.join(map(str, cells))}|")
    return "\n".join(lines) + "\n"


def write_counts() -> None:
    """Writes the counts of `results.json` between their marks in the page."""
    text = PAGE.read_text()
    head, tail = text.partition(BEGIN)[0], text.partition(END)[2]
    PAGE.write_text(f"{head}{BEGIN}\n{counts(json.loads(RESULTS.read_text()))}\n{END}{tail}")


def main() -> None:
    """Runs the cases that the arguments select."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--table", action="store_true", help="run nothing; print the table of all runs")
    parser.add_argument("--only", default="", help="cases whose package, name or script has this")
    parser.add_argument("--arch", nargs="+", default=BOTH)
    parser.add_argument("--dsl", nargs="+", type=Path, default=[None], help="folders with other CuTe DSLs")
    parser.add_argument("--mode", nargs="+", default=["immediate"])
    arguments = parser.parse_args()
    for package, module, script, case, archs, ranks in [] if arguments.table else CASES:
        if (
            arguments.only not in f"{package} {case} {script}"
            or importlib.util.find_spec(module.partition(".")[0]) is None
        ):
            continue
        for dsl, arch, mode in itertools.product(arguments.dsl, arguments.arch, arguments.mode):
            if arch not in archs or (dsl is not None and script.startswith(tuple(COMPILERS))):
                continue
            begin = time.monotonic()
            said, what = verdict(HERE / "cases" / script, case, arch=arch, mode=mode, ranks=ranks, dsl=dsl)
            row = {
                "package": package,
                "version": importlib.metadata.version(package),
                "compiler": compiler(script, dsl),
                "case": case,
                "arch": arch,
                "mode": mode,
                "verdict": said,
                "what": what,
                "seconds": round(time.monotonic() - begin),
                "date": str(datetime.date.today()),
            }
            print(" ".join(map(str, row.values())), flush=True)
            same = ("package", "case", "arch", "mode", "compiler")
            rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
            rows = [r for r in rows if any(r[key] != row[key] for key in same)] + [row]
            rows.sort(key=lambda r: [r[key] for key in same])
            RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    write_counts()
    if arguments.table:
        print(table(json.loads(RESULTS.read_text())), end="")


if __name__ == "__main__":
    main()
