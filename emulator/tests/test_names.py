"""Literals, names and their scopes, initialisers, call parameters: what the text of a module says."""

import struct

import numpy as np
import pytest

from cute_emulator.errors import EmulatorError, UnsupportedInstruction
from cute_emulator.execution.launch import Launch
from cute_emulator.ptx.parse import PtxSyntaxError, parse

from .handwritten import REGISTERS, machine, module, per_lane, run

HEAD = ".version 8.8\n.target sm_100a\n.address_size 64\n"
LANE = np.arange(32, dtype=np.uint32)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("017", 15), ("0", 0), ("0x1F", 31), ("0X1fU", 31), ("0b101", 5), ("-1", -1), ("-010", -8), ("7U", 7),
        ("+3", 3), ("4294967295", 4294967295),
    ],
)  # fmt: skip
def test_integer_literals(text, want):
    out = np.zeros(1, np.uint64)
    run(f"mov.u64 %d1, {text}; st.global.b64 [%d0], %d1;", [out])
    assert out[0] == want % 2**64
    out = np.zeros(1, np.uint64)  # as an immediate of a store, which has no register to cut it
    run(f"st.global.b64 [%d0], {text};", [out])
    assert out[0] == want % 2**64


@pytest.mark.parametrize(
    ("kind", "text", "want"),
    [
        ("f32", "1.5", 0x3FC00000), ("f32", "0f3FC00000", 0x3FC00000),
        ("f32", "0d3FF8000000000000", 0x3FC00000),
        ("f32", "-2.5e1", 0xC1C80000), ("f32", "-0f3F800000", 0xBF800000), ("f64", "1.5", 0x3FF8000000000000),
        ("f64", "0d3FF8000000000000", 0x3FF8000000000000), ("f32", "1e-3", 0x3A83126F),
        ("b32", "0F7F800000", 0x7F800000),
    ],
)  # fmt: skip
def test_float_literals_take_the_size_of_the_instruction(kind, text, want):
    size = int(kind[1:])
    for body in (
        f"mov.{kind} %x1, {text}; st.global.b{size} [%d0], %x1;",
        f"st.global.{kind} [%d0], {text};",
    ):
        out = np.zeros(1, np.uint64)
        run(body.replace("%x", "%f" if size == 32 else "%g"), [out])
        assert out[0] == want, body
    if kind == "f32":
        out = np.zeros(2, np.uint32)
        raw = np.zeros(4, np.uint32)
        at = -raw.ctypes.data % 8 // 4
        out = raw[at : at + 2]
        run(f"mov.f32 %f2, 0f40000000; st.global.v2.f32 [%d0], {{{text}, %f2}};", [out])
        assert out.tolist() == [want, 0x40000000]
        cell = np.float32([2])
        run(f"mov.u32 %r0, %tid.x; setp.eq.u32 %p0, %r0, 3; @%p0 red.global.add.f32 [%d0], {text};", [cell])
        assert cell[0] == np.float32(2) + np.uint32([want]).view(np.float32)[0]


def test_offsets_in_every_notation():
    data = np.arange(64, dtype=np.uint32)
    for text, want in (
        ("%d2+8", 34),
        ("%d2 + 0x10", 36),
        ("%d2-4", 31),
        ("%d2+-8", 30),
        ("%d2+010", 34),
        ("%d2+4U", 33),
    ):
        out = np.zeros(1, np.uint32)
        run(f"add.s64 %d2, %d1, 128; ld.global.b32 %r1, [{text}]; st.global.b32 [%d0], %r1;", [out, data])
        assert out[0] == want, text
    out = np.zeros(2, np.uint32)
    body = "mov.b32 %r1, table+0x8; ld.shared.b32 %r2, [%r1]; ld.shared.b32 %r3, [table+010];"
    body = f"mov.b32 %r9, 77; st.shared.b32 [table+8], %r9; {body} st.global.b32 [%d0], %r2;"
    body += "st.global.b32 [%d0+4], %r3;"
    run(body, [out], smem=".shared .align 4 .b8 table[16];")
    assert out.tolist() == [77, 77]


def test_the_size_of_a_warp_is_a_name():
    got = per_lane(
        "mov.u32 %r1, WARP_SZ; mad.lo.u32 %r2, %r0, WARP_SZ, %r1;", [LANE], np.uint32, "%r2", "b32"
    )
    np.testing.assert_array_equal(got, 32 * LANE + 32)


def test_a_special_register_is_cut_to_its_register():
    text = "mov.u16 %h1, %tid.x; sub.u16 %h2, %h1, 5; setp.lt.s16 %p1, %h2, 0; selp.b32 %r9, 1, 0, %p1;"
    np.testing.assert_array_equal(per_lane(text, [LANE], np.uint32, "%r9", "b32"), LANE < 5)


def test_initialisers():
    head = """
    .global .align 4 .u32 octal[3] = {017, 0x10, 3U};
    .global .align 4 .f32 floats[4] = {1.5, 0f40000000, 0d3FF0000000000000, 0};
    .global .align 8 .f64 doubles[2] = {0f3FC00000, -2.5};
    .const .align 2 .s16 nested[2][2] = {{-1, 2}, {3, 4}};
    .global .align 8 .u64 pointer = generic(octal);
    .global .align 4 .u32 rest[4] = {9};
    """
    out = np.zeros(16, np.uint64)
    body = "".join(
        f"ld.{space}.{kind} %d9, [{name}+{at}]; st.global.b64 [%d0+{8 * n}], %d9;\n"
        for n, (space, kind, name, at) in enumerate(
            [("global", "u32", "octal", 4 * k) for k in range(3)]
            + [("global", "b32", "floats", 4 * k) for k in range(4)]
            + [("global", "b64", "doubles", 8 * k) for k in range(2)]
            + [("const", "s16", "nested", 2 * k) for k in range(4)]
            + [("global", "u32", "rest", 4 * k) for k in range(2)]
        )
    )
    body += "ld.global.b64 %d8, [pointer]; ld.u32 %d9, [%d8+4]; st.global.b64 [%d0+120], %d9;"
    run(body, [out], head=head)
    singles = [struct.unpack("<I", struct.pack("<f", v))[0] for v in (1.5, 2, 1, 0)]
    doubles = [struct.unpack("<Q", struct.pack("<d", v))[0] for v in (1.5, -2.5)]
    assert out.tolist() == [15, 16, 3, *singles, *doubles, 2**64 - 1, 2, 3, 4, 9, 0, 16]


@pytest.mark.parametrize(
    "text", ["b32 x[2] = {1, 2, 3}", "b32 x[2][2] = {{1}, {2}}", "b32 x = 3$", "f32 x = 1", "f16 x = 1.5"]
)
def test_an_initialiser_that_does_not_fit_is_an_error_with_its_line(text):
    with pytest.raises(PtxSyntaxError, match="line 4: "):
        parse(f"{HEAD}.global .align 4 .{text};\n.visible .entry k() {{ ret; }}\n")


def test_a_name_that_no_literal_and_no_symbol_is():
    with pytest.raises(PtxSyntaxError, match="line .*'08'"):
        run("mov.b32 %r1, 08;", [np.zeros(1, np.uint32)])


# -- scopes ----------------------------------------------------------------------------------------


def test_variables_of_scopes_with_one_name_lie_apart():
    for space, end in (("shared", 16), ("local", 16)):
        block = "{{ .{space} .align 4 .b32 x; {act} }}\n"
        body = block.format(
            space=space,
            act=f"st.{space}.b32 [x], 5; {{ .{space} .align 4 .b32 x; st.{space}.b32 [x], 6; }} "
            f"ld.{space}.b32 %r1, [x];",
        )
        body += block.format(space=space, act=f"st.{space}.b32 [x], 7; ld.{space}.b32 %r2, [x];")
        out = np.zeros(2, np.uint32)
        run(body + "st.global.b32 [%d0], %r1; st.global.b32 [%d0+4], %r2;", [out])
        assert out.tolist() == [5, 7], (space, end)


OTHER = """.visible .entry other() {{ .reg .b32 %r<9>; .shared .align 4 .b8 cell[4096];
mov.b32 %r1, 1; st.shared.b32 [cell], %r1; ret; }}\n"""


def test_shared_memory_is_that_of_the_entry_and_its_functions():
    """Kernels of a module repeat names; each has its own variables alone."""
    out = np.zeros(2, np.uint32)
    body = "mov.u32 %r2, %total_smem_size; st.shared.b32 [cell], %r2; st.global.b32 [%d0], %r2;"
    run(body, [out], smem=".shared .align 4 .b8 cell[64];", head=OTHER.format())
    assert out[0] == 64
    with pytest.raises(EmulatorError, match="shared memory overflow|beyond|out of"):
        run("st.shared.b32 [cell+64], 3;", [out], smem=".shared .align 4 .b8 cell[64];", head=OTHER.format())


def test_branch_tables_of_scopes_with_one_name():
    block = """{{ .reg .b32 k; mov.b32 k, %r0;
    ts: .branchtargets A, B, C;
    brx.idx k, ts;
    A: add.u32 %r9, %r9, {0}; bra.uni E;
    B: add.u32 %r9, %r9, {1}; bra.uni E;
    C: add.u32 %r9, %r9, {2};
    E: }}\n"""
    body = "mov.b32 %r9, 0;" + block.format(1, 10, 100) + block.format(2, 20, 200)
    which = LANE % 3
    got = per_lane(body, [which], np.uint32, "%r9", "b32")
    np.testing.assert_array_equal(got, 3 * 10**which)


# -- calls -----------------------------------------------------------------------------------------

NARROW = """
.func (.param .b32 back) widen(.param .b8 a, .param .b16 b) {
.reg .b16 %h<4>; .reg .b32 %r<4>;
ld.param.s8 %r0, [a]; ld.param.u8 %h1, [a]; ld.param.s16 %r1, [b]; cvt.u32.u16 %r2, %h1;
mad.lo.s32 %r3, %r0, 1000, %r1; mad.lo.s32 %r3, %r2, 1000000, %r3;
st.param.b32 [back], %r3; ret; }
"""


@pytest.mark.parametrize("uniform", [False, True])
def test_narrow_parameters_are_cut_and_extended(uniform):
    x = LANE * 0x01010101 + 0x1F0 if not uniform else np.full(32, 0x1234F0F1, np.uint32)
    load = "" if not uniform else "mov.b32 %r0, 0x1234F0F1;"
    body = (
        load
        + """cvt.u16.u32 %h1, %r0;
    { .param .b8 p; st.param.b8 [p], %h1; .param .b16 q; st.param.b16 [q], %h1; .param .b32 r;
    call.uni (r), widen, (p, q); ld.param.b32 %r9, [r]; }"""
    )
    got = per_lane_with(NARROW, body, x)
    low, word = x.astype(np.uint8), x.astype(np.uint16)
    want = low.view(np.int8).astype(np.int64) * 1000 + word.view(np.int16) + low.astype(np.int64) * 1000000
    np.testing.assert_array_equal(got, (want & 0xFFFFFFFF).astype(np.uint32))


def test_a_parameter_keeps_nothing_of_a_wider_register():
    head = """.func (.param .b32 r) small(.param .b16 a) { .reg .b16 %h<2>; .reg .b32 %r<2>; .reg .pred %p<2>;
    ld.param.b16 %h1, [a]; setp.lt.u16 %p1, %h1, 256; selp.b32 %r1, 1, 0, %p1;
    st.param.b32 [r], %r1; ret; }"""
    body = """{ .param .b16 p; .param .b32 q; st.param.b16 [p], %r0; call.uni (q), small, (p);
    ld.param.b32 %r9, [q]; }"""
    x = LANE * 0x10000 + LANE * 16
    np.testing.assert_array_equal(per_lane_with(head, body, x), LANE < 16)


def per_lane_with(head, body, x):
    out = np.zeros(32, np.uint32)
    text = "mov.u32 %r63, %tid.x; mul.wide.u32 %d31, %r63, 4; add.s64 %d30, %d1, %d31;"
    text += "ld.global.b32 %r0, [%d30];\n"
    run(f"{text}{body}\nadd.s64 %d30, %d0, %d31; st.global.b32 [%d30], %r9;", [out, x], head=head)
    return out


def test_a_guarded_parameter_keeps_what_other_lanes_stored():
    head = """.func (.param .b32 r) twice(.param .b32 a) { .reg .b32 %r<3>;
    ld.param.b32 %r1, [a]; add.u32 %r1, %r1, %r1; st.param.b32 [r], %r1; ret; }"""
    body = """setp.lt.u32 %p1, %r0, 7; mov.b32 %r2, 100;
    { .param .b32 p; .param .b32 q; st.param.b32 [p], %r0; @%p1 st.param.b32 [p], %r2;
    call.uni (q), twice, (p); ld.param.b32 %r9, [q]; }"""
    np.testing.assert_array_equal(per_lane_with(head, body, LANE), np.where(LANE < 7, 200, 2 * LANE))


def test_a_function_that_calls_itself_is_refused():
    call = "{{ .param .b32 p; .param .b32 q; st.param.b32 [p], {0}; "
    call += "call.uni (q), {1}, (p); ld.param.b32 {0}, [q]; }}"
    head = (
        ".func (.param .b32 r) even(.param .b32 a);\n"
        ".func (.param .b32 r) odd(.param .b32 a) { .reg .b32 %r<3>; .reg .pred %p<2>; ld.param.b32 %r1, [a];"
        " setp.eq.u32 %p1, %r1, 0; @%p1 bra Z; sub.u32 %r1, %r1, 1;"
        + call.format("%r1", "even")
        + " Z: st.param.b32 [r], %r1; ret; }\n"
    )
    head += (
        head[head.index(".func (.param .b32 r) odd") :].replace("odd(", "even(").replace(", even,", ", odd,")
    )
    with pytest.raises(EmulatorError, match="odd calls itself"):
        per_lane_with(head, call.format("%r0", "odd") + "mov.b32 %r9, %r0;", LANE)
    np.testing.assert_array_equal(  # twice, one after the other, is no recursion
        per_lane_with(head, "mov.b32 %r0, 1;" + 2 * call.format("%r0", "odd") + "mov.b32 %r9, %r0;", LANE),
        0 * LANE,
    )


def test_generic_addresses_of_a_peer_are_not_of_this_cta():
    out = np.zeros(8, np.uint32)
    body = """
    mov.u32 %r0, %cluster_ctarank; mov.u32 %r1, %tid.x; setp.ne.u32 %p0, %r1, 0; @%p0 bra END;
    cvta.shared.u64 %d1, cell; xor.b32 %r2, %r0, 1; mapa.u64 %d2, %d1, %r2;
    isspacep.shared %p1, %d1; isspacep.shared %p2, %d2;
    isspacep.shared::cta %p3, %d2; isspacep.shared::cluster %p4, %d2;
    isspacep.global %p5, %d0; isspacep.global %p6, %d2; getctarank.u64 %r8, %d2;
    mov.b32 %r9, %r8; shl.b32 %r9, %r9, 1;
    """
    for n in range(1, 7):
        body += f"selp.b32 %r3, 1, 0, %p{n}; shl.b32 %r9, %r9, 1; or.b32 %r9, %r9, %r3;\n"
    body += "mul.wide.u32 %d5, %r0, 4; add.s64 %d5, %d5, %d0; st.global.b32 [%d5], %r9;"
    body += "END: barrier.cluster.arrive; barrier.cluster.wait;"
    run(body, [out], smem=".shared .align 4 .b8 cell[16];", grid=(2, 1, 1), cluster=(2, 1, 1))
    assert out[:2].tolist() == [1 << 7 | 0b100110, 0b100110]


@pytest.mark.parametrize("cut", ["", "cvt.u32.u64 %r1, %d2; cvt.u64.u32 %d2, %r1;"])
def test_generic_addresses_of_parameters_and_constants(cut):
    """LLVM keeps addresses of these spaces in 32 bits."""
    out = np.zeros(2, np.uint64)
    head = ".const .align 8 .u64 table[2] = {5, 7};"
    body = ""
    for n, (space, name) in enumerate((("param", "k_1"), ("const", "table"))):
        body += f"mov.b64 %d2, {name}; {cut} cvta.{space}.u64 %d3, %d2; isspacep.{space} %p1, %d3;"
        body += f"ld.b64 %d4, [%d3{'+8' if n else ''}]; @%p1 st.global.b64 [%d0+{8 * n}], %d4;"
    run(body, [out, 77], head=head)
    assert out.tolist() == [77, 7]


def test_an_entry_of_several_is_launched_by_its_name():
    out = np.zeros(1, np.uint32)
    m = machine([out])
    text = module(
        "mov.b32 %r1, cell; mov.u32 %r2, %total_smem_size; st.global.b32 [%d0], %r2;",
        1,
        ".shared .align 4 .b8 cell[64];",
        head=OTHER.format(),
    )
    m.submit(
        Launch(text, "k", params=(struct.pack("<Q", out.ctypes.data),), grid=(1, 1, 1), block=(32, 1, 1))
    )
    m.run()
    assert out[0] == 64 and REGISTERS in text


def test_a_guarded_call_is_refused_where_it_is_made():
    out = np.zeros(1, np.uint32)
    head = ".func f() { ret; }"
    body = "mov.u32 %r1, %ntid.x; setp.eq.u32 %p1, %r1, {}; @%p1 call f; st.global.b32 [%d0], 5;"
    run(body.format(7), [out], head=head)
    assert out[0] == 5
    with pytest.raises(UnsupportedInstruction, match=r"@%p1 call f: a guard on this control instruction"):
        run(body.format(32), [out], head=head)
