"""lm-evaluation-harness and `mbd evaluate perplexity`, both from the command line, on a saved model: they agree."""

import json
import os
import subprocess
import sys
from math import exp

import pytest
from typer.testing import CliRunner

from membydesign.cli.app import app
from membydesign.data.tokenizer import encoder
from models.family import fresh_model
from text_problem import help_tokenizer
from tiny_tokenizers import words_tokenizer

pytest.importorskip("lm_eval", reason="make test-slow installs it")

DOCUMENTS = [
    "To be, or not to be: that is the question.\n",
    "Whether it is nobler in the mind to suffer the slings and arrows of outrageous fortune, or to take arms.",
    "Einhundertdreiundzwanzig is 123, größer than 99. " * 5,
]
TASK = """
task: local_text
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}]
"""


def lm_eval(*words, hub) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(hub), "OMP_NUM_THREADS": "1"}
    code = "import membydesign.models; from lm_eval.__main__ import cli_evaluate; cli_evaluate()"
    command = [sys.executable, "-c", code, *map(str, words)]
    environment = {**os.environ, **offline, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


def mbd(*words) -> str:
    done = CliRunner().invoke(app, [*map(str, words)])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ours", "another"])
def test_its_rolling_perplexity_is_that_of_our_command(kind, tmp_path):
    """A document that fits one window is foretold by both from the same: a BOS token, then the document's own.

    Our own tokenizers put a BOS before a text by themselves, which lm-eval is told to leave to it.
    """
    tokenizer = help_tokenizer(tmp_path) if kind == "ours" else words_tokenizer()
    fresh_model(["bayesian_layer", "gated_deltanet"], vocab_size=512).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    (tmp_path / "local.yaml").write_text(TASK.replace("FILE", str(tmp_path / "texts.jsonl")))

    given = f"pretrained={tmp_path / 'model'},max_length=512,dtype=float32,add_bos_token=False"
    words = ["run", "--model", "hf", "--model_args", given, "--tasks", "local_text", "--include_path", tmp_path]
    words += ["--log_samples", "--output_path", tmp_path / "out", "--device", "cpu", "--batch_size", "2"]
    lm_eval(*words, hub=tmp_path / "hub")
    [log] = (tmp_path / "out").rglob("samples_local_text_*.jsonl")
    samples = [json.loads(line) for line in log.read_text().splitlines()]
    assert [sample["target"] for sample in samples] == DOCUMENTS

    total = 0.0
    for i, sample in enumerate(samples):
        (tmp_path / f"{i}.txt").write_text(DOCUMENTS[i])
        tokens = len(encoder(tokenizer)([DOCUMENTS[i]])[0])
        options = ["--text", tmp_path / f"{i}.txt", "--lengths", tokens + 1, "--out", tmp_path / f"ours-{i}", "--json"]
        found = mbd("evaluate", "perplexity", tmp_path / "model", *options)
        ours = json.loads(found)["metrics"]["by_length"][str(tokens + 1)]
        assert ours["tokens"] == tokens
        likelihood, size = sample["byte_perplexity"]
        assert size == len(DOCUMENTS[i].encode())
        assert ours["perplexity"] == pytest.approx(exp(-likelihood / tokens), rel=1e-3)
        total += ours["cross_entropy"] * tokens
    [results] = (tmp_path / "out").rglob("results_*.json")
    theirs = json.loads(results.read_text())["results"]["local_text"]["byte_perplexity,none"]
    assert exp(total / sum(len(text.encode()) for text in DOCUMENTS)) == pytest.approx(theirs, abs=1e-3)
