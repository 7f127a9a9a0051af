"""All-reduces that the switch sums (`configured(transport="nvls")`), in the emulator's multicast memory.

No hardware has run them: a multicast object is never created there. `judge` also wants the same bytes on all
ranks; that the emulator's switch adds in rank order is the emulator's, and no promise of a switch.
"""

import random
from functools import partial

import pytest
import torch

import overlap_gemm
from cute_emulator import Emulator, EmulatorError, mutate
from overlap_gemm.device.failure import Role
from overlap_gemm.kernels import send
from overlap_gemm.kernels.build import compile_kernel, make_kernel
from overlap_gemm.kernels.config import GemmConfig
from overlap_gemm.kernels.lint import inspect
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.runtime.workspace import CommTimeoutError
from overlap_gemm.testing.cases import Case
from overlap_gemm.testing.emulated import judge, run_launches
from overlap_gemm.transports import Nvls, Transport
from overlap_gemm.tuning.settings import configured

from .op_runs import LARGER, SMALL, lagging, name, run, summed, world_of
from .test_faults import World, flag_fault
from .test_mutations import FLAGS_AND_WAITS, REASONS, TWO_CALLS
from .test_sequences import WAYS, Call, run_sequence

OP = "gemm_all_reduce"
NVLS = (("transport", "nvls"),)
NARROW = {"mma": "swap_ab", "tile": (16, 64)}
both = pytest.mark.parametrize("arch", SMALL)


# --- results ---

QUICK = [("sm_90a", 3, 150, "lazy"), ("sm_100a", 4, 130, "random")]
SWEEP = [
    (arch, ranks, rows, mode)
    for arch in SMALL
    for ranks in (2, 3, 4, 8)
    for rows, mode in ((1, "lazy"), (70, "random"), (200, "immediate"), (130, "lazy"))
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("arch", "ranks", "rows", "mode"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SWEEP)],
    ids=str,
)
def test_every_world(arch, ranks, rows, mode):
    """No extent is a multiple of a tile's; of eight ranks most own no column."""
    run(OP, arch, ranks, (rows, 136, 72), transport="nvls", launches=3, mode=mode, num_sms=2)


@pytest.mark.parametrize(
    "kind",
    [
        ("sm_90a", {**NARROW, "cluster": (1, 1)}),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in LARGER),
        *(
            pytest.param((arch, {**NARROW, "cluster": (1, 1), "k_split": 2}), marks=pytest.mark.slow)
            for arch in SMALL
        ),
    ],
    ids=lambda kind: name(kind),
)
@pytest.mark.parametrize("dtype", [torch.float16], ids=["f16"])
def test_other_kernels_and_halves(kind, dtype):
    arch, fields = kind
    rows = 2 * fields["tile"][0] + 22
    run(OP, arch, 3, (rows, 200, 136), fields, transport="nvls", dtype=dtype, launches=2, mode="random")


@pytest.mark.slow
@both
def test_a_group_of_one_has_nothing_to_sum(arch):
    with world_of(arch, 1, transport="nvls") as world:
        case = Case(OP, 70, 72, 72, torch.bfloat16)
        assert all(judge(case, given, outs, case.dtype).holds for given, outs in run_launches(case, world, 1))


# --- any sequence, on workspaces that calls by stores use, too ---


def random_calls(seed):
    """(ranks, calls, starved rank, mode): all-reduces by the switch among calls of every kind by stores."""
    draw = random.Random(seed)
    ranks, calls = draw.choice([2, 3, 3, 4]), []
    for _ in range(6):
        op, algorithm = draw.choice(WAYS)
        n, rows = draw.choice([8, 64, 136]), draw.choice([1, 2, ranks, 64, 130])
        if draw.random() < 0.5:
            calls.append(Call(rows, n, OP, None, NVLS))
        else:
            calls.append(Call(rows, ranks * n if op == "gemm_all_gather" else n, op, algorithm))
    return ranks, calls, draw.randrange(ranks), draw.choice(["immediate", "random", "lazy"])


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 40))])
def test_random_sequences(seed):
    ranks, calls, starved, mode = random_calls(seed)
    arch = list(SMALL)[seed % 2]
    run_sequence(arch, ranks, calls, starved=starved, mode=mode, seed=seed, num_sms=1 + seed % 3)


OVERTAKEN = [Call(64, 192, OP, None, NVLS), Call(1, 64), Call(384, 64)] * 2
"""Rank 2 waits for nobody in the second call; in the third its tiles lie where rank 1 has sums of the first.
(Among all-reduces alone nobody overtakes: who stores at others has everybody's partials of the same call.)"""


@pytest.mark.parametrize("starved", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_lagging_rank(starved):
    run_sequence("sm_90a", 3, OVERTAKEN, starved=starved, num_sms=2)


# --- what is needed of fences, flags and the rule of reuse ---


@pytest.mark.parametrize("part", ["await_partials", "publish_unit"], ids=["into-the-switch", "out-of-it"])
@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
def test_either_alias_fence_taken_out_is_found(arch, part, monkeypatch, changed_kernels):
    monkeypatch.setattr(Nvls, part, getattr(Transport, part))
    with pytest.raises(EmulatorError, match="alias-fence.*no fence.proxy.alias between"):
        run(OP, arch, 2, (64, 128, 64), transport="nvls", num_sms=2)


def test_without_the_rule_of_reuse_a_lagging_rank_reads_later_data(monkeypatch, changed_kernels):
    monkeypatch.setattr(send, "await_peers", lambda *_: None)
    with pytest.raises((EmulatorError, AssertionError, CommTimeoutError)):
        run_sequence("sm_90a", 3, OVERTAKEN, starved=1, num_sms=2)


def weakened(options):
    case = Case(OP, 128, 384, 64, torch.bfloat16)
    with world_of("sm_90a", 2, SMALL["sm_90a"], transport="nvls", num_sms=1, **options) as world:
        for given, outs in run_launches(case, world, 2):
            assert judge(case, given, outs, case.dtype, summed(case, "nvls")).holds


NOT_NEEDED = {
    "multimem.*: .sys -> .gpu": "data, which flags order on either side: weak accesses would do",
    "ld.relaxed.sys.global.b64#4: .sys -> .gpu": "the receive warps' first look at a result's flag, which is "
    "not raised yet here; the acquire after it shows",
}
PARTS = 4


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_weakened_flag_and_wait_shows(part):
    tried = [mutate.Setting("immediate"), *(mutate.Setting("lazy", seed) for seed in range(2))]
    outcomes = mutate.run(
        weakened,
        tried,
        select=FLAGS_AND_WAITS,
        reasons=REASONS | TWO_CALLS | NOT_NEEDED,
        part=(part, PARTS),
    )
    print(*outcomes, sep="\n")
    assert outcomes
    assert [str(o) for o in outcomes if o.verdict == "NOT DETECTED"] == []


CASE = Case(OP, 128, 192, 64, torch.bfloat16)


def test_a_lost_flag_is_named():
    with pytest.raises(CommTimeoutError) as caught:
        World("sm_90a", flag_fault("drop", 2, 1, skip=1), case=CASE, transport="nvls").run()
    failure = caught.value.failure
    assert (failure.rank, failure.source) == (1, 2)
    assert failure.role in (Role.RECEIVE_PARTIAL, Role.RECEIVE_RESULT)


@pytest.mark.parametrize("starved", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_late_flags_and_a_rank_that_lags_behind_do_no_harm(starved):
    run(OP, "sm_100a", 2, (130, 136, 72), transport="nvls", launches=3, schedule=lagging(starved))


# --- the kernel ---


@pytest.mark.parametrize(("arch", "dtype"), [("sm_90a", "bf16"), ("sm_100a", "f16")])
def test_the_compiled_kernel_sums_and_stores_through_the_switch(arch, dtype):
    config = GemmConfig(arch=arch, in_dtype=dtype, out_dtype=dtype, slot_dtype=dtype, **SMALL[arch])
    kernel = make_kernel(config, Nvls(), pattern="two_shot")
    seen = inspect(partial(compile_kernel, kernel))
    ptx = seen.ptx
    assert seen.findings(exchanges=True) == []
    assert f"multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.{dtype}x2" in ptx
    assert f"multimem.st.relaxed.sys.global.v4.{dtype}x2" in ptx


# --- refusals, the same on every rank ---


@pytest.mark.parametrize("op", ["gemm_reduce_scatter", "gemm_all_gather", "all_gather_gemm"])
def test_other_ops_are_refused(op):
    with pytest.raises(ValueError, match=f"transport='nvls' is for gemm_all_reduce.*not for {op}"):
        run(op, "sm_90a", 2, (64, 128, 128), transport="nvls")


def test_values_have_16_bits():
    fields = {**SMALL["sm_90a"], "slot_dtype": "f32"}
    with pytest.raises(ValueError, match="transport='nvls' sends values of 16 bits; got slot_dtype='f32'"):
        run(OP, "sm_90a", 2, (64, 64, 128), fields, transport="nvls")


def test_one_shot_is_refused():
    with pytest.raises(ValueError, match="transport='nvls' is two-shot"):
        run(OP, "sm_90a", 2, (64, 64, 128), transport="nvls", algorithm="one_shot")


def test_deterministic_sums_are_refused():
    x, weight = torch.zeros(8, 64, dtype=torch.bfloat16), torch.zeros(64, 64, dtype=torch.bfloat16)
    with world_of("sm_90a", 2, transport="nvls") as world:
        for group in world.names:
            with pytest.raises(ValueError, match="deterministic sums are asked for, and transport='nvls'"):
                overlap_gemm.gemm_all_reduce(x, weight, group=group, backend="fused", deterministic=True)


def test_without_a_multicast_address_it_is_refused_and_says_why():
    case = Case(OP, 64, 64, 64, torch.bfloat16)
    with (
        configured(transport="nvls", **SMALL["sm_100a"]),
        Emulator("sm_100a", 2, "immediate", network=True) as emulator,
        VirtualWorld(2, emulator=emulator, beyond_reach=True) as world,
        pytest.raises(RuntimeError, match="no multicast address. Creating a multicast object can take a"),
    ):
        list(run_launches(case, world, 1))
