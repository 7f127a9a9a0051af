"""The kernels by themselves in the emulator: every mainloop, layout, cluster and element type."""

import dataclasses
import functools

import pytest
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64

from cute_emulator import Emulator
from overlap_gemm.build import compile_relay
from overlap_gemm.config.arch import ARCHS
from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.config.visitors import SCALES, bias_of
from overlap_gemm.exchange.geometry import Puts, tile_puts
from overlap_gemm.spec import GEMM_REDUCE_SCATTER
from overlap_gemm.transports import Nvshmem, PeerBulk, Staged
from overlap_gemm.tuning.space import every_config
from tests.support.emulated.kernel_cases import KernelCase, Workspaces, compiled_kernel

RELAY_STREAM = CUstream(1)
EVERY_SHAPE = [config for arch in ("sm_90a", "sm_100a") for config in every_config(arch)]
SMALLEST = [
    GemmConfig(arch=arch, mma=mma, tile=kind.tiles[0], cluster=kind.clusters[0])
    for arch in ("sm_90a", "sm_100a")
    for mma, kind in ARCHS[arch].mma.items()
]
VARIANTS = [
    {"a_major": "m"},
    {"b_major": "n"},
    {"a_major": "m", "b_major": "n"},
    {"epilogue": (bias_of("bf16"),)},
    {"out_dtype": "f32"},
    {"slot_dtype": "f32"},
    {"out_dtype": "f32", "slot_dtype": "f32", "epilogue": (bias_of("bf16"),)},
    {"epilogue": (SCALES,)},
    {"epilogue": (SCALES, bias_of("f32")), "out_dtype": "f32"},
    {"in_dtype": "f16", "out_dtype": "f16", "slot_dtype": "f16"},
    {"ring_stages": 2, "inflight": 1},
    {"ring_stages": 6, "inflight": 5, "raster_group": 1},
]
VARIED = [
    dataclasses.replace(base, **variant)
    for base in SMALLEST
    for variant in VARIANTS
    if base.mma != "swap_ab" or "f32" not in variant.values()  # refused
]
OTHERS = EVERY_SHAPE[1::24] + VARIED[::7]  # with 7, every other variant of ten and other ones of each base
OPERANDS = [config for config in OTHERS if (config.a_major, config.b_major) != ("k", "k")]
"""Their partial sums are those of the others."""


ALONG_M = [c for c in EVERY_SHAPE if (c.arch, c.tile, c.cluster) == ("sm_100a", (128, 64), (2, 1))]
"""Two tiles of M to a cluster, which pairs of CTAs do not have."""


def quick(chosen):
    """All configurations, of which the default run takes the chosen ones."""
    every = EVERY_SHAPE + VARIED
    return [c if c in chosen else pytest.param(c, marks=pytest.mark.slow) for c in every]


@pytest.mark.parametrize(
    "config", quick([c for c in SMALLEST if not c.is_swap_ab] + OPERANDS + ALONG_M), ids=lambda c: c.name
)
def test_plain_gemm(config):
    """By default those that run neither in the next test nor in test_swap_ab.py."""
    case = KernelCase(
        config, rows=2 * config.cluster_tile[0] + 8, cols=config.cluster_tile[1] + 24, depth=136
    )
    with Emulator(config.arch, mode="lazy") as emulator:
        case.launch(emulator, compiled_kernel(config), num_clusters=2)
    case.check()


@pytest.mark.parametrize(
    "config",
    quick([c for c in OTHERS if c not in SMALLEST + OPERANDS and not c.epilogue]),
    ids=lambda c: c.name,
)
def test_reduce_scatter(config):
    """The smallest run in test_reduce_scatter.py and test_swap_ab.py, visitors in test_epilogue_*.py."""
    ragged = 8 if config.a_major == "k" else 16  # along M a load of a shard begins at multiples of 8 rows
    case = KernelCase(
        config, 2 * config.cluster_tile[0] + ragged, config.cluster_tile[1] + 24, depth=72, world=2
    )
    with Emulator(config.arch, 2, mode="lazy") as emulator:
        spaces = Workspaces(emulator, [case])
        case.launch(emulator, compiled_kernel(config, PeerBulk()), spaces.exchanges(case), num_clusters=2)
        emulator.run()
    case.check()


REACH = {
    "no-peer-in-reach": lambda rank, peer: False,
    "neighbours-in-reach": lambda rank, peer: (rank + peer) % 2 == 1,
}


def without_p2p(config, transport, relay, mode, reach):
    """Launches of two shapes in turn, in one of which rank 2 owns nothing, over NVSHMEM's network."""
    first = KernelCase(config, rows=300, cols=136, depth=72, world=3)
    second = KernelCase(config, rows=2, cols=72, depth=64, world=3, seed=1)
    with Emulator(config.arch, 3, mode=mode, seed=1, network=True) as emulator:
        kernel = compiled_kernel(config, transport)
        spaces = Workspaces(emulator, [first, second], REACH[reach])
        for case in (first, second, first, second):
            exchanges = spaces.exchanges(case)
            case.launch(emulator, kernel, exchanges, num_clusters=3)
            if relay:
                for rank, exchange in enumerate(exchanges):
                    lists = tile_puts(config, case.shape, rank, spaces.slots, spaces.buffer)
                    puts = tuple(Puts(*map(Int64, each)) for each in (*lists, Puts()))
                    with emulator.rank(rank):
                        relay()(Int32(GEMM_REDUCE_SCATTER.code), puts, exchange, RELAY_STREAM)
        emulator.run()
    first.check()
    second.check()


@functools.cache
def compiled_relay(arch):
    return compile_relay(arch, Nvshmem())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["immediate", "random", "lazy"])
@pytest.mark.parametrize("reach", REACH)
def test_nvshmem_inside_the_gemm(mode, reach):
    config = next(c for c in SMALLEST if c.arch == "sm_100a")
    without_p2p(config, Nvshmem(), None, mode, reach)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["immediate", "random", "lazy"])
@pytest.mark.parametrize("reach", REACH)
def test_nvshmem_in_a_relay_beside_the_gemm(mode, reach):
    config = SMALLEST[0]
    assert config.arch == "sm_90a"
    without_p2p(config, Staged(), lambda: compiled_relay(config.arch), mode, reach)
