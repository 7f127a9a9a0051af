"""The SGLang plug-in's hook on row-parallel linears, with stand-ins of SGLang's modules on CPU ranks."""

import ast
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from overlap_gemm.backends.decomposed import Decomposed
from overlap_gemm.integrations import sglang as plugin
from overlap_gemm.integrations import torch_symm_mem
from tests.support.stacks import extracted

NAMES = {
    "sglang.srt.plugins.hook_registry": ["HookRegistry", "HookType"],
    "sglang.srt.runtime_context": ["get_exec", "get_forward", "get_parallel"],
    "sglang.srt.layers.quantization.unquant": ["UnquantizedLinearMethod"],
}
"""Names that the plug-in imports."""

ATTRIBUTES = (
    "bias", "input_is_parallel", "input_size", "input_size_per_partition", "output_size", "quant_method",
    "reduce_results", "skip_bias_add", "tp_group", "use_dp_attention_reduce",
)  # fmt: skip
"""Attributes of a layer that it reads."""

FLAGS = ("sp_active", "mlp_reduce_scatter")
"""Flags of a forward pass that it reads."""


class UnquantizedLinearMethod:
    pass


class RowParallelLinear:
    """The attributes and the contract of SGLang's forward."""

    def __init__(self, weight, bias, group, **options):
        self.weight, self.bias, self.tp_group = weight, bias, group
        self.output_size, self.input_size_per_partition = weight.shape
        self.input_size = weight.shape[1] * group.world_size
        self.reduce_results = self.input_is_parallel = True
        self.skip_bias_add = self.use_dp_attention_reduce = False
        self.quant_method = UnquantizedLinearMethod()
        vars(self).update(options)

    def forward(self, input_, skip_all_reduce=False, forward_batch=None, output_tensor=None):
        return "SGLang's", None


@contextmanager
def registered():
    """Installs the stand-in with the plug-in switched on; yields its settings, flags and group."""
    group = SimpleNamespace(device_group=dist.group.WORLD, world_size=dist.get_world_size())
    settings = SimpleNamespace(
        comm=SimpleNamespace(enable_quant_communications=False),
        deterministic=SimpleNamespace(enable_deterministic_inference=False),
    )
    flags, hooks = SimpleNamespace(**dict.fromkeys(FLAGS, False)), {}
    registry = SimpleNamespace(register=lambda target, hook, kind: hooks.update({target: (hook, kind)}))
    contents = {
        "HookRegistry": registry,
        "HookType": SimpleNamespace(AROUND="around"),
        "get_exec": lambda: settings,
        "get_forward": lambda: flags,
        "get_parallel": lambda: SimpleNamespace(tp_group=group),
        "UnquantizedLinearMethod": UnquantizedLinearMethod,
    }
    modules = {}
    for name, names in NAMES.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        vars(modules[name]).update({one: contents[one] for one in names})
    plugin._register.cache_clear()
    plugin._overlaps.cache_clear()
    with mock.patch.dict(sys.modules, modules), mock.patch.dict(os.environ, {plugin.SWITCH: "1"}):
        plugin.register()
        plugin.register()  # as SGLang may
        hook, kind = hooks.pop(plugin.ROW_PARALLEL)
        assert kind == "around" and not hooks
        original = RowParallelLinear.forward
        with mock.patch.object(RowParallelLinear, "forward", lambda *a, **k: hook(original, *a, **k)):
            yield settings, flags, group
    plugin._register.cache_clear()
    torch_symm_mem.uninstall()


def sums(rank, size):
    overlap = SimpleNamespace(pays=True)
    why = lambda self, problem: None if overlap.pays else "few"  # noqa: E731
    with registered() as (settings, flags, group), mock.patch.object(Decomposed, "why_slower", why):
        torch.manual_seed(0)
        full, bias, x = torch.randn(6, 64 * size), torch.randn(6), torch.randn(130, 64 * size)
        weight, local = (each.chunk(size, 1)[rank].contiguous() for each in (full, x))
        other = SimpleNamespace(device_group=None, world_size=size)
        layer = RowParallelLinear(weight, bias, group)
        for skips in (False, True):
            out, left = RowParallelLinear(weight, bias, group, skip_bias_add=skips).forward(local)
            torch.testing.assert_close(out, x @ full.t() + (0 if skips else bias), rtol=1e-4, atol=1e-4)
            assert left is (bias if skips else None)
        for option in (
            {"reduce_results": False}, {"use_dp_attention_reduce": True}, {"quant_method": object()},
            {"input_is_parallel": False}, {"tp_group": other}, {"use_intel_amx_backend": True},
        ):  # fmt: skip
            assert RowParallelLinear(weight, bias, group, **option).forward(local)[0] == "SGLang's", option
        assert layer.forward(local, skip_all_reduce=True)[0] == "SGLang's"
        assert layer.forward(local, output_tensor=x)[0] == "SGLang's"
        for name in FLAGS:
            with mock.patch.object(flags, name, True):
                assert layer.forward(local)[0] == "SGLang's"
        for decodes in (True, False):
            batch = SimpleNamespace(forward_mode=SimpleNamespace(is_decode_or_idle=lambda d=decodes: d))
            with mock.patch.object(settings.comm, "enable_quant_communications", True):
                is_own = layer.forward(local, forward_batch=batch)[0] == "SGLang's"
            assert is_own != decodes
        overlap.pays = False
        plugin._overlaps.cache_clear()
        assert layer.forward(local)[0] == "SGLang's"
        with mock.patch.object(settings.deterministic, "enable_deterministic_inference", True):
            out = layer.forward(local)[0]
            for rows in (slice(0, 1), slice(40, 130)):
                assert torch.equal(layer.forward(local[rows])[0], out[rows])


def test_row_parallel_linears_are_ours(ranks):
    ranks(2).run(sums)


@pytest.mark.slow
def test_names_of_the_released_wheel(tmp_path):
    files = [f"{name.replace('.', '/')}.py" for name in (*NAMES, "sglang.srt.layers.linear")]
    trees = [ast.parse(Path(path).read_text()) for path in extracted("sglang", tmp_path, *files)]
    for tree, names in zip(trees, NAMES.values(), strict=False):
        assert set(names) <= {node.name for node in tree.body if hasattr(node, "name")}
    classes = {node.name: node for node in trees[-1].body if isinstance(node, ast.ClassDef)}
    layer, base = classes["RowParallelLinear"], classes["LinearBase"]
    forward = next(node for node in layer.body if getattr(node, "name", None) == "forward")
    arguments = [argument.arg for argument in forward.args.args]
    assert arguments == ["self", "input_", "skip_all_reduce", "forward_batch", "output_tensor"]
    stored = {
        node.attr
        for kind in (layer, base)
        for node in ast.walk(kind)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    assert set(ATTRIBUTES) <= stored | {"quant_method"}  # annotated before it is set
    context = ast.unparse(trees[list(NAMES).index("sglang.srt.runtime_context")])
    text = ast.unparse(forward)
    assert all(f"'{flag}'" in context for flag in FLAGS) and "should_skip_mlp_all_reduce()" in text
    assert "get_exec().comm.enable_quant_communications" in text and "get_forward().sp_active" in text
