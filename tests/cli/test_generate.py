"""`mbd generate`, as a user types it."""

import json
import shutil
import sys

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

import fla_checkpoints as fla
from membydesign.cli.app import app
from membydesign.cli.generate import _stream
from membydesign.install import install_hint
from membydesign.models import MemoryConfig, MemoryForCausalLM

LETTERS = "\n !,.:?abcdefghijklmnopqrstuvwxyzTOS"


def mbd(*words: object, code: int = 0, **more):
    result = CliRunner().invoke(app, ["generate", *map(str, words)], env={"COLUMNS": "140", "TERM": "xterm"}, **more)
    assert result.exit_code == code, result.output
    return result


def letters() -> PreTrainedTokenizerFast:
    """One token for each letter. Fuse keeps the decoder from putting spaces between them."""
    tokenizer = Tokenizer(WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def bytes_() -> PreTrainedTokenizerFast:
    """One token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def words() -> PreTrainedTokenizerFast:
    """Words with their space before them, of which a decoder drops the first, as SentencePiece does."""
    pieces = ["▁to", "▁be", "▁or", "▁not", "\n"]
    tokenizer = Tokenizer(WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="▁or"))
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    config = MemoryConfig(vocab_size=len(LETTERS), hidden_size=16, num_hidden_layers=1, num_heads=2)
    MemoryForCausalLM(config).save_pretrained(folder)
    letters().save_pretrained(folder)
    return folder


def test_help_teaches():
    assert 'mbd generate my-model "Once upon a time"' in mbd("--help").output


def test_text_goes_out_and_speed_beside_it(model):
    result = mbd(model, "To be", "-n", 30, "--seed", 1)
    assert len(result.stdout) == 31
    assert set(result.stdout) <= set(LETTERS)
    assert "30 tokens in" in result.stderr
    assert "tokens/s, seed 1" in result.stderr
    assert mbd(model, "To be", "-n", 30, "--seed", 1).stdout == result.stdout
    assert mbd(model, "To be", "-n", 30, "--seed", 2).stdout != result.stdout
    assert mbd(model, "To be", "-n", 30, "--seed", 1, "--echo").stdout == "To be" + result.stdout


def test_json_says_the_same(model):
    streamed = mbd(model, "To be", "-n", 30, "--seed", 1).stdout
    result = mbd(model, "To be", "-n", 30, "--seed", 1, "--json")
    facts = json.loads(result.stdout)
    assert facts["text"] + "\n" == streamed
    assert (facts["prompt"], facts["prompt_tokens"], facts["new_tokens"], facts["seed"]) == ("To be", 5, 30, 1)
    assert facts["finish"] == "length"
    assert facts["options"]["top_k"] == 0
    assert facts["tokens_per_second"] > 0
    assert result.stderr == ""


def test_the_prompt_from_standard_input(model):
    piped = mbd(model, "-", "-n", 9, "--seed", 1, "--json", input="To be,\nor not\n")
    assert json.loads(piped.stdout)["prompt"] == "To be,\nor not"
    assert piped.stdout.count('"text"') == 1


def test_greedy_is_the_likeliest(model):
    text = json.loads(mbd(model, "To be", "-n", 5, "--greedy", "--json").stdout)["text"]
    lm = MemoryForCausalLM.from_pretrained(model)
    ids = letters()("To be", return_tensors="pt")["input_ids"]
    for letter in text:
        token = lm(ids).logits[0, -1].argmax()
        assert LETTERS[token] == letter
        ids = torch.cat((ids, token.view(1, 1)), 1)


def test_options_reach_the_sampler(model):
    greedy = mbd(model, "To be", "-n", 12, "--greedy").stdout
    assert mbd(model, "To be", "-n", 12, "--top-k", 1).stdout == greedy
    assert mbd(model, "To be", "-n", 12, "--top-p", 1e-6).stdout == greedy
    assert mbd(model, "To be", "-n", 12, "--temperature", 1e-4).stdout == greedy
    once = mbd(model, "To be", "-n", 12, "--greedy", "--repetition-penalty", 1e6).stdout[:-1]
    assert len(set(once)) == 12


def test_any_causal_language_model(tmp_path):
    config = LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    bytes_().save_pretrained(tmp_path)
    facts = json.loads(mbd(tmp_path, "grün", "-n", 4, "--json").stdout)
    assert facts["prompt_tokens"] == 5


def test_a_checkpoint_of_flash_linear_attention(model, tmp_path):
    options = {**fla.SMALL, "vocab_size": len(LETTERS)}
    fla.write(tmp_path, options, fla.tensors(options, december=True))
    assert mbd(tmp_path, "To be", "-n", 4, "--tokenizer", model, "--dtype", "float32").stdout


@pytest.mark.parametrize("tokenizer", [letters, bytes_, words], ids=lambda make: make.__name__)
def test_streams_give_the_text_as_it_is(tokenizer, capsys):
    """Spaces, line ends and letters of several bytes: what is shown in the end is what decoding all at once gives."""
    make = tokenizer()
    text = {letters: "To be,  or not to be:\n that is the\n\nq", bytes_: "grün ist\n die  Hoffnung 🌱 \n", words: ""}[
        tokenizer
    ]
    ids = make(text)["input_ids"] if text else [0, 1, 2, 3, 0, 1, 4, 3, 3, 4, 4, 2]
    before, whole = make.decode(ids[:2]), make.decode(ids)
    for echo in (False, True):
        stream = _stream(make, echo)
        stream.put(torch.tensor([ids[:2]]))
        assert capsys.readouterr().out == (before if echo else "")
        shown = ""
        for i, token in enumerate(ids[2:]):
            stream.put(torch.tensor([token]))
            shown += capsys.readouterr().out
            so_far = make.decode(ids[: i + 3])
            assert before + shown == so_far or so_far.endswith("\ufffd")
        stream.end()
        assert capsys.readouterr().out == "\n"
        assert before + shown == whole


class TestMistakes:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--greedy", "--top-k", 3], "--greedy: expected no --top-k with it"),
            (["--device", "nonsense"], "--device: expected cpu, or a device that this PyTorch has, got 'nonsense'"),
            (["--temperature", 0], "--temperature: expected a number above 0 (or --greedy), got 0.0"),
            (["--top-p", 1.5], "--top-p: expected a number above 0 up to 1, got 1.5"),
            (["--repetition-penalty", -1], "--repetition-penalty: expected a number above 0, got -1.0"),
            (["--dtype", "int4"], "--dtype: expected one of float64, float32, bfloat16, float16, got 'int4'"),
        ],
    )
    def test_of_options(self, options, message, model):
        assert message in mbd(model, "To be", *options, code=2).stderr

    def test_of_models(self, model, tmp_path):
        assert "expected a folder or a name" in mbd("./nowhere", "To be", code=2).stderr
        assert "expected a folder or a name" in mbd(model / "config.json", "To be", code=2).stderr
        error = mbd(tmp_path, "To be", code=2).stderr
        assert f"no tokenizer in {tmp_path}: save one there" in error
        assert "--tokenizer" in error
        error = mbd(tmp_path, "To be", "--tokenizer", model, code=2).stderr
        assert f"no model at {tmp_path}" in error
        assert "at least one token" in mbd(model, "", code=2).stderr

    def test_of_tokenizers(self, model, tmp_path):
        bytes_().save_pretrained(tmp_path)
        error = mbd(model, "To be", "--tokenizer", tmp_path, code=2).stderr
        assert f"expected one of at most {len(LETTERS)} tokens" in error

    def test_transformers_is_not_there(self, monkeypatch):
        for name in [name for name in sys.modules if name.startswith("membydesign.models")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "transformers", None)
        for command in (["generate", "a", "b"], ["convert", "a", "b"]):
            result = CliRunner().invoke(app, command)
            assert result.exit_code == 2
            assert f"transformers, which is not installed: {install_hint('models')}" in result.stderr


@pytest.mark.parametrize("command", ["generate {} Once", "evaluate niah {}", "evaluate perplexity {}"])
@pytest.mark.parametrize("source", ["nowhere", "runs/nowhere", "./nowhere", "a/b/c", "hub:", "hub:a/b/c"])
def test_a_folder_that_does_not_exist_is_named_at_once(command, source, tmp_path, monkeypatch):
    def offline(*_words, **_options):
        pytest.fail("the Hub was asked")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", offline)
    monkeypatch.setattr("transformers.PreTrainedConfig.get_config_dict", offline)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    result = CliRunner().invoke(app, command.format(source).split())
    assert result.exit_code == 2, result.output
    error = " ".join(result.stderr.split())
    assert "got no such folder" in error or "expected hub:NAME or hub:OWNER/NAME" in error
    assert "hub:" in error


def test_names_on_the_hub(monkeypatch, tmp_path):
    asked = []

    def offline(name, **options):
        asked.append((name, options))
        raise OSError("no network")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", offline)
    monkeypatch.chdir(tmp_path)
    assert "no folder somebody/a-model here; looking for it on the Hug" in mbd("somebody/a-model", "x", code=2).stderr
    mbd("hub:a-model", "x", code=2)
    (tmp_path / "runs").mkdir()
    mbd("hub:runs/a-model", "x", code=2)
    assert asked == [(name, {"trust_remote_code": False}) for name in ("somebody/a-model", "a-model", "runs/a-model")]


def test_odd_folders_are_refused_with_a_message(model, tmp_path):
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    for name in ("config.json", "tokenizer_config.json"):
        whole = (copy / name).read_text()
        for text in ("[" * 100_000, "[]", "1"):
            (copy / name).write_text(text)
            assert "mbd: no " in mbd(copy, "x", "-n", 1, code=2).stderr
        (copy / name).write_text(whole)
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    assert "convert it once: python -c" in mbd(copy, "x", code=2).stderr
