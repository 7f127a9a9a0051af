"""Predictions of the time model: seconds of a call by each backend, and a lower bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from ..config.gemm_config import DTYPE_BYTES, GemmConfig
from ..spec import OpSpec, patterns_of
from ..spec.promises import NO_PROMISES, Promises
from .machine import Machine, machine_for
from .settings import Settings, promised, settings
from .space import expected, lower_small_rs_to_ar
from .time_model import (
    Facts,
    FusedTime,
    copies_seconds,
    link_seconds,
    product_seconds,
    transfer_seconds,
)

__all__ = ["Facts", "Prediction", "predict"]

FURTHER_PRODUCT = 6
"""Time of each further product of a list by cuBLAS, in launches: small products do not fill the GPU.

On an H200 9 us: 2 to 8 were measured, and with 9 the choice loses least (`h200x2-list-choices.json`).
"""


@dataclass(frozen=True)
class Prediction:
    """Prediction of the model for a call. All times are in seconds.

    Attributes:
        seconds: Time of a call, by backend.
        product: Time of the product alone, by cuBLAS.
        link: Time of the op's bytes alone, at the link's full rate.
        bound: max(product, link), a lower bound for all backends.
        op: Op whose fused kernel would run (a small reduce-scatter may run as an all-reduce).
        config: Configuration of that kernel (the first of several); None if the op has no fused kernel.
        fused: Parts of that kernel's time.
        machine: Constants of the prediction.
    """

    seconds: Mapping[str, float]
    product: float
    link: float
    bound: float
    op: str
    config: GemmConfig | None
    fused: FusedTime | None
    machine: Machine

    @property
    def best(self) -> str:
        """Returns the backend with the shortest time."""
        return min(self.seconds, key=self.seconds.__getitem__)


def predict(
    facts: Facts, arch: str, sms: int, captured: bool, promises: Promises = NO_PROMISES
) -> Prediction | None:
    """Returns the prediction for a call, or None if there are no constants for `arch`. Cached.

    Args:
        facts: Facts of the call, the same on all ranks.
        arch: Target architecture, for example ``"sm_90a"``.
        sms: Number of SMs that every rank may use.
        captured: True if the call is replayed from a CUDA graph, without host time.
        promises: Promises that the fused kernel keeps; other backends' times are those without.
    """
    machine = machine_for(arch)
    return None if machine is None else predict_on(facts, machine, arch, sms, captured, promises)


def predict_on(
    facts: Facts,
    machine: Machine,
    arch: str,
    sms: int,
    captured: bool,
    promises: Promises = NO_PROMISES,
) -> Prediction:
    """Returns `predict` with the constants of `machine`."""
    if promises.has_tree and facts.spec.sums and DTYPE_BYTES[facts.dtype] == 1 and facts.blocks is None:
        promises = NO_PROMISES  # there is no such kernel
    with promised(promises, facts.spec, facts.world):
        return _predict(facts, machine, arch, sms, captured, settings())


def launches_of(facts: Facts) -> list[Facts]:
    """Returns the facts of each kernel that a fused call launches, in order."""
    return [replace(facts, n=n, launches=()) for n in facts.launches] or [facts]


def after_first(time: FusedTime, spec: OpSpec) -> float:
    """Returns the seconds of a further kernel of a list: if x is sent, it has arrived by then."""
    return replace(time, link=0.0, tail=0.0, receive=0.0).total if spec.operand_is_sent else time.total


def joining_seconds(facts: Facts, machine: Machine) -> float:
    """Returns the time in which other backends than "fused" copy a list along K side by side, to sum it."""
    if facts.parts == 1 or not facts.spec.sums:
        return 0.0
    m, n, k = facts.local
    return 2 * (machine.launch + (m + n) * k * DTYPE_BYTES[facts.dtype] / machine.memory_rate)


def list_seconds(facts: Facts, machine: Machine, sms: int) -> float:
    """Returns the time of a rank's product by cuBLAS, each weight of a list by itself."""
    further = (facts.products - 1) * FURTHER_PRODUCT * machine.launch
    return product_seconds(facts, machine, sms) + further


def by_shards_seconds(facts: Facts, machine: Machine, sms: int) -> float:
    """Returns the time of an all-gather GEMM by copies, and a gate and a cuBLAS product per shard.

    See `backends.by_shards`.
    """
    shard = facts.full_shard
    _, _, k = facts.extents
    product = list_seconds(replace(facts, m=shard), machine, sms)
    copy, done = shard * k * DTYPE_BYTES[facts.dtype] / machine.copy_rate, product
    for number in range(1, facts.world):
        done = max(done, number * copy + machine.copy_start) + machine.gate + product
    return done + machine.gate


@lru_cache(maxsize=4096)
def _predict(facts: Facts, machine: Machine, arch: str, sms: int, captured: bool, _: Settings) -> Prediction:
    """Returns the prediction; cached, with the settings as part of the key."""
    product, link = product_seconds(facts, machine, sms), link_seconds(facts, machine)
    torch, ordered = (transfer_seconds(facts, machine, in_rank_order) for in_rank_order in (False, True))
    kernel = lower_small_rs_to_ar(facts, machine, arch, sms)
    config, fused, times, calls = None, None, {}, 1
    if patterns_of(facts.op):
        launches = [expected(one, machine, arch, sms) for one in launches_of(kernel)]
        config, fused = launches[0]
        times["fused"] = fused.total + sum(after_first(time, facts.spec) for _, time in launches[1:])
        calls = 1 if facts.spec.operand_is_sent else len(launches)
    joining, each = joining_seconds(facts, machine), list_seconds(facts, machine, sms)
    times |= {"torch": joining + each + torch, "sequential": joining + each + ordered}
    host = {**machine.host, "fused": calls * machine.host["fused"] + copies_seconds(facts, machine)}
    if not facts.spec.gathers_operand:
        times["decomposed"] = joining + (facts.world - 1) * machine.step + max(each, ordered)
    elif facts.world <= machine.copies_world:
        times["decomposed"] = by_shards_seconds(facts, machine, sms)
        host["decomposed"] = facts.world * machine.shard_host
    if not captured:
        times = {name: max(seconds, host[name]) for name, seconds in times.items()}
    return Prediction(times, product, link, max(product, link), kernel.op, config, fused, machine)
