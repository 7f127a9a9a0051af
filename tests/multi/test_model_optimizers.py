"""Optimizers and losses of parallelized models: right as the unsharded model's, or refused by name."""

import copy
import warnings

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

from overlap_gemm.parallel import full_norm, full_state_dict, parallelize, sees_shards
from overlap_gemm.parallel.optimizers import RIGHT, check_class
from tests.support.models import VOCABULARY, tiny
from tests.support.trained import SETTINGS, on_cpus, samples, trained

IDS = torch.arange(18).view(2, 9)


def cases():
    """Names and makers: each class in both of its forms, and fused where DTensor has it.

    On CPUs `foreach=False` is the default.
    """
    for kind in (*RIGHT, torch.optim.AdamW):
        if kind.__name__ != "Muon":
            for options in ({}, {"foreach": True}):
                yield f"{kind.__name__} {options}", kind, options
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        yield f"{kind.__name__} fused", kind, {"fused": True}
    yield "SGD with momentum", torch.optim.SGD, {"momentum": 0.9, "nesterov": True}
    yield "AMSGrad", torch.optim.AdamW, {"amsgrad": True}
    yield "RMSprop centered", torch.optim.RMSprop, {"centered": True, "momentum": 0.5}


def steps(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    first = tiny("llama", 2, num_hidden_layers=1)
    for what, kind, options in cases():
        pair = first, parallelize(copy.deepcopy(first), mesh)
        pair = copy.deepcopy(pair[0]), pair[1]
        optimizers = [kind(model.parameters(), lr=1e-2, **options) for model in pair]
        for _ in range(3):
            for model, optimizer in zip(pair, optimizers, strict=True):
                model(IDS, labels=IDS).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        whole = full_state_dict(pair[1])
        for name, value in pair[0].state_dict().items():
            assert torch.allclose(whole[name], value, rtol=1e-6, atol=1e-8), (what, name)


def test_optimizers_of_torch(ranks):
    ranks(2).run(steps)


def muon(rank, ranks):
    """Its iteration is in bfloat16, whose rounding of the norm alone moves the result by 2 to 3 %."""
    mesh = init_device_mesh("cpu", (ranks,))
    for shape in ((32, 48), (48, 32), (97, 24)):
        for placement in (Shard(0), Shard(1), Replicate()):
            torch.manual_seed(0)
            start, gradient = torch.randn(shape), torch.randn(shape)
            cut, its_gradient = (
                distribute_tensor(each.clone(), mesh, [placement]) for each in (start, gradient)
            )
            plain, sharded = torch.nn.Parameter(start.clone()), torch.nn.Parameter(cut)
            plain.grad, sharded.grad = gradient, its_gradient
            for parameter in (plain, sharded):
                torch.optim.Muon([parameter], lr=1.0, weight_decay=0).step()
            moved, expected = sharded.full_tensor() - start, plain - start
            assert (moved - expected).norm() < 0.06 * expected.norm()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon(ranks):
    ranks(2).run(muon)


class Signs(torch.optim.Optimizer):
    """An optimizer of a user's."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(1e-2 * parameter.grad.sign())


def refused(rank, ranks):
    """Before anything is changed; of other models' parameters nothing is said."""
    from transformers.optimization import Adafactor

    model = parallelize(tiny("llama", 2), init_device_mesh("cpu", (ranks,)))
    model(IDS, labels=IDS).loss.backward()
    before = {name: value.clone() for name, value in full_state_dict(model).items()}
    optim = torch.optim
    cases = {
        "Adafactor: it takes means over rows and columns": optim.Adafactor,
        "transformers.optimization.Adafactor: it takes": lambda p: Adafactor(p, relative_step=False, lr=1.0),
        "LBFGS: it makes one vector of all parameters. Supported: .*, AdamW\\. Mark": optim.LBFGS,
        "Rprop: DTensor has no rule for an operation": optim.Rprop,
        "SGD: DTensor supports fused=True for Adam": lambda p: optim.SGD(p, lr=1e-2, fused=True),
        "Adagrad: DTensor supports fused=True for Adam": lambda p: optim.Adagrad(p, fused=True),
        "Signs: its step on shards has not been tried.*sees_shards": Signs,
    }
    for words, make in cases.items():
        optimizer = make(model.parameters())
        with pytest.raises(ValueError, match=f"no rule for the optimizer .*{words}"):
            optimizer.step(lambda: 0.0) if isinstance(optimizer, optim.LBFGS) else optimizer.step()
    for name, value in full_state_dict(model).items():
        assert torch.equal(value, before[name]), name
    packed = parallelize(tiny("phi3", 2), init_device_mesh("cpu", (ranks,)))
    for each in (packed, copy.deepcopy(packed)):
        each(IDS, labels=IDS).loss.backward()
        with pytest.raises(ValueError, match=r"Muon: its step is one of full matrices.* in parts\. Leave"):
            optim.Muon([parameter for parameter in each.parameters() if parameter.ndim == 2]).step()
        optim.Muon([layer.mlp.down_proj.weight for layer in each.model.layers]).step()
    sees_shards(Signs(model.parameters())).step()
    expected = before["lm_head.weight"] - 1e-2 * model.lm_head.weight.grad.full_tensor().sign()
    assert torch.equal(full_state_dict(model)["lm_head.weight"], expected)
    plain = torch.nn.Parameter(torch.ones(3))
    plain.grad = torch.ones(3)
    Signs([plain]).step()
    other = torch.nn.Parameter(
        distribute_tensor(torch.ones(4), init_device_mesh("cpu", (ranks,)), [Shard(0)])
    )
    other.grad = other.detach().clone()
    added = optim.SGD([plain], lr=1e-2, fused=True)
    added.step()
    added.add_param_group({"params": list(model.parameters())})  # looked at again
    with pytest.raises(ValueError, match="fused=True"):
        added.step()


def test_other_optimizers_are_refused(ranks):
    ranks(2).run(refused)


def refused_under_fsdp(rank, ranks):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize(tiny("llama", 2), mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    model(IDS, labels=IDS).loss.backward()
    with pytest.raises(ValueError, match="LBFGS: it makes one vector"):
        torch.optim.LBFGS(model.parameters()).step(lambda: 0.0)


def test_they_are_refused_under_fsdp(ranks):
    ranks(4).run(refused_under_fsdp)


def norms(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    plain = tiny("llama", ranks)
    model = parallelize(copy.deepcopy(plain), mesh)
    for each in (plain, model):
        each(IDS, labels=IDS).loss.backward()
    name = "model.layers.0.self_attn.q_proj.weight"
    found, expected = (each.get_parameter(name).grad for each in (model, plain))
    local = found.norm().to_local()
    assert not torch.isclose(local, expected.norm(), rtol=1e-3)  # the trap: a rank's part
    for order in (2.0, 1.0, float("inf")):
        one = full_norm(found, order)
        assert not isinstance(one, DTensor) and one.ndim == 0
        torch.testing.assert_close(one, torch.linalg.vector_norm(expected, order), rtol=1e-5, atol=0)
        torch.testing.assert_close(
            full_norm((parameter.grad for parameter in model.parameters()), order),
            torch.nn.utils.get_total_norm([parameter.grad for parameter in plain.parameters()], order),
            rtol=1e-5, atol=0,
        )  # fmt: skip
    both = full_norm([found, expected])
    torch.testing.assert_close(both, 2**0.5 * expected.norm(), rtol=1e-5, atol=0)
    assert full_norm([]) == 0
    return float(full_norm(found))


def test_norms_of_full_tensors(ranks):
    found = ranks(3).run(norms)
    assert len(set(found)) == 1


def sharded_logits(rank, ranks):
    """`generate` has whole logits, labels want `loss_parallel`, and both leave the model as it was."""
    mesh = init_device_mesh("cpu", (ranks,))
    plain = tiny("llama", 2).eval()
    model = parallelize(copy.deepcopy(plain), mesh, logits="sharded")
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    found = model.generate(IDS, **settings)
    assert torch.equal(found, plain.generate(IDS, **settings))
    assert isinstance(model(IDS).logits, DTensor)
    with pytest.raises(ValueError, match=r"labels= of a model with logits='sharded'.*loss_parallel\(\)"):
        model(IDS, labels=IDS)
    expected = plain(IDS, labels=IDS).loss
    with loss_parallel():
        loss = model(IDS, labels=IDS).loss
        loss.backward()
    torch.testing.assert_close(loss.full_tensor(), expected, rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match="labels= of a model with"):
        model(IDS, labels=IDS)
    with pytest.raises(ValueError, match="must be 2D"):  # an error within generate, too
        model.generate(IDS, attention_mask=torch.ones(2, 3, 4), **settings)
    assert isinstance(model(IDS).logits, DTensor)


def test_sharded_logits(ranks):
    ranks(2).run(sharded_logits)


def named(rank, ranks, folder):
    """Each `optim=` of transformers: right, refused by name, or without its package."""
    from transformers import TrainingArguments
    from transformers.training_args import OptimizerNames

    from overlap_gemm.integrations.trainer import TensorParallelTrainer

    model = parallelize(tiny("qwen3", 2, dtype=torch.float32), init_device_mesh("cpu", (ranks,)))
    verdicts = {}
    for optim in OptimizerNames:
        with on_cpus(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            how = {"optim_target_modules": ["q_proj"]} if "galore" in optim or "apollo" in optim else {}
            arguments = TrainingArguments(folder, **{**SETTINGS, "optim": optim.value, **how})
            try:
                TensorParallelTrainer(model, arguments, train_dataset=samples())
                verdicts[optim.value] = "right"
            except (ImportError, ValueError) as error:
                verdicts[optim.value] = str(error)
    right = {name for name, verdict in verdicts.items() if verdict == "right"}
    assert right == {"adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop"}
    assert "Adafactor: it takes means" in verdicts.pop("adafactor")
    for name, verdict in verdicts.items():
        assert name in right or "install" in verdict or "import" in verdict, (name, verdict)
    with pytest.raises(ValueError, match="Rprop: DTensor has no rule"), on_cpus():
        arguments = TrainingArguments(folder, **SETTINGS)
        optimizer = torch.optim.Rprop(model.parameters())
        TensorParallelTrainer(model, arguments, train_dataset=samples(), optimizers=(optimizer, None))
    mesh = init_device_mesh("cpu", (ranks,))
    sharded = parallelize(tiny("qwen3", 2, dtype=torch.float32), mesh, logits="sharded")
    with pytest.raises(ValueError, match="Trainer's losses need replicated logits"), on_cpus():
        arguments = TrainingArguments(folder, **SETTINGS)
        TensorParallelTrainer(sharded, arguments, train_dataset=samples())


def test_each_name_of_training_arguments(ranks, tmp_path):
    ranks(2).run(named, str(tmp_path))


def smoothed(rank, ranks, folder):
    from transformers import Trainer

    from overlap_gemm.integrations.trainer import TensorParallelTrainer

    how = {"label_smoothing_factor": 0.1, "optim": "adagrad"}
    if ranks == 1:
        return trained(Trainer, tiny("qwen3", 2, dtype=torch.float32), folder, **how)
    model = parallelize(
        tiny("qwen3", 2, dtype=torch.float32), init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    )
    return trained(TensorParallelTrainer, model, folder, **how)


def test_label_smoothing(ranks, tmp_path):
    (expected,) = ranks(1).run(smoothed, str(tmp_path / "plain"))
    for found in ranks(2).run(smoothed, str(tmp_path / "tp")):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-3, atol=1e-3)


def test_factories_are_refused():
    """transformers' factories of optimizers are no classes of torch's."""

    class Factory:
        pass

    with pytest.raises(ValueError, match="Factory: its step on shards has not been tried"):
        check_class(Factory, [{}])
    assert VOCABULARY % 2  # a vocabulary that ranks share unevenly is among what was tried
