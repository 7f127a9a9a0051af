"""What a call costs the host, who must see it, and when what was kept for calls like it no longer holds."""

import sys
import traceback
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import overlap_gemm
from overlap_gemm import epilogues
from overlap_gemm.backends.decomposed import Decomposed
from overlap_gemm.backends.torch_backend import Torch
from overlap_gemm.dispatch import calls, ops, shard_ops
from overlap_gemm.dispatch.registered import Bound
from overlap_gemm.epilogues import Applied
from overlap_gemm.nn import column_parallel_gemm
from overlap_gemm.runtime import agree
from overlap_gemm.runtime.group import LOCAL, find, group_name, resolve
from overlap_gemm.spec import OPS
from overlap_gemm.tuning.settings import settings
from tests.support.counting import python_calls
from tests.support.dispatching import Watch

X, WEIGHT, BIAS = torch.randn(6, 4), torch.randn(8, 4), torch.randn(8)


@pytest.fixture(autouse=True)
def nothing_kept():
    resolve(LOCAL).calls.clear()


BUDGET = {
    "all_gather_gemm": (26, 42),
    "gemm_reduce_scatter": (23, 36),
    "gemm_all_reduce": (23, 36),
    "gemm_all_gather": (23, 36),
    "gemm_all_to_all": (31, 47),
    "all_to_all_gemm": (32, 48),
}
"""Python functions that a call enters: without a gradient, and where the weight wants one."""


@pytest.mark.parametrize("op", OPS)
def test_a_call_enters_few_python_functions(op):
    call, wanting = getattr(overlap_gemm, op), WEIGHT.clone().requires_grad_()

    for weight, budget in zip((WEIGHT, wanting), BUDGET[op], strict=True):
        found = python_calls(lambda weight=weight: call(X, weight, backend="torch"))
        assert found.total() <= budget, (found.total(), found)


def test_a_call_before_what_replaces_its_epilogue_enters_few_python_functions():
    """Checks that the second call enters the op once."""
    applied = Applied(epilogues.swiglu, (), lambda gate, up: torch.relu(gate) * up)

    def call():
        return overlap_gemm.all_gather_gemm(X, [WEIGHT, WEIGHT], epilogue=applied, backend="torch")

    calls = python_calls(call)
    assert calls.total() <= 46, (calls.total(), calls)
    torch.testing.assert_close(call(), torch.relu(X @ WEIGHT.t()) * (X @ WEIGHT.t()))


def test_a_column_parallel_product_enters_few_python_functions():
    for grad, budget in ((False, 23), (True, 39)):
        weight = WEIGHT.clone().requires_grad_(grad)
        found = python_calls(lambda weight=weight: column_parallel_gemm(X, weight, None, None))
        assert found.total() <= budget, (found.total(), found)


BACKWARD_BUDGET = {
    "all_gather_gemm": 85,
    "gemm_reduce_scatter": 71,
    "gemm_all_reduce": 68,
    "gemm_all_gather": 86,
    "gemm_all_to_all": 114,
    "all_to_all_gemm": 113,
}
"""Python functions that the gradients of x and of the weight enter."""


@pytest.mark.parametrize("op", OPS)
def test_gradients_enter_few_python_functions_and_none_of_torchs_dispatcher(op):
    x, weight = X.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
    out = getattr(overlap_gemm, op)(x, weight, backend="torch")
    grad = torch.ones_like(out)
    with torch.autograd.set_multithreading_enabled(False):
        entered = python_calls(lambda: torch.autograd.grad(out, (x, weight), grad, retain_graph=True))
    assert not any("redispatch" in name or "autograd_impl" in name for name in entered), entered
    assert entered.total() <= BACKWARD_BUDGET[op], (entered.total(), entered)


@pytest.mark.parametrize("op", OPS)
def test_what_is_known_is_not_found_out_again(op, monkeypatch):
    call = getattr(overlap_gemm, op)
    wanted = call(X, WEIGHT, bias=BIAS)
    never = mock.Mock(side_effect=AssertionError("found out again"))
    for name in ("lowering._check", "choosing.choose", "choosing.Problem.of"):
        monkeypatch.setattr(f"overlap_gemm.dispatch.{name}", never)
    monkeypatch.setattr("os.environ", {})  # reads of the environment are not free, and say nothing new
    assert torch.equal(call(X, WEIGHT, bias=BIAS), wanted)
    with pytest.raises(AssertionError, match="found out again"):
        call(torch.cat([X, X]), WEIGHT, bias=BIAS)


VARIED = {
    "shape": lambda: (torch.randn(7, 4), WEIGHT, {}),
    "strides of x": lambda: (torch.randn(4, 6).t(), WEIGHT, {}),
    "strides of weight": lambda: (X, torch.randn(4, 8).t(), {}),
    "dtype": lambda: (X.double(), WEIGHT.double(), {}),
    "dimensions": lambda: (X.view(3, 2, 4), WEIGHT, {}),
    "bias": lambda: (X, WEIGHT, {"bias": BIAS}),
    "backend": lambda: (X, WEIGHT, {"backend": "torch"}),
    "deterministic": lambda: (X, WEIGHT, {"deterministic": True}),
}


@pytest.mark.parametrize("op", OPS)
def test_calls_of_other_kinds_keep_out_of_each_others_way(op):
    call = getattr(overlap_gemm, op)
    call(X, WEIGHT)
    for _ in range(2):
        for name, varied in VARIED.items():
            x, weight, options = varied()
            wanted = x @ weight.t() + options.get("bias", 0)
            torch.testing.assert_close(call(x, weight, **options), wanted, msg=name)
        torch.testing.assert_close(call(X, WEIGHT), X @ WEIGHT.t())


@pytest.mark.parametrize(
    "other", [X.t(), X.double(), X[:3], [X], None], ids=["strides", "dtype", "rows", "list", "none"]
)
def test_tensors_of_a_list_count_as_others_do(other):
    assert calls.layouts(X, [WEIGHT, X]) == calls.layouts(X + 1, [WEIGHT, X])
    assert calls.layouts(X, [WEIGHT, X]) != calls.layouts(X, [WEIGHT, other])


def test_a_list_of_plain_weights_and_biases_is_plain():
    class Other(torch.Tensor):
        pass

    other = WEIGHT.as_subclass(Other)
    assert calls.is_plain(X, [WEIGHT], [BIAS]) and calls.is_plain(X, [WEIGHT], None)
    for weights, biases in (
        [[other], None],
        [[WEIGHT, other], [BIAS, BIAS]],
        [[WEIGHT], [BIAS.as_subclass(Other)]],
    ):
        assert not calls.is_plain(X, weights, biases)


def test_misfits_are_refused_every_time():
    for _ in range(2):
        with pytest.raises(ValueError, match="weight must be"):
            overlap_gemm.gemm_all_reduce(X, WEIGHT[:, :3])


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(calls, "LIMIT", 10)
    for rows in range(1, 30):
        overlap_gemm.gemm_all_reduce(torch.randn(rows, 4), WEIGHT)
        assert 1 <= len(resolve(LOCAL).calls) <= 10


@pytest.mark.parametrize("way", ["plain", "dispatched", "compiled"])
@pytest.mark.parametrize("op", [*OPS, "column_parallel_gemm"])
def test_sms_left_to_others_reach_the_backend_in_both_passes(op, way, monkeypatch):
    seen, real = [], Torch.bind
    monkeypatch.setattr(Torch, "bind", lambda *given: seen.append(settings().reserve_sms) or real(*given))
    if op == "column_parallel_gemm":  # its forward is torch's product alone

        def call(x, reserve):
            return column_parallel_gemm(x, WEIGHT, None, None, "torch", reserve)
    else:

        def call(x, reserve):
            return getattr(overlap_gemm, op)(x, WEIGHT, backend="torch", reserve_sms=reserve)

    if way == "compiled":
        torch._dynamo.reset()
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    with mock.patch("overlap_gemm.dispatch.bound.is_plain", lambda *_: way == "plain"):
        for reserve in (8, None, 3):
            x = X.clone().requires_grad_()
            call(x, reserve).sum().backward()
    forward = op != "column_parallel_gemm"
    backward = op not in ("gemm_all_reduce",)  # whose gradient is a product alone
    assert seen == [reserve for reserve in (8, None, 3) for _ in range(forward + backward)]
    assert settings().reserve_sms is None


# --- who must see a call ---


@pytest.fixture
def dispatched():
    """Which ops go through torch's dispatcher, in order, seen from under it."""
    seen, real = [], ops.Registered.bound

    def spy(self, tensors, arguments):
        if "run" in [frame.name for frame in traceback.extract_stack(limit=5)]:
            seen.append(self.name)
        return real(self, tensors, arguments)

    with mock.patch.object(ops.Registered, "bound", spy):
        yield seen


def test_a_plain_call_goes_past_the_dispatcher(dispatched):
    for grad in (False, True):
        overlap_gemm.gemm_all_reduce(X, WEIGHT.clone().requires_grad_(grad))
        column_parallel_gemm(X, WEIGHT.clone().requires_grad_(grad), BIAS, None)
        shard_ops.keep_shard(X.clone().requires_grad_(grad), 1, LOCAL)
    with torch.inference_mode():
        overlap_gemm.gemm_all_reduce(X, torch.nn.Parameter(WEIGHT))
    assert dispatched == []


def under_profiler():
    with torch.profiler.profile() as profile:
        overlap_gemm.gemm_all_reduce(X, WEIGHT)
    assert "overlap_gemm::gemm_all_reduce" in {event.key for event in profile.key_averages()}


def under_dispatch_mode():
    with Watch() as watch:
        overlap_gemm.gemm_all_reduce(X, WEIGHT)
    assert "overlap_gemm.gemm_all_reduce.default" in watch.names


def under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        assert overlap_gemm.gemm_all_reduce(X, WEIGHT).dtype == torch.bfloat16


class Subclass(torch.Tensor):
    pass


def with_subclass():
    overlap_gemm.gemm_all_reduce(X.as_subclass(Subclass), WEIGHT)


@pytest.mark.parametrize("watched", [under_profiler, under_dispatch_mode, under_autocast, with_subclass])
def test_whoever_watches_sees_the_op(dispatched, watched):
    overlap_gemm.gemm_all_reduce(X, WEIGHT)  # a plain one before, so that there is something to be kept
    dispatched.clear()
    watched()
    assert dispatched == ["gemm_all_reduce"]


def test_fake_tensors_stay_fake_inside_and_outside_of_their_mode():
    overlap_gemm.gemm_all_reduce(X, WEIGHT)
    with FakeTensorMode() as mode:
        x, weight = mode.from_tensor(X), mode.from_tensor(WEIGHT)
        assert type(overlap_gemm.gemm_all_reduce(x, weight)).__name__ == "FakeTensor"
    assert type(overlap_gemm.gemm_all_reduce(x, weight)).__name__ == "FakeTensor"


def test_traced_by_make_fx_it_is_one_node():
    overlap_gemm.gemm_all_reduce(X, WEIGHT)
    graph = make_fx(lambda x, weight: overlap_gemm.gemm_all_reduce(x, weight))(X, WEIGHT).graph
    called = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert called.count("overlap_gemm.gemm_all_reduce.default") == 1
    assert not any("mm" in name.split(".")[1] and "gemm" not in name for name in called)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, at its first vmap
def test_torch_func_and_forward_mode_are_served_or_refused(dispatched):
    overlap_gemm.gemm_all_reduce(X, WEIGHT)
    batched = torch.vmap(lambda x: overlap_gemm.gemm_all_reduce(x, WEIGHT))(X[None])  # one call after another
    torch.testing.assert_close(batched, (X @ WEIGHT.t())[None])
    assert dispatched == ["gemm_all_reduce"]
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda w: overlap_gemm.gemm_all_reduce(X, w).sum())(WEIGHT)
    with forward_ad.dual_level(), pytest.raises(TypeError, match="x has a tangent"):
        overlap_gemm.gemm_all_reduce(forward_ad.make_dual(X, X), WEIGHT)


@pytest.mark.parametrize("op", OPS)
def test_gradients_are_those_of_torchs_dispatcher(op):
    """Also where only some operands want one, and twice."""
    call, past = getattr(overlap_gemm, op), mock.Mock(wraps=Bound.with_gradient)
    for wanted in ((True, True, True), (True, False, False), (False, True, False), (False, False, True)):
        results = []
        for plain in (True, False):
            given = [
                t.detach().double().requires_grad_(need)
                for t, need in zip((X, WEIGHT, BIAS), wanted, strict=True)
            ]
            with (
                mock.patch("overlap_gemm.dispatch.bound.is_plain", lambda *_, plain=plain: plain),
                mock.patch.object(Bound, "with_gradient", lambda self, *t: past(self, *t)),
            ):
                out = call(given[0], given[1], bias=given[2])
            needed = [tensor for tensor in given if tensor.requires_grad]
            first = torch.autograd.grad(out.square().sum(), needed, create_graph=True)
            second = torch.autograd.grad(sum(g.square().sum() for g in first), needed)
            results.append([out, *first, *second])
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs)
    assert past.call_count == 4


# --- what no longer holds ---


@pytest.fixture
def world(tmp_path):
    """`world(name)`: a process group of one, as the world; the next one has the same name."""

    def join():
        dist.init_process_group(
            "gloo", store=dist.FileStore(str(tmp_path / f"store{len(made)}"), 1), rank=0, world_size=1
        )
        made.append(dist.group.WORLD)
        return made[-1]

    made = []
    yield join
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_group_that_comes_again_is_another_one(world):
    first = world()
    overlap_gemm.gemm_all_reduce(X, WEIGHT)
    known, name = find(None), group_name(None)
    assert known.calls and find(first) is known and find(name) is known
    dist.destroy_process_group()
    for gone in (first, name):
        with pytest.raises(RuntimeError, match="not created, or was destroyed"):
            overlap_gemm.gemm_all_reduce(X, WEIGHT, group=gone)
    second = world()
    assert group_name(None) == name
    assert find(None) is not known and find(None) is find(second) and not find(None).calls
    overlap_gemm.gemm_all_reduce(X, WEIGHT)
    with pytest.raises(RuntimeError, match="has been destroyed, and another one has its name now"):
        overlap_gemm.gemm_all_reduce(X, WEIGHT, group=first)


def test_what_is_kept_does_not_keep_a_process_group_alive(world):
    import weakref

    group = weakref.ref(world())
    overlap_gemm.gemm_all_reduce(X, WEIGHT)
    dist.destroy_process_group()
    assert sys.getrefcount(group()) <= 3  # of the fixture's list, and of looking


def test_torchs_switch_is_looked_at_in_every_call(monkeypatch):
    used, real = [], Torch.gemm_all_reduce
    monkeypatch.setattr(
        Torch, "gemm_all_reduce", lambda self, *given, **named: used.append(1) or real(self, *given, **named)
    )
    monkeypatch.setattr(Torch, "why_slower", lambda self, problem: None)  # as on a GPU
    monkeypatch.setattr(Decomposed, "why_slower", lambda self, problem: "as on a GPU")
    for switch in (False, True, False):
        torch.use_deterministic_algorithms(switch)
        try:
            overlap_gemm.gemm_all_reduce(X, WEIGHT)
        finally:
            torch.use_deterministic_algorithms(False)
    assert len(used) == 2


def test_in_debug_mode_nothing_is_kept():
    with mock.patch.object(agree, "_checking", True):
        overlap_gemm.gemm_all_reduce(X, WEIGHT)
        assert not resolve(LOCAL).calls


@pytest.mark.parametrize("op", OPS)
def test_compiled_calls_ask_nothing_that_older_dynamo_cannot_trace(op, monkeypatch):
    monkeypatch.setattr(torch.amp, "is_autocast_available", mock.Mock(side_effect=AssertionError))
    compiled = torch.compile(getattr(overlap_gemm, op), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(X, WEIGHT), X @ WEIGHT.t())
