"""The vLLM plug-in: with a stand-in of vLLM's layer on CPU ranks; against the released wheel (slow)."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from overlap_gemm import quantize_rows
from overlap_gemm.backends.decomposed import Decomposed
from overlap_gemm.integrations import torch_symm_mem
from overlap_gemm.integrations import vllm as plugin
from tests.support.vllm import NAMES, registered, stand_in

ATTRIBUTES = (
    "input_is_parallel", "reduce_results", "tp_size", "skip_bias_add", "bias", "return_bias", "input_size",
    "quant_method", "output_size",
)  # fmt: skip
"""Attributes of a row-parallel layer that it reads."""

ATTRIBUTES_OF_COLUMNS = ("gather_output", "tp_size", "skip_bias_add", "bias", "return_bias", "quant_method")


def serves(rank, size):
    calls, overlaps = [], SimpleNamespace(enabled=True)
    many = lambda problem: problem.m >= 1024 and overlaps.enabled  # noqa: E731
    with (
        registered(calls) as (modules, layer_class, _, settings),
        mock.patch.object(Decomposed, "why_slower", lambda self, problem: None if many(problem) else "few"),
    ):
        # What vLLM keys its stored graphs by, and hands to the workers of Ray.
        assert modules["vllm.envs"].environment_variables[plugin.SWITCH]() == "1"
        torch.manual_seed(0)
        whole, bias = torch.randn(6, 8 * size), torch.randn(6)
        weight = whole.chunk(size, 1)[rank].contiguous()
        # As on a device where overlapping many rows pays; on CPUs it does not, and vLLM's pair always runs.
        plugin._overlaps.cache_clear()
        for rows, pays, expected in (
            (3, True, ["all_reduce"]),
            (1024 * size, True, []),
            (1025 * size, False, ["all_reduce"]),
        ):
            overlaps.enabled = pays
            x = torch.randn(rows, 8 * size)
            own = x.chunk(size, 1)[rank].contiguous()
            for skip in (False, True):
                calls.clear()
                out, left = layer_class(weight, bias, skip_bias_add=skip)(own)
                assert calls == expected
                torch.testing.assert_close(out, x @ whole.t() + (0 if skip else bias), rtol=1e-4, atol=1e-4)
                assert (left is None) != skip
            bare = layer_class(weight, None, return_bias=False)(own)
            torch.testing.assert_close(bare, x @ whole.t(), rtol=1e-4, atol=1e-4)
        for option in (
            {"reduce_results": False}, {"input_is_parallel": False}, {"tp_size": 1},
            {"quant_method": object()},
        ):  # fmt: skip
            calls.clear()
            assert layer_class(weight, bias, **option)(own)[0] == "vLLM's"
            assert calls == ["own"]
        for owner, name, asked in (
            (settings.kernel_config, "linear_backend", "flashinfer_cutlass"),
            (settings.compilation_config.pass_config, "enable_sp", True),
        ):
            calls.clear()
            with mock.patch.object(owner, name, asked), mock.patch.object(plugin.logger, "warning") as said:
                layer = layer_class(weight, bias)
                layer_class(weight, bias)
            assert layer(own)[0] == "vLLM's"
            assert calls == ["own"]
            said.assert_called_once_with("vLLM's own forward of RowParallelLinear runs: %s", name)
        assert not torch_symm_mem.installed()
        passes = settings.compilation_config.pass_config
        for enabled in (False, True):  # vLLM's passes fuse products with the collectives between layers
            with mock.patch.multiple(passes, create=True, enable_sp=enabled, fuse_gemm_comms=True):
                layer_class(weight, bias)
                layer_class(weight, bias)
            assert torch_symm_mem.installed() == enabled
        torch_symm_mem.uninstall()
        opcheck(own, weight, bias)


def gathers(rank, size):
    """A linear's and a head's columns are gathered; all else of column-parallel layers is vLLM's own."""
    calls, overlaps = [], SimpleNamespace(enabled=True)
    why = lambda self, problem: None if overlaps.enabled else "few"  # noqa: E731
    with registered(calls) as (modules, _, _, settings), mock.patch.object(Decomposed, "why_slower", why):
        torch.manual_seed(0)
        full, bias, x = torch.randn(6 * size, 8), torch.randn(6 * size), torch.randn(5, 8)
        weight, own_bias = (each.chunk(size)[rank].clone() for each in (full, bias))
        linear = modules["vllm.model_executor.layers.linear"]
        logits = modules["vllm.model_executor.layers.logits_processor"].LogitsProcessor
        method = modules["vllm.model_executor.layers.vocab_parallel_embedding"].UnquantizedEmbeddingMethod()
        head = SimpleNamespace(weight=weight, quant_method=method, tp_size=size)
        expected = x @ full.t()
        for pays, called in ((True, []), (False, ["all_gather"])):
            overlaps.enabled = pays
            plugin._overlaps.cache_clear()
            for skip in (False, True):
                calls.clear()
                out, left = linear.ColumnParallelLinear(weight, own_bias, skip_bias_add=skip)(x)
                torch.testing.assert_close(out, expected + (0 if skip else bias))
                assert calls == called and (left is None) != skip
            for added in (None, own_bias):
                calls.clear()
                out = logits(6 * size - 1)._get_logits(x, head, added)
                exact = expected if added is None else expected + bias
                torch.testing.assert_close(out, exact[:, :-1])
                assert calls == called
        bare = linear.ColumnParallelLinear(weight, own_bias, return_bias=False)(x)
        torch.testing.assert_close(bare, expected + bias)
        for option in ({"gather_output": False}, {"tp_size": 1}, {"quant_method": object()}):
            assert linear.ColumnParallelLinear(weight, own_bias, **option)(x)[0] == "vLLM's"
        for option in ({"use_all_gather": False}, {"head_dtype": torch.float64}):
            assert logits(6 * size, **option)._get_logits(x, head, None) == "vLLM's"
        assert logits(6 * size)._get_logits(x, head, None, True) == "vLLM's"
        packed = {"weight": torch.empty(0)}  # as vLLM leaves it on some CPUs
        for change in ({"tp_size": 1}, {"quant_method": object()}, packed):
            assert logits(6)._get_logits(x, SimpleNamespace(**{**vars(head), **change}), None) == "vLLM's"
        with mock.patch.object(settings.kernel_config, "linear_backend", "flashinfer_cutlass"):
            assert linear.ColumnParallelLinear(weight, own_bias)(x)[0] == "vLLM's"
            assert logits(6 * size)._get_logits(x, head, None) == "vLLM's"
        torch.library.opcheck(
            torch.ops.overlap_gemm.vllm_column_gathered.default, (x, weight, own_bias, size),
            test_utils=("test_schema", "test_faketensor"),
        )  # fmt: skip
        with mock.patch.object(modules["vllm.envs"], "VLLM_BATCH_INVARIANT", True):
            x = torch.randn(130, 8)
            rows_alone_equal(linear.ColumnParallelLinear(weight, own_bias), x)


def test_columns_are_gathered(ranks):
    ranks(2).run(gathers)


def rows_alone_equal(layer, x):
    """Compares the results of rows among all of x, and alone, bit for bit; returns all results."""
    out, _ = layer(x)
    for rows in (slice(0, 1), slice(3, 6), slice(40, 130)):
        assert torch.equal(layer(x[rows])[0], out[rows])
    return out


def keeps_the_batch_invariant_mode(rank, size):
    """Rows have the bits of a call of their own where vLLM's mode is on; the stand-in's pair has not."""
    calls = []
    with registered(calls) as (modules, layer_class, *_):
        torch.manual_seed(0)
        full, bias, x = torch.randn(48, 256 * size), torch.randn(48), torch.randn(130, 256 * size)
        weight, local = (each.chunk(size, 1)[rank].contiguous() for each in (full, x))
        with pytest.raises(AssertionError):
            rows_alone_equal(layer_class(weight, bias), local)
        calls.clear()
        kernel = modules["vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel"]
        values, scale = quantize_rows(weight)
        options = {"weight_scale": scale, "input_scale": None}
        with (
            mock.patch.object(modules["vllm.envs"], "VLLM_BATCH_INVARIANT", True),
            mock.patch.object(plugin.logger, "warning") as warning,
        ):
            out = rows_alone_equal(layer_class(weight, bias), local)
            torch.testing.assert_close(out, x @ full.t() + bias, rtol=1e-4, atol=1e-3)
            for by_token in (True, False):
                method = SimpleNamespace(any_name=kernel.FP8ScaledMMLinearKernel(by_token))
                layer = layer_class(values, bias, quant_method=method, **options)
                layer.weight = nn.Parameter(layer.weight.t(), requires_grad=False)
                if by_token:
                    out = rows_alone_equal(layer, local)
                    error = (out - (x @ full.t() + bias)).norm() / out.norm()
                    assert 0 < float(error) < 0.05 and not calls and not warning.called
            assert layer(local)[0] == "vLLM's" and "depends on all tokens" in warning.call_args.args[1]
        with mock.patch.object(plugin, "promises_of", lambda: SimpleNamespace(invariant="ranks")):
            calls.clear()
            rows_alone_equal(layer_class(weight, bias), local)
            assert not calls, "a promise of the environment is kept, too"


def test_keeps_the_batch_invariant_mode(ranks):
    ranks(2).run(keeps_the_batch_invariant_mode)


def opcheck(own, weight, bias):
    torch.library.opcheck(
        torch.ops.overlap_gemm.vllm_row_parallel.default,
        (own, weight, bias, own.shape[1] * dist.get_world_size()),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_serves(ranks):
    ranks(2).run(serves)


def serves_8_bits(rank, size, dynamic):
    calls, overlaps = [], SimpleNamespace(enabled=True)
    many = lambda problem: problem.m >= 1024 and overlaps.enabled  # noqa: E731
    with (
        registered(calls) as (modules, layer_class, *_),
        mock.patch.object(Decomposed, "why_slower", lambda self, problem: None if many(problem) else "few"),
    ):
        kernels = modules["vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel"]
        torch.manual_seed(0)
        whole, bias = torch.randn(6, 16 * size), torch.randn(6)
        values, scale = quantize_rows(whole.chunk(size, 1)[rank])
        for where in ("quant_method", "scheme"):
            owner = SimpleNamespace(any_name=kernels.FP8ScaledMMLinearKernel())
            scales = {"weight_scale": scale, "input_scale": None if dynamic else torch.tensor(0.02)}
            options = {"quant_method": SimpleNamespace(), where: owner, **scales}

            def made(options=options, **more):
                layer = layer_class(values, bias, **{**options, **more})
                layer.weight = nn.Parameter(layer.weight.t(), requires_grad=False)  # after it is loaded
                return layer

            for rows, pays, expected in (
                (3, True, ["product", "all_reduce"]),
                (1024 * size, True, []),
                (1025 * size, False, ["product", "all_reduce"]),
            ):
                overlaps.enabled = pays
                plugin._overlaps.cache_clear()
                x = torch.randn(rows, 16 * size)
                own = x.chunk(size, 1)[rank].contiguous()
                for skip in (False, True):
                    calls.clear()
                    layer = made(skip_bias_add=skip)
                    out, left = layer(own.view(1, rows, 16))
                    assert calls == expected and out.shape == (1, rows, 6) and (left is None) != skip
                    exact = x @ whole.t() + (0 if skip else bias)
                    error = (out[0] - exact).norm() / exact.norm()
                    assert 0 < float(error) < 0.05
            for option, given in (
                ({"reduce_results": False}, own), ({"output_size": 5}, own), ({}, SimpleNamespace(data=own)),
            ):  # fmt: skip
                calls.clear()
                assert made(**option)(given)[0] == "vLLM's" and calls == ["own"]
            own_way = type("Own", (kernels.FP8ScaledMMLinearKernel,), {"apply_weights": lambda *_: None})
            assert made(**{where: SimpleNamespace(any_name=own_way())})(own)[0] == "vLLM's"
            layer = made()
            layer.weight = nn.Parameter(values.contiguous(), requires_grad=False)  # as vLLM packs for another
            assert layer(own)[0] == "vLLM's"
        rows, bound = kernels.FP8ScaledMMLinearKernel().quant_fp8(own, None, None)
        (name,) = plugin._kernels
        given = (rows, values.t(), bound, scale, bias, torch.float32, 16 * size, name)
        torch.library.opcheck(
            torch.ops.overlap_gemm.vllm_scaled_row_parallel.default, given,
            test_utils=("test_faketensor",),  # torch's other checks know no 8 bits
        )  # fmt: skip


@pytest.mark.parametrize("dynamic", [True, False])
def test_serves_8_bits(ranks, dynamic):
    ranks(2).run(serves_8_bits, dynamic)


def test_is_heard():
    """vLLM shows its own loggers' messages only."""
    assert plugin.logger.name.startswith("vllm.")


def test_another_plug_in_has_the_layer():
    modules, layer_class, registry, _ = stand_in([])
    registry["RowParallelLinear"] = type("Another", (layer_class,), {})
    plugin._register.cache_clear()
    with mock.patch.dict(sys.modules, modules), mock.patch.dict(os.environ, {plugin.SWITCH: "1"}):
        with pytest.raises(RuntimeError, match="another plug-in has registered.*Another"):
            plugin.register()
        assert plugin.SWITCH not in modules["vllm.envs"].environment_variables


def test_an_old_vllm_is_refused():
    modules, *_ = stand_in([])
    del modules["vllm.model_executor.custom_op"].maybe_get_oot_by_class
    plugin._register.cache_clear()
    with (
        mock.patch.dict(sys.modules, modules),
        mock.patch.dict(os.environ, {plugin.SWITCH: "1"}),
        pytest.raises(RuntimeError, match="needs vLLM 0.24 or newer"),
    ):
        plugin.register()


def test_entry_point():
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    name, value = re.search(r'entry-points\."vllm\.general_plugins"\]\n(\w+) = "(.*)"', pyproject).groups()
    point = importlib.metadata.EntryPoint(name, value, "vllm.general_plugins")
    assert point.load() is plugin.register


@pytest.mark.slow
def test_names_of_the_released_wheel(tmp_path):
    """OVERLAP_GEMM_VLLM_WHEEL names a wheel that is here already; it is a third of a gigabyte."""
    wheel = os.environ.get("OVERLAP_GEMM_VLLM_WHEEL")
    if wheel is None:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "-q",
            "-d",
            str(tmp_path),
            "vllm>=0.33",
        ]
        subprocess.run(command, check=True)
        (wheel,) = tmp_path.glob("vllm-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        trees = {
            name: ast.parse(archive.read(name))
            for name in (
                "vllm/distributed/communication_op.py", "vllm/distributed/parallel_state.py",
                "vllm/model_executor/layers/linear.py", "vllm/model_executor/custom_op.py",
                "vllm/model_executor/layers/logits_processor.py",
                "vllm/model_executor/layers/vocab_parallel_embedding.py",
                "vllm/model_executor/kernels/linear/scaled_mm/ScaledMMLinearKernel.py",
                "vllm/model_executor/layers/quantization/input_quant_fp8.py",
                "vllm/plugins/__init__.py", "vllm/envs.py", "vllm/config/vllm.py", "vllm/config/kernel.py",
            )
        }  # fmt: skip
    defined = {
        node.name: node
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }
    annotated = {
        node.target.id: node
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for names in NAMES.values():
        assert set(names) <= defined.keys() | annotated.keys()
    assert "linear_backend" in annotated
    kernel = defined["FP8ScaledMMLinearKernel"]
    methods = {node.name: node for node in kernel.body if isinstance(node, ast.FunctionDef)}
    assert "apply_weights" in methods
    product = [argument.arg for argument in methods["apply_scaled_mm"].args.kwonlyargs]
    assert product == ["A", "B", "out_dtype", "As", "Bs", "bias", "output_shape"]
    assert "_get_layer_params" in methods and "quant_fp8" in ast.dump(methods["__init__"])
    quantize = ast.dump(defined["QuantFP8"])
    assert "attr='static', ctx=Store()" in quantize
    assert "attr='use_per_token_if_dynamic', ctx=Store()" in quantize
    attributes = {"RowParallelLinear": ATTRIBUTES, "ColumnParallelLinear": ATTRIBUTES_OF_COLUMNS}
    for name, read in attributes.items():
        layer = defined[name]
        forward = next(node for node in layer.body if getattr(node, "name", None) == "forward")
        assert [argument.arg for argument in forward.args.args] == ["self", "input_"]
        stored = {
            node.attr
            for kind in (layer, defined["LinearBase"])
            for node in ast.walk(kind)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        }
        declared = {"quant_method"}  # annotated before it is set
        assert set(read) <= stored | declared
    methods = {node.name: node for node in defined["LogitsProcessor"].body if hasattr(node, "args")}
    arguments = [argument.arg for argument in methods["_get_logits"].args.args]
    assert arguments == ["self", "hidden_states", "lm_head", "embedding_bias", "skip_gather"]
    assert "_get_logits" in ast.dump(methods["forward"])
    for name in ("use_all_gather", "head_dtype", "org_vocab_size"):
        assert f"attr='{name}', ctx=Store()" in ast.dump(methods["__init__"])
    assert "register_oot" in {node.name for node in defined["PluggableLayer"].body if hasattr(node, "name")}
    assert "device_group" in ast.dump(defined["GroupCoordinator"])
    assert "vllm.general_plugins" in ast.dump(trees["vllm/plugins/__init__.py"])
