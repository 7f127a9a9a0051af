"""Integer instructions of every width against Python's integers, by lane and with one value for all lanes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cute_emulator.errors import UnsupportedInstruction

from .handwritten import per_lane, run

FEW = settings(max_examples=4, deadline=None)


def signed(x, width):
    x &= (1 << width) - 1
    return x - (1 << width) if x >> width - 1 else x


def quotient(a, b):
    q = abs(a) // abs(b)
    return -q if (a < 0) != (b < 0) else q


def arithmetic(name, width, kind):
    """`f(a, b, c)` on the numbers that the patterns are."""

    def f(a, b, c):
        return {
            "add": lambda: a + b, "sub": lambda: a - b,
            "mul.lo": lambda: a * b, "mul.hi": lambda: a * b >> width,
            "mad.lo": lambda: a * b + c, "mad.hi": lambda: (a * b >> width) + c,
            "min": lambda: min(a, b), "max": lambda: max(a, b), "sad": lambda: c + abs(a - b),
            "div": lambda: quotient(a, b) if b else -1, "rem": lambda: a - quotient(a, b) * b if b else a,
        }[name]()  # fmt: skip

    return f


def shifts(name, width, kind):
    def f(a, b, c):
        b &= 0xFFFFFFFF
        return (a << b if b < width else 0) if name == "shl" else a >> min(b, width)

    return f


def fields(name, width, kind):
    def f(a, b, c):
        pos, length, top = b & 0xFF, c & 0xFF, width - 1
        bit = lambda x, n: x >> n & 1  # noqa: E731
        if name == "bfe":
            sign = bit(a, min(pos + length - 1, top)) if kind == "s" and length else 0
            return sum(
                (bit(a, pos + n) if n < length and pos + n <= top else sign) << n for n in range(width)
            )
        return None

    return f


EDGES = [
    0,
    1,
    2,
    7,
    31,
    32,
    33,
    63,
    64,
    255,
    0x7F,
    0x80,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
]
EDGES += [
    0x80000001,
    1 << 63,
    (1 << 63) - 1,
    (1 << 64) - 1,
    0xFFFFFFFF00000000,
    0x123456789ABCDEF0,
    0x100000000,
]
DTYPES = {16: np.uint16, 32: np.uint32, 64: np.uint64}
REGISTERS = {16: "%h{}", 32: "%r{}", 64: "%d1{}"}
BINARY = ["add", "sub", "mul.lo", "mul.hi", "mad.lo", "mad.hi", "min", "max", "sad", "div", "rem"]


@st.composite
def operands(draw, width, count=3):
    values = st.sampled_from(EDGES) | st.integers(0, 2**64 - 1)
    columns = draw(st.lists(st.lists(values, min_size=32, max_size=32), min_size=count, max_size=count))
    return [np.array(c, np.uint64).astype(DTYPES[width]) for c in columns]


def agrees(text, columns, want, result, width):
    """By lane; then lanes 0, 1 and 2 as what all hold: all operands, one of them, or all of three but one."""
    dtype = DTYPES[width]
    kind = f"b{width}"
    expected = np.array([w & (1 << width) - 1 for w in want], dtype)
    np.testing.assert_array_equal(per_lane(text, columns, dtype, result, kind), expected, err_msg=text)
    for lane in range(3):
        moves = [
            f"mov.b{8 * c.itemsize} {REGISTERS[8 * c.itemsize].format(n)}, {int(c[lane])};"
            for n, c in enumerate(columns)
        ]
        out = np.zeros(1, np.uint64)
        run(f"{' '.join(moves)} {text} st.global.{kind} [%d0], {result};", [out])
        assert int(out[0]) & (1 << width) - 1 == int(expected[lane]), (text, lane)
        uniform = [{n} for n in range(len(columns))]
        uniform += [{0, 1, 2} - one for one in uniform] if len(columns) == 3 else []
        for held in uniform:
            mixed = [np.full_like(c, c[lane]) if k in held else c for k, c in enumerate(columns)]
            move = " ".join(moves[n] for n in sorted(held))
            both = [per_lane(prefix + text, mixed, dtype, result, kind) for prefix in ("", move)]
            np.testing.assert_array_equal(both[0], both[1], err_msg=f"{text} with {move}")


@pytest.mark.parametrize("kind", "us")
@pytest.mark.parametrize("width", DTYPES)
@pytest.mark.parametrize("name", BINARY)
@FEW
@given(data=st.data())
def test_arithmetic(name, width, kind, data):
    columns = data.draw(operands(width, 3 if name[:3] in ("mad", "sad") else 2))
    f, registers = arithmetic(name, width, kind), [REGISTERS[width].format(n) for n in range(4)]
    result = REGISTERS[width].format(9)
    text = f"{name}.{kind}{width} {result}, {', '.join(registers[: len(columns)])};"
    number = (lambda x: signed(x, width)) if kind == "s" else int
    want = [f(*[number(int(x)) for x in xs], *[0] * (3 - len(xs))) for xs in zip(*columns, strict=True)]
    agrees(text, columns, want, result, width)


@pytest.mark.parametrize("kind", "us")
@pytest.mark.parametrize("width", [16, 32])
@FEW
@given(data=st.data())
def test_wide_products(width, kind, data):
    a, b = data.draw(operands(width, 2))
    (c,) = data.draw(operands(2 * width, 1))
    number = (lambda x: signed(x, width)) if kind == "s" else int
    wide = REGISTERS[2 * width]
    x, y, z, d = REGISTERS[width].format(0), REGISTERS[width].format(1), wide.format(2), wide.format(8)
    products = [number(int(p)) * number(int(q)) for p, q in zip(a, b, strict=True)]
    agrees(f"mul.wide.{kind}{width} {d}, {x}, {y};", [a, b], products, d, 2 * width)
    want = [p + int(r) for p, r in zip(products, c, strict=True)]
    agrees(f"mad.wide.{kind}{width} {d}, {x}, {y}, {z};", [a, b, c], want, d, 2 * width)


AMOUNTS = hnp.arrays(
    np.uint32, 32, elements=st.integers(0, 70) | st.sampled_from([1 << 31, (1 << 32) - 1, 255, 256])
)


@pytest.mark.parametrize("width", DTYPES)
@pytest.mark.parametrize("opcode", ["shl.b", "shr.u", "shr.s", "shr.b"])
@FEW
@given(data=st.data())
def test_shifts_clamp_their_amounts(opcode, width, data):
    (a,), n = data.draw(operands(width, 1)), data.draw(AMOUNTS)
    name, kind = opcode.split(".")
    number = (lambda x: signed(x, width)) if kind == "s" else int
    f, result = shifts(name, width, kind), REGISTERS[width].format(9)
    want = [f(number(int(x)), int(y), 0) for x, y in zip(a, n, strict=True)]
    agrees(f"{opcode}{width} {result}, {REGISTERS[width].format(0)}, %r1;", [a, n], want, result, width)
    for amount in (0, 1, 4, 5, 15, 16, 31, 32, 63, 64, 100, -1, 4294967295):
        text = f"{opcode}{width} {result}, {REGISTERS[width].format(0)}, {amount};"
        want = [f(number(int(x)), amount, 0) & (1 << width) - 1 for x in a]
        np.testing.assert_array_equal(
            per_lane(text, [a], DTYPES[width], result, f"b{width}"), np.array(want, DTYPES[width])
        )


@pytest.mark.parametrize("mode", ["l.wrap", "l.clamp", "r.wrap", "r.clamp"])
@FEW
@given(data=st.data())
def test_funnel_shifts(mode, data):
    (a, b), n = data.draw(operands(32, 2)), data.draw(AMOUNTS)
    want = []
    for x, y, s in zip(a.tolist(), b.tolist(), n.tolist(), strict=True):
        s, pair = (s & 31 if "wrap" in mode else min(s, 32)), y << 32 | x
        want.append((pair << s) >> 32 if mode[0] == "l" else pair >> s)
    agrees(f"shf.{mode}.b32 %r9, %r0, %r1, %r2;", [a, b, n], want, "%r9", 32)


@pytest.mark.parametrize("width", [32, 64])
@FEW
@given(data=st.data())
def test_bit_fields(width, data):
    a, b = data.draw(operands(width, 2))
    pos, length = data.draw(AMOUNTS), data.draw(AMOUNTS)
    reg, result = REGISTERS[width], REGISTERS[width].format(9)
    each = list(zip(a.tolist(), pos.tolist(), length.tolist(), strict=True))
    for kind in "us":
        want = [fields("bfe", width, kind)(*xs) for xs in each]
        agrees(
            f"bfe.{kind}{width} {result}, {reg.format(0)}, %r1, %r2;", [a, pos, length], want, result, width
        )
    want = []
    for (x, p, n), y in zip(each, b.tolist(), strict=True):
        out = y
        for k in range(min(n & 0xFF, max(0, width - (p & 0xFF)))):
            at = (p & 0xFF) + k
            out = out & ~(1 << at) | (x >> k & 1) << at
        want.append(out)
    agrees(
        f"bfi.b{width} {result}, {reg.format(0)}, {reg.format(1)}, %r2, %r3;",
        [a, b, pos, length],
        want,
        result,
        width,
    )


@pytest.mark.parametrize("width", [32, 64])
@FEW
@given(data=st.data())
def test_counting_and_finding(width, data):
    (a,) = data.draw(operands(width, 1))
    reg, wide = REGISTERS[width].format(0), REGISTERS[width].format(9)
    xs = a.tolist()
    agrees(f"popc.b{width} %r9, {reg};", [a], [bin(x).count("1") for x in xs], "%r9", 32)
    agrees(
        f"clz.b{width} %r9, {reg};", [a], [f"{x:0{width}b}".find("1") % (width + 1) for x in xs], "%r9", 32
    )
    agrees(f"brev.b{width} {wide}, {reg};", [a], [int(f"{x:0{width}b}"[::-1], 2) for x in xs], wide, width)
    agrees(f"not.b{width} {wide}, {reg};", [a], [-1 - x for x in xs], wide, width)
    agrees(f"cnot.b{width} {wide}, {reg};", [a], [int(not x) for x in xs], wide, width)
    agrees(f"neg.s{width} {wide}, {reg};", [a], [-x for x in xs], wide, width)
    agrees(f"abs.s{width} {wide}, {reg};", [a], [abs(signed(x, width)) for x in xs], wide, width)
    for kind in "us":
        top = []
        for x in xs:
            text = f"{x:0{width}b}"
            found = text.find("0" if kind == "s" and text[0] == "1" else "1")
            top.append((-1 if found < 0 else width - 1 - found, found))
        agrees(f"bfind.{kind}{width} %r9, {reg};", [a], [t for t, _ in top], "%r9", 32)
        agrees(f"bfind.shiftamt.{kind}{width} %r9, {reg};", [a], [f for _, f in top], "%r9", 32)


def part(x, n, size, kind):
    """Byte or half n of a word."""
    return signed(x >> n * size, size) if kind == "s" else x >> n * size & (1 << size) - 1


@FEW
@given(data=st.data())
def test_bytes_and_tables(data):
    a, b, c = data.draw(operands(32, 3))
    each = list(zip(a.tolist(), b.tolist(), c.tolist(), strict=True))
    want = []
    for x, y, s in each:
        source = x.to_bytes(4, "little") + y.to_bytes(4, "little")
        picks = [s >> 4 * n & 15 for n in range(4)]
        want.append(
            int.from_bytes([source[p & 7] if p < 8 else -(source[p & 7] >> 7) & 255 for p in picks], "little")
        )
    agrees("prmt.b32 %r9, %r0, %r1, %r2;", [a, b, c], want, "%r9", 32)
    table = data.draw(st.sampled_from([0, 0xFF, 0x80, 0xE8, 0x96, 0xCA, 0x1B]))
    want = [
        sum((table >> ((x >> n & 1) * 4 + (y >> n & 1) * 2 + (z >> n & 1)) & 1) << n for n in range(32))
        for x, y, z in each
    ]
    agrees(f"lop3.b32 %r9, %r0, %r1, %r2, {table};", [a, b, c], want, "%r9", 32)
    for left in "us":
        for right in "us":
            want = [z + sum(part(x, n, 8, left) * part(y, n, 8, right) for n in range(4)) for x, y, z in each]
            agrees(f"dp4a.{left}32.{right}32 %r9, %r0, %r1, %r2;", [a, b, c], want, "%r9", 32)
            for half in ("lo", "hi"):
                first = 2 * (half == "hi")
                want = [
                    z + sum(part(x, n, 16, left) * part(y, first + n, 8, right) for n in range(2))
                    for x, y, z in each
                ]
                agrees(f"dp2a.{half}.{left}32.{right}32 %r9, %r0, %r1, %r2;", [a, b, c], want, "%r9", 32)
    want = [(signed(x << 8, 32) >> 8) * (signed(y << 8, 32) >> 8) for x, y, _ in each]
    agrees("mul24.lo.s32 %r9, %r0, %r1;", [a, b], want, "%r9", 32)
    agrees(
        "mul24.lo.u32 %r9, %r0, %r1;",
        [a, b],
        [(x & 0xFFFFFF) * (y & 0xFFFFFF) for x, y, _ in each],
        "%r9",
        32,
    )


NAMES = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "lo": "<",
    "ls": "<=",
    "hi": ">",
    "hs": ">=",
}


@pytest.mark.parametrize("width", DTYPES)
@FEW
@given(data=st.data())
def test_comparisons_with_two_destinations(width, data):
    a, b = data.draw(operands(width, 2))
    b = np.where(np.arange(32) % 3 == 0, a, b)
    name, kind = data.draw(st.sampled_from(sorted(NAMES))), data.draw(st.sampled_from("us"))
    if name in ("lo", "ls", "hi", "hs"):
        kind = "u"
    combine, negate = data.draw(st.sampled_from(["", ".and", ".or", ".xor"])), data.draw(st.booleans())
    x, y = (REGISTERS[width].format(n) for n in range(2))
    third = f", {'!' if negate else ''}%p5" if combine else ""
    text = "mov.u32 %r20, %tid.x; and.b32 %r20, %r20, 1; setp.eq.u32 %p5, %r20, 1; "
    text += f"setp.{name}{combine}.{kind}{width} %p1|%p2, {x}, {y}{third}; "
    text += "selp.b32 %r21, 2, 0, %p1; selp.b32 %r22, 1, 0, %p2; or.b32 %r9, %r21, %r22;"
    want = []
    for lane, (p, q) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
        if kind == "s":
            p, q = signed(p, width), signed(q, width)
        holds = eval(f"p {NAMES[name]} q")  # noqa: S307
        other = bool(lane % 2) != negate
        pair = [holds, not holds]
        if combine:
            pair = [{".and": v and other, ".or": v or other, ".xor": v != other}[combine] for v in pair]
        want.append(2 * pair[0] + pair[1])
    got = per_lane(text, [a, b], np.uint32, "%r9", "b32")
    np.testing.assert_array_equal(got, want, err_msg=text)


@FEW
@given(data=st.data())
def test_conversions_between_integers(data):
    source, target = (
        data.draw(st.sampled_from([f"{k}{w}" for k in "us" for w in (8, 16, 32, 64)])) for _ in range(2)
    )
    saturate = data.draw(st.booleans())
    (a,) = data.draw(operands(64, 1))
    held = {8: 16}.get(int(source[1:]), int(source[1:]))
    a = a.astype(DTYPES[held])
    own = int(target[1:])
    low, high = (-(1 << own - 1), (1 << own - 1) - 1) if target[0] == "s" else (0, (1 << own) - 1)
    want = []
    for x in a.tolist():
        number = signed(x, int(source[1:])) if source[0] == "s" else x & (1 << int(source[1:])) - 1
        if saturate:
            number = min(max(number, low), high)
        want.append(signed(number, own) if target[0] == "s" else number & (1 << own) - 1)
    width = max(own, 16)
    result = REGISTERS[width].format(9)
    agrees(
        f"cvt{'.sat' if saturate else ''}.{target}.{source} {result}, {REGISTERS[held].format(0)};",
        [a],
        want,
        result,
        width,
    )
    # a wider register takes the extension
    wide = [w & (1 << 64) - 1 for w in want]
    got = per_lane(
        f"cvt{'.sat' if saturate else ''}.{target}.{source} %d9, {REGISTERS[held].format(0)};",
        [a],
        np.uint64,
        "%d9",
        "b64",
    )
    assert got.tolist() == wide


@FEW
@given(data=st.data())
def test_vectors_pack_and_unpack(data):
    (a,), (b, c) = data.draw(operands(64, 1)), data.draw(operands(32, 2))
    xs = a.tolist()
    text = (
        "mov.b64 {%h1, _, %h3, %h4}, %d10; cvt.u32.u16 %r1, %h1; cvt.u32.u16 %r3, %h3; cvt.u32.u16 %r4, %h4;"
    )
    text += "mad.lo.u32 %r9, %r1, 3, %r3; mad.lo.u32 %r9, %r9, 5, %r4;"
    want = [((x & 0xFFFF) * 3 + (x >> 32 & 0xFFFF)) * 5 + (x >> 48) for x in xs]
    agrees(text, [a], want, "%r9", 32)
    agrees(
        "mov.b64 {_, %r1}, %d10; mov.b64 {%r2, _}, %d10; mov.b64 %d19, {%r1, %r2};",
        [a],
        [(x & 0xFFFFFFFF) << 32 | x >> 32 for x in xs],
        "%d19",
        64,
    )
    text = "mov.b32 {%h1, %h2}, %r0; mov.b32 {%h3, %h4}, %r1; mov.b64 %d19, {%h4, %h1, %h3, %h2};"
    want = [
        y >> 16 | (x & 0xFFFF) << 16 | (y & 0xFFFF) << 32 | x >> 16 << 48
        for x, y in zip(b.tolist(), c.tolist(), strict=True)
    ]
    agrees(text, [b, c], want, "%d19", 64)
    agrees(
        ".reg .b8 q<5>; mov.b32 {q0, q1, q2, q3}, %r0; mov.b32 %r9, {q3, q2, q1, q0};",
        [b],
        [int.from_bytes(x.to_bytes(4, "little"), "big") for x in b.tolist()],
        "%r9",
        32,
    )


@pytest.mark.parametrize("kind", "us")
@pytest.mark.parametrize("name", ["add", "min", "max", "min.relu"])
@FEW
@given(columns=operands(32, 2))
def test_arithmetic_of_pairs(name, kind, columns):
    if name == "min.relu" and kind == "u":
        return
    f = arithmetic(name.partition(".")[0], 16, kind)

    def half(a, b, shift):
        x, y = (signed(v >> shift, 16) if kind == "s" else v >> shift & 0xFFFF for v in (a, b))
        result = f(x, y, 0)
        return (max(result, 0) if "relu" in name else result) & 0xFFFF

    want = [
        half(a, b, 0) | half(a, b, 16) << 16 for a, b in zip(*map(np.ndarray.tolist, columns), strict=True)
    ]
    agrees(f"{name}.{kind}16x2 %r9, %r0, %r1;", columns, want, "%r9", 32)


def test_other_arithmetic_of_pairs_is_refused():
    with pytest.raises(UnsupportedInstruction, match="mul.lo.u16x2"):
        run("mul.lo.u16x2 %r1, %r2, %r3;", [np.zeros(1)])
