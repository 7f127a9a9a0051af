"""Every configuration compiles, synchronises as the protocol says, and neither spills nor serialises."""

import dataclasses
import re
from functools import partial
from types import SimpleNamespace

import pytest
from cutlass import cute

from overlap_gemm.build import compile_kernel, make_gather_kernel, make_kernel
from overlap_gemm.config.arch import ARCHS
from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.config.visitors import SCALES, Visitor, bias_of
from overlap_gemm.epilogues import (
    add_residual_rms_norm,
    add_residual_rms_norm_e4m3,
    add_residual_squared,
    apply_gelu,
    geglu,
    swiglu,
)
from overlap_gemm.gather.all_gather import ArrivalGate
from overlap_gemm.kernel import split
from overlap_gemm.transports import LL, PeerBulk
from overlap_gemm.tuning.space import every_config
from overlap_gemm_tools.lint import inspect, ptx_findings, ptxas_findings, report_of

SHAPES = [config for arch in ("sm_90a", "sm_100a") for config in every_config(arch)]
SMALLEST = [
    GemmConfig(arch=arch, mma=mma, tile=kind.tiles[0], cluster=kind.clusters[0])
    for arch in ("sm_90a", "sm_100a")
    for mma, kind in ARCHS[arch].mma.items()
]
LARGEST = [
    GemmConfig(arch=arch, mma=mma, tile=kind.tiles[-1], cluster=kind.clusters[0])
    for arch in ("sm_90a", "sm_100a")
    for mma, kind in ARCHS[arch].mma.items()
]
VARIANTS = [
    {"a_major": "m", "b_major": "n"},
    {"a_major": "m"},
    {"b_major": "n"},
    {"epilogue": (bias_of("bf16"),)},
    {"out_dtype": "f32"},
    {"slot_dtype": "f32"},
    {"out_dtype": "f32", "slot_dtype": "f32", "epilogue": (bias_of("bf16"),)},
    {"in_dtype": "f16", "out_dtype": "f16", "slot_dtype": "f16"},
    {"ring_stages": 6, "inflight": 5},
]


def fits(config, variant):
    try:
        return dataclasses.replace(config, **variant)
    except ValueError:
        return None


VARIED = [c for base, v in zip(SMALLEST * 2, VARIANTS, strict=False) if (c := fits(base, v))]
QUICK = SMALLEST + VARIED[::5]
EVERY = [c for c in SHAPES + VARIED if c not in QUICK] + [
    c for base in LARGEST for v in VARIANTS if (c := fits(base, v)) and c not in QUICK + VARIED
]


def test_variants_fit():
    for base in SMALLEST:
        refused = [v for v in VARIANTS if not fits(base, v)]
        wide = [v for v in VARIANTS if "f32" in v.values()]
        assert refused == (wide if base.mma == "swap_ab" else []), base.name


@pytest.mark.parametrize(
    "config", QUICK + [pytest.param(c, marks=pytest.mark.slow) for c in EVERY], ids=lambda c: c.name
)
def test_reduce_scatter_compiles_and_is_clean(config, compiled):
    is_clean(compiled(config, "reduce_scatter"))


@pytest.mark.parametrize(
    "config",
    [pytest.param(c, marks=pytest.mark.slow) for c in SMALLEST + EVERY if c.slot_dtype == c.out_dtype],
    ids=lambda c: c.name,
)
def test_output_gather_compiles_and_is_clean(config, compiled):
    is_clean(compiled(config, "output_gather"))


@pytest.mark.parametrize(
    "config", [pytest.param(c, marks=pytest.mark.slow) for c in QUICK + EVERY], ids=lambda c: c.name
)
@pytest.mark.parametrize("pattern", ["one_shot", "two_shot"])
def test_all_reduce_compiles_and_is_clean(config, pattern, compiled):
    is_clean(compiled(config, pattern))


WITH_EPILOGUES = [
    pytest.param(base, one, marks=[] if (number + place) % 4 == 0 else pytest.mark.slow)
    for number, base in enumerate(LARGEST)
    for place, one in enumerate((add_residual_squared, swiglu, geglu, apply_gelu))
    if not (base.mma == "swap_ab" and one.pairs)
]


@pytest.mark.parametrize(("config", "one"), WITH_EPILOGUES, ids=lambda given: given.name)
def test_epilogues_compile_and_are_clean(config, one):
    """In the largest tiles, which have the fewest registers: nothing spills, no function is a call."""
    config = dataclasses.replace(config, epilogue=(Visitor(one, ("bf16",) * len(one.inputs)),))
    kernel = make_kernel(config, PeerBulk()) if one.outputs else make_gather_kernel(config, PeerBulk())
    seen = inspect(partial(compile_kernel, kernel))
    assert seen.findings(exchanges=True) == []
    assert re.search(r"^\s*call\b", seen.ptx, re.MULTILINE) is None


PACKETS = GemmConfig("sm_90a", (16, 64), mma="swap_ab", k_split=2)


@pytest.mark.parametrize(
    ("config", "one"),
    [
        *(
            pytest.param(base, add_residual_rms_norm, marks=[] if base.is_swap_ab else pytest.mark.slow)
            for base in (*LARGEST, PACKETS)
        ),
        *((base, add_residual_rms_norm_e4m3) for base in (*LARGEST[2:3], PACKETS)),
        *(
            pytest.param(base, add_residual_rms_norm_e4m3, marks=pytest.mark.slow)
            for base in (*LARGEST[:2], LARGEST[-1])
        ),
    ],
    ids=lambda one: one.name,
)
def test_norms_of_complete_rows_compile_and_are_clean(config, one):
    """Checks kernels with packets for the tiles that use these."""
    config = dataclasses.replace(config, epilogue=(Visitor(one, ("bf16", "bf16", "f32", "bf16")),))
    transport = LL() if config.is_swap_ab and config.tile[0] <= 64 else PeerBulk()
    kernel = make_kernel(config, transport, pattern="one_shot")
    seen = inspect(partial(compile_kernel, kernel))
    assert seen.findings(exchanges=True) == []
    assert re.search(r"^\s*call\b", seen.ptx, re.MULTILINE) is None


def is_clean(seen):
    assert seen.findings(exchanges=True) == []


@pytest.mark.parametrize(
    "config",
    SMALLEST[::2] + [pytest.param(c, marks=pytest.mark.slow) for c in SMALLEST[1::2] + LARGEST],
    ids=lambda c: c.name,
)
def test_plain_gemm_pays_nothing_for_communication(config, compiled):
    seen, fused = compiled(config, None), compiled(config, "reduce_scatter").report
    ptx, plain = seen.ptx, seen.report
    assert seen.findings(exchanges=False) == []
    for word in (".sys", "globaltimer", "trap", "atom.", "cp.async.bulk.global.shared"):
        assert word not in ptx
    assert plain.registers <= fused.registers
    assert plain.barriers == fused.barriers <= 2, "the epilogue needs no named barrier"


@pytest.mark.parametrize("config", SMALLEST, ids=lambda c: c.name)
@pytest.mark.parametrize(
    ("broken", "finding"),
    [
        (lambda p: p.replace("st.release.sys", "st.release.gpu"), "a peer needs .sys"),
        (lambda p: p.replace("bulk.wait_group \t", "bulk.wait_group.read \t"), "wait_group.read"),
        (lambda p: "\n".join(x for x in p.splitlines() if "bulk.wait_group" not in x), "without a full wait"),
        (lambda p: p.replace("ld.acquire.sys", "ld.relaxed.sys"), "acquires"),
        (lambda p: p.replace("trap;", ""), "bounds"),
        (
            lambda p: p.replace(
                "cp.async.bulk.wait_group", "elect.sync %r1|%p1, -1;\n cp.async.bulk.wait_group"
            ),
            "elect.sync",
        ),
    ],
)
def test_lint_notices(config, broken, finding, compiled):
    ptx = compiled(config, "reduce_scatter").ptx
    assert broken(ptx) != ptx
    assert any(finding in f for f in ptx_findings(broken(ptx), exchanges=True))


GATHERS = [(True, True, False), (True, True, True), (False, False, False)]
"""(push, keep, joins) of all-gather GEMMs."""


@pytest.mark.parametrize(
    "config",
    [c if c.mma in ("cooperative", "2cta") else pytest.param(c, marks=pytest.mark.slow) for c in SMALLEST],
    ids=lambda c: c.name,
)
@pytest.mark.parametrize(
    ("push", "keep", "joins"),
    [GATHERS[0], *(pytest.param(*one, marks=pytest.mark.slow) for one in GATHERS[1:])],
)
def test_gather_compiles_and_is_clean(config, push, keep, joins):
    """By default what test_figures.py does not compile."""
    kernel = make_gather_kernel(config, PeerBulk(), push=push, keep=keep, cooperative=True, joins=joins)
    is_clean(inspect(partial(compile_kernel, kernel)))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_all_lanes_are_after_what_the_last_of_the_grid_has_seen(arch):
    """It counts by one lane, and all of them raise flags at their peers: a shuffle orders no memory."""
    config = next(c for c in SMALLEST if c.arch == arch)
    kernel = make_gather_kernel(config, PeerBulk(), push=True, keep=True, cooperative=True)
    ptx = inspect(partial(compile_kernel, kernel)).ptx
    lines = ptx.splitlines()
    counts = [
        i
        for i, line in enumerate(lines)
        if "shfl.sync" in line and any("atom.global.acq_rel" in near for near in lines[i - 12 : i])
    ]
    assert len(counts) >= 2, "those who have sent, and those who have read"
    for i in counts:
        barrier = next(n for n in range(i, len(lines)) if "bar.warp.sync" in lines[n])
        without = "\n".join(lines[:barrier] + lines[barrier + 1 :])
        assert any("no bar.warp.sync" in finding for finding in ptx_findings(without, exchanges=True))


def test_who_reads_gathered_scales_acquires_them(monkeypatch):
    """No run tells: the load warp has acquired the same shard, and an emulated load sees all stores."""
    scaled = (SCALES,)
    config = GemmConfig("sm_90a", (64, 128), mma="pingpong", in_dtype="e4m3", epilogue=scaled)

    def acquires():
        kernel = make_gather_kernel(config, PeerBulk())
        return inspect(partial(compile_kernel, kernel)).ptx.count("ld.acquire.sys")

    found = acquires()
    monkeypatch.setattr(ArrivalGate, "open", lambda self, call, shard, opened: opened)
    assert found - acquires() == 2, "a peer's entry, and its shard"


@pytest.mark.parametrize("parts", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_parts_of_k_wait_for_their_clusters_stores(parts, monkeypatch):
    """Other CTAs of the cluster store and release: who waits for them acquires at their scope."""
    config = GemmConfig(arch="sm_90a", mma="swap_ab", tile=(16, 64), k_split=parts)

    def at_cluster_scope():
        ptx = inspect(partial(compile_kernel, make_kernel(config, PeerBulk(), pattern="reduce_scatter"))).ptx
        return [sum(word in line for line in ptx.splitlines()) for word in (WAIT, ARRIVE)]

    assert at_cluster_scope() == [2, parts], "full and empty; the first part frees every other's"
    monkeypatch.setattr(split, "_wait", cute.arch.mbarrier_wait)
    assert at_cluster_scope() == [0, parts]


WAIT, ARRIVE = "mbarrier.try_wait.parity.acquire.cluster", "mbarrier.arrive.release.cluster"


def test_the_report_is_of_the_assembler_that_made_the_code():
    """What the DSL's own is told, it does: without optimisation the registers are others."""
    build = partial(compile_kernel, make_kernel(SMALLEST[-1], PeerBulk()))
    told, plain = (inspect(build, options).report for options in ("--ptxas-options -O0", ""))
    assert told.registers != plain.registers


def test_spills_and_warnings_are_read():
    text = """
    ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
    ptxas         .     16 bytes stack frame, 24 bytes spill stores, 16 bytes spill loads
    ptxas info    : Used 168 registers, used 2 barriers"""
    report = report_of(text)
    assert (report.registers, report.barriers, report.stack_bytes, report.spill_bytes) == (168, 2, 16, 40)
    serialised, spilled = ptxas_findings(report)
    assert serialised.startswith("(C7510)") and "40 bytes spilled" in spilled


def test_a_dsl_that_gives_no_report_is_an_error():
    with pytest.raises(RuntimeError, match="no report of its ptxas"):
        inspect(lambda options: SimpleNamespace(__ptx__=""))
