"""Tokens per second of whole training steps of a Llama: ours, transformers', FSDP2 and asynchronous TP.

    bash launch/torchrun.sh -n 2 python benchmarks/tokens.py --json OUT.json [--model 8B] [--way NAME ...]

Two of the programs of examples/models, of which this times the steps: "1B" is the Llama that pretrain.py
trains from scratch by default; "8B", for fine-tuning, has 8 of the 32 layers of Llama 3 8B, and its
vocabulary. One step is forward, loss, backward and AdamW on a batch that all ways share. Ways:

- ``transformers``: `from_pretrained(distributed_config=...)`, its own tensor parallelism
- ``ours``: `parallelize`; ``torch``: ColwiseParallel, RowwiseParallel and SequenceParallel. Both with logits
  sharded by vocabulary under `loss_parallel`, which transformers' own does not support
- ``fsdp2``: `fully_shard` of each layer; each rank has its sequences of the batch
- ``..., compiled``: each layer by `torch.compile`
- ``async-tp``: ``torch``, compiled with Inductor's asynchronous tensor parallelism (on GPUs).
  ``async-tp, ours``: the same graphs, in which the fused ops are `torch_symm_mem`'s

All load the same weights. Their losses of the first steps are compared, so that no time is that of something
else. Interleaved rounds, slowest rank, medians (`overlap_gemm.tuning.timing`).
"""

import json
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import torch._inductor.config as inductor
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import typer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import overlap_gemm
from overlap_gemm import parallel
from overlap_gemm.cli.this_machine import describe
from overlap_gemm.integrations import torch_symm_mem
from overlap_gemm.tuning.timing import measure

SHAPES = {
    "1B": (32000, 2048, 8192, 16, 16, 16), "8B": (128256, 4096, 14336, 8, 32, 8),
    "tiny": (64, 32, 64, 2, 4, 4),
}  # fmt: skip
"""Vocabulary, width of the hidden state and of the MLP, layers, heads of queries and of keys."""

NAMES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads",
)  # fmt: skip
MODELS = {name: dict(zip(NAMES, shape, strict=True)) for name, shape in SHAPES.items()}
STEPS = 3
"""Steps whose losses are compared, before any is timed."""


def transformers_own(folder: Path, mesh: DeviceMesh) -> nn.Module:
    """Loads the model with transformers' tensor parallelism."""
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_size=mesh.size())
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", distributed_config=config)


def ours(folder: Path, mesh: DeviceMesh) -> nn.Module:
    """Loads the model into our shards."""
    return parallel.from_pretrained(str(folder), mesh, dtype="auto", logits="sharded")


def unsharded(folder: Path, mesh: DeviceMesh) -> nn.Module:
    """Loads the full model onto this rank's device."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(mesh.device_type)


def torchs(folder: Path, mesh: DeviceMesh) -> nn.Module:
    """Loads the model and applies torch's styles with sequence parallelism."""
    model, rows, full = unsharded(folder, mesh), Shard(1), Replicate()
    norm, column = SequenceParallel(), ColwiseParallel()
    names = {"hidden_states": rows}, {"hidden_states": full}
    of_attention = PrepareModuleInput(
        input_kwarg_layouts=names[0], desired_input_kwarg_layouts=names[1], use_local_output=False
    )
    of_mlp = PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(full,), use_local_output=False)
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=full, output_layouts=rows),
        "model.norm": SequenceParallel(use_local_output=True),
        "lm_head": ColwiseParallel(input_layouts=rows, output_layouts=Shard(-1), use_local_output=False),
    }
    for name in (f"model.layers.{index}" for index in range(model.config.num_hidden_layers)):
        plan |= {f"{name}.{part}": norm for part in ("input_layernorm", "post_attention_layernorm")}
        plan |= {f"{name}.self_attn": of_attention, f"{name}.mlp": of_mlp}
        plan |= {f"{name}.self_attn.{part}_proj": column for part in "qkv"}
        plan |= {f"{name}.mlp.{part}_proj": column for part in ("gate", "up")}
        plan |= {
            f"{name}.{part}": RowwiseParallel(output_layouts=rows)
            for part in ("self_attn.o_proj", "mlp.down_proj")
        }
    return parallelize_module(model, mesh, plan)


def compiled(model: nn.Module) -> nn.Module:
    """Compiles each layer of a model."""
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.compile(dynamic=False)  # type: ignore[operator]
    return model


def fsdp2(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shards a model's layers, and the rest of it, over data-parallel ranks."""
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def async_tp(folder: Path, mesh: DeviceMesh) -> nn.Module:
    """Compiles the model of torch's styles; on GPUs into fused ops on symmetric memory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        symm_mem.enable_symm_mem_for_group(mesh.get_group().group_name)
    model = torchs(folder, mesh)
    # A collective in flight, as the embedding returns it, gets no gradient from a compiled layer.
    model.model.embed_tokens.register_forward_hook(lambda _, __, rows: rows * 1)  # type: ignore
    return compiled(model)


WAYS: dict[str, Callable[[Path, DeviceMesh], nn.Module]] = {
    "transformers": transformers_own,
    "ours": ours,
    "torch": torchs,
    "fsdp2": lambda folder, mesh: fsdp2(unsharded(folder, mesh), mesh),
    "fsdp2, compiled": lambda folder, mesh: fsdp2(compiled(unsharded(folder, mesh)), mesh),
    "async-tp": async_tp,
    "async-tp, ours": async_tp,
    "ours, compiled": lambda folder, mesh: compiled(ours(folder, mesh)),
}
SHARDED_LOGITS = ("ours", "torch", "async-tp")


class Trained:
    """A way's model and optimizer, and its training step."""

    def __init__(self, name: str, folder: Path, mesh: DeviceMesh, ids: Tensor):
        self.name, self.mesh = name, mesh
        torch.manual_seed(0)
        self.model = WAYS[name](folder, mesh).train()
        self.ids = ids.chunk(mesh.size())[mesh.get_local_rank()] if name.startswith("fsdp2") else ids
        self.positions = torch.arange(ids.shape[1], device=ids.device)[None]
        kinds: dict[bool, list[nn.Parameter]] = {}  # torch's fused optimizers do not mix them
        for parameter in self.model.parameters():
            kinds.setdefault(isinstance(parameter, DTensor), []).append(parameter)
        groups = [{"params": group} for group in kinds.values()]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-4, weight_decay=0.1, fused=True)
        self.loss: Tensor | None = None

    def step(self) -> None:
        """Trains one step."""
        uses_ours = self.name == "async-tp, ours"
        is_async = self.name.startswith("async-tp") and self.ids.is_cuda
        if uses_ours:
            torch_symm_mem.install()
        with (
            loss_parallel() if self.name.startswith(SHARDED_LOGITS) else nullcontext(),
            inductor.patch(_micro_pipeline_tp=True) if is_async else nullcontext(),
        ):
            options = {"position_ids": self.positions, "use_cache": False}
            loss = self.model(input_ids=self.ids, labels=self.ids, **options).loss
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if uses_ours:
            torch_symm_mem.uninstall()
        self.loss = loss.detach()

    def losses(self) -> list[float]:
        """Returns the losses of the first steps, of the full batch."""
        values = []
        for _ in range(STEPS):
            self.step()
            assert self.loss is not None
            loss = self.loss.full_tensor() if isinstance(self.loss, DTensor) else self.loss
            if self.name.startswith("fsdp2"):
                dist.all_reduce(loss, op=dist.ReduceOp.SUM)
                loss = loss / self.mesh.size()
            values.append(float(loss))
        return values


class Chosen(logging.Handler):
    """Keeps messages about chosen backends, without repetitions."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: dict[str, None] = {}
        logger = logging.getLogger("overlap_gemm")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        """Adds a message."""
        self.lines[record.getMessage()] = None


def make(model: str, sequence: int, dtype: str, rank: int, folder: Path) -> None:
    """Writes a model of random weights; rank 0 does it, the others wait."""
    if rank == 0:
        torch.manual_seed(0)
        config = LlamaConfig(**MODELS[model], max_position_embeddings=sequence, tie_word_embeddings=False)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            LlamaForCausalLM._from_config(config, dtype=getattr(torch, dtype)).save_pretrained(folder)
    dist.barrier()


def main(
    model: Annotated[str, typer.Option(help=f"Of {', '.join(MODELS)}.")] = "1B",
    way: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(WAYS)}; all.")] = None,
    batch: Annotated[int, typer.Option(min=1)] = 4,
    sequence: Annotated[int, typer.Option(min=1)] = 2048,
    dtype: Annotated[str, typer.Option(help="Of weights and products.")] = "bfloat16",
    rounds: Annotated[int, typer.Option(min=1, help="Samples per way.")] = 5,
    seconds: Annotated[float, typer.Option(help="No way is made after these.")] = 240,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results here.")] = None,
) -> None:
    """Measures tokens per second of training steps."""
    began, world = time.time(), overlap_gemm.init()
    mesh, chosen = world.mesh(), Chosen()
    torch.backends.cuda.enable_cudnn_sdp(False)  # docs/design/facts.md, "torch, NCCL, gloo"
    torch._dynamo.config.recompile_limit = 64  # all ways share the code of the layers
    torch.manual_seed(1)
    ids = torch.randint(MODELS[model]["vocab_size"], (batch, sequence)).to(world.device)
    report: dict[str, Any] = {
        "machine": describe(world),
        "protocol": f"medians of {rounds} interleaved rounds, the slowest of {world.size} ranks",
        "model": {"name": model, **MODELS[model], "batch": batch, "sequence": sequence, "dtype": dtype},
        "ways": {},
        "left_out": {},
    }

    def write() -> None:
        if world.rank == 0:
            report["chosen"] = list(chosen.lines)
            if json_file is not None:
                json_file.write_text(json.dumps(report, indent=1) + "\n")

    trained: dict[str, Trained] = {}
    shared = [tempfile.mkdtemp() if world.rank == 0 else ""]
    dist.broadcast_object_list(shared, device=world.device)
    make(model, sequence, dtype, world.rank, Path(shared[0]))
    first: list[float] | None = None
    for name in way or WAYS:
        late = torch.tensor(time.time() - began > seconds, device=world.device, dtype=torch.int32)
        dist.all_reduce(late)
        if late:
            report["left_out"][name] = "out of time"
            continue
        made = time.time()
        try:
            trained[name] = Trained(name, Path(shared[0]), mesh, ids)
            losses = trained[name].losses()
        except (RuntimeError, NotImplementedError, ImportError, ValueError) as error:
            trained.pop(name, None)
            report["left_out"][name] = str(error).splitlines()[0]
            continue
        first = first or losses
        report["ways"][name] = {"losses": losses, "made_s": round(time.time() - made, 1)}
        if world.rank == 0:
            print(f"{name}: losses {losses}, {report['ways'][name]['made_s']} s", flush=True)
        allowed = 0.02 if dtype == "bfloat16" else 1e-4
        if max(abs(a - b) for a, b in zip(losses, first, strict=True)) > allowed * first[0]:
            raise RuntimeError(f"losses of {name} differ: {losses}, of the first way {first}")
        write()
    timings = measure(
        {name: each.step for name, each in trained.items()},
        device=world.device, rounds=rounds, burst_seconds=0,
    )  # fmt: skip
    for name in trained:
        entry = report["ways"][name]
        entry["step_ms"] = round(timings.median(name) * 1e3, 3)
        entry["tokens_per_second"] = round(batch * sequence / timings.median(name), 1)
        entry["spread"] = round(timings.spread(name), 4)
        if "ours" in trained:
            entry["step_ratio_to_ours"] = round(timings.ratio(name, "ours"), 4)
        if world.rank == 0:
            print(f"{name}: {entry['tokens_per_second']:,.0f} tokens/s, {entry['step_ms']} ms", flush=True)
    if world.rank == 0:
        for name, why in report["left_out"].items():
            print(f"left out: {name}: {why}")
    write()
    overlap_gemm.finalize()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    typer.run(main)
