"""Own tiles last, reduced by the epilogue (`GemmConfig.own_last`): the same bits, in any company."""

from itertools import product

import pytest
import torch

from cute_emulator import EmulatorError, Schedule, mutate
from overlap_gemm.kernels.all_reduce import TwoShot
from overlap_gemm.kernels.build import make_kernel
from overlap_gemm.kernels.config import GemmConfig
from overlap_gemm.kernels.copies import Results
from overlap_gemm.kernels.exchanging import TileExchange
from overlap_gemm.kernels.orders import DealtShards, OwnTilesLast
from overlap_gemm.kernels.own import OwnSums
from overlap_gemm.kernels.reduce_scatter import ReduceScatter
from overlap_gemm.kernels.send import GatherSender
from overlap_gemm.kernels.visitors import Bias, RowColumnScale
from overlap_gemm.runtime.workspace import CommTimeoutError
from overlap_gemm.testing.cases import Case
from overlap_gemm.testing.emulated import judge, run_launches
from overlap_gemm.transports import LL, PeerBulk

from .chosen import in_turn
from .kernel_case import launched
from .op_runs import LARGER, SMALL, lagging, name, run, slots_of, world_of
from .test_mutations import FLAGS_AND_WAITS, KERNELS, REASONS, TWO_CALLS, checking
from .test_scaled_ops import Scaled
from .test_scaled_ops import check as check_scaled
from .test_sequences import Call, run_sequence

OWN = (("own_last", True),)
SCATTER, REDUCE = "gemm_reduce_scatter", "gemm_all_reduce"
both = pytest.mark.parametrize("arch", SMALL)
RAGGED = 300, 136, 104


def bits(arch, ranks, sizes, fields, op=SCATTER, launches=3, **options):
    """The results of some calls, judged."""
    case = Case(op, *sizes, torch.bfloat16)
    with world_of(arch, ranks, fields, num_sms=2, algorithm="two_shot", **options) as world:
        queued = list(run_launches(case, world, launches))
    for given, outs in queued:
        assert judge(case, given, outs, slots_of(case, fields)).holds
    return torch.cat([out for _, outs in queued for out in outs])


SHAPES = {"ragged": RAGGED, "empty shards": (2, 64, 64), "narrow": (130, 8, 64), "even": (256, 128, 128)}


MODES = {1: "immediate", 2: "lazy", 3: "random"}


@pytest.mark.parametrize(("shape", "ranks", "arch"), in_turn(product(SHAPES, MODES), SMALL))
def test_the_bits_are_those_of_slots(arch, ranks, shape):
    """With a bias; whoever owns nothing, or everything."""
    sizes, mode = SHAPES[shape], MODES[ranks]
    fields = [{**SMALL[arch], "own_last": way} for way in (True, False)]
    mine, slots = (bits(arch, ranks, sizes, each, mode=mode) for each in fields)
    assert torch.equal(mine, slots)


@pytest.mark.parametrize(
    ("ranks", "sizes", "mode", "arch"),
    in_turn([(3, RAGGED, "random"), (4, (130, 328, 64), "lazy")], SMALL),
)
def test_sums_that_go_on_have_the_bits_of_slots(arch, ranks, sizes, mode):
    """Two-shot, with a bias; where some owner has few columns, or none."""
    fields = [{**SMALL[arch], "own_last": way} for way in (True, False)]
    mine, slots = (bits(arch, ranks, sizes, each, REDUCE, 2, mode=mode) for each in fields)
    assert torch.equal(mine, slots)


@pytest.mark.parametrize(
    ("op", "kind"),
    in_turn([SCATTER, REDUCE], LARGER),
    ids=lambda given: given if isinstance(given, str) else name(given),
)
def test_larger_tiles_and_clusters(kind, op):
    arch, fields = kind
    found = [
        bits(arch, 2, (520, 200, 72), {**fields, "own_last": way}, op, 1, mode="random")
        for way in (True, False)
    ]
    assert torch.equal(*found)


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
def test_sums_that_go_on_with_a_publisher(arch):
    """It raises the flags of partials alone."""
    fields = {**SMALL[arch], "own_last": True, "publisher": True}
    way = {"algorithm": "two_shot", "mode": "lazy", "num_sms": 1}
    run(REDUCE, arch, 3, (300, 264, 64), fields, launches=3, **way)


@pytest.mark.parametrize("arch", ["sm_100a", pytest.param("sm_90a", marks=pytest.mark.slow)])
def test_sums_that_go_on_with_scales(arch):
    """Those of partials come in front of the sum, a bias after it."""
    with world_of(arch, 3, {"own_last": True}, algorithm="two_shot", mode="random") as world:
        check_scaled(Scaled(REDUCE, 130, 264, 432), world)


@pytest.mark.parametrize(
    ("more", "arch"),
    in_turn([{"slot_dtype": "f32"}, {"publisher": True}, {"out_dtype": "f32"}], SMALL),
    ids=str,
)
def test_with_other_slots_outputs_and_publishers(arch, more):
    mma = SMALL[arch]["mma"]
    tile, cluster = SMALL[arch]["tile"], SMALL[arch].get("cluster", (1, 1))
    config = {"arch": arch, "mma": mma, "tile": tile, "cluster": cluster, **more}
    config["epilogue"] = (RowColumnScale(), Bias("bf16"))
    sizes = {"rows": 2 * tile[0] + 8, "cols": tile[1] + 24, "depth": 72}
    cases = [
        launched(GemmConfig(**config, own_last=way), PeerBulk(), 2, **sizes)  # type: ignore[arg-type]
        for way in (True, False)
    ]
    cases[0].check()
    for mine, slots in zip(cases[0].outs, cases[1].outs, strict=True):
        assert torch.equal(mine, slots)


@pytest.mark.parametrize(("op", "slow", "arch"), in_turn(product([SCATTER, REDUCE], [0, 1]), SMALL))
def test_a_lagging_rank(arch, slow, op):
    way = {"algorithm": "two_shot", "schedule": lagging(slow), "num_sms": 1}
    run(op, arch, 2, (256, 128, 64), {**SMALL[arch], "own_last": True}, launches=6, **way)


@both
@pytest.mark.parametrize("op", [SCATTER, REDUCE])
def test_warps_and_lanes_in_any_order(arch, op):
    way = {"algorithm": "two_shot", "schedule": Schedule(order="random", lanes=True), "num_sms": 1}
    run(op, arch, 3, RAGGED, {**SMALL[arch], "own_last": True}, mode="random", **way)


@pytest.mark.parametrize(("starved", "arch"), in_turn([0, 2], SMALL))
def test_calls_with_and_without_take_turns_on_one_workspace(arch, starved):
    kernels = [OWN, (), OWN, OWN, (), OWN, ()]
    calls = [(2, 64), (300, 136), (1, 64), (130, 136), (2, 136), (130, 136), (130, 136)]
    ways = [SCATTER] * 4 + [REDUCE] * 3
    algorithms = [None] * 4 + ["one_shot", "two_shot", "two_shot"]
    given = zip(calls, ways, algorithms, kernels, strict=True)
    run_sequence(arch, 3, [Call(*sizes, *rest) for sizes, *rest in given] * 2, starved=starved)


def test_only_where_partials_have_flags():
    with pytest.raises(ValueError, match="own_last is for tiles sent by peer_bulk"):
        make_kernel(GemmConfig(own_last=True), LL())
    with pytest.raises(ValueError, match="must be out_dtype"):
        make_kernel(GemmConfig(own_last=True, slot_dtype="f32"), PeerBulk(), pattern="two_shot")
    with pytest.raises(ValueError, match="own_last"):
        GemmConfig(mma="swap_ab", tile=(16, 64), own_last=True)


class Shuffled(DealtShards):
    def num_sent(self, work):
        return OwnTilesLast().num_sent(work)


def all_sent(self, work):
    return work


def own_of_two(arch, op, tiles):
    """A call of two ranks with one CTA each, which has so many tiles for either."""
    rows, columns = SMALL[arch]["tile"]
    sizes = (2 * rows, tiles * columns, 64) if op == SCATTER else (tiles * rows, 2 * max(columns, 64), 64)
    fields = {**SMALL[arch], "own_last": True}
    run(op, arch, 2, sizes, fields, num_sms=1, algorithm="two_shot")


@pytest.mark.parametrize(("op", "arch"), in_turn([SCATTER, REDUCE], SMALL))
def test_tiles_whose_flags_lag_into_own_ones_wait_for_each_other(arch, op, monkeypatch, changed_kernels):
    """The comm lane flushes after the tiles that are sent: here one of each, and it does not."""
    monkeypatch.setattr(TileExchange, "_sent", all_sent)
    with pytest.raises((CommTimeoutError, EmulatorError)):
        own_of_two(arch, op, 1)


@pytest.mark.parametrize(("op", "arch"), in_turn([REDUCE, SCATTER], SMALL))
def test_own_tiles_come_last_or_are_sent(arch, op, monkeypatch, changed_kernels):
    """Not the tiles before `num_sent` go to peers in another order."""
    monkeypatch.setattr(ReduceScatter, "order", property(lambda self: Shuffled(8)))
    monkeypatch.setattr(TwoShot, "order", property(lambda self: Shuffled(8)))
    with pytest.raises((CommTimeoutError, EmulatorError, AssertionError)):
        own_of_two(arch, op, 4)


def stay(patch):
    """Sums go to the output from the epilogue, and the partials on to the peers."""
    patch.setattr(TwoShot, "own_sums", property(lambda self: OwnSums(self.config, self.code, self.transport)))


def before_they_are_sums(patch):
    """Nobody waits for the peers' partials."""
    patch.setattr(PeerBulk, "await_partials", lambda *_, **__: None)


def one_flag_for_all_tiles(patch):
    patch.setattr(Results, "flag", lambda self, work, tile, unit: work.slots)


def nowhere_but_at_the_peers(patch):
    patch.setattr(GatherSender, "_store", lambda *_: None)


@pytest.mark.parametrize(
    ("arch", "mistake"),
    [
        ("sm_90a", stay),
        ("sm_100a", before_they_are_sums),
        ("sm_90a", one_flag_for_all_tiles),
        ("sm_100a", nowhere_but_at_the_peers),
    ],
)
def test_what_is_wrong_with_sums_that_go_on_is_noticed(arch, mistake, monkeypatch, changed_kernels):
    mistake(monkeypatch)
    with pytest.raises((CommTimeoutError, EmulatorError, AssertionError)):  # noqa: PT012
        for slow in (0, 1):
            way = {"algorithm": "two_shot", "schedule": lagging(slow), "num_sms": 1, "mode": "lazy"}
            run(REDUCE, arch, 2, (256, 256, 64), {**SMALL[arch], "own_last": True}, launches=2, **way)


ENTRY = {
    f"{word}.sys.global.b64#0: .sys -> .gpu": "guards the call after next: the next test"
    for word in ("st.release", "ld.relaxed", "ld.acquire")
}


@pytest.mark.parametrize(
    ("kind", "select"),
    [
        ("pingpong", ("bar*.sync*",)),
        pytest.param("pingpong", FLAGS_AND_WAITS, marks=pytest.mark.slow),
        pytest.param("1cta", (*FLAGS_AND_WAITS, "bar*.sync*"), marks=pytest.mark.slow),
    ],
)
def test_every_weakened_flag_and_bulk_wait_shows(kind, select):
    """The group's barrier; and as with own slots (test_mutations.py)."""
    arch, fields, (rows, columns, _), num_sms = KERNELS[kind]
    check = checking(arch, {**fields, "own_last": True}, (rows, columns, 64), num_sms)
    tried = [mutate.Setting("lazy", 0), mutate.Setting("immediate"), mutate.Setting("lazy", 1)]
    outcomes = mutate.run(check, tried, select=select, reasons=REASONS | TWO_CALLS | ENTRY)
    print(*outcomes, sep="\n")
    assert [str(o) for o in outcomes if o.verdict == "NOT DETECTED"] == []
    assert any(o.verdict == "detected" for o in outcomes)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@both
def test_every_weakened_flag_and_bulk_wait_of_sums_that_go_on_shows(arch):
    """Of two-shot: flags of partials and of sums."""
    case = Case(REDUCE, 64, 512, 64, torch.bfloat16)

    def check(options):
        fields = {**SMALL[arch], "own_last": True}
        with world_of(arch, 2, fields, algorithm="two_shot", num_sms=1, **options) as world:
            for given, outs in run_launches(case, world, 2):
                assert judge(case, given, outs, torch.bfloat16).holds

    tried = [mutate.Setting("immediate"), *(mutate.Setting("lazy", seed) for seed in range(2))]
    select = (*FLAGS_AND_WAITS, "bar*.sync*")
    outcomes = mutate.run(check, tried, select=select, reasons=REASONS | TWO_CALLS)
    print(*outcomes, sep="\n")
    assert [str(o) for o in outcomes if o.verdict == "NOT DETECTED"] == []


@pytest.mark.parametrize("kind", [pytest.param("1cta", marks=pytest.mark.slow), "pingpong"])
def test_every_weakened_entry_flag_shows(kind):
    """By calls in which a rank owns nothing: all its slots are a peer's to write two calls later."""
    arch, fields, _, num_sms = KERNELS[kind]
    check = checking(arch, {**fields, "own_last": True}, (1, 128, 64), num_sms, launches=4)
    tried = [mutate.Setting("immediate"), *(mutate.Setting("lazy", seed) for seed in range(3))]
    outcomes = mutate.run(check, tried, select=tuple(key.split(":")[0] for key in ENTRY), reasons=REASONS)
    print(*outcomes, sep="\n")
    assert [str(o) for o in outcomes if o.verdict == "NOT DETECTED"] == []
