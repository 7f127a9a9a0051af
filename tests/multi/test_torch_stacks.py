"""Parts of stacks, from wheels: torchtitan's, SGLang's loader, verl's transfer of weights, axolotl's LoRA.

The wheels are fetched with pip, or named by OVERLAP_GEMM_TORCHTITAN_WHEEL (or SGLANG, ...). The Trainer runs
where torchtitan is installed: `python tools/versions.py try torchtitan`.
"""

import ast
import asyncio
import contextlib
import importlib.util
import logging
import os
import queue
import subprocess
import sys
import threading
import types
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from overlap_gemm.integrations import torch_symm_mem
from overlap_gemm.parallel import full_state_dict, full_tensors, parallelize
from tests.support.models import tiny
from tests.support.stacks import extracted
from tests.support.trained import trained


def mm_with_out_dtype():
    """Patches `torch.mm`, whose `out_dtype=` is for GPUs."""
    product = torch.mm

    def mm(a, b, out_dtype=None, **options):
        return product(a.to(out_dtype or a.dtype), b.to(out_dtype or b.dtype), **options)

    return mock.patch.object(torch, "mm", mm)


def trains_on_our_ops(rank, size, path):
    types_of_torchtitan = types.SimpleNamespace(register_autograd_function=lambda function: function)
    with mock.patch.dict(sys.modules, {"spmd_types": types_of_torchtitan}):
        spec = importlib.util.spec_from_file_location("linear", Path(path))
        linear = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(linear)
    torch.manual_seed(0)
    group = dist.group.WORLD
    x, ups, down = torch.randn(8 * size, 12), torch.randn(2, 6 * size, 12), torch.randn(10, 6 * size)

    def part(whole, dim):
        return whole.chunk(size, dim)[rank].clone().requires_grad_()

    torch_symm_mem.install(backend="decomposed")
    try:
        own_x, own_down = part(x, 0), part(down, 1)
        own_ups = [part(up, 0) for up in ups]
        one = linear.AllGatherLinear.apply(own_x, own_ups[0], None, group, group.group_name)
        two = linear.AllGatherLinearMulti.apply(own_x, *own_ups, group, group.group_name)
        inner = one.relu() + two[0] * two[1]
        out = linear.LinearReduceScatter.apply(inner, own_down, None, group, group.group_name)
        with mm_with_out_dtype():
            out.square().sum().backward()
    finally:
        torch_symm_mem.uninstall()
    x, ups, down = (each.requires_grad_() for each in (x, ups, down))
    first, second = x @ ups[0].t(), x @ ups[1].t()
    expected = (first.relu() + first * second) @ down.t()
    expected.square().sum().backward()
    close = {"rtol": 1e-3, "atol": 1e-3}
    torch.testing.assert_close(out, expected.chunk(size)[rank], **close)
    torch.testing.assert_close(own_x.grad, x.grad.chunk(size)[rank], **close)
    torch.testing.assert_close(own_down.grad, down.grad.chunk(size, 1)[rank], **close)
    for own, whole in zip(own_ups, ups.grad, strict=True):
        torch.testing.assert_close(own.grad, whole.chunk(size)[rank], **close)


@pytest.mark.slow
def test_torchtitans_dist_gemm(ranks, tmp_path):
    (layers,) = extracted("torchtitan", tmp_path, "torchtitan/distributed/linear.py")
    ranks(2).run(trains_on_our_ops, layers)


@pytest.mark.slow
def test_sglangs_workers_load_the_plug_in(tmp_path):
    """Each worker calls `load_plugins()` first; it raises nothing, so a failure would be silent."""
    modules = ("environ.py", "plugins/__init__.py", "plugins/hook_registry.py", "managers/scheduler.py")
    *_, scheduler = extracted("sglang", tmp_path, *(f"sglang/srt/{name}" for name in modules))
    linear = tmp_path / "sglang/srt/layers/linear.py"
    linear.parent.mkdir()
    linear.write_text("class RowParallelLinear:\n    def forward(self): pass\n")
    (worker,) = (
        node
        for node in ast.parse(Path(scheduler).read_text()).body
        if getattr(node, "name", None) == "run_scheduler_process"
    )
    lines = {ast.unparse(node.func): node.lineno for node in ast.walk(worker) if isinstance(node, ast.Call)}
    assert lines["load_plugins"] < lines["Scheduler"]
    code = (
        "from sglang.srt.plugins import load_plugins; load_plugins(); load_plugins()\n"
        "from overlap_gemm.integrations.torch_symm_mem import installed; print(installed())\n"
        "from sglang.srt.layers.linear import RowParallelLinear\n"
        "print(hasattr(RowParallelLinear.forward, '__wrapped__'))"
    )
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    for switch, plugins, expected in (("1", "", "True"), ("0", "", "False"), ("1", "other", "False")):
        variables = {"OVERLAP_GEMM_SGLANG": switch, "SGLANG_PLUGINS": plugins, "PYTHONPATH": paths}
        process = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            check=True,
        )
        assert process.stdout.split() == [expected, expected], process.stderr


def torchtitan_on_cpus():
    """Patches what torchtitan's Trainer requests of a GPU: device, memory, time-outs, `mm(out_dtype=)`."""
    with mock.patch("torch._utils._get_available_device_type", lambda: "cpu"):
        from torchtitan.components import metrics
        from torchtitan.distributed import utils

    memory = types.SimpleNamespace(
        device_name="cpu",
        reset_peak_stats=lambda: None,
        get_peak_stats=lambda: types.SimpleNamespace(max_reserved_gib=0, max_reserved_pct=0),
    )
    patches = contextlib.ExitStack()
    patches.enter_context(mock.patch.object(metrics, "build_device_memory_monitor", lambda: memory))
    patches.enter_context(mock.patch.object(utils, "set_pg_timeouts", lambda **_: None))
    patches.enter_context(mm_with_out_dtype())
    return patches


def config_of_torchtitan(size, folder):
    """Returns torchtitan's small Llama with `dist_gemm`, random tokens, and attention that runs on CPUs."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import config_registry, model_registry

    class Tokens(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config, *, seq_len, local_batch_size, **_):
            self.shape = (local_batch_size, seq_len + 1)

        def __iter__(self):
            generator = torch.Generator().manual_seed(1)
            while True:
                tokens = torch.randint(2048, self.shape, generator=generator)
                yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

        state_dict = load_state_dict = None

    class NoTokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, *_, **__):
            pass

        encode = decode = get_vocab_size = None

    config = config_registry.llama3_debugmodel()
    config.model_spec = model_registry("debugmodel", attn_backend="varlen", tp_gemm_backend="dist_gemm")
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.training = TrainingConfig(
        local_batch_size=2, seq_len=16, steps=3, disable_cuda_graphs=True, mixed_precision_param="float32"
    )
    config.parallelism = ParallelismConfig(tensor_parallel_degree=size, spmd_backend="spmd_types")
    config.dataloader, config.tokenizer = Tokens.Config(), NoTokenizer.Config()
    config.checkpoint.enable = config.validator.enable = False
    config.activation_checkpoint, config.dump_folder = None, folder
    config.optimizer.implementation = "foreach"
    return config


def trains_in_torchtitan(rank, size, folder):
    """Trains three steps in torchtitan's Trainer. Returns losses, norms of gradients, calls of our ops."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "", "MASTER_PORT": 0}
    variables = mock.patch.dict(os.environ, {name: str(value) for name, value in names.items()})
    with variables, torchtitan_on_cpus(), torch.autograd.set_multithreading_enabled(False):
        from torchtitan.components.metrics import MetricsProcessor
        from torchtitan.trainer import Trainer

        torch_symm_mem.install(backend="decomposed")
        gather, scatter = torch_symm_mem.all_gather_gemm, torch_symm_mem.gemm_reduce_scatter
        with (
            mock.patch.object(torch_symm_mem, "all_gather_gemm", side_effect=gather) as gathers,
            mock.patch.object(torch_symm_mem, "gemm_reduce_scatter", side_effect=scatter) as scatters,
            mock.patch.object(MetricsProcessor, "log") as log,
        ):
            trainer = Trainer(config_of_torchtitan(size, folder))
            for number, parameter in enumerate(trainer.model_parts[0].parameters()):
                generator = torch.Generator().manual_seed(number)  # torchtitan's draws depend on size
                full = 0.02 * torch.randn(parameter.shape, generator=generator) + (parameter.ndim == 1)
                mesh, placements = parameter.device_mesh, parameter.placements
                parameter.data.copy_(distribute_tensor(full, mesh, placements, src_data_rank=None))
            trainer.train()
        torch_symm_mem.uninstall()
    losses = [(step, loss, norm) for step, loss, _, norm in (call.args for call in log.call_args_list)]
    return losses, gathers.call_count, scatters.call_count


@pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None,
    reason="torchtitan is not installed; 0.3.0 runs with torch 2.15, not with 2.13",
)
def test_torchtitans_trainer_has_the_losses_of_one_rank(ranks, tmp_path):
    ((expected, *_),) = ranks(1).run(trains_in_torchtitan, str(tmp_path))
    assert [step for step, *_ in expected] == [1, 2, 3] and len({loss for _, loss, _ in expected}) == 3
    for results, gathers, scatters in ranks(2).run(trains_in_torchtitan, str(tmp_path)):
        torch.testing.assert_close(torch.tensor(results), torch.tensor(expected), rtol=1e-4, atol=0)
        # Two layers, each attention and MLP: forward, backward's input and weight.
        assert (gathers, scatters) == (3 * 2 * 6, 3 * 2 * 4)


class Socket:
    """Stands in for a pair of ZMQ's sockets between two threads."""

    def __init__(self, sent, received):
        self.send = self.send_pyobj = sent.put
        self.recv = self.recv_pyobj = lambda: received.get(timeout=30)
        self.bind = self.connect = lambda _: None
        self.close = lambda: None


def sends_by_verl(rank, size, path):
    """Sends the weights of a sharded model by verl's buckets, as its trainers do, to the receiver in vLLM."""

    async def each(weights):
        for weight in weights:
            yield weight

    there, back = queue.Queue(), queue.Queue()
    sockets = {"req": Socket(there, back), "rep": Socket(back, there)}
    context = types.SimpleNamespace(instance=lambda: types.SimpleNamespace(socket=sockets.get))
    device = mock.MagicMock(is_support_ipc=lambda: False)
    modules = {
        "zmq": types.SimpleNamespace(Context=context, REQ="req", REP="rep"),
        "verl.utils.device": device,
        "verl.workers.rollout.utils": types.SimpleNamespace(ensure_async_iterator=each),
    }
    plain, sharded = (tiny("phi3", size, dtype=torch.bfloat16) for _ in range(2))
    expected = plain.state_dict()
    parallelize(sharded, init_device_mesh("cpu", (size,)))
    arrived, ends = {}, []

    def load(weights, is_last):
        ends.append(is_last)
        arrived.update((name, weight.clone()) for name, weight in weights)

    with mock.patch.dict(sys.modules, modules):
        spec = importlib.util.spec_from_file_location("transfer", Path(path))
        transfer = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(transfer)
        sender = transfer.BucketedWeightSender("one", 1, use_shm=True)
        sender.bucket_size = 1 << 13  # several for a small model
        receiver = transfer.BucketedWeightReceiver("other", torch.device("cpu"), use_shm=True)
        thread = threading.Thread(target=receiver.receive_weights, args=(load,))
        thread.start()
        asyncio.run(sender.async_send_weights(full_tensors(sharded)))
        thread.join(30)
    assert ends == [False] * (len(ends) - 1) + [True] and len(ends) > 2
    assert list(arrived) == list(expected)
    assert all(torch.equal(arrived[name], value) for name, value in expected.items())


@pytest.mark.slow
def test_weights_pass_verls_buckets_to_a_rollout(ranks, tmp_path):
    (transfer,) = extracted("verl", tmp_path, "verl/workers/rollout/vllm_rollout/bucketed_weight_transfer.py")
    ranks(2).run(sends_by_verl, transfer)


class Settings(dict):
    """Settings of axolotl: a missing one is None."""

    __getattr__ = dict.get


def adapts_by_axolotl(rank, size, path, folder):
    """Calls the plug-in, axolotl's own function that adds LoRA, and the Trainer, in axolotl's order."""
    from transformers import Trainer

    manager = types.SimpleNamespace(get_lora_config_kwargs=lambda _: {})
    linears = types.SimpleNamespace(Linear4bit=bytes, Linear8bitLt=bytes)
    contents = {
        "bitsandbytes": {"nn": linears},
        "bitsandbytes.nn": {"Params4bit": bytes},
        "axolotl.core.trainers": {"AxolotlTrainer": Trainer},
        "axolotl.integrations.base": {
            "BasePlugin": object, "PluginManager": types.SimpleNamespace(get_instance=lambda: manager),
        },
        "axolotl.loaders.utils": {"get_linear_embedding_layers": lambda _: ["embed_tokens", "lm_head"]},
        "axolotl.telemetry.errors": {"send_errors": lambda function: function},
        "axolotl.utils.dict": {"DictDefault": Settings},
        "axolotl.utils.logging": {"get_logger": logging.getLogger},
    }  # fmt: skip
    modules = {name: types.SimpleNamespace(**content) for name, content in contents.items()}
    settings = Settings(
        adapter="lora", lora_r=4, lora_alpha=8, lora_dropout=0.0, lora_target_linear=True,
        torch_dtype=torch.float32,
    )  # fmt: skip
    model, kind = tiny("qwen3", 2, dtype=torch.float32), Trainer
    with mock.patch.dict(sys.modules, modules):
        spec = importlib.util.spec_from_file_location("adapter", Path(path))
        adapter = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(adapter)
        if size > 1:
            from overlap_gemm.integrations.axolotl import OverlapGemmPlugin

            plugin = OverlapGemmPlugin()
            plugin.post_model_build(settings, model)
            kind = plugin.get_trainer_cls(settings)
    torch.manual_seed(5)
    model, config = adapter.load_adapter(model, settings, settings.adapter)
    results = trained(kind, model, f"{folder}/{size}")
    state = full_state_dict(model)
    adapters = {name: state[name] for name, p in model.named_parameters() if p.requires_grad}
    return results, adapters, sorted(config.target_modules)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_adapters_that_axolotl_adds_are_trained_as_on_one_rank(ranks, tmp_path):
    (path,) = extracted("axolotl", tmp_path, "axolotl/loaders/adapter.py")
    ((expected, weights, targets),) = ranks(1).run(adapts_by_axolotl, path, str(tmp_path))
    assert len(targets) == 7 and len(set(expected[0])) == 4
    for results, adapters, names in ranks(2).run(adapts_by_axolotl, path, str(tmp_path)):
        assert names == targets and adapters.keys() == weights.keys()
        torch.testing.assert_close(torch.tensor(results), torch.tensor(expected), rtol=1e-3, atol=1e-3)
        for name, value in weights.items():
            torch.testing.assert_close(adapters[name], value, rtol=1e-3, atol=1e-4)
