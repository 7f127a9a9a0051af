"""Settings of the fused backend: nested, per thread, and in the threads that run backward."""

import dataclasses
import sys
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from overlap_gemm.config.gemm_config import CHOICES, FACTS, GemmConfig
from overlap_gemm.spec import OPS, TRANSPORTS, transports_of
from overlap_gemm.spec.promises import Promises
from overlap_gemm.tuning.settings import Settings, _store, configured, promised, settings, within


def test_blocks_nest_and_end():
    assert settings() == Settings()
    with configured(tile=(128, 64), reserve_sms=8):
        with configured(tile=(128, 128), raster_group=4):
            assert settings() == Settings((("tile", (128, 128)), ("raster_group", 4)), 8)
        with configured(reserve_sms=0):
            assert settings() == Settings((("tile", (128, 64)),), 0)
        assert settings().reserve_sms == 8
    with pytest.raises(RuntimeError, match="out"), configured(reserve_sms=3):
        raise RuntimeError("out")
    assert settings() == Settings()


def test_a_reserve_below_nothing_is_refused():
    with pytest.raises(ValueError, match="reserve_sms=-1"), configured(reserve_sms=-1):
        pass


def test_another_threads_block_is_its_own():
    """Blocks of two threads that end in another order than they began in."""
    entered, leave = threading.Event(), threading.Event()
    seen = []

    def other():
        with configured(reserve_sms=5):
            entered.set()
            leave.wait(10)
            seen.append(settings().reserve_sms)
        seen.append(settings().reserve_sms)

    thread = threading.Thread(target=other)
    with configured(reserve_sms=7):
        thread.start()
        assert entered.wait(10)
        assert settings().reserve_sms == 7
    leave.set()
    thread.join()
    assert seen == [5, None] and settings().reserve_sms is None


class Noted(torch.autograd.Function):
    """Notes thread and settings of its backward, which runs another one `depth` levels deep.

    Beyond 60 levels autograd goes on in a thread of its pool, as it does for every GPU.
    """

    @staticmethod
    def forward(ctx, x, depth, notes):
        ctx.depth, ctx.notes = depth, notes
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.notes.append((threading.get_ident(), settings().reserve_sms))
        if ctx.depth:
            with torch.enable_grad():
                x = torch.ones(1, requires_grad=True)
                Noted.apply(x, ctx.depth - 1, ctx.notes).backward()
        return grad, None, None


def test_the_threads_that_run_backward_have_the_settings_of_who_started_it():
    notes = []
    with configured(reserve_sms=3):
        out = Noted.apply(torch.ones(1, requires_grad=True), 70, notes)
    with configured(reserve_sms=9):
        out.backward()
    threads, seen = zip(*notes, strict=True)
    assert len(set(threads)) > 1, "autograd used a second thread"
    assert set(seen) == {9}


def test_what_checkpointing_computes_again_has_those_of_backward():
    seen = []

    def forward(x):
        seen.append(settings().reserve_sms)
        return x.sin()

    with configured(reserve_sms=4):
        checkpoint(forward, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert seen == [4, 4]


def test_a_block_leaves_no_reference_and_takes_none():
    """torch 2.11 keeps an object per thread without counting its reference; so it would be freed in use."""
    with configured(tile=(64, 128)):
        outer = settings()
        references = sys.getrefcount(outer)
        for _ in range(100):
            with configured(raster_group=4):
                inner = settings()
                assert inner is settings() and sys.getrefcount(inner) >= 3  # the name, torch's, the argument
            assert settings() is outer
        assert sys.getrefcount(outer) == references


@pytest.mark.parametrize(
    ("old", "new"), [({"transport": "peer_words"}, "ll"), ({"mma": "swapped"}, "swap_ab")]
)
def test_old_names_are_taken_with_a_warning(old, new):
    with pytest.warns(FutureWarning, match=f"renamed to '{new}'"), configured(**old):
        asked = settings()
    assert asked.tile_transport == new if "transport" in old else asked.fields == (("mma", new),)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_op_takes_the_transports_that_it_has_and_names_them_beside_another(op, transport):
    spec = OPS[op]
    with configured(transport=transport):
        if transport in transports_of(spec):
            assert settings().transport_of(spec) is TRANSPORTS[transport]
        else:
            with pytest.raises(
                ValueError, match=f"transport='{transport}' is for .*, not for {op}: use one of"
            ):
                settings().transport_of(spec)


def test_shards_and_tiles_are_asked_for_apart_and_blocks_nest():
    with configured(shard_transport="copy_engine"), configured(tile_transport="ll"):
        assert settings().transport_of(OPS["all_gather_gemm"]) is TRANSPORTS["copy_engine"]
        assert settings().transport_of(OPS["gemm_all_reduce"]) is TRANSPORTS["ll"]
        with configured(transport="peer_bulk"):
            assert {settings().transport_of(op) for op in OPS.values() if transports_of(op)} == {
                TRANSPORTS["peer_bulk"]
            }
        with configured(transport="nvshmem", shard_transport="peer_bulk"):
            assert settings().transport_of(OPS["all_gather_gemm"]) is TRANSPORTS["peer_bulk"]
            assert settings().transport_of(OPS["gemm_all_gather"]) is TRANSPORTS["nvshmem"]
    assert settings() == Settings()


@pytest.mark.parametrize(
    "asked", [{"shard_transport": "ll"}, {"tile_transport": "copy_engine"}, {"transport": "nvlink"}]
)
def test_what_neither_shards_nor_tiles_travel_by_is_refused(asked):
    [(name, value)] = asked.items()
    with (
        pytest.raises(ValueError, match=f"configured: {name} must be one of .*, got '{value}'"),
        configured(**asked),
    ):
        pass


def test_every_field_of_a_kernel_is_a_choice_or_a_fact():
    names = [field.name for field in dataclasses.fields(GemmConfig)]
    assert sorted((*CHOICES, *FACTS)) == sorted(names)
    with configured(**dict.fromkeys(CHOICES, "any")):
        assert [name for name, _ in settings().fields] == list(CHOICES)


@pytest.mark.parametrize("name", [*FACTS, "tiles"])
def test_a_field_that_is_no_choice_is_refused_by_name(name):
    rule = "there is no such field" if name == "tiles" else "it depends on the device and the operands"
    match = f"configured: {name} cannot be chosen: {rule}.*use one of tile, cluster, mma"
    with pytest.raises(TypeError, match=match), configured(**{name: "f32"}):
        pass
    assert settings() == Settings()


@pytest.mark.parametrize("value", [[128, 64], {}, ([128], 64)])
def test_a_value_that_is_not_hashable_is_refused_by_name(value):
    with pytest.raises(TypeError, match="configured: tile=.* must be hashable"), configured(tile=value):
        pass
    assert settings() == Settings()


def test_fields_have_one_order():
    """Ranks may write them in different orders, and compare them."""
    with configured(raster_group=4, tile=(128, 64), mma="pingpong"):
        at_once = settings()
    with configured(mma="pingpong"), configured(tile=(64, 64)), configured(raster_group=4, tile=(128, 64)):
        assert settings() == at_once
    with promised(Promises(invariant="batch"), OPS["gemm_reduce_scatter"], 2):
        alone = settings()
    with configured(fast_accum=False), promised(Promises(invariant="batch"), OPS["gemm_reduce_scatter"], 2):
        assert settings() == alone


@pytest.mark.parametrize("op", OPS)
def test_ranks_agree_on_what_an_op_looks_at_and_on_no_more(op):
    spec = OPS[op]

    def agreed(**asked):
        with configured(**asked):
            return settings().agreed(spec)

    own, other = ("shard", "tile") if spec.operand_is_sent else ("tile", "shard")
    assert agreed(reserve_sms=3) == agreed() == agreed(**{f"{other}_transport": "peer_bulk"})
    assert agreed(**{f"{own}_transport": "peer_bulk"}) != agreed()
    assert agreed(mma="pingpong") != agreed()
    alone = agreed()
    for chosen in ({}, {"algorithm": "one_shot"}, {"tile_transport": "peer_bulk"}, {"mma": "pingpong"}):
        with configured(**chosen):  # whether calls are measured must be the same on all ranks, too
            assert settings().names_kernels(spec) == (settings().agreed(spec) != alone)
    # A reduce-scatter of few rows may be an all-reduce, unless one is asked for.
    assert (agreed(algorithm="one_shot") != agreed()) == (op in ("gemm_all_reduce", "gemm_reduce_scatter"))


def test_what_was_bound_under_settings_runs_under_them():
    asked = Settings((("tile", (128, 64)),), 4)
    run = within(asked, lambda *given: (settings(), given))
    assert run(1, 2) == (asked, (1, 2))
    assert settings() == Settings()
    with configured(reserve_sms=3):
        before = settings()
        assert run() == (asked, ())
        assert settings() is before
        references = sys.getrefcount(before)
        same = within(before, settings)
        for _ in range(5):  # torch 2.11 would lose a reference each time
            assert same() is before
            _store(before)
        assert sys.getrefcount(before) == references + 1  # `same`'s
    failing = within(asked, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failing()
    assert settings() == Settings()
