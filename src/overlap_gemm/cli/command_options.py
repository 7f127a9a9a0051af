"""Options that several commands share, and the conversion of their values."""

from collections.abc import Sequence
from typing import Annotated, Literal, cast

import torch
import typer

from .. import epilogues
from ..api import all_to_all as _  # noqa: F401 (registers its ops)
from ..backends.scales.scaling import Block, blocks_named
from ..epilogues import Epilogue
from ..spec import OPS

DType = Literal["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
"""Types of operands in options."""

DTypeOption = Annotated[
    DType | None,
    typer.Option(
        help="Type of operands and result; 8-bit operands have scales, and a bfloat16 result. "
        "[default: bfloat16 on GPUs, else float32]"
    ),
]
BlockOption = Annotated[
    Literal["128", "32", "mx"] | None,
    typer.Option(
        help="Elements of 8-bit operands that share a scale: blocks, or those of MX types. [default: rows]"
    ),
]
EpilogueOption = Annotated[
    str | None, typer.Option(help="Epilogue of overlap_gemm.epilogues, such as add_residual or swiglu.")
]
DeviceOption = Annotated[str | None, typer.Option(help="cpu or cuda. [default: cuda if there is one]")]


def chosen_ops(named: Sequence[str], option: str = "--op") -> list[str]:
    """Returns the named ops, or all if none is named, in the library's order.

    Raises:
        BadParameter: There is no such op.
    """
    if unknown := set(named) - set(OPS):
        raise typer.BadParameter(f"{sorted(unknown)} is not among {', '.join(OPS)}", param_hint=option)
    return [op for op in OPS if not named or op in named]


def epilogue_named(name: str | None) -> Epilogue | None:
    """Returns the epilogue of an `EpilogueOption`; None without one.

    Raises:
        BadParameter: `overlap_gemm.epilogues` has no such epilogue.
    """
    if name is None:
        return None
    known = {one: value for one, value in vars(epilogues).items() if isinstance(value, Epilogue)}
    if name not in known:
        raise typer.BadParameter(f"{name!r} is not among {', '.join(sorted(known))}", param_hint="--epilogue")
    return known[name]


def block_of(option: str | None, dtype: torch.dtype) -> Block:
    """Returns the value for `block=` of a `BlockOption`, for operands of a type.

    Raises:
        BadParameter: There is no such block for the type.
    """
    block = int(option) if option and option.isdigit() else cast(Block, option)
    try:
        blocks_named(block, dtype)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--block") from error
    return block
