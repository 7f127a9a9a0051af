"""Runs kernels of public packages in the emulator, and keeps what came out: `python emulator/public/run.py`.

Each case of `CASES` whose package is installed runs once per architecture and mode, in a process of its own.
The rows go to `results.json` in place of earlier ones of the same case, and from there to the table of
`docs/public.md`. `--table` writes the table alone.
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
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
CASES = [
    ("quack-kernels", "quack", "quack_rows.py", "rmsnorm"),
    ("quack-kernels", "quack", "quack_rows.py", "softmax"),
    ("quack-kernels", "quack", "quack_rows.py", "cross-entropy"),
    ("quack-kernels", "quack", "quack_gemm.py", "gemm"),
    ("quack-kernels", "quack", "quack_gemm.py", "ragged-k"),
    ("flash-attn-4", "flash_attn.cute", "fa4.py", "forward"),
    ("flash-attn-4", "flash_attn.cute", "fa4.py", "backward"),
]
"""Distribution, what is imported of it, script of `cases/`, its argument."""
SECONDS = 600


def verdict(script: Path, *arguments: str, arch: str, mode: str, seconds: int = SECONDS) -> tuple[str, str]:
    """`pass`, `reported` (findings, and right numbers) or `stops`; and what was found, or the last words."""
    words = ["--collect", "--arch", arch, "--mode", mode, str(script), *arguments]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "cute_emulator", *words],
            capture_output=True,
            text=True,
            timeout=seconds,
            # Packages keep compiled kernels, which an emulator of another process cannot run.
            env={**os.environ, "QUACK_CACHE_ENABLED": "0"},
        )
    except subprocess.TimeoutExpired:
        return "stops", f"after {seconds} s"
    return classify(done.returncode, done.stderr)


def classify(code: int, said: str) -> tuple[str, str]:
    """The verdict on a run that ended with an exit code and said something on stderr."""
    found = [line for line in said.splitlines() if line.startswith("emulator: [")]
    if code == 0:
        return "pass", ""
    if code == 1 and found:
        kinds = [line.partition("[")[2].partition("]")[0] for line in found]
        places = [re.search(r"\((\w+\.py:\d+)\)", line) for line in found]
        each = [f"{kind} at {at[1]}" if at else kind for kind, at in zip(kinds, places, strict=True)]
        return "reported", "; ".join(dict.fromkeys(each))
    return "stops", (said.strip().splitlines() or [f"exit code {code}"])[-1][:160]


def table(rows: list[dict]) -> str:
    """Markdown, one line for each case, with its architectures and modes."""
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


def write_table() -> None:
    """Puts the table of `results.json` between its marks in the page."""
    text = PAGE.read_text()
    head, tail = text.partition(BEGIN)[0], text.partition(END)[2]
    PAGE.write_text(f"{head}{BEGIN}\n{table(json.loads(RESULTS.read_text()))}\n{END}{tail}")


def main() -> None:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--table", action="store_true", help="only write the table")
    parser.add_argument("--only", default="", help="cases whose name has this")
    parser.add_argument("--arch", nargs="+", default=["sm_90a", "sm_100a"])
    parser.add_argument("--mode", nargs="+", default=["immediate"])
    asked = parser.parse_args()
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    for package, module, script, case in [] if asked.table else CASES:
        if (
            asked.only not in f"{package} {case}"
            or importlib.util.find_spec(module.partition(".")[0]) is None
        ):
            continue
        for arch, mode in ((a, m) for a in asked.arch for m in asked.mode):
            begin = time.monotonic()
            said, what = verdict(HERE / "cases" / script, case, arch=arch, mode=mode)
            row = {
                "package": package,
                "version": importlib.metadata.version(package),
                "dsl": importlib.metadata.version("nvidia-cutlass-dsl"),
                "case": case,
                "arch": arch,
                "mode": mode,
                "verdict": said,
                "what": what,
                "seconds": round(time.monotonic() - begin),
                "date": str(datetime.date.today()),
            }
            print(" ".join(map(str, row.values())), flush=True)
            same = ("package", "case", "arch", "mode")
            rows = [r for r in rows if any(r[key] != row[key] for key in same)] + [row]
            RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    write_table()


if __name__ == "__main__":
    main()
