"""Data that is its own flag (`device.ll_words`): in every op that exchanges tiles, in any sequence."""

import random

import pytest
import torch
from cutlass import Int64, Uint32, cute
from cutlass.cute.runtime import from_dlpack

from cute_emulator import Emulator, EmulatorError
from overlap_gemm.device import ll_words as ll
from overlap_gemm.device.failure import NOTHING, Role
from overlap_gemm.exchange import send
from overlap_gemm.runtime.failures import CommTimeoutError
from overlap_gemm.testing.cases import Case
from overlap_gemm.tuning.settings import configured
from tests.support.emulated.fault_world import World, flag_fault
from tests.support.emulated.op_runs import SMALL, run
from tests.support.emulated.sequences import Call, run_sequence

NARROW = (("mma", "swap_ab"), ("tile", (16, 64)))
WAYS = {
    "one-shot": ("gemm_all_reduce", "one_shot"),
    "two-shot": ("gemm_all_reduce", "two_shot"),
    "scatter": ("gemm_reduce_scatter", None),
    "gather": ("gemm_all_gather", None),
}


def columns(op, ranks):
    return 72 * ranks if op == "gemm_all_gather" else 136


# --- every op, world and kernel ---

QUICK = [("two-shot", 3, 17, "lazy")]
SWEEP = [
    (way, world, rows, mode)
    for way in WAYS
    for world in (1, 2, 3, 4, 8, 9)
    for rows, mode in ((1, "lazy"), (40, "random"), (130, "immediate"))
]


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("way", "world", "rows", "mode"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SWEEP)],
    ids=str,
)
def test_every_world_and_few_rows(arch, way, world, rows, mode):
    """By themselves kernels for few rows send words: rows and columns are no multiples of a tile."""
    op, algorithm = WAYS[way]
    sizes = rows, columns(op, world), 104 * (1 if op == "gemm_all_gather" else world)
    run(op, arch, world, sizes, dict(NARROW), launches=3, mode=mode, num_sms=8, algorithm=algorithm)


KERNELS = [
    ("sm_90a", {"mma": "pingpong", "tile": (128, 128), "cluster": (2, 1)}),
    ("sm_90a", {"mma": "cooperative", "tile": (128, 128)}),
    ("sm_100a", {"mma": "1cta", "tile": (128, 64)}),
]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("arch", "fields"), KERNELS)
def test_every_kernel_may_send_words(arch, fields, way):
    op, algorithm = WAYS[way]
    how = {"algorithm": algorithm, "transport": "ll", "mode": "random"}
    run(op, arch, 3, (150, columns(op, 3), 104 * 3), fields, launches=2, **how)


def test_words_have_16_bits():
    with pytest.raises(ValueError, match="transport='ll' sends values of 16 bits; got slot_dtype='f32'"):
        run("gemm_reduce_scatter", "sm_90a", 2, (64, 64, 128), {"slot_dtype": "f32"}, transport="ll")


# --- any sequence ---

SHRINKING = [Call(33, 136, "gemm_all_reduce", how, NARROW) for how in ("one_shot", "two_shot")]
SHRINKING += [Call(1, 72, "gemm_all_reduce", "one_shot", NARROW), Call(2, 64, kernel=NARROW), *SHRINKING]
"""Tiles of one call lie where others' were; in the call of two rows rank 2 owns nothing."""


def random_calls(seed):
    """(ranks, calls, starved rank, mode): of words and of flags, few rows and more."""
    draw = random.Random(seed)
    ranks, calls = draw.choice([2, 3, 3, 4]), []
    for _ in range(6):
        op, algorithm = draw.choice(list(WAYS.values()))
        kernel = draw.choice([NARROW, NARROW, (("mma", "swap_ab"), ("tile", (32, 64))), ()])
        rows = draw.choice([1, 2, ranks - 1, ranks, 17, 40])
        n = draw.choice([8, 64, 136])
        calls.append(Call(rows, ranks * n if op == "gemm_all_gather" else n, op, algorithm, kernel))
    return ranks, calls, draw.randrange(ranks), draw.choice(["immediate", "random", "lazy"])


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 60))])
def test_random_sequences(seed):
    """Of either architecture in turn."""
    ranks, calls, starved, mode = random_calls(seed)
    run_sequence(list(SMALL)[seed % 2], ranks, calls, starved=starved, mode=mode, seed=seed, num_sms=2)


@pytest.mark.parametrize(
    ("arch", "starved"),
    [("sm_90a", 2), *(pytest.param(*way, marks=pytest.mark.slow) for way in (("sm_90a", 1), ("sm_100a", 2)))],
)
def test_a_lagging_rank_and_calls_of_other_sizes(arch, starved):
    run_sequence(arch, 3, SHRINKING, starved=starved, num_sms=2)


@pytest.mark.slow
@pytest.mark.usefixtures("changed_kernels")
@pytest.mark.parametrize(
    "calls",
    [[Call(2, 64, kernel=NARROW)] * 4, pytest.param(SHRINKING, marks=pytest.mark.slow)],
    ids=["same", "shrinking"],
)
def test_without_emptying_what_a_call_leaves_is_taken_for_a_later_one_s(monkeypatch, calls):
    monkeypatch.setattr(ll, "_clear", lambda address: None)
    with pytest.raises((EmulatorError, AssertionError, CommTimeoutError)):
        run_sequence("sm_90a", 3, calls, starved=2)


@pytest.mark.slow
@pytest.mark.usefixtures("changed_kernels")
def test_without_the_rule_of_reuse_a_rank_that_owns_nothing_overtakes_one_that_reads(monkeypatch):
    monkeypatch.setattr(send, "await_peers", lambda *_: None)
    with pytest.raises((EmulatorError, AssertionError, CommTimeoutError)):
        run_sequence("sm_90a", 3, [Call(m, 64, kernel=NARROW) for m in (48, 1, 48, 1, 48)], starved=1)


# --- words ---


@cute.kernel
def _copy_words(source: Int64, target: Int64):
    taken = cute.make_rmem_tensor(4, Uint32)
    ll.load_words(source, taken)
    ll.store_words(target, taken)


@cute.jit
def _copy(source: cute.Tensor, target: cute.Tensor):
    _copy_words(source.iterator.toint(), target.iterator.toint()).launch(grid=(1, 1, 1), block=(1, 1, 1))


def test_no_stored_word_is_empty():
    """Two NaNs whose bits are all set become two others; half of such a word stays."""
    given = torch.tensor([-1, 0x3F80FFFF, 0, -(1 << 16)], dtype=torch.int32)
    with Emulator("sm_90a") as emulator:
        source, target = (emulator.empty((4,), torch.int32) for _ in range(2))
        source.copy_(given)
        target.zero_()
        cute.compile(_copy, from_dlpack(source), from_dlpack(target))(
            from_dlpack(source), from_dlpack(target)
        )
    assert target.tolist() == [ll.OTHER_NANS, *given.tolist()[1:]]
    assert target[:1].view(torch.bfloat16).isnan().all()


# --- faults ---

CASE = Case("gemm_all_reduce", 48, 64, 64, torch.bfloat16)
FIELDS = {"mma": "swap_ab", "tile": (16, 64), "cluster": (1, 1)}


@pytest.mark.parametrize("algorithm", ["one_shot", pytest.param("two_shot", marks=pytest.mark.slow)])
def test_lost_words_are_reported_with_their_source(algorithm):
    with pytest.raises(CommTimeoutError, match="seen nothing") as caught:
        World("sm_90a", flag_fault("drop", 0, 2, skip=1), 1, CASE, algorithm=algorithm, **FIELDS).run()
    failure = caught.value.failure
    assert (failure.rank, failure.source, failure.seen, failure.expected) == (2, 0, NOTHING, 1)
    assert failure.role == Role.RECEIVE_PARTIAL and failure.flag == failure.tile * 3 + failure.source


def test_late_words_do_no_harm():
    verdicts = World("sm_90a", flag_fault("delay", None, None, instructions=5000), 3, CASE, **FIELDS).run()
    assert len(verdicts) == 3 and all(verdict.holds for verdict in verdicts), verdicts


def test_a_dead_rank_is_named():
    with pytest.raises(CommTimeoutError) as caught:
        World("sm_90a", lambda world, faults: faults.kill(1), 1, CASE, **FIELDS).run()
    assert caught.value.failure.source == 1


@pytest.mark.slow
def test_peers_may_be_asked_for_flags_instead():
    with configured(transport="peer_bulk"):
        run(
            "gemm_all_reduce",
            "sm_90a",
            2,
            (16, 64, 128),
            dict(NARROW),
            algorithm="one_shot",
            transport="peer_bulk",
        )
