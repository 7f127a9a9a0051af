"""Our ops behind transformers' own tensor parallelism, `from_pretrained(..., distributed_config=...)`.

    from overlap_gemm.integrations import hugging_face
    hugging_face.install()
    model = AutoModelForCausalLM.from_pretrained(name, distributed_config=DistributedConfig(tp_size=2))

Linears that a model's plan shards by column and row then multiply with `gemm_all_reduce`, `gemm_all_gather`
and their gradients; whatever else the plan names stays transformers'. `overlap_gemm.parallel.parallelize`
does more (sequence parallelism, one gather for q, k and v) for the families that it knows.
"""

import logging
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from transformers import __version__ as transformers_version

from ..backends.op_call import BackendName
from ..backends.select import check_name
from ..parallel.modules.styles import (
    ColwiseForward,
    OverlapColwiseParallel,
    OverlapRowwiseParallel,
    RowwiseForward,
)

try:
    from transformers.distributed.tensor_parallel import (
        ALL_PARALLEL_STYLES,
        ColwiseParallel,
        RowwiseParallel,
    )

    is_new_enough = hasattr(ColwiseParallel, "install_forward")
except ImportError:
    is_new_enough = False
if not is_new_enough:
    raise ImportError(
        f"overlap_gemm.integrations.hugging_face needs transformers >= 5.17, whose styles install forwards, "
        f"got {transformers_version}; overlap_gemm.parallel.parallelize takes >= 5.10"
    )

logger = logging.getLogger(__name__)


class Colwise(ColwiseParallel):
    """transformers' "colwise" with our product.

    Args:
        output_layouts: `Shard(-1)`, or `Replicate()` to gather the output features.
        backend: As for `overlap_gemm.all_gather_gemm`.
    """

    def __init__(self, *, output_layouts: Placement, backend: BackendName):
        super().__init__(output_layouts=output_layouts)
        self.style = OverlapColwiseParallel(output_layouts=output_layouts, backend=backend)

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Called by transformers for each module that a plan names."""
        if not _is_plain_linear(module):
            return super().install_forward(module, mesh)
        module.forward = ColwiseForward(module, mesh, self.style)
        return module


class Rowwise(RowwiseParallel):
    """transformers' "rowwise" with our product.

    Args:
        backend: As for `overlap_gemm.all_gather_gemm`.
    """

    def __init__(self, *, backend: BackendName):
        super().__init__()
        self.style = OverlapRowwiseParallel(backend=backend)

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Called by transformers for each module that a plan names."""
        if not _is_plain_linear(module):
            return super().install_forward(module, mesh)
        module.forward = RowwiseForward(module, mesh, self.style)
        return module


_replaced: dict[str, Any] = {}
"""transformers' own styles (None for names it has not), by the names that are ours while installed."""


def install(*, backend: BackendName = "auto", names_only: bool = False) -> None:
    """Registers the styles "overlap_colwise", "overlap_rowwise" and "overlap_colwise_gather_output".

    Args:
        backend: As for `overlap_gemm.all_gather_gemm`.
        names_only: Leave transformers' "colwise", "rowwise" and "colwise_gather_output", which the models'
            own plans name (`tp_plan="auto"`), as they are: only plans that name ours get them.

    Raises:
        RuntimeError: It is installed already.
        ValueError: No such backend.
    """
    check_name(backend)
    if _replaced:
        raise RuntimeError("hugging_face is installed already; uninstall() it first")
    styles: dict[str, Any] = {
        "colwise": Colwise(output_layouts=Shard(-1), backend=backend),
        "colwise_gather_output": Colwise(output_layouts=Replicate(), backend=backend),
        "rowwise": Rowwise(backend=backend),
    }
    for name, style in styles.items():
        for own in [f"overlap_{name}"] + [name] * (not names_only):
            _replaced[own] = ALL_PARALLEL_STYLES._global_mapping.get(own)
            ALL_PARALLEL_STYLES.register(own, style)
    logger.info("transformers' styles %s are carried out by overlap_gemm", ", ".join(_replaced))


def uninstall() -> None:
    """Gives transformers' styles back. Models that have been loaded keep what they have."""
    for name, style in _replaced.items():
        if style is None:
            ALL_PARALLEL_STYLES._global_mapping.pop(name)
        else:
            ALL_PARALLEL_STYLES.register(name, style)
    _replaced.clear()


def _is_plain_linear(module: nn.Module) -> bool:
    if type(module) is nn.Linear and not getattr(module, "_hf_quantized_needs_local_tp", False):
        return True
    logger.warning("transformers' own style runs for a %s, which is not an nn.Linear", type(module).__name__)
    return False
