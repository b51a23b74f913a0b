"""Models with the catalogue's designs beyond the paper: unknown scales, robust writes, structured covariances."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false

import copy

import pytest
import torch

from membydesign.models import MemoryCache, MemoryConfig, MemoryForCausalLM
from membydesign.testing import assert_close

VOCABULARY = 31
NAMES = ["partial_reset", "discounted", "unknown_scale", "robust_writes", "block_diagonal", "low_rank"]
each = pytest.mark.parametrize("name", NAMES)


def config(name: str) -> MemoryConfig:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "pad_token_id": 0}
    return MemoryConfig(layers=["bayesian_layer", name], **sizes)


def model_of(name: str):
    """Weights moved off their starting values, so that no two tokens are equally likely."""
    torch.manual_seed(0)
    model = MemoryForCausalLM(config(name))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return model.eval()


def some_ids(*shape: int, seed: int = 1):
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


@each
def test_it_trains(name):
    torch.manual_seed(0)
    model, ids, losses = MemoryForCausalLM(config(name)), some_ids(4, 12), []
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(15):
        loss = model(input_ids=ids, labels=ids).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@each
def test_generation_is_the_same_with_and_without_a_cache(name):
    model, ids = model_of(name), some_ids(2, 6)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert model.generate(ids, **options).equal(model.generate(ids, use_cache=False, **options))
    assert model.generate(ids, num_beams=3, **options).equal(
        model.generate(ids, num_beams=3, use_cache=False, **options)
    )


@each
def test_padding_equals_separate_sequences(name):
    model = model_of(name)
    rows = [some_ids(n, seed=n) for n in (5, 9)]
    alone = [model(input_ids=row[None]).logits[0] for row in rows]
    ids, mask = torch.full((2, 9), 7), torch.zeros(2, 9, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, 9 - len(row) :], mask[i, 9 - len(row) :] = row, 1
    logits = model(input_ids=ids, attention_mask=mask).logits
    for i in range(2):
        assert_close(logits[i, mask[i].bool()], alone[i], 1e-5)


@each
def test_saved_models_and_caches_come_back(name, tmp_path):
    model, ids = model_of(name), some_ids(2, 8)
    model.save_pretrained(tmp_path / "model")
    again = MemoryForCausalLM.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        assert again(input_ids=ids).logits.equal(model(input_ids=ids).logits)
        cache = model(input_ids=ids, use_cache=True).past_key_values
        cache.save(tmp_path / "cache.safetensors")
        loaded = MemoryCache.load(tmp_path / "cache.safetensors")
        following = some_ids(2, 5, seed=3)
        for n in (1, 5):  # a decoding step, and a sequence
            logits = model(input_ids=following[:, :n], past_key_values=copy.deepcopy(cache)).logits
            assert model(input_ids=following[:, :n], past_key_values=copy.deepcopy(loaded)).logits.equal(logits)
