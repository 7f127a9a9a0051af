"""Runs kernels of public packages in the emulator, and keeps what came out: `python emulator/public/run.py`.

Each case of `CASES` whose package can be imported (`pip install --target FOLDER`, FOLDER in PYTHONPATH, will
do) runs once per architecture and mode, in a process of its own; `--dsl FOLDER` with the CuTe DSL that was
installed there. The rows replace those of the same case and DSL in `results.json`, from which the counts in
`docs/public.md` are written. `--table` prints all rows, and writes the counts.
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
    ("flashinfer-python", "flashinfer", "flashinfer_rows.py", "rmsnorm", BOTH, 1),
    ("flashinfer-python", "flashinfer", "flashinfer_rows.py", "layernorm", BOTH, 1),
]
"""Distribution, what is imported of it, script of `cases/`, its argument, architectures, ranks."""
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


def table(rows: list[dict]) -> str:
    """Returns a Markdown table with a line for each run."""
    lines = [
        "| package | DSL | case | arch, mode | verdict | seconds | on |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        said = f"{r['verdict']}: {r['what']}" if r["what"] else r["verdict"]
        lines.append(
            f"| {r['package']} {r['version']} | {r['dsl']} | {r['case']} | {r['arch']}, {r['mode']} | {said} "
            f"| {r['seconds']} | {r['date']} |"
        )
    return "\n".join(lines) + "\n"


def counts(rows: list[dict]) -> str:
    """Returns a Markdown table with a line for each package: its runs by verdict."""
    lines = [
        "| package | CuTe DSL | cases | runs | pass | reported | stops |",
        "|---|---|---|---|---|---|---|",
    ]
    for package in dict.fromkeys(f"{r['package']} {r['version']}" for r in rows):
        runs = [r for r in rows if f"{r['package']} {r['version']}" == package]
        versions = dict.fromkeys(r["dsl"].split()[0] for r in runs)
        cases = dict.fromkeys(r["case"] for r in runs)
        number = [sum(r["verdict"] == one for r in runs) for one in ("pass", "reported", "stops")]
        lines.append(
            f"| {package} | {', '.join(versions)} | {', '.join(cases)} | {len(runs)} | "
            f"{' | '.join(str(n or '') for n in number)} |"
        )
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
    parser.add_argument("--only", default="", help="cases whose name has this")
    parser.add_argument("--arch", nargs="+", default=BOTH)
    parser.add_argument("--dsl", nargs="+", type=Path, default=[None], help="folders with other CuTe DSLs")
    parser.add_argument("--mode", nargs="+", default=["immediate"])
    arguments = parser.parse_args()
    for package, module, script, case, archs, ranks in [] if arguments.table else CASES:
        if (
            arguments.only not in f"{package} {case}"
            or importlib.util.find_spec(module.partition(".")[0]) is None
        ):
            continue
        for dsl, arch, mode in itertools.product(arguments.dsl, arguments.arch, arguments.mode):
            if arch not in archs:
                continue
            begin = time.monotonic()
            said, what = verdict(HERE / "cases" / script, case, arch=arch, mode=mode, ranks=ranks, dsl=dsl)
            row = {
                "package": package,
                "version": importlib.metadata.version(package),
                "dsl": installed(dsl),
                "case": case,
                "arch": arch,
                "mode": mode,
                "verdict": said,
                "what": what,
                "seconds": round(time.monotonic() - begin),
                "date": str(datetime.date.today()),
            }
            print(" ".join(map(str, row.values())), flush=True)
            same = ("package", "case", "arch", "mode", "dsl")
            rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
            rows = [r for r in rows if any(r[key] != row[key] for key in same)] + [row]
            rows.sort(key=lambda r: [r[key] for key in same])
            RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    write_counts()
    if arguments.table:
        print(table(json.loads(RESULTS.read_text())), end="")


if __name__ == "__main__":
    main()
