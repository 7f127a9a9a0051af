"""What ranks that are threads of one process each have: random numbers, and what `clients` says is theirs."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cute_emulator import clients


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
        (module, name): getattr(sys.modules[module], name)
        for module, name in clients.owned
        if module in sys.modules
    }
    return ProcessState(_generators(), owned)


def put(state: ProcessState) -> None:
    """Gives the rank whose turn begins what it left behind; what is new to it begins as declared."""
    torch.set_rng_state(state.generators[0])
    np.random.set_state(state.generators[1])
    random.setstate(state.generators[2])
    for key, begin in clients.owned.items():
        module, name = key
        if module in sys.modules:
            setattr(sys.modules[module], name, state.owned[key] if key in state.owned else begin())


def _generators() -> tuple[Any, Any, Any]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()
