"""A GPT of megatron-core with our linears: loss and gradients of Megatron's own."""

import ast
import copy
import functools
import inspect
import itertools
import re
import subprocess
import sys
import warnings
import zipfile
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import overlap_gemm

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that Apex and Transformer Engine are not here
    from megatron.core import parallel_state
    from megatron.core.extensions import transformer_engine_spec_provider
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import layers as megatron_layers
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

    from overlap_gemm.integrations import megatron

VOCABULARY = 64

NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Names of parameters of Megatron's norms, and of Transformer Engine's in the linears that follow."""


def spec_of_transformer_engine():
    """Returns Megatron's specification for Transformer Engine, with empty classes of the names that it uses.

    Only attention is Megatron's own: Transformer Engine's needs a GPU.
    """
    classes = {
        name: type(name, (), {"__module__": megatron.TRANSFORMER_ENGINE})
        for name in megatron.OURS_FOR_TRANSFORMER_ENGINE
    }
    classes |= {"TEDotProductAttention": DotProductAttention, "is_te_min_version": lambda _: True}
    provider = transformer_engine_spec_provider.TESpecProvider
    with (
        mock.patch.multiple(transformer_engine_spec_provider, **classes),
        mock.patch.object(gpt_layer_specs, "TESpecProvider", provider, create=True),
    ):
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()


def model(size, spec, sequence_parallel, bias):
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=8, num_query_groups=4, ffn_hidden_size=48,
        tensor_model_parallel_size=size, sequence_parallel=sequence_parallel, use_cpu_initialization=True,
        params_dtype=torch.float32, hidden_dropout=0.0, attention_dropout=0.0, add_bias_linear=bias,
        gradient_accumulation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        persist_layer_norm=False,
    )  # fmt: skip
    torch.manual_seed(3)

    # Megatron has no norm for sequence parallelism without Apex or Transformer Engine; torch's does the same.
    def norm(_, config, hidden_size, **options):
        return nn.LayerNorm(hidden_size)

    with mock.patch.object(WrappedTorchNorm, "__new__", norm):
        return GPTModel(
            config, spec, vocab_size=VOCABULARY, max_sequence_length=16, position_embedding_type="rope"
        )


@contextmanager
def on_a_cpu():
    """Megatron asks CUDA for the device of its buffers, and for the state of the generator of its dropout."""
    with (
        mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
        mock.patch.object(CudaRNGStatesTracker, "fork", lambda *_: nullcontext()),
    ):
        yield


def equals_megatrons_own(rank, size, sequence_parallel, bias, make_spec=get_gpt_layer_local_spec):
    with on_a_cpu():
        compare(size, sequence_parallel, bias, make_spec)


def renamed(name):
    """Returns the name that Transformer Engine's specification gives a parameter of the local one."""
    return functools.reduce(lambda text, norm: text.replace(norm, NORMS[norm]), NORMS, name)


def compare(size, sequence_parallel, bias, make_spec):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    is_local = make_spec is get_gpt_layer_local_spec
    try:
        spec = make_spec()
        before = copy.deepcopy(spec)
        ours = model(size, megatron.with_overlap(spec), sequence_parallel, bias)
        assert repr(spec) == repr(before)  # a copied partial equals none
        theirs = model(size, get_gpt_layer_local_spec(), sequence_parallel, bias)
        names = {name: name if is_local else renamed(name) for name in theirs.state_dict()}
        for parameter in (p for name, p in ours.named_parameters() if "norm" in name):
            nn.init.normal_(parameter)
        weights = ours.state_dict()
        assert weights.keys() == set(names.values())
        theirs.load_state_dict({name: weights[other] for name, other in names.items()})
        kinds = {type(module) for module in ours.modules()}
        columns = megatron.ColumnParallelLinear if is_local else megatron.LayerNormColumnParallelLinear
        assert {columns, megatron.RowParallelLinear} <= kinds
        assert not megatron.OURS.keys() & {type(module) for module in ours.decoder.modules()}
        torch.manual_seed(1)
        ids = torch.randint(VOCABULARY, (2, 8))
        positions = torch.arange(8).expand(2, 8)
        mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).triu(1)
        results = []
        for each in (theirs, ours):
            loss = each(ids, positions, mask, labels=ids.roll(-1, 1))
            loss.mean().backward()
            results.append((loss, {name: parameter.grad for name, parameter in each.named_parameters()}))
        torch.testing.assert_close(results[1][0], results[0][0])
        for name, gradient in results[0][1].items():
            torch.testing.assert_close(
                results[1][1][names[name]], gradient, msg=lambda text, name=name: f"{name}: {text}"
            )
    finally:
        parallel_state.destroy_model_parallel()
    dist.barrier()


@pytest.mark.parametrize(
    ("world", "sequence_parallel", "bias"),
    [(2, True, False), (2, False, True), (4, True, True)],
)
def test_equals_megatrons_own(ranks, world, sequence_parallel, bias):
    ranks(world).run(equals_megatrons_own, sequence_parallel, bias)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_transformer_engines_specification_equals_the_local_one(ranks, sequence_parallel):
    ranks(2).run(equals_megatrons_own, sequence_parallel, True, spec_of_transformer_engine)


def layer_norm_is_transformer_engines(rank, size):
    """Compares norms with their formulas; unsupported options are errors."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    try:
        torch.manual_seed(0)
        x = torch.randn(4, 2, 8, dtype=torch.float64)
        for normalization, shift in itertools.product(("LayerNorm", "RMSNorm"), (0, 1)):
            config = TransformerConfig(
                num_layers=1, hidden_size=8, num_attention_heads=2, tensor_model_parallel_size=size,
                sequence_parallel=True, use_cpu_initialization=True, params_dtype=torch.float64,
                normalization=normalization, layernorm_zero_centered_gamma=bool(shift),
                gradient_accumulation_fusion=False,
            )  # fmt: skip
            options = {
                "config": config,
                "init_method": nn.init.normal_,
                "gather_output": False,
                "bias": False,
            }
            options |= {"skip_bias_add": False, "is_expert": False, "tp_comm_buffer_name": "qkv"}
            layer = megatron.LayerNormColumnParallelLinear(8, 12, **options)
            weight, bias = layer.layer_norm_weight, layer.layer_norm_bias
            assert (weight == 1 - shift).all() and (bias is None) == (normalization == "RMSNorm")
            assert weight.sequence_parallel and weight.allreduce
            for parameter in layer.parameters():
                nn.init.normal_(parameter)
            rows = x - x.mean(-1, keepdim=True) if normalization == "LayerNorm" else x
            rows = rows * (rows.square().mean(-1, keepdim=True) + config.layernorm_epsilon).rsqrt()
            rows = rows * (weight + shift) + (0 if bias is None else bias)
            out, left = layer(x.chunk(size)[dist.get_rank()].contiguous())
            assert left is None
            torch.testing.assert_close(out, rows @ layer.weight.t())
        for options in ({"fp8": "e4m3"}, {"fp4": "e2m1"}, {"delay_wgrad_compute": True}):
            changed = SimpleNamespace(**{**vars(config), **options})
            with pytest.raises(ValueError, match=f"must have no {next(iter(options))}="):
                megatron.RowParallelLinear(8, 8, config=changed, init_method=None)
    finally:
        parallel_state.destroy_model_parallel()


def test_norm_and_linear_are_transformer_engines(ranks):
    ranks(2).run(layer_norm_is_transformer_engines)


def test_arguments_are_those_of_megatrons_classes_for_transformer_engine():
    """Reads Megatron's source, which builds these classes only where Transformer Engine is."""
    source = Path(megatron_layers.__file__).parents[1] / "extensions" / "transformer_engine.py"
    classes = {node.name: node for node in ast.parse(source.read_text()).body if hasattr(node, "bases")}
    for name, ours in megatron.OURS_FOR_TRANSFORMER_ENGINE.items():
        (init,) = (node for node in classes[name].body if getattr(node, "name", None) == "__init__")
        base = next(kind for kind in ours.__mro__ if kind.__module__ == megatron_layers.__name__)
        accepted = inspect.signature(base.__init__).parameters
        arguments = [argument.arg for argument in (*init.args.args, *init.args.kwonlyargs)]
        assert {"self", "input_size", "output_size", "config"} < set(arguments) <= accepted.keys()


@pytest.mark.slow
def test_parameters_are_named_as_transformer_engines(tmp_path):
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(tmp_path)]
    subprocess.run([*command, "transformer-engine>=2.20"], check=True, timeout=240)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        text = files.read("transformer_engine/pytorch/module/layernorm_linear.py").decode()
    for name in ("layer_norm_weight", "layer_norm_bias"):
        assert re.search(rf"self\.register_parameter\(\s*[\"']{name}[\"']|self\.{name} = ", text), name
    assert "sequence_parallel" in text and "zero_centered_gamma" in text


def test_specifications_that_are_partials():
    """As Megatron 0.19 has an MLP's."""
    spec = get_gpt_layer_local_spec()
    linears = {"linear_fc1": megatron.megatron_layers.ColumnParallelLinear, "linear_fc2": nn.Linear}
    spec.submodules.mlp = functools.partial(SimpleNamespace, "mlp", submodules=MLPSubmodules(**linears))
    spec.submodules.input_layernorm = functools.partial(nn.LayerNorm, eps=1e-6)
    overlapped = megatron.with_overlap(spec).submodules
    assert overlapped.input_layernorm.func is nn.LayerNorm
    mlp = overlapped.mlp
    assert (mlp.func, mlp.args) == (SimpleNamespace, ("mlp",))
    assert mlp.keywords["submodules"].linear_fc1 is megatron.ColumnParallelLinear
    assert mlp.keywords["submodules"].linear_fc2 is nn.Linear
    assert spec.submodules.mlp.keywords["submodules"].linear_fc1 is linears["linear_fc1"]


def layers_equal_megatrons_own(rank, size):
    """What a GPT does not ask of the layers: biases that they add themselves, gathered and whole tensors."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    try:
        for sequence_parallel in (True, False):
            config = ModelParallelConfig(
                tensor_model_parallel_size=size,
                sequence_parallel=sequence_parallel,
                use_cpu_initialization=True,
            )
            common = {"config": config, "init_method": nn.init.normal_, "bias": True, "skip_bias_add": False}
            kinds = [
                (megatron.ColumnParallelLinear, {}),
                (megatron.RowParallelLinear, {"input_is_parallel": True}),
            ]
            if not sequence_parallel:
                kinds += [
                    (megatron.ColumnParallelLinear, {"gather_output": True}),
                    (megatron.ColumnParallelLinear, {"disable_grad_reduce": True}),  # Megatron's own forward
                    (megatron.RowParallelLinear, {"input_is_parallel": False}),
                    (megatron.ColumnParallelLinear, {}, {"runtime_gather_output": True}),
                    (
                        megatron.ColumnParallelLinear,
                        {"gather_output": True},
                        {"runtime_gather_output": False},
                    ),
                ]
            for kind, options, *asked in kinds:
                torch.manual_seed(2)
                ours = kind(8, 12, **common, **options)
                theirs = kind.__base__(8, 12, **common, **options)
                theirs.load_state_dict(ours.state_dict())
                nn.init.normal_(ours.bias)
                theirs.bias.data.copy_(ours.bias.data)
                width = 8 // size if options.get("input_is_parallel") else 8
                torch.manual_seed(rank if options.get("input_is_parallel") or sequence_parallel else 5)
                x = torch.randn(4, 2, width)
                results = []
                for layer in (theirs, ours):
                    own = x.clone().requires_grad_()
                    out, left = layer(own, **(asked[0] if asked else {}))
                    assert left is None
                    out.square().sum().backward()
                    results.append((out, own.grad, layer.weight.grad, layer.bias.grad))
                for found, expected in zip(*reversed(results), strict=True):
                    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    finally:
        parallel_state.destroy_model_parallel()


def test_layers_equal_megatrons_own(ranks):
    ranks(2).run(layers_on_a_cpu)


def layers_on_a_cpu(rank, size):
    with (
        on_a_cpu(),
        mock.patch.object(megatron.logger, "warning") as said,
        mock.patch.object(megatron, "gemm_all_reduce", wraps=megatron.gemm_all_reduce) as sums,
    ):
        megatron._log_fallback.cache_clear()
        layers_equal_megatrons_own(rank, size)
    assert sums.call_args.kwargs["k"] == 8  # of all ranks: "auto" chooses by it
    said.assert_called_once_with(
        "Megatron's own forward of %s runs: %s", "ColumnParallelLinear", "disable_grad_reduce"
    )


PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "megatron.md"


def runs(rank, size, text):
    seed = "megatron.core.tensor_parallel.random.model_parallel_cuda_manual_seed"
    try:
        with on_a_cpu(), mock.patch(seed):
            names: dict = {}
            exec(compile(text, PAGE.name, "exec"), names)
        kinds = {type(module) for module in names["model"].decoder.modules()}
        assert {megatron.ColumnParallelLinear, megatron.RowParallelLinear} <= kinds
    finally:
        parallel_state.destroy_model_parallel()
        overlap_gemm.finalize()


def test_the_pages_snippet(ranks):
    (text,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    ranks(2).run(runs, text)
