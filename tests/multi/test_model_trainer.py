"""transformers' Trainer and accelerate on parallelized models: the unsharded model's losses and weights."""

import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from overlap_gemm.parallel import full_state_dict, parallelize
from tests.support.models import tiny
from tests.support.trained import SETTINGS, launched, on_cpus, samples, trained

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def sharded(size, family="qwen3", **options):
    model = tiny(family, 2, dtype=torch.float32)
    return parallelize(model, init_device_mesh("cpu", (size,), mesh_dim_names=("tp",)), **options)


def plain_trainer(rank, size, folder, sequence_parallel):
    from transformers import AutoModelForCausalLM, Trainer, __version__

    from overlap_gemm.integrations.trainer import TensorParallelTrainer

    saves_on_every_rank = Version(__version__) >= Version("5.19")  # which is needed to gather
    kind = Trainer if saves_on_every_rank else TensorParallelTrainer
    if size == 1:
        model = tiny("qwen3", 2, dtype=torch.float32)
        return trained(Trainer, model, folder), model.state_dict()
    model = sharded(size, sequence_parallel=sequence_parallel)
    before = full_state_dict(model)
    found = trained(kind, model, folder), full_state_dict(model)
    dist.barrier()
    again = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, value in found[1].items():
        assert torch.equal(again[name], value), name
    assert not torch.equal(before["lm_head.weight"], again["lm_head.weight"])
    return found


@pytest.fixture(scope="module")
def expected(ranks, tmp_path_factory):
    """(losses, norms), weights of an unsharded Trainer."""
    (found,) = ranks(1).run(plain_trainer, str(tmp_path_factory.mktemp("plain")), True)
    return found


def same(found, expected):
    for ours, theirs in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-3, atol=1e-3)
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, **CLOSE)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_plain_trainer(ranks, tmp_path, expected, sequence_parallel):
    """Batches, accumulation, clipping, the norm that it logs, and the weights that it saves."""
    assert max(expected[0][1]) > SETTINGS["max_grad_norm"]  # it does clip
    for found in ranks(2).run(plain_trainer, str(tmp_path / "tp"), sequence_parallel):
        same(found, expected)


def resumes(rank, size, folder, resume):
    from overlap_gemm.integrations.trainer import TensorParallelTrainer

    torch.manual_seed(5)
    model = sharded(size)
    if resume:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()  # all of it comes from the checkpoint
    settings = {"save_only_model": False, "save_strategy": "steps", "save_steps": 2}
    return trained(TensorParallelTrainer, model, folder, resume, **settings), full_state_dict(model)


def test_training_goes_on_from_a_checkpoint(ranks, tmp_path, expected):
    folder = str(tmp_path / "resumed")
    for found in ranks(2).run(resumes, folder, None):
        same(found, expected)
    # And with another number of ranks.
    for size in (2, 1):
        for _, weights in ranks(size).run(resumes, folder, f"{folder}/checkpoint-2"):
            for name, value in expected[1].items():
                torch.testing.assert_close(weights[name], value, **CLOSE)


def saves_on_one_rank(trainer, output_dir=None, _internal_call=False):
    """Saves on one rank alone, as transformers 5.19 does with adapters."""
    if trainer.args.should_save:
        trainer._save(output_dir)


def adapted(rank, size, folder, resume):
    from peft import get_peft_model
    from transformers import Trainer

    from overlap_gemm.integrations.trainer import TensorParallelTrainer
    from tests.support.adapters import config_of

    torch.manual_seed(5)
    plain = size == 1 and resume is None
    model = tiny("qwen3", 2, dtype=torch.float32) if plain else sharded(size)
    torch.manual_seed(5)
    model = get_peft_model(model, config_of(("q_proj", "o_proj", "down_proj"), init_lora_weights=True))
    settings = {"save_only_model": False, "save_strategy": "steps", "save_steps": 2}
    with mock.patch.object(Trainer, "save_model", saves_on_one_rank):
        trained_with = trained(Trainer if plain else TensorParallelTrainer, model, folder, resume, **settings)
    state = full_state_dict(model)
    return trained_with, {name: state[name] for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.filterwarnings("ignore")
def test_an_adapted_model_goes_on_from_a_checkpoint(ranks, tmp_path):
    """A model that peft has wrapped, as docs/models.md does, given to the Trainer with checkpoints."""
    (expected,) = ranks(1).run(adapted, str(tmp_path / "plain"), None)
    folder = str(tmp_path / "resumed")
    for found in ranks(2).run(adapted, folder, None):
        same(found, expected)
    for size in (2, 1):
        for _, weights in ranks(size).run(adapted, folder, f"{folder}/checkpoint-2"):
            for name, value in expected[1].items():
                torch.testing.assert_close(weights[name], value, **CLOSE)


class Hub:
    """A hub in memory: repositories created, and the files of each upload with their weights."""

    def __init__(self, refuses=()):
        self.created, self.uploads, self.refuses = [], [], refuses

    def create_repo(self, name, **_):
        if "create" in self.refuses:
            raise PermissionError("no token")
        self.created.append(name)
        return mock.Mock(repo_id=f"someone/{name}")

    def upload_folder(self, repo_id, folder_path, commit_message, **_):
        if "upload" in self.refuses:
            raise ConnectionError("no route")
        weights = [load_file(path) for path in sorted(Path(folder_path).glob("*.safetensors"))]
        files = {path.name for path in Path(folder_path).iterdir()}
        self.uploads.append((repo_id, commit_message, files, weights))

    def replaces(self):
        """Replaces transformers' calls of the hub: by `hf_api()`, or of older versions by function."""
        from transformers import trainer

        if hasattr(trainer, "hf_api"):
            return mock.patch.object(trainer, "hf_api", lambda: self)
        return mock.patch.multiple(trainer, create_repo=self.create_repo, upload_folder=self.upload_folder)


def pushed(rank, size, folder, lora):
    from transformers import TrainingArguments

    from overlap_gemm.integrations.trainer import TensorParallelTrainer
    from overlap_gemm.runtime.agree import DisagreementError

    model = sharded(size)
    if lora:
        from peft import get_peft_model

        from tests.support.adapters import config_of

        model = get_peft_model(model, config_of(("q_proj", "down_proj")))
    settings = {"max_steps": 1, "push_to_hub": True, "hub_model_id": "tiny"}
    with (hub := Hub()).replaces():
        trained(TensorParallelTrainer, model, folder, **settings)  # it ends with `save_model`, which uploads
    state = full_state_dict(model)
    if lora:
        state = {name.replace(".default", ""): value for name, value in state.items() if "lora" in name}
        return hub.created, hub.uploads, state
    for refuses, rule in (
        (
            ("create",),
            "creating the hub's repository failed on 1 of 2 ranks .rank 0: PermissionError: no token",
        ),
        (("upload",), "pushing to the hub failed on 1 of 2 ranks .rank 0: ConnectionError: no route"),
    ):
        with Hub(refuses).replaces(), pytest.raises(DisagreementError, match=rule):
            trained(TensorParallelTrainer, model, folder, **settings)
    writes = mock.Mock(side_effect=OSError("disk full") if rank == 0 else None)
    words = "save_pretrained failed on 1 of 2 ranks .rank 0: OSError: disk full"
    with (
        mock.patch.object(type(model), "save_pretrained", writes),
        pytest.raises(DisagreementError, match=words),
    ):
        model.save_pretrained(folder)
    with launched():
        trainer = TensorParallelTrainer(model, TrainingArguments(folder, **SETTINGS))
        (occupied := Path(folder, "file")).touch()
        trainer.args.output_dir = str(occupied)
        with pytest.raises(
            DisagreementError, match="saving into .*file failed on 1 of 2 ranks .rank 0: FileExists"
        ):
            trainer.save_model()
        with pytest.raises(
            DisagreementError, match="creating the Trainer failed on 1 of 2 ranks .rank 0: FileE"
        ):
            TensorParallelTrainer(model, trainer.args)
    return hub.created, hub.uploads, state


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lora", [False, True])
def test_saving_pushes_full_weights_and_fails_on_every_rank(ranks, tmp_path, lora):
    (created, uploads, state), other = ranks(2).run(pushed, str(tmp_path / "tiny"), lora)
    assert other[:2] == ([], [])  # rank 0 alone calls the hub
    ((name, message, files, (weights,)),) = uploads
    assert (created, name, message) == (["tiny"], "someone/tiny", "Model save")
    assert {"README.md", "adapter_config.json" if lora else "config.json"} <= files
    assert weights.keys() | {"lm_head.weight"} == state.keys() | {"lm_head.weight"}  # tied to the embedding
    assert all(torch.equal(weights[name], state[name]) for name in weights)


def by_axolotl(rank, size, folder):
    """Calls the plug-in in the order of axolotl's loader and builder; the modules are stand-ins."""
    from transformers import Trainer

    class AxolotlTrainer(Trainer):
        def _save(self, output_dir=None, state_dict=None):
            assert rank == 0 and state_dict is not None  # it writes on each rank that calls it
            super()._save(output_dir, state_dict)

    names = {"integrations.base": {"BasePlugin": object}, "core.trainers": {"AxolotlTrainer": AxolotlTrainer}}
    modules = {f"axolotl.{name}": SimpleNamespace(**content) for name, content in names.items()}
    with mock.patch.dict(sys.modules, modules):
        from overlap_gemm.integrations.axolotl import OverlapGemmPlugin

        plugin, model = OverlapGemmPlugin(), tiny("qwen3", 2, dtype=torch.float32)
        with pytest.raises(ValueError, match="not support tensor_parallel_size: 2, rl: dpo: unset"):
            plugin.post_model_build({"tensor_parallel_size": 2, "dp_shard_size": 1, "rl": "dpo"}, model)
        plugin.post_model_build({"tensor_parallel_size": 1, "load_in_8bit": False}, model)
        kind = plugin.get_trainer_cls({})
    results = trained(kind, model, folder), full_state_dict(model)
    dist.barrier()
    return results, load_file(f"{folder}/model.safetensors")


def test_axolotls_plug_in(ranks, tmp_path, expected):
    for results, weights in ranks(2).run(by_axolotl, str(tmp_path)):
        same(results, expected)
        assert weights and all(torch.equal(weights[name], results[1][name]) for name in weights)


def beside_fsdp(rank, size, folder):
    from transformers import Trainer

    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
    model = parallelize(tiny("qwen3", 2, dtype=torch.float32), mesh["tp"])
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    model.config.distributed_config.fsdp_size = 2  # who sums gradients: FSDP, over two
    settings = {"per_device_train_batch_size": 1}
    return trained(Trainer, model, folder, **settings), full_state_dict(model)


@pytest.mark.slow
def test_beside_fsdp(ranks, tmp_path, expected):
    for found in ranks(4).run(beside_fsdp, str(tmp_path)):
        same(found, expected)


def by_accelerate(rank, size):
    from accelerate import Accelerator, ParallelismConfig

    plain = tiny("llama", 2)
    model = parallelize(tiny("llama", 2), init_device_mesh("cpu", (size,), mesh_dim_names=("tp",)))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    loader = torch.utils.data.DataLoader(samples(), batch_size=2, shuffle=False)
    with on_cpus():
        accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=size))
        model, optimizer, prepared = accelerator.prepare(model, optimizers[1], loader)
        for batch, own in zip(loader, prepared, strict=True):
            assert torch.equal(batch["input_ids"], own["input_ids"])  # every rank has all of it
            plain(**batch).loss.backward()
            accelerator.backward(model(**own).loss)
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            own_norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            own_norm = own_norm.full_tensor() if hasattr(own_norm, "full_tensor") else own_norm
            torch.testing.assert_close(own_norm, norm, **CLOSE)
            for each in (optimizers[0], optimizer):
                each.step()
                each.zero_grad()
    for name, value in full_state_dict(model).items():
        torch.testing.assert_close(value, plain.state_dict()[name], **CLOSE)


def test_accelerate_by_itself(ranks):
    ranks(2).run(by_accelerate)
