"""Conversions to bf16 pairs that the translator gathers into one operation: same results, same order."""

import numpy as np
import pytest

from cute_emulator.instructions.peephole import gather_runs, needed
from cute_emulator.numbers import formats, lanes

from .handwritten import run

LOAD = (
    "mov.u32 %r63, %tid.x; mul.wide.u32 %d31, %r63, 32; add.s64 %d30, %d0, %d31; add.s64 %d29, %d1, %d31;\n"
)
LOAD += "".join(f"ld.global.f32 %f{n}, [%d30+{4 * n}];\n" for n in range(8))
STORE = "".join(f"st.global.b32 [%d29+{4 * n}], %r{n};\n" for n in range(8))


def packed(values, out, body):
    run(LOAD + body + STORE, [values, out])


@pytest.fixture
def values():
    found = np.random.default_rng(0).standard_normal((32, 8)).astype(np.float32)
    found[3, 2], found[7, 1], found[9, 0] = np.nan, np.inf, -np.nan
    return found


def expected(hi, lo):
    return formats.pack16(formats.f32_to_bf16(lo), formats.f32_to_bf16(hi))


def test_a_run_equals_single_conversions(values):
    out = np.zeros((32, 8), np.uint32)
    body = "".join(
        f"cvt.rn.bf16x2.f32 %r{n}, %f{n}, %f{7 - n};\nmov.b32 %r{n + 20}, {n};\n" for n in range(8)
    )
    packed(values, out, body)
    np.testing.assert_array_equal(out, expected(values, values[:, ::-1]))


def test_uniform_values_and_bit_patterns_may_mix(values):
    out = np.zeros((32, 8), np.uint32)
    body = "mov.b32 %f0, 0f3FC00000; mov.b32 %r30, %f1; add.f32 %f2, %f2, %f2;\n"
    body += "".join(f"cvt.rn.bf16x2.f32 %r{n}, %f{n}, %f0;\n" for n in range(8))
    packed(values, out, body)
    values[:, 0], values[:, 2] = 1.5, 2 * values[:, 2]
    np.testing.assert_array_equal(out, expected(values, values[:, :1].repeat(8, 1)))


def test_a_result_is_there_when_it_is_used_and_registers_may_be_reused(values):
    out = np.zeros((32, 8), np.uint32)
    body = """
    cvt.rn.bf16x2.f32 %r0, %f0, %f1;
    cvt.rn.bf16x2.f32 %r1, %f2, %f3;
    add.u32 %r2, %r0, 1;
    mov.b32 %f0, %f4;
    cvt.rn.bf16x2.f32 %r3, %f0, %f1;
    cvt.rn.bf16x2.f32 %r0, %f5, %f6;
    mov.b32 %f9, %r3;
    cvt.rn.bf16x2.f32 %r4, %f9, %f7;
    mov.b32 %r5, 0; mov.b32 %r6, 0; mov.b32 %r7, 0;
    """
    packed(values, out, body)
    f = values.T
    third = expected(f[4], f[1])
    columns = [
        expected(f[5], f[6]), expected(f[2], f[3]), expected(f[0], f[1]) + 1, third,
        expected(third.view(np.float32), f[7]),
    ]  # fmt: skip
    np.testing.assert_array_equal(out[:, :5], np.stack(columns, axis=1))


def test_lines_are_gathered_no_further_than_their_use():
    def pack(n, a, b):
        return f"v{n} = pack2({a}, {b}, 'bf16x2', 'rn', False)"

    lines = [pack(3, "v1", "v2"), "v4 = F(v1)", pack(5, "v4", "v2"), "v6 = v5 + 1", pack(7, "v1", "k8")]
    assert gather_runs(lines) == [
        "v4 = F(v1)",
        "v3, v5, = pack2_run((v1, v4,), (v2, v2,))",
        "v6 = v5 + 1",
        "v7, = pack2_run((v1,), (k8,))",
    ]
    assert gather_runs([pack(3, "v1", "v2"), pack(4, "v3", "v1")]) == [
        "v3, = pack2_run((v1,), (v2,))",
        "v4, = pack2_run((v3,), (v1,))",
    ]


def test_halves_of_wide_registers_are_converted_where_they_are():
    pack = "v{} = pack2(v{}, v{}, 'bf16x2', 'rn', False)".format
    halves = ["v2 = low32(v1)", "v3 = high32(v1)", "v5 = low32(v4)", "v6 = high32(v4)"]
    both = gather_runs([*halves, pack(7, 3, 2), pack(8, 6, 5)])
    assert needed(both) == ["v7, v8, = pack2_words((v1, v4,))"]
    swapped = gather_runs([*halves, pack(7, 3, 2), pack(8, 5, 6)])
    assert needed(swapped) == [*halves, "v7, v8, = pack2_run((v3, v5,), (v2, v6,))"]
    used = gather_runs([*halves[:2], pack(7, 3, 2), "R[8] = v2"])
    assert needed(used) == ["v2 = low32(v1)", "R[8] = v2", "v7, = pack2_words((v1,))"]


def test_what_nobody_needs_is_dropped_unless_it_does_more_than_compute():
    lines = [
        "v1 = R[3]",
        "v2 = v1 + 1",
        "v3 = h7(g, g.mask, v1)",
        "v4 = g.warp.special('x')",
        "v5 = R[4]",
    ]
    assert needed([*lines, "R[5] = v5"]) == ["v1 = R[3]", *lines[2:], "R[5] = v5"]


def test_wide_registers_hold_their_halves_across_items(values):
    out = np.zeros((32, 8), np.uint32)
    body = "mov.b32 %f1, 0f3FC00000;\n"  # uniform beside values of the lanes
    body += "".join(f"mov.b64 %d{n}, {{%f{2 * n}, %f{2 * n + 1}}};\n" for n in range(4))
    body += "bra.uni NEXT;\nNEXT:\n"
    body += "".join(f"mov.b64 {{%f{10 + n}, %f{20 + n}}}, %d{n};\n" for n in range(4))
    body += "".join(f"cvt.rn.bf16x2.f32 %r{n}, %f{20 + n}, %f{10 + n};\n" for n in range(4))
    body += "".join(f"mov.b32 %r{n}, 0;\n" for n in range(4, 8))
    packed(values, out, body)
    values[:, 1] = 1.5
    np.testing.assert_array_equal(out[:, :4], expected(values[:, 1::2], values[:, ::2]))


def widening(rows):
    return "".join(
        f"ld.global.b32 %r{n}, [%d30+{4 * n}]; mov.b32 {{%h{n}, %h{n + 8}}}, %r{n};\n" for n in range(rows)
    )


def test_a_run_of_bf16_halves_equals_single_conversions():
    words = np.random.default_rng(3).integers(0, 1 << 32, (32, 8), np.uint32)
    words[0] = [0x7F807F80, 0xFF80FF81, 0x00010001, 0x80018001, 0, 0x80000000, 0x7FC07FC0, 0x3F803F80]
    for upper in (False, True):
        out = np.zeros((32, 8), np.uint32)
        body = widening(8) + "".join(f"cvt.f32.bf16 %f{n}, %h{n + 8 * upper};\n" for n in range(8))
        body += "".join(f"cvt.f32.bf16 %f{n + 10}, %h{n + 8 * (not upper)};\n" for n in range(8))
        body += "".join(f"mov.b32 %r{n}, %f{n};\n" for n in range(8))
        packed(words.view(np.float32), out, body)
        halves = words >> 16 if upper else words & 0xFFFF
        np.testing.assert_array_equal(out, halves.astype(np.uint32) << 16)


def test_a_uniform_word_is_widened_too():
    out = np.zeros((32, 8), np.uint32)
    body = widening(7) + "mov.b32 %r7, 0xBF803F80; mov.b32 {%h7, %h15}, %r7;\n"
    body += "".join(f"cvt.f32.bf16 %f{n}, %h{n + 8}; mov.b32 %r{n}, %f{n};\n" for n in range(8))
    packed(np.ones((32, 8), np.float32), out, body)
    np.testing.assert_array_equal(out[:, 7], np.full(32, 0xBF800000, np.uint32))
    np.testing.assert_array_equal(out[:, :7], np.full((32, 7), 0x3F800000, np.uint32))


def test_pairs_of_what_one_instruction_wrote_are_made_where_they_lie():
    loads = [f"v{n + 2} = v1[{n}]" for n in range(6)]
    pair = "v{} = pair64(v{}, v{})".format
    both = needed(gather_runs([*loads, pair(10, 6, 7), pair(11, 2, 3), "R[1] = v10", "R[2] = v11"]))
    assert both == ["v10, v11, = pair64_rows(v1, (2, 0,))", "R[1] = v10", "R[2] = v11"]
    for lo, hi in ((3, 4), (3, 2), (2, 5)):  # from an odd one, in the other order, of different pairs
        assert "v10, = pair64_run(" in gather_runs([*loads, pair(10, lo, hi), "R[1] = v10"])[-2]
    registers = np.random.default_rng(4).integers(0, 1 << 32, (6, 32), np.uint32)
    expected = [lanes.pair64(registers[4], registers[5]), lanes.pair64(registers[0], registers[1])]
    for given in (registers, list(registers)):
        np.testing.assert_array_equal(lanes.pair64_rows(given, (2, 0)), expected)
    assert lanes.pair64_rows([1, 2, 3, 4], (1,)) == [3 | 4 << 32]
