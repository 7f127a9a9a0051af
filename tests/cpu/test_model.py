"""The performance model: what was measured, what must grow with what, and that only shared facts decide."""

import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.config.orders import joins_shards
from overlap_gemm.config.scale_blocks import MX, PROMOTED, OperandTypes
from overlap_gemm.tuning.machine import load, machine_for, save
from overlap_gemm.tuning.prediction import predict, predict_on
from overlap_gemm.tuning.settings import configured
from overlap_gemm.tuning.space import candidates, choose_config, lower_small_rs_to_ar, pattern_of, seconds_of
from overlap_gemm.tuning.time_model import (
    Facts,
    collective_seconds,
    efficiency_key,
    efficiency_of,
    fused_time,
    interpolate,
    link_seconds,
    transfer_seconds,
)

RS = "gemm_reduce_scatter"
KERNELS = json.loads((Path(__file__).parents[2] / "benchmarks/results/h200x2-kernels.json").read_text())


def facts(m=8192, n=8192, k=8192, world=4, op=RS, **more):
    return Facts(op, m, n, k, "bf16", world, **more)


def h200(*arguments, **named):
    return predict(facts(*arguments, **named), "sm_90a", 132, captured=True)


# --- what was measured ---

MEASURED = [
    # (op, M, N, K, ranks), then microseconds: product by cuBLAS, torch's two calls, our sequential, fused.
    # One run each, CUDA graphs, H200. The fused times are those of the order that the model describes (owners
    # in turn, own tiles spread); None where only the order before it was measured, or none. Where the other
    # ops' fused times were measured (2026-11-22), the rest of the line is of another run.
    ((RS, 8192, 8192, 8192, 4), 438, 733, 973, 427),
    ((RS, 8192, 4096, 14336, 4), 360, 508, 634, 379),
    ((RS, 2048, 8192, 28672, 4), 357, 442, 492, 377),
    ((RS, 2048, 8192, 8192, 4), 95, 202, 272, 124),
    ((RS, 8192, 8192, 28672, 4), 1524, 1838, 1878, None),
    ((RS, 512, 8192, 8192, 4), 28, 70, None, None),
    ((RS, 8192, 4096, 4096, 4), 103, 292, 419, None),
    ((RS, 2048, 4096, 14336, 4), 84, 145, 189, None),
    ((RS, 8192, 4096, 4096, 8), 57, 257, 400, None),
    ((RS, 8192, 4096, 14336, 8), 170, 366, 507, None),
    ((RS, 8192, 8192, 8192, 8), 207, 578, 865, None),
    ((RS, 2048, 8192, 8192, 8), 53, 168, 254, None),
    ((RS, 8192, 8192, 28672, 8), 732, 1023, 1317, None),
    ((RS, 2048, 8192, 28672, 8), 171, 279, 365, None),
    (("all_gather_gemm", 8192, 28672, 8192, 4), 1335, 1690, 1680, 1397),
    (("all_gather_gemm", 8192, 10240, 8192, 4), 442, 795, 793, 493),
    (("all_gather_gemm", 2048, 28672, 8192, 4), 312, 430, 430, 359),
    (("all_gather_gemm", 512, 10240, 8192, 4), 31.4, 79.4, None, None),
    (("all_gather_gemm", 128, 10240, 8192, 4), None, 40.0, None, None),
    (("gemm_all_gather", 8192, 8192, 8192, 4), 362, 900, None, 559),
    (("gemm_all_gather", 2048, 8192, 8192, 4), 89, 249, None, 172),
    (("gemm_all_gather", 16, 8192, 8192, 4), 10.0, 22.8, None, None),
    (("gemm_all_reduce", 1, 8192, 8192, 4), 9.0, 19.8, 39.1, None),
    (("gemm_all_reduce", 16, 8192, 8192, 4), 7.9, 19.7, 42.8, None),
    (("gemm_all_reduce", 64, 8192, 28672, 4), 33.0, 53.5, 79.6, None),
    (("gemm_all_reduce", 256, 8192, 28672, 4), 45.2, 88.2, 129.8, None),
    (("gemm_all_reduce", 2048, 8192, 28672, 4), 311, 496, 607, 375),
    (("gemm_all_reduce", 8192, 8192, 8192, 4), 372, 994, 1325, 679),
]


def errors(measured, predicted):
    return [p * 1e6 / m - 1 for m, p in zip(measured, predicted, strict=True) if m is not None]


def test_the_models_error_is_known():
    """Absolute times move by up to 15 % between runs (power), so no model can be nearer than that."""
    predictions = [h200(m, n, k, ranks, op) for (op, m, n, k, ranks), *_ in MEASURED]
    _, product, torch, sequential, fused = zip(*MEASURED, strict=True)
    for measured, predicted, largest, mean in (
        (product, [p.product for p in predictions], 0.27, 0.08),
        (torch, [p.seconds["torch"] for p in predictions], 0.17, 0.05),
        (sequential, [p.seconds["sequential"] for p in predictions], 0.20, 0.07),
        (fused, [p.seconds["fused"] for p in predictions], 0.09, 0.03),
    ):
        found = errors(measured, predicted)
        assert max(map(abs, found)) < largest
        assert sum(map(abs, found)) / len(found) < mean


def test_the_choice_is_nearly_the_fastest_kernel_that_was_measured():
    """Of 58 calls on two H200, most of them of few rows, by up to 11 kernels each."""
    machine, slower, wrong = load("h200"), [], []
    for row in KERNELS["results"]:
        call = Facts(row["op"], row["m"], row["n"], row["k"], "bf16", 2)
        pattern = pattern_of(call, machine, "sm_90a", 132)
        config = choose_config(call, machine, "sm_90a", 132, pattern)
        measured = row["kernels"].get(efficiency_key(config))
        joined = row["op"] == "all_gather_gemm" and joins_shards(
            config, row["m"], row["m"] // 2
        )  # written later
        if measured is None or config.k_split > 1 or joined:
            continue
        slower.append(measured / min(row["kernels"].values()) - 1)
        wrong.append(seconds_of(config, call, machine, 132, pattern).total * 1e6 / measured - 1)
    assert len(slower) >= 50
    assert max(slower) < 0.12 and sum(slower) / len(slower) < 0.015
    assert max(map(abs, wrong)) < 0.15 and sum(map(abs, wrong)) / len(wrong) < 0.05


def test_k_decides_where_it_is_known():
    """8B down on 8 ranks: ping-pong took 253 us, cooperative, the choice without K then, 282."""
    assert h200(8192, 4096, 14336, 8).config.mma == "pingpong"


def test_a_cooperative_kernel_stops_for_its_epilogue_and_for_what_its_ring_does_not_hold():
    """Measured at 8192^3 on 4 ranks: nothing sent 389 us against 364, everything 527 against 466."""
    call, machine = facts(), load("h200")
    cooperative, pingpong = (
        GemmConfig("sm_90a", tile, (2, 1), kind)
        for kind, tile in (("cooperative", (128, 256)), ("pingpong", (128, 128)))
    )
    stopped = fused_time(cooperative, call, machine, 132).waves
    assert stopped > 1.1 * fused_time(pingpong, call, machine, 132).waves
    deeper = fused_time(replace(cooperative, ring_stages=6), call, machine, 132).waves
    instant = fused_time(cooperative, call, replace(machine, epilogue=0.0), 132).waves
    assert deeper < stopped and instant < stopped


def test_shards_that_keep_rows_together_leave_ranks_without_tiles():
    """Half of the ranks own all rows: nobody's shard is the own one for the other half."""
    even, coarse = h200(), h200(shard=4096)
    assert coarse.fused.link > even.fused.link


def test_gathered_columns_are_laid_beside_each_other():
    call, machine = facts(m=512, op="gemm_all_gather"), load("h200")
    whole = collective_seconds("all_gather", call.bytes_out, 4, machine)
    moved = transfer_seconds(call, machine, ("reduce_scatter", "all_reduce"))
    copied = 3 * 2 * 512 * 8192 * 2 / machine.memory_rate
    assert moved - whole == pytest.approx(2 * machine.launch + copied)


# --- only shared facts ---


def test_an_unknown_extent_does_not_decide():
    """Two ranks that hold different K and have not agreed on it must choose alike."""
    shape = {"m": 2048, "n": 8192, "world": 4}
    unknown = predict(facts(k=None, **shape), "sm_90a", 132, captured=True)
    assert unknown.seconds == predict(facts(k=4 * 8192, **shape), "sm_90a", 132, captured=True).seconds
    gather = predict(facts(n=None, k=4096, op="all_gather_gemm"), "sm_90a", 132, captured=True)
    assert (
        gather.seconds == predict(facts(n=16384, k=4096, op="all_gather_gemm"), "sm_90a", 132, True).seconds
    )


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("m", [512, 2048, 8192])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (4096, 14336), (8192, 8192), (8192, 28672)])
def test_a_choice_without_k_costs_little(world, m, n, k):
    """Of Llama's row-parallel projections: at most a sixth of the time, wherever K turns out to be."""
    call, machine = facts(m, n, k, world), load("h200")
    blind = predict(facts(m, n, None, world), "sm_90a", 132, captured=True).config
    best = predict(call, "sm_90a", 132, captured=True).seconds["fused"]
    assert fused_time(blind, call, machine, 132).total <= 7 / 6 * best


def test_facts_hold_no_rank():
    names = "op m n k dtype world shard blocks weights launches parts products"
    assert {field.name for field in fields(Facts)} == set(names.split())


def test_ranks_can_compare_their_constants():
    machine = load("h200")
    assert machine.digest == load("h200").digest
    assert replace(machine, link_rate=machine.link_rate + 1).digest != machine.digest


@pytest.mark.parametrize("name", ["h200", "h100", "b200"])
def test_a_machine_survives_its_file(name, tmp_path):
    machine = load(name)
    save(machine, tmp_path / "again.json")
    again = load(str(tmp_path / "again.json"))
    assert again.link_rate == machine.link_rate and again.efficiency == machine.efficiency
    for (size, seconds), (other_size, other) in zip(
        machine.collectives["sum"][8], again.collectives["sum"][8], strict=True
    ):
        assert (other_size, other) == pytest.approx((size, seconds), rel=1e-3), "four digits are kept"
    save(again, tmp_path / "again.json")
    assert load(str(tmp_path / "again.json")).digest == again.digest
    lines = (tmp_path / "again.json").read_text().splitlines()
    assert not [line for line in lines if re.fullmatch(r"\s*[-+.\de]+,?", line)], "a number alone"
    assert max(map(len, lines)) < 200


# --- what grows with what ---


@pytest.mark.parametrize("op", [RS, "all_gather_gemm", "gemm_all_reduce", "gemm_all_gather"])
@pytest.mark.parametrize("larger", ["m", "n", "k"])
def test_more_work_takes_no_less_time(op, larger):
    sizes = [{"m": 512, "n": 1024, "k": 2048, larger: size} for size in (64, 512, 2048, 8192, 16384)]
    times = [h200(**size, op=op) for size in sizes]
    for less, more in zip(times, times[1:], strict=False):
        assert less.product <= more.product
        assert less.bound <= more.bound
        assert all(less.seconds[way] <= more.seconds[way] for way in less.seconds)


@pytest.mark.parametrize("rate", ["mma_rate", "bulk_rate", "memory_rate"])
@pytest.mark.parametrize("size", [16, 512, 8192])
def test_a_faster_machine_is_no_slower(rate, size):
    slow = load("h200")
    fast = replace(slow, **{rate: 2 * getattr(slow, rate)})
    for config in candidates("sm_90a", OperandTypes("bf16")):
        times = [fused_time(config, facts(m=size), m, 132).total for m in (slow, fast)]
        assert times[1] <= times[0]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8, 72])
@pytest.mark.parametrize("m", [1, 5, 100, 8192])
def test_nothing_beats_the_bound_but_by_a_kernels_efficiency(world, m):
    found = h200(m, 4096, 4096, world)
    assert found.bound == max(found.product, found.link)
    assert all(seconds >= found.link for seconds in found.seconds.values())


def test_eager_calls_cost_at_least_their_host_time():
    eager, captured = (predict(facts(m=16), "sm_90a", 132, c) for c in (False, True))
    machine = machine_for("sm_90a")
    for way, seconds in eager.seconds.items():
        assert seconds == max(captured.seconds[way], machine.host[way])


def test_a_curve_is_linear_between_its_points_and_behind_them():
    curve = ((10.0, 1.0), (20.0, 2.0), (40.0, 6.0))
    assert [interpolate(curve, size) for size in (0, 10, 15, 20, 30, 40, 60)] == [1, 1, 1.5, 2, 4, 6, 10]
    assert interpolate(curve[:1], 99) == 1.0


# --- the choice of a configuration ---


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
@pytest.mark.parametrize("rows", [1, 100, 1024, 8192])
def test_the_choice_is_the_candidate_with_the_least_time(arch, rows):
    call, machine = facts(m=rows, world=8), machine_for(arch)
    found = predict(call, arch, 132, captured=True)
    timed = [
        c for c in candidates(arch, OperandTypes("bf16")) if rows <= machine.few_rows or c.mma != "swap_ab"
    ]
    times = [fused_time(c, call, machine, 132).total for c in timed]
    if found.op == RS:
        assert found.fused.total == min(times) == found.seconds["fused"]
    else:  # an all-reduce, which has a choice of its own
        assert rows <= machine.ar_rows
        assert found.seconds["fused"] == found.fused.total <= machine.ar_gain * min(times)


def test_a_choice_follows_configured():
    with configured(mma="cooperative"):
        assert h200().config.mma == "cooperative"
        slower = h200().seconds["fused"]
    assert h200().config.mma == "pingpong"
    assert h200().seconds["fused"] < slower


def test_every_architecture_has_constants_and_those_of_blackwell_are_called_expected():
    assert machine_for("sm_90a").source == "measured"
    assert machine_for("sm_100a").source == machine_for("sm_103a").source == "expected"
    assert machine_for("sm_80") is None
    assert predict(facts(), "sm_80", 108, captured=True) is None


def test_a_kernel_that_was_not_measured_is_expected_to_be_the_least_of_its_like():
    machine = load("h200")
    assert efficiency_of(GemmConfig("sm_90a", (64, 256), (1, 2), "pingpong"), machine) == 0.65


BLOCKS = PROMOTED[0]
ROWS_ALONE = replace(
    load("h200"), efficiency=load("h200").efficiencies(None), blocks_rate=load("h200").bytes_rate
)
"""Of a machine on which no kernel with scales of blocks has been timed."""


def of_blocks(machine, m=8192, blocks=BLOCKS):
    call = Facts(RS, m, 8192, 8192, "e4m3", 4, blocks=blocks)
    return predict_on(call, machine, "sm_90a", 132, captured=True)


def test_kernels_with_scales_of_blocks_have_efficiencies_of_their_own():
    """The key says the blocks; other calls, and torch's product, are not concerned."""
    best = of_blocks(ROWS_ALONE)
    kernel, _, kinds = efficiency_key(best.config).rpartition(" ")
    assert kinds == "b1x128x128"
    halved = ROWS_ALONE.efficiency[kernel] / 2
    own = replace(ROWS_ALONE, efficiency={**ROWS_ALONE.efficiency, f"{kernel} b1x128x128": halved})
    slower = of_blocks(own)
    assert slower.config == best.config, "the only one that was timed is the only candidate"
    assert 1.85 * best.fused.waves < slower.fused.waves < 2 * best.fused.waves, "an epilogue stays as it is"
    assert slower.seconds["torch"] == best.seconds["torch"]
    assert of_blocks(own, blocks=None) == replace(of_blocks(ROWS_ALONE, blocks=None), machine=own)
    alone = replace(best.config, cluster=(1, 1))
    assert efficiency_of(alone, own) == halved, "the least of its tile"
    assert efficiency_of(replace(alone, blocks=None), own) == ROWS_ALONE.efficiency[f"{kernel[:-3]}1x1"]
    fresh = replace(own, one_wave={**own.one_wave, f"{kernel} b1x128x128": 0.9})
    assert (efficiency_of(best.config, own, True), efficiency_of(best.config, fresh, True)) == (halved, 0.9)


def test_kernels_with_scales_of_blocks_that_were_not_timed_are_those_with_scales_of_rows():
    assert {c.blocks for c in candidates("sm_90a", OperandTypes("e4m3", BLOCKS), ROWS_ALONE)} == {BLOCKS}
    for m in (16, 512, 8192):
        rows, blocks = (of_blocks(ROWS_ALONE, m, kind) for kind in (None, BLOCKS))
        assert blocks.seconds["torch"] == rows.seconds["torch"]
        with configured(mma="cooperative", tile=(128, 128)):  # swap_ab has no scales of blocks
            rows, blocks = (of_blocks(ROWS_ALONE, m, kind).fused for kind in (None, BLOCKS))
            assert rows.waves == blocks.waves
    assert (
        "scales of blocks of 128 x 128 have not been timed on NVIDIA H200"
        in ROWS_ALONE.missing_block_timings(BLOCKS)
    )
    assert (
        ROWS_ALONE.missing_block_timings(None) is None and ROWS_ALONE.why_uncalibrated_bytes(BLOCKS) is None
    )
    assert "of 32 x 32 have not been timed" in ROWS_ALONE.why_uncalibrated_bytes(PROMOTED[1])
    timed = {**ROWS_ALONE.efficiency, "cooperative 128x128 2x1 b1x32x32": 0.5}
    assert replace(ROWS_ALONE, efficiency=timed).why_uncalibrated_bytes(PROMOTED[1]) is None


def test_an_architecture_without_kernels_of_these_blocks_is_predicted_all_the_same():
    """`explain` and `plan` say why none is taken."""
    call = Facts(RS, 8192, 8192, 8192, "e4m3", 4, blocks=BLOCKS)
    assert predict(call, "sm_100a", 148, captured=True).config.blocks is None
    mx = predict(replace(call, blocks=MX), "sm_100a", 148, captured=True).config
    assert mx.blocks == MX and mx.cta_tile[0] == 128


@pytest.mark.parametrize("sms", [1, 2, 3, 4, 8])
def test_a_kernel_is_chosen_that_has_room_beside_a_relay(sms):
    """A MIG slice, or an emulated device, may have few SMs."""
    for rows in (1, 128, 256, 4096):
        for op in ("gemm_reduce_scatter", "gemm_all_gather", "all_gather_gemm"):
            call = Facts(op, rows, 4096, 8192, "bf16", 2)
            for arch in ("sm_90a", "sm_100a"):
                config = choose_config(call, machine_for(arch), arch, sms)
                assert config.cluster_ctas <= max(sms // 2, 1), (rows, op, config.name)
    with configured(cluster=(2, 1), mma="pingpong", tile=(128, 128)):  # refused where it is launched
        assert choose_config(call, load("h200"), "sm_90a", 1).cluster == (2, 1)


def test_a_kernel_is_more_efficient_in_one_wave():
    machine = load("h200")
    config = GemmConfig("sm_90a", (64, 128), (2, 1), "pingpong")
    alone = {n: fused_time(config, facts(256, n, 8192, 1), machine, 132).waves for n in (4096, 8192)}
    assert alone[8192] > 2.2 * alone[4096], "64 tiles of a cluster fill the SMs, 128 are two waves"
    assert efficiency_of(config, replace(machine, one_wave={}), True) == efficiency_of(config, machine)


@pytest.mark.parametrize(("rows", "tile"), [(1, (16, 64)), (16, (16, 64)), (64, (32, 64))])
def test_few_rows_get_tiles_so_narrow_that_all_sms_read_the_weight(rows, tile):
    call, machine = Facts("gemm_all_reduce", rows, 8192, 8192, "bf16", 4), load("h200")
    config = choose_config(call, machine, "sm_90a", 132, "one_shot", k_split=1)
    assert (config.mma, config.tile) == ("swap_ab", tile)
    wide = replace(config, mma="pingpong", tile=(64, 256))
    narrow, slow = (fused_time(c, call, machine, 132, "one_shot") for c in (config, wide))
    assert narrow.total < slow.total
    weight = 8192 * 8192 / 4 * 2 / machine.memory_rate
    assert weight <= narrow.waves < 2.2 * weight
    assert narrow.waves < slow.waves, "32 SMs read it at their own rate"
    assert choose_config(call, machine, "sm_90a", 132, "one_shot", slot_dtype="f32").mma != "swap_ab"


@pytest.mark.parametrize("op", ["gemm_all_reduce", "gemm_reduce_scatter", "gemm_all_gather"])
@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_blackwell_has_kernels_for_few_rows(arch, op):
    """By expected constants; of many rows they are none of the candidates."""
    for rows in (1, 16, 64):
        call = Facts(op, rows, 8192, 8192, "bf16", 8)
        config = predict(call, arch, 148, captured=True).config
        assert config.mma == "swap_ab" and config.tile[0] <= max(rows, 16)
    call = Facts(op, machine_for(arch).few_rows + 1, 8192, 8192, "bf16", 8)
    assert predict(call, arch, 148, captured=True).config.mma != "swap_ab"


def test_k_is_cut_where_tiles_are_few():
    """2048 columns a rank make 32 tiles, so 32 SMs would read the weight."""
    call, machine = Facts("gemm_all_gather", 16, 8192, 8192, "bf16", 4), load("h200")
    config = choose_config(call, machine, "sm_90a", 132, "output_gather")
    assert config.mma == "swap_ab" and config.k_split > 1
    whole = fused_time(replace(config, k_split=1), call, machine, 132, "output_gather")
    assert fused_time(config, call, machine, 132, "output_gather").total < 0.9 * whole.total


@pytest.mark.parametrize("world", [4, 8])
def test_an_all_reduce_of_few_rows_is_one_shot_and_of_many_two_shot(world):
    """The more rows, the more a broadcast costs: four H200 take 35 us for 128 in one shot, 29 in two."""
    machine = load("h200")
    chosen = {
        m: pattern_of(Facts("gemm_all_reduce", m, 8192, 8192, "bf16", world), machine, "sm_90a", 132)
        for m in (1, 128, 512, 8192)
    }
    assert chosen == {1: "one_shot", 128: "two_shot", 512: "two_shot", 8192: "two_shot"}
    with configured(algorithm="one_shot"):
        call = Facts("gemm_all_reduce", 8192, 8192, 8192, "bf16", world)
        assert pattern_of(call, machine, "sm_90a", 132) == "one_shot"
        gather = Facts("gemm_all_gather", 8192, 8192, 8192, "bf16", world)
        assert pattern_of(gather, machine, "sm_90a", 132) == "output_gather"


@pytest.mark.parametrize(
    ("op", "pattern"), [("gemm_all_reduce", "two_shot"), ("gemm_all_gather", "output_gather")]
)
def test_what_is_not_measured_takes_at_least_its_bytes(op, pattern):
    machine = load("h200")
    call = Facts(op, 8192, 8192, 8192, "bf16", 4)
    for config in candidates("sm_90a", OperandTypes("bf16")):
        found = fused_time(config, call, machine, 132, pattern)
        small = config.tile in ((64, 128), (128, 64))
        rate = machine.bulk_rate * (machine.small_tile_rate if small else 1)
        assert found.link == pytest.approx(call.bytes_out / rate, rel=0.05)
        assert found.total >= found.link


def test_a_reduce_scatter_of_few_rows_is_an_all_reduce_where_that_is_faster():
    """Four H200 took 74 us for the reduce-scatter of 16 rows and K = 28672, 36 for the all-reduce."""
    machine = load("h200")

    def kernel(m, n, k, world, **shard):
        call = Facts("gemm_reduce_scatter", m, n, k, "bf16", world, **shard)
        return lower_small_rs_to_ar(call, machine, "sm_90a", 132).op

    assert kernel(16, 8192, 28672, 4) == kernel(16, 8192, 8192, 2) == "gemm_all_reduce"
    assert kernel(128, 8192, 8192, 2) == "gemm_reduce_scatter"  # measured 34.5 us, and 36.0
    assert kernel(16, 1024, 1024, 4) == kernel(128, 8192, 28672, 8) == "gemm_reduce_scatter"
    with configured(mma="swap_ab", tile=(16, 64)):
        assert kernel(16, 8192, 28672, 4) == "gemm_reduce_scatter"
    for name in ("all_gather_gemm", "gemm_all_gather"):
        call = Facts(name, 16, 8192, 28672, "bf16", 4)
        assert lower_small_rs_to_ar(call, machine, "sm_90a", 132) is call
    found = predict_on(Facts("gemm_reduce_scatter", 16, 8192, 28672, "bf16", 4), machine, "sm_90a", 132, True)
    assert found.op == "gemm_all_reduce" and found.best == "fused"
    assert found.link == link_seconds(Facts("gemm_reduce_scatter", 16, 8192, 28672, "bf16", 4), machine)
