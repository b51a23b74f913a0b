"""What users of Transformers expect of a causal language model: outputs, embeddings, types, uncertainty, compiling."""

import warnings

import pytest
import torch
from torch import nn

from membydesign.layers import FilterLayer
from membydesign.models import MemoryForCausalLM
from membydesign.testing import assert_close
from models.family import FAMILY, VOCABULARY, cases, fresh_model, model_of, padded_batch, shaken, some_ids, tiny_config

IDS = some_ids(2, 11)


@cases()
def test_shapes_of_outputs(case):
    model = model_of(case)
    out = model(IDS, output_hidden_states=True, use_cache=True)
    assert out.logits.shape == (2, 11, VOCABULARY)
    assert out.loss is None
    assert [h.shape for h in out.hidden_states] == [(2, 11, 32)] * (len(FAMILY[case]) + 1)
    assert len(out.past_key_values) == len(FAMILY[case])
    logits, cache = model(IDS, return_dict=False)
    assert torch.equal(logits, out.logits)
    assert cache.get_seq_length() == 11
    assert model(IDS, use_cache=False).past_key_values is None
    assert model(IDS, use_cache=False).hidden_states is None


def test_the_last_hidden_state_gives_the_logits():
    model = model_of("bayesian_layer")
    out = model(IDS, output_hidden_states=True)
    assert torch.equal(model.lm_head(out.hidden_states[-1]), out.logits)
    base = model.model(IDS, output_hidden_states=True)
    assert base.last_hidden_state is base.hidden_states[-1]


@pytest.mark.parametrize("side", ["left", "right"])
def test_gradients_reach_the_hidden_states_of_a_padded_batch(side):
    ids, mask = padded_batch([some_ids(8), some_ids(3, seed=2)], side)
    out = model_of("bayesian_layer")(ids, mask, output_hidden_states=True)
    for state in out.hidden_states:
        state.retain_grad()
        assert not state[~mask.bool()].any()
    out.logits.square().sum().backward()
    for state in out.hidden_states:
        assert state.grad[mask.bool()].abs().amin(0).max() > 0
    assert all(h.grad[~mask.bool()].abs().max() == 0 for h in out.hidden_states[:-1])


def test_embeddings_instead_of_tokens():
    model = model_of("bayesian_layer")
    embedded = model.get_input_embeddings()(IDS)
    assert torch.equal(model(inputs_embeds=embedded).logits, model(IDS).logits)


@pytest.mark.parametrize("kept", [1, 4, torch.tensor([2, 5])], ids=str)
def test_logits_of_some_tokens_only(kept):
    model = model_of("bayesian_layer")
    wanted = model(IDS).logits[:, -kept:] if isinstance(kept, int) else model(IDS).logits[:, kept]
    assert_close(model(IDS, logits_to_keep=kept).logits, wanted, 1e-6)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", [VOCABULARY + 9, 40])
def test_the_vocabulary_can_be_resized(tied, size):
    model = fresh_model(tie_word_embeddings=tied)
    ids = some_ids(2, 7) % 40
    with torch.no_grad():
        before = model(ids).logits
    model.resize_token_embeddings(size, mean_resizing=False)
    assert model.config.vocab_size == model.get_input_embeddings().num_embeddings == size
    assert (model.lm_head.weight is model.model.embeddings.weight) == tied
    out = model(ids, labels=ids)
    assert out.logits.shape == (2, 7, size)
    known = min(size, VOCABULARY)
    assert_close(out.logits[..., :known], before[..., :known], 1e-6)
    out.loss.backward()
    assert model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0).shape == (2, 10)


def test_tied_weights_are_one():
    model = fresh_model(tie_word_embeddings=True)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert "lm_head.weight" not in dict(model.named_parameters())
    model.set_input_embeddings(nn.Embedding(VOCABULARY, 32))
    model.tie_weights()
    assert model.lm_head.weight is model.model.embeddings.weight


@cases()
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_uncertainty_of_every_layer(case, side):
    """The same numbers with and without padding, zeros on it, and gradients."""
    model, rows = fresh_model(FAMILY[case]), [some_ids(9), some_ids(4, seed=2)]
    ids, mask = (some_ids(2, 9), torch.ones(2, 9)) if side is None else padded_batch(rows, side)
    out = model(ids, mask, return_variance=True, return_evidence=True)
    total = out.logits.sum() * 0
    for mixer, variance, evidence in zip(model.model.mixers(), out.variances, out.log_evidences, strict=True):
        if not isinstance(mixer, FilterLayer):
            assert variance is None
            assert evidence is None
            continue
        assert (variance is not None) == mixer.design.has_variance
        for x in (variance, evidence):
            if x is not None:
                assert x.shape[:3] == (2, ids.shape[1], 2)
                assert torch.isfinite(x).all()
                assert not x[mask == 0].any()
                total = total + x.sum()
        if variance is not None:
            assert (variance[mask == 1] > 0).all()
    if total.requires_grad and any(x is not None for x in (*out.variances, *out.log_evidences)):
        total.backward()
        assert model.model.embeddings.weight.grad.abs().max() > 0
    if side is not None:
        alone = model(rows[1][None], return_variance=True, return_evidence=True)
        for found, wanted in zip(out.variances + out.log_evidences, alone.variances + alone.log_evidences, strict=True):
            assert (found is None) == (wanted is None)
            if found is not None:
                assert_close(found[1][mask[1].bool()], wanted[0], 1e-4)


def test_uncertainty_is_the_same_by_token():
    model = model_of("bayesian_layer")
    whole = model(IDS, return_variance=True, return_evidence=True)
    memory, pieces = None, []
    for t in range(11):
        out = model(
            IDS[:, t : t + 1], past_key_values=memory, use_cache=True, return_variance=True, return_evidence=True
        )
        memory = out.past_key_values
        pieces.append(out)
    for i in range(2):
        assert_close(torch.cat([p.variances[i] for p in pieces], 1), whole.variances[i], 1e-4)
        assert_close(torch.cat([p.log_evidences[i] for p in pieces], 1), whole.log_evidences[i], 1e-4)
    assert model(IDS).variances is None
    assert model(IDS).log_evidences is None


@cases()
def test_half_precision_is_close_and_generates(case):
    model = fresh_model(FAMILY[case])
    wide = model(IDS).logits
    half = model.bfloat16()
    out = half(IDS)
    assert out.logits.dtype == torch.bfloat16
    assert (out.logits.float() - wide).abs().mean() < 0.1 * wide.std()
    ids, mask = padded_batch([some_ids(5), some_ids(2, seed=2)])
    found = half.generate(ids, attention_mask=mask, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
    assert found.shape == (2, 11)


@cases()
def test_autocast_is_close_and_has_gradients(case):
    model = fresh_model(FAMILY[case]).train()
    with torch.no_grad():
        wide = model(IDS, labels=IDS)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(IDS, labels=IDS)
    assert (out.logits.float() - wide.logits).abs().mean() < 0.1 * wide.logits.std()
    assert_close(out.loss.detach().float(), wide.loss, 0.05)
    out.loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        memory = model(IDS, use_cache=True).past_key_values
        assert torch.isfinite(model(IDS[:, :1], past_key_values=memory).logits).all()


def test_double_precision_stays_double():
    model = fresh_model().double()
    assert model(IDS).logits.dtype == torch.float64
    assert_close(model(IDS).logits.float(), model_of("bayesian_layer")(IDS).logits, 1e-4)


def compiled(model, backend: str, **way):
    torch._dynamo.reset()
    return torch.compile(model, backend=backend, **way)


def assert_compiled_trains_as_eager(layers: list[str], backend: str):
    eager, other = (fresh_model(layers).train() for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's compiler about itself
        fast = compiled(other, backend, fullgraph=True)
        for ids in (IDS, some_ids(2, 11, seed=3)):
            wanted, found = eager(IDS, labels=ids), fast(IDS, labels=ids)
            assert_close(found.logits, wanted.logits, 1e-4)
            assert_close(found.loss, wanted.loss, 1e-4)
            wanted.loss.backward()
            found.loss.backward()
    for (name, p), q in zip(eager.named_parameters(), other.parameters(), strict=True):
        assert_close(q.grad, p.grad, 1e-3, name)


@pytest.mark.slow
def test_a_compiled_training_step_is_the_eager_one():
    assert_compiled_trains_as_eager(["bayesian_layer", "gated_deltanet_style"], "aot_eager")


@pytest.mark.slow
@cases()
def test_compiled_training_steps_are_the_eager_ones(case):
    assert_compiled_trains_as_eager(FAMILY[case], "aot_eager")


@pytest.mark.slow
def test_a_training_step_compiled_by_inductor_is_the_eager_one():
    assert_compiled_trains_as_eager(["bayesian_layer", "gated_deltanet_style"], "inductor")


@pytest.mark.slow
def test_compiled_code_honours_masks_and_positions():
    """They depend on values, so the graph is cut there; the result is the same."""
    model = model_of("bayesian_layer")
    ids, mask = padded_batch([some_ids(8), some_ids(3, seed=2)])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0]])
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        fast = compiled(model, "eager")
        assert_close(fast(ids, mask).logits, model(ids, mask).logits, 1e-4)
        packed = model(ids[:1], position_ids=positions).logits
        assert_close(fast(ids[:1], position_ids=positions).logits, packed, 1e-4)
        assert not torch.allclose(packed, model(ids[:1]).logits)
        memory, other = model(ids).past_key_values, model(ids).past_key_values
        found = fast(ids[:, :1], past_key_values=memory).logits
        assert_close(found, model(ids[:, :1], past_key_values=other).logits, 1e-4)


def test_sizes_of_layers_can_differ():
    options = {"bayesian_layer": {"num_heads": 4, "head_dim": 8}, "gla_style": {"value_dim": 12}}
    config = tiny_config(["bayesian_layer", "gla_style", "bayesian_layer"], layer_options=options, intermediate_size=0)
    model = shaken(MemoryForCausalLM(config))
    assert [(m.num_heads, m.key_dim, m.value_dim) for m in model.model.mixers()] == [(4, 8, 8), (2, 16, 12), (4, 8, 8)]
    assert model(IDS).logits.shape == (2, 11, VOCABULARY)
    assert not any("mlp" in name for name, _ in model.named_parameters())


def test_tuples_if_the_configuration_says_so():
    model, ids = model_of("bayesian_layer"), some_ids(1, 5)
    wanted = model(ids).logits
    model.config.return_dict = False
    try:
        assert torch.equal(model(ids)[0], wanted)
    finally:
        model.config.return_dict = True
