"""`Registered`: an op of ``torch.ops.overlap_gemm`` that can also be called without torch's dispatcher.

An op is defined by `bind`, a function from all arguments to a function of tensors with these layouts. The
bound function is cached by the group, so that it is made once for each signature.

A plain call, which only autograd observes (`calls.is_plain`), does not use torch's dispatcher. It runs
`Bound.run`, or `Bound.with_gradient` if a gradient is needed. `Registered.__call__` and `bound.call_op` make
plain calls; `call_op` also caches the checked arguments.
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..runtime.group import Group, resolve
from .calls import enter, is_plain, keep, layouts, needs_grad, state

Run = Callable[..., Any]
"""Function from an op's tensors to its result."""

_library = torch.library.Library("overlap_gemm", "DEF")


class Registered:
    """An op of ``torch.ops.overlap_gemm``, whose first arguments are its tensors (or lists of tensors).

    The constructor registers the op with `torch.library.Library`. `torch.library.custom_op` is not used: its
    wrappers take a quarter of the host time of a call.

    Args:
        schema: Schema in torch's syntax.
        bind: Function from all arguments to a function, which maps tensors of these layouts to the result.
        fake: Function from all arguments to an empty result of the right shape and dtype.
        backward: Function `(ctx, arguments, needs, gradients)` that returns the gradients of the tensors, in
            order; trailing tensors without a gradient may be left out. `arguments` is a named tuple of the
            arguments after the tensors. `needs` has a flag for each tensor. `ctx.shape` is the shape of the
            first tensor.
        saves: Number of tensors, from the first one on, that `backward` reads as `ctx.saved_tensors`.
        named: NamedTuple class of the arguments after the tensors; None: made from the schema.
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
            if torch.compiler.is_dynamo_compiling():  # Dynamo cannot trace `enter`'s check of the thread
                return self.dispatched(operands, rest)
            return enter(self._ranks(rest), self.name, operands[0], self.dispatched, operands, rest)

        def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            self.keep(ctx, inputs[:tensors], self._named(*inputs[tensors:]), output)

        def gradients(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            grads_of_tensors = self.gradients(ctx, ctx.needs_input_grad[:tensors], *grads)
            return *grads_of_tensors, *[None] * (len(parameters) - len(grads_of_tensors))

        name = f"overlap_gemm::{self.name}"
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(self.name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(name, fake, lib=_library)
        torch.library.register_autograd(name, gradients, setup_context=setup, lib=_library)

    def keep(self, ctx: Any, tensors: Sequence[Any], arguments: Any, output: Any) -> None:
        """Saves in autograd's `ctx` the values that `gradients` reads.

        Args:
            ctx: Context of autograd.
            tensors: Tensors of the call.
            arguments: Arguments after the tensors, a named tuple.
            output: Result of the call.
        """
        ctx.rest, ctx.shape = arguments, tensors[0].shape
        if self.saves:
            ctx.save_for_backward(*tensors[: self.saves])

    def gradients(self, ctx: Any, needs: Any, *grads: Any) -> tuple[Any, ...]:
        """Returns the gradients of the tensors, computed by `backward`.

        Args:
            ctx: Context of autograd, filled by `keep`.
            needs: Flag for each tensor (a list of flags for a list of tensors): whether it needs a gradient.
            *grads: Gradient of the result; a list if the result is one.
        """
        return self.backward(ctx, ctx.rest, needs, *grads)

    def __call__(self, *arguments_of: Any) -> Any:
        """Returns `call` of the op's tensors and the arguments after them."""
        return self.call(arguments_of[: self.tensors], arguments_of[self.tensors :])

    def call(self, tensors: tuple[Any, ...], arguments: tuple[Any, ...]) -> Any:
        """Calls the op; a plain call does not use torch's dispatcher.

        Backward passes call ops this way: in eager mode the dispatcher takes more host time than the call.

        Args:
            tensors: Tensors and lists of tensors; trailing ones that are None may be omitted.
            arguments: Arguments after the tensors.
        """
        if not is_plain(*tensors):
            return self.by_dispatcher(tensors, arguments)
        run = self._run_with_gradient if needs_grad(*tensors) else self._run
        return enter(self._ranks(arguments), self.name, tensors[0], run, tensors, arguments)

    def by_dispatcher(self, tensors: tuple[Any, ...], arguments: tuple[Any, ...]) -> Any:
        """Calls the op by torch's dispatcher; arguments as in `call`."""
        omitted = [None] * (self.tensors - len(tensors))
        return getattr(torch.ops.overlap_gemm, self.name)(*tensors, *omitted, *arguments)

    def dispatched(self, tensors: tuple[Any, ...], arguments: tuple[Any, ...]) -> Any:
        """Returns the result of a call by torch's dispatcher, as the schema declares it."""
        return self.bound(tensors, arguments).run(*tensors)

    def _ranks(self, arguments: Sequence[Any]) -> Group:
        return resolve(arguments[self._group])

    def _run(self, tensors: tuple[Any, ...], arguments: tuple[Any, ...]) -> Any:
        return self.bound(tensors, arguments).run(*tensors)

    def _run_with_gradient(self, tensors: tuple[Any, ...], arguments: tuple[Any, ...]) -> Any:
        return self.bound(tensors, arguments).with_gradient(*tensors)

    def bound(self, tensors: tuple[Any, ...], arguments: tuple[Any, ...]) -> "Bound":
        """Returns the op bound to the signature of these arguments: from the group's cache, else by `bind`.

        Args:
            tensors: Tensors and lists of tensors.
            arguments: Arguments after the tensors, one of which is the group's name.
        """
        ranks = self._ranks(arguments)
        key = (self.name, layouts(*tensors), arguments, state(tensors[0]))
        if (bound := ranks.calls.get(key)) is None:
            counts = tuple([len(tensor) if isinstance(tensor, (list, tuple)) else None for tensor in tensors])
            lists = any(count is not None for count in counts)
            run, named = self.bind(*tensors, *arguments), self._named(*arguments)
            bound = keep(ranks, key, Bound(self, run, named, lists, counts))
        return bound


class Bound(NamedTuple):
    """An op bound to one signature; a call is `run(*tensors)` or `with_gradient(*tensors)`.

    Attributes:
        op: Op that is bound.
        bare: Function from tensors to the result, returned by `Registered.bind`.
        arguments: Arguments after the tensors, a named tuple.
        lists: Whether some tensors are passed in lists; the result then is a list, too.
        counts: Number of tensors of each list argument; None for a single tensor.
    """

    op: Registered
    bare: Run
    arguments: tuple[Any, ...]
    lists: bool
    counts: tuple[int | None, ...]

    def run(self, *tensors: Any) -> Any:
        """Returns the result, a tensor or a list of tensors and None, without recording a gradient.

        A backend may return a part of a larger buffer. This method returns an alias that autograd does not
        treat as a view, so a caller may write to the result in place. With uneven shards only some ranks get
        a part: without the alias autograd would raise on these alone.
        """
        result = self.bare(*tensors)
        if not isinstance(result, list):
            return result.data if result._is_view() else result
        for i, part in enumerate(result):
            if part is not None and part._is_view():
                result[i] = part.data
        return result

    def with_gradient(self, *tensors: Any) -> Any:
        """Returns `run(*tensors)`, recorded by autograd; takes a third of torch.library's host time."""
        if not self.lists:
            return _Eager.apply(self, *tensors)
        flat: list[Any] = []
        for tensor in tensors:
            flat += tensor if isinstance(tensor, list) else [tensor]
        return list(_Eager.apply(self, *flat))

    def grouped(self, flat: Sequence[Any]) -> Sequence[Any]:
        """Returns the values grouped by argument: a list of values for each list of tensors.

        Args:
            flat: One value for each tensor, those of lists included.
        """
        if not self.lists:
            return flat
        left = iter(flat)
        return [next(left) if n is None else [next(left) for _ in range(n)] for n in self.counts]


class _Eager(torch.autograd.Function):
    """Autograd of a bound eager call, without the dispatcher."""

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
        gradients = bound.op.gradients(ctx, needs, *([list(grads)] if bound.lists else grads))
        flat: list[Any] = [None]
        for grad in gradients:
            flat += grad if isinstance(grad, list) else [grad]
        return tuple(flat)
