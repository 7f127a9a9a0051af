"""A workspace that is reserved serves every call up to its size, whichever kernel that gets."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

import overlap_gemm
from cute_emulator import Emulator
from overlap_gemm import nn
from overlap_gemm.backends.fused import gather_plans as gather
from overlap_gemm.backends.fused import plan_cache as plans
from overlap_gemm.backends.fused import transport_hosts
from overlap_gemm.backends.fused.plan_cache import plan_for
from overlap_gemm.backends.fused.reserved import allocate, needed_classes
from overlap_gemm.backends.scales.product_types import ProductTypes
from overlap_gemm.config.scale_blocks import MX, PROMOTED
from overlap_gemm.epilogues import add_residual_squared, swiglu
from overlap_gemm.exchange.geometry import ExchangeShape
from overlap_gemm.runtime.memory.workspace import workspaces
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.spec import OPS, PATTERNS
from overlap_gemm.spec.sharding import Shards
from overlap_gemm.tuning.machine import MACHINE_VARIABLE, load, machine_for, save
from overlap_gemm.tuning.settings import configured
from overlap_gemm.tuning.time_model import efficiency_key
from tests.support.ops import SCALED

CPU, E4M3 = torch.device("cpu"), torch.float8_e4m3fn
RS, GATHER = "gemm_reduce_scatter", "all_gather_gemm"


@pytest.fixture
def no_kernels(monkeypatch):
    """Kernels that do nothing, where what calls allocate is looked at."""
    for module in (plans, gather):
        for name in {"compiled_kernel", "compiled_gather", "compiled_gate"} & vars(module).keys():
            monkeypatch.setattr(module, name, lambda *_, **__: lambda *_, **__: None)


def reserve(group, device, *sizes):
    return allocate(group, device, needed_classes(group, device, *sizes))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("pattern", ["reduce_scatter", "one_shot", "output_gather"])
def test_calls_up_to_what_was_reserved_allocate_nothing(monkeypatch, pattern, dtype):
    """``"one_shot"`` stands for an all-reduce: the model settles which; and whether a scatter is one."""
    monkeypatch.setattr(transport_hosts, "SMALLEST_BUFFER", 1 << 10)
    monkeypatch.setattr(transport_hosts, "SMALLEST_FLAGS", 1)
    types = ProductTypes(dtype, None, None if dtype == torch.bfloat16 else torch.bfloat16)
    with Emulator("sm_100a", 2) as emulator, VirtualWorld(2, emulator=emulator) as world:
        held = [reserve(g, CPU, types, [PATTERNS[pattern].op], 4096, 1024) for g in world.ranks]
        assert overlap_gemm.workspace_bytes() == sum(held)
        for rows in (1, 2, 100, 300, 700, 1000, 2048, 4095, 4096):
            for columns, depth in ((16, None), (1024, None), (1024, 64), (1024, 1 << 17)):
                shape = ExchangeShape.even(rows, columns, 2, pattern)
                monkeypatch.setattr(plans, "compiled_kernel", lambda *_: None)
                for group in world.ranks:
                    tiles = [{"mma": "1cta", "tile": (128, columns)} for columns in (64, 128, 256)]
                    for fields in ({}, *(tiles if pattern != "one_shot" else ())):
                        with configured(**fields):
                            plan_for(group, CPU, types, shape, "k", "k", (), depth)
        assert overlap_gemm.workspace_bytes() == sum(held)
        larger = ExchangeShape.even(9000, 1024, 2, pattern)
        plan_for(world.ranks[0], CPU, types, larger, "k", "k", ())
        assert overlap_gemm.workspace_bytes() > sum(held)


def test_what_is_reserved_within_a_block_that_asks_for_puts_is_for_puts():
    with Emulator("sm_90a", 2) as emulator, VirtualWorld(2, emulator=emulator) as world:
        ops = ["gemm_all_reduce", "all_gather_gemm"]
        with configured(transport="nvshmem"):
            held = [reserve(group, CPU, ProductTypes(torch.bfloat16), ops, 100, 64) for group in world.ranks]
        assert {space.size.kind for space in workspaces()} == {"puts", "gather puts"}
        assert overlap_gemm.workspace_bytes() == sum(held)


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize(
    ("op", "block"),
    [
        *((op, None) for op in SCALED),
        *(pytest.param(GATHER, block, marks=pytest.mark.slow) for block in (32, "mx")),
        *((RS, block) for block in (128, "mx")),
    ],
)
def test_what_is_reserved_for_8_bit_operands_is_what_their_calls_take(op, block, monkeypatch):
    """The public door: nothing would be there to find by a type that has no calls without scales."""
    monkeypatch.setattr(transport_hosts, "SMALLEST_BUFFER", 1 << 8)
    arch = "sm_100a" if block == "mx" else "sm_90a"
    with Emulator(arch, 2) as emulator, VirtualWorld(2, emulator=emulator) as world:

        def held(**how):
            return [overlap_gemm.reserve(op, group=g.name, device=CPU, **how) for g in world.ranks]

        m, n, k = (32, 64, 58) if block is None else (32, 256, 512)
        columns = k if OPS[op].gathers_operand else n
        reserved = held(max_rows=m, columns=columns, dtype=torch.float8_e4m3fn, block=block)
        assert all(reserved) and overlap_gemm.workspace_bytes() == sum(reserved)
        for group in world.ranks:
            shapes = OPS[op].shapes(m, n, k, lambda extent: extent // 2)
            x, weight = (torch.ones(shape).to(torch.float8_e4m3fn) for shape in shapes)
            scales = {"scale_x": torch.ones(()), "scale_w": torch.ones(())}
            if block == "mx":
                scales = {
                    f"scale_{name}": overlap_gemm.swizzle_scales(torch.ones(len(rows), rows.shape[1] // 32))
                    for name, rows in (("x", x), ("w", weight))
                }
            elif block is not None:
                along = x.shape[1] // block
                shapes = {"scale_x": (len(x), along), "scale_w": (len(weight) // block, along)}
                scales = {name: torch.ones(shape) for name, shape in shapes.items()}
            said = OPS[op].arguments(m, n, k) | {"block": block}
            getattr(overlap_gemm, op)(x, weight, **scales, group=group.name, backend="fused", **said)
        world.synchronize()
        assert overlap_gemm.workspace_bytes() == sum(reserved)


@pytest.mark.parametrize(("op", "block"), [(RS, "mx"), (GATHER, "mx"), (RS, 128)])
def test_fused_calls_after_a_warm_up_make_no_plan(op, block, monkeypatch, request):
    """Scales of blocks and of MX types: the calls' own, and not those of rows. Results are right."""
    m, n, k = 6, 256, 512
    if block == "mx":
        request.getfixturevalue("no_kernels")
    arch = "sm_100a" if block == "mx" else "sm_90a"
    with Emulator(arch, 2) as emulator, VirtualWorld(2, emulator=emulator) as world:
        for group in world.ranks:
            how = {"group": group.name, "backend": "fused", "deterministic": False}
            overlap_gemm.warmup(op, (m, n, k), dtype=torch.float8_e4m3fn, block=block, device=CPU, **how)
        world.synchronize()
        never = mock.Mock(side_effect=AssertionError("made after the warm-up"))
        monkeypatch.setattr(plans, "keep_plan", never)
        monkeypatch.setattr(gather, "keep_plan", never)
        outs = []
        for group in world.ranks:
            x, weight = (torch.ones(s) for s in OPS[op].shapes(m, n, k, lambda extent: extent // 2))
            x, scale_x = overlap_gemm.quantize_rows(x, block=32 if block == "mx" else 128, power_of_two=True)
            scale_w = torch.full((weight.shape[0] // 128, weight.shape[1] // 128), 0.5)
            if block == "mx":
                scale_x, scale_w = map(
                    overlap_gemm.swizzle_scales,
                    (scale_x, torch.full((len(weight), weight.shape[1] // 32), 0.5)),
                )
            how = {"scale_x": scale_x, "scale_w": scale_w, "backend": "fused", "deterministic": False}
            how |= OPS[op].arguments(m, n, k) | {"block": block}
            outs.append(getattr(overlap_gemm, op)(x, weight.to(torch.float8_e4m3fn), group=group.name, **how))
        world.synchronize()
        assert block == "mx" or all((out == k / 2).all() for out in outs)


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize(("op", "one"), [(RS, add_residual_squared), (GATHER, swiglu)])
def test_fused_calls_with_an_epilogue_after_a_warm_up_make_no_plan(op, one, monkeypatch):
    """Checks pairs of one weight, and of two."""
    m, n, k = 8, 256, 128
    with Emulator("sm_90a", 2) as emulator, VirtualWorld(2, emulator=emulator) as world:
        for group in world.ranks:
            how = {"group": group.name, "backend": "fused", "deterministic": False}
            overlap_gemm.warmup(op, (m, n, k), device=CPU, epilogue=one, **how)
        world.synchronize()
        never = mock.Mock(side_effect=AssertionError("made after the warm-up"))
        monkeypatch.setattr(plans, "keep_plan", never)
        monkeypatch.setattr(gather, "keep_plan", never)
        for group in world.ranks:
            x, weight = (
                torch.ones(s).bfloat16() for s in OPS[op].shapes(m, n, k, lambda extent: extent // 2)
            )
            inputs = {"residual": torch.ones(m // 2, n).bfloat16()} if one is add_residual_squared else {}
            for weights in [weight] if inputs else [weight, list(weight.chunk(2))]:
                how = {"group": group.name, "backend": "fused", "deterministic": False}
                how |= OPS[op].arguments(m, n, k)
                getattr(overlap_gemm, op)(x, weights, epilogue=one(**inputs), **how)
        world.synchronize()


def test_rows_of_8_bits_are_gathered_with_their_scales():
    """A MiB of rows, which the smallest gather buffer holds, and scales, which it does not.

    Of 1024 rows it would hold them with K = 1009, not with K padded to 1024; of 1008 not those of MX types.
    """
    held, e4m3 = [], torch.float8_e4m3fn
    for dtype, rows, k, blocks in (
        (torch.bfloat16, 512, 1024, None),
        (e4m3, 1008, 1024, None),
        (e4m3, 1024, 1024, None),
        (e4m3, 1024, 1009, None),
        (e4m3, 1008, 1024, MX),
    ):
        with Emulator("sm_100a", 2) as emulator, VirtualWorld(2, emulator=emulator) as world:
            group = world.ranks[0]
            out = None if dtype == torch.bfloat16 else torch.bfloat16
            held.append(reserve(group, CPU, ProductTypes(dtype, None, out, blocks), [GATHER], rows, k))
    small, still_small, large, padded, mx = held
    assert still_small == small < large == padded == mx


def test_blocks_that_there_are_not_cannot_be_reserved():
    with pytest.raises(
        ValueError, match="block must be one of None, 128, 32, mx of torch.float8_e4m3fn, got 64"
    ):
        overlap_gemm.reserve(max_rows=8, columns=8, dtype=torch.float8_e4m3fn, block=64)
    with pytest.raises(ValueError, match="block must be one of None of torch.bfloat16, got 128"):
        overlap_gemm.warmup(RS, (8, 8, 8), block=128)


@pytest.mark.usefixtures("no_kernels")
def test_calls_with_scales_of_blocks_get_what_the_model_says_of_them(monkeypatch, tmp_path):
    """Their kernels' own efficiencies decide, and that none of them is swapped: few rows are all-reduced."""
    kernel, known = "pingpong 64x128 1x1", load("h200")
    own = {**known.efficiencies(None), f"{kernel} b1x128x128": 0.9}
    save(replace(known, efficiency=own), tmp_path / "mine.json")
    monkeypatch.setenv(MACHINE_VARIABLE, str(tmp_path / "mine.json"))
    machine_for.cache_clear()
    weights = [torch.empty(2048, 512, dtype=E4M3)]
    chosen = []
    with Emulator("sm_90a", 2, num_sms=132) as emulator, VirtualWorld(2, emulator=emulator) as world:
        for blocks in (None, PROMOTED[0]):
            shape = ExchangeShape.even(16, 4096, 2, "reduce_scatter")
            types = ProductTypes(E4M3, None, torch.bfloat16, blocks)
            for group in world.ranks:
                scatter = plan_for(group, CPU, types, shape, "k", "k", (), 8192)
                rows = gather.plan_for(group, types, CPU, 512, weights, (), Shards.even(16, 2), False)
                chosen.append(
                    (scatter.pattern, *(efficiency_key(p.products[0].config) for p in (scatter, rows)))
                )
    machine_for.cache_clear()
    assert chosen[0] == chosen[1] and chosen[2] == chosen[3], "on every rank"
    assert chosen[0][0] == "reduce_scatter" and chosen[2][0] == "one_shot"
    assert chosen[2][1:] == (f"{kernel} b1x128x128",) * 2 and not any("b1x" in key for key in chosen[0])


def column(size, **how):
    return nn.ColumnParallelLinear(size, 4 * size, bias=False, dtype=torch.bfloat16, **how)


@pytest.mark.parametrize("rows", [64, 4096])
def test_explain_of_a_model_names_the_bytes_that_its_calls_then_hold(rows, monkeypatch):
    """Computes them before the run, by the rule of `reserve`; names an op above the limit."""
    with Emulator("sm_90a", 2) as emulator, VirtualWorld(2, emulator=emulator) as world:
        how = {"sequence_parallel": True, "tp_group": world.names[0]}
        rowwise = nn.RowParallelLinear(1024, 256, bias=False, dtype=torch.bfloat16, **how)
        model = torch.nn.Sequential(column(256, **how), rowwise)
        assert "bytes" not in str(overlap_gemm.explain(model))
        report = overlap_gemm.explain(model, max_rows=rows)
        assert overlap_gemm.workspace_bytes() == 0, "nothing is allocated"
        held = overlap_gemm.reserve(GATHER, RS, max_rows=rows, columns=256, group=world.names[0], device=CPU)
        assert report.total_bytes == held > 0
        assert list(report.symmetric_bytes) == [("0", GATHER), ("1", RS)]
        assert f"0: {GATHER} needs {held} bytes of symmetric memory" in str(report)
        assert "limit" not in str(report)
        monkeypatch.setenv("OVERLAP_GEMM_WORKSPACE_LIMIT", str(held - 1))
        lines = str(overlap_gemm.explain(model, max_rows=rows)).splitlines()
        assert lines[-1] == (
            f"all ops need {held} bytes of symmetric memory: more than the limit {held - 1} "
            "(OVERLAP_GEMM_WORKSPACE_LIMIT)"
        )
        assert [line[:2] for line in lines if "more than the limit" in line] == ["0:", "1:", "al"]
