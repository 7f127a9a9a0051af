"""One kernel for a list of weights of `gemm_all_to_all`: q, k and v of an attention layer."""

import pytest
import torch

import overlap_gemm
from overlap_gemm.backends.fused import fused_backend
from tests.support.emulated.list_cases import Operands, check_one_launch, counted_launches
from tests.support.emulated.op_runs import lagging, world_of
from tests.support.emulated.rank_scripts import lines_of_ranks

SWAPPED = {"mma": "swap_ab", "tile": (16, 64)}
COOPERATIVE = {"mma": "cooperative", "tile": (128, 128), "cluster": (1, 2)}


@pytest.fixture
def launches(monkeypatch):
    return counted_launches(monkeypatch)


@pytest.mark.parametrize(
    ("arch", "ranks", "rows", "fields", "transport"),
    [
        ("sm_90a", 3, 200, None, None),
        ("sm_100a", 2, 201, None, None),
        ("sm_90a", 4, 30, SWAPPED, "ll"),
        pytest.param("sm_90a", 2, 130, COOPERATIVE, None, marks=pytest.mark.slow),
        pytest.param(
            "sm_90a", 2, 30, SWAPPED | {"launch": "dependent_weights"}, None, marks=pytest.mark.slow
        ),
    ],
)
def test_a_list_is_one_launch(launches, arch, ranks, rows, fields, transport):
    """Rows are ragged. A rank has 136 columns of the first weight, and 72 of the others: parts of tiles."""
    operands = Operands(rows, [136 * ranks, 72 * ranks, 72 * ranks])
    check_one_launch(operands, launches, arch, ranks, fields, transport)


def test_calls_of_lists_and_of_single_weights_share_workspaces(launches):
    """Checks lists of two shapes and one weight alone, on a rank that lags."""
    calls = [
        Operands(130, widths, seed=i) for i, widths in enumerate([(144, 144), (288,), (144, 288), (144, 144)])
    ]
    with world_of("sm_90a", 2, num_sms=1, schedule=lagging(1)) as world:
        outs = [operands.call(world) for operands in calls]
        world.synchronize()
    for operands, of_call in zip(calls, outs, strict=True):
        operands.check(of_call)
    assert launches == [1] * 8


@pytest.mark.parametrize("kind", ["scales of rows", "two layouts", "columns of two layouts"])
def test_scales_of_rows_and_weights_of_two_layouts_are_one_launch(launches, kind):
    """Checks that scales follow the columns of each weight, and that weights are copied to one layout."""
    is_scaled = kind == "scales of rows"
    is_column = kind.startswith("columns")  # torch calls it contiguous in both layouts
    operands = Operands(70, [144, 272], depth=128 if is_scaled else 1 if is_column else 72, scaled=is_scaled)
    if is_column:
        operands.weights[1] = torch.stack([operands.weights[1][:, 0]]).t()
    elif not is_scaled:
        operands.weights[1] = operands.weights[1].t().contiguous().t()
    with world_of("sm_90a", 2) as world:
        outs = operands.call(world)
        world.synchronize()
    operands.check(outs)
    assert launches == [1, 1]


def test_scales_of_blocks_and_a_group_of_one_need_a_launch_for_each_weight(launches):
    x, *weights = torch.randn(3, 256, 128).to(torch.float8_e4m3fn)
    scales = torch.ones(128, 1), [torch.ones(2, 1)] * 2
    with world_of("sm_90a", 2) as world:
        for group in world.names:
            overlap_gemm.gemm_all_to_all(
                x[:128], weights, scale_x=scales[0], scale_w=scales[1], block=128,
                group=group, rows=256, backend="fused",
            )  # fmt: skip
        world.synchronize()
    assert launches == [1] * 4
    launches.clear()
    with world_of("sm_90a", 1) as world:
        overlap_gemm.gemm_all_to_all(
            x.bfloat16(), [w.bfloat16() for w in weights], group=world.names[0], backend="fused"
        )
        world.synchronize()
    assert launches == [1, 1]


def test_ranks_plan_the_kernels_of_a_list_in_one_order(launches, monkeypatch):
    """Checks it where one rank must copy the first of more weights than one kernel multiplies.

    Workspaces are allocated by all ranks together, so the order of plans must be the same on all of them.
    """
    planned, plan_for = {}, fused_backend.plan_for

    def recorded(group, device, dtype, shape, *arguments):
        planned.setdefault(group.rank, []).append(shape.cols)
        return plan_for(group, device, dtype, shape, *arguments)

    operands = Operands(16, [16 * (1 + i % 2) for i in range(9)])
    wide = torch.zeros(16, 73, dtype=torch.bfloat16)
    narrow = wide[:, :72].copy_(operands.weights[0])
    call = overlap_gemm.gemm_all_to_all
    with world_of("sm_90a", 2) as world:
        monkeypatch.setattr(fused_backend, "plan_for", recorded)
        outs = [
            call(
                x, [first, *operands.weights[1:]], bias=operands.biases, group=group, rows=16, backend="fused"
            )
            for x, group, first in zip(
                operands.x.chunk(2), world.names, (operands.weights[0], narrow), strict=True
            )
        ]
        world.synchronize()
    operands.check(outs)
    assert launches == [1] * 18
    first_uses = [list(dict.fromkeys(of_rank)) for of_rank in planned.values()]
    assert first_uses == [[16, 32]] * 2


@pytest.mark.parametrize(
    ("op", "ranks", "types", "rows", "options", "line"),
    [
        ("gemm_all_to_all", 2, "f8 f8", (256, 256), {}, "one kernel for 2 weights"),
        ("gemm_all_to_all", 2, "f8 b8", (256, 256), {}, "weights have several dtypes"),
        ("gemm_all_to_all", 2, "f8 f8", (256, 256), {"block": 128}, "have no scales of blocks"),
        ("gemm_all_to_all", 2, "f8 f8", (256, 0), {}, "a weight has no rows"),
        ("gemm_all_to_all", 1, "f8 f8", (256, 256), {}, "a group of one exchanges nothing"),
        ("all_gather_gemm", 2, "f8 f8", (256, 256), {}, "one kernel for 2 weights"),
        ("gemm_all_to_all", 2, "f8", (256,), {}, None),
    ],
)
def test_explain_gives_the_reason_for_a_kernel_for_each_weight(op, ranks, types, rows, options, line):
    """Compares the line about kernels in the text; a choice for one weight has none."""
    kinds = {"f8": torch.float8_e4m3fn, "b8": torch.float8_e5m2}
    weights = [torch.zeros(n, 128).to(kinds[kind]) for n, kind in zip(rows, types.split(), strict=True)]
    heights = [len(weight) // 128 if options else 1 for weight in weights]
    how = {"scale_x": torch.ones(64, 1), "scale_w": [torch.ones(n, 1) for n in heights], "backend": "fused"}
    x = torch.zeros(64, 128).to(torch.float8_e4m3fn)
    with world_of("sm_90a", ranks) as world:
        choice = overlap_gemm.explain(op, x, weights, group=world.names[0], **how, **options)
    lines = [one for one in str(choice).splitlines() if "kernel" in one]
    if line is None:
        assert not lines
    else:
        assert len(lines) == 1 and lines[0].endswith(line)
        assert line.startswith("one kernel") or lines[0].startswith("  2 weights, a kernel each: ")


LAYER = """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    import overlap_gemm
    from overlap_gemm.backends.fused.launch_plan import Plan
    from overlap_gemm.nn import UlyssesAttention
    from overlap_gemm.tuning.settings import configured

    launched, launch = [], Plan.launch
    Plan.launch = lambda plan, *arguments: (launched.append(plan.pattern), launch(plan, *arguments))
    world = overlap_gemm.init()
    how = {"num_kv_heads": 1, "head_dim": 16, "bias": True, "dtype": torch.bfloat16, "device": world.device}
    layer = UlyssesAttention(64, 4, backend="fused", **how)
    x = torch.randn(40, 2, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    with configured(mma="pingpong", tile=(64, 128), cluster=(1, 1)):
        out = layer(x.chunk(2)[world.rank].to(world.device), is_causal=True).cpu()

    def projected(linear, x):
        out = x @ linear.weight.cpu().double().t()
        return out if linear.bias is None else out + linear.bias.cpu().double()

    heads = [projected(one, x.double()) for one in (layer.q_proj, layer.k_proj, layer.v_proj)]
    heads = [one.unflatten(-1, (-1, 16)).permute(1, 2, 0, 3) for one in heads]
    exact = scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    exact = projected(layer.o_proj, exact.permute(2, 0, 1, 3).flatten(2)).chunk(2)[world.rank]
    assert (out - exact).norm() <= 0.01 * exact.norm(), (out, exact)
    overlap_gemm.finalize()
    print(*sorted(launched))
"""


def test_an_attention_layer_launches_one_kernel_before_and_one_after_attention(tmp_path):
    """Its one head of keys and values is replicated on both ranks."""
    lines = lines_of_ranks(tmp_path, LAYER)  # the ranks are threads: a line has the launches of both
    assert lines == ["column_exchange column_exchange input_exchange input_exchange"] * 2
