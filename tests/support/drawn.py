"""Adapters and optimizers that are drawn for compositions of models, by name."""

import torch

ADAPTERS = (
    *("none", "lora", "all", "head", "saved", "two", "rslora", "prompt") * 2,
    "dora", "pissa", "ia3", "vera", "oft", "tokens", "prefix",
)  # fmt: skip
OPTIMIZERS = (
    *("AdamW", "SGD", "Adam") * 2, "fused AdamW", "amsgrad Adam", "nesterov SGD", "Adagrad", "RMSprop",
    "Adamax", "NAdam", "RAdam", "Adadelta", "ASGD", "Rprop", "LBFGS", "Adafactor", "fused SGD", "Muon",
)  # fmt: skip


def targets(family):
    if family == "phi3":
        return ["qkv_proj", "gate_up_proj"], ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    if family in ("mixtral", "qwen3_moe"):
        return ["q_proj"], attention
    return ["q_proj", "up_proj"], [*attention, "gate_proj", "up_proj", "down_proj"]


def adapted(model, kind, family):
    import peft

    some, every = targets(family)
    torch.manual_seed(11)
    task, lora = {"task_type": "CAUSAL_LM"}, {"r": 3, "lora_alpha": 2, "init_lora_weights": False}
    configs = {
        "lora": lambda: peft.LoraConfig(target_modules=some, **lora, **task),
        "all": lambda: peft.LoraConfig(target_modules=every, **lora, **task),
        "head": lambda: peft.LoraConfig(target_modules=[*some, "lm_head"], **lora, **task),
        "saved": lambda: peft.LoraConfig(target_modules=some, modules_to_save=["norm"], **lora, **task),
        "two": lambda: peft.LoraConfig(target_modules=every, **lora, **task),
        "rslora": lambda: peft.LoraConfig(target_modules=some, use_rslora=True, **lora, **task),
        "dora": lambda: peft.LoraConfig(target_modules=some, use_dora=True, **lora, **task),
        "pissa": lambda: peft.LoraConfig(target_modules=some, r=3, init_lora_weights="pissa", **task),
        "ia3": lambda: peft.IA3Config(target_modules=some, feedforward_modules=[], **task),
        "vera": lambda: peft.VeraConfig(target_modules=some[:1], r=3, **task),
        "oft": lambda: peft.OFTConfig(target_modules=some[:1], oft_block_size=4, r=0, **task),
        "tokens": lambda: peft.LoraConfig(
            target_modules=some, trainable_token_indices=[3, 5], **lora, **task
        ),
        "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, **task),
        "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, **task),
    }
    model = peft.get_peft_model(model, configs[kind]())
    if kind == "two":
        model.add_adapter("second", peft.LoraConfig(target_modules=some, **lora, **task))
        model.base_model.set_adapter(["default", "second"])
    return model


def orthogonalized(gradient, coefficients, steps, eps):
    """Returns what Muon makes of a gradient, in the gradient's precision; torch's rounds to bfloat16."""
    a, b, c = coefficients
    wide = gradient if gradient.shape[0] <= gradient.shape[1] else gradient.T
    wide = wide / wide.norm().clamp(min=eps)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide if gradient.shape[0] <= gradient.shape[1] else wide.T


def optimizer_of(kind, model):
    *how, name = kind.split()
    options = {"lr": 1e-2, **dict.fromkeys(how, True)}
    if name in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad"):
        options["eps"] = 1e-2
    if name == "SGD":
        options["momentum"] = 0.9
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if name == "Muon":
        parameters = [parameter for parameter in parameters if parameter.ndim == 2]
    return getattr(torch.optim, name)(parameters, **options)
