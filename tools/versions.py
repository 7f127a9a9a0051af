"""Records what stacks pin, and runs tests of models in an environment of such versions.

    python tools/versions.py record
    python tools/versions.py try sglang
    python tools/versions.py try "torch==2.15.0 transformers==5.24.0"

`record` asks the index what each stack pins. `try` installs those versions and runs tests of models. Both
write into docs/integrations/versions.json, whose table of runs is on the page versions.md. An environment
takes minutes and about 6 GB, the tests about 15 minutes of two cores. A stack itself is not installed, only
its versions of packages that this library uses.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "docs/integrations/versions.json"

STACKS = ("vllm", "sglang", "axolotl", "verl", "trl", "llamafactory")
PACKAGES = ("torch", "transformers", "accelerate", "peft", "nvidia-cutlass-dsl", "apache-tvm-ffi", "numpy")
"""Packages that both a stack and this library require."""

TESTS = ["pytest", "pytest-timeout", "pytest-xdist", "pytest-mpi", "hypothesis", "compressed-tensors"]
OURS = ["typer", "rich", "filelock", "platformdirs"]
SELECTED = ("test_hugging_face.py", "test_kept_lora.py", "test_float8.py", "test_compile.py")
"""Files of tests/multi that run in an environment, and those of models."""


def requirements_of(stack: str) -> dict[str, Any]:
    """Returns what the newest release of a stack requires, by its metadata: nothing is installed."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed", "-q"]
    report = subprocess.run(
        [*command, "--ignore-requires-python", "--report", "-", stack], stdout=subprocess.PIPE, check=True
    ).stdout
    metadata = json.loads(report)["install"][0]["metadata"]
    required = [one for one in metadata.get("requires_dist", []) if "extra ==" not in one]
    return {
        "version": metadata["version"],
        "date": datetime.date.today().isoformat(),
        "requires": sorted(one for one in required if canonicalize_name(Requirement(one).name) in PACKAGES),
    }


def run_in(folder: Path, requirements: list[str]) -> dict[str, Any]:
    """Makes an environment of the versions, runs tests of models in it, and returns versions and counts."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin/python"
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, *requirements, *PACKAGES, *TESTS, *OURS], check=True)
    places = [ROOT, ROOT / "emulator", ROOT / "tools"]
    editable = [part for place in places for part in ("-e", place)]
    subprocess.run([*pip, "--no-deps", *editable], check=True)
    code = "import importlib.metadata as m, json; print(json.dumps({n: m.version(n) for n in %r}))"
    versions = subprocess.run([python, "-c", code % (PACKAGES,)], stdout=subprocess.PIPE, check=True).stdout
    files = [ROOT / "tests/multi" / name for name in SELECTED]
    files += sorted((ROOT / "tests/multi").glob("test_model*.py"))
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files], cwd=ROOT, stdout=subprocess.PIPE
    )
    lines = done.stdout.decode().splitlines()
    print("\n".join(lines[-60:]))
    counts = {kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", lines[-1])}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit.stdout.decode().strip(),
        "python": ".".join(map(str, sys.version_info[:2])),
        "versions": json.loads(versions),
        **counts,
        "failures": [line.split(" ")[1] for line in lines if line.startswith(("FAILED ", "ERROR "))],
    }


def main() -> None:
    """Runs the command line that the module describes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("record")
    trying = commands.add_parser("try")
    trying.add_argument("what", help="a stack of the record, or requirements")
    arguments = parser.parse_args()
    record = json.loads(RECORD.read_text())
    if arguments.command == "record":
        record["stacks"] = {stack: requirements_of(stack) for stack in STACKS}
    else:
        known = record["stacks"].get(arguments.what)
        wanted = known["requires"] if known else arguments.what.split()
        with tempfile.TemporaryDirectory() as folder:
            record["runs"].append({"for": arguments.what, **run_in(Path(folder), wanted)})
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
