"""`overlap-gemm explain`: prints `overlap_gemm.explain` of a call on this machine, for the started ranks."""

from dataclasses import replace
from typing import Annotated, Any

import torch
import typer

import overlap_gemm

from ..backends.epilogues import usual_dtypes, with_empty_inputs
from ..backends.op_call import BackendName
from ..backends.peer_access import PeerAccess, this_device
from ..backends.scales.scale_layouts import LAYOUTS
from ..backends.scales.scaling import FLOAT8, blocks_named
from ..backends.select import Choice, explained
from ..epilogues import Epilogue
from ..runtime.bootstrap import World
from ..runtime.group import find
from ..spec import OPS
from ..spec.sharding import Shards, shard_rows
from ..testing.workload import Workload
from .command_options import (
    BlockOption,
    DeviceOption,
    DTypeOption,
    EpilogueOption,
    block_of,
    chosen_ops,
    epilogue_named,
)
from .console import rank_zero_console


def explain(
    op: Annotated[str, typer.Argument(help=f"One of {', '.join(OPS)}.")],
    m: Annotated[int, typer.Argument(min=1, help="Rows M over all ranks.")],
    n: Annotated[int, typer.Argument(min=1, help="Output features N over all ranks.")],
    k: Annotated[int, typer.Argument(min=1, help="Input features K over all ranks.")],
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Assume this many ranks like this one, with peer access. [default: those started]",
        ),
    ] = None,
    backend: Annotated[BackendName, typer.Option(help="backend= of the call.")] = "auto",
    dtype: DTypeOption = None,
    block: BlockOption = None,
    epilogue: EpilogueOption = None,
    device: DeviceOption = None,
) -> None:
    """Shows which backend would run an op on this machine, and why others would not.

    Run it under a launcher, `bash launch/torchrun.sh -n 2 overlap-gemm explain gemm_all_reduce 16 4096 4096`:
    the ranks then test peer access. Alone, `--ranks 8` assumes it. `overlap-gemm plan` predicts for other
    machines.
    """
    (name,) = chosen_ops([op], "OP")
    world = overlap_gemm.init(device=device)
    operand = getattr(torch, dtype or ("bfloat16" if world.device.type == "cuda" else "float32"))
    named = block_of(block, operand)
    workload = Workload("", name, m, n, k, operand)
    group = find(None)
    x, weight = (torch.empty(shape, dtype=operand, device=world.device) for shape in workload.shapes(group))
    how: dict[str, Any] = {"backend": backend, **workload.arguments}
    if operand in FLOAT8:
        scales = LAYOUTS[blocks_named(named, operand)].unit(*workload.shapes(group), world.device)
        how |= {**dict(zip(("scale_x", "scale_w"), scales, strict=True)), "block": named}
    if (named_epilogue := epilogue_named(epilogue)) is not None:
        local = Shards.owned_by(group.size, group.rank)
        how["epilogue"] = with_empty_inputs(named_epilogue, workload.spec, x, (m, n), local)
    choice = overlap_gemm.explain(name, x, weight, group=group.process_group, **how)
    if ranks not in (None, world.size):
        choice = _as_if(choice, ranks, world, named_epilogue)
    overlap_gemm.finalize()
    rank_zero_console(world.rank).print(str(choice), markup=False, highlight=False, soft_wrap=True)


def _as_if(choice: Choice, ranks: int, world: World, epilogue: Epilogue | None) -> Choice:
    """Returns the choice for a number of ranks, each with a device like this one's."""
    access = choice.problem.peer_access
    if world.device.type == "cuda":
        local = this_device(world.device)
        access = PeerAccess(local.arch, local.num_sms, local.why_not, local.uncalibrated)
    call = choice.problem.call._replace(chunk=shard_rows(choice.problem.shards.total, ranks))
    problem = replace(choice.problem, call=call, world_size=ranks, peer_access=access)
    if epilogue is not None:
        problem = problem.with_epilogue(epilogue, usual_dtypes(epilogue, problem.dtype))
    return explained(problem, choice.requested, problem.local_columns)
