"""Perplexity by length, against the losses that Transformers itself gives."""

import copy
import math
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
)

from membydesign.data import token_files
from membydesign.data.text_files import TextFiles
from membydesign.data.token_files import pack
from membydesign.evaluation import perplexity as module
from membydesign.evaluation.perplexity import Perplexity, fastest_method, perplexity, perplexity_by_length, windows_of
from membydesign.evaluation.text import read_stream
from membydesign.testing import assert_close
from models.family import VOCABULARY, fresh_model, some_ids
from tiny_tokenizers import bytes_tokenizer, words_tokenizer

STREAM = some_ids(1000, seed=3)
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def rough(model):
    """With weights so large that no two tokens are equally likely."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture(scope="module")
def llama():
    return rough(LlamaForCausalLM(LlamaConfig(**SMALL)))


@torch.no_grad()
def own_loss(model, stream, length) -> float:
    """What the model says with `labels=`."""
    windows = stream[: len(stream) // length * length].view(-1, length)
    return model(input_ids=windows, labels=windows).loss.item()


@pytest.mark.parametrize("length", [2, 64, 1000])
@pytest.mark.parametrize("batch_size", [None, 3])
def test_it_is_transformers_own_loss(llama, length, batch_size):
    found = perplexity(llama, STREAM, length, batch_size=batch_size)
    wanted = own_loss(llama, STREAM, length)
    assert found.cross_entropy == pytest.approx(wanted, abs=1e-5)
    assert found.perplexity == pytest.approx(math.exp(wanted), rel=1e-5)
    assert (found.length, found.windows, found.tokens) == (length, 1000 // length, 1000 // length * (length - 1))


def test_ours_is_the_loss_of_its_own_forward():
    model = fresh_model(["bayesian_layer", "attention"])
    found = perplexity(model, STREAM, 50)
    assert found.cross_entropy == pytest.approx(own_loss(model, STREAM, 50), abs=1e-5)
    assert fastest_method(model, STREAM[None, :50]) is module.from_hidden_states


def test_logits_are_made_in_pieces(llama, monkeypatch):
    wanted = module.from_all_logits(llama, STREAM[None, :301])
    sizes = []
    real = module._losses
    monkeypatch.setattr(
        module, "_losses", lambda logits, targets: sizes.append(logits.numel()) or real(logits, targets)
    )
    monkeypatch.setattr(module, "LOGITS", 40 * VOCABULARY)
    for way in (module.from_hidden_states, module.from_kept_logits):
        sizes.clear()
        assert_close(way(llama, STREAM[None, :301]), wanted, 1e-5)
        assert max(sizes) <= 40 * VOCABULARY
        assert len(sizes) == 8
    batch = STREAM[:900].view(3, 300)
    assert_close(module.from_hidden_states(llama, batch), module.from_all_logits(llama, batch), 1e-5)


MODELS = {
    "gpt2": (GPT2Config, {"n_positions": 200, "n_embd": 16, "n_layer": 2, "n_head": 2}, module.from_hidden_states),
    "mamba": (MambaConfig, {}, module.from_hidden_states),
    "gemma2, which caps its logits": (
        Gemma2Config,
        {"final_logit_softcapping": 1.0, "head_dim": 8, "num_key_value_heads": 2},
        module.from_kept_logits,
    ),
    "cohere, which scales its logits": (CohereConfig, {"logit_scale": 0.1}, module.from_kept_logits),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_do_more_than_a_head(name):
    """Models bend their logits; the way that is chosen gives what the model gives."""
    make, options, way = MODELS[name]
    base = {k: v for k, v in SMALL.items() if k != "intermediate_size"} if name == "mamba" else SMALL
    model = rough(AutoModelForCausalLM.from_config(make(**{**base, **options})))
    assert fastest_method(model, STREAM[None, :100]) is way
    assert perplexity(model, STREAM, 100).cross_entropy == pytest.approx(own_loss(model, STREAM, 100), abs=1e-4)


class Plain(torch.nn.Module):
    """A model that is its own base, has no head to be asked for, and gives all logits or none."""

    def __init__(self, inner) -> None:
        super().__init__()
        self.inner = inner

    @property
    def base_model(self):
        return self

    def get_input_embeddings(self):
        return self.inner.get_input_embeddings()

    def get_output_embeddings(self):
        return None

    def forward(self, input_ids, use_cache):
        return self.inner(input_ids=input_ids, use_cache=use_cache)


def test_a_model_that_gives_nothing_but_logits(llama):
    assert fastest_method(Plain(llama), STREAM[None, :50]) is module.from_all_logits
    assert perplexity(Plain(llama), STREAM, 50).cross_entropy == pytest.approx(own_loss(llama, STREAM, 50), abs=1e-5)


def test_windows_are_side_by_side():
    assert windows_of(torch.arange(10), 3).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_several_lengths(llama):
    steps = []
    found = perplexity_by_length(llama, STREAM, [10, 30], batch_size=20, progress=lambda *at: steps.append(at))
    assert [one.length for one in found] == [10, 30]
    assert found[1] == perplexity(llama, STREAM, 30)
    assert steps == [(20, 100), (40, 100), (60, 100), (80, 100), (100, 100), (20, 33), (33, 33)]
    assert found[0].as_dict() == {
        "length": 10,
        "perplexity": math.exp(found[0].cross_entropy),
        "cross_entropy": found[0].cross_entropy,
        "tokens": 900,
        "windows": 100,
    }


def test_half_precision_is_close(llama):
    half = copy.deepcopy(llama).bfloat16()
    assert fastest_method(half, STREAM[None, :100]) is module.from_hidden_states
    assert perplexity(half, STREAM, 100).cross_entropy == pytest.approx(own_loss(llama, STREAM, 100), rel=0.05)


def test_a_hopeless_model_has_infinite_perplexity():
    assert Perplexity(10, 1, 1000.0).perplexity == math.inf


@pytest.mark.parametrize(
    ("tokens", "length", "message"),
    [
        (STREAM, 1001, "length: expected at most the 1000 tokens of the text, got 1001"),
        (STREAM, 1, "length: expected a whole number of at least 2, got 1"),
        (STREAM[None], 10, "tokens: expected a stream, shape"),
        (STREAM + VOCABULARY, 10, f"tokenizer: expected tokens below the model's vocabulary size {VOCABULARY}"),
    ],
)
def test_mistakes(llama, tokens, length, message):
    with pytest.raises(ValueError, match=message):
        perplexity(llama, tokens, length)


# Text


def test_text_from_files(tmp_path):
    (tmp_path / "b.tokens").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "c.py").write_text("not read")
    words = words_tokenizer()
    first, second = words(["first", "second"])["input_ids"]
    assert read_stream(tmp_path, words).tolist() == [0, *first, 0, *second]
    assert read_stream(tmp_path, words, len(first) + 2).tolist() == [0, *first, 0]
    assert read_stream(tmp_path / "a.txt", words).tolist() == [0, *first]
    assert len(read_stream("embedded", words)) > 100_000


@pytest.mark.parametrize("begin", [False, True])
def test_text_is_what_training_packs(begin, tmp_path, monkeypatch):
    """Also articles of WikiText, documents that are tokenised in pieces, and a tokenizer that puts BOS itself."""
    folder, words = tmp_path / "text", words_tokenizer(begin)
    folder.mkdir()
    (folder / "wiki.test.tokens").write_text(" \n = One = \n \n words of one \n \n = Two = \n \n words of two \n")
    (folder / "long.txt").write_text("many words " * 500)
    whole = read_stream(folder, words)
    packed = pack(TextFiles(folder), words, tmp_path / "packed.safetensors")
    assert packed.documents == 3
    assert torch.equal(whole, packed.read(0, len(packed)))
    given, encode = [], token_files.encoder(words)
    monkeypatch.setattr(token_files.cut_long, "__defaults__", (200,))
    monkeypatch.setattr(token_files, "encoder", lambda _: lambda texts: given.extend(texts) or encode(texts))
    assert torch.equal(read_stream(folder, words), whole)
    assert max(map(len, given)) <= 200


def test_texts_begin_with_the_token_that_ends_them_if_there_is_no_other(tmp_path):
    (tmp_path / "a.txt").write_text("ab")
    assert read_stream(tmp_path, bytes_tokenizer(eos_token="<end>")).tolist()[0] == 256
    with pytest.raises(ValueError, match="tokenizer: expected one with a BOS token"):
        read_stream(tmp_path, bytes_tokenizer())


def test_text_that_is_none(tmp_path):
    with pytest.raises(
        ValueError, match="text: expected 'embedded', hub:DATASET:CONFIG:SPLIT, a file or a folder, got no such path"
    ):
        read_stream(tmp_path / "nothing", words_tokenizer())
    with pytest.raises(ValueError, match=r"text: expected files \*.txt or"):
        read_stream(tmp_path, words_tokenizer())
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(ValueError, match="text: expected text in"):
        read_stream(tmp_path, words_tokenizer())
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="text: expected text in UTF-8"):
        read_stream(tmp_path, words_tokenizer())
