"""MX types: 8-bit operands with a scale for 32 elements of K, which tensor cores multiply with."""

from dataclasses import dataclass, replace

import pytest
import torch

import overlap_gemm
from cute_emulator import EmulatorError
from overlap_gemm.backends.scales import mx_scales as mx
from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.config.scale_blocks import MX
from overlap_gemm.config.visitors import bias_of
from overlap_gemm.mainloop import mx as device
from overlap_gemm.spec import OPS
from overlap_gemm.spec.sharding import Shards
from overlap_gemm.testing.emulated import joined_results, poisoned_allocations
from overlap_gemm.transports import PeerBulk
from tests.support.emulated.flag_order import with_flags_before_scales
from tests.support.emulated.kernel_cases import launched
from tests.support.emulated.op_runs import lagging, world_of

RS, AR, AG, GATHER = "gemm_reduce_scatter", "gemm_all_reduce", "gemm_all_gather", "all_gather_gemm"
DUAL = "all_to_all_gemm"
CONFIGS = [
    GemmConfig("sm_100a", (128, 128), mma="1cta", in_dtype="e4m3", blocks=MX, epilogue=(bias_of("bf16"),)),
    GemmConfig("sm_100a", (128, 256), (1, 2), mma="1cta", in_dtype="e5m2", blocks=MX),
    GemmConfig("sm_100a", (256, 128), (2, 1), mma="2cta", in_dtype="e4m3", blocks=MX),
    GemmConfig("sm_100a", (256, 256), (2, 2), mma="2cta", in_dtype="e4m3", blocks=MX),
]


@pytest.mark.parametrize(
    ("config", "world"),
    [
        (CONFIGS[0], 1),
        (CONFIGS[3], 1),
        (CONFIGS[0], 3),
        *(pytest.param(config, 1, marks=pytest.mark.slow) for config in CONFIGS[1:3]),
        pytest.param(CONFIGS[3], 2, marks=pytest.mark.slow),
    ],
    ids=lambda given: given.name if isinstance(given, GemmConfig) else f"P{given}",
)
def test_kernels_multiply_with_scales(config, world):
    """Rows, columns and K that end inside an atom; what fills atoms up is NaN; several tiles a cluster."""
    tile_m, tile_n = config.cluster_tile
    sizes = {"rows": 2 * tile_m + 9 if world == 1 else tile_m + 9, "cols": tile_n + 24, "depth": 416}
    launched(config, PeerBulk() if world > 1 else None, world, **sizes).check()


SPOILED = {
    "no scale of A": lambda a, b: (torch.ones_like(a), b),
    "no scale of B": lambda a, b: (a, torch.ones_like(b)),
    "the next row's": lambda a, b: (a.roll(1, 0), b),
    "the next column's": lambda a, b: (a, b.roll(1, 0)),
    "the next 32 of K's": lambda a, b: (a.roll(1, 1), b),
    "the next atom's rows": lambda a, b: (a.roll(128, 0), b),
    "the next atom of K's": lambda a, b: (a, b.roll(4, 1)),
}


@pytest.fixture(scope="module")
def judged():
    """A case that is right."""
    case = launched(CONFIGS[0], None, 1, rows=144, cols=136, depth=272)
    case.check()
    return case


@pytest.mark.parametrize("way", SPOILED)
def test_a_scale_of_another_place_is_noticed(judged, way):
    with pytest.raises(AssertionError, match="wrong, at"):
        replace_scales(judged, SPOILED[way]).check()


def replace_scales(case, change):
    """The same results, judged by other scales."""
    other = replace(case)
    other.outs, other.scales = case.outs, [change(*scales) for scales in case.scales]
    return other


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"tile": (128, 64)}, "multiples of 128 columns"),
        ({"mma": "swap_ab", "tile": (128, 64)}, "not swapped"),
        ({"in_dtype": "bf16"}, "for 8-bit types"),
        ({"arch": "sm_90a", "mma": "cooperative"}, "where the MMA multiplies scales.* on sm_90a"),
        ({"blocks": (1, 1, 16)}, r"blocks must be one of .*; got \(1, 1, 16\)"),
    ],
)
def test_what_there_is_no_kernel_for_is_refused_by_rule(fields, rule):
    base = {"arch": "sm_100a", "mma": "1cta", "tile": (128, 128), "in_dtype": "e4m3", "blocks": MX}
    with pytest.raises(ValueError, match=rule):
        GemmConfig(**{**base, **fields})


def test_accumulators_and_scales_share_tensor_memory():
    assert [config.acc_stages for config in CONFIGS] == [2, 1, 2, 1]
    assert all(c.acc_stages * c.tile[1] + 4 * sum(c.scale_atoms) <= 512 for c in CONFIGS)


# -- the ops


@dataclass(frozen=True)
class Case:
    """A call of all ranks: sizes over all of them."""

    op: str
    m: int
    n: int
    k: int
    dtype: torch.dtype = torch.float8_e4m3fn
    bias: bool = True
    seed: int = 0

    def operands(self, rank, ranks):
        """(x, weight, scale_x, scale_w) of a rank, scales as matrices."""
        spec = OPS[self.op]
        own = lambda extent: Shards.even(extent, ranks).size(rank)  # noqa: E731
        (m, k), (n, depth) = spec.shapes(self.m, self.n, self.k, own)
        n = self.n if spec.weight == "n" else n
        found = []
        for rows, width, seed in (
            (m, k, rank if spec.x else 0),
            (n, depth, 1000 + (rank if spec.weight == "k" else 0)),
        ):
            generator = torch.Generator().manual_seed(10000 * self.seed + seed)
            scale = 2.0 ** torch.randint(-3, 4, (rows, -(-width // 32)), generator=generator)
            found.append((torch.randn(rows, width, generator=generator).to(self.dtype), scale))
        (x, scale_x), (weight, scale_w) = found
        return x, weight, scale_x, scale_w

    @property
    def whole_bias(self):
        return torch.randn(self.n, generator=torch.Generator().manual_seed(self.seed)).bfloat16()

    def queue(self, world, change=lambda rank, scales: scales, **options):
        """Calls the op on every rank; `change` may spoil a rank's scales, as matrices."""
        spec, ranks, outs = OPS[self.op], len(world.names), []
        for rank, name in enumerate(world.names):
            x, weight, *scales = self.operands(rank, ranks)
            scale_x, scale_w = change(rank, scales)
            bias = self.whole_bias if self.bias else None
            if spec.weight == "n":
                own = slice(*Shards.even(self.n, ranks).range(rank))
                weight, scale_w, bias = weight[own], scale_w[own], bias[own].clone() if self.bias else None
            given = [overlap_gemm.swizzle_scales(scale) for scale in (scale_x, scale_w)]
            with poisoned_allocations():
                outs.append(
                    getattr(overlap_gemm, self.op)(
                        x, weight, group=name, bias=bias, scale_x=given[0], scale_w=given[1], block="mx",
                        backend="fused", deterministic=False,
                        **spec.arguments(self.m, self.n, self.k, least=True), **options,
                    )
                )  # fmt: skip
        return outs

    def share_of_bound(self, outs, ranks=None):
        """The largest error as a share of what rounding may lose: each partial once, the result once."""
        spec, ranks = OPS[self.op], ranks or len(outs)
        wide = lambda a, scale: a.double() * scale.double().repeat_interleave(32, 1)[:, : a.shape[1]]  # noqa: E731
        every = [self.operands(rank, ranks) for rank in range(1 if spec.x is None else ranks)]
        if spec.x == "m" or spec.reshards_k:
            rows = torch.cat([wide(x, scale) for x, _, scale, _ in every], 0 if spec.x == "m" else 1)
            products = [(rows, wide(every[0][1], every[0][3]))]
        else:
            products = [(wide(x, sx), wide(weight, sw)) for x, weight, sx, sw in every]
        partials = [a @ b.t() for a, b in products]
        exact = sum(partials) + (self.whole_bias.double() if self.bias else 0)
        rounded = sum(p.abs() for p in partials) * (ranks > 1 and spec.sums)
        magnitude = sum(a.abs() @ b.abs().t() for a, b in products)
        bound = 2.0**-8 * (rounded + exact.abs()) * (1 + 2**-6) + 2.0**-18 * magnitude
        error = (joined_results(outs, {"m": 0, "n": 1}.get(spec.out)).double() - exact).abs()
        return float(torch.where(error <= bound, error / bound, torch.inf).max())


TILE = {"mma": "1cta", "tile": (128, 128), "cluster": (1, 1)}
PAIR = {"mma": "2cta", "tile": (256, 128), "cluster": (2, 1)}


@pytest.mark.parametrize(
    ("ranks", "case", "fields", "algorithm"),
    [
        (3, Case(RS, 130, 136, 3 * 160), TILE, None),
        pytest.param(4, Case(RS, 2, 72, 4 * 32, torch.float8_e5m2), TILE, None, marks=pytest.mark.slow),
        pytest.param(1, Case(RS, 66, 24, 288), TILE, None, marks=pytest.mark.slow),
        pytest.param(2, Case(RS, 256, 264, 2 * 96), PAIR, None, marks=pytest.mark.slow),
        pytest.param(2, Case(AR, 70, 264, 2 * 160), TILE, "one_shot", marks=pytest.mark.slow),
        (3, Case(AR, 133, 264, 3 * 64), TILE, "two_shot"),
        (2, Case(AG, 140, 272, 160), TILE, None),
        (3, Case("gemm_all_to_all", 101, 3 * 72, 160), TILE, None),
        (3, Case(GATHER, 130, 72, 160), TILE, None),
        pytest.param(4, Case(GATHER, 3, 136, 32, torch.float8_e5m2), TILE, None, marks=pytest.mark.slow),
        pytest.param(1, Case(GATHER, 66, 20, 288), TILE, None, marks=pytest.mark.slow),
        pytest.param(2, Case(GATHER, 600, 264, 160), PAIR, None, marks=pytest.mark.slow),
    ],
    ids=lambda given: f"{given.op}-{given.m}" if isinstance(given, Case) else "",
)
def test_ops_against_the_dequantised_product(ranks, case, fields, algorithm):
    """Shards that begin inside an atom, ranks without rows, operands of one rank; random order."""
    with world_of("sm_100a", ranks, fields, algorithm=algorithm, mode="random") as world:
        outs = case.queue(world)
        world.synchronize()
        assert case.share_of_bound(outs) <= 1


@pytest.mark.parametrize(
    ("ranks", "case", "fields", "transport"),
    [
        (2, Case(DUAL, 260, 136, 2 * 256), TILE, "copy_engine"),
        (3, Case(DUAL, 385, 72, 3 * 128, torch.float8_e5m2), TILE, "peer_bulk"),
        pytest.param(2, Case(DUAL, 512, 264, 2 * 128), PAIR, "peer_bulk", marks=pytest.mark.slow),
    ],
)
def test_columns_and_their_scales_are_exchanged_for_rows(ranks, case, fields, transport):
    """Compares shards that begin inside an atom, the last one with fewer atoms, and full ones."""
    with world_of("sm_100a", ranks, fields, transport=transport, mode="random") as world:
        outs = case.queue(world)
        world.synchronize()
        assert case.share_of_bound(outs) <= 1


@pytest.mark.parametrize("op", [RS, GATHER])
def test_calls_of_every_kind_share_workspaces(op):
    """Of MX types, of bfloat16, of MX types with other shards, queued together; the last rank lags."""
    cases = [Case(op, m, 136, 3 * 64, seed=m) for m in (130, 2, 60)]
    with world_of("sm_100a", 3, TILE, mode="random", schedule=lagging(2)) as world:
        queued = []
        for case in cases:
            queued.append((case, case.queue(world)))
            x, weight = (torch.full((rows, 32), 0.5, dtype=torch.bfloat16) for rows in (24, 8))
            plain = [
                getattr(overlap_gemm, op)(
                    x, weight, group=name, backend="fused", **({"rows": 72} if op == GATHER else {})
                )
                for name in world.names
            ]
            queued.append((None, plain))
        world.synchronize()
        for case, outs in queued:
            if case is None:
                assert all((out == (24 if op == RS else 8)).all() for out in outs)
            else:
                assert case.share_of_bound(outs) <= 1


@pytest.mark.parametrize("transport", ["copy_engine", pytest.param("nvshmem", marks=pytest.mark.slow)])
def test_shards_and_their_scales_travel_by_others(transport):
    case = Case(GATHER, 70, 72, 96)
    with world_of("sm_100a", 3, TILE, transport=transport, schedule=lagging(2)) as world:
        queued = [replace(case, seed=seed) for seed in range(2)]
        outs = [one.queue(world) for one in queued]
        world.synchronize()
        assert all(one.share_of_bound(out) <= 1 for one, out in zip(queued, outs, strict=True))


def test_gathered_rows_come_back_and_weights_share_a_gather():
    case = Case(GATHER, 30, 24, 64, bias=False)
    with world_of("sm_100a", 3, TILE) as world:
        found = []
        for rank, name in enumerate(world.names):
            x, weight, *scales = case.operands(rank, 3)
            scale_x, scale_w = map(overlap_gemm.swizzle_scales, scales)
            found.append(
                overlap_gemm.all_gather_gemm(
                    x, [weight, weight[:0]], scale_x=scale_x, scale_w=[scale_w, scale_w[:0]], block="mx",
                    rows=30, group=name, backend="fused", return_gathered=True,
                )
            )  # fmt: skip
        world.synchronize()
    every = [case.operands(rank, 3) for rank in range(3)]
    rows = torch.cat([x.view(torch.uint8) for x, *_ in every])
    for (out, none), gathered in found:
        assert torch.equal(gathered.view(torch.uint8), rows) and none.shape == (30, 0)
        assert case.share_of_bound([out], ranks=3) <= 1


OTHERS = {
    "no scale of x": lambda r, s: (torch.ones_like(s[0]), s[1]) if r == 1 else s,
    "no scale of the weight": lambda r, s: (s[0], torch.ones_like(s[1])) if r == 1 else s,
    "the next row's": lambda r, s: (s[0].roll(1, 0), s[1]) if r == 1 else s,
    "the next 32 of K's": lambda r, s: (s[0], s[1].roll(1, 1)) if r == 1 else s,
}


@pytest.mark.slow
@pytest.mark.parametrize("op", [RS, GATHER])
def test_what_is_judged_notices(op):
    case = Case(op, 70, 136, 3 * 64)
    with world_of("sm_100a", 3, TILE) as world:
        queued = [case.queue(world, change) for change in OTHERS.values()]
        world.synchronize()
        assert all(case.share_of_bound(outs) > 1 for outs in queued)


def without_padding(patch):
    """As if shards' tiles began with whole atoms."""
    patch.setattr(device.MxScales, "of_shard", lambda scales, shard, work: scales)


def without_copies_of_b(patch):
    """Tensor memory keeps the scales of B that were there."""
    in_tmem = device.in_tmem

    def of_a_alone(*given):
        found = in_tmem(*given)
        return replace(found, copies=found.copies[:1])

    patch.setattr(device, "in_tmem", of_a_alone)


def with_the_first_blocks_scales(patch):
    scaled = device.TmemScales.scaled
    patch.setattr(device.TmemScales, "scaled", lambda self, a, b, block: scaled(self, a, b, 0))


def with_own_scales_for_all(patch):
    patch.setattr(device.MxScales, "with_gathered", lambda own, scales: own)


def with_the_first_slices_scales_of_b(patch):
    patch.setattr(device.MxScales, "of_slice", lambda local, scales, *_: local.with_gathered(scales))


def without_padding_of_ranks(patch):
    of_rows = device.MxScales.of_local_slice
    patch.setattr(
        device.MxScales, "of_local_slice", lambda local, *how: of_rows(local, *how)._replace(padding=(0, 0))
    )


MISTAKES = {
    RS: (without_padding, without_copies_of_b, with_the_first_blocks_scales),
    GATHER: (with_own_scales_for_all, with_flags_before_scales),
    DUAL: (with_own_scales_for_all, with_the_first_slices_scales_of_b, without_padding_of_ranks),
}


@pytest.mark.slow
@pytest.mark.usefixtures("changed_kernels")
@pytest.mark.parametrize(
    ("op", "mistake"), [(op, mistake) for op, several in MISTAKES.items() for mistake in several]
)
def test_what_is_taken_out_is_missed(op, mistake, monkeypatch):
    """By the emulator (a race, for one), or in the result."""
    mistake(monkeypatch)
    case = Case(op, 140, 136, 3 * (128 if op == DUAL else 96))
    transport = "copy_engine" if mistake is with_flags_before_scales else None
    try:
        with world_of("sm_100a", 3, TILE, transport=transport, mode="random") as world:
            outs = case.queue(world)
            world.synchronize()
    except EmulatorError:
        return
    assert case.share_of_bound(outs) > 1


def test_hopper_has_no_such_kernels():
    case = Case(RS, 66, 24, 64)
    with (
        world_of("sm_90a", 2) as world,
        pytest.raises(ValueError, match="1 x 32 are for kernels of sm_100a"),
    ):
        case.queue(world)


def test_scales_lie_as_torch_says():
    """Row r's 4 scales of an atom at 16 * (r % 32) + 4 * (r // 32), atoms of the same rows together."""
    scale = 2.0 ** torch.randint(-100, 100, (200, 5))
    flat = overlap_gemm.swizzle_scales(scale).float()
    assert flat.numel() == mx.num_scales(200, 160) == 2 * 2 * 512
    for row, block in ((0, 0), (33, 3), (127, 4), (130, 1), (199, 4)):
        atom = 2 * (row // 128) + block // 4
        at = 512 * atom + 16 * (row % 32) + 4 * (row % 128 // 32) + block % 4
        assert flat[at] == scale[row, block]
    assert torch.equal(mx.rows_of(overlap_gemm.swizzle_scales(scale), 200, 160).float(), scale)
