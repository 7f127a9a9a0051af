"""A fused call's host side, with a kernel that does nothing: what it costs, and when its plan is stale."""

import subprocess
import sys
from unittest import mock

import pytest
import torch

import overlap_gemm
from cute_emulator import Emulator
from overlap_gemm.backends.fused import exchange_plans as exchanges
from overlap_gemm.backends.fused import fused_backend as fused
from overlap_gemm.backends.fused import gather_calls, launch_plan
from overlap_gemm.backends.fused import gather_plans as gathers
from overlap_gemm.backends.fused import plan_cache as plans
from overlap_gemm.backends.fused.fused_backend import Fused
from overlap_gemm.config.rules import MOST_WEIGHTS
from overlap_gemm.epilogues import add_residual, add_residual_squared, swiglu
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.tuning.settings import configured
from tests.support.counting import python_calls

DTYPE = torch.bfloat16
X, WEIGHT, BIAS = (torch.randn(*shape).to(DTYPE) for shape in ((64, 16), (24, 16), (24,)))


@pytest.fixture
def launched(monkeypatch):
    """The launches of the kernels that stand in, as (configuration, arguments)."""
    seen = []

    def stand_in(executor, config, transport, pattern):
        return lambda *given: seen.append((config, given))

    monkeypatch.setattr(plans, "compiled_kernel", stand_in)
    return seen


@pytest.fixture
def world():
    with Emulator("sm_90a", 2) as emulator, VirtualWorld(2, emulator=emulator) as ranks:
        yield ranks


def call(world, x=X, weight=WEIGHT, **options):
    return overlap_gemm.gemm_reduce_scatter(x, weight, group=world.names[0], backend="fused", **options)


@pytest.mark.parametrize(("grad", "budget"), [(False, 45), (True, 58)])
def test_a_call_enters_few_python_functions(world, launched, grad, budget):
    weight = WEIGHT.clone().requires_grad_(grad)
    found = python_calls(lambda: call(world, weight=weight))
    assert found.total() <= budget, (found.total(), found)
    assert len(launched) == 2


@pytest.mark.parametrize(("one", "budget"), [(add_residual, 57), (add_residual_squared, 65)])
def test_a_call_with_an_epilogue_enters_few_python_functions(world, launched, monkeypatch, one, budget):
    residual = torch.randn(len(X) // 2, len(WEIGHT)).to(DTYPE)
    entries = python_calls(lambda: call(world, epilogue=one(residual=residual)))
    assert entries.total() <= budget, (entries.total(), entries)
    monkeypatch.setattr(Fused, "call", None)  # which looks for the plan at every call
    call(world, epilogue=one(residual=residual))
    assert launched[-1][1][3][0].data_ptr() == residual.data_ptr()


@pytest.mark.parametrize(("one", "budget", "both"), [(None, 59, 150), (add_residual, 82, 181)])
def test_recorded_calls_and_gradients_enter_few_python_functions(
    world, launched, monkeypatch, one, budget, both
):
    monkeypatch.setattr(gathers, "compiled_gather", lambda *_, **__: lambda *_: None)
    shapes = X.shape, WEIGHT.shape, (len(X) // 2, len(WEIGHT))
    x, weight, residual = (torch.randn(shape).to(DTYPE).requires_grad_() for shape in shapes)
    wanting = (x, weight) if one is None else (x, weight, residual)
    gradient = torch.ones_like(residual)

    def record():
        more = {} if one is None else {"epilogue": one(residual=residual)}
        return call(world, x=x, weight=weight, **more)

    recorded = python_calls(record)
    assert recorded.total() <= budget, (recorded.total(), recorded)
    with torch.autograd.set_multithreading_enabled(False):
        entries = python_calls(lambda: torch.autograd.grad(record(), wanting, gradient))
    count = sum(number for name, number in entries.items() if not name.startswith("<frozen"))
    assert count <= both, (count, entries)


def test_a_call_of_8_bits_enters_few_python_functions(world, launched):
    (x, scale_x), (weight, scale_w) = map(overlap_gemm.quantize_rows, (X, WEIGHT))
    entries = python_calls(lambda: call(world, x, weight, scale_x=scale_x, scale_w=scale_w))
    assert entries.total() <= 58, (entries.total(), entries)


def test_a_call_with_pairs_enters_few_python_functions(world, monkeypatch):
    launched: list = []
    monkeypatch.setattr(
        gathers, "compiled_gather", lambda *_, **__: lambda *arguments: launched.append(arguments)
    )
    x, *weights = torch.randn(64, 256).to(DTYPE), *torch.randn(2, 64, 256).to(DTYPE)
    how = {"group": world.names[0], "backend": "fused", "rows": 128, "columns": 256, "epilogue": swiglu()}
    entries = python_calls(lambda: overlap_gemm.all_gather_gemm(x, weights, **how))
    assert entries.total() <= 55, (entries.total(), entries)
    monkeypatch.setattr(gather_calls, "all_gather_pairs", None)  # which looks for the plan at every call
    overlap_gemm.all_gather_gemm(x, weights, **how)
    assert [one.data_ptr() for one in launched[-1][1]] == [one.data_ptr() for one in weights]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(("block", "budget"), [(False, 52), (None, 65), (128, 73)])
@pytest.mark.parametrize("transport", ["peer_bulk", "copy_engine"])
def test_a_gather_enters_few_python_functions_and_copies_nothing(
    world, monkeypatch, transport, block, budget, keep
):
    """Checks that rows and scales, also of 8 bits, are read and sent from the memory of the caller."""
    copied: list = []
    monkeypatch.setattr(Emulator, "copy", lambda *arguments: copied.append(arguments))
    monkeypatch.setattr(Emulator, "wait_stream", lambda *_: None)
    monkeypatch.setattr(gathers, "prepared_gate", None)  # which calls of several weights have
    x, weight, launched, how = torch.randn(64, 256).to(DTYPE), torch.randn(24, 256).to(DTYPE), [], {}
    monkeypatch.setattr(
        gathers, "compiled_gather", lambda *_, **__: lambda *arguments: launched.append(arguments)
    )
    if block is not False:
        x, scale_x = overlap_gemm.quantize_rows(x, block=block)
        weight, scale_w = overlap_gemm.quantize_rows(weight)
        scale_w = scale_w if block is None else torch.ones(1, 2)
        how = {"scale_x": scale_x, "scale_w": scale_w, "block": block}
    how |= {"group": world.names[0], "backend": "fused", "rows": 128, "return_gathered": keep}
    with configured(shard_transport=transport):
        entries = python_calls(lambda: overlap_gemm.all_gather_gemm(x, weight, **how))
    if transport == "copy_engine":
        assert copied[-2 if block is False else -3][4] == x.data_ptr()
        budget += 17 if block is False else 18
    assert entries.total() <= budget, (entries.total(), entries)
    *_, gathering, _, _ = launched[-1]
    assert gathering.local_shard == x.data_ptr()
    if block is not False:
        assert gathering.after.address == scale_x.data_ptr()


@pytest.mark.parametrize(("has_scales", "budget"), [(False, 66), (True, 86)])
def test_an_exchange_of_x_with_scales_or_an_epilogue_enters_few_python_functions(
    world, monkeypatch, has_scales, budget
):
    """Checks that the second call launches its plan with the operands of the caller."""
    launched: list = []
    monkeypatch.setattr(
        exchanges, "compiled_gather", lambda *_, **__: lambda *arguments: launched.append(arguments)
    )
    x, weight = torch.randn(64, 128).to(DTYPE), torch.randn(24, 256).to(DTYPE)
    how = {"epilogue": add_residual(residual=torch.randn(32, 24).to(DTYPE))}
    if has_scales:
        x, scale_x = overlap_gemm.quantize_rows(x, block=128)
        weight = overlap_gemm.quantize_rows(weight).values
        how = {"scale_x": scale_x, "scale_w": torch.ones(1, 2), "block": 128}
    how |= {"group": world.names[0], "backend": "fused"}
    entries = python_calls(lambda: overlap_gemm.all_to_all_gemm(x, weight, **how))
    assert entries.total() <= budget, (entries.total(), entries)
    monkeypatch.setattr(exchanges, "all_to_all_gemm", None)  # which looks for the plan at every call
    overlap_gemm.all_to_all_gemm(x, weight, **how)
    assert launched[-1][1].data_ptr() == weight.data_ptr()


def test_a_known_call_is_its_key_its_output_and_the_launch(world, launched, monkeypatch):
    call(world, bias=BIAS)
    helpers = {fused: ("plan_for", "aligned", "aligned_vector"), plans: ("obtain_transport", "settings")}
    for module, names in helpers.items():
        for name in names:
            monkeypatch.setattr(module, name, mock.Mock(side_effect=AssertionError(f"{name} again")))
    monkeypatch.setattr("os.environ", {})
    out = call(world, bias=BIAS)
    a, b, result, (bias,), *_ = launched[-1][1]
    assert (a.data_ptr(), b.data_ptr(), bias.data_ptr()) == (X.data_ptr(), WEIGHT.data_ptr(), BIAS.data_ptr())
    assert result.data_ptr() == out.data_ptr() and out.shape == (32, 24)


def test_an_operand_that_lies_elsewhere_is_copied_to_where_tma_can_read(world, launched):
    for shift in (0, 1, 0, 3):
        x = torch.randn(64 * 16 + shift).to(DTYPE)[shift:].view(64, 16)
        bias = torch.randn(24 + shift).to(DTYPE)[shift:]
        call(world, x=x, bias=bias)
        a, _, _, (read,), *_ = launched[-1][1]
        assert a.data_ptr() % 16 == 0 and torch.equal(a[:, :16], x)
        assert read.data_ptr() % 16 == 0 and torch.equal(read, bias)
        assert (a.data_ptr() == x.data_ptr()) == (shift == 0)


def test_each_layout_has_its_kernel(world, launched):
    transposed = torch.randn(16, 64).to(DTYPE).t()
    for x in (X, transposed, X, transposed):
        call(world, x=x)
        assert launched[-1][1][0].data_ptr() == x.data_ptr()
    assert [config.a_major for config, _ in launched] == ["k", "m", "k", "m"]


def test_a_transposed_operand_is_copied_where_a_shard_begins_between_16_bytes(world, launched):
    """Along M a TMA load begins at a multiple of 8 rows: two ranks' shards of 36 rows at 0 and 18."""
    for rows, copied in ((36, True), (32, False), (31, False), (18, True)):
        x = torch.randn(16, -(-rows // 8) * 8).to(DTYPE).t()[:rows]
        call(world, x=x)
        config, (a, *_) = launched[-1]
        assert (config.a_major, a.data_ptr() != x.data_ptr()) == (("k", True) if copied else ("m", False))
        assert torch.equal(a, x)


def test_settings_choose_the_kernel_of_every_call(world, launched):
    with configured(mma="pingpong", tile=(128, 128)):
        call(world)
    with configured(mma="cooperative", tile=(128, 256)):
        call(world)
    call(world)
    with configured(mma="pingpong", tile=(128, 128)):
        call(world)
    tiles = [config.tile for config, _ in launched]
    assert tiles[0] == tiles[3] == (128, 128) and tiles[1] == (128, 256)


def test_sms_left_to_others_are_part_of_the_kind(world, launched):
    """By the call, or else by the block around it."""
    full = world.executor(0).num_sms
    shape = {"x": torch.randn(4096, 16).to(DTYPE), "weight": torch.randn(1024, 16).to(DTYPE)}

    def grids(reserve, **options):
        launched.clear()
        out = overlap_gemm.gemm_reduce_scatter(
            group=world.names[0], backend="fused", reserve_sms=reserve, **shape, **options
        )
        return out, [given[5] for _, given in launched]

    for reserve, left in ((None, full), (8, full - 8), (0, full), (8, full - 8)):
        assert grids(reserve)[1] == [left // launched[-1][0].cluster_size]
    with configured(reserve_sms=4):
        assert grids(None)[1] == [(full - 4) // launched[-1][0].cluster_size]
        assert grids(8)[1] == [(full - 8) // launched[-1][0].cluster_size]
    shape["x"] = torch.randn(4096 * 16 + 1).to(DTYPE)[1:].view(4096, 16)  # one that is copied first
    assert grids(8)[1] == [(full - 8) // launched[-1][0].cluster_size]
    for wrong in (-1, 1.5, "8"):
        with pytest.raises(ValueError, match="must be a number of SMs, 0 or more"):
            grids(wrong)


def test_k_is_part_of_the_kind(world, launched, monkeypatch):
    depths = []
    real = plans.default_config
    monkeypatch.setattr(
        plans,
        "default_config",
        lambda arch, dtype, shape, sms, depth=None, /, **more: (
            depths.append(depth) or real(arch, dtype, shape, sms, depth, **more)
        ),
    )
    for k in (None, 32, None, 32):
        call(world, k=k)
    assert depths == [None, 32]


def test_a_closed_workspace_is_not_used_again(world, launched):
    call(world)
    before = launched[-1][1][4]
    for name in world.names:
        overlap_gemm.close_workspaces(name)
    call(world)
    after = launched[-1][1][4]
    assert after.peers is not before.peers
    call(world)
    assert launched[-1][1][4].peers is after.peers


def test_after_a_warm_up_no_plan_is_made(world, launched, monkeypatch):
    for name in world.names:
        overlap_gemm.warmup("gemm_reduce_scatter", (64, 24, 32), group=name, device="cpu", backend="fused")
    monkeypatch.setattr(plans, "_make_plan", mock.Mock(side_effect=AssertionError("made after the warm-up")))
    for name in world.names:
        for k in (None, 32):
            overlap_gemm.gemm_reduce_scatter(X, WEIGHT, group=name, k=k, backend="fused")


def test_what_is_reserved_serves_smaller_calls(world, launched):
    for name in world.names:
        held = overlap_gemm.reserve(
            "gemm_reduce_scatter", max_rows=4096, columns=1024, group=name, device="cpu"
        )
    assert held > 0 and overlap_gemm.workspace_bytes() == 2 * held
    for name in world.names:
        overlap_gemm.gemm_reduce_scatter(X, WEIGHT, group=name, backend="fused")
    assert overlap_gemm.workspace_bytes() == 2 * held


def test_another_emulator_is_another_place(launched):
    for _ in range(2):
        with Emulator("sm_90a", 1):
            overlap_gemm.gemm_reduce_scatter(X, WEIGHT, backend="fused")
    assert len(launched) == 2
    with pytest.raises(ValueError, match="or the emulator"):
        overlap_gemm.gemm_reduce_scatter(X, WEIGHT, backend="fused")
    with Emulator("sm_100a", 1):
        overlap_gemm.gemm_reduce_scatter(X, WEIGHT, backend="fused")
    assert [config.arch for config, _ in launched] == ["sm_90a", "sm_90a", "sm_100a"]


def test_finalize_leaves_no_plan(world, launched):
    call(world)
    made = mock.Mock(wraps=fused.plan_for)
    overlap_gemm.finalize()
    with mock.patch.object(fused, "plan_for", made):
        call(world)
    assert made.called and Fused.name == "fused"


FIRST_CALL = """
import sys
import torch
import overlap_gemm
from cute_emulator import Emulator
from overlap_gemm.backends.fused import gather_plans as gathers
from overlap_gemm.backends.fused import plan_cache as plans
from overlap_gemm.runtime.virtual import VirtualWorld

overlap_gemm.explain  # imports what calls need
plans.compiled_kernel = lambda *given: lambda *operands: None
x, weight = torch.zeros(64, 16).bfloat16(), torch.zeros(24, 16).bfloat16()
entered = 0

def note(frame, event, argument):
    global entered
    entered += event == "call"

with Emulator("sm_90a", 2) as emulator, VirtualWorld(2, emulator=emulator) as ranks:
    sys.setprofile(note)
    overlap_gemm.gemm_reduce_scatter(x, weight, group=ranks.names[0], backend="fused")
    sys.setprofile(None)
print(entered)
"""


def test_the_first_call_of_a_process_enters_few_python_functions():
    """What is found out once must not be found out a thousand times."""
    command = [sys.executable, "-c", FIRST_CALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 20_000


def test_a_shard_is_sent_after_the_first_product_and_before_the_next(world, monkeypatch):
    events = []
    kernel = lambda *_, **__: lambda *_: events.append("product")  # noqa: E731
    monkeypatch.setattr(gathers, "compiled_gather", kernel)
    monkeypatch.setattr(launch_plan.Copies, "send", lambda *_: events.append("send"))
    weights = [torch.randn(24, 16).to(DTYPE)] * (MOST_WEIGHTS + 1)  # a launch each
    with configured(shard_transport="copy_engine"):
        overlap_gemm.all_gather_gemm(X[:32], weights, group=world.names[0], rows=64, backend="fused")
    assert events == ["product", "send", *["product"] * MOST_WEIGHTS]


def test_a_call_whose_shard_cannot_be_sent_is_ended(world, monkeypatch):
    events = []
    monkeypatch.setattr(gathers, "compiled_gather", lambda *_, **__: lambda *_: None)
    monkeypatch.setattr(gathers, "compiled_gate", lambda *_: lambda *_: events.append("end"))
    monkeypatch.setattr(launch_plan.Copies, "send", mock.Mock(side_effect=RuntimeError("no copy engine")))
    weights = [torch.randn(24, 16).to(DTYPE)] * (MOST_WEIGHTS + 1)  # a launch each
    with configured(shard_transport="copy_engine"), pytest.raises(RuntimeError, match="no copy engine"):
        overlap_gemm.all_gather_gemm(X[:32], weights, group=world.names[0], rows=64, backend="fused")
    assert events == ["end"]
