"""Modules of a large package, imported without what its `__init__` files import."""

import importlib.machinery
import sys
import types


def bare(*packages: str, **attributes: dict[str, object]) -> None:
    """Lets modules of `packages` be imported, whose own `__init__` is not run.

    Args:
        packages: Dotted names, outer ones first.
        attributes: Modules to put in place of a package's own, `__` for the dots in their names, with what
            they hold.
    """
    for name in packages:
        outer, _, last = name.rpartition(".")
        path = sys.modules[outer].__path__ if outer else None
        spec = importlib.machinery.PathFinder.find_spec(name if not outer else f"{outer}.{last}", path)
        if spec is None or spec.submodule_search_locations is None:
            raise ModuleNotFoundError(f"no package {name}")
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__, module.__spec__ = list(spec.submodule_search_locations), spec
    for name, held in attributes.items():
        module = sys.modules[name.replace("__", ".")] = types.ModuleType(name.replace("__", "."))
        module.__dict__.update(held)
