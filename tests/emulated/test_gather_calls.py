"""An all-gather GEMM whose tensors need no copy is a plan, its outputs and the launches."""

import pytest
import torch

import overlap_gemm
from overlap_gemm.backends.fused import gather_calls as gather
from overlap_gemm.backends.fused import transport_hosts
from tests.support.emulated.gather_world import World


@pytest.fixture
def world():
    with World("sm_90a", 2, transport="copy_engine") as opened:
        yield opened


def queue(world, m=128, widths=(64, 32), k=64, stride=1, **options):
    """Calls the op on both ranks; returns what must come out and what the ranks got."""
    generator = torch.Generator().manual_seed(m + k)
    draw = lambda *shape: torch.randn(shape, generator=generator).bfloat16()  # noqa: E731
    x, results = draw(m, k * stride)[:, ::stride], []
    for rank, name in enumerate(world.world.names):
        weights = [draw(n, k) / 8 for n in widths]
        biases = [draw(n) for n in widths]
        own = x[rank * m // 2 : (rank + 1) * m // 2]
        outs = overlap_gemm.all_gather_gemm(
            own, weights, bias=biases, group=name, rows=m, backend="fused", **options
        )
        for out, weight, bias in zip(outs, weights, biases, strict=True):
            results.append(((x.double() @ weight.double().t() + bias.double()).bfloat16(), out))
    return results


def check(world, results, **tolerance):
    world.world.synchronize()
    for expected, out in results:
        torch.testing.assert_close(out, expected, **tolerance)
        assert out.is_contiguous()


def test_a_second_call_makes_no_plan(world, monkeypatch):
    first = queue(world)
    for part in ("plan_for", "all_gather_gemm"):
        monkeypatch.setattr(gather, part, None)  # not callable
    check(world, first + queue(world))


@pytest.mark.parametrize("changes", [{"k": 61}, {"stride": 2}])
def test_what_tma_cannot_read_is_copied(world, changes, monkeypatch):
    called, real = [], gather.all_gather_gemm
    monkeypatch.setattr(
        gather, "all_gather_gemm", lambda *given, **how: (called.append(1), real(*given, **how))[1]
    )
    check(world, queue(world, **changes))
    assert called


@pytest.mark.parametrize(
    ("shape", "strides"), [((1, 8), (11, 1)), ((1, 8), (16, 1)), ((1, 3), (8, 1)), ((8, 1), (1, 8))]
)
def test_rows_that_torch_calls_contiguous_are_sent_with_the_pitch_of_all_ranks(world, shape, strides):
    """Checks a stride of a dimension of one element, which means nothing; 5 columns need a padded result."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator).bfloat16()  # noqa: E731
    rows = [draw(64).as_strided(shape, strides), draw(*shape)]
    assert rows[0].is_contiguous()
    x, results = torch.cat(rows), []
    for columns in (8, 5):
        weight, names = draw(columns, shape[1]), world.world.names
        how = {"rows": len(x), "backend": "fused", "return_gathered": True}
        for group, own in zip(names, rows, strict=True):
            results.append((weight, *overlap_gemm.all_gather_gemm(own, weight, group=group, **how)))
    world.world.synchronize()
    for weight, out, gathered in results:
        torch.testing.assert_close(out, (x.double() @ weight.double().t()).bfloat16())
        assert torch.equal(gathered, x)


def test_scales_that_a_planned_call_cannot_read_are_copied(world, monkeypatch):
    """Checks a call with a strided scale of the weight, after one without; its plan is the same."""
    torch.manual_seed(0)
    x, scale_x = overlap_gemm.quantize_rows(torch.randn(128, 64))
    weight, scale_w = overlap_gemm.quantize_rows(torch.randn(32, 64))
    results = []
    for stride in (1, 2):
        strided = scale_w.repeat(1, stride)[:, :1]
        expected = (x.double() * scale_x) @ (weight.double() * scale_w).t()
        for rank, group in enumerate(world.world.names):
            local = slice(rank * 64, (rank + 1) * 64)
            how = {"scale_x": scale_x[local], "scale_w": strided, "group": group, "rows": 128}
            out = overlap_gemm.all_gather_gemm(x[local], weight, backend="fused", **how)
            results.append((expected.bfloat16(), out))
        monkeypatch.setattr(gather, "all_gather_gemm", None)  # not callable
    # Hopper sums products of 8 bits with fewer bits than float32.
    check(world, results, rtol=2**-7, atol=2**-8)


def test_a_closed_workspace_is_not_used_again(world):
    check(world, queue(world))
    for name in world.world.names:
        overlap_gemm.close_workspaces(name)
    check(world, queue(world))


def test_what_is_reserved_serves_smaller_calls(world, monkeypatch):
    monkeypatch.setattr(transport_hosts, "SMALLEST_BUFFER", 1)
    held = [
        overlap_gemm.reserve("all_gather_gemm", max_rows=300, columns=61, group=name, device="cpu")
        for name in world.world.names
    ]
    assert min(held) > 300 * 64 * 2 and overlap_gemm.workspace_bytes() == sum(held)
    check(world, queue(world, m=300, k=61) + queue(world, m=128, k=61) + queue(world, m=128, k=32))
    assert overlap_gemm.workspace_bytes() == sum(held)
    check(world, queue(world, m=300, k=200))
    assert overlap_gemm.workspace_bytes() > sum(held)
