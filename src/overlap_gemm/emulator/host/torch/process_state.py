"""What a process has to itself, for ranks that are threads of one: random numbers, and what modules declare.

A module says which of its globals are a process's own, and what they are when it begins:

    __per_process__ = {"_known": dict, "_is_open": bool}
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

DECLARATION = "__per_process__"


@dataclass(frozen=True)
class ProcessState:
    """A rank's own, while another one has its turn.

    Attributes:
        generators: of torch, NumPy and `random`.
        owned: values of the declared globals, by module and name; those that are missing begin anew.
    """

    generators: tuple[Any, Any, Any]
    owned: dict[tuple[str, str], Any]


def new() -> ProcessState:
    """Of a process that begins here: it goes on with these random numbers."""
    return ProcessState(_generators(), {})


def take() -> ProcessState:
    """What the rank whose turn ends leaves behind."""
    owned = {
        (module.__name__, name): getattr(module, name)
        for module in _declaring()
        for name in getattr(module, DECLARATION)
    }
    return ProcessState(_generators(), owned)


def put(state: ProcessState) -> None:
    """Gives the rank whose turn begins what it left behind; modules that are new to it begin as declared."""
    torch.set_rng_state(state.generators[0])
    np.random.set_state(state.generators[1])
    random.setstate(state.generators[2])
    for module in _declaring():
        for name, begin in getattr(module, DECLARATION).items():
            key = module.__name__, name
            setattr(module, name, state.owned[key] if key in state.owned else begin())


def _generators() -> tuple[Any, Any, Any]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _declaring() -> list[Any]:
    return [module for module in list(sys.modules.values()) if DECLARATION in getattr(module, "__dict__", {})]
