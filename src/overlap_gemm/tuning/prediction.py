"""What the model says of a call: the seconds of every way to carry it out, and their bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from ..config.gemm_config import GemmConfig
from ..spec import patterns_of
from .machine import Machine, machine_for
from .settings import Settings, settings
from .space import executed_as, expected
from .time_model import (
    Facts,
    FusedTime,
    by_shards_seconds,
    copies_seconds,
    link_seconds,
    product_seconds,
    transfer_seconds,
)

__all__ = ["Facts", "Prediction", "predict"]


@dataclass(frozen=True)
class Prediction:
    """The model's answer. Seconds throughout.

    Attributes:
        ways: Backend -> time of a call.
        product: The product alone, by cuBLAS.
        link: The op's bytes alone, at the link's full rate.
        bound: max(product, link): what no way can beat.
        op: The op of the fused kernel that is meant.
        config: That kernel; None where the op has none.
        fused: Where its time goes.
        machine: Whose constants these are.
    """

    ways: Mapping[str, float]
    product: float
    link: float
    bound: float
    op: str
    config: GemmConfig | None
    fused: FusedTime | None
    machine: Machine

    @property
    def best(self) -> str:
        """The backend of the least time."""
        return min(self.ways, key=self.ways.__getitem__)


def predict(facts: Facts, arch: str, sms: int, captured: bool) -> Prediction | None:
    """What the model says of a call, None where it knows no constants for `arch`. Cached and cheap.

    Args:
        facts: Of the call; the same on all ranks.
        arch: Target, e.g. ``"sm_90a"``.
        sms: SMs that every rank may use.
        captured: Whether the call is replayed from a CUDA graph: without the host's time.
    """
    machine = machine_for(arch)
    return None if machine is None else predict_on(facts, machine, arch, sms, captured)


def predict_on(facts: Facts, machine: Machine, arch: str, sms: int, captured: bool) -> Prediction:
    """`predict` with the constants of `machine`."""
    return _predict(facts, machine, arch, sms, captured, settings())


@lru_cache(maxsize=4096)
def _predict(facts: Facts, machine: Machine, arch: str, sms: int, captured: bool, _: Settings) -> Prediction:
    product, link = product_seconds(facts, machine, sms), link_seconds(facts, machine)
    torch, ordered = (transfer_seconds(facts, machine, in_rank_order) for in_rank_order in (False, True))
    kernel = executed_as(facts, machine, arch, sms)
    config, fused = expected(kernel, machine, arch, sms) if patterns_of(facts.op) else (None, None)
    times = {} if fused is None else {"fused": fused.total}
    times |= {"torch": product + torch, "sequential": product + ordered}
    host = {**machine.host, "fused": machine.host["fused"] + copies_seconds(facts, machine)}
    if not facts.spec.gathers_operand:
        times["decomposed"] = (facts.world - 1) * machine.step + max(product, ordered)
    elif facts.world <= machine.copies_world:
        times["decomposed"] = by_shards_seconds(facts, machine, sms)
        host["decomposed"] = facts.world * machine.shard_host
    if not captured:
        times = {name: max(seconds, host[name]) for name, seconds in times.items()}
    return Prediction(times, product, link, max(product, link), kernel.op, config, fused, machine)
