"""What the ranks of a group agree on before their first fused call."""

import threading
import time
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from overlap_gemm.backends.fused.fused_backend import Fused
from overlap_gemm.backends.fused.plan_cache import resident_clusters
from overlap_gemm.exchange.geometry import MAX_WORLD, ExchangeShape
from overlap_gemm.runtime import peers
from overlap_gemm.runtime.agree import DisagreementError
from overlap_gemm.runtime.group import Group, resolve
from overlap_gemm.runtime.peers import Agreed, merge_proposals, reserved_sms, timeout_ns
from overlap_gemm.tuning.space import default_config
from tests.support.problems import problem

CPU = torch.device("cpu")
OWN = Agreed("sm_90a", "c0ffee", 132, 60_000_000_000)
GROUP = Group("three", 0, 3)


# --- what the ranks' own terms come to ---


def test_the_fewest_sms_and_the_longest_wait_hold_for_all():
    others = [replace(OWN, num_sms=114), replace(OWN, timeout_ns=90_000_000_000)]
    assert merge_proposals(GROUP, [OWN, *others]) == Agreed("sm_90a", "c0ffee", 114, 90_000_000_000)


def test_no_limit_on_one_rank_is_none_on_all():
    assert merge_proposals(GROUP, [OWN, replace(OWN, timeout_ns=0)]).timeout_ns == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"arch": "sm_100a"},
            "different architectures: rank 0 has sm_90a, rank 1 has sm_100a, rank 2 has sm_90a",
        ),
        ({"constants": "decaf"}, "different constants .*rank 1 has decaf"),
    ],
)
def test_what_must_be_equal_is_refused_with_who_has_what(change, words):
    with pytest.raises(DisagreementError, match=words):
        merge_proposals(GROUP, [OWN, replace(OWN, **change), OWN])


def test_ranks_of_different_sizes_would_have_chosen_differently():
    """The hole that agreement closes: the layout of slots follows from the configuration."""
    shapes = [ExchangeShape.even(m, n, 4) for m in (128, 512, 2048, 8192) for n in (4096, 5120, 8192)]
    chosen = {sms: [default_config("sm_90a", "bf16", shape, sms) for shape in shapes] for sms in (132, 114)}
    assert chosen[132] != chosen[114]


class Exchange(Group):
    """A rank of three; the others' answers are given, its own is noted."""

    def __init__(self, *others):
        super().__init__("three", 0, 3, None)
        object.__setattr__(self, "others", others)
        object.__setattr__(self, "told", [])

    def all_gather_object(self, own):
        self.told.append(own)
        return [own, *((None, (theirs,)) for theirs in self.others)]


@pytest.fixture
def meet(monkeypatch):
    """``meet(group)``: this rank's side of it, on a made-up device."""
    here = SimpleNamespace(arch="sm_90a", num_sms=132, device=CPU, is_open=True)
    monkeypatch.setattr(peers, "executor_for", lambda group, device: here)
    monkeypatch.setattr(peers, "_peers", {})
    monkeypatch.setenv("OVERLAP_GEMM_TIMEOUT", "60")
    return lambda group: peers.peers_of(group, CPU, lambda arch: "c0ffee")


def test_ranks_agree_once(meet):
    group = Exchange(replace(OWN, num_sms=114), OWN)
    assert meet(group).agreed.num_sms == 114
    assert meet(group) is meet(group)
    assert group.told == [(None, (OWN,))]


@pytest.mark.parametrize("is_open", [True, False])
def test_memory_of_a_group_whose_name_another_one_has_stays(meet, monkeypatch, is_open):
    """A graph may still store into it; of an emulator that has ended there is none."""
    left = []
    monkeypatch.setattr(peers, "orphaned", left)
    first = meet(Exchange(OWN, OWN))
    first.workspaces.update(a="one", b="one", c="two")
    first.executor.is_open = is_open
    monkeypatch.setattr(peers.Peers, "holds", lambda self, group: self.group is group)
    assert meet(Exchange(OWN, OWN)) is not first
    assert left == (["one", "two"] if is_open else [])


def test_an_open_emulator_is_where_a_rank_of_its_own_runs(monkeypatch):
    monkeypatch.setattr(peers.executors, "emulation", SimpleNamespace(executor=lambda: "emulated"))
    assert peers.executor_for(Group("a", 0, 1), CPU) == "emulated"


def test_threads_that_come_first_together_agree_once(meet, monkeypatch):
    """The peers take part once, so a second exchange would wait for them."""
    group, answer = Exchange(OWN, OWN), Exchange.all_gather_object

    def slowly(self, own):
        time.sleep(0.05)
        return answer(self, own)

    monkeypatch.setattr(Exchange, "all_gather_object", slowly)
    found = []
    threads = [threading.Thread(target=lambda: found.append(meet(group)), daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)  # and no pool, whose end waits for its threads, whatever the test's time limit
    assert len(found) == 4
    assert len(set(map(id, found))) == 1 and group.told == [(None, (OWN,))]


def test_sms_left_to_others_are_not_counted_on(meet, monkeypatch):
    monkeypatch.setenv("OVERLAP_GEMM_RESERVE_SMS", "16")
    side = meet(Exchange(OWN, OWN))
    assert (side.agreed.num_sms, side.reserve_sms) == (116, 16)


def test_a_rank_that_cannot_go_on_tells_the_others_before_it_raises(meet, monkeypatch):
    monkeypatch.setenv("OVERLAP_GEMM_TIMEOUT", "soon")
    group = Exchange(OWN, OWN)
    with pytest.raises(DisagreementError, match="1 of 3 ranks .rank 0: ValueError: .*seconds.*'soon'"):
        meet(group)
    assert "soon" in group.told[0][0]


# --- bounds of waits ---


@pytest.fixture
def gloo(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=77))
    yield dist.distributed_c10d._get_default_group()
    dist.destroy_process_group()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_kernel_waits_as_long_as_the_groups_collectives(gloo, monkeypatch, device):
    monkeypatch.delenv("OVERLAP_GEMM_TIMEOUT", raising=False)
    group = resolve(gloo.group_name)
    assert timeout_ns(group, torch.device(device)) == 77_000_000_000
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=5), gloo)
    assert timeout_ns(group, torch.device(device)) == 5_000_000_000


@pytest.mark.parametrize(
    ("text", "wanted"), [("1.5", 1_500_000_000), ("0", 0), ("1e-10", 1), ("4e9", 4_000_000_000_000_000_000)]
)
def test_the_environment_goes_before_the_group(gloo, monkeypatch, text, wanted):
    monkeypatch.setenv("OVERLAP_GEMM_TIMEOUT", text)
    assert timeout_ns(resolve(gloo.group_name), CPU) == wanted


def test_virtual_ranks_have_no_group_to_ask(monkeypatch):
    monkeypatch.delenv("OVERLAP_GEMM_TIMEOUT", raising=False)
    assert timeout_ns(GROUP, CPU) == 30_000_000_000


@pytest.mark.parametrize("text", ["many", "-1", "1.5"])
def test_a_reserve_that_is_no_number_is_refused(monkeypatch, text):
    monkeypatch.setenv("OVERLAP_GEMM_RESERVE_SMS", text)
    with pytest.raises(ValueError, match="OVERLAP_GEMM_RESERVE_SMS must be a number"):
        reserved_sms()


def test_a_reserve_of_everything_is_refused(meet, monkeypatch):
    monkeypatch.setenv("OVERLAP_GEMM_RESERVE_SMS", "132")
    with pytest.raises(
        DisagreementError, match="rank 0: ValueError: OVERLAP_GEMM_RESERVE_SMS=.* must be less than"
    ):
        meet(Exchange(OWN, OWN))


# --- grids ---


def device(num_sms, clusters):
    return SimpleNamespace(num_sms=num_sms, max_clusters=clusters.__getitem__)


@pytest.mark.parametrize(
    ("size", "reserve", "beside", "fit"),
    [(1, 0, False, 132), (2, 0, False, 60), (2, 8, False, 60), (2, 16, False, 58), (1, 16, True, 115)],
)
def test_a_grid_is_what_fits_at_once_and_leaves_the_reserve(size, reserve, beside, fit):
    """60 clusters of two on 132 SMs: parts of the device that do not make up a whole cluster stay empty."""
    assert resident_clusters(device(132, {1: 132, 2: 60}), size, reserve, beside) == fit


@pytest.mark.parametrize(("size", "reserve", "beside"), [(2, 7, False), (1, 9, False), (1, 7, True)])
def test_a_grid_that_cannot_be_resident_is_an_error_and_not_a_hang(size, reserve, beside):
    with pytest.raises(ValueError, match=f"no room.* of {size} CTAs on 8 SMs less reserve_sms={reserve}"):
        resident_clusters(device(8, {1: 8, 2: 4}), size, reserve, beside)


def test_more_ranks_than_a_workspace_has_words_for_are_refused():
    asked = problem("gemm_reduce_scatter", 4096, 4096, None, world_size=MAX_WORLD + 1)
    assert f"words for {MAX_WORLD} ranks, not {MAX_WORLD + 1}" in (Fused().why_not(asked) or "")
    assert "words" not in (Fused().why_not(replace(asked, world_size=MAX_WORLD)) or "")


# --- what ranks prepare together ---


@pytest.mark.parametrize("capturing", [False, True])
def test_the_first_of_a_kind_is_prepared_together_and_later_ones_alone(meet, monkeypatch, capturing):
    """Also where a graph captures the first one: later a rank may prepare anew, and its peers do not."""
    group = Exchange(OWN, OWN)
    side = meet(group)
    group.told.clear()
    monkeypatch.setattr(peers, "is_capturing", lambda device: capturing)
    assert [side.prepare("kind", "preparing", lambda i=i: i) for i in range(3)] == [0, 1, 2]
    assert len(group.told) == (0 if capturing else 1)
    monkeypatch.setattr(peers, "is_capturing", lambda device: False)
    side.prepare("kind", "preparing", list)
    assert len(group.told) == (0 if capturing else 1)
    side.prepare("another", "preparing", list)
    assert len(group.told) == (1 if capturing else 2)


def test_what_failed_is_prepared_together_again(meet):
    group = Exchange(OWN, OWN)
    side = meet(group)
    for _ in range(2):
        group.told.clear()
        with pytest.raises(
            DisagreementError, match="preparing failed on 1 of 3 ranks .rank 0: ZeroDivisionErr"
        ):
            side.prepare("kind", "preparing", lambda: 1 / 0)
        assert len(group.told) == 1
