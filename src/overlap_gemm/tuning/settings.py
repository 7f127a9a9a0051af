"""What the caller asks of the fused backend: fields of the configuration, SMs left to others.

Settings belong to the thread that enters the block, and to the threads in which autograd runs a backward
pass that it starts there: they are kept in torch's thread-local state, which `backward` hands to its
threads. So what counts is the block around the call of the op or of `backward`, also for what activation
checkpointing recomputes, and for compiled graphs. A `ContextVar` does not reach those threads; settings of
the process would reach them, and calls of other threads as well, at a moment that differs from rank to
rank, where all ranks must have the same.
"""

from __future__ import annotations

import ctypes
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import torch

from ..config.gemm_config import CHOICES, FACTS
from ..spec import OPS, TRANSPORTS, OpSpec, TransportSpec, patterns_of, transports_of
from ..spec.promises import InvarianceError, Invariant, Partials, Promises, check_promises

_KEY = "overlap_gemm.settings"

T = TypeVar("T")


Algorithm = Literal["one_shot", "two_shot"]
"""How a fused all-reduce exchanges tiles; see `exchange.all_reduce`."""


class Settings(NamedTuple):
    """What a block of `configured` asks for; hashable.

    Attributes:
        fields: (name, value) of `GemmConfig`'s fields; the same on all ranks.
        reserve_sms: SMs that kernels leave to others; None: what ``OVERLAP_GEMM_RESERVE_SMS`` says. It may
            differ between ranks.
        algorithm: which all-reduce; None: the model's choice. The same on all ranks.
        shard_transport: how the shards of an operand travel; None: to whom stores reach, as their size says.
            The same on all ranks.
        tile_transport: how tiles travel; None: by stores to whom they reach, few rows as words that are their
            own flag. The same on all ranks.
        early_weights: whether kernels may read B before the kernel in front has ended, where `fields` ask for
            it (`late_weights`). It may differ between ranks.
        promises: of the bits of results, of calls that say nothing else (`promising`).
    """

    fields: tuple[tuple[str, Any], ...] = ()
    reserve_sms: int | None = None
    algorithm: Algorithm | None = None
    shard_transport: str | None = None
    tile_transport: str | None = None
    early_weights: bool = True
    promises: Promises = Promises()

    @property
    def reads_weights_early(self) -> bool:
        """Whether kernels read B before the kernel in front has ended."""
        return self.early_weights and ("launch", "dependent_weights") in self.fields

    @property
    def names_kernels(self) -> bool:
        """Whether the caller says anything of which kernels there shall be, so that nothing else may."""
        kernel = any(f[0] not in ("launch", "leaves") and f not in PROMISED for f in self.fields)
        return bool(kernel or self.algorithm or self.tile_transport)

    def agreed(self, op: OpSpec) -> tuple[tuple[str, Any], ...]:
        """What ranks must have the same of, in a call of an op: all that is not a rank's own."""
        chooses = op.whole is not None or len(patterns_of(op.name)) > 1
        return (
            ("configured fields", self.fields),
            ("configured algorithm", self.algorithm if chooses else None),
            ("configured transport", self._asked(op)),
        )

    def transport_of(self, op: OpSpec) -> TransportSpec | None:
        """How what an op sends shall travel.

        Raises:
            ValueError: It has no such transport.
        """
        asked = self._asked(op)
        if asked is not None and not TRANSPORTS[asked].carries(op):
            those = ", ".join(name for name, other in OPS.items() if TRANSPORTS[asked].carries(other))
            raise ValueError(
                f"transport={asked!r} is for {those}, not for {op.name}, which has "
                f"{', '.join(transports_of(op))}"
            )
        return None if asked is None else TRANSPORTS[asked]

    def _asked(self, op: OpSpec) -> str | None:
        return self.shard_transport if op.gathers_operand else self.tile_transport


PROMISED = (("k_split", 1), ("slot_dtype", "f32"))
"""Fields that `promised` sets, but for ``leaves``. Like when a kernel begins, they name no kernel."""

_DEFAULT = Settings()

OLD_NAMES = {"peer_words": "ll", "swapped": "swap_ab"}
"""What values of `configured` were called; taken with a warning, for one version."""


def settings() -> Settings:
    """Those of the calling thread."""
    if torch._C._is_key_in_tls(_KEY):
        found: Settings = torch._C._get_obj_in_tls(_KEY)
        return found
    return _DEFAULT


def _keep(asked: Settings) -> None:
    """Makes them the calling thread's.

    torch 2.11 keeps the object without counting its reference, and counts one less when it lets go: the
    object would be freed in use. 2.13 counts. One that is kept already stays: its count would not tell.
    """
    if torch._C._is_key_in_tls(_KEY) and torch._C._get_obj_in_tls(_KEY) is asked:
        return
    before = sys.getrefcount(asked)
    torch._C._stash_obj_in_tls(_KEY, asked)
    if sys.getrefcount(asked) == before:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(asked))


def within(asked: Settings, run: Callable[..., T]) -> Callable[..., T]:
    """Returns `run`, with these settings during its calls."""

    def settled(*given: Any) -> T:
        before = settings()
        if before == asked:
            return run(*given)
        _keep(asked)
        try:
            return run(*given)
        finally:
            _keep(before)

    return settled


@contextmanager
def configured(
    *,
    reserve_sms: int | None = None,
    algorithm: Algorithm | None = None,
    transport: str | None = None,
    shard_transport: str | None = None,
    tile_transport: str | None = None,
    **fields: Any,
) -> Iterator[None]:
    """Within the block, the fused backend's kernels are as asked. Blocks may be nested.

    Args:
        reserve_sms: SMs that their grids leave to others: to NCCL on another stream, to another pipeline
            stage's kernels. The choice of configuration does not look at it, so ranks may differ.
        algorithm: how `gemm_all_reduce` exchanges: ``"one_shot"``, every rank sends everything to all, or
            ``"two_shot"``, the sums of the owners of columns go on to all. The same on every rank.
        transport: `shard_transport` and `tile_transport` in one: for a block whose ops all have it. An op
            that has it not raises ValueError at the call, and names those that it has.
        shard_transport: how `all_gather_gemm` sends shards, the same on every rank: ``"copy_engine"``,
            ``"peer_bulk"``, by warps of the kernel, or ``"nvshmem"``.
        tile_transport: how the other ops send tiles, the same on every rank: ``"peer_bulk"``, with flags
            after them; ``"ll"``, as words that are their own flag, which kernels for few rows do by
            themselves (and which 32-bit slots cannot: ValueError at the call); or ``"nvshmem"``. By that
            what goes to peers is put to them by NVSHMEM, also to those within reach of stores, which is
            slower and there to be tested; the memory must be NVSHMEM's
            (``OVERLAP_GEMM_SYMMETRIC=nvshmem``), else the call raises RuntimeError.
        **fields: of `GemmConfig`, those in `CHOICES`. Every rank must use the same ones; combinations no
            kernel exists for raise ValueError at the call.

    Raises:
        TypeError: there is no such field, or it is no choice.
        ValueError: ``reserve_sms`` is no number of SMs, or there is no such algorithm or transport.
    """
    for name in fields:
        check_choice(name)
    check_reserve_sms(reserve_sms)
    transport, fields = _renamed(transport), {name: _renamed(value) for name, value in fields.items()}
    shards = tuple(name for name, known in TRANSPORTS.items() if known.shards)
    tiles = tuple(name for name, known in TRANSPORTS.items() if known.tiles)
    for name, given, known in (
        ("algorithm", algorithm, get_args(Algorithm)),
        ("transport", transport, tuple(TRANSPORTS)),
        ("shard_transport", shard_transport, shards),
        ("tile_transport", tile_transport, tiles),
    ):
        if given not in (None, *known):
            raise ValueError(f"{name}={given!r} must be one of {', '.join(known)}")
    before = settings()
    reserve = before.reserve_sms if reserve_sms is None else reserve_sms
    asked = tuple({**dict(before.fields), **fields}.items())
    by = (
        shard_transport or transport or before.shard_transport,
        tile_transport or transport or before.tile_transport,
    )
    _keep(Settings(asked, reserve, algorithm or before.algorithm, *by, *before[-2:]))
    try:
        yield
    finally:
        _keep(before)


@contextmanager
def promising(*, partials: Partials | None = None, invariant: Invariant | None = None) -> Iterator[None]:
    """Within the block calls promise this, where their own arguments say nothing else. Blocks may be nested.

    The gradients of calls in the block keep it wherever `backward` is called. Of compiled graphs what counts
    is the block around their calls, and around `backward`.

    Args:
        partials: As for `gemm_reduce_scatter`.
        invariant: As for `gemm_reduce_scatter`.

    Raises:
        ValueError: There is no such promise.
    """
    before = settings()
    check_promises(given := Promises(partials, invariant))
    _keep(before._replace(promises=given.over(before.promises)))
    try:
        yield
    finally:
        _keep(before)


@contextmanager
def promised(promises: Promises, op: OpSpec, world: int) -> Iterator[None]:
    """Within the block kernels of an op are those that keep what a call promises.

    Of kernels, those that cut K sum it in another order. Those of an op that sums over ranks have a rank's
    leaves of K; an op that gathers has all of K on each rank, in one order.

    Args:
        promises: of the call.
        op: whose kernels.
        world: ranks.

    Raises:
        InvarianceError: the caller's fields ask for other kernels.
    """
    before = settings()
    fields: dict[str, Any] = {"k_split": 1} if promises.leaves else {}
    if promises.has_wide_partials and op.sums:
        fields["slot_dtype"] = "f32"
    if promises.has_tree and op.sums:
        fields["leaves"] = promises.own_leaves(world)
    if promises.leaves:
        _check_promised(dict(before.fields), fields, promises)
    if fields:
        _keep(before._replace(fields=tuple({**dict(before.fields), **fields}.items())))
    try:
        yield
    finally:
        _keep(before)


def _check_promised(chosen: dict[str, Any], fields: dict[str, Any], promises: Promises) -> None:
    """Raises an InvarianceError where `configured` asks for what the promise rules out."""
    wanted = {name: value for name, value in chosen.items() if name in fields and value != fields[name]}
    if "leaves" in fields and chosen.get("mma") == "swap_ab":
        wanted["mma"] = "swap_ab"
    for name, value in wanted.items():
        rule = f"{name}={fields[name]}" if name in fields else "kernels with float32 partial sums"
        raise InvarianceError(
            f"configured({name}={value}) sums K otherwise than invariant={promises.invariant!r} "
            f"promises: {rule}"
        )


@contextmanager
def late_weights(late: bool = True) -> Iterator[None]:
    """Within the block no kernel reads B before the kernel in front has ended, if `late`.

    That kernel may write B where B is a copy that the call itself makes.
    """
    before = settings()
    if not (late and before.reads_weights_early):
        yield
        return
    _keep(before._replace(early_weights=False))
    try:
        yield
    finally:
        _keep(before)


def _renamed(value: Any) -> Any:
    """The value by its present name."""
    if not isinstance(value, str) or value not in OLD_NAMES:
        return value
    warnings.warn(f"{value!r} is {OLD_NAMES[value]!r} now", FutureWarning, stacklevel=4)
    return OLD_NAMES[value]


def check_choice(name: str) -> None:
    """Raises a TypeError unless ``name`` is a field of `GemmConfig` that callers choose."""
    if name not in CHOICES:
        rule = "it follows from the device and the operands of each call"
        why = rule if name in FACTS else "no such field"
        raise TypeError(f"configured: {name} cannot be chosen: {why}; can be chosen: {', '.join(CHOICES)}")


def check_reserve_sms(given: int | None) -> None:
    """Raises a ValueError unless ``given`` is a number of SMs, or None."""
    if given is not None and (not isinstance(given, int) or given < 0):
        raise ValueError(f"reserve_sms={given!r} must be a number of SMs, 0 or more")
