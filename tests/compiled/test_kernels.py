"""Every configuration compiles, synchronises as the protocol says, and neither spills nor serialises."""

import dataclasses

import pytest

from overlap_gemm.kernels.config import CLUSTERS, MMA_KINDS, TILES, GemmConfig
from overlap_gemm.kernels.lint import find_ptxas, ptx_findings, ptxas_findings, run_ptxas
from overlap_gemm.tuning.space import every_config

needs_ptxas = pytest.mark.skipif(find_ptxas() is None, reason="ptxas is not on PATH")

SHAPES = [config for arch in ("sm_90a", "sm_100a") for config in every_config(arch)]
SMALLEST = [
    GemmConfig(arch=arch, mma=mma, tile=TILES[mma][0], cluster=CLUSTERS[mma][0])
    for arch in ("sm_90a", "sm_100a")
    for mma in MMA_KINDS[arch]
]
LARGEST = [
    GemmConfig(arch=arch, mma=mma, tile=TILES[mma][-1], cluster=CLUSTERS[mma][0])
    for arch in ("sm_90a", "sm_100a")
    for mma in MMA_KINDS[arch]
]
VARIANTS = [
    {"a_major": "m", "b_major": "n"},
    {"a_major": "m"},
    {"b_major": "n"},
    {"bias": True},
    {"out_dtype": "f32"},
    {"slot_dtype": "f32"},
    {"out_dtype": "f32", "slot_dtype": "f32", "bias": True},
    {"in_dtype": "f16", "out_dtype": "f16", "slot_dtype": "f16"},
    {"ring_stages": 6, "inflight": 5},
]


def fits(config, variant):
    try:
        return dataclasses.replace(config, **variant)
    except ValueError:
        return None


QUICK = SMALLEST + [c for base, v in zip(SMALLEST * 2, VARIANTS, strict=False) if (c := fits(base, v))]
EVERY = [c for c in SHAPES if c not in QUICK] + [
    c for base in LARGEST for v in VARIANTS if (c := fits(base, v)) and c not in QUICK
]


def test_variants_fit():
    for base in SMALLEST:
        refused = [v for v in VARIANTS if not fits(base, v)]
        wide = [v for v in VARIANTS if "f32" in v.values()]
        assert refused == (wide if base.mma == "swapped" else []), base.name


@pytest.mark.parametrize(
    "config", QUICK + [pytest.param(c, marks=pytest.mark.slow) for c in EVERY], ids=lambda c: c.name
)
def test_reduce_scatter_compiles_and_is_clean(config, ptx_of):
    is_clean(config, ptx_of(config, "reduce_scatter"))


@pytest.mark.parametrize(
    "config",
    [pytest.param(c, marks=pytest.mark.slow) for c in SMALLEST + EVERY if c.slot_dtype == c.out_dtype],
    ids=lambda c: c.name,
)
def test_output_gather_compiles_and_is_clean(config, ptx_of):
    is_clean(config, ptx_of(config, "output_gather"))


@pytest.mark.parametrize(
    "config", [pytest.param(c, marks=pytest.mark.slow) for c in QUICK + EVERY], ids=lambda c: c.name
)
@pytest.mark.parametrize("pattern", ["one_shot", "two_shot"])
def test_all_reduce_compiles_and_is_clean(config, pattern, ptx_of):
    is_clean(config, ptx_of(config, pattern))


def is_clean(config, ptx):
    assert ptx_findings(ptx, exchanges=True) == []
    if find_ptxas():
        assert ptxas_findings(run_ptxas(ptx, config.arch)) == []


@pytest.mark.parametrize(
    "config",
    SMALLEST + [pytest.param(c, marks=pytest.mark.slow) for c in LARGEST],
    ids=lambda c: c.name,
)
def test_plain_gemm_pays_nothing_for_communication(config, ptx_of):
    ptx = ptx_of(config, None)
    assert ptx_findings(ptx, exchanges=False) == []
    for word in (".sys", "globaltimer", "trap", "atom.", "cp.async.bulk.global.shared"):
        assert word not in ptx
    if find_ptxas():
        plain = run_ptxas(ptx, config.arch)
        fused = run_ptxas(ptx_of(config, "reduce_scatter"), config.arch)
        assert ptxas_findings(plain) == []
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
def test_lint_notices(config, broken, finding, ptx_of):
    ptx = ptx_of(config, "reduce_scatter")
    assert broken(ptx) != ptx
    assert any(finding in f for f in ptx_findings(broken(ptx), exchanges=True))


@needs_ptxas
def test_ptxas_report_notices_spills(ptx_of):
    ptx = ptx_of(SMALLEST[-1], "reduce_scatter").replace(".reqntid", ".maxnreg 56\n.reqntid")
    findings = ptxas_findings(run_ptxas(ptx, "sm_100a"))
    assert any("spilled" in f for f in findings)
