"""Layers and models of the designs in examples/designs/: training, generation, packing, saving."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

import copy
import subprocess
import sys

import pytest
import torch

import membydesign as mbd
import membydesign.layers
import membydesign.models
from examples.own_designs import DESIGNS, FOLDER, each_design
from membydesign.models import MemoryCache, MemoryConfig, MemoryForCausalLM
from membydesign.testing import assert_close


@each_design
def test_it_is_described(name):
    text = str(DESIGNS[name].describe())
    assert DESIGNS[name].exactness in text
    assert all(parameter.name in text for parameter in DESIGNS[name].step_parameters)
    assert DESIGNS[name].describe().latex.startswith("\\begin{aligned}")


@each_design
def test_a_layer_of_it_decodes_packs_and_learns(name):
    torch.manual_seed(0)
    layer = mbd.MemoryLayer(DESIGNS[name], hidden_size=16, num_heads=2, head_dim=8).double()
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    y, belief = layer(x)
    assert sum(part[0].numel() for _, part in belief.parts()) == layer.state_size().total
    _, partial = layer(x[:, :4])
    rest = []
    for t in range(4, 9):
        y_t, partial = layer(x[:, t : t + 1], partial)
        rest.append(y_t)
    assert_close(torch.cat(rest, 1), y[:, 4:], 1e-10)
    packed, _ = layer(torch.cat([x[:1], x[1:, :5]], 1), cu_seqlens=torch.tensor([0, 9, 14]))
    assert_close(packed[:, :9], y[:1], 1e-10)
    assert_close(packed[:, 9:], y[1:, :5], 1e-10)
    y.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


VOCABULARY = 31


def tiny_config(name: str, **options) -> MemoryConfig:
    """The layer between two built-in ones."""
    layers = ["bayesian_layer", name, "gated_deltanet_style"]
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "pad_token_id": 0}
    return MemoryConfig(layers=layers, **sizes, **options)


def tiny_model(name: str, **options):
    """Weights moved off their starting values, so that no two tokens are equally likely."""
    torch.manual_seed(0)
    model = MemoryForCausalLM(tiny_config(name, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return model.eval()


def some_ids(*shape: int, seed: int = 1):
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


@each_design
def test_a_model_with_it_trains(name):
    torch.manual_seed(0)
    model = MemoryForCausalLM(tiny_config(name))
    assert model.model.layers[1].mixer.design == DESIGNS[name]
    ids = some_ids(4, 12)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(15):
        loss = model(input_ids=ids, labels=ids).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@each_design
def test_generation_is_the_same_with_and_without_a_cache(name):
    model, ids = tiny_model(name), some_ids(2, 6)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert model.generate(ids, **options).equal(model.generate(ids, use_cache=False, **options))
    beams = {
        **options,
        "num_beams": 3,
        "num_return_sequences": 2,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    ours, reference = model.generate(ids, **beams), model.generate(ids, use_cache=False, **beams)
    assert ours.sequences.equal(reference.sequences)
    assert_close(ours.sequences_scores, reference.sequences_scores, 1e-4)


@each_design
def test_padding_and_packing_equal_separate_sequences(name):
    model = tiny_model(name)
    rows = [some_ids(n, seed=n) for n in (5, 9, 2)]
    alone = [model(input_ids=row[None]).logits[0] for row in rows]
    for side in ("left", "right"):
        ids, mask = torch.full((3, 9), 7), torch.zeros(3, 9, dtype=torch.long)
        for i, row in enumerate(rows):
            place = slice(9 - len(row), 9) if side == "left" else slice(0, len(row))
            ids[i, place], mask[i, place] = row, 1
        logits = model(input_ids=ids, attention_mask=mask).logits
        for i in range(3):
            assert_close(logits[i, mask[i].bool()], alone[i], 1e-5)
    packed = model(input_ids=torch.cat(rows)[None], cu_seqlens=torch.tensor([0, 5, 14, 16])).logits[0]
    assert_close(packed, torch.cat(alone), 1e-5)


@each_design
def test_gradient_checkpointing_changes_no_gradient(name):
    ids, gradients = some_ids(2, 10), []
    for checkpointing in (False, True):
        model = tiny_model(name).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    assert all(gradient.equal(gradients[1][n]) for n, gradient in gradients[0].items())


@each_design
def test_saved_models_and_caches_come_back(name, tmp_path):
    model, ids = tiny_model(name), some_ids(2, 8)
    model.save_pretrained(tmp_path / "model")
    again = MemoryForCausalLM.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        assert again(input_ids=ids).logits.equal(model(input_ids=ids).logits)
        cache = model(input_ids=ids, use_cache=True).past_key_values
        cache.save(tmp_path / "cache.safetensors")
        loaded = MemoryCache.load(tmp_path / "cache.safetensors")
        assert loaded.get_seq_length() == 8
        following = some_ids(2, 5, seed=3)
        for n in (1, 5):  # a decoding step, and a sequence
            logits = model(input_ids=following[:, :n], past_key_values=copy.deepcopy(cache)).logits
            assert model(input_ids=following[:, :n], past_key_values=copy.deepcopy(loaded)).logits.equal(logits)


SETUP = """
import sys

sys.path.insert(0, {folder!r})
import membydesign as mbd
from block_diagonal import BlockDiagonal
from count_memory import CountMemory
from rwkv7_transition import RWKV7Transition
from student_t_write import StudentTWrite

mbd.layers.register("my_student_t", mbd.DesignModel(mbd.DiagonalDecay(), StudentTWrite(nu=4), mbd.Dense()))
mbd.layers.register("my_blocks", mbd.DesignModel(mbd.DiagonalDecay(), mbd.ObserveMemory(), BlockDiagonal(size=2)))
mbd.layers.register("my_rwkv7", mbd.DesignModel(RWKV7Transition(), mbd.LatentInput(), mbd.MeanOnly()))
mbd.layers.register("my_counts", CountMemory())
"""

SAVE = """
import my_memories
from membydesign.models import MemoryConfig, MemoryForCausalLM

for name in ("my_student_t", "my_blocks", "my_rwkv7", "my_counts"):
    config = MemoryConfig(vocab_size=11, hidden_size=16, num_heads=2, layers=["bayesian_layer", name])
    MemoryForCausalLM(config).save_pretrained(name)
"""

LOAD = """
import sys
from transformers import AutoModelForCausalLM
import membydesign.models

names = ("my_student_t", "my_blocks", "my_rwkv7", "my_counts")
for name in names:
    try:
        AutoModelForCausalLM.from_pretrained(name)
    except ValueError as error:
        assert f"got {name!r}; import my_memories first" in str(error), error
    else:
        raise AssertionError("a layer that nobody registered was made")
import my_memories

for name in names:
    assert AutoModelForCausalLM.from_pretrained(name).config.layers == ["bayesian_layer", name]
"""


@pytest.mark.slow
def test_loading_names_the_module_to_import(tmp_path):
    (tmp_path / "my_memories.py").write_text(SETUP.format(folder=str(FOLDER)))
    for program in (SAVE, LOAD):
        (tmp_path / "program.py").write_text(program)
        done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
