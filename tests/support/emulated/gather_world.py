"""A world of emulated ranks that call an all-gather GEMM."""

import torch

import overlap_gemm
from cute_emulator import Emulator, Schedule
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.spec.sharding import Shards
from overlap_gemm.testing.cases import Case
from overlap_gemm.testing.emulated import judge, poisoned_allocations, queue_launch
from overlap_gemm.tuning.settings import configured

KINDS = {
    "sm_100a": [
        {"mma": "1cta", "tile": (128, 64)},
        {"mma": "1cta", "tile": (128, 128), "cluster": (1, 2)},
        {"mma": "2cta", "tile": (256, 128), "cluster": (2, 1)},
    ],
    "sm_90a": [
        {"mma": "pingpong", "tile": (64, 128), "cluster": (1, 1)},
        {"mma": "cooperative", "tile": (128, 128)},
        {"mma": "pingpong", "tile": (128, 128), "cluster": (2, 1)},
    ],
}


SMALLEST = {arch: kinds[0] for arch, kinds in KINDS.items()}


class World:
    """Virtual ranks of an emulator, and the calls that are queued on them."""

    def __init__(
        self, arch, ranks, *, transport, fields=None, mode="immediate", seed=0, starved=None, sms=4, **options
    ):
        lagging = Schedule(starved=lambda rank, cta, warp: rank == starved)
        self.options = {"schedule": lagging, "num_sms": sms, **options}
        self.fields = {"shard_transport": transport, **(fields or SMALLEST[arch])}
        self.arch, self.ranks, self.mode, self.seed = arch, ranks, mode, seed
        self.judged, self.kept = [], []

    def __enter__(self):
        self.asked = configured(**self.fields)
        self.asked.__enter__()
        self.emulator = Emulator(self.arch, self.ranks, self.mode, self.seed, **self.options).__enter__()
        far = self.options.get("network", False)
        self.world = VirtualWorld(self.ranks, emulator=self.emulator, without_p2p=far).__enter__()
        return self

    def __exit__(self, *error):
        self.world.__exit__(*error)
        self.emulator.__exit__(*error)
        self.asked.__exit__(*error)

    def call(self, m, n, k, op="all_gather_gemm", **options):
        """Queues one call on every rank."""
        seed = self.seed + len(self.judged)
        case = Case(op, m, n, k, options.pop("dtype", torch.bfloat16), seed=seed, **options)
        self.judged.append((case, *queue_launch(case, self.world)))

    def several(self, m, widths, k, keep):
        """Queues one call with a weight of each width per rank, whose gathered operand is compared, too."""
        generator = torch.Generator().manual_seed(self.seed + len(self.kept))
        draw = lambda *shape: torch.randn(shape, generator=generator).bfloat16()  # noqa: E731
        x, shards = draw(m, k), Shards.even(m, self.ranks)
        for rank, name in enumerate(self.world.names):
            own = x[slice(*shards.range(rank))].clone()
            weights = [draw(n, k) / k**0.5 for n in widths]
            with poisoned_allocations():
                found = overlap_gemm.all_gather_gemm(
                    own, weights, group=name, rows=m, backend="fused", return_gathered=keep
                )
            self.kept.append((x, weights, *(found if keep else (found, None))))

    def run(self):
        """Runs everything and compares it."""
        self.world.synchronize()
        verdicts = [judge(case, given, outs, case.dtype) for case, given, outs in self.judged]
        wrong = [(str(case), v) for (case, *_), v in zip(self.judged, verdicts, strict=True) if not v.holds]
        assert not wrong, wrong
        for x, weights, outs, gathered in self.kept:
            if gathered is not None:
                assert torch.equal(gathered, x)
            for weight, out in zip(weights, outs, strict=True):
                torch.testing.assert_close(out, (x.double() @ weight.double().t()).bfloat16())
        return self.emulator.report
