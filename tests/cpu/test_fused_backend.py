"""What the fused backend decides on the host: whether it can, with which operands, configuration, memory."""

import importlib.metadata
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import overlap_gemm
from overlap_gemm import epilogues
from overlap_gemm.backends.fused import plan_cache, transport_hosts
from overlap_gemm.backends.fused.fused_backend import Fused
from overlap_gemm.backends.fused.transport_hosts import (
    LL_PACKETS,
    PUTS,
    STORES,
    requested_transport,
    with_puts,
)
from overlap_gemm.backends.op_call import with_fallback
from overlap_gemm.backends.scales.tma_operands import aligned, aligned_vector, major
from overlap_gemm.backends.select import choose
from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.config.scale_blocks import OperandTypes
from overlap_gemm.config.visitors import Visitor
from overlap_gemm.exchange.geometry import CONTROL_BYTES, FLAG_BYTES, ExchangeShape
from overlap_gemm.runtime.group import Group
from overlap_gemm.runtime.peers import Agreed, Peers
from overlap_gemm.spec import PATTERNS, TRANSPORTS
from overlap_gemm.tuning.settings import configured, settings
from overlap_gemm.tuning.space import default_config
from tests.support.problems import changed, problem

PROBLEM = problem("gemm_reduce_scatter", 4096, 4096, 4096)

# --- choice ---


def test_an_all_reduce_to_8_bits_sends_no_results(monkeypatch):
    monkeypatch.setattr(plan_cache, "with_pattern", lambda *_: "two-shot by the model")
    agreed, shape = SimpleNamespace(arch="sm_90a", num_sms=132), ExchangeShape.even(128, 128, 2, "two_shot")

    def pattern_with(*functions):
        peers, visitors = SimpleNamespace(agreed=agreed), tuple(Visitor(one, ("f32",)) for one in functions)
        return plan_cache._with_pattern(peers, OperandTypes("bf16"), shape, None, visitors)

    assert pattern_with(epilogues.to_e4m3).pattern == "one_shot"
    assert pattern_with(epilogues.add_bias, epilogues.to_e4m3).pattern == "one_shot"
    assert pattern_with(epilogues.scale_rows) == "two-shot by the model"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "Hopper or Blackwell"),
        ({"op": "gemm_all_gather", "world_size": 3}, "1366 columns a rank, which must be a multiple of 8"),
        ({"dtype": torch.float32}, "float32"),
        ({"columns": 100}, "N=100 must be a multiple of 8"),
    ],
)
def test_it_names_what_stands_in_its_way(changes, reason):
    assert reason in (Fused().why_not(changed(PROBLEM, **changes)) or "")


def test_asking_for_it_without_a_device_raises_with_the_reason():
    x, weight = torch.randn(8, 16, dtype=torch.bfloat16), torch.randn(8, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="Hopper or Blackwell GPU, or the emulator"):
        overlap_gemm.gemm_reduce_scatter(x, weight, backend="fused")


def test_auto_passes_over_it_and_says_why():
    choice = choose(PROBLEM)
    assert choice.backend.name == "torch"
    assert "fused: no, fused kernels need" in str(choice)


def test_a_backward_pass_takes_another_backend_where_there_is_no_dual():
    asked = replace(PROBLEM, op="all_gather_gemm", dtype=torch.float32)
    choice = choose(asked, with_fallback("fused"))
    assert choice.backend.name == "torch"
    assert choice.verdicts[0][0] == "fused" and "float32" in (choice.verdicts[0][1] or "")
    assert choose(asked, with_fallback("sequential")).backend.name == "sequential"


def test_explain_tells_the_backward_too():
    x, weight = torch.randn(8, 16), torch.randn(8, 16)
    text = str(overlap_gemm.explain("gemm_reduce_scatter", x, weight, backend="sequential"))
    assert "backward: all_gather_gemm runs as 'sequential'" in text


def test_virtual_ranks_have_no_portable_backend():
    with pytest.raises(ValueError, match="virtual ranks"):
        choose(replace(PROBLEM, virtual=True))
    with pytest.raises(ValueError, match="virtual ranks"):
        choose(replace(PROBLEM, virtual=True), "sequential")


# --- operands ---


def test_an_operand_that_tma_can_read_is_taken_as_it_is():
    x = torch.randn(5, 24, dtype=torch.bfloat16)
    assert aligned(x) is x and major(x, "m") == "k"
    transposed = torch.randn(24, 8, dtype=torch.bfloat16).t()
    assert aligned(transposed) is transposed and major(transposed, "n") == "n"
    window = torch.randn(5, 64, dtype=torch.bfloat16)[:, 8:32]
    assert aligned(window) is window


@given(st.integers(1, 20), st.integers(0, 40), st.booleans(), st.integers(0, 9))
def test_any_other_is_copied_with_zeros_behind_k(rows, depth, transpose, offset):
    storage = torch.randn(rows * depth + offset, dtype=torch.bfloat16)[offset:]
    matrix = storage.view(depth, rows).t() if transpose else storage.view(rows, depth)
    ready = aligned(matrix)
    inner, outer = (1, 0) if major(ready, "other") == "k" else (0, 1)
    assert ready.data_ptr() % 16 == 0
    assert ready.stride(inner) == 1 and ready.stride(outer) % 8 == 0
    assert ready.shape[0] == rows and ready.shape[1] >= max(depth, 1)
    assert torch.equal(ready[:, :depth], matrix)
    assert not ready[:, depth:].any()


def test_a_bias_is_taken_as_it_is_or_copied_to_where_16_bytes_can_be_read_at_a_time():
    whole = torch.randn(64, dtype=torch.bfloat16)
    for bias in (whole, whole[8:]):
        assert aligned_vector(bias, len(bias)) is bias
    for bias in (whole[1:9], whole[::2], whole[:1].expand(8)):
        ready = aligned_vector(bias, len(bias))
        assert ready.data_ptr() % 16 == 0 and ready.stride(0) == 1
        assert torch.equal(ready, bias)


# --- configuration ---


def test_a_small_problem_gets_smaller_tiles_than_a_large_one():
    def area(rows):
        tile = default_config("sm_100a", "bf16", ExchangeShape.even(rows, 2048, 2), 148).cta_tile
        return tile[0] * tile[1]

    assert area(256) < area(16384)


def test_fields_can_be_overridden_and_what_does_not_exist_is_named():
    shape = ExchangeShape.even(4096, 4096, 4)
    with configured(mma="1cta", tile=(128, 64)):
        assert default_config("sm_100a", "bf16", shape, 148).tile == (128, 64)
        with configured(ring_stages=6, inflight=4):
            config = default_config("sm_100a", "bf16", shape, 148)
            assert (config.tile, config.ring_stages) == ((128, 64), 6)
    with configured(mma="cooperative"):
        assert default_config("sm_90a", "bf16", shape, 132).mma == "cooperative"
        with pytest.raises(ValueError, match="mma"):
            default_config("sm_100a", "bf16", shape, 148)
    with configured(tile=(17, 3)), pytest.raises(ValueError, match="tile"):
        default_config("sm_100a", "bf16", shape, 148)


# --- transport ---


@pytest.mark.parametrize(
    ("arch", "device", "relays"),
    [("sm_90a", "staged", True), ("sm_100a", "nvshmem", False), ("sm_103a", "nvshmem", False)],
)
def test_who_puts_follows_from_the_architecture(arch, device, relays):
    for transport in (STORES, PUTS):
        puts = with_puts(transport, arch, "so")
        assert (puts.device, puts.relays, puts.in_library) == (device, relays, not relays)
        assert puts.kind == transport.kind and puts.peers is transport.peers


def test_what_a_call_goes_by_follows_from_what_is_asked_for_and_from_its_rows():
    few, many = (
        GemmConfig("sm_90a", (16, 64), mma="swap_ab"),
        GemmConfig("sm_90a", (128, 128), mma="pingpong"),
    )
    assert (
        few.sends_ll
        and requested_transport(None, few) is LL_PACKETS
        and requested_transport(None, many) is requested_transport(None) is STORES
    )
    by = {name: requested_transport(transport, many).device for name, transport in TRANSPORTS.items()}
    assert by == {name: name for name in TRANSPORTS} | {"copy_engine": "peer_bulk"}
    with pytest.raises(ValueError, match="'ll' sends values of 16 bits; got slot_dtype='f32'"):
        requested_transport(TRANSPORTS["ll"], GemmConfig(slot_dtype="f32"))
    with pytest.raises(ValueError, match="out_dtype='f32'"):
        requested_transport(TRANSPORTS["ll"], GemmConfig(out_dtype="f32"))


def test_puts_that_cannot_be_linked_are_refused_at_the_call(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.4.5")
    with pytest.raises(
        RuntimeError, match="^so, and .* cannot link .* NVSHMEM 3.4.5: install nvidia-nvshmem-cu13>=3.7.2"
    ):
        with_puts(STORES, "sm_90a", "so")


def test_puts_that_are_not_installed_are_named(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(RuntimeError, match=r"pip install nvidia-nvshmem-cu13 \(the extra 'nvshmem'\)"):
        with_puts(STORES, "sm_100a", "so")


def test_puts_are_refused_in_memory_that_is_not_nvshmems(monkeypatch):
    """And before anything is allocated."""
    here = SimpleNamespace(device=torch.device("cpu"))
    peers = Peers(Group("a", 0, 2), here, Agreed("sm_90a", "", 132, 0), 0)
    obtained, has_p2p = [], True

    def obtain(peers, asked):
        obtained.append(asked)
        return SimpleNamespace(has_p2p=has_p2p)

    def transport(config=None):
        asked = TRANSPORTS.get(settings().tile_transport or "")
        return transport_hosts.obtain_transport(
            peers, requested_transport(asked, config), lambda transport: transport.kind
        )[1].device

    few = GemmConfig("sm_90a", (16, 64), mma="swap_ab")
    monkeypatch.setattr(transport_hosts, "obtain", obtain)
    monkeypatch.setenv("OVERLAP_GEMM_SYMMETRIC", "torch")
    with configured(transport="nvshmem"):
        with pytest.raises(RuntimeError, match="transport='nvshmem': .*OVERLAP_GEMM_SYMMETRIC=nvshmem"):
            transport()
        assert not obtained
        monkeypatch.setenv("OVERLAP_GEMM_SYMMETRIC", "nvshmem")
        assert transport() == "staged"
    assert transport() == "peer_bulk" and transport(few) == "ll"
    has_p2p = False
    assert transport(few) == "staged"
    assert obtained == ["puts", "", "words", "words", ""]


# --- memory ---


def test_puts_have_a_workspace_of_their_own_with_staging():
    config, shape = GemmConfig(), ExchangeShape.even(512, 512, 4)
    stores, puts = (transport.tiles_class(config, shape) for transport in (STORES, PUTS))
    assert puts.nbytes(has_p2p=True) == stores.nbytes(has_p2p=False)
    assert not stores.holds(puts) and not puts.holds(stores)


@given(st.integers(1, 5000), st.integers(1, 3000), st.integers(2, 8), st.sampled_from(list(PATTERNS)))
def test_a_workspace_class_holds_every_call_of_it(rows, columns, world, pattern):
    config, shape = GemmConfig(), ExchangeShape.even(rows, columns, world, pattern)
    size = STORES.tiles_class(config, shape)
    buffer = size.buffer
    assert size.nbytes(has_p2p=True) == size.zeroed + 2 * buffer
    assert size.nbytes(has_p2p=False) == size.zeroed + 4 * buffer
    assert buffer >= shape.buffer_bytes(config)
    assert buffer % 16 == 0 and size.zeroed % 16 == 0
    assert size.zeroed >= CONTROL_BYTES + FLAG_BYTES * shape.num_flags(config)
    # Calls of half to the whole of a class share it, so that growing a batch does not allocate every time.
    assert buffer <= max(2 * shape.buffer_bytes(config), 1 << 20)


@given(st.integers(1, 3000), st.integers(1, 1000), st.integers(2, 8))
def test_what_an_exchange_takes_follows_from_what_it_sends(rows, columns, world):
    """Slots and flags of the ops whose results go to everybody, against those of a reduce-scatter."""
    config = GemmConfig(slot_dtype="f32")

    def shape(pattern):
        return ExchangeShape.even(rows, columns, world, pattern)

    scatter, two_shot, one_shot = map(shape, ("reduce_scatter", "two_shot", "one_shot"))
    tiles = two_shot.cta_tiles(config)
    assert two_shot.shard * world >= columns
    # Results travel as bfloat16 here, partials as float32.
    assert two_shot.buffer_bytes(config) * 2 == world * tiles * config.tile_bytes * 3
    assert two_shot.num_flags(config) == (1 + config.units) * tiles * world
    assert one_shot.num_flags(config) == one_shot.cta_tiles(config) * world
    assert one_shot.buffer_bytes(config) >= scatter.buffer_bytes(config)
    gather = shape("output_gather")
    assert gather.num_clusters(config) >= gather.grid(config).rows * gather.grid(config).cols
