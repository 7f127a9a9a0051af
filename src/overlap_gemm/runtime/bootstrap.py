"""How a process finds its peers: torchrun, mpirun, slurm's srun, or alone.

import overlap_gemm
world = overlap_gemm.init()      # the same script under any launcher
...
overlap_gemm.finalize()
"""

import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .group import forbid_forked, forget_groups, is_forked
from .memory.workspace import close_workspaces

Launcher = Literal["torchrun", "mpirun", "slurm", "none", "torch.distributed"]


TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun, and whoever does as it does, says of a process and where it meets the others."""

GLOO_LETS_GO = 0.05
"""Seconds that `finalize` leaves torch's communication threads to drop what they hold."""


@dataclass(frozen=True)
class World:
    """The processes of this job, as `init` found them.

    Attributes:
        rank: This process's number, 0 to size - 1.
        size: Processes.
        local_rank: This process's number on its machine; the index of its GPU.
        device: Where this process's tensors belong.
        launcher: Who started the processes; "torch.distributed" if its process group was there already.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    launcher: Launcher

    def mesh(self, name: str = "tp") -> DeviceMesh:
        """All ranks in a row, for `parallelize` and whatever else takes a DeviceMesh. Collective.

        A mesh wants a process group. Alone, where `init` made none, this makes one of one process, which
        `finalize` destroys.

        Args:
            name: Of the mesh's one dimension.
        """
        global _owns_process_group
        if self.launcher == "none" and not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            _owns_process_group = True
        return init_device_mesh(self.device.type, (self.size,), mesh_dim_names=(name,))


@dataclass(frozen=True)
class _Placement:
    """What a launcher tells a process about itself, and where the ranks meet."""

    launcher: Launcher
    rank: int
    size: int
    local_rank: int
    store: dist.Store | None = None


_world: World | None = None
_owns_process_group = False


def init(*, device: str | None = None, timeout: float | None = None) -> World:
    """Joins this process to its peers and picks its device. Calling it again returns the same `World`.

    Reads, in this order: a process group that is already initialised; torchrun's environment; Open MPI's or
    another PMI launcher's environment (rank, size and rendezvous then come from mpi4py; gloo or NCCL carries
    the tensors); slurm's srun. With none of them the process is a world of one and torch.distributed stays
    untouched.

    Args:
        device: "cpu" or "cuda", whose number is the local rank; default CUDA where there is a device.
        timeout: Seconds after which an operation that waits for a peer fails; default torch.distributed's.

    Returns:
        This process's place.

    Raises:
        ValueError: No such device, or already initialised on another kind of device.
        RuntimeError: The launcher's environment is incomplete, there are fewer GPUs than ranks on this
            machine, or this process was forked from one that had joined its peers.
    """
    global _world, _owns_process_group
    forbid_forked()
    if device not in (None, "cpu", "cuda"):
        raise ValueError(
            f"init(device={device!r}): give 'cpu' or 'cuda'; a GPU's number is its process's local rank"
        )
    if _world is not None:
        if device is not None and torch.device(device).type != _world.device.type:
            raise ValueError(f"init(device={device!r}): already initialised on {_world.device}")
        return _world
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("init(device='cuda'): this machine has no CUDA device, or torch has no CUDA")
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if dist.is_initialized():
        local_rank = _number(os.environ, "LOCAL_RANK", dist.get_rank())
        placement = _Placement("torch.distributed", dist.get_rank(), dist.get_world_size(), local_rank)
    else:
        placement = _find_placement(os.environ)
    target = _pick_device(kind, placement.local_rank)
    if placement.launcher != "none" and not dist.is_initialized():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if target.type == "cuda" else "gloo",
            timeout=timedelta(seconds=timeout) if timeout is not None else None,
            store=placement.store,
            rank=placement.rank if placement.store is not None else -1,
            world_size=placement.size if placement.store is not None else -1,
            device_id=target if target.type == "cuda" else None,
        )
        _owns_process_group = True
    forget_groups(alone=placement.launcher == "none")
    _world = World(placement.rank, placement.size, placement.local_rank, target, placement.launcher)
    return _world


def finalize() -> None:
    """Frees the workspaces and leaves the world; destroys the process group if `init` made it.

    Collective where workspaces are left. A second call does nothing. In a process that was forked from one
    that had joined its peers it frees nothing: workspaces and process group are the parent's.
    """
    global _world, _owns_process_group
    is_parents = is_forked()
    if not is_parents:
        close_workspaces()
    if _owns_process_group and dist.is_initialized() and not is_parents:
        dist.destroy_process_group()
        # Where something else, a DeviceMesh say, keeps the group, its threads live on. One of them may still
        # hold a tensor of the last collective, and aborts the process if it drops it while Python shuts down.
        # Nothing tells when it has let go; it takes microseconds.
        time.sleep(GLOO_LETS_GO)
    forget_groups(alone=False)
    _world, _owns_process_group = None, False


def _find_placement(env: Mapping[str, str]) -> _Placement:
    if env.keys() >= set(TORCHRUN):
        rank, size = (_number(env, name) for name in ("RANK", "WORLD_SIZE"))
        if rank >= size:
            raise RuntimeError(f"RANK={rank} must be less than WORLD_SIZE={size}")
        return _Placement("torchrun", rank, size, _number(env, "LOCAL_RANK", rank))
    if "OMPI_COMM_WORLD_SIZE" in env or "PMI_SIZE" in env:
        return _placement_from_mpi()
    if "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env:
        return _placement_from_slurm(env)
    stray = [name for name in ("TORCHELASTIC_RUN_ID", *TORCHRUN[:2]) if name in env]
    if stray and env.get("WORLD_SIZE") != "1":
        said = ", ".join(f"{name}={env[name]}" for name in stray)
        missing = ", ".join(name for name in TORCHRUN if name not in env)
        raise RuntimeError(
            f"the environment has {said}, but not {missing}: torchrun sets all of {', '.join(TORCHRUN)}. "
            f"Start this process by a launcher, or, if it is to be alone, without {' '.join(stray)}"
        )
    return _Placement("none", 0, 1, 0)


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """A rank or a number of processes that a launcher says."""
    text = env.get(name, str(default))
    if not text.isdecimal():
        raise RuntimeError(f"{name} must be a whole number, 0 or more, as launchers set it; got {text!r}")
    return int(text)


def _placement_from_mpi() -> _Placement:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise RuntimeError(
            "started by mpirun, but mpi4py cannot be imported: pip install mpi4py (the extra 'mpi')"
        ) from error
    world = MPI.COMM_WORLD
    local_rank = world.Split_type(MPI.COMM_TYPE_SHARED).rank
    # Rank 0 binds a port that the system picks and tells the others: no fixed port to collide on.
    address = port = store = None
    if world.rank == 0:
        machines = world.gather(socket.gethostname())
        address = "127.0.0.1" if len(set(machines or [])) == 1 else socket.getfqdn()
        store = dist.TCPStore(address, 0, world.size, is_master=True, wait_for_workers=False)
        port = store.port
    else:
        world.gather(socket.gethostname())
    address, port = world.bcast((address, port))
    if store is None:
        store = dist.TCPStore(address, port, world.size, is_master=False, wait_for_workers=False)
    return _Placement("mpirun", world.rank, world.size, local_rank, store)


def _placement_from_slurm(env: Mapping[str, str]) -> _Placement:
    rank, size = _number(env, "SLURM_PROCID"), _number(env, "SLURM_STEP_NUM_TASKS")
    address = env.get("MASTER_ADDR") or first_host(env["SLURM_STEP_NODELIST"])
    # Two steps of one job, or two jobs on one machine, must not meet: the port follows from both ids.
    ids = int(env["SLURM_JOB_ID"]) * 64 + int(env.get("SLURM_STEP_ID", 0))
    port = int(env.get("MASTER_PORT", 20000 + ids % 40000))
    store = dist.TCPStore(address, port, size, is_master=rank == 0, wait_for_workers=False)
    return _Placement("slurm", rank, size, int(env.get("SLURM_LOCALID", 0)), store)


def first_host(nodelist: str) -> str:
    """The first host of slurm's compressed list: "node[007-012,031],login" -> "node007"."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodelist)
    if match is None:
        raise ValueError(f"not a slurm node list: {nodelist!r}")
    prefix, first, suffix = match.groups()
    return prefix + (first or "") + (suffix or "")


def _pick_device(kind: str, local_rank: int) -> torch.device:
    if kind != "cuda":
        return torch.device(kind)
    if local_rank >= torch.cuda.device_count():
        raise RuntimeError(
            f"local rank {local_rank} has no GPU of its own: this machine shows {torch.cuda.device_count()}. "
            f"Start one process per GPU, or choose init(device='cpu')"
        )
    target = torch.device("cuda", local_rank)
    torch.cuda.set_device(target)
    return target
