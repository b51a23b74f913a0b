"""`mbd evaluate`, as a user types it."""

import json
import math
import shlex
import shutil
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from membydesign.cli.app import app
from membydesign.evaluation.niah import TASKS
from membydesign.evaluation.niah import run as niah_run
from membydesign.install import install_hint
from membydesign.models import MemoryConfig, MemoryForCausalLM
from tiny_tokenizers import bytes_tokenizer, words_tokenizer


def mbd(*words, code: int = 0, columns: int = 200):
    result = CliRunner().invoke(app, ["evaluate", *map(str, words)], env={"COLUMNS": str(columns), "TERM": "xterm"})
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    config = MemoryConfig(vocab_size=500, hidden_size=16, num_heads=2, num_hidden_layers=1, intermediate_size=0)
    MemoryForCausalLM(config).save_pretrained(folder)
    words_tokenizer().save_pretrained(folder)
    return folder


SHORT = ("--tasks", "single_2,niah_multivalue", "--lengths", "600,560", "--samples", 2, "--new-tokens", 4)


@pytest.fixture(scope="module")
def results(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "ours"
    return out, mbd("niah", model, *SHORT, "--out", out)


class TestNiah:
    def test_tables_and_files(self, results):
        out, result = results
        assert "RULER score by task and context length" in result.stdout
        assert "Needles found by task and depth" in result.stdout
        for name in ("config.json", "metrics.json", "report.md", "samples.jsonl"):
            assert (out / name).is_file()
            assert str(out / name) in result.stdout
        config = json.loads((out / "config.json").read_text())
        assert config["lengths"] == [560, 600]
        assert config["tasks"] == ["niah_single_2", "niah_multivalue"]
        lines = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
        assert len(lines) == 8
        assert {line["prompt_tokens"] + 4 <= line["length"] for line in lines} == {True}
        assert {len(line["depths"]) for line in lines if line["task"] == "niah_multivalue"} == {4}

    def test_it_is_what_the_library_gives(self, model, results):
        from membydesign.evaluation.niah import NIAH
        from membydesign.evaluation.niah.haystack import read_essays

        out, _ = results
        made = NIAH(words_tokenizer(), read_essays("embedded"), 4)
        lm = MemoryForCausalLM.from_pretrained(model)
        found = niah_run.answer(lm, made, tasks=["niah_single_2"], lengths=[600], samples=2)
        kept = niah_run.read_answers(out / "samples.jsonl")
        assert found == [one for one in kept if one.key[:2] == ("niah_single_2", 600)]

    def test_going_on(self, model, results, monkeypatch):
        out, _ = results
        before = (out / "samples.jsonl").read_text()
        assert "holds results; continue them with --resume" in mbd("niah", model, "--out", out, code=2).stderr
        asked = []
        real = niah_run.generate_greedy
        monkeypatch.setattr(niah_run, "generate_greedy", lambda *args: asked.append(len(args[1])) or real(*args))
        metrics = json.loads(mbd("niah", model, *SHORT, "--out", out, "--resume", "--json").stdout)
        assert asked == []
        assert metrics["metrics"]["by_task"]["600"]["niah_single_2"]["count"] == 2
        more = [*SHORT[:5], 3, *SHORT[6:]]
        mbd("niah", model, *more, "--out", out, "--resume")
        assert asked == [1] * 4
        assert (out / "samples.jsonl").read_text().startswith(before)
        error = mbd("niah", model, *SHORT, "--out", out, "--resume", "--seed", 1, code=2).stderr
        assert f"--resume: expected seed as in {out / 'config.json'}, 0, got 1" in error

    def test_stopped(self, model, tmp_path, monkeypatch):
        def stop(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(niah_run, "generate_greedy", stop)
        result = mbd("niah", model, *SHORT, "--out", tmp_path / "x", code=130)
        command = shlex.join(map(str, ["niah", model, *SHORT, "--out", tmp_path / "x", "--resume"]))
        assert "mbd: stopped; to resume:\n" in result.stderr
        assert result.stderr.endswith(f"evaluate {command}\n")

    def test_any_causal_language_model(self, tmp_path):
        config = LlamaConfig(
            vocab_size=256, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
        LlamaForCausalLM(config).save_pretrained(tmp_path)
        bytes_tokenizer().save_pretrained(tmp_path)
        (tmp_path / "essays").mkdir()
        (tmp_path / "essays" / "a.txt").write_text("A short essay. It has two sentences.")
        options = ("--tasks", "single_3", "--lengths", 900, "--samples", 2, "--new-tokens", 3, "--json")
        found = mbd("niah", tmp_path, *options, "--essays", tmp_path / "essays", "--out", tmp_path / "out").stdout
        assert json.loads(found)["metrics"]["by_task"]["900"]["niah_single_3"]["count"] == 2

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--tasks", "single_9"], f"--tasks: expected some of {', '.join(TASKS)}, or all, got 'single_9'"),
            (["--lengths", "2k"], "--lengths: expected whole numbers of at least 2 with commas, such as 2048,4096"),
            (["--lengths", "300"], "--lengths: expected at least"),
            (
                ["--essays", "nowhere.txt"],
                "--essays: expected 'embedded', a file or a folder, got no such path",
            ),
            (["--out", "README.md"], "--out: expected a folder, and README.md is a file"),
            (["--device", "nonsense"], "--device: expected cpu, or a device that this PyTorch has"),
            (["--tokenizer", "./nowhere"], "expected a folder or a name on the Hugging Face Hub"),
        ],
    )
    def test_mistakes(self, model, tmp_path, options, message):
        given = options if "--out" in options else [*options, "--out", tmp_path / "out"]
        assert message in mbd("niah", model, *given, code=2).stderr

    def test_models_and_tokenizers_that_do_not_fit(self, model, tmp_path):
        assert "expected a folder or a name" in mbd("niah", "./nowhere", code=2).stderr
        torch.manual_seed(0)
        MemoryForCausalLM(
            MemoryConfig(vocab_size=90, hidden_size=16, num_heads=2, num_hidden_layers=1)
        ).save_pretrained(tmp_path)
        assert f"no tokenizer in {tmp_path}" in mbd("niah", tmp_path, "--out", tmp_path / "out", code=2).stderr
        given = ("--tokenizer", model, "--lengths", 800, "--out", tmp_path / "out")
        for command, more in (("niah", ("--samples", 1)), ("perplexity", ())):
            error = mbd(command, tmp_path, *given, *more, code=2).stderr
            assert "--tokenizer: expected tokens below the model's vocabulary size 90, got token" in error

    def test_a_damaged_model(self, model, tmp_path):
        damaged = tmp_path / "damaged"
        shutil.copytree(model, damaged)
        weights = damaged / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        for command in ("niah", "perplexity"):
            error = mbd(command, damaged, "--out", tmp_path / "out", code=2).stderr
            assert "cannot be read" in error
            assert "copy or download the model again" in error


class TestPerplexity:
    def test_table_and_file(self, model, tmp_path):
        (tmp_path / "text.txt").write_text("To be, or not to be: that is the question. " * 40)
        given = ("perplexity", model, "--text", tmp_path / "text.txt", "--lengths", "32,128", "--out", tmp_path / "out")
        result = mbd(*given)
        assert "cross-entropy" in result.stdout
        found = json.loads((tmp_path / "out" / "metrics.json").read_text())["metrics"]["by_length"]
        lm = MemoryForCausalLM.from_pretrained(model)
        words = words_tokenizer()
        ids = torch.tensor([words.bos_token_id, *words((tmp_path / "text.txt").read_text())["input_ids"]])
        for length in (32, 128):
            windows = ids[: len(ids) // length * length].view(-1, length)
            with torch.no_grad():
                loss = lm(windows, labels=windows).loss.item()
            assert found[str(length)]["cross_entropy"] == pytest.approx(loss, abs=1e-5)
            assert found[str(length)]["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
            assert found[str(length)]["windows"] == len(windows)
            assert found[str(length)]["tokens"] == len(windows) * (length - 1)

        assert "--resume" in mbd(*given, code=2).stderr
        from membydesign.evaluation import perplexity as module

        asked = []
        with pytest.MonkeyPatch.context() as patch:
            real = module.perplexity
            patch.setattr(module, "perplexity", lambda *args, **more: asked.append(args[2]) or real(*args, **more))
            more = [*given[:5], "32,64,128", *given[6:]]
            again = json.loads(mbd(*more, "--resume", "--json").stdout)["metrics"]["by_length"]
        assert asked == [64]
        assert list(again) == ["32", "64", "128"]
        assert {name: again[name] for name in ("32", "128")} == found
        error = mbd(*given, "--resume", "--tokens", 200, code=2).stderr
        assert "--resume: expected tokens as in" in error

    def test_it_is_what_experiments_measure_on_the_text_that_they_pack(self, model, tmp_path):
        from membydesign.data.text_files import TextFiles
        from membydesign.data.token_files import pack
        from membydesign.evaluation.perplexity import perplexity

        folder = tmp_path / "text"
        folder.mkdir()
        for name in "abc":
            (folder / f"{name}.txt").write_text(f"{name}: to be, or not to be. " * 20)
        given = ("--text", folder, "--lengths", "100", "--out", tmp_path / "out", "--json")
        found = json.loads(mbd("perplexity", model, *given).stdout)["metrics"]["by_length"]["100"]
        packed = pack(TextFiles(folder), words_tokenizer(), tmp_path / "packed.safetensors")
        lm = MemoryForCausalLM.from_pretrained(model)
        assert found == perplexity(lm, packed.read(0, len(packed)), 100).as_dict()

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                ["--text", "nowhere"],
                "--text: expected 'embedded', hub:DATASET:CONFIG:SPLIT, a file or a folder, got no such path 'nowhere'",
            ),
            (["--tokens", 100, "--lengths", 101], "--lengths: expected at most the 100 tokens of the text, got 101"),
        ],
    )
    def test_mistakes(self, model, tmp_path, options, message):
        assert message in mbd("perplexity", model, *options, "--out", tmp_path / "out", code=2).stderr

    def test_an_empty_corpus(self, model, tmp_path):
        (tmp_path / "empty.txt").write_text("\n")
        given = ("--text", tmp_path / "empty.txt", "--out", tmp_path / "out")
        assert "--text: expected text in" in mbd("perplexity", model, *given, code=2).stderr


class TestCompare:
    def test_tables_and_heat_maps(self, model, results, tmp_path):
        first, _ = results
        second = tmp_path / "theirs"
        mbd("niah", model, *SHORT, "--out", second)
        result = mbd("compare", first, second, "--out", tmp_path / "both")
        assert "Difference by task and context length" in result.stdout
        assert (tmp_path / "both" / "niah_difference.png").stat().st_size > 10_000
        report = (tmp_path / "both" / "report.md").read_text()
        assert "niah_difference.png" in report
        assert "Needles found: ours minus theirs" in report
        metrics = json.loads(mbd("compare", first, second, "--out", tmp_path / "both", "--json").stdout)["metrics"]
        assert metrics["samples"] == metrics["same_prompts"] == 8
        assert metrics["by_task"]["600"]["mean"] == 0.0
        page = CliRunner().invoke(app, ["report", str(tmp_path)])
        assert page.exit_code == 0, page.output

    def test_other_prompts_are_pointed_out(self, model, results, tmp_path):
        first, _ = results
        (tmp_path / "a.txt").write_text("Other essays. They are short. ")
        mbd("niah", model, *SHORT, "--essays", tmp_path / "a.txt", "--out", tmp_path / "other")
        assert "8 of 8 samples had different prompts" in mbd(
            "compare", first, tmp_path / "other", "--out", tmp_path / "both"
        ).stderr.replace("\n", " ")

    def test_mistakes(self, results, tmp_path):
        first, _ = results
        assert "expected a folder with samples.jsonl" in mbd("compare", first, tmp_path, code=2).stderr
        (tmp_path / "samples.jsonl").write_text("{}\n")
        assert "samples.jsonl: expected lines with task, length," in mbd("compare", first, tmp_path, code=2).stderr
        (tmp_path / "samples.jsonl").write_text("")
        assert "expected samples of the same task" in mbd("compare", first, tmp_path, code=2).stderr


def test_help_teaches():
    for command, words in {"niah": "--essays", "perplexity": "--lengths", "compare": "SECOND"}.items():
        output = mbd(command, "--help").output
        assert words in output
        assert f"mbd evaluate {command}" in output


def test_transformers_is_not_there(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("membydesign.models")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    for command in ("niah", "perplexity"):
        error = mbd(command, "a", code=2).stderr
        assert f"transformers, which is not installed: {install_hint('models')}" in error
