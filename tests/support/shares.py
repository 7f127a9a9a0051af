"""What a rank's process does in tests with a device per rank: its share of a case, the verdict on all."""

import torch
import torch.distributed as dist
from torch import Tensor

from overlap_gemm.testing.cases import LAYOUTS, Case, Operands, operands
from overlap_gemm.testing.emulated import judge


def own_device(rank: int) -> torch.device:
    """The rank's GPU; its CPU where such a test's own logic is tried without one."""
    return torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")


def parts(case: Case, rank: int, size: int) -> tuple[Operands, list[Tensor | None]]:
    """The whole operands, and the rank's x, weight and bias."""
    given, layout = operands(case).to(own_device(rank)), LAYOUTS[case.op]
    names = ("x", "weight", "bias")
    return given, [layout.part(getattr(given, n), getattr(layout, n), rank, size) for n in names]


def assert_right(case: Case, given: Operands, out: Tensor, slot: torch.dtype | None = None) -> None:
    """Judges the results of all ranks, of which `out` is this one's; `slot` is the partials' dtype."""
    outs: list[Tensor] = [out] * dist.get_world_size()
    dist.all_gather_object(outs, out.cpu())
    verdict = judge(case, given, [part.to(out.device) for part in outs], slot or case.dtype)
    assert verdict.holds, (case, verdict)
