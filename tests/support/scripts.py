"""Example scripts as modules, and as programs on ranks that are up."""

import contextlib
import importlib.util
import io
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from tests.support.trained import launched


def load(file: Path) -> ModuleType:
    """Imports a script by its path; `sys.modules` has it by its name."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def run_program(rank: int, size: int, file: str, arguments: list[Any]) -> str:
    """Runs a script as a program on a rank of `Ranks`, without a process of its own; returns what it prints.

    A process that a launcher starts imports torch and transformers, which takes seconds.
    """
    printed = io.StringIO()
    named = mock.patch.object(sys, "argv", [file, *map(str, arguments)])
    imports = mock.patch.object(sys, "path", [str(Path(file).parent), *sys.path])
    with named, imports, launched(), contextlib.redirect_stdout(printed):
        try:
            runpy.run_path(file, run_name="__main__")
        except SystemExit as ended:
            if ended.code:
                raise
    return printed.getvalue()
