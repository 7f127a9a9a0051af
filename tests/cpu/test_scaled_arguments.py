"""What is refused of operands with scales, and what is said of them."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import overlap_gemm
from overlap_gemm import explain, gemm_reduce_scatter
from overlap_gemm.backends.fused.fused_backend import Fused
from overlap_gemm.backends.op_call import OpCall
from overlap_gemm.backends.peer_access import PeerAccess
from overlap_gemm.backends.scales import scaling
from overlap_gemm.backends.scales.product_types import ProductTypes
from overlap_gemm.backends.select import choose, predicted
from overlap_gemm.backends.torch_backend import Torch
from tests.support.ops import SCALED
from tests.support.problems import problem as problem_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
X, WEIGHT = torch.ones(6, 32).to(E4M3), torch.ones(8, 32).to(E4M3)
SCALES = {"scale_x": torch.full((6, 1), 0.5), "scale_w": torch.full((1, 8), 0.25)}

REFUSED = {
    "no scales": ({"scale_x": None, "scale_w": None}, TypeError, "8-bit operands need scale_x and scale_w"),
    "one of two": ({"scale_w": None}, TypeError, "scale_w must be a Tensor, got NoneType"),
    "a number": ({"scale_x": 0.5}, TypeError, "scale_x must be a Tensor, got float"),
    "rows": ({"scale_x": torch.ones(8, 1)}, ValueError, r"one element, or be \[6, 1\].* got \[8, 1\]"),
    "a vector": ({"scale_x": torch.ones(6)}, ValueError, r"scale_x .* got \[6\]"),
    "columns": ({"scale_w": torch.ones(6, 1)}, ValueError, r"\[8, 1\] or \[1, 8\].* got \[6, 1\]"),
    "type": ({"scale_w": torch.ones((), dtype=torch.float64)}, TypeError, "scale_w must be torch.float32"),
    "device": ({"scale_x": torch.ones((), device="meta")}, TypeError, "must share dtype and device"),
    "weight": ({"weight": WEIGHT.float()}, TypeError, "weight must be torch.float8_e4m3fn or"),
    "x": ({"x": X.to(torch.bfloat16)}, TypeError, "with scales must be one of torch.float8_e4m3fn"),
    "bias": ({"bias": torch.ones(8)}, TypeError, "bias must be torch.bfloat16 where x is"),
    "result": ({"out_dtype": E4M3}, TypeError, "out_dtype must be one of torch.bfloat16, .* got"),
    "x by columns": ({"x": X.t().contiguous().t()}, ValueError, "x must be contiguous along K"),
    "weight by columns": (
        {"weight": WEIGHT.t().contiguous().t()},
        ValueError,
        "weight must be contiguous",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("op", [gemm_reduce_scatter, overlap_gemm.all_gather_gemm], ids=lambda f: f.__name__)
def test_bad_input_is_an_error_with_the_rule(op, what):
    change, error, words = REFUSED[what]
    given = {"x": X, "weight": WEIGHT, **SCALES, **change}
    with pytest.raises(error, match=words):
        op(given.pop("x"), given.pop("weight"), **given)


@pytest.mark.parametrize("backend", ["torch", "sequential"])
@pytest.mark.parametrize("op", SCALED)
def test_k_may_be_any(op, backend, monkeypatch):
    """On GPUs torch's product takes multiples of 16: zeros are appended, whatever lies there."""
    real = torch._scaled_mm

    def as_on_gpus(a, b, *scales, **how):
        assert a.shape[1] % 16 == 0 and a.is_contiguous() and b.t().is_contiguous()
        return real(a, b, *scales, **how)

    monkeypatch.setattr(torch, "_scaled_mm", as_on_gpus)
    for k in (1, 15, 17, 31):
        x, weight = X[:, :k], WEIGHT[:, :k]
        assert (getattr(overlap_gemm, op)(x, weight, **SCALES, backend=backend) == k * 0.125).all()


def test_scales_belong_to_8_bit_operands_and_so_does_the_results_type():
    with pytest.raises(ValueError, match="out_dtype=torch.float32 is for operands with scales"):
        gemm_reduce_scatter(X.float(), WEIGHT.float(), out_dtype=torch.float32)
    with pytest.raises(ValueError, match="block=128 is for operands with scales"):
        gemm_reduce_scatter(X.float(), WEIGHT.float(), block=128)


def test_every_weight_has_its_scales():
    with pytest.raises(ValueError, match="2 weights need as many scale_w, got 1"):
        overlap_gemm.all_gather_gemm(X, [WEIGHT, WEIGHT], scale_x=SCALES["scale_x"], scale_w=[torch.ones(())])


BLOCKS_REFUSED = {
    "of the weight's rows": (
        {"scale_w": torch.ones(136, 2)},
        r"scale_w of blocks of 128 x 128 must be \[2, 2\] .* got \[136, 2\]",
    ),
    "of one operand": ({"scale_w": torch.ones(136, 1)}, r"scale_w of blocks .* got \[136, 1\]"),
    "of other rows": (
        {"scale_x": torch.ones(5, 2)},
        r"scale_x of blocks of 128 x 128 must be \[6, 2\] .* got \[5, 2\]",
    ),
    "too many": ({"scale_x": torch.ones(6, 3)}, r"128 x 128 must be \[6, 2\] .* got \[6, 3\]"),
    "of other blocks": ({"block": 32}, r"scale_x of blocks of 32 x 32 must be \[6, 5\] .* got \[6, 2\]"),
    "of blocks that there are not": ({"block": 64}, "block must be one of None, 128, 32, mx .* got 64"),
    "without block=": (
        {"block": None},
        r"scale_x must have one element, or be \[6, 1\], .* got \[6, 2\] .*block=, one of 128, 32, 'mx'",
    ),
    "of rows": (
        {"scale_x": torch.ones(6, 1), "scale_w": torch.ones(136, 1)},
        r"must be \[6, 2\] .* \[6, 1\]",
    ),
}


@pytest.mark.parametrize("what", BLOCKS_REFUSED)
def test_scales_of_blocks_have_their_shapes(what):
    change, words = BLOCKS_REFUSED[what]
    given = {"scale_x": torch.ones(6, 2), "scale_w": torch.ones(2, 2), "block": 128}
    x, weight = torch.ones(6, 144).to(E4M3), torch.ones(136, 144).to(E4M3)
    with pytest.raises(ValueError, match=words):
        gemm_reduce_scatter(x, weight, **given | change)
    assert (gemm_reduce_scatter(x, weight, **given) == 144).all()
    with pytest.raises(ValueError, match=r"F.scaled_mm says on cpu|no F.scaled_mm"):
        gemm_reduce_scatter(x, weight, **given, backend="torch")
    assert "scales of blocks of 128 x 128" in str(explain("gemm_reduce_scatter", x, weight, **given))


def test_blocks_of_32_are_torchs_on_no_device():
    given = {"scale_x": torch.ones(6, 5), "scale_w": torch.ones(5, 5).to(torch.float8_e8m0fnu), "block": 32}
    x, weight = torch.ones(6, 144).to(E4M3), torch.ones(136, 144).to(E4M3)
    assert (gemm_reduce_scatter(x, weight, **given) == 144).all()
    with pytest.raises(ValueError, match="scales of blocks of 128 x 128, not of blocks of 32 x 32"):
        gemm_reduce_scatter(x, weight, **given, backend="torch")
    measured = problem(device_type="cuda", block=32, peer_access=PeerAccess("sm_90a", 132, None))
    assert "blocks of 32 x 32 have not been timed" in (Fused().why_slower(measured) or "")


E8M0 = torch.float8_e8m0fnu
MX_REFUSED = {
    "of the weight": ({"scale_w": torch.ones(512).to(E8M0)}, r"scale_w must be \[1024\] .* got \[512\]"),
    "one of two": (
        {"scale_w": torch.ones(1, 136)},
        r"scale_w must be \[1024\] .* got \[1, 136\]",
    ),
    "K": ({"x": X[:, :16], "weight": WEIGHT[:, :16]}, "K .* a multiple of 32, got 16"),
    "without block=": ({"block": None}, r"got \[512\] .*pass block=, one of 128, 32, 'mx'"),
    "dim": (
        {"x": torch.ones(2, 3, 64).to(E4M3), "dim": 1},
        "dim must be the first dimension of x .*; got dim=1",
    ),
}


@pytest.mark.parametrize("what", MX_REFUSED)
def test_scales_of_mx_types_fill_whole_atoms(what):
    change, words = MX_REFUSED[what]
    given = {"x": torch.ones(6, 64).to(E4M3), "weight": torch.ones(136, 64).to(E4M3)}
    given |= {"scale_x": torch.full((512,), 0.5).to(E8M0), "scale_w": torch.full((1024,), 0.25).to(E8M0)}
    given["block"] = "mx"
    assert (gemm_reduce_scatter(**given) == 8).all()
    with pytest.raises(ValueError, match="not of blocks of 1 x 32|no F.scaled_mm"):
        gemm_reduce_scatter(**given, backend="torch")
    with pytest.raises(ValueError, match=words):
        gemm_reduce_scatter(**given | change)


@pytest.mark.parametrize("which", ["scale_x", "bias", "weight"])
@pytest.mark.parametrize("way", ["plain", "compiled"])
def test_training_is_refused_at_the_call(which, way):
    given = {"weight": WEIGHT, "bias": torch.ones(8, dtype=torch.bfloat16), **SCALES}
    gemm_reduce_scatter(X, **given)  # the same kind of call is known already
    given[which] = given[which].clone().requires_grad_()
    call = lambda: gemm_reduce_scatter(X, **given)  # noqa: E731
    if way == "compiled":
        call = torch.compile(call, backend="eager")
    with pytest.raises(Exception, match="operands with scales have no gradients"):
        call()
    with torch.no_grad():
        assert (call() == 32 * 0.125 + 1).all()


def test_the_op_behind_it_refuses_a_backward_pass_too():
    scale_x = torch.ones(6, requires_grad=True)
    through = torch.ops.overlap_gemm.gemm_all_reduce
    call = OpCall(_world(), rows=6, columns=8, chunk=6, out_dtype=torch.bfloat16)
    out = through(X, WEIGHT, None, scale_x, torch.ones(8), *call)
    with pytest.raises(TypeError, match="operands with scales have no gradients"):
        out.sum().backward()


def _world():
    from overlap_gemm.runtime.group import group_name

    return group_name(None)


@pytest.mark.parametrize("op", SCALED)
def test_autocast_leaves_them_alone(op):
    with torch.autocast("cpu", torch.float16):
        out = getattr(overlap_gemm, op)(X, WEIGHT, **SCALES)
    assert out.dtype == torch.bfloat16 and (out == 32 * 0.125).all()


def test_a_nan_or_zero_scale_is_its_rows_alone():
    scale = torch.tensor([1.0, 0, torch.nan, 1, 1, 1])[:, None]
    for backend in ("torch", "sequential"):
        out = gemm_reduce_scatter(X, WEIGHT, scale_x=scale, scale_w=torch.ones(()), backend=backend)
        assert (out[[0, 3, 4, 5]] == 32).all() and (out[1] == 0).all() and out[2].isnan().all()


def problem(**change):
    given = {"m": 64, "n": 64, "k": None, "dtype": E4M3}
    types = {"weight_dtypes": (E4M3,), "out_dtype": torch.bfloat16}
    return problem_of("gemm_reduce_scatter", **{**given, **types, **change})


def test_auto_takes_torchs_way_and_says_why():
    choice = choose(problem())
    assert choice.backend.name == "torch"
    assert "float8_e4m3fn x torch.float8_e4m3fn to torch.bfloat16" in str(choice)
    with_scales = partial(problem, device_type="cuda", m=8192, n=8192, k=8192)
    assert "not been probed" in (Fused().why_slower(with_scales()) or "")
    measured, expected = (PeerAccess(arch, 132, None) for arch in ("sm_90a", "sm_100a"))
    assert Fused().why_slower(with_scales(peer_access=measured)) is None
    assert predicted(with_scales(peer_access=measured)).best == "fused"
    assert "8-bit operands have not been timed on" in (
        Fused().why_slower(with_scales(peer_access=expected)) or ""
    )
    assert "runs as 'torch'" in str(explain("gemm_reduce_scatter", X, WEIGHT, **SCALES))


def test_with_a_promise_no_constants_decide_about_fused_kernels():
    """Compares what processes with other constants choose: other backends have other bits."""
    with_scales = partial(problem, device_type="cuda", m=8192, n=8192, k=8192, invariant="batch")
    for arch in ("sm_90a", "sm_100a"):
        peer_access = PeerAccess(arch, 132, None)
        for known in (peer_access, replace(peer_access, uncalibrated="not timed here")):
            assert Fused().why_slower(with_scales(peer_access=known)) is None
    assert (
        Fused().why_slower(with_scales(peer_access=PeerAccess("sm_90a", 132, "no peer access")))
        == "no peer access"
    )


@pytest.mark.parametrize(
    ("capability", "toolkit", "types", "why"),
    [
        ((9, 0), "12.9", (E4M3, E4M3, torch.bfloat16), None),
        ((9, 0), "13.0", (E4M3, E5M2, torch.bfloat16), None),
        ((9, 0), "12.8", (E4M3, E4M3, torch.bfloat16), "a Hopper GPU and CUDA 12.9, not sm_9x and 12.8"),
        ((10, 0), "13.0", (E4M3, E4M3, torch.bfloat16), "a Hopper GPU and CUDA 12.9, not sm_10x and 13.0"),
        ((8, 9), "13.0", (E4M3, E4M3, torch.bfloat16), "needs a Hopper GPU"),
        ((9, 0), "13.0", (E5M2, E5M2, torch.bfloat16), "does not multiply e5m2 with e5m2"),
        ((9, 0), "13.0", (E4M3, E4M3, torch.float32), "gives bfloat16, not torch.float32"),
    ],
)
def test_where_torch_has_products_with_scales_of_blocks(monkeypatch, capability, toolkit, types, why):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "cuda", toolkit)
    said = scaling.why_no_product.__wrapped__("cuda", ProductTypes(*types, (1, 128, 128)))
    assert said is None if why is None else why in said


def test_torch_is_refused_for_any_weight_of_a_list(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(scaling, "why_no_product", scaling.why_no_product.__wrapped__)
    listed = partial(problem, dtype=E5M2, device_type="cuda", num_weights=2)
    for second, why in ((E4M3, None), (E5M2, "torch._scaled_mm does not multiply e5m2 with e5m2")):
        assert Torch().why_not(listed(weight_dtypes=(E4M3, second))) == why


def test_what_torch_has_no_product_for_is_dequantised(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("no such product\nmore")

    scaling.why_no_product.cache_clear()
    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    try:
        choice = choose(problem())
        assert choice.backend.name == "sequential"
        assert "says on cpu: no such product" in dict(choice.verdicts)["torch"]
        with pytest.raises(ValueError, match="no such product"):
            choose(problem(), "torch")
        out = gemm_reduce_scatter(X, WEIGHT, **SCALES, reserve_sms=1)  # no call that is known already
        assert (out == 32 * 0.125).all()
    finally:
        scaling.why_no_product.cache_clear()


def test_what_travels_is_counted_in_its_own_type():
    assert problem().bytes == 64 * 64 * 2
    assert problem(out_dtype=torch.float32).bytes == 64 * 64 * 4
