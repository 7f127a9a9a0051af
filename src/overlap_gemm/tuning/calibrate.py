"""From a few measurements to the constants of a machine: the model's formulas, solved for their constants.

How something is measured is a `Probe`'s business (`overlap-gemm tune` has one for GPUs). Here is arithmetic,
so a probe that answers with the model's own times gets the model's constants back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

from ..config.gemm_config import GemmConfig
from ..config.scale_blocks import BLOCKS
from ..spec import GEMM_REDUCE_SCATTER
from ..spec.sharding import ceil_div
from .machine import Curve, Machine
from .space import candidates
from .time_model import Facts, efficiency_key, fused_time, times_bytes

GEMM_SIZES = (8192, 4096)
"""Edges of the cubes that kernels are compared on."""

ONE_WAVE_ROWS, ONE_WAVE_DEPTHS = 4, (4096, 8192)
"""Rows in cluster tiles of a product whose tiles are one wave, with as many columns as fill the SMs. Two K:
their times' difference has nothing of what a wave costs outside its mainloop, which is much of such calls."""

DECODE = (16, 8192, 8192)
"""M, N, K of a product that only reads its weight."""

THIN = (4096, 8192)
"""Rows of two reduce-scatters with next to nothing to compute: their difference is the link's."""
THIN_COLS, THIN_DEPTH_PER_RANK = 8192, 64

TAILED = (2048, 8192, 8192)
"""M, N, K of a reduce-scatter whose fill and tail show."""

CURVE_BYTES = (1 << 15, 1 << 18, 1 << 21, 1 << 23, 1 << 25, 1 << 27)
"""Bytes out of each rank at which collectives are measured."""

COLLECTIVES = ("reduce_scatter", "all_gather", "all_reduce", "sum")
HOSTS = ("product", "torch", "fused", "sequential", "decomposed")


class Probe(Protocol):
    """Measures, in seconds, the same on every rank; all but `host` without the host's time.

    A method raises RuntimeError or ValueError where the machine has no such thing.
    """

    @property
    def world(self) -> int:
        """Ranks P."""

    @property
    def sms(self) -> int:
        """SMs of the device."""

    def empty(self) -> float:
        """A kernel with next to nothing to do."""

    def product(self, m: int, n: int, k: int) -> float:
        """One rank's product by cuBLAS."""

    def gemm(self, config: GemmConfig, m: int, n: int, k: int) -> float:
        """One rank's product by one of our kernels; with scales of blocks where it has them."""

    def fused(self, config: GemmConfig, m: int, n: int, k: int) -> float:
        """A fused reduce-scatter; M, N, K over all ranks."""

    def link(self) -> tuple[float, float]:
        """Bytes/s out of each rank by SM stores to all peers, and by copy engines."""

    def collective(self, name: str, bytes_out: int) -> float:
        """One of `COLLECTIVES` that sends about so many bytes out of each rank."""

    def host(self, way: str) -> float:
        """Host time of an eager call of one of `HOSTS`."""


def calibrate(
    probe: Probe, base: Machine, arch: str, log: Callable[[str], object] = lambda line: None
) -> Machine:
    """The constants that `probe`'s measurements give; those that it cannot measure stay `base`'s.

    Args:
        probe: Measures.
        base: Where the other constants come from.
        arch: Target, e.g. ``"sm_90a"``.
        log: Gets a line for each step, and for what could not be measured.
    """
    machine = base
    for what, step in _steps(probe, arch):
        log(what)
        try:
            machine = step(machine)
        except (RuntimeError, ValueError) as error:
            log(f"  not measured, stays as it was: {str(error).splitlines()[0]}")
    return machine


Step = Callable[[Machine], Machine]


def _steps(probe: Probe, arch: str) -> Iterator[tuple[str, Step]]:
    """What is measured, in this order: later steps use the constants of earlier ones."""
    yield "launch", lambda m: replace(m, launch=probe.empty())
    yield "kernels", lambda m: _kernels(probe, m, arch)
    yield "kernels, one wave", lambda m: _one_wave(probe, m, arch)
    yield "kernels, scales of blocks", lambda m: _with_blocks(probe, m, arch)
    yield "memory", lambda m: _memory(probe, m)
    yield (
        "host",
        lambda m: replace(m, host={**m.host, **{way: probe.host(way) for way in HOSTS if _has(probe, way)}}),
    )
    if probe.world == 1:
        return
    yield "link", lambda m: _link(probe, m)
    yield "collectives", lambda m: _collectives(probe, m)
    yield "decomposed", lambda m: replace(m, step=probe.host("decomposed") / (probe.world - 1))
    yield "fused, thin", lambda m: _bulk(probe, m, arch)
    yield "fused, tail", lambda m: _arrival(probe, m, arch)


def _positive(seconds: float) -> float:
    """`seconds`, which the model needs to be more than nothing.

    Raises:
        ValueError: The measurements contradict each other.
    """
    if not seconds > 0:
        raise ValueError(f"the times contradict each other: {seconds * 1e6:.3g} us are left")
    return seconds


def _has(probe: Probe, way: str) -> bool:
    return probe.world > 1 or way == "product"


def _kernels(probe: Probe, machine: Machine, arch: str) -> Machine:
    """Rates of all kernels, whole waves counted, as shares of the best one's."""
    shares: dict[str, list[float]] = {}
    best: list[float] = []
    for size in GEMM_SIZES:
        rates = {efficiency_key(c): _rate(c, size, probe, machine) for c in _whole(machine, arch)}
        best.append(max(rates.values()))
        for name, rate in rates.items():
            shares.setdefault(name, []).append(rate / best[-1])
    efficiency = {name: sum(found) / len(found) for name, found in shares.items()}
    # The rate is that of the largest product, where power limits it; the best kernel's share is 1.
    top = max(efficiency.values())
    return replace(
        machine,
        sms=probe.sms,
        mma_rate=best[0],
        efficiency={**machine.efficiency, **{name: round(e / top, 3) for name, e in efficiency.items()}},
    )


def _one_wave(probe: Probe, machine: Machine, arch: str) -> Machine:
    """Rates of kernels whose tiles all run at once, as shares of the best one's in whole waves."""
    # A swapped one is bound by the memory there, which the model counts by itself.
    kernels = [config for config in _whole(machine, arch) if not config.is_swap_ab]
    shares = {efficiency_key(c): round(_one_wave_rate(c, probe) / machine.mma_rate, 3) for c in kernels}
    return replace(machine, one_wave={**machine.one_wave, **shares})


def _with_blocks(probe: Probe, machine: Machine, arch: str) -> Machine:
    """Both rates of kernels with scales of blocks, as shares of what kernels of their types reach at best."""
    kernels = [config for blocks in BLOCKS for config in candidates(arch, "e4m3", machine, blocks)]
    whole = {efficiency_key(c): _share(_rate(c, GEMM_SIZES[0], probe, machine), c, machine) for c in kernels}
    alone = {efficiency_key(c): _share(_one_wave_rate(c, probe), c, machine) for c in kernels}
    return replace(
        machine, efficiency={**machine.efficiency, **whole}, one_wave={**machine.one_wave, **alone}
    )


def _share(rate: float, config: GemmConfig, machine: Machine) -> float:
    return round(rate / (machine.mma_rate * times_bytes(config, machine)), 3)


def _whole(machine: Machine, arch: str) -> list[GemmConfig]:
    """The kernels whose tiles have all of K."""
    return [config for config in candidates(arch, "bf16", machine) if config.k_split == 1]


def _rate(config: GemmConfig, size: int, probe: Probe, machine: Machine) -> float:
    """FLOP/s of a kernel on all SMs while its tiles fill them."""
    return rate_of(config, size, probe.gemm(config, size, size, size), replace(machine, sms=probe.sms))


def rate_of(config: GemmConfig, size: int, seconds: float, machine: Machine) -> float:
    """FLOP/s of a kernel that multiplies a cube in so many seconds, on all SMs while its tiles fill them."""
    tile_m, tile_n = config.cluster_tile
    resident = max(1, machine.sms // config.cluster_ctas)
    waves = ceil_div(ceil_div(size, tile_m) * ceil_div(size, tile_n), resident)
    rows, columns = config.cta_tile
    mainloop = (seconds - machine.launch) / waves
    if config.mma == "cooperative":
        mainloop -= machine.epilogue * rows * columns
    return 2 * rows * columns * size / _positive(mainloop) * machine.sms


def _one_wave_rate(config: GemmConfig, probe: Probe) -> float:
    """FLOP/s of a kernel, as of all SMs, while all its tiles run at once."""
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
    def curve(name: str) -> Curve:
        seconds = [probe.collective(name, size) for size in CURVE_BYTES]
        # A larger transfer that was measured faster is noise, or a change of protocol: it takes no less.
        return tuple((float(b), max(seconds[: i + 1])) for i, b in enumerate(CURVE_BYTES))

    curves = {name: {**machine.collectives.get(name, {}), probe.world: curve(name)} for name in COLLECTIVES}
    return replace(machine, collectives=curves)


def _best_kernel(arch: str, machine: Machine) -> GemmConfig:
    """The best kernel that works on the next tile during an epilogue."""
    every = [c for c in candidates(arch, "bf16", machine) if c.mma != "cooperative"]
    return max(every, key=lambda config: machine.efficiency[efficiency_key(config)])


def _bulk(probe: Probe, machine: Machine, arch: str) -> Machine:
    """The link's rate as the kernel reaches it: what more rows cost where the link is all that costs."""
    config = _best_kernel(arch, machine)
    k = THIN_DEPTH_PER_RANK * probe.world
    less, more = (probe.fused(config, rows, THIN_COLS, k) for rows in THIN)
    sent = [
        Facts(GEMM_REDUCE_SCATTER.name, rows, THIN_COLS, k, "bf16", probe.world).bytes_out for rows in THIN
    ]
    return replace(machine, bulk_rate=(sent[1] - sent[0]) / _positive(more - less))


def _arrival(probe: Probe, machine: Machine, arch: str) -> Machine:
    """What a call takes beyond all that the model knows without it."""
    config = _best_kernel(arch, machine)
    facts = Facts(GEMM_REDUCE_SCATTER.name, *TAILED, "bf16", probe.world)
    known = fused_time(config, facts, replace(machine, arrival=0.0), probe.sms).total
    return replace(machine, arrival=max(0.0, probe.fused(config, *TAILED) - known))
