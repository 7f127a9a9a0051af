"""Records what stacks pin, and runs tests of models in environments of such versions.

    python tools/versions.py record
    python tools/versions.py try                    # every stack of the record, the oldest and the newest
    python tools/versions.py try sglang oldest "torch==2.15.0 transformers==5.24.0"

`record` asks pip's index what the newest release of each stack pins. `try` installs those versions and runs
tests of models. Both write into docs/integrations/versions.json; `try` writes the table of runs on the page
versions.md, too, after each run. A run replaces an earlier one of the same name. Tests that fail are counted
and listed in the record, and leave the exit status 0; a failure of pip or git ends the command.

Start it with Python 3.11 or newer, which is also the Python of the environments. An environment takes minutes
and about 6 GB, the tests (`SELECTED`, and tests/multi/test_model*.py) about 15 minutes of two cores.
Environments stay in `overlap_gemm-versions` of the temporary folder, with the log of the tests (`tests.log`),
and are used again: delete one for newer releases. Only stacks of `INSTALLED` are installed themselves, of
others their versions of packages that this library uses (`PACKAGES`).
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

import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "docs/integrations/versions.json"
PAGE = ROOT / "docs/integrations/versions.md"
ENVIRONMENTS = Path(tempfile.gettempdir()) / "overlap_gemm-versions"

STACKS = ("vllm", "sglang", "axolotl", "verl", "trl", "torchtitan", "llamafactory")
INSTALLED = {
    "trl": (["trl"], "test_trl.py"),
    "torchtitan": (["torchtitan", "triton"], "test_torch_stacks.py"),
}
"""Stacks that are installed themselves: their packages, and the only file of tests/multi that runs."""
PACKAGES = ("torch", "transformers", "accelerate", "peft", "nvidia-cutlass-dsl", "apache-tvm-ffi", "numpy")
"""Packages that both a stack and this library require."""

TESTS = ["pytest", "pytest-timeout", "pytest-xdist", "pytest-mpi", "hypothesis", "compressed-tensors"]
OURS = ["typer", "rich", "filelock", "platformdirs"]
SELECTED = (
    "test_hugging_face.py", "test_kept_lora.py", "test_float8.py", "test_compile.py",
    "test_drawn_compositions.py",
)  # fmt: skip
"""Files of tests/multi that run in an environment, in addition to test_model*.py."""


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


def our_requirements() -> list[Requirement]:
    """Returns the requirements of this library, and those of its extras for models."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = [*project["dependencies"], *extras["hf"], *(one for one in extras["dev"] if "peft" in one)]
    return [Requirement(one) for one in named]


def wanted(name: str, stacks: dict[str, Any]) -> list[str]:
    """Returns the requirements of an environment, in addition to this library's.

    Args:
        name: Stack of the record: its requirements. "oldest": the lowest versions that this library allows.
            "newest": none. Any other name is a list of requirements, separated by spaces.
        stacks: Stacks of the record.
    """
    if name == "newest":
        return []
    if name == "oldest":
        ours = [one for one in our_requirements() if one.name in PACKAGES and one.name != "numpy"]
        floors = {
            one.name: floor.version for one in ours for floor in one.specifier if floor.operator == ">="
        }
        return [
            f"{package}=={version}{'.*' * (version.count('.') < 2)}" for package, version in floors.items()
        ]
    return stacks[name]["requires"] if name in stacks else name.split()


def row(run: dict[str, Any]) -> str:
    """Returns the row of a run in the page's table."""
    versions = run["versions"]
    columns = [run["for"], *(versions[name] for name in ("torch", "transformers", "peft"))]
    columns += [f"{run.get('passed', 0)} passed, {run.get('failed', 0)} failed"]
    return f"| {' | '.join(columns)} | {run['date']}, {run['commit']} |"


def write(record: dict[str, Any]) -> None:
    """Writes the record, and the rows of its runs into the page."""
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    rows = "".join(row(run) + "\n" for run in record["runs"])
    page = re.sub(r"(?:^\|.* passed, .*\|\n)+", lambda _: rows, PAGE.read_text(), flags=re.MULTILINE)
    PAGE.write_text(page)


def run_in(folder: Path, requirements: list[str], files: list[Path]) -> dict[str, Any]:
    """Makes an environment of the versions, runs tests in it, and returns the run's record.

    Args:
        folder: Folder of the environment; an existing one is used again.
        requirements: Requirements of `wanted`, and packages of `INSTALLED`.
        files: Files of tests.

    Returns:
        Date, commit, Python, version of each package, number of tests by result, names of failed ones.

    Raises:
        CalledProcessError: pip, venv or git failed. Failed tests raise nothing.
    """
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin/python"
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, *requirements, *PACKAGES, *TESTS, *OURS], check=True)
    places = [ROOT, ROOT / "emulator", ROOT / "tools"]
    editable = [part for place in places for part in ("-e", place)]
    subprocess.run([*pip, "--no-deps", *editable], check=True)
    code = "import importlib.metadata as m, json; print(json.dumps({n: m.version(n) for n in %r}))"
    versions = subprocess.run([python, "-c", code % (PACKAGES,)], stdout=subprocess.PIPE, check=True).stdout
    log = folder / "tests.log"
    with log.open("w") as output:
        subprocess.run(
            [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files], cwd=ROOT, stdout=output
        )
    lines = log.read_text().splitlines()
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
    trying.add_argument("what", nargs="*", help="stacks of the record, oldest, newest, or requirements")
    arguments = parser.parse_args()
    record = json.loads(RECORD.read_text())
    if arguments.command == "record":
        record["stacks"] = {stack: requirements_of(stack) for stack in STACKS}
        write(record)
        return
    for name in arguments.what or (*record["stacks"], "oldest", "newest"):
        folder = ENVIRONMENTS / re.sub(r"[^\w.=-]+", "-", name)
        packages, *files = INSTALLED.get(name, ([], *SELECTED, "test_model*.py"))
        paths = [path for file in files for path in sorted((ROOT / "tests/multi").glob(file))]
        run = {"for": name, **run_in(folder, [*wanted(name, record["stacks"]), *packages], paths)}
        record["runs"] = [*(one for one in record["runs"] if one["for"] != name), run]
        write(record)


if __name__ == "__main__":
    main()
