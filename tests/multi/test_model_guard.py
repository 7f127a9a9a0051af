"""What is put on a parallelized model and has no rule is refused by name, there or at the next forward."""

import copy
import functools
import itertools
import types

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from overlap_gemm.parallel import full_state_dict, parallelize, sees_shards
from overlap_gemm.parallel.assignment import UnknownModuleError
from overlap_gemm.runtime.agree import DisagreementError
from tests.support.adapters import close
from tests.support.models import tiny

IDS = torch.arange(3, 9).view(1, 6)


class Other(nn.Linear):
    pass


def adapter(kind, **options):
    import peft

    return getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM", **options)


def lora(**options):
    return lambda model: __import__("peft").get_peft_model(model, adapter("Lora", r=2, **options))


def kind(name, **options):
    return lambda model: __import__("peft").get_peft_model(model, adapter(name, **options))


def put(path, make):
    parent, _, name = path.rpartition(".")
    return lambda model: setattr(model.get_submodule(parent), name, make(model))


EXPERTS = ["experts.gate_up_proj"]
Q = {"target_modules": ["q_proj"]}
WHEN_PUT = {
    "dora": (lora(use_dora=True, **Q), r"'model\.layers\.0\.self_attn\.q_proj': Dora is not supported"),
    "pissa": (lora(init_lora_weights="pissa", **Q), r"init_lora_weights='pissa' needs the full weight"),
    "alora": (lora(alora_invocation_tokens=[1], **Q), r"q_proj': ALora is not supported"),
    "ia3": (
        kind("IA3", target_modules=["k_proj"], feedforward_modules=[]),
        r"'model\.layers\.0\.self_attn\.k_proj' \(Linear\): adapters of the kind peft\.tuners\.ia3",
    ),
    "oft": (kind("OFT", r=2, oft_block_size=0, **Q), r"adapters of the kind peft\.tuners\.oft"),
    "loha": (kind("LoHa", r=2, **Q), r"adapters of the kind peft\.tuners\.loha"),
    "vera": (kind("Vera", r=2, **Q), r"q_proj.*adapters of the kind peft\.tuners\.vera"),
    "adalora": (kind("AdaLora", total_step=9, **Q), r"adapters of the kind peft\.tuners\.adalora"),
    "embedding": (lora(target_modules=["embed_tokens"]), r"'model\.embed_tokens' .*adapters of the kind"),
    "tokens": (lora(trainable_token_indices=[3], **Q), r"'model\.embed_tokens' .*TrainableTokens"),
    "saved-linear": (
        lora(modules_to_save=["o_proj"], **Q), r"o_proj' .*modules_to_save is supported on .*not 'row'"
    ),
    "replaced": (
        put("model.layers.1.mlp.up_proj", lambda _: Other(24, 22)),
        r"'model\.layers\.1\.mlp\.up_proj' \(Other\): it was put into a model after parallelize",
    ),
    "replaced-layer": (
        put("model.layers.0", lambda model: copy.deepcopy(model.model.layers[1])),
        r"'model\.layers\.0' \(LlamaDecoderLayer\): it was put into",
    ),
    "replaced-head": (put("lm_head", lambda _: nn.Linear(24, 97)), r"'lm_head' \(Linear\): it was"),
    "replaced-norm": (put("model.norm", lambda _: nn.Identity()), r"'model\.norm' \(Identity\)"),
    "sequential": (
        put("model.layers.0.mlp", lambda model: nn.Sequential(model.model.layers[0].mlp, Other(24, 24))),
        r"'model\.layers\.0\.mlp' \(Sequential\): it was put",
    ),
}  # fmt: skip


def see(*_):
    """A hook that looks at what it is given."""


def on(path, name, *arguments):
    return lambda model: getattr(model.get_submodule(path), f"register_{name}")(*arguments)


AT_FORWARD = {
    "layer": (on("model.layers.1", "forward_hook", see), r"layers\.1' .*the hook <function see"),
    "layer-before": (on("model.layers.0", "forward_pre_hook", see), r"layers\.0' .*the hook"),
    "layer-backward": (on("model.layers.0", "full_backward_hook", see), r"'model\.layers\.0' .*hook"),
    "projection": (on("model.layers.0.mlp.up_proj", "forward_hook", see), r"up_proj' .*the hook"),
    "activation": (on("model.layers.0.mlp.act_fn", "forward_hook", see), r"act_fn' .*the hook"),
    "norm-before": (on("model.norm", "forward_pre_hook", see), r"'model\.norm' .*the hook"),
    "forward": (
        lambda model: setattr(model.model.layers[0].mlp, "forward", lambda x: x),
        r"'model\.layers\.0\.mlp' .*its forward was replaced after",
    ),
}  # fmt: skip


def content(model):
    modules = [(name, type(module), id(module)) for name, module in model.named_modules()]
    return modules, [(name, id(p), p.requires_grad) for name, p in model.named_parameters()]


def refused(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    for case, (change, words) in WHEN_PUT.items():
        model = parallelize(tiny("llama", size), mesh, sequence_parallel=len(case) % 2 == 0)
        before = content(model)
        with pytest.raises(UnknownModuleError, match=words):
            change(model)
            raise AssertionError(f"{case} was put there")
        assert content(model) == before, case
    model = parallelize(tiny("phi3", size), mesh)
    before = content(model)
    with pytest.raises(NotImplementedError, match=r"kind peft\.tuners\.vera\.model\.VeraModel are not"):
        kind("Vera", r=2, target_modules=["qkv_proj"])(model)
    assert content(model) == before
    for change, words in AT_FORWARD.values():
        model = parallelize(tiny("llama", size), mesh)
        change(model)
        with pytest.raises(UnknownModuleError, match=words):
            model(IDS)


@pytest.mark.filterwarnings("ignore")
def test_refused_by_name(ranks):
    ranks(2).run(refused)


def allowed(rank, size):
    """What sees whole tensors, or says that it knows."""
    mesh = init_device_mesh("cpu", (size,))
    seen = []

    def note(_module, _args, out):
        seen.append((out[0] if isinstance(out, tuple) else out).shape[1])

    model = parallelize(tiny("llama", size), mesh)
    for path in ("model.embed_tokens", "model.norm", "lm_head"):
        model.get_submodule(path).register_forward_hook(note)
    model.model.layers[0].register_forward_hook(sees_shards(note))
    model.model.layers[0].mlp.act_fn.forward = torch.compile(
        model.model.layers[0].mlp.act_fn.forward, backend="eager"
    )
    model(IDS)
    assert seen == [6, 3, 6, 6]
    seen.clear()
    model = parallelize(tiny("llama", size), mesh, sequence_parallel=False)
    for path in ("model.layers.0", "model.layers.0.mlp", "model.layers.1.self_attn", "model.norm"):
        model.get_submodule(path).register_forward_hook(note)
    model(IDS)
    assert seen == [6] * 4


def test_allowed(ranks):
    ranks(2).run(allowed)


def scores_by_full_weight(model):
    """Replaces a model's forward as TRL's trainers do: labels are scored by the full weight of the head."""
    original = model.forward

    def forward(self, input_ids=None, labels=None, **options):
        if labels is None:
            return original(input_ids=input_ids, **options)
        weight = self.get_output_embeddings().weight
        weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
        hidden = self.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        return nn.functional.cross_entropy((hidden[:, :-1] @ weight.T).flatten(0, 1), labels[:, 1:].flatten())

    model.forward = types.MethodType(functools.wraps(type(model).forward)(forward), model)


def replaced_forward(rank, size, family, sequence_parallel):
    mesh = init_device_mesh("cpu", (size,))
    plain = tiny(family, size)
    model = parallelize(copy.deepcopy(plain), mesh, sequence_parallel=sequence_parallel)
    for each in (plain, model):
        scores_by_full_weight(each)
    losses = [each(input_ids=IDS, labels=IDS) for each in (plain, model)]
    close(losses[1], losses[0], "loss")
    for loss in losses:
        loss.backward()
    for (name, expected), (_, actual) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        close(actual.grad.full_tensor(), expected.grad, name)
    for each in (plain, model):
        each.eval()
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(IDS, **options), plain.generate(IDS, **options))


@pytest.mark.parametrize(
    ("family", "sequence_parallel"), [("llama", True), ("qwen3", False), ("qwen3", True)]
)
def test_the_models_forward_may_be_replaced(ranks, family, sequence_parallel):
    """An untied head, and a tied one."""
    ranks(2).run(replaced_forward, family, sequence_parallel)


def before(rank, size):
    """Adapters that were there before parallelize, and cannot be carried."""
    import peft

    mesh = init_device_mesh("cpu", (size,))
    saved = {"modules_to_save": ["o_proj"], **Q}
    for family, config, words in (
        (
            "llama",
            adapter("Lora", use_dora=True, **Q),
            r"q_proj' .*adapter 'default' is a DoraLinearVariant",
        ),
        ("llama", adapter("IA3", target_modules=["k_proj"], feedforward_modules=[]), r"k_proj' .*kind .*ia3"),
        ("llama", adapter("Lora", target_modules=["embed_tokens"]), r"embed_tokens' .*kind .*Embedding"),
        ("mixtral", adapter("Lora", target_parameters=EXPERTS), r"experts' .*kind .*ParamWrapper are not"),
        ("phi3", adapter("Lora", use_dora=True, target_modules=["qkv_proj"]), r"qkv_proj' .*DoraLinear"),
        (
            "phi3",
            adapter("Lora", target_modules=["o_proj"], modules_to_save=["qkv_proj"]),
            r"its kind of adapter is not supported .* 'packed'",
        ),
        ("llama", adapter("Lora", **saved), r"o_proj' .*its kind of adapter is not supported .* 'row'"),
    ):
        model = peft.get_peft_model(tiny(family, size), config)
        parameters = [id(parameter) for parameter in model.parameters()]
        with pytest.raises(UnknownModuleError, match=words):
            parallelize(model, mesh)
        assert [id(parameter) for parameter in model.parameters()] == parameters
    mixture = parallelize(tiny("mixtral", size), mesh)
    with pytest.raises(UnknownModuleError, match=r"experts' .*kind .*ParamWrapper are not"):
        lora(target_parameters=EXPERTS)(mixture)
    packed = parallelize(tiny("phi3", size), mesh)
    with pytest.raises(UnknownModuleError, match=r"gate_up_proj': init_lora_weights='pissa' needs"):
        lora(init_lora_weights="pissa", target_modules=["gate_up_proj"])(packed)
    with pytest.raises(UnknownModuleError, match=r"qkv_proj\.q' .*a packed projection's part"):
        lora(target_modules=["q"])(packed)


@pytest.mark.filterwarnings("ignore")
def test_refused_before(ranks):
    ranks(2).run(before)


ASSIGNED = (
    "model.embed_tokens.weight", "model.norm.weight", "model.layers.0.input_layernorm.weight",
    "model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.bias",
    "model.layers.0.self_attn.o_proj.weight", "model.layers.1.mlp.down_proj.bias", "lm_head.weight",
    "model.layers.1.self_attn.k_proj.weight",
)  # fmt: skip


def assign(model, name, tensor):
    module, _, key = name.rpartition(".")
    setattr(model.get_submodule(module), key, tensor)


def assigned(rank, size, kv_heads, biases):
    """A plain parameter is cut as its place is cut: output and every gradient are the unsharded model's."""
    options = {"attention_bias": biases, "mlp_bias": biases, "num_key_value_heads": kv_heads}
    plain = tiny("llama", size, **options)
    new = {}
    for i, name in enumerate(ASSIGNED):
        module = plain.get_submodule(name.rpartition(".")[0])
        shape = [len(module.weight)] if name.endswith("bias") else module.weight.shape
        new[name] = torch.randn(shape, generator=torch.Generator().manual_seed(i)).double()
    model = parallelize(copy.deepcopy(plain), init_device_mesh("cpu", (size,)))
    model(IDS)
    for name, tensor in new.items():
        for each in (plain, model):
            assign(each, name, nn.Parameter(tensor.clone()))
    outs = [each(IDS, labels=IDS) for each in (plain, model)]
    close(outs[1].logits, outs[0].logits, "logits")
    for out in outs:
        out.loss.backward()
    for (name, expected), (_, found) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert isinstance(found, DTensor), name
        close(found.grad.full_tensor(), expected.grad, name)
    for name, value in full_state_dict(model).items():
        close(value, plain.state_dict()[name], name)


@pytest.mark.parametrize(("kv_heads", "biases"), [(2, True), (1, False)])
def test_assigned_parameters_are_cut(ranks, kv_heads, biases):
    ranks(2).run(assigned, kv_heads, biases)


def past_the_hook(name, tensor):
    module, _, key = name.rpartition(".")
    return lambda model: model.get_submodule(module)._parameters.update({key: tensor})


def other_data(name, make):
    def change(model):
        parameter = model.get_parameter(name)
        parameter.data = make(parameter)

    return change


def setting(name, value):
    module, _, key = name.rpartition(".")
    return lambda model: setattr(model.get_submodule(module), key, value)


NORM, HEAD = "model.norm.weight", "lm_head.weight"
NUMBERS = {
    "data": (other_data(NORM, lambda p: torch.ones(24).double()), r"norm' .*its weight\.data was assigned"),
    "data-of-a-dtensor": (other_data(HEAD, lambda p: p.detach() * 2), r"'lm_head' .*its weight\.data"),
    "past": (past_the_hook(NORM, nn.Parameter(torch.ones(24).double())), r"norm' .*is an unsharded tensor"),
    "past-head": (past_the_hook(HEAD, nn.Parameter(torch.ones(97, 24))), "'lm_head' .*is an unsharded"),
    "head-forward": (setting("lm_head.forward", lambda x: x), r"'lm_head' .*its forward was replaced"),
    "weight-norm": (
        lambda model: nn.utils.parametrizations.weight_norm(model.model.layers[0].self_attn.o_proj),
        r"self_attn.o_proj' .*weight_norm needs the norms of full rows",
    ),
    "max-norm": (setting("model.embed_tokens.max_norm", 1.0), r"embed_tokens' .*max_norm, sparse"),
}  # fmt: skip


def numbers(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    models = [parallelize(tiny("llama", size), mesh) for _ in range(2 * len(NUMBERS))]
    for model, (who, (case, (change, words))) in zip(
        models, itertools.product((None, 1), NUMBERS.items()), strict=True
    ):
        if who is not None:
            if case == "weight-norm":  # torch >= 2.14 reduces the norms over ranks: each must call it
                continue
            model(IDS)  # the first half does not: changes before the first forward pass are noticed, too
        if who in (None, rank):
            change(model)
        # One rank's refusal is every rank's.
        error = UnknownModuleError if who is None else DisagreementError
        with pytest.raises(error, match=words):
            model(IDS)
            raise AssertionError(f"{case} was not noticed")
    # Of a copy that no forward pass has seen.
    model = parallelize(tiny("llama", size), mesh)
    lora(target_modules=["q_proj"], modules_to_save=["norm"])(model)
    model.model.norm.weight.data = torch.ones(24).double()
    with pytest.raises(UnknownModuleError, match=r"norm' .*its weight\.data was assigned"):
        model(IDS)
    # When it is assigned.
    model = parallelize(tiny("llama", size), mesh)
    before = content(model)
    own = model.model.norm.weight.to_local()
    for name, tensor, words in (
        (
            "model.embed_tokens.weight",
            torch.ones(96, 24),
            r"its weight must be the full tensor \[97, 24\], got \[96, 24\]",
        ),
        (
            "model.layers.0.mlp.up_proj.weight",
            torch.ones(11, 24),
            r"its weight must be the full tensor \[22, 24\]",
        ),
        ("model.layers.0.self_attn.sinks", torch.ones(4), "it has no parameter 'sinks' to assign"),
    ):
        with pytest.raises(UnknownModuleError, match=words):
            assign(model, name, nn.Parameter(tensor))
    assert content(model) == before
    with pytest.raises(UnknownModuleError, match="embedding and lm_head are tied"):
        assign(parallelize(tiny("qwen3", size), mesh), "lm_head.weight", nn.Parameter(torch.ones(97, 24)))
    if rank == 1:
        model.model.norm.weight = nn.Parameter(own.clone())
    with pytest.raises(DisagreementError, match=r"parameter model\.norm\.weight, assigned since: rank"):
        model(IDS)
    model.model.norm.weight = nn.Parameter(own + rank)
    with pytest.raises(DisagreementError, match=r"parameter model\.norm\.weight, assigned since: rank"):
        model(IDS)
    model(IDS)


def foreign_cache(rank, size):
    from peft import PrefixTuningConfig, get_peft_model

    model = parallelize(tiny("llama", size), init_device_mesh("cpu", (size,)))
    prefixed = get_peft_model(model, PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    words = r"(past_key_values|cache) must have the 1 key/value heads .* got \[2\]: .* Prefix tuning is not"
    with pytest.raises(ValueError, match=words):
        prefixed(input_ids=IDS)
    with torch.no_grad():  # the model's own cache, of a rank's heads
        first = model(IDS[:, :3], use_cache=True)
        model(IDS[:, 3:], past_key_values=first.past_key_values)


def test_a_cache_of_all_heads_is_refused(ranks):
    ranks(2).run(foreign_cache)


def test_numbers_are_refused_by_name_on_every_rank(ranks):
    ranks(2).run(numbers)


def changed_by_optimizers(rank, size):
    """What trains a model, or moves it, is no assignment."""
    model = parallelize(tiny("llama", size), init_device_mesh("cpu", (size,)))
    for step in range(2):
        model(IDS, labels=IDS).loss.backward()
        torch.optim.AdamW(model.parameters(), foreach=bool(step)).step()
        model.zero_grad()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
            parameter.data.add_(1e-3)
    state = {name: value.clone() for name, value in full_state_dict(model).items()}
    for action in (
        lambda: model.float(),
        lambda: model.double(),
        lambda: model.load_state_dict(state),
        lambda: model.load_state_dict(state, assign=True),
        lambda: copy.deepcopy(model)(IDS),
    ):
        action()
        model(IDS)


def test_training_is_no_assignment(ranks):
    ranks(2).run(changed_by_optimizers)
