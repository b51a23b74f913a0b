"""LoRA by PEFT: adapters go into every layer without being told where, and leave the same model behind."""

import pytest
import torch

from membydesign.layers import LAYERS
from membydesign.testing import assert_close
from models.family import FAMILY, KINDS, cases, fresh_model, some_ids

peft = pytest.importorskip("peft")
IDS = some_ids(2, 9)
pytestmark = pytest.mark.filterwarnings("ignore")


def adapted(layers, **options):
    torch.manual_seed(0)
    return peft.get_peft_model(fresh_model(layers), peft.LoraConfig(r=4, task_type="CAUSAL_LM", **options))


@cases(LAYERS, quick=KINDS)
@pytest.mark.parametrize("where", [{}, {"target_modules": "all-linear"}], ids=["default", "all-linear"])
def test_every_layer_is_adapted_and_learns(case, where):
    model = adapted([case] * 2, **where)
    trained = [key for key, p in model.named_parameters() if p.requires_grad]
    assert all("lora_" in key for key in trained)
    for i in range(2):
        assert any(f"layers.{i}.mixer." in key for key in trained)
    assert ("mlp" in "".join(trained)) == bool(where)
    assert not any("lm_head" in key for key in trained)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 2e-2)
    losses = []
    for _ in range(5):
        loss = model(input_ids=IDS, labels=IDS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_adapters_are_saved_loaded_and_merged(tmp_path):
    model = adapted(FAMILY["bayesian_layer+attention"])
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "lora_" in key:
                p.normal_(0, 0.1)
        wanted = model.eval()(input_ids=IDS).logits
        model.save_pretrained(tmp_path)
        again = peft.PeftModel.from_pretrained(fresh_model(FAMILY["bayesian_layer+attention"]), tmp_path)
        assert torch.equal(again(input_ids=IDS).logits, wanted)
        greedy = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
        found = again.generate(input_ids=IDS, return_variance=True, **greedy)
        assert found.variances[0].shape == (2, 4, 2, 1)
        assert_close(again.merge_and_unload()(IDS).logits, wanted, 1e-4)


def test_peft_may_be_imported_after_the_model_was_made():
    """Its defaults then know nothing of us; what a user told PEFT stays."""
    known = peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    for told, adapters in ((None, 10), (["v_proj"], 2)):
        model = fresh_model()
        known.pop("memory_by_design", None)
        if told:
            known["memory_by_design"] = told
        found = peft.get_peft_model(model, peft.LoraConfig(r=2))
        assert sum("lora_A" in name for name, _ in found.named_parameters()) == adapters
    del known["memory_by_design"]
    model = fresh_model()
    model.add_adapter(peft.LoraConfig(r=2))  # Transformers' own way
    assert sum("lora_A" in name for name, _ in model.named_parameters()) == 10
