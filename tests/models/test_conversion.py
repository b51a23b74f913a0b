"""Gated DeltaNets of flash-linear-attention load and compute what its equations say, or are refused."""

import json
import math
import pickle

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import fla_checkpoints as fla
from membydesign.models import MemoryForCausalLM, convert_fla, load_fla
from membydesign.models.checkpoint import StoredTensor
from membydesign.models.conversion import match, their_name
from membydesign.models.fla_config import memory_config

TOKENS = torch.randint(31, (40,), generator=torch.Generator().manual_seed(1)).tolist()
UNTIED = {**fla.SMALL, "tie_word_embeddings": False}
VARIANTS = {
    "as released": fla.SMALL,
    "untied": UNTIED,
    "wide values": {**fla.SMALL, "expand_v": 2.0, "head_dim": 6},
    "no gate": {**fla.SMALL, "use_gate": False},
    "no convolution": {**fla.SMALL, "use_short_conv": False},
    "longer convolution, other epsilon": {**fla.SMALL, "conv_size": 6, "norm_eps": 1e-2},
    "grouped values": {**fla.SMALL, "num_v_heads": 6},
    "hidden_ratio": {**fla.SMALL, "intermediate_size": None, "hidden_ratio": 3},
}


def logits_of(model, tokens=TOKENS):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("december", [True, False], ids=["december 2024", "today"])
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_it_computes_what_their_equations_say(options, december, tmp_path):
    options = options if december else {**fla.TODAY, **options}
    weights = fla.tensors(options, december=december)
    model = load_fla(fla.write(tmp_path, options, weights))
    assert not model.training
    expected = fla.logits(TOKENS, options, weights)
    torch.testing.assert_close(logits_of(model), expected, rtol=1e-9, atol=1e-9)
    single = load_fla(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(logits_of(single), expected.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("december", [True, False], ids=["december 2024", "today"])
def test_it_decodes_token_by_token(december, tmp_path):
    weights = fla.tensors(fla.SMALL, december=december)
    model = load_fla(fla.write(tmp_path, fla.SMALL, weights))
    cache, rows = None, []
    for token in TOKENS:
        with torch.no_grad():
            out = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        rows.append(out.logits[0, 0])
    torch.testing.assert_close(torch.stack(rows), fla.logits(TOKENS, fla.SMALL, weights), rtol=1e-9, atol=1e-9)


def test_parts_that_are_easily_confused_matter():
    """The reference would notice gate and up, or queries and keys, changing places."""
    weights = fla.tensors(fla.SMALL, december=True)
    expected = fla.logits(TOKENS, fla.SMALL, weights)
    for i in range(2):
        at = f"model.layers.{i}"
        swapped = dict(weights)
        swapped[f"{at}.mlp.gate_proj.weight"] = weights[f"{at}.mlp.gate_proj.weight"].roll(7, 0)
        assert (fla.logits(TOKENS, fla.SMALL, swapped) - expected).abs().max() > 0.1
        for name in ("attn.A_log", "attn.dt_bias", "attn.o_norm.weight", "attn.b_proj.weight", "attn.k_conv1d.weight"):
            changed = {**weights, f"{at}.{name}": weights[f"{at}.{name}"] + 0.5}
            assert (fla.logits(TOKENS, fla.SMALL, changed) - expected).abs().max() > 1e-3, name
        changed = {**weights, f"{at}.attn.D": weights[f"{at}.attn.D"] + 0.5}
        assert torch.equal(fla.logits(TOKENS, fla.SMALL, changed), expected)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("options", [fla.SMALL, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("december", [True, False], ids=["december 2024", "today"])
def test_saved_as_ours_it_is_the_same(december, options, shards, tmp_path):
    weights = fla.tensors(options, december=december, dtype=torch.float32)
    model = load_fla(fla.write(tmp_path / "theirs", options, weights, shards))
    model.save_pretrained(tmp_path / "ours")
    for kind in (MemoryForCausalLM, AutoModelForCausalLM):
        again = kind.from_pretrained(tmp_path / "ours")
        assert torch.equal(logits_of(again), logits_of(model))
    with safe_open(tmp_path / "ours" / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert {their_name(name) for name in names} == set(fla.shapes(options, december=False))
    assert (model.lm_head.weight is model.model.embeddings.weight) == options["tie_word_embeddings"]


def test_other_names_of_the_file_and_no_trace_of_it_afterwards(tmp_path):
    weights = fla.tensors(fla.SMALL, december=True)
    fla.write(tmp_path, fla.SMALL, weights)
    file = (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    model = load_fla(tmp_path)
    before = logits_of(model)
    file.write_bytes(b"\0" * file.stat().st_size)  # the parameters are the model's own
    assert torch.equal(logits_of(model), before)


def test_the_december_checkpoint_at_full_size():
    """435 tensors, 399,531,296 elements; 366,763,296 if the tied head is not counted; 366,763,200 that are read.

    The difference of the last two is attn.D: one number for each of 4 heads in each of 24 layers.
    """
    stored = fla.shapes(fla.RELEASED, december=True)
    elements = sum(map(math.prod, stored.values()))
    assert (len(stored), elements) == (435, 399_531_296)
    head, unread = 32_000 * 1024, 24 * 4
    assert elements - head == 366_763_296

    config = memory_config(fla.RELEASED)
    with torch.device("meta"):
        model = MemoryForCausalLM(config)
    parameters = sum(p.numel() for p in model.parameters())
    assert parameters == elements - head - unread == 366_763_200
    assert parameters == model.num_parameters()

    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
    tensors = {name: StoredTensor(None, name, shape, torch.float32) for name, shape in stored.items()}  # pyright: ignore
    found = match(expected, tensors)
    assert not any(found.problems.values())
    assert set(found.parts) == set(expected)
    assert [s.elements for s in found.skipped] == [4] * 24

    today = fla.shapes(fla.RELEASED, december=False)
    assert sum(map(math.prod, today.values())) == parameters
    assert set(today) == set(map(their_name, expected))


def test_the_account(tmp_path):
    weights = fla.tensors(fla.SMALL, december=True)
    calls = []
    found = convert_fla(fla.write(tmp_path, fla.SMALL, weights), progress=lambda *x: calls.append(x))
    assert found.tensors == len(weights)
    assert found.elements == sum(x.numel() for x in weights.values())
    assert found.elements - found.parameters == sum(skipped.elements for skipped in found.skipped)
    assert [skipped.name for skipped in found.skipped] == [
        "model.layers.0.attn.D",
        "model.layers.1.attn.D",
        "lm_head.weight",
    ]
    assert calls[-1] == (found.parameters, found.parameters)
    assert found.notes == ()


class TestTies:
    def test_a_head_that_differs_is_not_tied(self, tmp_path):
        weights = fla.tensors(fla.SMALL, december=True)
        weights["lm_head.weight"] = weights["lm_head.weight"] + 1e-6
        with pytest.warns(UserWarning, match="lm_head.weight is not model.embeddings.weight.*loaded as untied"):
            model = load_fla(fla.write(tmp_path, fla.SMALL, weights))
        assert model.lm_head.weight is not model.model.embeddings.weight
        torch.testing.assert_close(logits_of(model), fla.logits(TOKENS, fla.SMALL, weights), rtol=1e-9, atol=1e-9)

    def test_without_a_word_the_file_decides(self, tmp_path):
        silent = {name: value for name, value in fla.SMALL.items() if name != "tie_word_embeddings"}
        equal, alone = (fla.tensors(fla.SMALL, december=december) for december in (True, False))
        assert load_fla(fla.write(tmp_path / "equal", silent, equal)).config.tie_word_embeddings
        assert load_fla(fla.write(tmp_path / "alone", silent, alone)).config.tie_word_embeddings
        equal["lm_head.weight"] = 2 * equal["lm_head.weight"]
        assert not load_fla(fla.write(tmp_path / "other", silent, equal)).config.tie_word_embeddings

    def test_untied_means_untied(self, tmp_path):
        weights = fla.tensors(fla.SMALL, december=True)
        assert not load_fla(fla.write(tmp_path / "equal", UNTIED, weights)).config.tie_word_embeddings
        del weights["lm_head.weight"]
        with pytest.raises(ValueError, match=r"missing \(1\):\n  lm_head.weight \[31, 12\]"):
            load_fla(fla.write(tmp_path / "alone", UNTIED, weights))


class TestTypes:
    def test_as_stored(self, tmp_path):
        weights = fla.tensors(fla.SMALL, december=True, dtype=torch.bfloat16)
        model = load_fla(fla.write(tmp_path, fla.SMALL, weights))
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert model.config.dtype == torch.bfloat16
        assert torch.isfinite(logits_of(model)).all()

    def test_the_widest_of_several(self, tmp_path):
        weights = fla.tensors(fla.SMALL, december=False, dtype=torch.bfloat16)
        weights["model.layers.0.attn.A_log"] = weights["model.layers.0.attn.A_log"].float()
        model = load_fla(fla.write(tmp_path, fla.SMALL, weights))
        assert {p.dtype for p in model.parameters()} == {torch.float32}

    def test_refused(self, tmp_path):
        weights = fla.tensors(fla.SMALL, december=False)
        fla.write(tmp_path, fla.SMALL, weights)
        with pytest.raises(ValueError, match="dtype: expected a floating-point type, got torch.int32"):
            load_fla(tmp_path, dtype=torch.int32)
        weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.int8)
        with pytest.raises(ValueError, match="model.norm.weight: expected F16, BF16, F32 or F64, got I8"):
            load_fla(fla.write(tmp_path, fla.SMALL, weights))


class TestGenerationConfig:
    def test_it_comes_along(self, tmp_path):
        fla.write(tmp_path, fla.SMALL, fla.tensors(fla.SMALL, december=True))
        (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.7}))
        assert load_fla(tmp_path).generation_config.temperature == 0.7

    def test_a_wrong_one_stays(self, tmp_path):
        fla.write(tmp_path, fla.SMALL, fla.tensors(fla.SMALL, december=True))
        (tmp_path / "generation_config.json").write_text("{")
        with pytest.warns(UserWarning, match="generation_config.json is left out"):
            load_fla(tmp_path)


class TestRefusals:
    def test_all_that_does_not_fit_is_listed(self, tmp_path):
        weights = fla.tensors(fla.SMALL, december=True)
        weights["model.layers.0.attn.q_conv1d.bias"] = torch.zeros(10)
        weights["model.layers.2.attn.D"] = torch.zeros(2)
        weights["model.layers.1.attn.D"] = torch.zeros(3)
        weights["model.norm.weight"] = torch.zeros(11)
        weights["model.layers.0.mlp.gate_proj.weight"] = torch.zeros(15, 12)
        del weights["model.layers.1.attn.A_log"], weights["model.layers.0.attn_norm.weight"]
        with pytest.raises(ValueError) as error:
            load_fla(fla.write(tmp_path, fla.SMALL, weights))
        message = str(error.value)
        assert message.startswith("source: expected the tensors of the Gated DeltaNet that config.json describes")
        assert message.splitlines()[1:] == [
            "unexpected (3):",
            "  model.layers.0.attn.q_conv1d.bias [10]",
            "  model.layers.1.attn.D [3]",
            "  model.layers.2.attn.D [2]",
            "missing (3):",
            "  model.layers.0.attn_norm.weight [12]",
            "  model.layers.0.mlp.up_proj.weight [7, 12]",
            "  model.layers.1.attn.A_log [2]",
            "wrong shape (2):",
            "  model.layers.0.mlp.gate_proj.weight: expected [7, 12], got [15, 12]",
            "  model.norm.weight: expected [12], got [11]",
        ]

    def test_a_model_of_other_names(self, tmp_path):
        weights = {"transformer.wte.weight": torch.zeros(31, 12)}
        with pytest.raises(ValueError, match=r"unexpected \(1\):\n  transformer.wte.weight") as error:
            load_fla(fla.write(tmp_path, fla.SMALL, weights))
        for name in fla.shapes(fla.SMALL, december=False):
            assert f"  {name} [" in str(error.value)

    def test_options_that_are_not_supported(self, tmp_path):
        options = {
            **fla.SMALL,
            "allow_neg_eigval": True,
            "attn": {"layers": [1], "num_heads": 2},
            "attnres_block_size": 2,
            "conv_bias": True,
            "hidden_act": "powlu",
            "quantization_config": {"bits": 4},
            "head_dim": 2.5,
            "surprise": [1],
        }
        with pytest.raises(ValueError) as error:
            load_fla(fla.write(tmp_path, options, fla.tensors(fla.SMALL, december=True)))
        for line in (
            "attn: expected no attention layers among the others",
            "allow_neg_eigval: expected false",
            "attnres_block_size: expected null",
            "conv_bias: expected false",
            "hidden_act: expected 'swish', got 'powlu'",
            "quantization_config: expected null",
            "head_dim: expected a whole number of at least 1, got 2.5",
            "surprise: expected no such option, got [1]",
        ):
            assert f"\n  {line}" in str(error.value)

    def test_unknown_options_can_be_ignored_by_name(self, tmp_path):
        options = {**fla.SMALL, "surprise": [1], "nothing": None}
        fla.write(tmp_path, options, fla.tensors(fla.SMALL, december=True))
        assert load_fla(tmp_path, ignore=["surprise"]).config.vocab_size == 31

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"model_type": "gla"}, "expected model_type 'gated_deltanet' in config.json, got 'gla'"),
            ({"model_type": "memory_by_design"}, "needs no conversion: MemoryForCausalLM.from_pretrained reads it"),
            ({"expand_v": 1.5}, r"expand_v: expected head_dim·expand_v to be whole, got 5·1.5"),
            ({"num_v_heads": 3}, "num_key_heads: expected a divisor of num_heads = 3, got 2"),
        ],
    )
    def test_options_that_do_not_fit(self, changed, message, tmp_path):
        with pytest.raises(ValueError, match=message):
            load_fla(fla.write(tmp_path, {**fla.SMALL, **changed}, {"x": torch.zeros(1)}))


class TestFolders:
    def test_pickles_are_not_opened(self, tmp_path):
        class Trap:
            def __reduce__(self):
                return (pytest.fail, ("a pickle was opened",))

        (tmp_path / "config.json").write_text(json.dumps(fla.SMALL))
        (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
        with pytest.raises(ValueError, match=r"expected \*.safetensors in .*, got only pytorch_model.bin: a pickle"):
            load_fla(tmp_path)

    def test_what_is_not_there(self, tmp_path):
        with pytest.raises(ValueError, match="expected config.json in .*, got none"):
            load_fla(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(fla.SMALL))
        with pytest.raises(ValueError, match=r"expected \*.safetensors in .*, got no weights"):
            load_fla(tmp_path)
        with pytest.raises(ValueError, match="is a file"):
            load_fla(tmp_path / "config.json")
        with pytest.raises(ValueError, match="got no such folder"):
            load_fla(tmp_path / "nowhere")

    def test_damaged_files(self, tmp_path):
        fla.write(tmp_path, fla.SMALL, fla.tensors(fla.SMALL, december=True))
        (tmp_path / "model.safetensors").write_bytes(b"{}")
        with pytest.raises(ValueError, match="expected safetensors, got a damaged file"):
            load_fla(tmp_path)
        (tmp_path / "config.json").write_text("[]")
        with pytest.raises(ValueError, match="expected a JSON object"):
            load_fla(tmp_path)

    def test_shards(self, tmp_path):
        weights = fla.tensors(fla.SMALL, december=True)
        fla.write(tmp_path, fla.SMALL, weights, shards=2)
        first, second = sorted(tmp_path.glob("*.safetensors"))
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"a": "../other.safetensors", "b": "lost.safetensors"}}))
        with pytest.raises(ValueError, match=r"got none of \.\./other.safetensors, lost.safetensors"):
            load_fla(tmp_path)
        index.write_text("{}")
        with pytest.raises(ValueError, match="expected a weight_map"):
            load_fla(tmp_path)
        index.unlink()
        with pytest.raises(ValueError, match=f"got {first.name}, {second.name}"):
            load_fla(tmp_path)
        index.write_text(json.dumps({"weight_map": {"a": first.name, "b": second.name}}))
        second.write_bytes(first.read_bytes())
        with pytest.raises(ValueError, match="expected each tensor once"):
            load_fla(tmp_path)

    def test_from_the_hub(self, tmp_path, monkeypatch):
        weights = fla.tensors(fla.SMALL, december=True)
        fla.write(tmp_path, fla.SMALL, weights)
        asked = {}

        def download(name, **options):
            asked.update(options, name=name)
            return str(tmp_path)

        monkeypatch.setattr("huggingface_hub.snapshot_download", download)
        load_fla("somebody/a-model", revision="v1")
        assert (asked["name"], asked["revision"]) == ("somebody/a-model", "v1")
        assert "*.safetensors" in asked["allow_patterns"]
        assert not any(pattern.endswith((".bin", ".pt", ".py")) for pattern in asked["allow_patterns"])

        def offline(name, **options):
            raise OSError("no network")

        monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
        with pytest.raises(ValueError, match="no folder somebody/a-model here, and no download from the Hub"):
            load_fla("somebody/a-model")


def test_nothing_is_lost_on_the_way(tmp_path):
    """Every element that is not skipped arrives, bit for bit."""
    weights = fla.tensors(fla.SMALL, december=True, dtype=torch.float32)
    model = load_fla(fla.write(tmp_path / "theirs", fla.SMALL, weights))
    model.save_pretrained(tmp_path / "ours")
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    for name, tensor in ours.items():
        theirs = their_name(name)
        if theirs.endswith(("mlp.gate_proj.weight", "mlp.up_proj.weight")):
            gate, up = weights[theirs.replace("up_proj", "gate_proj")].chunk(2)
            assert torch.equal(tensor, gate if "gate_proj" in theirs else up)
        else:
            assert torch.equal(tensor, weights[theirs])
