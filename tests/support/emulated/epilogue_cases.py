"""Calls with epilogues on virtual ranks, and what each rank should get."""

from dataclasses import dataclass, field

import torch

import overlap_gemm
from overlap_gemm import epilogue, epilogues
from overlap_gemm.spec import OPS
from overlap_gemm.spec.sharding import Shards
from overlap_gemm.testing.cases import LAYOUTS
from overlap_gemm.testing.emulated import poisoned_allocations
from tests.support.emulated.scaled_cases import ACCUMULATION, dequantised

RS, AR = "gemm_reduce_scatter", "gemm_all_reduce"
ARCHITECTURES = "sm_90a", "sm_100a"


@epilogue(inputs={"residual": "element", "gamma": "columns", "rstd": "rows", "alpha": "scalar"})
def gated(x, residual, gamma, rstd, alpha):
    return epilogues.silu(alpha * x * rstd) * gamma + residual


STREAM = epilogues.add_residual_squared


def refuse(*_):
    """Takes the place of an epilogue after an op: where a kernel applies it, nothing calls this."""
    raise AssertionError


@dataclass
class Called:
    """Operands and inputs of all ranks, and what each should get, in float64."""

    op: str
    world: int
    one: object
    sizes: tuple = ()
    seed: int = 0
    device: object = "cpu"
    otherwise: object = None
    two_weights: str = ""
    has_bias: bool = False
    scales: object = None  # "rows", "mx", or the extent of blocks: operands of 8 bits
    given: list = field(default_factory=list)
    exact: list = field(default_factory=list)
    bounds: list = field(default_factory=list)

    def __post_init__(self):
        # Columns that are no multiple of a tile's, but where a rank's must be whole 16 bytes.
        self.sizes = self.sizes or (70, 192 if self.op == "gemm_all_gather" else 144, 72)
        m, n, k = self.sizes
        generator = torch.Generator().manual_seed(self.seed)

        def random(*shape):
            return torch.randn(shape, generator=generator).bfloat16()

        layout, spec = LAYOUTS[self.op], OPS[self.op]
        partial = self.world if spec.sums else 1
        xs, ws = ([random(rows, k) for _ in range(partial)] for rows in (m, n))
        of_xs, of_ws = [None] * partial, [None] * partial
        wide = [one.double() for one in xs + ws]
        if self.scales:
            xs, ws = ([one.to(torch.float8_e4m3fn) for one in each] for each in (xs, ws))
            of_xs, of_ws = (
                [self._scale(one, height, generator) for one in each]
                for each, height in ((xs, 1), (ws, self.block if isinstance(self.block, int) else 1))
            )
            pairs = zip(xs + ws, of_xs + of_ws, strict=True)
            wide = [dequantised(one, scale, self.width) for one, scale in pairs]
        wide = list(zip(wide[:partial], wide[partial:], strict=True))
        total = sum(x @ w.t() for x, w in wide)
        size = sum(x.abs() @ w.abs().t() for x, w in wide)
        self.bias = random(n) if self.has_bias else None
        if self.has_bias:
            total = total + self.bias.double()
        whole = {"residual": random(m, n), "gamma": random(n), "rstd": random(m).float().abs()}
        whole["alpha"], whole["scale"] = torch.tensor([0.5]), torch.tensor([0.0256])
        whole["weight"], whole["eps"] = whole["gamma"], torch.tensor([1e-3])
        most, unit, least = (2.0**30, 2**-8, 1e-3) if self.one.result is None else (448.0, 2**-4, 2.0**-10)
        if self.one.then is not None:  # which takes rounded values
            unit += 2**-8
        if self.one.block:  # its scales map all to the type's range
            most = 2.0**30
        for rank in range(self.world):
            part = lambda one, dim, r=rank: _part(one, dim, r, self.world)  # noqa: E731
            inputs = [whole[name] for name, _ in self.one.inputs]
            kinds = [kind for _, kind in self.one.inputs]
            dims = {"element": layout.out, "rows": 0 if layout.out == 0 else None, "scalar": None}
            dims["columns"] = 0 if layout.out == 1 else None
            inputs = [part(one, dims[kind]) for one, kind in zip(inputs, kinds, strict=True)]
            x, w = (xs[rank], ws[rank]) if spec.sums else (part(xs[0], layout.x), part(ws[0], layout.weight))
            scales = (of_xs[rank], of_ws[rank]) if spec.sums else (of_xs[0], of_ws[0])
            if self.scales and not spec.sums:
                scales = part(scales[0], layout.x), part(scales[1], layout.weight)
            moved = [one.to(self.device) for one in inputs]
            scales = tuple(None if one is None else one.to(self.device) for one in scales)
            self.given.append((x.to(self.device), w.to(self.device), moved, scales))
            sums = part(total, layout.out)
            wide = [one.double() for one in inputs]
            loss = 2**-9 * part(size, layout.out) if spec.sums else 1e-5
            if self.scales:
                loss = loss + ACCUMULATION * part(size, layout.out)
            if spec.weight is None:  # kernels round before they send, portable backends before the epilogue
                loss = loss + 2**-8 * sums.abs()
            shifted = [
                [one.clamp(-most, most) for one in self.one.on_tensors(sums + sign * loss, wide)]
                for sign in (-1, 1, 0)
            ]
            exact = shifted.pop()
            self.exact.append(exact)
            self.bounds.append([
                torch.maximum((low - one).abs(), (high - one).abs()) + unit * 1.02 * one.abs() + least
                for low, one, high in zip(shifted[0], exact, shifted[1], strict=True)
            ])  # fmt: skip

    @property
    def block(self):
        """Returns the argument `block` of the op."""
        return None if self.scales == "rows" else self.scales

    @property
    def width(self):
        """Returns the elements of K that share a scale; 0: all."""
        return 32 if self.block == "mx" else self.block or 0

    def _scale(self, matrix, height, generator):
        """Returns scales of rows or blocks of a matrix; those of MX types are powers of two."""
        rows, depth = matrix.shape
        along = -(-depth // self.width) if self.width else 1
        exponents = 4 * torch.rand(-(-rows // height), along, generator=generator) - 2
        return 2 ** (exponents.round() if self.block == "mx" else exponents)

    def call(self, rank, group):
        x, w, inputs, scales = self.given[rank]
        m, n, k = self.sizes
        named = {name: one for (name, _), one in zip(self.one.inputs, inputs, strict=True)}
        lengths = OPS[self.op].arguments(m, n, k * self.world if OPS[self.op].sums else k)
        if self.has_bias:
            lengths["bias"] = _part(self.bias, LAYOUTS[self.op].bias, rank, self.world).to(self.device)
        call = getattr(overlap_gemm, self.op)
        applied = self.one(**named)._replace(otherwise=self.otherwise)
        if self.two_weights:
            w = [part.flatten(0, 1).clone() for part in w.unflatten(0, (-1, 2, 32)).unbind(1)]
            if (w[0].data_ptr() > w[1].data_ptr()) == (self.two_weights == "gate-first"):
                first, second = w[1].clone(), w[0].clone()
                w = [w[1].copy_(second), w[0].copy_(first)]
        if self.scales:
            of_x, of_w = map(overlap_gemm.swizzle_scales, scales) if self.block == "mx" else scales
            if self.two_weights:
                of_w = [part.flatten(0, 1) for part in of_w.unflatten(0, (-1, 2, 32)).unbind(1)]
            lengths |= {"scale_x": of_x, "scale_w": of_w, "block": self.block}
        return call(x, w, group=group, epilogue=applied, backend="fused", **lengths)

    def worst(self, outs):
        """Largest error, in units of its bound."""
        worst = 0.0
        for found, exact, bound in zip(outs, self.exact, self.bounds, strict=True):
            found = found if isinstance(found, tuple) else (found,)
            for one, wanted, allowed in zip(found, exact, bound, strict=True):
                assert one.shape == wanted.shape
                error = (one.double().cpu() - wanted).abs() / allowed
                worst = max(worst, float(error.nan_to_num(nan=torch.inf).max())) if error.numel() else worst
        return worst


def _part(one, dim, rank, world):
    if dim is None:
        return one
    start, end = Shards.even(one.shape[dim], world).range(rank)
    return one.narrow(dim, start, end - start).clone()


def worst(case, world):
    """Queues a call on every rank, runs all, and returns the largest error in units of its bound."""
    with poisoned_allocations():
        outs = [case.call(rank, name) for rank, name in enumerate(world.names)]
    world.synchronize()
    return case.worst(outs)


def errors_of_blocks(case, world):
    """Returns the largest error of values times scales, and of scales, in units of the bounds."""
    with poisoned_allocations():
        outs = [case.call(rank, name) for rank, name in enumerate(world.names)]
    world.synchronize()
    worst = 0.0
    for (values, scales), *expected in zip(outs, case.exact, case.bounds, strict=True):
        assert scales.stride() == (1, -(-len(scales) // 4) * 4), "the layout of quantize_rows"
        values, scales = values.cpu(), scales.cpu()
        exact, bound, parts = (
            one.unflatten(-1, (-1, 128)) for one in (*(only for (only,) in expected), values.double())
        )
        wide = scales.double()[..., None]
        assert wide.shape[:2] == parts.shape[:2] and scales.dtype == torch.float32
        if not (parts.abs().amax(-1) == 448).all():
            return torch.inf
        of_values = (parts * wide - exact).abs() / (bound + 2**-9 * wide)
        of_scales = (wide[..., 0] * 448 - exact.abs().amax(-1)).abs() / bound.amax(-1)
        worst = max(worst, *(float(one.nan_to_num(nan=torch.inf).max()) for one in (of_values, of_scales)))
    return worst
