"""Settings of a caller for fused kernels: fields of the configuration, transports, reserved SMs, promises.

Settings belong to the thread that enters the block, and to the autograd threads of a backward pass that it
starts in the block. They are kept in torch's thread-local state, which `backward` passes to its threads. The
block around the call of the op or of `backward` is therefore decisive, also for recomputation in activation
checkpointing, and for compiled graphs.

Autograd's threads do not see a `ContextVar`. They would see a global variable, but so would other threads'
calls, at times that differ between ranks. All ranks must have the same settings.
"""

from __future__ import annotations

import ctypes
import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import torch

from ..config.gemm_config import CHOICES, FACTS, GemmConfig
from ..spec import OPS, TRANSPORTS, OpSpec, TransportSpec, patterns_of, transports_of
from ..spec.promises import InvarianceError, Invariant, Partials, Promises, check_promises

_KEY = "overlap_gemm.settings"

T = TypeVar("T")


Algorithm = Literal["one_shot", "two_shot"]
"""Exchange of a fused all-reduce (`exchange.all_reduce`)."""


class Settings(NamedTuple):
    """Settings of a block of `configured`. Hashable.

    Attributes:
        fields: (name, value) of fields of `GemmConfig`, in its order; the same on all ranks.
        reserve_sms: SMs that kernels leave free; None: ``OVERLAP_GEMM_RESERVE_SMS``. It may differ between
            ranks.
        algorithm: Algorithm of all-reduce; None: the model's choice. The same on all ranks.
        shard_transport: Transport of an operand's shards; None: chosen by size, among P2P-accessible peers.
            The same on all ranks.
        tile_transport: Transport of tiles; None: stores to P2P-accessible peers, as LL packets for few rows.
            The same on all ranks.
        early_weights: Whether kernels may read B before the preceding kernel has ended, if `fields` request
            it (`late_weights`). It may differ between ranks.
        promises: Promises about the bits of results, for calls that pass none (`promising`).
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
        """Returns whether kernels read B before the preceding kernel has ended."""
        return self.early_weights and ("launch", "dependent_weights") in self.fields

    def names_kernels(self, op: OpSpec) -> bool:
        """Returns whether the settings restrict an op's choice of kernels, which disables substitutions.

        It follows from `agreed`, so it is the same on all ranks.
        """
        kernel = any(f[0] not in ("launch", "leaves") and f not in PROMISED for f in self.fields)
        return kernel or bool(self._algorithm(op) or not op.operand_is_sent and self.transport_name(op))

    def agreed(self, op: OpSpec) -> tuple[tuple[str, Any], ...]:
        """Returns the facts on which all ranks must agree in a call of an op."""
        return (
            ("configured fields", self.fields),
            ("configured algorithm", self._algorithm(op)),
            ("configured transport", self.transport_name(op)),
        )

    def _algorithm(self, op: OpSpec) -> Algorithm | None:
        """Returns the configured algorithm of an op; None if there is none, or the op has no choice."""
        chooses = op.unsharded is not None or len(patterns_of(op.name)) > 1
        return self.algorithm if chooses else None

    def transport_of(self, op: OpSpec) -> TransportSpec | None:
        """Returns the configured transport of the data that an op sends, or None.

        Raises:
            ValueError: The op does not support the transport.
        """
        name = self.transport_name(op)
        if name is not None and name not in transports_of(op):
            ops = ", ".join(other for other, spec in OPS.items() if name in transports_of(spec))
            raise ValueError(
                f"transport={name!r} is for {ops}, not for {op.name}: use one of "
                f"{', '.join(transports_of(op)) or 'none'}"
            )
        return None if name is None else TRANSPORTS[name]

    def transport_name(self, op: OpSpec) -> str | None:
        """Returns the name of the configured transport of the data that an op sends, or None."""
        return self.shard_transport if op.operand_is_sent else self.tile_transport


PROMISED = (("k_split", 1), ("fast_accum", False), ("slot_dtype", "f32"))
"""Fields that `promised` sets, without ``leaves``. They do not restrict the choice of kernels."""

_FIELDS = tuple(field.name for field in dataclasses.fields(GemmConfig))

_DEFAULT = Settings()

OLD_NAMES = {"peer_words": "ll", "swapped": "swap_ab"}
"""Former names of values of `configured`; accepted with a warning for one version."""


def settings() -> Settings:
    """Returns the settings of the calling thread."""
    if torch._C._is_key_in_tls(_KEY):
        stored: Settings = torch._C._get_obj_in_tls(_KEY)
        return stored
    return _DEFAULT


def _store(new: Settings) -> None:
    """Stores settings as the calling thread's.

    torch 2.11 stores the object without incrementing its reference count, and decrements the count on
    release, so the object would be freed while in use. 2.13 increments it. An object that is already stored
    is not stored again, because its count would not show which version this is.
    """
    if torch._C._is_key_in_tls(_KEY) and torch._C._get_obj_in_tls(_KEY) is new:
        return
    before = sys.getrefcount(new)
    torch._C._stash_obj_in_tls(_KEY, new)
    if sys.getrefcount(new) == before:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(new))


def _merged(before: Settings, changed: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Returns `Settings.fields` with changed values; ranks may write the fields in different orders."""
    values = {**dict(before.fields), **changed}
    return tuple([(name, values[name]) for name in _FIELDS if name in values])


def within(new: Settings, run: Callable[..., T]) -> Callable[..., T]:
    """Returns `run` with these settings during its calls."""

    def run_within(*args: Any) -> T:
        before = settings()
        if before == new:
            return run(*args)
        _store(new)
        try:
            return run(*args)
        finally:
            _store(before)

    return run_within


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
    """Configures the fused backend's kernels within the block.

    Blocks may be nested: an argument that is None, or a field that is not passed, keeps the value of the
    enclosing block.

    Args:
        reserve_sms: SMs that kernels leave free, for NCCL on another stream or kernels of another pipeline
            stage. The choice of configuration does not depend on it, so ranks may differ.
        algorithm: Exchange of `gemm_all_reduce`, the same on every rank. ``"one_shot"``: every rank sends its
            partial sums to all. ``"two_shot"``: the owner of a tile sums it and sends the sum to all.
        transport: Sets both `shard_transport` and `tile_transport`, for a block whose ops all support it. An
            op that does not raises ValueError at the call, with the names that it supports.
        shard_transport: Transport of operands' shards, the same on every rank: ``"copy_engine"``,
            ``"peer_bulk"`` (warps of the kernel) or ``"nvshmem"``.
        tile_transport: Transport of the other ops' tiles, the same on every rank. ``"peer_bulk"``: stores
            followed by flags. ``"ll"``: packets that contain their flag; the default for few rows; ValueError
            at the call with 32-bit slots. ``"nvshmem"``: NVSHMEM puts to all peers, also to P2P-accessible
            ones, for tests since it is slower; RuntimeError at the call unless
            ``OVERLAP_GEMM_SYMMETRIC=nvshmem``.
        **fields: Fields of `GemmConfig` that are in `CHOICES`, the same on every rank. A combination without
            a kernel raises ValueError at the call.

    Raises:
        TypeError: A field does not exist or cannot be chosen, or its value is not hashable.
        ValueError: ``reserve_sms`` is not a number of SMs, or an algorithm or transport does not exist.
    """
    for name, value in fields.items():
        check_choice(name, value)
    check_reserve_sms(reserve_sms)
    transport, fields = _renamed(transport), {name: _renamed(value) for name, value in fields.items()}
    shards = tuple(name for name, known in TRANSPORTS.items() if known.shards)
    tiles = tuple(name for name, known in TRANSPORTS.items() if known.tiles)
    for name, value, known in (
        ("algorithm", algorithm, get_args(Algorithm)),
        ("transport", transport, tuple(TRANSPORTS)),
        ("shard_transport", shard_transport, shards),
        ("tile_transport", tile_transport, tiles),
    ):
        if value not in (None, *known):
            raise ValueError(f"configured: {name} must be one of {', '.join(known)}, got {value!r}")
    before = settings()
    reserve = before.reserve_sms if reserve_sms is None else reserve_sms
    transports = (
        shard_transport or transport or before.shard_transport,
        tile_transport or transport or before.tile_transport,
    )
    merged = _merged(before, fields)
    _store(Settings(merged, reserve, algorithm or before.algorithm, *transports, *before[-2:]))
    try:
        yield
    finally:
        _store(before)


@contextmanager
def promising(*, partials: Partials | None = None, invariant: Invariant | None = None) -> Iterator[None]:
    """Sets the promises of calls within the block that pass none.

    Blocks may be nested: None keeps the promise of the enclosing block.

    Gradients of these calls have the same promises, wherever `backward` is called. For compiled graphs, the
    block around their calls and around `backward` is decisive.

    Args:
        partials: Type of partial sums, as in `gemm_reduce_scatter`.
        invariant: Bitwise invariance, as in `gemm_reduce_scatter`.

    Raises:
        ValueError: There is no such promise.
    """
    before = settings()
    check_promises(promises := Promises(partials, invariant))
    _store(before._replace(promises=promises.over(before.promises)))
    try:
        yield
    finally:
        _store(before)


@contextmanager
def promised(promises: Promises, op: OpSpec, world: int) -> Iterator[None]:
    """Restricts the kernels of an op, within the block, to those that keep a call's promises.

    Kernels that split K sum it in a different order, and kernels with `fast_accum` do not promote the sums of
    8-bit products. For an op that sums over ranks, K is divided into equal parts (leaves) that do not depend
    on the number of ranks; the kernel sums this rank's leaves. An op that gathers has all of K on each rank,
    and sums it in one order.

    Args:
        promises: Promises of the call.
        op: Op of the kernels.
        world: Number of ranks.

    Raises:
        InvarianceError: The caller's fields require kernels that break a promise.
    """
    before = settings()
    fields: dict[str, Any] = {"k_split": 1, "fast_accum": False} if promises.leaves else {}
    if promises.has_wide_partials and op.sums:
        fields["slot_dtype"] = "f32"
    if promises.has_tree and op.sums:
        fields["leaves"] = promises.local_leaves(world)
    if promises.leaves:
        _check_promised(dict(before.fields), fields, promises)
    if fields:
        _store(before._replace(fields=_merged(before, fields)))
    try:
        yield
    finally:
        _store(before)


def _check_promised(chosen: dict[str, Any], fields: dict[str, Any], promises: Promises) -> None:
    """Raises an InvarianceError if `configured` requires kernels that break the promise."""
    wrong = {name: value for name, value in chosen.items() if name in fields and value != fields[name]}
    if "leaves" in fields and chosen.get("mma") == "swap_ab":
        wrong["mma"] = "swap_ab"
    for name, value in wrong.items():
        rule = f"{name}={fields[name]}" if name in fields else "kernels with float32 partial sums"
        raise InvarianceError(
            f"configured({name}={value}) breaks invariant={promises.invariant!r}: it changes the order of "
            f"sums over K, or where they are rounded; use {rule}"
        )


@contextmanager
def late_weights(late: bool = True) -> Iterator[None]:
    """Disables early reads of B within the block, if `late`: kernels wait for the preceding kernel's end.

    The preceding kernel may write B if B is a copy that the call makes.
    """
    before = settings()
    if not (late and before.reads_weights_early):
        yield
        return
    _store(before._replace(early_weights=False))
    try:
        yield
    finally:
        _store(before)


def _renamed(value: Any) -> Any:
    """Returns the value under its current name."""
    if not isinstance(value, str) or value not in OLD_NAMES:
        return value
    warnings.warn(
        f"configured: {value!r} has been renamed to {OLD_NAMES[value]!r}", FutureWarning, stacklevel=4
    )
    return OLD_NAMES[value]


def check_choice(name: str, value: Any = None) -> None:
    """Raises a TypeError unless ``name`` is a field that callers choose, and its value is hashable."""
    if name not in CHOICES:
        rule = "it depends on the device and the operands of each call"
        why = rule if name in FACTS else "there is no such field"
        raise TypeError(f"configured: {name} cannot be chosen: {why}; use one of {', '.join(CHOICES)}")
    try:
        hash(value)
    except TypeError as error:
        raise TypeError(f"configured: {name}={value!r} must be hashable: pass tuples, not lists") from error


def check_reserve_sms(value: int | None) -> None:
    """Raises a ValueError unless ``value`` is a number of SMs or None."""
    if value is not None and (not isinstance(value, int) or value < 0):
        raise ValueError(f"reserve_sms={value!r} must be a number of SMs, 0 or more")
