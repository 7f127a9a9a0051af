"""Backend ``fused``: one persistent kernel multiplies and communicates.

This module checks a problem and binds its tensors; `plan_cache`, `gather_plans` and `exchange_plans` make the
plans. The first call of a signature is collective: it compiles the kernel and allocates the workspace. Later
calls allocate only their outputs, and copies of tensors that TMA cannot load. They do not wait on the host,
and can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...config.arch import ARCHS, arch_of_capability
from ...config.gemm_config import TILE_K_BYTES
from ...config.rules import MOST_WEIGHTS
from ...config.scale_blocks import PROMOTED, in_words
from ...config.visitors import Visitor
from ...exchange.geometry import MAX_WORLD
from ...runtime import executor
from ...runtime.executor import why_no_cuda
from ...runtime.group import Group
from ...spec import OpSpec, patterns_of
from ...spec.sharding import Shards, num_owners, shard_rows
from ...tuning.settings import late_weights, promised, settings, within
from ...tuning.space import constants, every_config
from ..base import Problem
from ..epilogues import (
    read_by_kernel,
    result_dtype,
    slice_inputs,
    sums_dtype,
    why_after,
    written_by_kernel,
    written_without_kernel,
)
from ..op_call import CallOperands, bind_joined
from ..scales.product_types import ProductTypes
from ..scales.tma_operands import ROW_BYTES, ROW_ELEMENTS, aligned, aligned_vector, has_tma_strides, major
from . import exchange_plans as exchange
from . import gather_calls as gather
from . import list_calls as lists
from . import parts_of_k
from .extents import Sizes, sizes
from .plan_cache import DTYPES, bias_visitor, plan_for


def why_no_blocks(arch: str | None, types: ProductTypes) -> str | None:
    """Returns the reason an architecture has no kernels for the blocks of types; None if it has.

    Every architecture has kernels for scales of rows.
    """
    blocks = types.blocks
    if blocks is None or (arch in ARCHS and every_config(arch, "e4m3", blocks=blocks)):
        return None
    known = ", ".join(name for name in ARCHS if every_config(name, "e4m3", blocks=blocks))
    return f"scales of {in_words(blocks)} are for kernels of {known}"


def _arch_of(device_type: str) -> str | None:
    """Returns the architecture of the current CUDA device, or of the open emulator; None if there is none."""
    if device_type == "cuda":
        arch = arch_of_capability(torch.cuda.get_device_capability())
        return None if arch is None else arch.name
    emulation = executor.emulation
    return None if emulation is None else emulation.emulator.device.arch


class Fused:
    """Fused kernels for 16-bit operands, and for 8-bit operands with scales."""

    name = "fused"
    deterministic = True
    verifies = False  # its kernels compare signatures

    def why_not(self, problem: Problem) -> str | None:
        """Returns the reason the kernels or the device do not support a problem; None if they do."""
        if reason := self.why_no_kernel(problem):
            return reason
        if problem.device_type == "cuda":
            if reason := why_no_cuda(torch.cuda.current_device()):
                return reason
        elif executor.emulation is None:
            return f"fused kernels need a Hopper or Blackwell GPU, or the emulator; not {problem.device_type}"
        return why_no_blocks(_arch_of(problem.device_type), problem.types) if problem.blocks else None

    def why_no_kernel(self, problem: Problem) -> str | None:
        """Returns the reason no device could run a problem by a fused kernel; None if one could."""
        spec = problem.spec
        if not patterns_of(spec.name):
            return f"no fused kernel of {spec.name} is registered"
        if problem.is_scaled:
            if reason := self.why_no_scaled_kernel(problem):
                return reason
        elif problem.dtype not in DTYPES:
            return f"fused kernels take bfloat16 or float16, not {problem.dtype}"
        if spec.reshards_k and (reason := exchange.why_not(problem)):
            return reason
        if problem.has_partial_epilogue and (reason := why_after(problem, problem.width)):
            return reason
        if not spec.gathers_operand and problem.width % ROW_ELEMENTS:
            return f"N={problem.width} must be a multiple of {ROW_ELEMENTS}: TMA rows are whole 16 bytes"
        if spec.weight is None:
            parts = [(problem.m, problem.call.chunk)]
            if spec.out == "n":
                parts += [(n, shard_rows(n, problem.world_size)) for n in problem.widths]
            for extent, shard in parts:
                if shard and num_owners(extent, shard) < problem.world_size:
                    return (
                        f"{extent} rows or columns in shards of {shard} leave some of the ranks without any"
                    )
        for width in problem.widths or (problem.width,):
            columns = shard_rows(width, problem.world_size)
            unit, why = ROW_ELEMENTS, "tiles are stored 16 bytes at a time"
            if spec.weight is None and problem.blocks in PROMOTED and columns < width:
                unit, why = problem.blocks[1], "a rank's columns begin with a block of scales"
            if spec.has_local_columns and (columns % unit or width % ROW_ELEMENTS):
                return (
                    f"N={width} in {problem.world_size} parts is {columns} columns a rank, which must "
                    f"be a multiple of {unit}: {why}"
                )
        if problem.world_size > MAX_WORLD:
            return f"a workspace has words for {MAX_WORLD} ranks, not {problem.world_size}"
        return self.why_no_tree(problem)

    def why_no_tree(self, problem: Problem) -> str | None:
        """Returns the reason fused kernels cannot sum K in the promised leaves; None if they can."""
        promises = problem.promises
        if not promises.has_tree or not problem.spec.sums:
            return None
        unit, why = ROW_ELEMENTS, "TMA's strides are whole 16 bytes"
        if problem.is_scaled:
            unit, why = TILE_K_BYTES, "leaves of 8-bit operands are whole k tiles"
        if problem.k is not None and (reason := promises.why_no_cut(problem.k, unit)):
            return f"{reason}: {why}"
        return None

    def why_no_scaled_kernel(self, problem: Problem) -> str | None:
        """Returns the reason no kernel of 8-bit operands has the dtype of the result; None if one has."""
        if problem.out_dtype not in DTYPES:
            return f"fused kernels of 8-bit operands give bfloat16 or float16, not {problem.out_dtype}"
        return None

    def why_slower(self, problem: Problem) -> str | None:
        """Returns the reason `auto` excludes fused kernels; None to compare expected times.

        Virtual ranks are never excluded. Excluded are emulated devices, ranks without P2P access, and devices
        without measured constants. With a promise of bits, constants have no effect: another process may have
        different ones.
        """
        if problem.virtual:
            return None
        if problem.device_type != "cuda":
            return "the emulator is there to be right, not to be fast; ask for it with backend='fused'"
        if problem.peer_access is None:
            return "the ranks' GPUs have not been probed"
        if problem.promises.leaves:
            return problem.peer_access.why_not
        if reason := problem.peer_access.why_not or problem.peer_access.uncalibrated:
            return reason
        machine = constants(problem.peer_access.arch)
        return machine.why_uncalibrated_bytes(problem.blocks) if problem.is_scaled else None

    def why_after(self, problem: Problem, columns: int) -> str | None:
        """Returns the reason no kernel can apply the epilogue (`epilogues.why_after`), or None."""
        return why_after(problem, columns)

    def bind(
        self, problem: Problem, operands: CallOperands, shards: Shards, group: Group
    ) -> Callable[..., Any]:
        """Returns the bound function (`Backend.bind`). Collective at the first call of a signature."""
        with promised(problem.promises, problem.spec, group.size):
            return self._bind(problem, operands, shards, group)

    def _bind(
        self, problem: Problem, operands: CallOperands, shards: Shards, group: Group
    ) -> Callable[..., Any]:
        """Binds by the helper for the op: gathered x, exchanged x, several weights, or one weight."""
        if problem.spec.gathers_operand:
            return gather.bind(problem, operands, shards, group)
        if problem.spec.sums and len(problem.parts) > MOST_WEIGHTS:
            return bind_joined(self._bind, problem, operands, shards, group)
        if problem.parts:
            return parts_of_k.bind(problem, operands, shards, group)
        if problem.spec.operand_is_sent:
            return exchange.bind(problem, operands, shards, group)
        if problem.spec.takes_lists:
            return lists.bind(problem, operands, shards, group, self._bind_one)
        return self._bind_one(problem, operands, shards, group)

    def _bind_one(
        self, problem: Problem, operands: CallOperands, shards: Shards, group: Group
    ) -> Callable[..., Any]:
        """Binds an op of one weight; aligned operands skip all checks and use the plan directly."""
        if problem.applying is not None:
            return self._bind_with_epilogue(problem, problem.applying.visitor, operands, shards, group)
        op, depth = problem.spec, problem.k
        x, weight, bias, *_ = operands
        types, extents = problem.types._replace(weight=weight.dtype), sizes(op, x, weight, shards, group)
        shape, _, (_, columns) = extents

        def run(operands: CallOperands) -> Tensor:
            return self.call(op, types, operands, shards, group, depth)

        run = within(settings(), run)  # later calls use the settings of this one
        if _is_empty(extents, weight):
            return run
        is_loaded = _fits(extents, operands)
        # Planned now on every rank, also where operands are copied: all ranks plan a list in its order.
        a, b = (x, weight) if is_loaded else (aligned(x, extents.shard), aligned(weight))
        dtype, layout = types.result, types.scales
        epilogue = bias_visitor(bias is not None, dtype, op)
        with late_weights(b is not weight):
            plan = plan_for(group, x.device, types, shape, major(a, "m"), major(b, "n"), epilogue, depth)
        if not is_loaded:
            return run
        written, result = extents.made_by(plan)
        is_full, (step_a, step_b) = result == slice(0, written), plan.steps

        def run_as_planned(operands: CallOperands) -> Tensor:
            x, weight, bias, scale_x, scale_w, _ = operands
            addresses = x.data_ptr() | weight.data_ptr() | (0 if bias is None else bias.data_ptr())
            if addresses % ROW_BYTES or not plan.is_open:
                return run(operands)
            out = x.new_empty(written, columns, dtype=dtype)
            extras = None if bias is None else (bias,)
            if layout is not None:
                of_a = layout.of_a(scale_x, x.shape, step_a)
                extras = (of_a, layout.of_b(scale_w, weight.shape, step_b), *(extras or ()))
            plan.launch(x, (weight,), (out,), (extras,))
            return out if is_full else out[result]

        return run_as_planned

    def _bind_with_epilogue(
        self, problem: Problem, visitor: Visitor, operands: CallOperands, shards: Shards, group: Group
    ) -> Callable[..., list[Tensor]]:
        """Binds an op whose kernel applies an epilogue (`visitor`) after the bias."""
        x, weight, bias, *_ = operands
        op, depth, extents = problem.spec, problem.k, sizes(problem.spec, x, weight, shards, group)
        types = problem.types._replace(weight=weight.dtype)

        def run(operands: CallOperands) -> list[Tensor]:
            made = self.call(op, types, operands, shards, group, depth, visitor)
            return made if visitor.writes else [made]

        run = within(settings(), run)  # later calls use the settings of this one
        if op.gathers_output or not _fits(extents, operands):
            return run
        epilogue = *bias_visitor(bias is not None, types.result, op), visitor
        majors = major(x, "m"), major(weight, "n")
        plan = plan_for(group, x.device, types, extents.shape, *majors, epilogue, depth)
        (written, result), columns, config = extents.made_by(plan), extents.out[1], plan.products[0].config
        size = (len(x) if visitor.of == "partial" else written), columns
        is_all, dtype = result == slice(0, written), sums_dtype(visitor.epilogue, types.result)
        layout, (step_a, step_b) = types.scales, plan.steps

        def run_as_planned(operands: CallOperands) -> list[Tensor]:
            x, weight, bias, scale_x, scale_w, inputs = operands
            addresses = x.data_ptr() | weight.data_ptr() | (0 if bias is None else bias.data_ptr())
            if addresses % ROW_BYTES or not plan.is_open:
                return run(operands)
            out = x.new_empty(written, columns, dtype=dtype)
            stored, outputs = written_by_kernel(visitor, config, plan.counts, x, *size)
            read = read_by_kernel(visitor, inputs, *size)
            extras = (*read, *stored) if bias is None else (bias, *read, *stored)
            if layout is not None:
                of_a = layout.of_a(scale_x, x.shape, step_a)
                extras = (of_a, layout.of_b(scale_w, weight.shape, step_b), *extras)
            plan.launch(x, (weight,), (out,), (extras or None,))
            made = visitor.in_order(out, outputs)
            return made if is_all else [one[result] for one in made]

        return run_as_planned

    def call(
        self,
        op: OpSpec,
        types: ProductTypes,
        operands: CallOperands,
        shards: Shards,
        group: Group,
        depth: int | None = None,
        visitor: Visitor | None = None,
    ) -> Any:
        """Runs an op whose result is sent on tensors of any strides. Collective.

        Each rank's partial sums are rounded once, to the slots' dtype, before they are summed over the ranks.

        Args:
            op: Definition of the op.
            types: Types of the product.
            operands: x `[rows, K]` and the local weight `[columns, K]`, without rows if this rank has no
                columns; bias of the local columns, or None. The epilogue's inputs are for this rank's result
                or for its partial sums (`Visitor.of`).
            shards: Division of the rows, or of the columns if the output is gathered.
            group: Ranks that take part, each of which must call.
            depth: K over all ranks; None if it is not agreed.
            visitor: Epilogue after the bias, or None.

        Returns:
            The result; if the epilogue has outputs, a list of the result and these.
        """
        x, weight, bias, scale_x, scale_w, inputs = operands
        extents = sizes(op, x, weight, shards, group)
        shape, _, (rows, columns) = extents
        dtype = types.result
        if shape.rows == 0 or columns == 0:
            of_result = result_dtype(visitor.epilogue if visitor else None, dtype)
            nothing = x.new_empty(rows, columns, dtype=of_result)
            if visitor is None or not visitor.writes:
                return nothing
            return [nothing, *written_without_kernel(visitor, nothing, dtype)]
        passed_weight = weight
        if weight.shape[0] == 0:  # only peers have columns: any matrix serves as B, unread
            weight, bias, scale_w, visitor = x.view(weight.dtype), None, scale_x, None
        a, b = aligned(x, extents.shard), aligned(weight)
        epilogue = bias_visitor(bias is not None, dtype, op)
        epilogue += (visitor,) if visitor is not None else ()
        with late_weights(b is not passed_weight):
            plan = plan_for(group, x.device, types, shape, major(a, "m"), major(b, "n"), epilogue, depth)
        written, result = extents.made_by(plan)
        out = x.new_empty(written, columns, dtype=sums_dtype(visitor.epilogue if visitor else None, dtype))
        extras: tuple[Tensor, ...] = ()
        if (layout := types.scales) is not None:
            step_a, step_b = plan.steps
            extras = layout.of_a(scale_x, x.shape, step_a), layout.of_b(scale_w, weight.shape, step_b)
        if bias is not None:
            extras += (aligned_vector(bias, len(bias)),)
        outputs: list[Tensor] = []
        if visitor is not None:
            config = plan.products[0].config
            if op.gathers_output:  # the kernel computes the local columns; every rank stores all columns
                inputs = slice_inputs(visitor, inputs, *shards.range(group.rank))
            width = columns if op.weight is None else len(weight)
            size = (len(x) if visitor.of == "partial" else written), width
            stored, outputs = written_by_kernel(visitor, config, plan.counts, x, *size)
            extras += (*read_by_kernel(visitor, inputs, *size), *stored)
        plan.launch(a, (b,), (out,), (extras or None,))
        if visitor is None or not outputs:
            return out[result]
        return [one[result] for one in visitor.in_order(out, outputs)]


def _fits(extents: Sizes, operands: CallOperands) -> bool:
    """Returns whether kernels can load these operands, if their addresses are multiples of 16 bytes."""
    x, weight, bias, *_ = operands
    if _is_empty(extents, weight):
        return False
    strided = has_tma_strides(x, extents.shard) and has_tma_strides(weight)
    return strided and (bias is None or bias.stride(0) == 1)


def _is_empty(extents: Sizes, weight: Tensor) -> bool:
    """Returns whether there is nothing to multiply here; without rows there are no shards either."""
    return not (extents.shape.rows and extents.out[1] and weight.shape[0])
