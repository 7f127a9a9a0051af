"""What is said once can be added once: an entry in a registry, nothing else, and it runs in the emulator."""

from dataclasses import dataclass, replace
from types import MappingProxyType

import cutlass
import pytest
import torch
from cutlass import cute

from cute_emulator import Emulator
from overlap_gemm import epilogue
from overlap_gemm.backends.fused.fused_backend import Fused
from overlap_gemm.config import arch as archs
from overlap_gemm.config.arch import ARCHS, Mma, arch_of
from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.config.visitors import Visitor, bias_of
from overlap_gemm.device.memory import CHUNK_BYTES, store_run
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.spec import OPS, PATTERNS
from overlap_gemm.spec.sharding import Shards
from overlap_gemm.transports import PeerBulk, Transport
from overlap_gemm.tuning.prediction import predict
from overlap_gemm.tuning.settings import configured
from overlap_gemm.tuning.space import every_config
from overlap_gemm.tuning.time_model import Facts
from tests.support.emulated.all_to_all import GEMM_ALL_TO_ALL, PATTERN
from tests.support.emulated.chosen import in_turn
from tests.support.emulated.kernel_cases import launched


@pytest.fixture
def small_hopper(monkeypatch):
    """A Hopper of 100 KiB of shared memory with fewer tiles, as another architecture."""
    kinds = {"cooperative": Mma(((128, 128),), ((1, 1),), epilogue_threads=256)}
    small = replace(
        archs.SM_90A, name="sm_90s", capability=None, smem_bytes=100 * 1024, mma=MappingProxyType(kinds)
    )
    monkeypatch.setitem(ARCHS, small.name, small)
    return small


@epilogue(inputs={"factor": "rows"})
def gated_square(x, factor):
    """Returns the square of each complete sum, times a factor of its row."""
    return x * x * factor


@epilogue(of="partial")
def halve(x):
    """Returns half of each partial sum."""
    return x * 0.5


@dataclass(frozen=True)
class OrdinaryStores(Transport):
    """One thread loads a stage chunk by chunk, and stores it at the owner."""

    @cute.jit
    def put(self, route, offset, stage, num_bytes):
        chunks = cute.zipped_divide(stage, (CHUNK_BYTES * 8 // stage.element_type.width,))
        for i in cutlass.range(num_bytes // CHUNK_BYTES, unroll=1):
            values = cute.make_rmem_tensor(chunks.shape[0], stage.element_type)
            cute.autovec_copy(chunks[(None, i)], values)
            self.store(route.peers, route.owner, route.slot + offset + i * CHUNK_BYTES, values)

    def store(self, peers, peer, offset, values):
        store_run(peers[peer] + offset, values)


ARCHITECTURES = "sm_90a", "sm_100a"


def run(config, transport, world, target=None):
    """One launch on every rank, checked against float64."""
    launched(config, transport, world, target, rows=264, cols=152, depth=200).check()


@pytest.mark.parametrize(
    ("transport", "world", "arch"),
    in_turn([(None, 1), (PeerBulk(), 3)], ARCHITECTURES),
    ids=lambda given: type(given).__name__ if isinstance(given, PeerBulk) else str(given),
)
def test_another_epilogue(arch, transport, world):
    mma = next(iter(ARCHS[arch].mma))
    config = GemmConfig(arch, mma=mma, tile=(64, 128) if mma == "pingpong" else (128, 64))
    run(
        replace(config, epilogue=(Visitor(halve), Visitor(gated_square, ("f32",)), bias_of("bf16"))),
        transport,
        world,
    )


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
def test_another_transport(arch):
    mma = next(iter(ARCHS[arch].mma))
    run(GemmConfig(arch, mma=mma, tile=(64, 128) if mma == "pingpong" else (128, 64)), OrdinaryStores(), 3)


def test_an_unknown_architecture_is_an_error():
    with pytest.raises(ValueError, match="arch must be one of sm_90a, sm_100a, sm_103a; got sm_120a"):
        arch_of("sm_120a")
    with pytest.raises(ValueError, match="got sm_120a"):
        GemmConfig("sm_120a")


def test_another_architecture(small_hopper):
    (config,) = every_config(small_hopper.name)
    hopper = replace(config, arch="sm_90a")
    assert config.ab_stages == 2 < hopper.ab_stages
    for transport, world in ((None, 1), (PeerBulk(), 2)):
        run(config, transport, world, small_hopper.target)


@pytest.fixture
def all_to_all(monkeypatch):
    """GEMM all-to-all: one file, and a line in each of the registries of ops and patterns."""
    monkeypatch.setitem(OPS, GEMM_ALL_TO_ALL.name, GEMM_ALL_TO_ALL)
    monkeypatch.setitem(PATTERNS, PATTERN.name, PATTERN)
    return GEMM_ALL_TO_ALL


@pytest.mark.parametrize(("world", "arch"), in_turn([2, 3], ARCHITECTURES))
def test_another_op(all_to_all, arch, world):
    """By the runtime's plans and workspaces, ragged rows, again, by flags and as LL words."""
    rows, columns, depth = 150, 72 * world, 72
    x, weight = torch.randn(rows, depth).bfloat16(), torch.randn(columns, depth).bfloat16()
    exact, shards = x.double() @ weight.double().T, Shards.even(rows, world)
    with Emulator(arch, world) as emulator, VirtualWorld(world, emulator=emulator) as ranks:
        for transport in ("peer_bulk", "ll", "peer_bulk"):
            with configured(transport=transport):
                outs = [
                    Fused().call(all_to_all, own, weight, None, shards, group, depth)
                    for own, group in zip(x.split(shards.chunk), ranks.ranks, strict=True)
                ]
                ranks.synchronize()
            for out, expected in zip(outs, exact.split(-(-columns // world), 1), strict=True):
                assert out.shape == expected.shape
                assert ((out.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-4).all()


def test_the_planner_knows_another_op(all_to_all):
    assert all_to_all.arguments(6, 4, 2, least=True) == {"rows": 6} and not all_to_all.gathers_operand
    facts = Facts(all_to_all.name, 8192, 8192, 2048, "bf16", 4)
    assert facts.local == (2048, 8192, 2048) and facts.bytes_out == 2048 * 8192 * 2 * 3 / 4
    found = predict(facts, "sm_90a", 132, True)
    assert found.fused.total < found.product + found.link
    assert found.fused.total > max(found.product, found.link)
