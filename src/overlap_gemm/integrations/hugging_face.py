"""Our ops for transformers' own tensor parallelism, `from_pretrained(..., distributed_config=...)`.

    from overlap_gemm.integrations import hugging_face
    hugging_face.install()
    model = AutoModelForCausalLM.from_pretrained(name, distributed_config=DistributedConfig(tp_size=2))

transformers 5.17 or newer is needed; the import raises ImportError otherwise. Linears that a model's plan
shards by column and row then use `gemm_all_reduce`, `gemm_all_gather` and their gradients. Quantized linears,
subclasses of `nn.Linear` and all other modules run transformers' own styles. For the supported families,
`overlap_gemm.parallel.parallelize` does more: sequence parallelism, one gather for q, k and v.
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
        f"overlap_gemm.integrations.hugging_face needs transformers >= 5.17, got {transformers_version}; "
        f"overlap_gemm.parallel.parallelize supports >= 5.10"
    )

logger = logging.getLogger(__name__)


class Colwise(ColwiseParallel):
    """transformers' "colwise" style with our product.

    Args:
        output_layouts: `Shard(-1)`, or `Replicate()` to gather the output features.
        backend: Backend of the op, as in `overlap_gemm.all_gather_gemm`.
    """

    def __init__(self, *, output_layouts: Placement, backend: BackendName):
        super().__init__(output_layouts=output_layouts)
        self.style = OverlapColwiseParallel(output_layouts=output_layouts, backend=backend)

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Sets the forward of a module. Called by transformers for each module that a plan names."""
        if not _is_plain_linear(module):
            return super().install_forward(module, mesh)
        module.forward = ColwiseForward(module, mesh, self.style)
        return module


class Rowwise(RowwiseParallel):
    """transformers' "rowwise" style with our product.

    Args:
        backend: Backend of the op, as in `overlap_gemm.gemm_all_reduce`.
    """

    def __init__(self, *, backend: BackendName):
        super().__init__()
        self.style = OverlapRowwiseParallel(backend=backend)

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Sets the forward of a module. Called by transformers for each module that a plan names."""
        if not _is_plain_linear(module):
            return super().install_forward(module, mesh)
        module.forward = RowwiseForward(module, mesh, self.style)
        return module


_replaced: dict[str, Any] = {}
"""Styles that `install` replaced, by name, for `uninstall`; None if the name was new."""


def install(*, backend: BackendName = "auto", names_only: bool = False) -> None:
    """Registers our styles, and replaces transformers' by them, for models that are loaded afterwards.

    Registered are "overlap_colwise", "overlap_rowwise" and "overlap_colwise_gather_output". Replaced are
    "colwise", "rowwise" and "colwise_gather_output", which the models' own plans use (`tp_plan="auto"`).

    Args:
        backend: Backend of the ops, as in `overlap_gemm.all_gather_gemm`.
        names_only: Whether to register only. Then only plans with our names use our ops.

    Raises:
        RuntimeError: The styles are already installed.
        ValueError: There is no such backend.
    """
    check_name(backend)
    if _replaced:
        raise RuntimeError("hugging_face is installed already; call uninstall() first")
    styles: dict[str, Any] = {
        "colwise": Colwise(output_layouts=Shard(-1), backend=backend),
        "colwise_gather_output": Colwise(output_layouts=Replicate(), backend=backend),
        "rowwise": Rowwise(backend=backend),
    }
    for name, style in styles.items():
        for key in [f"overlap_{name}"] + [name] * (not names_only):
            _replaced[key] = ALL_PARALLEL_STYLES._global_mapping.get(key)
            ALL_PARALLEL_STYLES.register(key, style)
    logger.info("transformers' styles %s use overlap_gemm", ", ".join(_replaced))


def uninstall() -> None:
    """Restores transformers' styles. Models that were loaded before are unchanged."""
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
