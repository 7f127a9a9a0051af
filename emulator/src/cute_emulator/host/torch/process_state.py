"""Random generators and globals of `clients`, per rank of ranks that are threads of one process."""

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
    """State of a rank while another rank has the turn.

    Attributes:
        generators: Random generators of torch, NumPy and `random`.
        owned: Values of the declared globals, by module and name; missing ones are initialized.
    """

    generators: tuple[Any, Any, Any]
    owned: dict[tuple[str, str], Any]


def new() -> ProcessState:
    """Returns the state of a new process, which continues with the current random numbers."""
    return ProcessState(_generators(), {})


def take() -> ProcessState:
    """Returns the state of the rank whose turn ends."""
    owned = {
        (module, name): getattr(sys.modules[module], name)
        for module, name in clients.owned
        if module in sys.modules
    }
    return ProcessState(_generators(), owned)


def put(state: ProcessState) -> None:
    """Restores the state of the rank whose turn begins; new globals are initialized as declared."""
    torch.set_rng_state(state.generators[0])
    np.random.set_state(state.generators[1])
    random.setstate(state.generators[2])
    for key, begin in clients.owned.items():
        module, name = key
        if module in sys.modules:
            setattr(sys.modules[module], name, state.owned[key] if key in state.owned else begin())


def _generators() -> tuple[Any, Any, Any]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()
