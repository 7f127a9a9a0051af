"""Startup of a process and its peers: torchrun, mpirun, slurm's srun, or a single process.

The same script runs under any launcher:

    world = overlap_gemm.init()
    overlap_gemm.finalize()
"""

import logging
import os
import re
import resource
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from .group import clear_groups, forbid_forked, is_forked
from .memory.workspace import close_workspaces

Launcher = Literal["torchrun", "mpirun", "slurm", "none", "torch.distributed"]


TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that torchrun and compatible launchers set for rank and rendezvous."""

MIN_ADDRESS_SPACE = 1 << 30
"""Bytes of free address space, for stacks and heaps of native threads, below which `init` warns."""

logger = logging.getLogger(__name__)

DESTROY_SECONDS = 60.0
"""Time in which `finalize` expects torch to destroy the process group; NCCL needs less than a second."""

GLOO_RELEASE_SECONDS = 0.05
"""Time in which torch's communication threads release their tensors in `finalize`."""


@dataclass(frozen=True)
class World:
    """Processes of this job, as returned by `init`.

    Attributes:
        rank: Number of this process, 0 to size - 1.
        size: Number of processes.
        local_rank: Number of this process on its machine; index of its GPU.
        device: Device of this process's tensors.
        launcher: Launcher that started the processes; "torch.distributed" if the process group already
            existed.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    launcher: Launcher

    def mesh(self, name: str = "tp") -> DeviceMesh:
        """Returns a 1-D mesh of all ranks, for `parallelize` and other code that takes a DeviceMesh.

        Collective.

        A mesh needs a process group. For a single process, where `init` creates none, this method creates a
        group of one, which `finalize` destroys.

        Args:
            name: Name of the mesh dimension.
        """
        global _owns_process_group
        if self.launcher == "none" and not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            _owns_process_group = True
        return init_device_mesh(self.device.type, (self.size,), mesh_dim_names=(name,))


@dataclass(frozen=True)
class _Placement:
    """Position of a process in its job, as its launcher defines it, and the store for the rendezvous."""

    launcher: Launcher
    rank: int
    size: int
    local_rank: int
    store: dist.Store | None = None


_world: World | None = None
_owns_process_group = False


def init(*, device: str | None = None, timeout: float | None = None) -> World:
    """Connects this process with its peers and selects its device.

    Later calls return the same `World` and ignore ``timeout``; another kind of device raises ValueError.

    The first of these that applies is used:

    1. A process group that is already initialised. It keeps its timeout. The local rank is ``LOCAL_RANK``, or
       the group's rank if that variable is not set.
    2. torchrun's environment.
    3. The environment of Open MPI or another PMI launcher: mpi4py gives rank, size and rendezvous; gloo or
       NCCL communicates.
    4. slurm's srun.
    5. None of them: a world of one process, without torch.distributed.

    Args:
        device: "cpu" or "cuda", whose index is the local rank; default CUDA if there is a device.
        timeout: Timeout in seconds of the process group that is created here; default torch.distributed's.
            Without effect if the process group already exists.

    Returns:
        World of this process.

    Raises:
        ValueError: The device does not exist, or the process is already initialised on another kind of
            device.
        RuntimeError: The launcher's environment is incomplete, the machine has fewer GPUs than local ranks,
            or this process was forked from an initialised one.
    """
    global _world, _owns_process_group
    forbid_forked()
    if device not in (None, "cpu", "cuda"):
        raise ValueError(
            f"init(device={device!r}): device must be 'cpu' or 'cuda'; a GPU's index is the local rank"
        )
    if _world is not None:
        if device is not None and torch.device(device).type != _world.device.type:
            raise ValueError(f"init(device={device!r}): already initialised on {_world.device}")
        return _world
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("init(device='cuda'): this machine has no CUDA device, or torch has no CUDA")
    _warn_of_limit()
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
    clear_groups(single_process=placement.launcher == "none")
    _world = World(placement.rank, placement.size, placement.local_rank, target, placement.launcher)
    return _world


def _warn_of_limit() -> None:
    """Logs a limit of the address space that is nearly reached.

    At the limit a native thread cannot start. That ends the process with the message "terminate called",
    which names no reason.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    if limit - used < MIN_ADDRESS_SPACE:
        logger.warning(
            "process %d may use %d KiB of address space (ulimit -v) and uses %d KiB: if it ends by SIGABRT "
            "or with an error of memory, raise the limit",
            os.getpid(), limit >> 10, used >> 10,
        )  # fmt: skip


def finalize() -> None:
    """Frees the workspaces and leaves the world; destroys a process group of `init` or `World.mesh`.

    A process group that the caller created is not destroyed.

    Collective if workspaces exist. A second call does nothing. In a process that was forked from an
    initialised one it frees nothing, because workspaces and process group belong to the parent.

    Raises:
        RuntimeError: The process group was not destroyed within `DESTROY_SECONDS`. NCCL waits while a CUDA
            graph exists that has captured its collectives; delete such graphs first. Captured fused calls
            have none.
    """
    global _world, _owns_process_group
    is_parents = is_forked()
    if not is_parents:
        close_workspaces()
    world, _world = _world, None
    owned, _owns_process_group = _owns_process_group and dist.is_initialized() and not is_parents, False
    clear_groups(single_process=False)
    if owned:
        _destroy_process_group(world)
        # If another object, such as a DeviceMesh, keeps the group, its threads continue. One of them may
        # still hold a tensor of the last collective, and aborts the process if it releases the tensor while
        # Python shuts down. There is no signal for the release; it takes microseconds.
        time.sleep(GLOO_RELEASE_SECONDS)


def _destroy_process_group(world: World | None) -> None:
    """Destroys the world's process group; NCCL's in a thread, since torch's call has no time-out."""
    if "nccl" not in dist.get_backend_config():
        dist.destroy_process_group()
        return
    errors: list[BaseException] = []

    def destroy() -> None:
        try:
            if world is not None and world.device.type == "cuda":
                torch.cuda.set_device(world.device)
            dist.destroy_process_group()
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    thread = threading.Thread(target=destroy, name="overlap_gemm finalize", daemon=True)
    thread.start()
    thread.join(DESTROY_SECONDS)
    if thread.is_alive():
        raise RuntimeError(
            f"finalize: torch.distributed.destroy_process_group has not returned for {DESTROY_SECONDS:g} s. "
            f"NCCL waits while a CUDA graph exists that has captured its collectives: delete such graphs "
            f"before finalize()"
        )
    if errors:
        raise errors[0]


def _find_placement(env: Mapping[str, str]) -> _Placement:
    """Returns rank and size by the launcher's variables; raises if they are incomplete."""
    if env.keys() >= set(TORCHRUN):
        rank, size = (_number(env, name) for name in ("RANK", "WORLD_SIZE"))
        if rank >= size:
            raise RuntimeError(f"RANK={rank} must be less than WORLD_SIZE={size}")
        return _Placement("torchrun", rank, size, _number(env, "LOCAL_RANK", rank), _restart_store(env))
    if "OMPI_COMM_WORLD_SIZE" in env or "PMI_SIZE" in env:
        return _placement_from_mpi()
    if "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env:
        return _placement_from_slurm(env)
    stray = [name for name in ("TORCHELASTIC_RUN_ID", *TORCHRUN[:2]) if name in env]
    if stray and env.get("WORLD_SIZE") != "1":
        present = ", ".join(f"{name}={env[name]}" for name in stray)
        missing = ", ".join(name for name in TORCHRUN if name not in env)
        raise RuntimeError(
            f"the environment has {present}, but not {missing}: torchrun sets all of "
            f"{', '.join(TORCHRUN)}. Start this process by a launcher, or unset {' '.join(stray)} for a "
            f"single process"
        )
    return _Placement("none", 0, 1, 0)


def _restart_store(env: Mapping[str, str]) -> dist.Store | None:
    """Returns a store for the rendezvous of processes that torchrun has restarted; None: torch's own.

    torchrun on one machine keeps its store, in which the addresses of the ended processes would be read
    (torch 2.13). Agents of several machines count restarts separately, so torch's store is used there.
    """
    restarts = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts == "0" or env.get("LOCAL_WORLD_SIZE") != env["WORLD_SIZE"]:
        return None
    store, _, _ = next(rendezvous("env://"))
    return dist.PrefixStore(f"restart-{restarts}", store)


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Returns a rank or a number of processes from a launcher's environment variable."""
    text = env.get(name, str(default))
    if not text.isdecimal():
        raise RuntimeError(f"{name} must be a whole number, 0 or more, set by a launcher; got {text!r}")
    return int(text)


def _placement_from_mpi() -> _Placement:
    """Returns the placement by mpi4py, with a store that rank 0 of the world serves."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise RuntimeError(
            "started by mpirun, but mpi4py cannot be imported: pip install mpi4py (the extra 'mpi')"
        ) from error
    world = MPI.COMM_WORLD
    local_rank = world.Split_type(MPI.COMM_TYPE_SHARED).rank
    # Rank 0 binds a port that the system selects, and sends it to the others, so that ports cannot collide.
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
    # Two steps of one job, or two jobs on one machine, need different ports: it is computed from both ids.
    ids = int(env["SLURM_JOB_ID"]) * 64 + int(env.get("SLURM_STEP_ID", 0))
    port = int(env.get("MASTER_PORT", 20000 + ids % 40000))
    store = dist.TCPStore(address, port, size, is_master=rank == 0, wait_for_workers=False)
    return _Placement("slurm", rank, size, int(env.get("SLURM_LOCALID", 0)), store)


def first_host(nodelist: str) -> str:
    """Returns the first host of slurm's compressed list: "node[007-012,031],login" -> "node007"."""
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
