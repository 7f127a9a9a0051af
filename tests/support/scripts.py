"""Example scripts as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load(file: Path) -> ModuleType:
    """Imports a script by its path; `sys.modules` has it by its name."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module
