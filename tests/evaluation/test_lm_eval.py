"""lm-evaluation-harness, from its own command line, on a model that `save_pretrained` wrote: it runs, and we agree."""

import json
import os
import subprocess
import sys

import pytest
import torch

from membydesign.evaluation.perplexity import perplexity
from models.family import fresh_model
from tiny_tokenizers import words_tokenizer

pytest.importorskip("lm_eval")

DOCUMENTS = [
    "To be, or not to be: that is the question.",
    "Whether it is nobler in the mind to suffer the slings and arrows of outrageous fortune, or to take arms.",
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


@pytest.mark.slow
def test_it_runs_as_it_is_and_its_rolling_likelihood_is_ours(tmp_path):
    """A document that fits one window is foretold by both from the same: a first token, then the document's own."""
    model = fresh_model(["bayesian_layer", "gated_deltanet"], vocab_size=500)
    model.save_pretrained(tmp_path / "model")
    words_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    (tmp_path / "local.yaml").write_text(TASK.replace("FILE", str(tmp_path / "texts.jsonl")))

    given = f"pretrained={tmp_path / 'model'},trust_remote_code=True,max_length=128,dtype=float32"
    words = ["run", "--model", "hf", "--model_args", given, "--tasks", "local_text", "--include_path", tmp_path]
    words += ["--log_samples", "--output_path", tmp_path / "out", "--device", "cpu", "--batch_size", "2"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "lm_eval", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **offline})
    assert done.returncode == 0, done.stderr[-3000:]

    [log] = (tmp_path / "out").rglob("samples_local_text_*.jsonl")
    samples = [json.loads(line) for line in log.read_text().splitlines()]
    assert [sample["target"] for sample in samples] == DOCUMENTS
    tokenizer = words_tokenizer()
    total = 0.0
    for sample in samples:
        tokens = [tokenizer.bos_token_id, *tokenizer(sample["target"])["input_ids"]]
        ours = perplexity(model, torch.tensor(tokens), len(tokens))
        assert ours.tokens == len(tokens) - 1
        theirs, bytes_ = sample["byte_perplexity"]
        assert bytes_ == len(sample["target"])
        assert -theirs / ours.tokens == pytest.approx(ours.cross_entropy, abs=1e-3)
        total += ours.cross_entropy * ours.tokens
    [results] = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(results.read_text())["results"]["local_text"]["byte_perplexity,none"]
    assert torch.tensor(total / sum(map(len, DOCUMENTS))).exp().item() == pytest.approx(found, rel=1e-3)
