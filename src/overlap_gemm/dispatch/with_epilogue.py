"""Calls with an epilogue, and the custom ops `torch.ops.overlap_gemm.<op>_with_epilogue`.

If a gradient is needed and the epilogue has no gradient function, a call runs the plain op, then the
epilogue's function on tensors. Autograd records both, and saves the sums. Otherwise a call is one custom op,
whose backend applies the epilogue in its kernel or after it.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor

from ..backends.epilogues import Applying, TensorKind, author_gradient, new_results
from ..backends.op_call import SCHEMA, CallOperands, OpCall, split
from ..epilogues import Applied, Epilogue, epilogue_of
from ..runtime.group import Group, GroupLike, find, group_name
from ..spec import ARGUMENTS, OPS
from .autocast import autocast_call
from .bound import Prepared, call_op, prepared_call, run_call
from .calls import enter, enter_unless_compiled, is_plain, keep, layouts, needs_grad, state
from .choosing import chosen, is_followed
from .epilogue_checks import check_epilogue, check_shapes, refuse_gradient, with_tensors
from .lowering import Lowered, lower
from .operands import shape_of
from .ops import GEMM_OPS, NO_GRADIENT, GemmOp, result_extents, without_none
from .registered import Bound, Registered, Run
from .shard_ops import all_gather_rows, with_kept


class EpilogueOp(Registered):
    """An op with an epilogue, of one weight or of a pair of weights.

    It returns a list: result, epilogue's outputs. If it takes lists of weights, the communicated operand is
    first, as in `GemmOp`.

    Args:
        plain: Op without an epilogue.
    """

    def __init__(self, plain: GemmOp) -> None:
        self.plain, self.spec, self.takes_lists = plain, plain.spec, plain.takes_lists
        operands, scales = plain.operands, plain.scales
        super().__init__(
            f"{plain.name}_with_epilogue({operands}, Tensor[] inputs, {scales}, {SCHEMA}) -> Tensor[]",
            bind=self._bind,
            fake=self._fake,
            backward=plain.backward,
            named=OpCall,
        )
        plain.with_epilogue = self

    def _bind(self, *arguments: Any) -> Run:
        (x, weight, bias, inputs, *_), call = split(arguments)
        operands = CallOperands(x, weight, bias, inputs=inputs)
        return with_kept(chosen(self.spec, call, operands).run, call, self.takes_lists)

    def dispatched(self, tensors: tuple[Any, ...], arguments: tuple[Any, ...]) -> Any:
        """Returns the result; the dispatcher passes scales that are None, and takes no None in lists."""
        if tensors[4] is None:
            tensors = tensors[:4]
        return without_none(super().dispatched(tensors, arguments), tensors[0])

    def _fake(self, *arguments: Any) -> list[Tensor]:
        (x, weight, *_), call = split(arguments)
        dtype = call.out_dtype or x.dtype
        assert call.epilogue is not None
        epilogue, (rows, columns) = epilogue_of(call.epilogue), extents(self.plain, call, weight)
        width = columns // 2 if epilogue.pairs else columns
        made = new_results(epilogue, dtype, x, rows, width)
        if not self.takes_lists:
            return made
        return [x.new_empty(*self.plain.kept_extents(call, x, weight[0])), *made]

    def keep(self, ctx: Any, tensors: Sequence[Any], arguments: OpCall, output: Any) -> None:
        """Saves x, or the part of it that is kept, the weights, and the tensors that the gradient reads."""
        x, weight, _, inputs, *scales = tensors
        made = output[1:] if self.takes_lists else output
        weights = weight if self.takes_lists else [weight]
        assert arguments.epilogue is not None
        epilogue = epilogue_of(arguments.epilogue)
        read = [*(inputs if epilogue.reads_inputs else ()), *(made if epilogue.reads_outputs else ())]
        ctx.rest, ctx.weights, ctx.is_scaled = arguments, len(weights), bool(scales) and scales[0] is not None
        ctx.inputs, ctx.outputs = TensorKind.of(inputs), TensorKind.of(made)
        ctx.save_for_backward(output[0] if arguments.keep else x, *weights, *read)
        ctx.set_materialize_grads(False)

    def gradients(self, ctx: Any, needs: Any, *grads: Any) -> tuple[Any, ...]:
        """Returns the gradients of x, weight, bias (by the plain op) and inputs (by `author_gradient`).

        Raises:
            TypeError: Operands had scales.
        """
        if ctx.is_scaled:
            raise TypeError(NO_GRADIENT)
        (returned,), call = grads, ctx.rest
        assert call.epilogue is not None
        epilogue = epilogue_of(call.epilogue)
        x, *others = ctx.saved_tensors
        number = ctx.weights + (len(epilogue.inputs) if epilogue.reads_inputs else 0)
        weights, inputs, made = others[: ctx.weights], others[ctx.weights : number], others[number:]
        of_moved, of_made = (returned[0], returned[1:]) if self.takes_lists else (None, returned)
        filled = [
            x.new_zeros(kind.shape, dtype=kind.dtype) if grad is None else grad
            for grad, kind in zip(of_made, ctx.outputs, strict=True)
        ]
        of_sums, of_inputs = author_gradient(epilogue, filled, made, inputs, ctx.inputs)
        saved = SimpleNamespace(saved_tensors=(x, *weights), out_rows=len(of_sums))
        of_products: Any = of_sums
        if self.takes_lists:
            of_products = [of_moved, *(epilogue.operands(of_sums) if len(weights) > 1 else [of_sums])]
        grads_of_operands = self.plain.backward(saved, call, needs[:3], of_products)
        return *grads_of_operands, of_inputs


for _name in OPS:
    EpilogueOp(GEMM_OPS[_name])


def extents(op: GemmOp, call: OpCall, weight: Any) -> tuple[Any, Any]:
    """Returns (rows, columns) of this rank's sums of a lowered call; columns are added over the weights."""
    each = [result_extents(op.spec, call, one) for one in (weight if op.takes_lists else [weight])]
    return each[0][0], sum(columns for _, columns in each)


class _Shapes(NamedTuple):
    """Conversion between the caller's shapes and the op's, of inputs and results.

    Attributes:
        lowered: Lowered call.
        epilogue: Epilogue of the call.
        extents: (rows, columns) of this rank's sums.
    """

    lowered: Lowered
    epilogue: Epilogue
    extents: tuple[Any, Any]

    def flat(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Returns the epilogue's inputs in the form that the op takes: matrices and vectors."""
        dim = self.lowered.dim
        if dim is None or not inputs:
            return list(inputs)
        rows, columns = self.extents
        width = columns // 2 if self.epilogue.pairs else columns
        flat = []
        for (_, kind), tensor in zip(self.epilogue.inputs, inputs, strict=True):
            if dim and kind in ("element", "rows"):
                tensor = tensor.movedim(dim, 0)
            if kind == "element":
                flat.append(tensor.reshape(rows, width))
            else:
                flat.append(tensor.reshape(rows) if kind == "rows" else tensor)
        return flat

    def shaped(self, results: list[Tensor]) -> list[Tensor]:
        """Returns the op's results in the caller's shapes."""
        lowered = self.lowered
        if lowered.finish is None:
            return results
        declared = self.epilogue.returned
        count = len(results) - 1 - len(declared)
        moved, (result, *outputs) = results[:count], results[count:]
        shaped = [lowered.finish(result)]
        for (_, kind), output in zip(declared, outputs, strict=True):
            by_element = kind in ("element", "blocks")
            shaped.append(lowered.finish(output) if by_element else lowered.finish(output[:, None])[..., 0])
        return [*(map(lowered.finish, moved) if lowered.call.keep else moved), *shaped]


class _PreparedApplied(NamedTuple):
    """Prepared call of one signature, as in `bound`."""

    bound: Bound
    shapes: _Shapes


def call_with_epilogue(
    op: GemmOp, operands: CallOperands, group: GroupLike, call: OpCall, applied: Any
) -> list[Tensor]:
    """Calls an op and applies an epilogue to its sums.

    Args:
        op: Op to call, without an epilogue.
        operands: Operands of the caller; one weight, or the two of a pair, if the op takes lists.
        group: Process group, device mesh, name of a group, or None for the default group.
        call: Options and extents of the caller.
        applied: Epilogue with its inputs (`epilogues.Applied`).

    Returns:
        A list: the operand that was communicated, if the op takes lists of weights; the result; the outputs.

    Raises:
        TypeError: `applied` is no epilogue with inputs, or an input's dtype or device is not supported. Or a
            gradient is needed, and the result has 8 bits or the sums are partial. Or operands with scales
            require a gradient; inputs may.
        ValueError: Shapes of weights or inputs do not fit, or `invariant=` does not allow the epilogue.
    """
    has_gradient = False
    if isinstance(applied, Applied):
        applied = with_tensors(op, operands.x, applied)
        epilogue, inputs, _ = applied
        has_gradient = epilogue.gradient is not None and operands.scale_x is None
        has_gradient = has_gradient or not needs_grad(*operands, inputs)
        if is_plain(*operands, inputs) and has_gradient and not epilogue.has_gathered_rows:
            ranks = find(group)
            made, follows = enter(ranks, op.name, operands.x, _run, op, ranks, operands, call, applied)
            return _after(op, made, applied) if follows else made
    arguments = op, operands, group, call, applied, has_gradient
    return enter_unless_compiled(group, op.name, operands.x, _call_unprepared, *arguments)


def _call_unprepared(
    op: GemmOp, operands: CallOperands, group: GroupLike, call: OpCall, applied: Any, has_gradient: bool
) -> list[Tensor]:
    """Returns the results of a call that is not prepared by `_run`; see `call_with_epilogue`."""
    applied = with_tensors(op, operands.x, applied)
    check_epilogue(op, operands, call, applied)  # prepared calls have been checked
    if applied.epilogue.has_gathered_rows:
        return call_with_epilogue(
            op, operands, group, *with_gathered_rows(op, operands, group, call, applied)
        )
    epilogue, inputs, otherwise = applied
    if not has_gradient:
        refuse_gradient(op, epilogue)
        return _function_after(op, operands, group, call, applied)
    if otherwise is not None and not is_plain(*operands, inputs, as_op=False):  # compilers fuse, too
        return _function_after(op, operands, group, call, applied)
    cast, fused = autocast_call(operands, call._replace(epilogue=epilogue.key))
    shapes = _shapes_of(op, group_name(group), cast, fused, inputs)
    lowered = shapes.lowered
    tensors = lowered.tensors(cast, shapes.flat(inputs))
    if otherwise is not None and _is_followed(op, lowered.call, tensors):
        return _function_after(op, operands, group, call, applied)
    return shapes.shaped(op.with_epilogue.by_dispatcher(tensors, lowered.call))


def one_or_all(results: Sequence[Tensor]) -> Any:
    """Returns the result of an epilogue, or a tuple of the result and its outputs."""
    return results[0] if len(results) == 1 else tuple(results)


def with_gathered_rows(
    op: GemmOp, operands: CallOperands, group: GroupLike, call: OpCall, applied: Applied
) -> tuple[OpCall, Applied]:
    """Returns the call with its rows over all ranks, and the epilogue, with local rows gathered."""
    epilogue, inputs, otherwise = applied
    x = operands.x
    if not op.spec.gathers_operand:
        raise TypeError(
            f"{op.name}: epilogue {epilogue.name} has an input of kind 'gathered_rows', which only "
            "all_gather_gemm supports; declare an input with one value for each row as 'rows'"
        )
    for (name, kind), tensor in zip(epilogue.inputs, inputs, strict=True):
        if kind == "gathered_rows" and tensor.shape != x.shape[:-1]:
            raise ValueError(
                f"{op.name}: input {name} of epilogue {epilogue.name} is for each row of this rank's x "
                f"{shape_of(x)} and must be {list(x.shape[:-1])}, got {shape_of(tensor)}"
            )
    lowered = lower(op.spec, group_name(group), operands, call).call
    inner = x.movedim(lowered.dim, 0).shape[1:-1]
    total = _extent_of_one(lowered.rows, inner)
    full = []
    for (_, kind), tensor in zip(epilogue.inputs, inputs, strict=True):
        if kind == "gathered_rows":
            local = tensor.movedim(lowered.dim, 0).reshape(-1, 1)
            rows = all_gather_rows(local, lowered.rows, lowered.chunk, lowered.group)
            tensor = rows.view(total, *inner).movedim(0, lowered.dim)
        full.append(tensor)
    return call._replace(rows=total), Applied(epilogue.with_rows, tuple(full), otherwise)


def _run(
    op: GemmOp, ranks: Group, operands: CallOperands, call: OpCall, applied: Applied
) -> tuple[Any, bool]:
    """Returns the op's results, and whether `applied.otherwise` is to follow."""
    epilogue, inputs, otherwise = applied
    in_kernel = otherwise is not None
    key = (op.name, epilogue.key, in_kernel, layouts(*operands, inputs), call, state(operands.x))
    prepared: _PreparedApplied | Prepared | None = ranks.calls.get(key)
    if prepared is None:
        check_epilogue(op, operands, call, applied)
        shapes = _shapes_of(op, ranks.name, operands, call._replace(epilogue=epilogue.key), inputs)
        lowered = shapes.lowered
        tensors = lowered.tensors(operands, shapes.flat(inputs))
        if in_kernel and _is_followed(op, lowered.call, tensors):
            results = run_call(op, ranks, operands, call)
            if (plain := prepared_call(op, ranks, operands, call)) is not None:
                keep(ranks, key, plain)
            return results, True
        prepared = _PreparedApplied(op.with_epilogue.bound(tensors, lowered.call), shapes)
        if op.spec.unresolved_axis is None or getattr(call, ARGUMENTS[op.spec.unresolved_axis]) != "exchange":
            keep(ranks, key, prepared)
    if isinstance(prepared, Prepared):
        return run_call(op, ranks, operands, call, prepared), True
    bound, shapes = prepared
    if shapes.lowered.dim is None and operands.scale_x is None:
        tensors = *operands[:3], list(inputs)
    else:
        tensors = shapes.lowered.tensors(operands, shapes.flat(inputs))
    run = bound.with_gradient if needs_grad(*tensors) else bound.run
    return shapes.shaped(run(*tensors)), False


def _is_followed(op: GemmOp, call: OpCall, tensors: Sequence[Any]) -> bool:
    """Returns `choosing.is_followed` of the op with these tensors."""
    x, weight, bias, inputs, *scales = tensors
    scale_x, scale_w = scales or (None, None)
    return is_followed(op.spec, call, CallOperands(x, weight, bias, scale_x, scale_w, inputs))


def _function_after(
    op: GemmOp, operands: CallOperands, group: GroupLike, call: OpCall, applied: Applied
) -> list[Tensor]:
    """Calls the plain op, then applies the epilogue's function, or what replaces it, to its results."""
    return _after(op, call_op(op, operands, group, call), applied)


def _after(op: GemmOp, results: Any, applied: Applied) -> list[Tensor]:
    """Returns what was communicated, if the op takes lists, and the results of `apply_to_results`."""
    moved, products = (results[:1], results[1:]) if op.takes_lists else ([], [results])
    return [*moved, *apply_to_results(op, products, applied)]


def apply_to_results(op: GemmOp, products: Sequence[Tensor], applied: Applied) -> list[Tensor]:
    """Returns the results of the epilogue's function on the results of the plain op.

    If `otherwise` is passed, one kernel applies the epilogue's function where it can, else `otherwise` is
    applied. What a rank applies has no influence on the others.
    """
    epilogue, inputs, otherwise = applied
    first = products[0]
    applying = Applying(epilogue, tuple([tensor.dtype for tensor in inputs]), first.dtype)
    if otherwise is None:
        extents = *first.shape[:-1], len(products) * first.shape[-1]
        check_shapes(op, epilogue, inputs, extents, len(products))
        return applying.on_sums(first if len(products) == 1 else tuple(products), inputs)
    if is_plain(*products, inputs, as_op=False) and not needs_grad(*products, inputs):
        sums = [product.flatten(0, -2) for product in products]
        made = applying.by_kernel(sums[0] if len(sums) == 1 else tuple(sums), inputs)
        if made is not None:
            return [one.view(*first.shape[:-1], *one.shape[1:]) for one in made]
    by_torch = otherwise(*products)
    return list(by_torch) if isinstance(by_torch, tuple) else [by_torch]


def _extent_of_one(rows: Any, others: Sequence[Any]) -> Any:
    """Returns `rows` divided by the product of `others`: the extent of the remaining dimension."""
    for other in others:
        rows = rows // other if other else 0
    return rows


def _shapes_of(
    op: GemmOp, group: str, operands: CallOperands, call: OpCall, inputs: Sequence[Tensor]
) -> _Shapes:
    """Returns the lowered call and the shapes of its inputs, which are checked."""
    x, weight = operands.x, operands.weight
    lowered = lower(op.spec, group, operands, call)
    assert lowered.call.epilogue is not None
    epilogue, (rows, columns) = epilogue_of(lowered.call.epilogue), extents(op, lowered.call, weight)
    if is_partial := epilogue.is_partial(op.spec.sums):
        rows = lowered.call.rows
    shapes = _Shapes(lowered, epilogue, (rows, columns))
    leading = list(x.shape[:-1])
    if "m" in (op.spec.x, op.spec.out) and not is_partial:
        dim = lowered.call.dim
        leading[dim] = _extent_of_one(rows, leading[:dim] + leading[dim + 1 :])
    check_shapes(op, shapes.epilogue, inputs, (*leading, columns), len(weight) if op.takes_lists else 1)
    return shapes
