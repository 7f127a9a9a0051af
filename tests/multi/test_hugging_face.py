"""Our styles after transformers' `from_pretrained(distributed_config=...)`: plans "auto" and one's own."""

import os
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.support.models import VOCABULARY, tiny_for_plans

hugging_face = pytest.importorskip("overlap_gemm.integrations.hugging_face", exc_type=ImportError)
"""Of transformers before 5.17 it says what it needs."""


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def loads_with(rank, size, family, folder, plan):
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    before = dict(ALL_PARALLEL_STYLES._global_mapping)
    hugging_face.install(backend="decomposed", names_only=plan != "auto")
    with pytest.raises(RuntimeError, match="installed already"):
        hugging_face.install()
    plain = tiny_for_plans(family)
    config = DistributedConfig(tp_size=size, tp_plan=plan)
    environment = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    with mock.patch.dict(os.environ, environment):
        model = type(plain).from_pretrained(folder, dtype=torch.float64, distributed_config=config)
    hugging_face.uninstall()
    after = dict(ALL_PARALLEL_STYLES._global_mapping)  # transformers may have added more of its own
    assert {name: after.get(name) for name in before} == before
    assert not [name for name in after if name.startswith("overlap_")]
    ours = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if type(vars(module).get("forward")).__module__ == "overlap_gemm.parallel.modules.styles"
    }
    torch.manual_seed(1)
    ids = torch.randint(VOCABULARY, (2, 7))
    results = []
    for each in (plain.train(), model.train()):
        out = each(ids, labels=ids)
        out.loss.backward()
        gradients = {name: whole(parameter.grad) for name, parameter in each.named_parameters()}
        with torch.no_grad():
            text = each.eval().generate(
                ids, do_sample=False, max_new_tokens=4, min_new_tokens=4, pad_token_id=0
            )
        results.append((whole(out.logits), gradients, text))
    (logits, gradients, text), (own_logits, own_gradients, own_text) = results
    torch.testing.assert_close(own_logits, logits, rtol=1e-4, atol=1e-5)
    assert torch.equal(own_text, text)
    for name, gradient in gradients.items():
        torch.testing.assert_close(own_gradients[name], gradient, rtol=1e-4, atol=1e-5)
    return ours


LINEARS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_plan_auto(ranks, tmp_path, family):
    tiny_for_plans(family).save_pretrained(tmp_path)
    for ours in ranks(2).run(loads_with, family, str(tmp_path), "auto"):
        assert ours == LINEARS | {"lm_head"}


def test_plan_of_ones_own(ranks, tmp_path):
    tiny_for_plans("llama").save_pretrained(tmp_path)
    plan = {
        "model.layers.*.mlp.up_proj": "overlap_colwise",
        "model.layers.*.mlp.down_proj": "overlap_rowwise",
    }
    for ours in ranks(2).run(loads_with, "llama", str(tmp_path), plan):
        assert ours == {"up_proj", "down_proj"}
