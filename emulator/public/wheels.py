"""Groups the packages' files with `cute.kernel` by whether they run: `python emulator/public/wheels.py`.

Every file of a package of `PACKAGES` that can be found is in exactly one group of `wheels.json`:

- `runs`: a case of `run.py` launches a kernel of the file; with the case's verdict.
- `no kernel`: the file defines none (it names `cute.kernel` in a comment, say).
- `no case`: it is imported, in a process of its own, but there is no case that calls its kernels.
- `not imported`: with the reason, for example a module that is not installed.

`--table` prints all files; the counts are written into `docs/public.md`.
"""

import argparse
import ast
import datetime
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import select
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "cases"))
from bare import bare
from run import BOTH, CASES, HERE, PAGE, compiler, verdict

RESULTS = HERE / "wheels.json"
BEGIN, END = "<!-- table of wheels.json -->\n", "<!-- end of the wheels' table -->\n"
GROUPS = ("runs", "no case", "no kernel", "not imported")
PACKAGES = {
    "flash-attn-4": ("flash_attn",),
    "liger-kernel": ("liger_kernel",),
    "nvidia-cutlass-dsl": ("nvidia_cutlass_dsl",),
    "quack-kernels": ("quack",),
    "sglang": ("sglang",),
    "vllm": ("vllm",),
    "flashinfer-python": ("flashinfer", "b12x"),
}
"""Distributions, and the packages in them."""
IMPORT_SECONDS = 60


def folder_of(package: str) -> Path | None:
    """Returns the folder that contains a package's folder."""
    spec = importlib.util.find_spec(package)
    return None if spec is None else Path(next(iter(spec.submodule_search_locations))).parent


def files_with_kernels(package: str) -> dict[str, Path]:
    """Returns the package's files that name `cute.kernel`, by their paths in the wheel."""
    root = folder_of(package)
    if root is None:
        return {}
    paths = sorted((root / package).rglob("*.py"))
    return {str(p.relative_to(root)): p for p in paths if "cute.kernel" in p.read_text(errors="replace")}


def defines_kernel(text: str) -> bool:
    """Returns whether a function of the file is decorated by `cute.kernel`."""
    functions = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef))
    return any("cute.kernel" in ast.unparse(each) for f in functions for each in f.decorator_list)


def files_that_run(only: str, keep: Callable[[dict[str, str]], None]) -> None:
    """Runs cases of the CuTe DSL, and keeps the files of their kernels with `CASE ARCH: VERDICT`."""
    for package, module, script, case, archs, ranks in CASES:
        if only not in f"{package} {case} {script}" or not compiler(script, None).startswith("CuTe DSL"):
            continue
        if package not in PACKAGES or importlib.util.find_spec(module.partition(".")[0]) is None:
            continue
        for arch in [a for a in BOTH if a in archs]:
            with tempfile.NamedTemporaryFile("r", suffix=".txt") as out:
                os.environ["FILES_OF"] = f"{out.name} {script}"
                said, _ = verdict(
                    HERE / "cases" / "files_of.py", case,
                    arch=arch, mode="immediate", ranks=ranks,
                )  # fmt: skip
                names = out.read().split()
            roots = [folder for each in PACKAGES[package] if (folder := folder_of(each))]
            keep({
                str(Path(name).relative_to(root)): f"{case} {arch}: {said}"
                for name in names for root in roots if Path(name).is_relative_to(root)
            })  # fmt: skip
            print(package, case, arch, said, flush=True)


def imports(names: list[str]) -> dict[str, str]:
    """Imports modules, and returns why each failed, or nothing.

    The first attempt omits the `__init__` of the module's packages, and one process serves many modules. A
    module that may have needed them is imported as usual, in a process of its own; if that fails, too, the
    first reason is kept.
    """
    reasons = _forked(names, bare_packages=True)
    for name in [
        name
        for name in names
        if reasons[name].startswith(("ImportError", "AttributeError", f"needs {name.partition('.')[0]}"))
    ]:
        if not _forked([name], bare_packages=False)[name]:
            reasons[name] = ""
    return reasons


def _forked(names: list[str], bare_packages: bool) -> dict[str, str]:
    """Imports modules one after the other in a forked process; one that ends early is followed by another."""
    reasons: dict[str, str] = {}
    while len(reasons) < len(names):
        rest = [name for name in names if name not in reasons]
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            for name in rest:
                os.write(write, f"{name}\t{_import(name, bare_packages)}\n".encode())
            os._exit(0)
        os.close(write)
        lines, more = "", True
        while more and select.select([read], [], [], IMPORT_SECONDS)[0]:
            more = os.read(read, 65536).decode()
            lines += more
        if more:
            os.kill(child, signal.SIGKILL)
        os.close(read)
        os.waitpid(child, 0)
        reasons.update(line.split("\t", 1) for line in lines.splitlines())
        if len(reasons) < len(names):
            reasons[next(name for name in names if name not in reasons)] = "crash, or too slow"
    return reasons


def _import(name: str, bare_packages: bool) -> str:
    outer = name.split(".")[:-1]
    packages = [".".join(outer[: n + 1]) for n in range(len(outer))]
    try:
        if bare_packages:
            bare(*(package for package in packages if package not in sys.modules))
        importlib.import_module(name)
    except ModuleNotFoundError as missing:
        return f"needs {missing.name}"
    except BaseException as error:
        text = re.sub(r" \(/.*", "", str(error), flags=re.DOTALL)  # the file on this machine
        return f"{type(error).__name__}: {text}".split("\n")[0].replace("\t", " ")[:90]
    return ""


def grouped(files: dict[str, Path], ran: dict[str, str]) -> list[dict[str, str]]:
    """Returns each file's group and its reason."""
    dotted = {p: p.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for p in files}
    with_kernel = [p for p, file in files.items() if defines_kernel(file.read_text(errors="replace"))]
    reasons = imports([dotted[path] for path in with_kernel if path not in ran])
    rows = []
    for path in files:
        why = ran.get(path, "")
        group = "runs" if why else "no kernel"
        if path in with_kernel and path not in ran:
            why = reasons[dotted[path]]
            group = "not imported" if why else "no case"
        rows.append({"file": path, "group": group, "why": why})
    return rows


def counts(kept: dict) -> str:
    """Returns Markdown tables: the groups of each package, and the reasons of failed imports."""
    lines = [f"|package|files|{'|'.join(GROUPS)}|", "|---|---|---|---|---|---|"]
    total: Counter[str] = Counter()
    for package, found in kept["packages"].items():
        number = Counter(row["group"] for row in found["files"])
        total += number
        lines.append(_counted(f"{package} {found['version']}", number))
    lines.append(_counted("all", total))
    rows = [row for found in kept["packages"].values() for row in found["files"]]
    reasons = Counter(row["why"] for row in rows if row["group"] == "not imported")
    said = ", ".join(f"{reason} ({number})" for reason, number in reasons.most_common(4))
    return "\n".join(lines) + f"\n\nNot imported, most often: {said}.\n"


def _counted(name: str, number: Counter[str]) -> str:
    return f"|{name}|{number.total()}|{'|'.join(str(number[group] or '') for group in GROUPS)}|"


def main() -> None:
    """Runs the cases, groups all files, or prints them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--table", action="store_true", help="run nothing; print all files")
    parser.add_argument("--only", default="", help="cases to run: package, name or script has this")
    arguments = parser.parse_args()
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"ran": {}, "packages": {}}

    def keep(files: dict[str, str]) -> None:
        kept["ran"] |= files
        _write(kept)

    if not arguments.table:
        files_that_run(arguments.only, keep)
        import cutlass.utils  # noqa: F401
        import torch  # noqa: F401

        kept |= {"date": str(datetime.date.today()), "compiler": compiler("", None)}
        for package, modules in PACKAGES.items():
            files = {path: file for module in modules for path, file in files_with_kernels(module).items()}
            if files:
                rows = grouped(files, kept["ran"])
                kept["packages"][package] = {"version": importlib.metadata.version(package), "files": rows}
                print(package, Counter(row["group"] for row in rows), flush=True)
                _write(kept)
    text = PAGE.read_text()
    PAGE.write_text(f"{text.partition(BEGIN)[0]}{BEGIN}\n{counts(kept)}\n{END}{text.partition(END)[2]}")
    if arguments.table:
        for found in kept["packages"].values():
            for row in found["files"]:
                print(row["group"], row["file"], row["why"], sep=" | ")


def _write(kept: dict) -> None:
    """Writes the results, a file in each line."""
    text = json.dumps(kept, indent=1)
    row = r'\{\s*("file": .*?),\s*("group": .*?),\s*("why": .*?)\s*\}'
    RESULTS.write_text(re.sub(row, r"{\1, \2, \3}", text) + "\n")


if __name__ == "__main__":
    main()
