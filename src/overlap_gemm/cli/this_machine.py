"""Description of the machine and job that produced a result, for readers on other machines."""

import os
import platform
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..config.arch import arch_of_capability
from ..runtime.bootstrap import World


def describe(world: World) -> dict[str, Any]:
    """Returns processor, ranks, communication backend and versions of this job.

    Names of hosts and users are not included.
    """
    cuda = world.device.type == "cuda"
    return {
        "processor": torch.cuda.get_device_name(world.device) if cuda else f"CPU {processor()}",
        "cores": len(os.sched_getaffinity(0)),
        "threads_per_rank": torch.get_num_threads(),
        "ranks": world.size,
        "launcher": world.launcher,
        "carrier": "none" if world.size == 1 else "nccl" if cuda else "gloo",
        "sms": torch.cuda.get_device_properties(world.device).multi_processor_count if cuda else 0,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "overlap_gemm": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def processor() -> str:
    """Returns the CPU's model name, if Linux reports it."""
    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.+)", info.read_text()) if info.exists() else None
    return model[1] if model else platform.machine()


def this_arch() -> str | None:
    """Returns the architecture of this machine's GPU, or None if there are no kernels for it."""
    arch = arch_of_capability(torch.cuda.get_device_capability()) if torch.cuda.is_available() else None
    return None if arch is None else arch.name
