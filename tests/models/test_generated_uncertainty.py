"""`generate(return_variance=True)`: how sure each layer was where it chose a token."""

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, set_seed

from membydesign.testing import assert_close
from models.family import fresh_model, model_of, padded_batch, some_ids

HYBRID = "bayesian_layer+attention"
PROMPT = some_ids(2, 6)
BOTH: dict[str, Any] = {"return_variance": True, "return_evidence": True, "return_dict_in_generate": True}


def generate(ids=PROMPT, case: str = HYBRID, tokens: int = 7, **way):
    way = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "do_sample": False, **way}
    set_seed(0)
    return model_of(case).generate(ids, max_new_tokens=tokens, **way)


def assert_those_of_the_whole(found, rows, case: str = HYBRID):
    """As the model reports for whole sequences, where each generated token was chosen: one place before it."""
    n = found.variances[0].shape[1]
    for i, row in enumerate(rows):
        with torch.no_grad():
            whole = model_of(case)(row[None], return_variance=True, return_evidence=True)
        place = slice(len(row) - 1 - n, len(row) - 1)
        for name in ("variances", "log_evidences"):
            for got, wanted in zip(getattr(found, name), getattr(whole, name), strict=True):
                assert (got is None) == (wanted is None)
                if got is not None:
                    assert_close(got[i], wanted[0, place], 1e-4, name)


@pytest.mark.parametrize(
    "way",
    [
        {},
        {"use_cache": False},
        {"prefill_chunk_size": 4},
        {"do_sample": True, "num_return_sequences": 2, "top_k": 20},
        {"num_beams": 3},
        {"num_beams": 3, "do_sample": True, "num_return_sequences": 2, "output_scores": True},
    ],
    ids=str,
)
def test_each_generated_token_has_the_uncertainty_of_its_choice(way):
    found = generate(**BOTH, **way)
    assert found.sequences.equal(generate(**way))
    assert len(found.variances) == len(found.log_evidences) == 2
    rows = len(found.sequences)
    assert found.variances[0].shape == (rows, 7, 2, 1)
    assert found.log_evidences[0].shape == (rows, 7, 2)
    assert found.variances[1] is None  # attention knows none
    assert found.variances[0].unique().numel() > 7 * rows
    assert_those_of_the_whole(found, found.sequences)


def test_padded_prompts_and_embeddings():
    prompts = [some_ids(6), some_ids(3, seed=2)]
    ids, mask = padded_batch(prompts)
    found = generate(ids, attention_mask=mask, **BOTH)
    assert_those_of_the_whole(found, [torch.cat((p, s[6:])) for p, s in zip(prompts, found.sequences, strict=True)])
    embedded = model_of(HYBRID).get_input_embeddings()(PROMPT).detach()
    found = model_of(HYBRID).generate(inputs_embeds=embedded, max_new_tokens=4, do_sample=False, **BOTH)
    assert_those_of_the_whole(found, torch.cat((PROMPT, found.sequences), 1))


def test_beams_that_end_early_have_zeros_after_their_end():
    free = generate(num_beams=3)[:, 6:]
    end = int(free[0, 3])
    found = generate(num_beams=3, eos_token_id=end, length_penalty=-5.0, **BOTH)
    assert found.variances[0].shape[1] == found.beam_indices.shape[1] == found.sequences.shape[1] - 6
    assert found.variances[0][found.beam_indices >= 0].min() > 0
    assert not found.variances[0][found.beam_indices < 0].any()


def test_only_what_was_asked_for_is_returned():
    found = generate(return_dict_in_generate=True, return_variance=True)
    assert found.log_evidences is None
    assert found.past_key_values.get_seq_length() == 12
    assert "variances" not in generate(return_dict_in_generate=True)
    config = GenerationConfig(max_new_tokens=3, return_dict_in_generate=True, do_sample=False, pad_token_id=0)
    assert model_of(HYBRID).generate(PROMPT, config, return_variance=True).variances[0].shape[1] == 3


@pytest.mark.parametrize("name", ["return_variance", "return_evidence"])
@pytest.mark.parametrize("way", [{}, {"num_beams": 2}], ids=str)
def test_plain_tokens_have_no_place_for_it(name, way):
    with pytest.raises(ValueError, match=f"^{name}: expected return_dict_in_generate=True with it, .*got False"):
        generate(**{name: True}, **way)
    generate(**{name: False}, **way)


def test_a_design_without_a_variance_gives_none():
    model = fresh_model("gla_style")
    found = model.generate(PROMPT, max_new_tokens=2, do_sample=False, pad_token_id=0, **BOTH)
    assert found.variances == (None, None)
    assert found.log_evidences[0].shape == (2, 2, 2)
