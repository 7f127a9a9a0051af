"""Loads that may still find what a store has replaced: data that is its own flag, readers without acquire."""

import dataclasses
import functools
import re
from types import SimpleNamespace

import numpy as np
import pytest

from cute_emulator.execution.launch import Machine
from cute_emulator.machine.lane_plan import spread
from cute_emulator.machine.stale import OldValues

from .handwritten import aligned, launch, module
from .test_order import MODES, RIGHT, WRONG, exchange

SENTINEL = -1
BODY = """
cvt.u32.u64 %r50, %d3; cvt.u32.u64 %r51, %d4; mov.u32 %r0, %tid.x; setp.eq.b32 %p0, %r0, 0;
shl.b32 %r1, %r0, 4; cvt.u64.u32 %d20, %r1; add.s64 %d11, %d1, %d20; add.s64 %d10, %d0, %d20;
setp.ne.b32 %p9, %r50, 0; @%p9 bra READER;
ACK: ld.acquire.sys.global.b32 %r4, [%d2]; setp.lt.s32 %p1, %r4, %r51; @%p1 bra ACK;
mul.lo.s32 %r2, %r51, 1000; shl.b32 %r3, %r0, 2; add.s32 %r10, %r2, %r3;
add.s32 %r11, %r10, 1; add.s32 %r12, %r10, 2; add.s32 %r13, %r10, 3;
st.{strength}.global.v4.b32 [%d11], {{%r10, %r11, %r12, %r13}};
bra.uni END;
READER:
ld.{strength}.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%d11];
mov.pred %p1, 0;
{checks}
@%p1 bra READER;
st.global.v4.b32 [%d10], {{%r10, %r11, %r12, %r13}};
{reset}
bar.warp.sync -1; add.s32 %r5, %r51, 1; @%p0 st.release.sys.global.b32 [%d2], %r5;
END:
"""
RESET = "mov.b32 %r6, -1; st.{strength}.global.v4.b32 [%d11], {{%r6, %r6, %r6, %r6}};"


ACCESS = re.compile(r"(st|ld)(\S*)\.v4\.b32 (\[%d\d+\]|\{[^}]*\}), (\[%d\d+\]|\{[^}]*\});")


def in_words(text):
    """The same, with four accesses of a word each instead of every vector."""

    def split(found):
        op, how, *operands = found.groups()
        (place,), (words,) = ([o for o in operands if o[0] == kind] for kind in "[{")
        each = [(f"{place[:-1]} + {4 * n}]", word) for n, word in enumerate(words[1:-1].split(","))]
        return " ".join(
            f"{op}{how}.b32 {a}, {b};" for a, b in (pair if op == "st" else pair[::-1] for pair in each)
        )

    return ACCESS.sub(split, text)


def lamport(
    mode, seed=0, words=(0, 1, 2, 3), reset=RESET, strength="relaxed.sys", calls=3, change=lambda text: text
):
    """Rank 0 sends 32 times 16 bytes to rank 1, which polls for the data itself, `calls` times.

    `change` rewrites the instructions.

    Returns:
        The findings, and whether each call got what was sent.
    """
    outs = [aligned(128, np.int32) for _ in range(calls)]
    data, ack = aligned(128, np.int32, SENTINEL), aligned(32, np.int32)
    checks = "".join(f"setp.eq.s32 %p2, %r{10 + n}, {SENTINEL}; or.pred %p1, %p1, %p2;\n" for n in words)
    text = BODY.format(strength=strength, checks=checks, reset=reset.format(strength=strength))
    m = Machine("sm_100a", ranks=2, mode=mode, seed=seed)
    m.memory.register(data.ctypes.data, data.nbytes, 1, "data", "symmetric")
    m.memory.register(ack.ctypes.data, ack.nbytes, 0, "ack", "symmetric")
    for out in outs:
        m.memory.register(out.ctypes.data, out.nbytes, 1, "out")
    ptx = module(change(text), 5)
    for call, out in enumerate(outs):
        for rank in (0, 1):
            m.submit(dataclasses.replace(launch(ptx, [out, data, ack, rank, call]), rank=rank))
    m.run()
    sent = [np.array_equal(out, 1000 * call + np.arange(128)) for call, out in enumerate(outs)]
    return [str(finding) for finding in m.report.findings], sent


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("change", [str, in_words])
@pytest.mark.parametrize("strength", ["relaxed.sys", "volatile"])
@pytest.mark.parametrize("mode", MODES)
def test_data_that_is_its_own_flag_arrives_where_every_word_is_checked(mode, strength, change, seed):
    assert lamport(mode, seed, strength=strength, change=change) == ([], [True] * 3)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("change", [str, in_words])
@pytest.mark.parametrize("words", [(0, 1), (2, 3), (0, 3), (1, 2, 3), (0, 1, 2), (0,)])
@pytest.mark.parametrize("mode", MODES)
def test_a_word_that_is_used_and_not_checked_shows(mode, words, change, seed):
    findings, sent = lamport(mode, seed, words, change=change)
    assert findings or not all(sent)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("change", [str, in_words])
@pytest.mark.parametrize("strength", ["relaxed.sys", "volatile"])
@pytest.mark.parametrize("mode", MODES)
def test_a_sentinel_that_is_not_put_back_shows_at_the_next_call(mode, strength, change, seed):
    findings, sent = lamport(mode, seed, reset="", strength=strength, change=change)
    assert sent[0] and (findings or not all(sent[1:]))


def in_wholes(text, load=True, store=True):
    """The same, with `.b128` instead of vectors of the named kinds."""

    def one(found):
        op, how, *operands = found.groups()
        if not how.startswith((".relaxed", ".volatile")) or not {"ld": load, "st": store}[op]:
            return found.group()
        (place,), (words,) = ([o for o in operands if o[0] == kind] for kind in "[{")
        names = [word.strip() for word in words[1:-1].split(",")]
        if op == "st":
            packed = (
                f"mov.b64 %d30, {{{names[0]}, {names[1]}}}; mov.b64 %d31, {{{names[2]}, {names[3]}}}; "
                "mov.b128 %q0, {%d30, %d31};"
            )
            return f"{packed} st{how}.b128 {place}, %q0;"
        return (
            f"ld{how}.b128 %q0, {place}; mov.b128 {{%d30, %d31}}, %q0; "
            f"mov.b64 {{{names[0]}, {names[1]}}}, %d30; mov.b64 {{{names[2]}, {names[3]}}}, %d31;"
        )

    return ".reg .b128 %q0;\n" + ACCESS.sub(one, text)


def test_a_vector_store_may_be_torn_under_a_whole_load():
    """The elements of a vector are stores of their own: a word of a `.b128` load vouches for no other."""
    torn = functools.partial(in_wholes, store=False)
    for seed in range(8):
        assert lamport("random", seed, change=torn) == ([], [True] * 3)
        for mode in MODES:
            assert lamport(mode, seed, (3,), change=in_wholes) == ([], [True] * 3)
    found = [lamport("random", seed, (3,), change=torn) for seed in range(8)]
    assert all(findings or not all(sent) for findings, sent in found)


def test_who_has_found_a_place_new_may_reset_it_by_an_ordinary_store():
    """The store that a strong load observes lies before what follows the load (causality order)."""
    plain = RESET.replace("st.{strength}", "st")
    for mode in MODES:
        findings, sent = lamport(mode, reset=plain, calls=1)
        assert sent == [True]
        assert findings == [], findings


@pytest.mark.parametrize("name", ["relaxed load", "acquire at gpu scope"])
def test_a_reader_without_acquire_finds_old_data_behind_a_new_flag(name):
    """The writer releases at system scope: what is old is the reader's view."""
    for mode in ("random", "lazy"):
        old = [exchange(*WRONG[name], mode=mode, seed=seed)[2][:32] for seed in range(8)]
        assert any((out != 7).any() for out in old)
        assert mode == "random" or all((out != 7).all() for out in old)
        for right in RIGHT.values():
            assert all((exchange(*right, mode=mode, seed=seed)[2][:32] == 7).all() for seed in range(8))


def test_only_words_whose_store_is_unordered_are_old_and_lanes_at_one_address_read_alike():
    memory = SimpleNamespace(base=4096, nbytes=32, kind="symmetric", rank=0, raw=np.full(32, 1, np.uint8))
    vector = SimpleNamespace(
        size=16, width=4, count=4, is_single=False, polls=True, strong=True, publishes=False
    )
    half = SimpleNamespace(**{**vars(vector), "size": 8, "count": 2})
    agent = SimpleNamespace(stale=None)
    launched = SimpleNamespace(launch=SimpleNamespace(rank=0))
    group = SimpleNamespace(warp=SimpleNamespace(grid=launched, agent=agent))
    values = OldValues("lazy", 0)
    ordered, unordered = 7, 8
    for first, epoch in ((4096, ordered), (4104, ordered), (4112, ordered), (4120, unordered)):
        values.replace(half, memory, *spread(np.array([first], np.uint64), 8), epoch)
    lanes = spread(np.array([4096, 4112, 4112], np.uint64), 16)
    now = np.full((3, 4), 0x02020202, np.uint32)
    old, new = 0x01010101, 0x02020202
    seen = values.loaded(vector, group, memory, *lanes, [unordered], now)
    assert seen.tolist() == [[new] * 4, [new, new, old, old], [new, new, old, old]]
    assert agent.stale == {4112}
    for _ in range(4):
        seen = values.loaded(vector, group, memory, *lanes, [unordered], now)
    assert seen.tolist() == now.tolist() and agent.stale == frozenset()
