"""The ops of operands with scales, each made of the plain one: `torch.ops.overlap_gemm.scaled_...`.

Two tensors more, `scale_x` and `scale_w` (lists of weights have lists of scales), as
`backends.scales.scaling` has them; at the end `out_dtype`, and `block`: the name of the blocks that the
scales are of. They have no gradients: `float8` has, of operands that it quantises itself.
"""

from typing import Any, NoReturn

from ..backends.scales.scaling import NAMED_BLOCKS
from . import ops
from .registered import Registered, Run

BLOCKS = {str(name): blocks for name, blocks in NAMED_BLOCKS.items()}

NO_GRADIENT = "operands with scales have no gradients: call under torch.no_grad(), or with detached tensors"


def _scaled(op: Registered) -> Registered:
    def bind(x: Any, weight: Any, bias: Any, *others: Any) -> Run:
        _, _, *arguments, out_dtype, block = others
        return op.bind(x, weight, bias, *arguments, out_dtype=out_dtype, blocks=BLOCKS.get(block))

    def fake(x: Any, weight: Any, bias: Any, *others: Any) -> Any:
        _, _, *arguments, out_dtype, _ = others
        result = op.fake(x, weight, bias, *arguments)
        if not isinstance(result, list):
            return result.to(out_dtype)
        gathered, *outs = result
        return [gathered, *(out.to(out_dtype) for out in outs)]

    return Registered(
        f"scaled_{_with_scales(op.schema)}",
        bind=bind,
        fake=fake,
        backward=_no_backward,
    )


def _with_scales(schema: str) -> str:
    for weights, bias in (("Tensor", "Tensor? bias"), ("Tensor[]", "Tensor[]? biases")):
        schema = schema.replace(f"{bias},", f"{bias}, Tensor scale_x, {weights} scale_w,")
    return schema.replace(") ->", ", ScalarType out_dtype, str? block) ->")


def _no_backward(*_: Any) -> NoReturn:
    raise TypeError(NO_GRADIENT)


OPS = {
    op.name: _scaled(op)
    for op in (
        ops.all_gather_gemm,
        ops.gemm_reduce_scatter,
        ops.gemm_all_reduce,
        ops.gemm_all_gather,
        ops.local_gemm,
    )
}
"""By the plain op's name."""
