"""Ways to generate that a memory does not have are refused before anything runs, in words that say what to do."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from models.family import VOCABULARY, fresh_model, some_ids

PROMPT = some_ids(1, 6)
ONES = torch.ones_like(PROMPT)


@pytest.fixture
def model():
    """A model that cannot run: whoever calls it fails."""
    found = fresh_model()

    def forward(*args, **kwargs):
        raise AssertionError("the model ran")

    found.model.forward = forward
    return found


def refused(model, wanted: str, **way) -> None:
    with pytest.raises(ValueError, match=wanted):
        model.generate(PROMPT, attention_mask=ONES, max_new_tokens=4, pad_token_id=0, **way)


TAKEN_BACK = "since drafted tokens may have to be taken back, and a belief cannot forget its last tokens"


@pytest.mark.parametrize("do_sample", [False, True])
def test_assisted_generation_is_refused(model, do_sample):
    lookup = rf"^prompt_lookup_num_tokens: expected None, {TAKEN_BACK}, got 3"
    refused(model, lookup, prompt_lookup_num_tokens=3, do_sample=do_sample)
    refused(model, rf"^assistant_early_exit: expected None, {TAKEN_BACK}, got 1", assistant_early_exit=1)
    assisted = rf"^assistant_model: expected None, {TAKEN_BACK}, got MemoryForCausalLM"
    refused(model, assisted, assistant_model=fresh_model(), do_sample=do_sample)


def test_a_memory_cannot_draft_for_another_model(model):
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    other = LlamaForCausalLM(config).eval()
    wanted = "^assistant_model: expected a model whose cache can be cropped, .*got MemoryForCausalLM"
    refused(other, wanted, assistant_model=model, do_sample=False)


@pytest.mark.parametrize("trust", [False, True])
def test_contrastive_search_is_refused(model, trust):
    wanted = "^penalty_alpha: expected None, since .*a belief cannot forget its last tokens, got 0.6"
    refused(model, wanted, penalty_alpha=0.6, top_k=4, trust_remote_code=trust)


def test_attention_matrices_are_refused(model):
    wanted = "^output_attentions: expected False, .*got True"
    refused(model, wanted, output_attentions=True, return_dict_in_generate=True)
    with pytest.raises(ValueError, match=wanted):
        fresh_model()(PROMPT, output_attentions=True)


def test_continuous_batching_is_refused(model):
    wanted = r"^generate_batch: .*keys and values.*generate\(.*padding_side='left'"
    with pytest.raises(NotImplementedError, match=wanted):
        model.generate_batch([[1, 2, 3], [4]], max_new_tokens=2)
    with pytest.raises(NotImplementedError, match=wanted):
        model.init_continuous_batching()
    with pytest.raises(NotImplementedError, match=wanted), model.continuous_batching_context_manager():
        pass
    with pytest.raises(NotImplementedError, match=wanted):
        model.generate(PROMPT, cache_implementation="paged", max_new_tokens=2)
