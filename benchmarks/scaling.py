"""Bytes that a rank stores at peers, and instructions, for P to 8, in the emulator; the model to P = 72.

    python benchmarks/scaling.py benchmarks/results/scaling.json benchmarks/results/scaling.png

One product of global sizes on P virtual ranks, every op; bytes as multiples of the communicated tensor (twice
for an all-reduce in two shots), instructions as multiples of the plain GEMM's on one rank.
"""

import json
import sys
from pathlib import Path

import torch

from cute_emulator import Emulator
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.testing.cases import Case
from overlap_gemm.testing.emulated import judge, run_launches
from overlap_gemm.tuning.settings import configured
from overlap_gemm.tuning.time_model import Facts

ARCHS = {"sm_90a": {"mma": "pingpong", "tile": (64, 128)}, "sm_100a": {"mma": "1cta", "tile": (128, 64)}}
SIZES = 1024, 1024, 256
WAYS = {
    "all_gather_gemm": {"transport": "peer_bulk"},
    "gemm_reduce_scatter": {},
    "gemm_all_reduce": {"algorithm": "two_shot"},
    "gemm_all_gather": {},
}
RANKS = (1, 2, 4, 8)
MOST = 72


def run(op: str, arch: str, ranks: int) -> dict[str, float]:
    """Runs one launch; returns the largest bytes that a rank stores at peers, and instructions a rank."""
    case = Case(op, *SIZES, torch.bfloat16, bias=False)
    with (
        configured(**ARCHS[arch], **WAYS[op]),
        Emulator(arch, ranks, "immediate", num_sms=8) as emulator,
        VirtualWorld(ranks, emulator=emulator) as world,
    ):
        [(tensors, outs)] = run_launches(case, world, 1)
        assert judge(case, tensors, outs, torch.bfloat16).holds
        sent = emulator.report.sent
        most = max(sum(n for (r, _), n in sent.items() if r == rank) for rank in range(ranks))
        return {"bytes": most, "instructions": emulator.report.instructions / ranks}


def expected(op: str, ranks: int) -> float:
    """Bytes that the model has each rank send."""
    return Facts(op, *SIZES, "bf16", ranks).bytes_out


def draw(results: dict, picture: Path) -> None:
    """Bytes and instructions over P."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    line = range(1, MOST + 1)
    for colour, op in enumerate(WAYS):
        left.plot(line, [expected(op, p) / 2**20 for p in line], f"C{colour}-", lw=1, label=op)
        for arch, mark in zip(ARCHS, "ox", strict=True):
            counts = results[arch][op]
            left.plot(RANKS, [counts[str(p)]["bytes"] / 2**20 for p in RANKS], f"C{colour}{mark}", ms=6)
            alone = counts["1"]["instructions"]
            right.plot(
                RANKS,
                [counts[str(p)]["instructions"] / alone for p in RANKS],
                f"C{colour}{mark}-",
                ms=5,
                lw=0.8,
            )
    left.set(
        xscale="log",
        xlabel="ranks P",
        ylabel="MiB that a rank stores at others",
        xticks=[1, 2, 4, 8, 16, 32, 72],
    )
    left.set_xticklabels(["1", "2", "4", "8", "16", "32", "72"])
    marks = "model (lines), counted (o sm_90a, x sm_100a)"
    left.legend(fontsize=8, title=marks, title_fontsize=8, loc="center right", bbox_to_anchor=(1, 0.66))
    right.set(xlabel="ranks P", ylabel="warp instructions of a rank / those on one rank", xticks=list(RANKS))
    right.axhline(1, color="grey", lw=0.5)
    figure.suptitle(
        f"M, N, K = {', '.join(map(str, SIZES))} over all ranks, bf16; counted in the emulator", fontsize=10
    )
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    data, picture = map(Path, sys.argv[1:])
    results: dict = {}
    for arch in ARCHS:
        for op in WAYS:
            for ranks in RANKS:
                counts = run(op, arch, ranks)
                results.setdefault(arch, {}).setdefault(op, {})[str(ranks)] = counts
                print(arch, op, ranks, counts, f"model {expected(op, ranks):.0f}", flush=True)
    data.write_text(json.dumps({"sizes": SIZES, "results": results}, indent=1) + "\n")
    draw(results, picture)
