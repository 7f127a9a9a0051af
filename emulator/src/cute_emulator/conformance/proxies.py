"""Generic and async proxy: what one wrote and the other reads or overwrites (PTX ISA 8.6, 9.7.13.4)."""

from __future__ import annotations

from typing import Any

from cute_emulator.conformance.kernel import Case, Kernel, pair
from cute_emulator.units.tma_encode import encode_tiled


def rows_map(address: int) -> bytes:
    """A map over the output: 8 rows of 32 words."""
    return encode_tiled(2, address, [32, 8], [128], [32, 8], [1, 1]).encode()


STORE = "st.shared.b32 [%r12], %r0;"
SHARED, GLOBAL = "fence.proxy.async.shared::cta;", "fence.proxy.async.global;"
INIT = "@%p0 mbarrier.init.shared.b64 [%r11], 1; @%p0 fence.mbarrier_init.release.cluster; bar.sync 0;"
AWAIT = "W: mbarrier.try_wait.parity.shared.b64 %p10, [%r11], 0; @!%p10 bra W;"
OUT = """
@%p0 cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r10], 256;
@%p0 cp.async.bulk.commit_group; @%p0 cp.async.bulk.wait_group 0;
"""
TENSOR_OUT = """
mov.b32 %r20, 0; mov.b32 %r21, 0;
@%p0 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d3, {%r20, %r21}], [%r10];
@%p0 cp.async.bulk.commit_group; @%p0 cp.async.bulk.wait_group 0;
"""
TENSOR_REDUCE = TENSOR_OUT.replace("cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor")
TENSOR_REDUCE = TENSOR_REDUCE.replace("bulk_group [", "add.tile.bulk_group [")
REDUCE_OUT = OUT.replace("cp.async.bulk.global", "cp.reduce.async.bulk.global")
REDUCE_OUT = REDUCE_OUT.replace("bulk_group [", "bulk_group.add.u32 [")
DESCRIPTOR = """
shr.u32 %r20, %r10, 4; cvt.u64.u32 %d20, %r20; or.b64 %d20, %d20, 0x4000004000010000;
"""
WGMMA = """
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %d20, %d20, 0, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
"""
TWO = {"block": (64, 1, 1)}
FOUR = {"block": (128, 1, 1)}
IN = """
@%p0 mbarrier.arrive.expect_tx.shared.b64 %d8, [%r11], 256;
@%p0 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r10], [%d0], 256, [%r11];
"""
TENSOR_IN = """
mov.b32 %r20, 0; mov.b32 %r21, 0; @%p0 mbarrier.arrive.expect_tx.shared.b64 %d8, [%r11], 1024;
@%p0 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
    [%r10], [%d3, {%r20, %r21}], [%r11];
"""
PEER_CTA = {"grid": (2, 1, 1)}
FLAG = "mov.b32 %r21, 1; @%p0 st.release.gpu.global.b32 [%d2], %r21;"
POLL = "P: ld.acquire.gpu.global.b32 %r22, [%d2]; setp.eq.b32 %p11, %r22, 0; @%p11 bra P;"


def _stores() -> list[Case]:
    """A generic store, a fence, and an async unit that reads; the fence must come after the store."""
    rule = "proxy-fence: read"
    readers: dict[str, tuple[str, str, dict[str, Any]]] = {
        "a bulk store": (OUT, SHARED, {"shape": TWO}),
        "a TMA store": (TENSOR_OUT, SHARED, {"shape": TWO, "tensor_map": rows_map}),
        "a bulk reduction": (REDUCE_OUT, SHARED, {"shape": TWO}),
        "a wgmma": (DESCRIPTOR + WGMMA, SHARED, {"shape": FOUR, "arch": "sm_90a", "buf": 8192}),
    }
    cases = []
    for what, (read, fence, how) in readers.items():
        text = INIT + f"|A| {STORE} |Z| bar.sync 0; {read}"
        for variant, words in {
            "no fence": {"|A|": "", "|Z|": ""},
            "the fence stands before the store": {"|A|": fence, "|Z|": ""},
            "the fence is of global memory": {"|A|": "", "|Z|": GLOBAL},
            "the fence is of one warp, without a barrier": {"|A|": f"@%p1 {fence}", "|Z|": ""},
        }.items():
            good = {"|A|": "", "|Z|": fence}
            cases.append(
                pair(f"{what} reads a store: {variant}", rule, "proxy-fence", text, words, good, **how)
            )
        half = INIT + f"@%p1 {STORE} |A| @%p2 {STORE} |Z| bar.sync 0; {read}"
        cases.append(
            pair(f"{what} reads two stores: the fence stands between", rule, "proxy-fence", half,
                 {"|A|": fence, "|Z|": ""}, {"|A|": "", "|Z|": fence}, **how)
        )  # fmt: skip
        loop = (
            INIT
            + f"""
        mov.b32 %r30, 0;
        L: |A| {STORE} |Z| bar.sync 0; {read} bar.sync 0;
        add.s32 %r30, %r30, 1; setp.lt.s32 %p12, %r30, 3; @%p12 bra L;
        """
        )
        cases.append(
            pair(f"{what} in a loop: the fence stands before the stores", rule, "proxy-fence", loop,
                 {"|A|": fence, "|Z|": ""}, {"|A|": "", "|Z|": fence}, **how)
        )  # fmt: skip
        late = INIT + f"{STORE} bar.sync 0; |A| {read}"
        mended = {"|A|": f"@%p0 {fence}" if "wgmma" not in what else fence}
        cases.append(
            pair(f"{what} reads a store: no fence on the reader's side", rule, "proxy-fence", late,
                 {"|A|": ""}, mended, **how)
        )  # fmt: skip
    return cases


def _global_reads() -> list[Case]:
    """The same through global memory: a store, and a bulk load that reads it."""
    rule = "proxy-fence: read"
    text = INIT + f"|A| st.global.b32 [%d10], %r0; |Z| bar.sync 0; {IN} {AWAIT}"
    good = {"|A|": "", "|Z|": GLOBAL}
    cases = [
        pair(f"a bulk load reads a store to global memory: {variant}", rule, "proxy-fence", text, words, good,
             shape=TWO)
        for variant, words in {
            "no fence": {"|A|": "", "|Z|": ""},
            "the fence stands before the store": {"|A|": GLOBAL, "|Z|": ""},
            "the fence is of shared memory": {"|A|": "", "|Z|": SHARED},
        }.items()
    ]  # fmt: skip
    across = f"""
    @!%p4 bra READ;
    |A| st.global.b32 [%d10], %r0; |Z| bar.sync 0; {FLAG} bra END;
    READ: {INIT} {POLL} |C| bar.sync 0; {IN} {AWAIT}
    END:
    """
    for variant, words in {
        "no fence": {"|A|": "", "|Z|": "", "|C|": ""},
        "the fence stands before the store": {"|A|": GLOBAL, "|Z|": "", "|C|": ""},
    }.items():
        for side in ("writer", "reader"):
            mended = {"|A|": "", "|Z|": "", "|C|": ""} | {{"writer": "|Z|", "reader": "|C|"}[side]: GLOBAL}
            cases.append(
                pair(f"a bulk load of another CTA: {variant} (mended at the {side})", rule, "proxy-fence",
                     across, words, mended, shape={**TWO, **PEER_CTA})
            )  # fmt: skip
    return cases


def _overwrites() -> list[Case]:
    """A generic store, and an async copy that writes the same place after it."""
    rule, cases = "proxy-fence: write", []
    words = {
        "no fence": {"|A|": "", "|Z|": ""},
        "the fence stands before the store": {"|A|": SHARED, "|Z|": ""},
        "the fence is of global memory": {"|A|": "", "|Z|": GLOBAL},
    }
    loads: dict[str, tuple[str, dict[str, Any]]] = {
        "a bulk load": (IN, {}),
        "a TMA load": (TENSOR_IN, {"tensor_map": rows_map}),
    }
    for what, (load, also) in loads.items():
        text = INIT + f"|A| {STORE} |Z| bar.sync 0; {load} {AWAIT} ld.shared.b32 %r20, [%r12];"
        for variant, wrong in words.items():
            name = f"{what} overwrites a store: {variant}"
            good = {"|A|": "", "|Z|": SHARED}
            cases.append(pair(name, rule, "proxy-fence", text, wrong, good, shape=TWO, **also))
    stage = f"""
    mov.b32 %r30, 0; mov.b32 %r31, 0;
    L: @%p0 mbarrier.arrive.expect_tx.shared.b64 %d8, [%r11], 256;
    @%p0 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r10], [%d0], 256, [%r11];
    W: mbarrier.try_wait.parity.shared.b64 %p10, [%r11], %r31; @!%p10 bra W; xor.b32 %r31, %r31, 1;
    ld.shared.b32 %r20, [%r12]; add.s32 %r20, %r20, 1; {STORE} |Z| bar.sync 0;
    add.s32 %r30, %r30, 1; setp.lt.s32 %p12, %r30, 3; @%p12 bra L;
    """
    cases.append(
        pair("a stage that is changed in place is filled again", rule, "proxy-fence", INIT + stage,
             {"|Z|": ""}, {"|Z|": SHARED}, shape=TWO)
    )  # fmt: skip
    writers = {"a bulk store": OUT, "a bulk reduction": REDUCE_OUT, "a TMA reduction": TENSOR_REDUCE}
    zeroes = f"mov.b32 %r20, 0; {STORE} {SHARED} |A| st.global.b32 [%d11], %r20; |Z| bar.sync 0;"
    for what, write in writers.items():
        for variant, wrong in {
            "no fence": {"|A|": "", "|Z|": ""},
            "the fence stands before the store": {"|A|": GLOBAL, "|Z|": ""},
            "the fence is of shared memory": {"|A|": "", "|Z|": SHARED},
        }.items():
            good = {"|A|": "", "|Z|": GLOBAL}
            name = f"{what} after a store of zeroes: {variant}"
            how: dict[str, Any] = {"tensor_map": rows_map} if "TMA" in what else {}
            cases.append(pair(name, rule, "proxy-fence", zeroes + write, wrong, good, shape=TWO, **how))
    across = f"""
    mov.b32 %r20, 0; {STORE} {SHARED} bar.sync 0;
    @!%p4 bra ADD;
    st.global.b32 [%d11], %r20; |Z| bar.sync 0; {FLAG} bra END;
    ADD: {POLL} |C| bar.sync 0; {REDUCE_OUT}
    END:
    """
    for side in ("writer", "reader"):
        good = {"|Z|": "", "|C|": ""} | {{"writer": "|Z|", "reader": "|C|"}[side]: GLOBAL}
        cases.append(
            pair(f"another CTA adds to zeroes that a CTA stored (mended at the {side})", rule, "proxy-fence",
                 across, {"|Z|": "", "|C|": ""}, good, shape={**TWO, **PEER_CTA})
        )  # fmt: skip
    return cases


COPIED = (
    "mul.wide.u32 %d20, %r0, 16; add.s64 %d20, %d20, %d0; shl.b32 %r21, %r0, 4; add.s32 %r21, %r21, %r10;"
)
COPIED += "cp.async.cg.shared.global [%r21], [%d20], 16; cp.async.commit_group;"


def _cp_async() -> list[Case]:
    """`cp.async` writes through the generic proxy: async units read its data after a wait and a fence."""
    rule, cases = "proxy-fence: cp.async", []
    readers: dict[str, tuple[str, dict[str, Any]]] = {
        "a bulk store": (OUT, {"shape": TWO}),
        "a wgmma": (DESCRIPTOR + WGMMA, {"shape": FOUR, "arch": "sm_90a", "buf": 8192}),
    }
    for what, (read, how) in readers.items():
        text = f"{COPIED} |A| cp.async.wait_group 0; |Z| bar.sync 0; {read}"
        for variant, wrong in {
            "no fence": {"|A|": "", "|Z|": ""},
            "the fence stands before the wait": {"|A|": SHARED, "|Z|": ""},
        }.items():
            good = {"|A|": "", "|Z|": SHARED}
            name = f"{what} reads what cp.async copied: {variant}"
            cases.append(pair(name, rule, "proxy-fence", text, wrong, good, **how))
        count = how["shape"]["block"][0]
        told = (
            INIT.replace(", 1;", f", {count};")
            + f"""
        {COPIED} cp.async.mbarrier.arrive.noinc.shared.b64 [%r11]; {AWAIT} |Z| bar.sync 0; {read}
        """
        )
        name = f"{what} reads what cp.async copied, awaited at an mbarrier: no fence"
        cases.append(pair(name, rule, "proxy-fence", told, {"|Z|": ""}, {"|Z|": SHARED}, **how))
    return cases


def _read_only() -> list[Case]:
    """`ld.global.nc` of what the same kernel writes."""
    rule, cases = "nc-load", []
    nc, plain = "ld.global.nc.b32 %r20, [%d11];", "ld.global.b32 %r20, [%d11];"
    texts: dict[str, tuple[str, dict[str, Any]]] = {
        "in one thread": ("st.global.b32 [%d11], %r0; |L|", {}),
        "after a barrier": ("@%p1 st.global.b32 [%d11], %r0; bar.sync 0; |L|", TWO),
        "after a flag": (
            f"@!%p4 bra R; st.global.b32 [%d11], %r0; bar.sync 0; {FLAG} bra E; R: {POLL} |L| E:",
            {**TWO, **PEER_CTA},
        ),
        "after a fence": ("st.global.b32 [%d11], %r0; fence.acq_rel.gpu; |L|", {}),
        "of vectors": ("st.global.b32 [%d11], %r0; bar.sync 0; |L|", TWO),
        "after an atomic": ("red.global.add.u32 [%d11], %r0; bar.sync 0; |L|", TWO),
        "after a bulk store": (f"{STORE} {SHARED} bar.sync 0; {OUT} bar.sync 0; |L|", TWO),
    }  # fmt: skip
    for variant, (text, shape) in texts.items():
        wrong, good = nc, plain
        if variant == "of vectors":
            wrong = "ld.global.nc.v2.b32 {%r20, %r21}, [%d1];"
            good = wrong.replace(".nc", "")
        name = f"ld.global.nc reads what the kernel wrote, {variant}"
        cases.append(pair(name, rule, "nc-load", text, {"|L|": wrong}, {"|L|": good}, shape=shape))
    return cases


def _maps() -> list[Case]:
    """A tensor map whose base is no multiple of 16 bytes."""

    def shifted(by: int) -> Any:
        def make(address: int) -> bytes:
            raw = bytearray(rows_map(address))
            raw[:8] = (address + by).to_bytes(8, "little")
            return bytes(raw)

        return make

    text = INIT + f"{STORE} {SHARED} bar.sync 0; {TENSOR_OUT}"
    return [
        Case(f"a tensor map that begins {by} bytes after a multiple of 16", "tensor-map base",
             ("EmulatorError",), Kernel((text,), TWO, tensor_map=shifted(by)),
             Kernel((text,), TWO, tensor_map=shifted(16)))
        for by in (2, 4, 8)
    ]  # fmt: skip


def _starts() -> list[Case]:
    """A tiled copy that begins in its row where none does: measured, not in the ISA; reductions were not."""
    copies = {
        "load": f"{TENSOR_IN} {AWAIT}",
        "store": f"{STORE} {SHARED} bar.sync 0; {TENSOR_OUT}",
        "reduction": f"{STORE} {SHARED} bar.sync 0; {TENSOR_REDUCE}",
    }
    starts = (("load", 1, 4), ("load", -2, -4), ("store", 2, 4), ("store", -4, 0),
              ("reduction", 1, 4), ("reduction", -4, 0))  # fmt: skip
    return [
        pair(f"a TMA {what} that begins at byte {4 * wrong} of a row", "tensor-copy start", "EmulatorError",
             INIT + copies[what].replace("%r20, 0;", "%r20, |C|;"), {"|C|": str(wrong)}, {"|C|": str(right)},
             shape=TWO, arch="sm_90a", tensor_map=rows_map)
        for what, wrong, right in starts
    ]  # fmt: skip


CASES = [*_stores(), *_global_reads(), *_overwrites(), *_cp_async(), *_read_only(), *_maps(), *_starts()]
