"""Rules of the house that a reader would otherwise have to check by eye."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("src", "emulator/src")
REMOVED_OPTIONS = re.compile(
    r"own_?last|publisher|k_?slices|ll_?bulk|symmetric_?output|(?<!NVSHMEM_DISABLE_)nvls", re.IGNORECASE
)
"""Options that no default took (docs/design/not-adopted.md). NVSHMEM's own variable keeps its name."""


def lint_imports(*arguments: str, root: Path = ROOT) -> subprocess.CompletedProcess:
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache", *arguments]
    path = os.pathsep.join(str(root / folder) for folder in SOURCES)
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=120)


def test_imports_keep_the_contracts():
    done = lint_imports()
    assert done.returncode == 0, done.stdout
    assert " 0 broken" in done.stdout


def layers() -> list[list[str]]:
    """The rooms on each floor, as the exhaustive contract has them: it is kept, so that these are all."""
    contract = r'containers = \["overlap_gemm"\]\nexhaustive = true\nlayers = \[(.*?)\]'
    [found] = re.findall(contract, (ROOT / "pyproject.toml").read_text(), re.DOTALL)
    return [floor.split(" | ") for floor in re.findall(r'"(.+)"', found)]


def import_graph(package: str) -> grimp.ImportGraph:
    """The imports of a package at run time, those inside functions among them."""
    return grimp.build_graph(package, exclude_type_checking_imports=True, cache_dir=None)


def circle(graph: grimp.ImportGraph) -> list[str]:
    """Modules that import each other in a circle; empty if there are none."""
    try:
        TopologicalSorter({m: graph.find_modules_directly_imported_by(m) for m in graph.modules}).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("package", ["overlap_gemm", "cute_emulator"])
def test_no_modules_import_each_other_in_a_circle(package):
    graph = import_graph(package)
    assert len(graph.modules) > 60
    assert circle(graph) == []


def test_a_circle_by_an_import_in_a_function_is_noticed():
    graph = import_graph("overlap_gemm")
    importer, imported = "overlap_gemm.parallel.model", "overlap_gemm.parallel.modules.lora"
    assert graph.direct_import_exists(importer=importer, imported=imported), "which it does in a function"
    graph.add_import(importer=imported, imported=importer)
    assert set(circle(graph)) == {importer, imported}


def test_the_map_names_every_room():
    """CONTRIBUTING.md draws the floors as the contract has them."""
    picture = re.search(r"```\n(cli .*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    assert picture is not None
    drawn = [re.split(r" {2,}", line)[0].split(" | ") for line in picture[1].splitlines()]
    assert drawn == layers()


PLANTED = {
    "cute_emulator/trace.py": "overlap_gemm.config.gemm_config",
    "cute_emulator/settings.py": "overlap_gemm.runtime.group",
    "cute_emulator/errors.py": "cute_emulator.machine",
    "cute_emulator/numbers/lanes.py": "cute_emulator.ptx.ir",
    "cute_emulator/ptx/parse.py": "cute_emulator.translate.flow",
    "cute_emulator/units/tma.py": "cute_emulator.machine.memory",
    "cute_emulator/machine/warp.py": "cute_emulator.execution.scheduler",
    "cute_emulator/instructions/sync.py": "cute_emulator.translate.program",
    "cute_emulator/execution/launch.py": "cute_emulator.host.emulator",
    "cute_emulator/host/torch/turns.py": "cute_emulator.host.dsl",
    "overlap_gemm/transports/nvshmem.py": "torch",
    "overlap_gemm/transports/peer_bulk.py": "overlap_gemm.runtime.memory.workspace",
    "overlap_gemm/runtime/executor.py": "cute_emulator",
    "overlap_gemm/runtime/order.py": "overlap_gemm.dispatch.ops",
    "overlap_gemm/config/gemm_config.py": "overlap_gemm.transports",
    "overlap_gemm/backends/base.py": "overlap_gemm.nn",
    "overlap_gemm/config/orders.py": "nvshmem",
}


def test_upward_imports_and_unknown_rooms_are_noticed(tmp_path):
    for folder in SOURCES:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    home = {"overlap_gemm": tmp_path / "src", "cute_emulator": tmp_path / "emulator" / "src"}
    for file, module in PLANTED.items():
        with (home[file.partition("/")[0]] / file).open("a") as text:
            text.write(f"\nimport {module}\n")
    (home["overlap_gemm"] / "overlap_gemm" / "attic.py").write_text("")
    done = lint_imports(root=tmp_path)
    assert done.returncode != 0
    said = " ".join(done.stdout.split())
    for file, module in PLANTED.items():
        edge = f"{file.removesuffix('.py').replace('/', '.')} -> {module}"
        assert f"{edge} (l." in said or f"{edge}. (l." in said, edge
    assert "- overlap_gemm.attic (Since this contract is marked as 'exhaustive'" in said


def test_the_package_names_no_option_that_was_removed():
    files = [file for file in (ROOT / "src").rglob("*") if file.suffix in (".py", ".json", ".pyi")]
    named = {str(file.relative_to(ROOT)): REMOVED_OPTIONS.findall(file.read_text()) for file in files}
    assert len(files) > 100
    assert {file: found for file, found in named.items() if found} == {}
    assert [file for file in files if REMOVED_OPTIONS.search(file.name)] == []


def shared_from(file: Path) -> set[str]:
    """Modules of `tests` that a file imports, as written; "." for relative ones."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." if node.level else node.module or "")
    return {name for name in found if name == "." or name.partition(".")[0] == "tests"}


def test_tests_import_what_they_share_from_the_support_package_alone():
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert sum(bool(shared_from(file)) for file in files) > 50
    found = {str(file.relative_to(ROOT)): shared_from(file) for file in files}
    others = {file: {n for n in names if not n.startswith("tests.support")} for file, names in found.items()}
    assert {file: names for file, names in others.items() if names} == {}


MOST_FILES = 15
"""Python files of a folder of the package, `__init__.py` among them."""


def test_no_folder_of_the_package_has_more_files_than_a_reader_sees_at_once():
    files = list((ROOT / "src").rglob("*.py"))
    folders = Counter(file.parent.relative_to(ROOT).as_posix() for file in files)
    assert len(folders) > 15
    assert {folder: count for folder, count in folders.items() if count > MOST_FILES} == {}


SAME_MEANING = {"ColumnParallelLinear", "RowParallelLinear"}
"""Classes of ours that stand for Megatron-LM's of the same name."""

REGISTRY = {"ops.py", "all_to_all.py"}
"""The list of ops (`spec`), and the ops of torch that are made of it (`dispatch`)."""


def repeated(names: Iterable[str]) -> set[str]:
    return {name for name, times in Counter(names).items() if times > 1}


def test_no_file_or_class_of_the_package_has_a_name_twice():
    files = [file for file in (ROOT / "src").rglob("*.py") if not file.name.startswith("__")]
    assert repeated(file.name for file in files) <= REGISTRY
    classes = [
        node.name
        for file in files
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef)
    ]
    assert len(files) > 150 and len(classes) > 200
    assert repeated(classes) == SAME_MEANING


def test_the_package_needs_no_tool_of_developers():
    """The command alone names their package, and says how to install it."""
    files = [file for file in (ROOT / "src").rglob("*.py") if "overlap_gemm_tools" in file.read_text()]
    assert [str(file.relative_to(ROOT)) for file in files] == ["src/overlap_gemm/cli/__init__.py"]
