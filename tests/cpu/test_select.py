from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import overlap_gemm
from overlap_gemm.backends.base import Problem
from overlap_gemm.backends.fused.fused_backend import Fused
from overlap_gemm.backends.op_call import CallOperands, OpCall, with_fallback
from overlap_gemm.backends.peer_access import Device, PeerAccess, compare
from overlap_gemm.backends.select import BACKENDS, choose
from overlap_gemm.config.scale_blocks import PROMOTED
from overlap_gemm.runtime.group import Group
from overlap_gemm.spec import OPS
from overlap_gemm.tuning import machine
from overlap_gemm.tuning.machine import load, machine_for, why_uncalibrated
from tests.support.problems import changed
from tests.support.problems import problem as problem_of


def problem(op="gemm_reduce_scatter", rows=4096, world_size=4, device="cpu", **facts) -> Problem:
    return problem_of(op, rows, 1024, 1024, torch.bfloat16, device, world_size, **facts)


def portable(chosen: Problem, requested: str = "auto") -> str:
    """What carries a problem out on a machine whose GPU, if it has one, has no fused kernel."""
    with mock.patch.object(Fused, "why_not", return_value="not here"):
        return choose(chosen, requested).backend.name


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world_size", [1, 2, 8])
@pytest.mark.parametrize("rows", [1, 8192])
def test_on_cpus_auto_takes_torchs_way_and_rank_order_where_it_is_asked_for(op, world_size, rows):
    assert choose(problem(op, rows, world_size)).backend.name == "torch"
    assert choose(problem(op, rows, world_size, deterministic=True)).backend.name == "sequential"


def test_the_choice_says_why():
    printed = str(choose(problem(rows=16)))
    assert "runs as 'torch'" in printed
    assert "decomposed: no, on CPUs it takes more time than the overlap saves" in printed
    assert "sequential: no, its sums in rank order are slower than the collective's" in printed
    assert "fused: no, " in printed


def test_what_is_asked_for_is_not_second_guessed():
    assert choose(problem(rows=16), "decomposed").backend.name == "decomposed"


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("rows", [1, 8192])
def test_on_gpus_auto_falls_back_to_what_torch_does(op, rows):
    assert portable(problem(op, rows, device="cuda")) == "torch"
    assert portable(problem(op, rows, device="cuda"), with_fallback("fused")) == "torch"


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("rows", [1, 8192])
def test_deterministic_sums_are_never_left_to_a_collective(op, device, rows):
    asked = problem(op, rows, device=device, deterministic=True)
    chosen = portable(asked)
    assert chosen in ("sequential", "decomposed")
    assert {backend.name: backend.deterministic for backend in BACKENDS}[chosen]
    if device == "cuda":
        with mock.patch.object(Fused, "why_not", return_value="not here"):
            assert "torch: no, deterministic sums are required" in str(choose(asked))


def test_the_argument_stands_above_torchs_switch():
    x, weight = torch.randn(4, 8), torch.randn(8, 8)

    def asked(**options):
        return overlap_gemm.explain("gemm_reduce_scatter", x, weight, **options).problem.deterministic

    assert (asked(), asked(deterministic=True)) == (False, True)
    torch.use_deterministic_algorithms(True)
    try:
        assert (asked(), asked(deterministic=False)) == (True, False)
        assert overlap_gemm.explain("gemm_all_reduce", x, weight, backend="torch").backend.name == "torch"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("op", OPS)
def test_a_promise_that_a_backend_does_not_make_is_refused(op):
    x, weight = torch.randn(4, 8), torch.randn(8, 8)
    with pytest.raises(ValueError, match="deterministic=True and backend='torch'"):
        getattr(overlap_gemm, op)(x, weight, backend="torch", deterministic=True)


@pytest.mark.parametrize("op", OPS)
def test_auto_takes_sequential_for_8_bits_with_partial_sums_that_torch_rounds(op):
    block = 32 if OPS[op].reshards_k else None
    x, scale_x = overlap_gemm.quantize_rows(torch.randn(4, 32), block=block)
    weight, scale_w = overlap_gemm.quantize_rows(torch.randn(32, 32), block=block)
    scales = {"scale_x": scale_x, "scale_w": scale_w[:1] if block else scale_w, "block": block}
    choice = overlap_gemm.explain(op, x, weight, **scales, partials="float32")
    assert choice.backend.name == "sequential"
    assert "rounds products of 8-bit operands" in dict(choice.verdicts)["torch"]


def test_extents_over_all_ranks_reach_the_choice_where_they_are_known():
    x, weight = torch.randn(4, 16), torch.randn(8, 16)

    def known(op, **options):
        found = overlap_gemm.explain(op, x, weight, **options).problem
        return found.m, found.n, found.k

    assert known("gemm_reduce_scatter") == known("gemm_all_reduce") == (4, 8, None)
    assert known("gemm_reduce_scatter", k=64) == known("gemm_all_reduce", k=64) == (4, 8, 64)
    assert known("gemm_reduce_scatter", k="equal") == (4, 8, 16)
    assert known("all_gather_gemm") == (4, None, 16)
    assert known("all_gather_gemm", columns=32) == (4, 32, 16)
    assert known("gemm_all_gather") == (4, 8, 16)
    for op in ("gemm_reduce_scatter", "gemm_all_reduce"):
        with pytest.raises(ValueError, match=f"{op}: k=15 over all ranks is less than this rank's 16"):
            getattr(overlap_gemm, op)(x, weight, k=15)
    with pytest.raises(ValueError, match="columns=7 over all ranks is less than this rank's 8"):
        overlap_gemm.all_gather_gemm(x, weight, columns=7)


# --- by predicted times ---

HOPPER = PeerAccess("sm_90a", 132, None)


def on_hopper(rows, peer_access=HOPPER, requested="auto", op="gemm_reduce_scatter", k=8192, **facts):
    """The choice on 4 GPUs that reach each other, N = K = 8192 over all ranks."""
    asked = problem_of(op, rows, 8192, k, torch.bfloat16, "cuda", 4, peer_access=peer_access, **facts)
    with mock.patch.object(Fused, "why_not", return_value=None):
        return choose(asked, requested)


@pytest.mark.parametrize("op", OPS)
def test_auto_takes_a_backend_for_a_result_without_elements(op):
    for m, n in ((0, 8192), (64, 0), (0, 0)):
        empty = problem_of(op, m, n, 8192, torch.bfloat16, "cuda", 4, peer_access=HOPPER)
        with mock.patch.object(Fused, "why_not", return_value=None):
            assert choose(empty).backend.name == "fused"


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("rows", [1, 16, 128, 512, 2048, 8192])
@pytest.mark.parametrize("op", OPS)
def test_auto_takes_what_is_predicted_fastest(op, rows, captured):
    choice = on_hopper(rows, op=op, captured=captured)
    times = choice.prediction.seconds
    worth = {"fused", "torch"} & times.keys()
    assert times[choice.backend.name] == min(times[name] for name in worth)


def test_auto_takes_fused_for_many_rows_and_torch_for_some_of_few():
    assert on_hopper(8192, captured=True).backend.name == "fused"
    assert on_hopper(128, captured=True).backend.name == "torch"


def test_the_times_and_the_bound_are_printed():
    printed = str(on_hopper(8192, captured=True))
    times = on_hopper(8192, captured=True).prediction
    assert f"fused: chosen [{times.seconds['fused'] * 1e6:.0f} us predicted]" in printed
    assert f"torch: no, fused is faster [{times.seconds['torch'] * 1e6:.0f} us predicted]" in printed
    assert f"bound: {times.bound * 1e6:.0f} us" in printed
    assert "K not known" not in printed
    assert "K not known" in str(on_hopper(8192, captured=True, k=None))


def test_ranks_that_do_not_reach_each_other_are_no_error_to_auto():
    apart = PeerAccess("sm_90a", 132, "not all ranks have P2P access to each other's memory (rank 1: no)")
    choice = on_hopper(8192, peer_access=apart, captured=True)
    assert choice.backend.name == "torch"
    assert "fused: no, not all ranks have P2P access to each other's memory" in str(choice)
    assert on_hopper(8192, peer_access=apart, captured=True, deterministic=True).backend.name == "sequential"
    assert on_hopper(8192, peer_access=apart, captured=True, requested="fused").backend.name == "fused"


@pytest.mark.parametrize(
    ("device", "words"),
    [
        (("sm_90a", "NVIDIA H100 PCIe"), "on NVIDIA H100 PCIe, and those of NVIDIA H200 (measured)"),
        (("sm_90a", "NVIDIA GH200 480GB"), "on NVIDIA GH200 480GB, and those of NVIDIA H200 (measured)"),
        (("sm_90a", "NVIDIA H20"), "on NVIDIA H20, and those of NVIDIA H200 (measured)"),
        (("sm_100a", "NVIDIA B200"), "on NVIDIA B200, and those of NVIDIA B200 (expected)"),
        (("sm_103a", "NVIDIA B300"), "on NVIDIA B300, and those of NVIDIA B200 (expected)"),
    ],
)
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_where_no_constants_were_measured_auto_takes_torchs_way_and_says_so(op, captured, device, words):
    """Never slower: what a device's own kernels take is known by measuring it, not its architecture."""
    unknown = PeerAccess(device[0], 132, None, why_uncalibrated(*device))
    choice = on_hopper(8192, peer_access=unknown, op=op, captured=captured)
    assert choice.backend.name == "torch" and choice.prediction is None
    assert f"fused: no, the model's constants have not been measured {words}" in str(choice)
    assert "run `overlap-gemm tune` to measure them" in str(choice)
    assert on_hopper(8192, peer_access=unknown, op=op, requested="fused").backend.name == "fused"
    assert on_hopper(8192, peer_access=unknown, op=op, deterministic=True).backend.name == "sequential"


def test_constants_of_a_devices_own_name_decide():
    assert why_uncalibrated("sm_90a", "NVIDIA H200") is None
    assert why_uncalibrated("sm_90a", "NVIDIA H100 80GB HBM3") is None
    assert "have not been measured on NVIDIA H200 NVL" in why_uncalibrated("sm_90a", "NVIDIA H200 NVL")


def test_what_tune_measured_on_a_device_decides_there(tmp_path, monkeypatch):
    monkeypatch.setattr(machine.platformdirs, "user_config_dir", lambda name: str(tmp_path / name))
    machine_for.cache_clear()
    h20 = "NVIDIA H20"
    assert machine_for("sm_90a", h20).name == "NVIDIA H200" and why_uncalibrated("sm_90a", h20)
    machine.save(replace(load("h200"), name=h20, mma_rate=1e14), machine.user_file(h20))
    machine_for.cache_clear()
    assert machine_for("sm_90a", h20).mma_rate == 1e14 and why_uncalibrated("sm_90a", h20) is None
    assert machine_for("sm_90a", "NVIDIA H200").mma_rate == load("h200").mma_rate, "of another device"
    assert why_uncalibrated("sm_90a", "NVIDIA GH200 480GB")
    machine_for.cache_clear()


@pytest.mark.parametrize("timed", [None, PROMOTED[0], PROMOTED[1]])
def test_scales_of_blocks_are_compared_by_constants_of_their_own_or_it_is_said(tmp_path, monkeypatch, timed):
    """Blocks of 128 by those with scales of rows where there are none of their own; smaller ones not."""
    known = load("h200")
    efficiency = known.efficiencies(None)
    if timed is not None:
        efficiency["cooperative 128x128 2x1 b" + "x".join(map(str, timed))] = 0.9
    machine.save(replace(known, efficiency=efficiency, blocks_rate=1.0), tmp_path / "mine.json")
    monkeypatch.setenv(machine.MACHINE_VARIABLE, str(tmp_path / "mine.json"))
    for blocks in PROMOTED:
        machine_for.cache_clear()
        asked = problem(
            rows=8192, device="cuda", peer_access=HOPPER, captured=True, block=blocks[2],
            weight_dtypes=(torch.float8_e4m3fn,), out_dtype=torch.bfloat16,
        )  # fmt: skip
        with (
            mock.patch.object(Fused, "why_not", return_value=None),
            mock.patch("overlap_gemm.backends.scales.scaling.why_no_product", return_value=None),
        ):
            choice = choose(changed(asked, dtype=torch.float8_e4m3fn, columns=8192, k=8192))
        believed = blocks in (timed, PROMOTED[0])
        assert choice.backend.name == ("fused" if believed else "torch")
        why = f"kernels with scales of blocks of {blocks[1]} x {blocks[2]} have not been timed on NVIDIA H200"
        assert (why in str(choice)) == (blocks != timed)
        assert (f"constants are those with scales of rows: {why}" in str(choice)) == (blocks != timed)
        assert choice.prediction.config.blocks == blocks
    monkeypatch.undo()
    machine_for.cache_clear()


def test_deterministic_sums_may_be_fused():
    assert on_hopper(8192, captured=True, deterministic=True).backend.name == "fused"


def gpu(**facts):
    return Device(**{
        "why_not": None, "arch": "sm_90a", "num_sms": 132, "constants": "a", "host": "h", "uuid": "u", **facts
    })  # fmt: skip


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"why_not": "too old"}, "rank 1: too old"),
        ({"arch": "sm_100a"}, "different architectures: rank 0 has sm_90a, rank 1 has sm_100a"),
        ({"constants": "b"}, "different constants of their machines: rank 0 has a, rank 1 has b"),
        ({"host": "i"}, "different hosts: rank 0 has h, rank 1 has i"),
    ],
)
def test_what_ranks_do_not_share_keeps_auto_from_fused(other, reason):
    group = Group("pair", 0, 2)
    assert reason in compare(group, [gpu(), gpu(**other)]).why_not
    assert compare(group, [gpu(), gpu(num_sms=114)]) == PeerAccess("sm_90a", 114, None)


def test_one_rank_whose_constants_are_not_measured_is_enough():
    found = compare(Group("pair", 0, 2), [gpu(), gpu(uncalibrated="not on this one")])
    assert found == PeerAccess("sm_90a", 132, None, "not on this one")


@pytest.mark.parametrize(
    ("requested", "dtype", "asks"),
    [
        ("auto", torch.bfloat16, True),
        (with_fallback("fused"), torch.float16, True),
        ("auto", torch.float32, False),
        ("torch", torch.bfloat16, False),
        ("fused", torch.bfloat16, False),
    ],
)
def test_only_auto_asks_what_gpus_reach(requested, dtype, asks):
    x = SimpleNamespace(is_cuda=True, dtype=dtype, device=torch.device("cuda", 0))
    with (
        mock.patch("overlap_gemm.backends.base.peer_access_of", return_value=HOPPER) as peer_access_of,
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
    ):
        call = OpCall(rows=8, columns=8, backend=requested)
        found = Problem.of("gemm_reduce_scatter", call, CallOperands(x, None), Group("pair", 0, 2))
    assert found.peer_access == (HOPPER if asks else None) and peer_access_of.called == asks


def test_a_problem_is_told_in_words():
    asked = problem_of("gemm_reduce_scatter", 4096, 1023, None, virtual=True)
    for requested in ("fused", "auto"):
        with pytest.raises(ValueError, match="cannot run|no backend can") as caught:
            choose(asked, requested)
        words = "gemm_reduce_scatter of M=4096, width=1023, torch.bfloat16, cpu, P=2 virtual ranks"
        assert words in str(caught.value) and "Problem(" not in str(caught.value)
