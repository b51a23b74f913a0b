"""Numbers that are not finite stop a model with the layer that made them, and the likely cause."""

import pytest
import torch

from membydesign.errors import FilterError, NonFiniteError
from models.family import fresh_model, some_ids

IDS = some_ids(2, 9)
HYBRID = ["bayesian_layer", "attention", "rwkv7"]
NAN = float("nan")


@pytest.mark.parametrize("layers", [HYBRID, ["attention"] * 2, ["bayesian_layer"] * 2], ids=str)
def test_adam_on_float16_weights_is_named(layers):
    """Its eps of 1e-8 is zero in float16, so one step makes weights NaN."""
    model = fresh_model(layers).half().train()
    optimizer = torch.optim.Adam(model.parameters())
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    with pytest.raises(NonFiniteError, match=r"^the embeddings: .*embeddings\.weight .*float16.*bfloat16.*autocast"):
        model(IDS, labels=IDS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.embeddings.weight", "the embeddings"),
        ("model.layers.0.mixer.k_proj.weight", r"layer 0 \(bayesian_layer\)"),
        ("model.layers.0.mlp.up_proj.weight", r"layer 0 \(bayesian_layer\)"),
        ("model.layers.1.mixer.o_proj.weight", r"layer 1 \(attention\)"),
        ("model.layers.2.mixer.r_proj.weight", r"layer 2 \(rwkv7\)"),
        ("model.norm.weight", "the last norm"),
        ("lm_head.weight", "the logits"),
    ],
)
def test_bad_weights_are_named_with_their_layer(name, place, dtype):
    model = fresh_model(HYBRID).to(dtype)
    with torch.no_grad():
        model.get_parameter(name).view(-1)[3:].fill_(NAN)
    own = name.removeprefix("model.").split(".", 2)[-1] if "layers." in name else name.removeprefix("model.")
    hint = "bfloat16" if dtype == torch.float16 else "learning rate"
    for call in (lambda: model(IDS), lambda: model.generate(IDS, max_new_tokens=2, do_sample=False, pad_token_id=0)):
        with pytest.raises(NonFiniteError, match=rf"^{place}: .*{own} .*{hint}"):
            call()


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_an_overflow_is_named_with_its_layer(layer):
    """Finite weights whose output float16 cannot hold."""
    model = fresh_model(HYBRID).half()
    with torch.no_grad():
        model.model.layers[layer].mlp.down_proj.weight.fill_(6e4)
    with pytest.raises(NonFiniteError, match=rf"^layer {layer} \({HYBRID[layer]}\): .*finite.*float16.*bfloat16"):
        model(IDS)


def test_logits_that_overflow_are_named():
    model = fresh_model().half()
    with torch.no_grad():
        model.lm_head.weight.fill_(6e4)
    with pytest.raises(NonFiniteError, match=r"^the logits: .*float16"):
        model(IDS)


def test_an_error_of_a_filter_names_the_layer():
    model = fresh_model(["attention", "bayesian_layer"])
    with torch.no_grad():
        model.model.layers[1].mixer.v_proj.weight.fill_(1e38)
    with pytest.raises(FilterError, match=r"^layer 1 \(bayesian_layer\): "):
        model(IDS)


def test_bad_embeddings_are_the_callers():
    model = fresh_model(["attention"])
    embedded = model.get_input_embeddings()(IDS).detach().clone()
    embedded[1, 4, 2] = NAN
    with pytest.raises(ValueError, match=r"^inputs_embeds: expected finite values, got NaN or infinity"):
        model(inputs_embeds=embedded)


def test_padding_may_hold_anything():
    model, mask = fresh_model(["attention"]), torch.ones_like(IDS)
    mask[1, :4] = 0
    embedded = model.get_input_embeddings()(IDS).detach().clone()
    embedded[1, :4] = NAN
    assert torch.isfinite(model(inputs_embeds=embedded, attention_mask=mask).logits).all()


def test_a_device_is_waited_for_once(monkeypatch):
    """As on a GPU, where values are read together at the end: the same words, from one read."""
    from membydesign.models.finite import FiniteCheck

    class Elsewhere(FiniteCheck):
        at_once = ()

    model = fresh_model(HYBRID)
    check = Elsewhere()
    good, bad = torch.ones(2, 3), torch.tensor([1.0, NAN])
    check.see(good, "the embeddings", model.model.embeddings)
    check.see(bad, "layer 0 (attention)", model.model.layers[0])
    check.see(bad, "layer 1 (attention)", model.model.layers[1])
    with pytest.raises(NonFiniteError, match=r"^layer 0 \(attention\): "):
        check.read()
    fine, reads = Elsewhere(), []
    for name in ("tolist", "item", "__bool__"):
        read = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda x, read=read: (reads.append(x), read(x))[1])
    for place in ("the embeddings", "layer 0 (attention)"):
        fine.see(good, place, model.model.embeddings)
    assert reads == []
    fine.read()
    assert len(reads) == 1


def test_nothing_to_check():
    """An empty selection of logits is no reason to fail."""
    model = fresh_model(HYBRID)
    assert model(IDS, logits_to_keep=torch.empty(0, dtype=torch.long)).logits.shape[1] == 0
