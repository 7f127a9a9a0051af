"""What it takes to be an op of ``torch.ops.overlap_gemm``, and to be called past torch's dispatcher.

An op is its `bind`: what there is to do for tensors of one layout, given all arguments. torch's dispatcher
binds and runs. A plain call, where nobody but autograd looks (`calls.is_plain`), binds once and runs often,
through `Bound.with_gradient` where a gradient is wanted: `Registered.__call__`, and `functional`, which also
keeps what it checked.
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..runtime.group import Group, resolve
from .calls import enter, is_plain, keep, layouts, needs_grad, state

Run = Callable[..., Any]
"""An op's tensors -> its result."""

_library = torch.library.Library("overlap_gemm", "DEF")


class Registered:
    """An op of ``torch.ops.overlap_gemm``, whose first arguments are its tensors (or lists of some).

    Not `torch.library.custom_op`, whose wrappers take a quarter of the host time of a call.

    Args:
        schema: As torch writes it.
        bind: All arguments -> what computes the result from tensors of these layouts.
        fake: What the op returns, in shape and dtype.
        backward: `(ctx, given, needs, gradients)` -> the gradients of the first tensors, as many as have
            some. `given` are the arguments after the tensors, by their names; `needs` says which gradients
            are wanted; `ctx.shape` is the first tensor's.
        saves: How many of the first tensors backward needs: `ctx.saved_tensors`.
        named: Names the arguments after the tensors; None: the schema.
    """

    def __init__(
        self,
        schema: str,
        bind: Callable[..., Run],
        fake: Callable[..., Any],
        backward: Callable[..., tuple[Any, ...]],
        saves: int = 0,
        named: Any = None,
    ) -> None:
        self.name = schema.partition("(")[0]
        self.fake = fake
        self.bind, self.backward, self.saves = bind, backward, saves
        parameters = schema.partition("(")[2].partition(") ->")[0].split(", ")
        names = [parameter.split()[-1] for parameter in parameters if "Tensor" not in parameter]
        self.tensors = tensors = len(parameters) - len(names)
        self._group = names.index("group")
        self._named = named or namedtuple("Named", names)  # type: ignore[misc]

        def run(*arguments: Any) -> Any:
            operands, rest = arguments[:tensors], arguments[tensors:]
            if torch.compiler.is_dynamo_compiling():  # which cannot trace what tells threads apart
                return self._run(operands, rest)
            return enter(self._ranks(rest), self.name, operands[0], self._run, operands, rest)

        def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            self.keep(ctx, inputs[:tensors], inputs[tensors:], output)

        def gradients(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            found = self.gradients(ctx, ctx.needs_input_grad[:tensors], *grads)
            return *found, *[None] * (len(parameters) - len(found))

        name = f"overlap_gemm::{self.name}"
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(self.name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(name, fake, lib=_library)
        torch.library.register_autograd(name, gradients, setup_context=setup, lib=_library)

    def keep(self, ctx: Any, tensors: Sequence[Any], arguments: tuple[Any, ...], output: Any) -> None:
        """Keeps in `ctx` what `gradients` needs."""
        ctx.rest, ctx.shape = arguments, tensors[0].shape
        if self.saves:
            ctx.save_for_backward(*tensors[: self.saves])

    def gradients(self, ctx: Any, needs: Any, *grads: Any) -> tuple[Any, ...]:
        """Those of the tensors; see `backward`."""
        return self.backward(ctx, self._named(*ctx.rest), needs, *grads)

    def __call__(self, *given: Any) -> Any:
        """Calls the op with tensors and arguments, without torch's dispatcher where only autograd looks.

        Gradients call ops by this: in eager mode the dispatcher takes more host time than the call.
        """
        tensors, arguments = given[: self.tensors], given[self.tensors :]
        if not is_plain(tensors[0], *tensors):
            return getattr(torch.ops.overlap_gemm, self.name)(*given)
        run = self._run_with_gradient if needs_grad(*tensors) else self._run
        return enter(self._ranks(arguments), self.name, tensors[0], run, tensors, arguments)

    def _ranks(self, arguments: Sequence[Any]) -> Group:
        return resolve(arguments[self._group])

    def _run(self, tensors: tuple[Any, ...], arguments: tuple[Any, ...]) -> Any:
        return self.bound(tensors, arguments).run(*tensors)

    def _run_with_gradient(self, tensors: tuple[Any, ...], arguments: tuple[Any, ...]) -> Any:
        return self.bound(tensors, arguments).with_gradient(*tensors)

    def bound(self, tensors: tuple[Any, ...], arguments: tuple[Any, ...]) -> "Bound":
        """What `bind` made of arguments like these before, or makes of them now."""
        ranks = self._ranks(arguments)
        key = (self.name, layouts(*tensors), arguments, state(tensors[0]))
        if (bound := ranks.calls.get(key)) is None:
            counts = tuple([len(given) if isinstance(given, (list, tuple)) else None for given in tensors])
            lists = any(count is not None for count in counts)
            bound = keep(ranks, key, Bound(self, self.bind(*tensors, *arguments), arguments, lists, counts))
        return bound


class Bound(NamedTuple):
    """An op, bound to all that calls of one kind share.

    Attributes:
        op: It.
        bare: What `Registered.bind` made.
        arguments: Those after the tensors.
        lists: Whether tensors come, and go, in lists.
        counts: For each tensor argument how many tensors it lists, None where it is one.
    """

    op: Registered
    bare: Run
    arguments: tuple[Any, ...]
    lists: bool
    counts: tuple[int | None, ...]

    def run(self, *tensors: Any) -> Any:
        """The result, a tensor or a list of some, none of which is a view for autograd.

        Backends may return a part of a larger buffer; which do, depends on the rank where shards are uneven.
        Autograd would refuse to let it be written to in place, and so on that rank alone.
        """
        result = self.bare(*tensors)
        if not isinstance(result, list):
            return result.data if result._is_view() else result
        for i, part in enumerate(result):
            if part._is_view():
                result[i] = part.data
        return result

    def with_gradient(self, *tensors: Any) -> Any:
        """`run(*tensors)` as a node of autograd's graph, at a third of torch.library's host time."""
        if not self.lists:
            return _Eager.apply(self, *tensors)
        flat: list[Any] = []
        for given in tensors:
            flat += given if isinstance(given, list) else [given]
        return list(_Eager.apply(self, *flat))

    def grouped(self, flat: Sequence[Any]) -> Sequence[Any]:
        """One value per tensor argument, a list of them for a list of tensors."""
        if not self.lists:
            return flat
        left = iter(flat)
        return [next(left) if n is None else [next(left) for _ in range(n)] for n in self.counts]


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bound: Bound, *flat: Any) -> Any:
        tensors = bound.grouped(flat)
        result = bound.run(*tensors)
        bound.op.keep(ctx, tensors, bound.arguments, result)
        ctx.bound = bound
        return tuple(result) if bound.lists else result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        bound: Bound = ctx.bound
        needs = bound.grouped(ctx.needs_input_grad[1:])
        found = bound.op.gradients(ctx, needs, *([list(grads)] if bound.lists else grads))
        flat: list[Any] = [None]
        for grad in found:
            flat += grad if isinstance(grad, list) else [grad]
        return tuple(flat)
