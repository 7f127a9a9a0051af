"""Calibration: the constants of a machine from a few measurements, by the model's formulas.

A `Probe` measures (`overlap-gemm tune` has one for GPUs); this module only computes. A probe that returns the
model's own times therefore gives the model's constants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

from ..config.gemm_config import GemmConfig
from ..config.scale_blocks import BLOCKS, OperandTypes
from ..spec import GEMM_REDUCE_SCATTER
from ..spec.sharding import ceil_div
from .machine import Curve, Machine
from .space import candidates
from .time_model import Facts, efficiency_key, fused_time, times_bytes

GEMM_SIZES = (8192, 4096)
"""M = N = K of the products on which kernels are compared."""

ONE_WAVE_ROWS, ONE_WAVE_DEPTHS = 4, (4096, 8192)
"""Rows in cluster tiles, and K, of products whose tiles are one wave; the columns fill the SMs.

The difference of the times at two K excludes the cost of a wave outside its mainloop, which is a large part
of such calls.
"""

DECODE = (16, 8192, 8192)
"""M, N, K of a product whose time is the read of its weight."""

THIN = (4096, 8192)
"""Rows of two reduce-scatters with very small K; the difference of their times is the link's time."""
THIN_COLS, THIN_DEPTH_PER_RANK = 8192, 64

TAILED = (2048, 8192, 8192)
"""M, N, K of a reduce-scatter with significant fill and tail."""

CURVE_BYTES = (1 << 15, 1 << 18, 1 << 21, 1 << 23, 1 << 25, 1 << 27)
"""Bytes sent by each rank at which collectives are measured."""

COLLECTIVES = ("reduce_scatter", "all_gather", "all_reduce", "sum")
HOSTS = ("product", "torch", "fused", "sequential", "decomposed")


class Probe(Protocol):
    """Measurements in seconds, the same on every rank. All but `host` exclude host time.

    A method raises RuntimeError or ValueError if the machine cannot measure it.
    """

    @property
    def world(self) -> int:
        """Returns the number of ranks P."""

    @property
    def sms(self) -> int:
        """Returns the number of SMs of the device."""

    def empty(self) -> float:
        """Returns the time of a kernel without work."""

    def product(self, m: int, n: int, k: int) -> float:
        """Returns the time of one rank's product by cuBLAS."""

    def gemm(self, config: GemmConfig, m: int, n: int, k: int) -> float:
        """Returns the time of one rank's product by one of our kernels, with block scales if it has them."""

    def fused(self, config: GemmConfig, m: int, n: int, k: int) -> float:
        """Returns the time of a fused reduce-scatter; M, N and K are over all ranks."""

    def link(self) -> tuple[float, float]:
        """Returns bytes/s out of each rank: by SM stores to all peers, and by copy engines."""

    def collective(self, name: str, bytes_out: int) -> float:
        """Returns the time of one of `COLLECTIVES` in which each rank sends about `bytes_out` bytes."""

    def host(self, backend: str) -> float:
        """Returns the host time of an eager call of one of `HOSTS`."""


def calibrate(
    probe: Probe, base: Machine, arch: str, log: Callable[[str], object] = lambda line: None
) -> Machine:
    """Returns the constants computed from `probe`'s measurements; the others are `base`'s.

    A step that raises RuntimeError or ValueError changes nothing, even if it has measured a part of its
    constants; later steps run. All host times are one step.

    Args:
        probe: Probe that measures.
        base: Constants that are not measured.
        arch: Target architecture, for example ``"sm_90a"``.
        log: Function that gets a line for each step and each failed measurement.
    """
    machine = base
    for what, step in _steps(probe, arch):
        log(what)
        try:
            machine = step(machine)
        except (RuntimeError, ValueError) as error:
            log(f"  not measured, unchanged: {str(error).splitlines()[0]}")
    return machine


Step = Callable[[Machine], Machine]


def _steps(probe: Probe, arch: str) -> Iterator[tuple[str, Step]]:
    """Yields name and function of each step in order: later steps use the constants of earlier ones."""
    yield "launch", lambda m: replace(m, launch=probe.empty())
    yield "kernels", lambda m: _kernels(probe, m, arch)
    yield "kernels, one wave", lambda m: _one_wave(probe, m, arch)
    yield "kernels, scales of blocks", lambda m: _with_blocks(probe, m, arch)
    yield "memory", lambda m: _memory(probe, m)
    yield (
        "host",
        lambda m: replace(
            m, host={**m.host, **{name: probe.host(name) for name in HOSTS if _has(probe, name)}}
        ),
    )
    if probe.world == 1:
        return
    yield "link", lambda m: _link(probe, m)
    yield "collectives", lambda m: _collectives(probe, m)
    yield "decomposed", lambda m: replace(m, step=probe.host("decomposed") / (probe.world - 1))
    yield "fused, thin", lambda m: _bulk(probe, m, arch)
    yield "fused, tail", lambda m: _arrival(probe, m, arch)


def _positive(seconds: float) -> float:
    """Returns `seconds`, which must be positive for the model.

    Raises:
        ValueError: The measurements contradict each other.
    """
    if not seconds > 0:
        raise ValueError(
            f"the measured times contradict each other: their difference is {seconds * 1e6:.3g} us"
        )
    return seconds


def _has(probe: Probe, backend: str) -> bool:
    return probe.world > 1 or backend == "product"


def _kernels(probe: Probe, machine: Machine, arch: str) -> Machine:
    """Returns the rates of all kernels in full waves, as shares of the best kernel's rate."""
    shares: dict[str, list[float]] = {}
    best: list[float] = []
    for size in GEMM_SIZES:
        rates = {efficiency_key(c): _rate(c, size, probe, machine) for c in _without_split_k(machine, arch)}
        best.append(max(rates.values()))
        for name, rate in rates.items():
            shares.setdefault(name, []).append(rate / best[-1])
    efficiency = {name: sum(values) / len(values) for name, values in shares.items()}
    # The rate is that of the largest product, which power limits; the best kernel's share is 1.
    top = max(efficiency.values())
    return replace(
        machine,
        sms=probe.sms,
        mma_rate=best[0],
        efficiency={**machine.efficiency, **{name: round(e / top, 3) for name, e in efficiency.items()}},
    )


def _one_wave(probe: Probe, machine: Machine, arch: str) -> Machine:
    """Returns the rates of kernels with one wave of tiles, as shares of the best rate in full waves."""
    # A swap_ab kernel is bound by memory there, which the model counts separately.
    kernels = [config for config in _without_split_k(machine, arch) if not config.is_swap_ab]
    shares = {efficiency_key(c): round(_one_wave_rate(c, probe) / machine.mma_rate, 3) for c in kernels}
    return replace(machine, one_wave={**machine.one_wave, **shares})


def _with_blocks(probe: Probe, machine: Machine, arch: str) -> Machine:
    """Returns both rates of kernels with block scales, as shares of the best rate of their operand types."""
    kernels = [
        config for blocks in BLOCKS for config in candidates(arch, OperandTypes("e4m3", blocks), machine)
    ]
    full_waves = {
        efficiency_key(c): _share(_rate(c, GEMM_SIZES[0], probe, machine), c, machine) for c in kernels
    }
    one_wave = {efficiency_key(c): _share(_one_wave_rate(c, probe), c, machine) for c in kernels}
    return replace(
        machine, efficiency={**machine.efficiency, **full_waves}, one_wave={**machine.one_wave, **one_wave}
    )


def _share(rate: float, config: GemmConfig, machine: Machine) -> float:
    return round(rate / (machine.mma_rate * times_bytes(config, machine)), 3)


def _without_split_k(machine: Machine, arch: str) -> list[GemmConfig]:
    """Returns the kernels that do not split K."""
    return [config for config in candidates(arch, OperandTypes("bf16"), machine) if config.k_split == 1]


def _rate(config: GemmConfig, size: int, probe: Probe, machine: Machine) -> float:
    """Returns the FLOP/s of a kernel on all SMs in full waves."""
    return rate_of(config, size, probe.gemm(config, size, size, size), replace(machine, sms=probe.sms))


def rate_of(config: GemmConfig, size: int, seconds: float, machine: Machine) -> float:
    """Returns the FLOP/s, in full waves on all SMs, of a kernel that multiplies `size`^3 in `seconds`."""
    tile_m, tile_n = config.cluster_tile
    resident = max(1, machine.sms // config.cluster_ctas)
    waves = ceil_div(ceil_div(size, tile_m) * ceil_div(size, tile_n), resident)
    rows, columns = config.cta_tile
    mainloop = (seconds - machine.launch) / waves
    if config.mma == "cooperative":
        mainloop -= machine.epilogue * rows * columns
    return 2 * rows * columns * size / _positive(mainloop) * machine.sms


def _one_wave_rate(config: GemmConfig, probe: Probe) -> float:
    """Returns the FLOP/s of a kernel with one wave of tiles, extrapolated to all SMs."""
    (tile_m, tile_n), (rows, columns) = config.cluster_tile, config.cta_tile
    wide = max(1, probe.sms // config.cluster_ctas // ONE_WAVE_ROWS)
    less, more = (
        probe.gemm(config, ONE_WAVE_ROWS * tile_m, wide * tile_n, depth) for depth in ONE_WAVE_DEPTHS
    )
    deeper = ONE_WAVE_DEPTHS[1] - ONE_WAVE_DEPTHS[0]
    return 2 * rows * columns * deeper / _positive(more - less) * probe.sms


def _memory(probe: Probe, machine: Machine) -> Machine:
    m, n, k = DECODE
    read = (m * k + n * k + m * n) * 2
    return replace(machine, memory_rate=read / _positive(probe.product(m, n, k) - machine.launch))


def _link(probe: Probe, machine: Machine) -> Machine:
    stores, copies = probe.link()
    return replace(machine, link_rate=stores, copy_rate=copies)


def _collectives(probe: Probe, machine: Machine) -> Machine:
    """Returns the machine with measured times of the collectives for this number of ranks."""

    def curve(name: str) -> Curve:
        seconds = [probe.collective(name, size) for size in CURVE_BYTES]
        # If a larger transfer was measured faster (noise, or a change of protocol), use the longer time.
        return tuple((float(b), max(seconds[: i + 1])) for i, b in enumerate(CURVE_BYTES))

    curves = {name: {**machine.collectives.get(name, {}), probe.world: curve(name)} for name in COLLECTIVES}
    return replace(machine, collectives=curves)


def _best_kernel(arch: str, machine: Machine) -> GemmConfig:
    """Returns the best kernel that computes the next tile during an epilogue."""
    every = [c for c in candidates(arch, OperandTypes("bf16"), machine) if c.mma != "cooperative"]
    return max(every, key=lambda config: machine.efficiency[efficiency_key(config)])


def _bulk(probe: Probe, machine: Machine, arch: str) -> Machine:
    """Returns the link rate of the fused kernel.

    It is computed from the additional time of more rows where only the link matters.
    """
    config = _best_kernel(arch, machine)
    k = THIN_DEPTH_PER_RANK * probe.world
    less, more = (probe.fused(config, rows, THIN_COLS, k) for rows in THIN)
    sent = [
        Facts(GEMM_REDUCE_SCATTER.name, rows, THIN_COLS, k, "bf16", probe.world).bytes_out for rows in THIN
    ]
    return replace(machine, bulk_rate=(sent[1] - sent[0]) / _positive(more - less))


def _arrival(probe: Probe, machine: Machine, arch: str) -> Machine:
    """Returns the time of a call that the other constants do not explain, as `arrival`."""
    config = _best_kernel(arch, machine)
    facts = Facts(GEMM_REDUCE_SCATTER.name, *TAILED, "bf16", probe.world)
    known = fused_time(config, facts, replace(machine, arrival=0.0), probe.sms).total
    return replace(machine, arrival=max(0.0, probe.fused(config, *TAILED) - known))
