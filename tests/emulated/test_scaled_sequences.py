"""8-bit operands: sequences of calls of every kind, and mistakes in scales of blocks."""

import random
from typing import NamedTuple

import pytest
import torch

from overlap_gemm.kernel.loads import JointLoads, OperandLoads
from overlap_gemm.mainloop.blocks import BlockScales, StageScales
from overlap_gemm.testing.cases import Case
from overlap_gemm.testing.emulated import judge, queue_launch
from tests.support.emulated.flag_order import with_flags_before_scales
from tests.support.emulated.op_runs import lagging, world_of
from tests.support.emulated.scaled_cases import (
    AG,
    AR,
    E4M3,
    E5M2,
    GATHER,
    RS,
    Scaled,
    gathers_hold,
    queue,
    share_of_bound,
)


def with_the_row_scale_alone(patch):
    def factors(self, config, rows, stage, k, part):
        return [[self.a[(part, row, stage)] for row in rows]] * config.column_blocks

    patch.setattr(StageScales, "factors", factors)


class AtTheFirst(NamedTuple):
    """Loads, of whichever k tile is asked for, the first."""

    loads: OperandLoads

    def load(self, ab, state, k):
        self.loads.load(ab, state, k * 0)


def with_the_first_block_of_k(patch):
    joined = BlockScales.joined

    def of_the_first(self, *given):
        each = (loads.parts for loads in joined(self, *given))
        return [JointLoads((operand, AtTheFirst(scales))) for operand, scales in each]

    patch.setattr(BlockScales, "joined", of_the_first)


def with_the_next_block_of_columns(patch):
    joined = BlockScales.joined
    patch.setattr(BlockScales, "joined", lambda self, config, a, b, stages, row, column: joined(
        self, config, a, b, stages, row, column + config.block_rows
    ))  # fmt: skip


def with_own_scales_for_all(patch):
    patch.setattr(BlockScales, "with_gathered", lambda own, scales: own)


@pytest.mark.slow
@pytest.mark.usefixtures("changed_kernels")
@pytest.mark.parametrize(
    ("mistake", "size"),
    [
        (with_the_row_scale_alone, 128),
        (with_the_first_block_of_k, 32),
        (with_the_next_block_of_columns, 32),
        (with_own_scales_for_all, 32),
        pytest.param(with_the_first_block_of_k, 128, marks=pytest.mark.slow),
    ],
)
def test_what_is_taken_out_of_blocks_is_missed(mistake, size, monkeypatch):
    """Of a gather, where scales of x have travelled."""
    mistake(monkeypatch)
    case = Scaled(GATHER, 70, 2 * 256, 272, blocks=size)
    with world_of("sm_90a", 2) as world:
        outs = queue(case, world)
        world.synchronize()
    assert share_of_bound(case, outs) > 1


@pytest.mark.slow
@pytest.mark.usefixtures("changed_kernels")
@pytest.mark.parametrize("mistake", [None, with_flags_before_scales])
def test_scales_of_blocks_are_there_when_a_shards_flag_is(mistake, monkeypatch):
    """They travel after all rows.

    That the epilogue reads them too need not be told: it reads a k tile's before it frees the tile's stage,
    and the load role, which tells, ends when all stages are free.
    """
    if mistake is not None:
        mistake(monkeypatch)
    assert gathers_hold((384, 384), 272, blocks=128) == (mistake is None)


class Mixed:
    """A sequence of calls of every kind of operands on the same workspaces, drawn by a seed."""

    def __init__(self, arch, seed):
        draw = random.Random(seed)
        self.ranks = draw.choice([2, 3, 3])
        self.options = {"mode": draw.choice(["immediate", "random", "lazy"]), "seed": seed, "num_sms": 2}
        self.options["schedule"] = lagging(draw.randrange(self.ranks))
        kinds = ["bf16", 0, 0, 128, 32] if arch == "sm_90a" else ["bf16", 0, 0]
        self.calls = [self._call(draw, draw.choice(kinds), 10 * seed + i) for i in range(5)]

    def _call(self, draw, kind, seed):
        op, m = draw.choice([RS, AR, AG, GATHER]), draw.choice([1, 2, self.ranks, 40, 70])
        if kind == "bf16":
            n = 24 * self.ranks if op in (AG, GATHER) else 72
            return Case(op, m, n, 16 * self.ranks, torch.bfloat16, seed=seed)
        n, depth = (72, 48) if not kind else (2 * kind, kind + 16)
        depth -= 3 * (seed % 2)
        n, depth = (n * self.ranks, depth) if op in (AG, GATHER) else (n, depth * self.ranks)
        dtypes = {"dtype": draw.choice([E4M3, E5M2]), "weight": draw.choice([E4M3, E5M2])}
        return Scaled(
            op, m, n, depth, blocks=kind, seed=seed, tensorwise=not kind and seed % 3 == 0, **dtypes
        )

    def run(self, arch):
        with world_of(arch, self.ranks, **self.options) as world:
            queued = [
                queue_launch(call, world) if isinstance(call, Case) else queue(call, world)
                for call in self.calls
            ]
            world.synchronize()
        for call, outs in zip(self.calls, queued, strict=True):
            if isinstance(call, Case):
                assert judge(call, *outs, torch.bfloat16).holds, (call, self.calls)
            else:
                assert share_of_bound(call, outs) <= 1, (call, self.calls)


@pytest.mark.parametrize(
    ("arch", "seed"),
    [
        ("sm_90a", 9),
        pytest.param("sm_90a", 12, marks=pytest.mark.slow),
        pytest.param("sm_100a", 0, marks=pytest.mark.slow),
        *(
            pytest.param(a, seed, marks=pytest.mark.slow)
            for a in ("sm_90a", "sm_100a")
            for seed in range(20, 30)
        ),
    ],
)
def test_calls_of_every_kind_in_any_order_share_workspaces(arch, seed):
    Mixed(arch, seed).run(arch)


def test_every_kind_is_among_the_sequences():
    drawn = [call for one in (("sm_90a", 9), ("sm_100a", 0)) for call in Mixed(*one).calls]
    assert {"bf16" if isinstance(call, Case) else call.blocks for call in drawn} == {"bf16", 0, 128, 32}
    assert {call.op for call in drawn} == {RS, AR, AG, GATHER}
    assert any(call.m < 3 for call in drawn)
    assert {call.k % 16 > 0 for call in drawn if isinstance(call, Scaled)} == {False, True}
