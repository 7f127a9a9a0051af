"""Options that several commands have, and what they stand for."""

from collections.abc import Sequence
from typing import Annotated, Literal, cast

import torch
import typer

from ..api import all_to_all as _  # noqa: F401 (registers its ops)
from ..backends.scales.scaling import Block, blocks_named
from ..spec import OPS

DType = Literal["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
"""Types of operands, as commands have them."""

DTypeOption = Annotated[
    DType | None,
    typer.Option(
        help="Of operands and result; 8-bit operands have scales, and a bfloat16 result. "
        "[default: bfloat16 on GPUs, else float32]"
    ),
]
BlockOption = Annotated[
    Literal["128", "32", "mx"] | None,
    typer.Option(
        help="Of 8-bit operands: what shares a scale, blocks, or those of MX types. [default: rows]"
    ),
]
DeviceOption = Annotated[str | None, typer.Option(help="cpu or cuda. [default: cuda where there is one]")]


def chosen_ops(named: Sequence[str], option: str = "--op") -> list[str]:
    """The ops named, or all if none is, in the library's order.

    Raises:
        BadParameter: one that there is not.
    """
    if unknown := set(named) - set(OPS):
        raise typer.BadParameter(f"{sorted(unknown)} not among {', '.join(OPS)}", param_hint=option)
    return [op for op in OPS if not named or op in named]


def block_of(option: str | None, dtype: torch.dtype) -> Block:
    """The `block=` that `BlockOption` stands for, of operands of this type.

    Raises:
        BadParameter: there are no such ones.
    """
    block = int(option) if option and option.isdigit() else cast(Block, option)
    try:
        blocks_named(block, dtype)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--block") from error
    return block
