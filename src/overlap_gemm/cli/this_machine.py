"""What a result ran on, in words that stay true when the result is read elsewhere."""

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
    """Processor, ranks, carrier and versions of this job. No names of hosts or users."""
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
    """The CPU's model name, as far as Linux tells."""
    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.+)", info.read_text()) if info.exists() else None
    return model[1] if model else platform.machine()


def this_arch() -> str | None:
    """The target of this machine's GPU, None where there is none that kernels are compiled for."""
    arch = arch_of_capability(torch.cuda.get_device_capability()) if torch.cuda.is_available() else None
    return None if arch is None else arch.name
