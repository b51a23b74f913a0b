"""Generation in all its forms, and what a cache can do."""

import copy

import pytest
import torch
import transformers
from packaging.version import Version
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, pipeline, set_seed

from membydesign.models import MemoryCache
from membydesign.testing import assert_close
from models.family import VOCABULARY, cases, fresh_model, model_of, padded_batch, some_ids

PROMPT = some_ids(2, 6)


def generate(case: str, ids=PROMPT, tokens: int = 8, **way):
    way = {"attention_mask": torch.ones_like(ids), **way}
    way = {"do_sample": False, "max_new_tokens": tokens, "min_new_tokens": tokens, "pad_token_id": 0, **way}
    return model_of(case).generate(ids, **way)


@cases()
def test_beams_are_the_same_with_and_without_a_cache(case):
    beams = {"num_beams": 3, "num_return_sequences": 2, "return_dict_in_generate": True, "output_scores": True}
    found = generate(case, **beams)
    assert found.sequences.shape == (4, 14)
    without = generate(case, use_cache=False, **beams)
    assert without.sequences.equal(found.sequences)
    assert_close(without.sequences_scores, found.sequences_scores, 1e-4)


def test_the_score_of_a_beam_is_the_likelihood_of_its_tokens():
    found = generate(
        "bayesian_layer", num_beams=4, return_dict_in_generate=True, output_scores=True, length_penalty=0.0
    )
    with torch.no_grad():
        logits = model_of("bayesian_layer")(found.sequences).logits[:, 5:-1]
    likelihood = logits.log_softmax(-1).gather(-1, found.sequences[:, 6:, None]).sum((1, 2))
    assert_close(found.sequences_scores, likelihood, 1e-4)


def test_samples_follow_the_seed():
    def sampled(seed, **way):
        set_seed(seed)
        return generate("bayesian_layer", tokens=20, do_sample=True, top_k=20, **way)

    assert sampled(1).equal(sampled(1))
    assert sampled(1).equal(sampled(1, use_cache=False))
    assert not sampled(1).equal(sampled(2))
    several = sampled(3, num_return_sequences=3)
    assert several.shape == (6, 26)
    assert len(several.unique(dim=0)) == 6
    assert several[:, :6].equal(PROMPT.repeat_interleave(3, 0))


@cases()
def test_a_prompt_may_be_embeddings(case):
    model = model_of(case)
    embedded = model.get_input_embeddings()(PROMPT).detach()
    mask = torch.ones_like(PROMPT)
    greedy = {"do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8, "pad_token_id": 0}
    found = model.generate(inputs_embeds=embedded, attention_mask=mask, **greedy)
    assert found.equal(generate(case)[:, 6:])


def test_a_conversation_goes_on_from_the_cache_of_its_generation():
    first = generate("bayesian_layer", return_dict_in_generate=True)
    assert first.past_key_values.get_seq_length() == 13  # the last token was not read yet
    prompt = torch.cat((first.sequences, some_ids(2, 4, seed=5)), 1)
    kept = copy.deepcopy(first.past_key_values)
    wanted = generate("bayesian_layer", prompt)
    assert generate("bayesian_layer", prompt, past_key_values=first.past_key_values).equal(wanted)
    if Version(transformers.__version__) < Version("5.22"):
        with pytest.raises(ValueError, match=r"^prefill_chunk_size: expected None with a cache that holds tokens"):
            generate("bayesian_layer", prompt, past_key_values=kept, prefill_chunk_size=2)
        return
    assert generate("bayesian_layer", prompt, past_key_values=kept, prefill_chunk_size=2).equal(wanted)


def test_a_prompt_padded_beyond_its_longest_row_is_generated_from():
    """The first pieces of the prefill are padding in every row."""
    ids, mask = padded_batch([some_ids(3), some_ids(5, seed=2)])
    wide = torch.nn.functional.pad(ids, (11, 0), value=7)
    wide_mask = torch.nn.functional.pad(mask, (11, 0))
    for way in ({}, {"prefill_chunk_size": 4}, {"prefill_chunk_size": 1}):
        found = generate("bayesian_layer", wide, attention_mask=wide_mask, **way)[:, 16:]
        assert found.equal(generate("bayesian_layer", ids, attention_mask=mask)[:, 5:])


def test_generation_stops_at_the_end_token():
    free = generate("bayesian_layer", tokens=12)[:, 6:]
    end = int(free[0, 4])
    found = generate("bayesian_layer", tokens=12, min_new_tokens=0, eos_token_id=end)[:, 6:]
    for row, whole in zip(found, free, strict=True):
        stop = whole.tolist().index(end) + 1 if end in whole else len(whole)
        assert row[:stop].equal(whole[: min(stop, len(row))])
        assert not row[stop:].any()


@pytest.mark.parametrize("kind", ["static", "quantized", "dynamic"])
def test_other_kinds_of_cache_are_refused(kind):
    with pytest.raises(ValueError, match=f"^cache_implementation: expected None, .*got '{kind}'"):
        generate("bayesian_layer", cache_implementation=kind)


@cases()
def test_sequences_of_a_cache_are_chosen_and_repeated(case):
    model, ids, more = model_of(case), some_ids(3, 10), some_ids(1, 4, seed=8)
    with torch.no_grad():
        wanted = model(torch.cat((ids, more.expand(3, -1)), 1)).logits[:, 10:]
        for change, order in (
            (lambda memory: memory.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
            (lambda memory: memory.reorder_cache(torch.tensor([1, 1, 0])), [1, 1, 0]),
            (lambda memory: memory.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        ):
            memory = model(ids).past_key_values
            change(memory)
            assert memory.layers[0].batch_size == len(order)
            found = model(more.expand(len(order), -1), past_key_values=memory).logits
            assert_close(found, wanted[order], 1e-4)


def test_a_cache_is_forgotten_and_moved():
    model = model_of("bayesian_layer")
    with torch.no_grad():
        memory = model(PROMPT).past_key_values
        for layer in memory.layers:
            layer.offload()
            layer.prefetch()
        wanted = model(PROMPT).logits
        memory.reset()
        assert memory.get_seq_length() == 0
        assert_close(model(PROMPT, past_key_values=memory).logits, wanted, 1e-6)


@cases()
def test_a_cache_has_one_size_for_ever_unless_a_layer_says_that_it_grows(case):
    model = model_of(case)
    sizes = []
    with torch.no_grad():
        for n in (4, 40):
            layers = model(some_ids(1, n)).past_key_values.layers
            sizes.append([part.shape for layer in layers for _, part in layer.belief.parts()])
    declared = [mixer.state_size() for mixer in model.model.mixers()]
    assert (sizes[0] == sizes[1]) == (None not in declared)
    if None not in declared:
        assert sum(size.numel() for size in sizes[0]) == sum(size.total for size in declared)


def test_a_cache_that_generation_made_is_ours():
    found = generate("bayesian_layer", return_dict_in_generate=True, output_hidden_states=True, output_logits=True)
    assert isinstance(found.past_key_values, MemoryCache)
    assert len(found.hidden_states) == len(found.logits) == 8
    assert generate("bayesian_layer", return_dict_in_generate=True, use_cache=False).past_key_values is None


def test_the_text_generation_pipeline():
    words = {"<pad>": 0, "<unk>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", padding_side="left"
    )
    write = pipeline("text-generation", model=fresh_model(), tokenizer=fast, device="cpu")
    greedy = {"do_sample": False, "max_new_tokens": 5, "max_length": None}
    one, other = write("w5 w9 w30", **greedy), write("w4", **greedy)
    assert one[0]["generated_text"].startswith("w5 w9 w30")
    assert one[0]["generated_text"].count("w") == 8
    batch = write(["w5 w9 w30", "w4"], batch_size=2, **greedy)
    assert batch == [one, other]
