"""Bias, scales, blocks and the result's dtype are fields of records: no function passes them on by name."""

import ast
from collections.abc import Iterator
from pathlib import Path

import overlap_gemm

SOURCE = Path(overlap_gemm.__file__).parent
FIELDS = {"bias", "blocks", "out_dtype", "scales"}

PUBLIC = ("api", "nn", "integrations", "cli", "testing", "epilogues/library.py")
"""Signatures of users, of the stacks that we are part of, and `add_bias`."""

DEVICE = ("device", "kernel", "mainloop")
"""Packages in which `scales` are what a function loads, stores or multiplies by, not an option of a call."""

OF_BLOCKS = {
    "config/naming.py blocks_name",
    "config/scale_blocks.py in_words",
    "tuning/machine.py efficiencies",
    "tuning/machine.py missing_block_timings",
    "tuning/machine.py why_uncalibrated_bytes",
}
"""Functions of blocks alone, which name them or look them up; none passes them on with other options."""


def parameters(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yields (function, parameter) of all functions and lambdas."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            listed = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            yield from ((getattr(node, "name", "lambda"), one.arg) for one in listed)


def passed_on(source: Path) -> set[str]:
    """Returns "file function: parameter" of each function that takes a field of a record by its name."""
    functions = set()
    for path in source.rglob("*.py"):
        name = path.relative_to(source).as_posix()
        if name.startswith(PUBLIC):
            continue
        for function, parameter in parameters(ast.parse(path.read_text())):
            is_device = parameter == "scales" and name.startswith(DEVICE)
            is_of_blocks = parameter == "blocks" and f"{name} {function}" in OF_BLOCKS
            if parameter in FIELDS and not (is_device or is_of_blocks):
                functions.add(f"{name} {function}: {parameter}")
    return functions


def test_no_function_takes_a_field_of_a_record_by_name():
    """They are fields of `ProductTypes`, `OperandTypes` and `CallOperands`, which are passed instead."""
    assert passed_on(SOURCE) == set()


def test_exceptions_exist():
    """Fails if a function of the list is gone, or takes no blocks any more."""
    of_blocks = {
        f"{path.relative_to(SOURCE).as_posix()} {function}"
        for path in SOURCE.rglob("*.py")
        for function, parameter in parameters(ast.parse(path.read_text()))
        if parameter == "blocks"
    }
    assert of_blocks >= OF_BLOCKS


def test_a_function_that_passes_them_on_is_found(tmp_path):
    (tmp_path / "kernel").mkdir()
    (tmp_path / "kernel" / "loads.py").write_text("def load(scales, blocks):\n    pass\n")
    (tmp_path / "plans.py").write_text(
        "run = lambda x, bias: x\nclass A:\n    def f(self, *, out_dtype): ...\n"
    )
    assert passed_on(tmp_path) == {
        "kernel/loads.py load: blocks",
        "plans.py lambda: bias",
        "plans.py f: out_dtype",
    }
