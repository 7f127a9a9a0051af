"""The mutation runner: what it breaks in a text, and what comes of it in a kernel."""

import pytest

from cute_emulator import mutate
from cute_emulator.host.emulator import Emulator

from .kernels import build
from .kernels.gemm_sm100 import GemmSm100

PTX = """
.version 8.7
.target sm_100a
.address_size 64

.visible .entry k(.param .u64 p)
{
	.reg .pred %p<4>;
	.reg .b32 %r<9>;
	.reg .b64 %rd<4>;
	ld.param.b64 %rd1, [p];
	fence.acq_rel.sys;
	@%p1 bar.sync 1, 128;
	{
	.reg .pred P1;
LAB_WAIT:
	mbarrier.try_wait.parity.shared.b64 P1, [%r1], %r2, 10000000;
	@P1 bra.uni DONE;
	bra.uni LAB_WAIT;
DONE:
	}
	{ mbarrier.arrive.shared.b64 _, [%r1]; mbarrier.arrive.shared.b64 _, [%r1+8]; }
	cp.async.bulk.wait_group 3;
	cp.async.bulk.wait_group.read
		1;
	st.release.sys.global.b32 [%rd1], %r3;
	atom.acq_rel.gpu.global.add.u32 %r4, [%rd1], 1;
$SPIN:
	ld.relaxed.sys.global.b32 %r5, [%rd1];
	setp.ne.s32 %p2, %r5, 7;
	@%p2 bra $SPIN;
	ld.acquire.sys.global.b32 %r6, [%rd1];
	ret;
}
"""

EXPECTED = {
    "fence.acq_rel.sys#0: remove": "",
    "fence.acq_rel.sys#0: .sys -> .gpu": "fence.acq_rel.gpu;",
    "bar.sync#0: remove": "",
    "mbarrier.try_wait.parity.shared.b64#0: remove": "setp.eq.u32 P1, 0, 0;",
    "mbarrier.arrive.shared.b64#0: remove": "",
    "mbarrier.arrive.shared.b64#1: remove": "",
    "cp.async.bulk.wait_group#0: remove": "",
    "cp.async.bulk.wait_group#0: wait for one group less": "cp.async.bulk.wait_group 4;",
    "cp.async.bulk.wait_group#0: full -> .read": "cp.async.bulk.wait_group.read 3;",
    "cp.async.bulk.wait_group.read#0: remove": "",
    "cp.async.bulk.wait_group.read#0: wait for one group less": "cp.async.bulk.wait_group.read 2;",
    "st.release.sys.global.b32#0: remove": "",
    "st.release.sys.global.b32#0: .sys -> .gpu": "st.release.gpu.global.b32 [%rd1], %r3;",
    "st.release.sys.global.b32#0: .release -> .relaxed": "st.relaxed.sys.global.b32 [%rd1], %r3;",
    "atom.acq_rel.gpu.global.add.u32#0: .acq_rel -> .relaxed": (
        "atom.relaxed.gpu.global.add.u32 %r4, [%rd1], 1;"
    ),
    "ld.relaxed.sys.global.b32#0: .sys -> .gpu": "ld.relaxed.gpu.global.b32 %r5, [%rd1];",
    "bra#0: leave the spin loop at once": "",
    "ld.acquire.sys.global.b32#0: .sys -> .gpu": "ld.acquire.gpu.global.b32 %r6, [%rd1];",
    "ld.acquire.sys.global.b32#0: .acquire -> .relaxed": "ld.relaxed.sys.global.b32 %r6, [%rd1];",
}


def test_enumerates_every_operation_and_how_it_breaks():
    found = mutate.enumerate_mutations(PTX)
    assert {m.key: m.replacement for m in found} == EXPECTED
    assert len(found) == len(EXPECTED)


@pytest.mark.parametrize("key", EXPECTED)
def test_apply_changes_that_statement_and_no_other(key):
    mutation = next(m for m in mutate.enumerate_mutations(PTX) if m.key == key)
    before, after = PTX.splitlines(), mutate.apply(PTX, mutation).splitlines()
    assert len(before) == len(after)
    changed = [i for i, pair in enumerate(zip(before, after, strict=True), 1) if pair[0] != pair[1]]
    assert changed[0] == mutation.line and changed[-1] - changed[0] <= 1


def test_guards_stay():
    mutation = next(m for m in mutate.enumerate_mutations(PTX) if m.opcode == "bar.sync")
    assert PTX[mutation.start : mutation.end] == "@%p1 bar.sync 1, 128;"


def make_check(gemm, m, n, k, num_clusters):
    with Emulator(gemm.arch):
        compiled = build.compile_gemm(gemm)
    a, b, c = build.operands(gemm, m, n, k)
    want, scale = a.float() @ b.float().t(), a.float().abs() @ b.float().abs().t()

    def check(options):
        c.fill_(float("nan"))
        with Emulator(gemm.arch, **options):
            build.call(compiled, gemm, (a, b, c), num_clusters)
        assert ((c.float() - want).abs() <= 2**-7 * scale + 1e-3).all()

    return check


@pytest.fixture(scope="module")
def check(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUTE_DSL_DUMP_DIR", str(tmp_path_factory.mktemp("dump")))
        yield make_check(GemmSm100(stages=2, tile=(128, 32)), 250, 60, 264, 1)


def test_run_detects_and_says_how(check):
    outcomes = mutate.run(check, mutate.settings(seeds=0), select="fence.proxy.async*#0: remove")
    (outcome,) = outcomes
    assert outcome.verdict == "detected" and outcome.tried == 1
    assert outcome.detections[0][1] == "finding: proxy-fence" and "proxy-fence" in str(outcome)


def test_run_explains_what_goes_undetected(check):
    reasons = {"cp.async.bulk.wait_group#0: full*": "the end of the kernel completes the writes"}
    select = "cp.async.bulk.wait_group#0: full*"
    (outcome,) = mutate.run(check, mutate.settings(seeds=0), select=select, reasons=reasons)
    assert (outcome.verdict, outcome.tried, outcome.reached) == ("explained", 7, True)
    (outcome,) = mutate.run(check, mutate.settings(seeds=0)[:1], select=select)
    assert outcome.verdict == "NOT DETECTED"


def test_run_needs_a_check_that_passes_and_launches():
    def wrong(options):
        raise AssertionError("wrong before anything was mutated")

    with pytest.raises(AssertionError, match="before anything"):
        mutate.run(wrong, mutate.settings(seeds=0))
    with pytest.raises(ValueError, match="no kernel"):
        mutate.run(lambda options: None, mutate.settings(seeds=0))


def test_settings_cover_modes_seeds_ranks_and_warps():
    found = mutate.settings(seeds=1, ranks=2, warps=3)
    assert len(set(found)) == len(found) == 3 + 3 + 4 + 4 + 6
    starved = [s for s in found if s.starved_warp == 2][0].options()["schedule"].starved
    assert starved(0, (0, 0, 0), 2) and not starved(0, (0, 0, 0), 1)
    starved = [s for s in found if s.starved_cta == 1][0].options()["schedule"].starved
    assert starved(0, (3, 2, 0), 0) and not starved(0, (1, 1, 0), 0)
    assert [s for s in found if s.starved_rank == 1][0].options()["schedule"].starved(1, (0, 0, 0), 0)
    assert str(found[-1]) == "lazy 0, warp 2 starved"
