"""Runs CUTLASS' CuTe DSL examples in the emulator: `python emulator/public/cutlass_examples.py EXAMPLES`.

EXAMPLES is the folder examples/python/CuTeDSL of a checkout of NVIDIA/cutlass, with no change in it. Each
script runs with the arguments of `cutlass-examples.json`, small shapes, in a process forked from one that has
imported torch and the DSL (which saves seconds each); verdict, seconds and date are written there, and from
there the counts in `docs/public.md`. Without EXAMPLES nothing runs, and the scripts that did not pass are
printed. The field `judged` is written by hand: the cause of a finding, from the script and the PTX ISA.
Outcomes with another CuTe DSL (`--dsl FOLDER`) are kept apart, as `others`.
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import random
import shlex
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from run import classify, installed

HERE = Path(__file__).parent
RESULTS = HERE / "cutlass-examples.json"
PAGE = HERE.parent / "docs" / "public.md"
BEGIN, END = "<!-- table of cutlass-examples.json -->\n", "<!-- end of CUTLASS' table -->\n"
FAMILIES = {
    "ampere": "cute/ampere/",
    "hopper": "cute/hopper/",
    "blackwell: tutorials": "cute/blackwell/tutorial/",
    "blackwell: attention, MLA, SSD": "cute/blackwell/kernel/attention/",
    "blackwell: block-scaled GEMMs, also grouped": "cute/blackwell/kernel/blockscaled",
    "blackwell: distributed, 2 ranks": "cute/blackwell/kernel/distributed/",
    "blackwell: GEMMs, grouped, mixed-input, MoE, norm, epilogues": "cute/blackwell/",
    "blackwell_geforce": "cute/blackwell_geforce/",
    "cute_ext": "cute_ext/",
    "experimental primitives": "experimental/primitives/",
    "experimental task_scheduling": "experimental/task_scheduling/",
    "dsl_tutorials, TVM-FFI, JAX": "",
}
"""Beginnings of paths, of which the first that fits counts."""


def ended(words: list[str], folder: Path, seconds: float) -> tuple[int | None, str]:
    """Exit code (None: broken off) and stderr of `python -m cute_emulator` with these words."""
    with tempfile.TemporaryFile("w+", errors="replace") as said, Path(os.devnull).open("w") as nothing:
        child = os.fork()
        if child == 0:
            os.setsid()
            os.chdir(folder)
            os.dup2(nothing.fileno(), 1)
            os.dup2(said.fileno(), 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            os._exit(_command(words))
        until, code = time.monotonic() + seconds, None
        while code is None and time.monotonic() < until:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
            else:
                time.sleep(0.1)
        if code is None:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
        said.seek(0)
        return code, said.read()


def _command(words: list[str]) -> int:
    """What the command would end with, in this process."""
    from cute_emulator.__main__ import main

    sys.argv = ["cute_emulator", *words]
    code = 0
    try:
        main()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def run(row: dict, examples: Path, mode: str, seconds: float, keep: Path | None = None) -> dict:
    """The row with what came out; what it said on stderr to a file in `keep`."""
    path, begin = examples / row["script"], time.monotonic()
    if importlib.util.find_spec("jax") is None and "jax" in path.read_text():
        return row
    words = ["--collect", "--arch", row["arch"], "--mode", mode, "--ranks", str(row["ranks"]), str(path)]
    code, said = ended([*words, *shlex.split(row["arguments"])], path.parent, seconds)
    if keep is not None:
        (keep / row["script"].replace("/", "+")).write_text(said)
    verdict, what = ("stops", f"after {seconds:.0f} s") if code is None else classify(code, said)
    if verdict == "stops" and row.get("shows", "\0") in said:
        verdict, what = "pass", ""  # an example of an error
    return row | {
        "verdict": verdict,
        "what": what,
        "seconds": round(time.monotonic() - begin),
        "date": str(datetime.date.today()),
    }


def counts(kept: dict) -> str:
    """Returns a Markdown table of verdicts by family."""
    number = {family: dict.fromkeys(("pass", "reported", "stops"), 0) for family in FAMILIES}
    for row in kept["scripts"]:
        family = next(name for name, begin in FAMILIES.items() if row["script"].startswith(begin))
        number[family][row["verdict"]] += 1
    total = {verdict: sum(n[verdict] for n in number.values()) for verdict in ("pass", "reported", "stops")}
    lines = [f"With nvidia-cutlass-dsl {kept['dsl']}, torch {kept['torch']}:", ""]
    lines += ["|family|scripts|pass|reported|stops|", "|---|---|---|---|---|"]
    for family, of in [*number.items(), ("all", total)]:
        lines.append(f"|{family}|{sum(of.values())}|{'|'.join(str(n or '') for n in of.values())}|")
    days = Counter(row["date"] for row in kept["scripts"])
    lines += ["", f"Run on {', '.join(f'{day} ({number})' for day, number in sorted(days.items()))}."]
    verdicts = {(row["script"], row["arch"]): row["verdict"] for row in kept["scripts"]}
    for dsl in sorted({one["dsl"] for one in kept["others"]}):
        ran = [one for one in kept["others"] if one["dsl"] == dsl]
        same = sum(verdicts[one["script"], one["arch"]] == one["verdict"] for one in ran)
        lines += ["", f"With {dsl}, {same} of {len(ran)} scripts that ran had the same outcome."]
    return "\n".join(lines) + "\n"


def table(kept: dict) -> str:
    """Returns a Markdown table of the scripts that did not pass, with the cause of each."""
    lines = ["| script | findings | judged |", "|---|---|---|"]
    for row in kept["scripts"]:
        if row["verdict"] != "pass":
            kinds = ", ".join(sorted({part.partition(" at ")[0] for part in row["what"].split("; ")}))
            what = kinds if row["verdict"] == "reported" else "stops"
            lines.append(f"| {row['script']} | {what} | {row.get('judged', '')} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs the requested scripts and writes the counts, or prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "examples", type=Path, nargs="?", help="without it, the table of scripts that did not pass is printed"
    )
    parser.add_argument("--only", nargs="+", default=[""], help="scripts whose path has one of these")
    parser.add_argument("--seed", type=int, default=26, help="of the order: what was run first is a sample")
    parser.add_argument("--again", action="store_true", help="those that have a verdict of today, too")
    parser.add_argument("--mode", default="immediate")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--dsl", type=Path, help="folder with another CuTe DSL")
    parser.add_argument("--said", type=Path, help="folder for what each said on stderr")
    arguments = parser.parse_args()
    if arguments.examples is not None:
        _run_all(arguments)
    text, kept = PAGE.read_text(), json.loads(RESULTS.read_text())
    if all("verdict" in row for row in kept["scripts"]):
        head, tail = text.partition(BEGIN)[0], text.partition(END)[2]
        PAGE.write_text(f"{head}{BEGIN}\n{counts(kept)}\n{END}{tail}")
    if arguments.examples is None:
        print(table(kept), end="")


def _run_all(arguments: argparse.Namespace) -> None:
    if arguments.dsl is not None:
        sys.path[:0] = [str(arguments.dsl), str(arguments.dsl / "nvidia_cutlass_dsl" / "dsl_packages")]
    os.environ["CUTE_DSL_LINEINFO"] = "1"  # read when the DSL is imported
    import cutlass.cute  # noqa: F401
    import cutlass.utils  # noqa: F401
    import torch  # noqa: F401

    kept, dsl = json.loads(RESULTS.read_text()), installed(arguments.dsl)
    if arguments.dsl is None:
        kept["dsl"], kept["torch"] = dsl, importlib.metadata.version("torch")
    today = str(datetime.date.today())
    order = list(enumerate(kept["scripts"]))
    random.Random(arguments.seed).shuffle(order)
    for index, row in order:
        if not any(part in row["script"] for part in arguments.only):
            continue
        if row.get("date") == today and not arguments.again:
            continue
        found = run(row, arguments.examples.resolve(), arguments.mode, arguments.seconds, arguments.said)
        print(
            found["script"],
            found.get("verdict", "no jax"),
            found.get("seconds"),
            found.get("what"),
            flush=True,
        )
        if arguments.dsl is None:
            kept["scripts"][index] = found
        else:
            key = {"script": found["script"], "dsl": dsl, "arch": found["arch"], "mode": arguments.mode}
            same = [one for one in kept["others"] if key.items() <= one.items()]
            kept["others"] = [one for one in kept["others"] if one not in same]
            kept["others"].append(key | {k: found[k] for k in ("verdict", "what", "seconds", "date")})
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
