"""The from-scratch comparison: the paper's sizes on the meta device, losses, and everything from end to end."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

from membydesign.cli.app import app
from membydesign.experiments import load
from membydesign.experiments.shared.run_context import RunContext
from membydesign.experiments.shared.texts import Texts, TextsError, corpus_of, prepare
from membydesign.experiments.wikitext import run as wikitext
from membydesign.experiments.wikitext.claims import PAPER_PERPLEXITY, SLICES, claims
from membydesign.experiments.wikitext.config import CPU, PAPER, SMOKE
from membydesign.experiments.wikitext.models import ARMS, configuration, recurrent_state, weights_beside_embedding
from membydesign.models import MemoryForCausalLM
from membydesign.reports import record
from membydesign.training import NextToken


def built(arm, **size):
    with torch.device("meta"):
        return MemoryForCausalLM(configuration(arm, **size))


def test_the_paper_s_models():
    """Width 512, four layers of four heads of 128, or eight mixers; 16–18M weights beside the embedding; one state."""
    models = {arm: built(arm, vocab_size=32000) for arm in ARMS}
    assert {recurrent_state(m) for m in models.values()} == {4 * 4 * 2 * 128**2}
    w, swiglu = 512, lambda hidden: 3 * 512 * hidden
    expected = {
        # q, k, v, output gate and o; noises and drift are thousands.
        "bayesian_layer": 4 * (5 * w * w + swiglu(1920)),
        # q and k, and v, gate and o twice as wide.
        "gated_deltanet": 4 * (2 * w * w + 3 * w * 2 * w + swiglu(1408)),
        # z and x' of 2w, B and C of 8 groups of 64, 16 steps; and back.
        "mamba2": 8 * (w * (2 * 2 * w + 2 * 8 * 64 + 16) + 2 * w * w),
    }
    for arm, m in models.items():
        found = weights_beside_embedding(m)
        assert 16e6 <= found <= 18e6
        assert found == pytest.approx(expected[arm], rel=0.01)
        assert found + 32000 * 512 == sum(p.numel() for p in m.parameters())
    assert [len(m.model.mixers()) for m in models.values()] == [4, 4, 8]
    assert models["bayesian_layer"].config.mlp_dropout == models["gated_deltanet"].config.mlp_dropout == 0.4
    with pytest.raises(ValueError, match="arm: expected one of bayesian_layer, gated_deltanet, mamba2, got 'rwkv7'"):
        configuration("rwkv7", vocab_size=8)


@pytest.mark.parametrize(("layers", "heads", "dim"), [(2, 4, 32), (2, 2, 8), (3, 1, 64)])
def test_smaller_models_are_matched_too(layers, heads, dim):
    models = [built(arm, vocab_size=64, layers=layers, num_heads=heads, head_dim=dim) for arm in ARMS]
    assert {recurrent_state(m) for m in models} == {layers * 2 * heads * dim**2}


def test_the_paper_s_settings_to_the_letter():
    assert PAPER.tokens_per_step == 65_536
    assert PAPER.steps * PAPER.tokens_per_step == 520_028_160  # "520M tokens; 7,935 steps"
    assert (PAPER.window, PAPER.rows_at_a_time, PAPER.batch_size) == (2048, 16, 2 * 16)
    (first, *_) = runs = PAPER.runs(6e-4)
    assert len(runs) == 9
    assert PAPER.probes() == []
    train = first.train
    assert (train.betas, train.weight_decay, train.clip, train.learning_rate) == ((0.9, 0.95), 0.01, 1.0, 6e-4)
    assert train.warmup == 317
    assert train.rate(316) == pytest.approx(6e-4)
    assert train.rate((317 + 7935) // 2) == pytest.approx(6e-4 * 0.55, rel=1e-3)
    assert train.rate(7934) == pytest.approx(6e-5, rel=1e-3)
    assert PAPER.held_out_windows == 288
    assert (PAPER.texts.tokenizer, PAPER.seeds) == ("fla-hub/gla-1.3B-100B", 3)
    assert PAPER.texts.train == ("hub:Salesforce/wikitext:wikitext-103-v1:train",)
    assert PAPER.texts.held_out == tuple(f"hub:Salesforce/wikitext:wikitext-103-v1:{s}" for s in ("validation", "test"))


@pytest.mark.slow
def test_steps_of_the_paper_s_settings_on_a_small_copy(tmp_path):
    """All of the paper's settings but sizes and text: bf16, accumulation, dropout; in a process of its own."""
    small = replace(
        PAPER, texts=SMOKE.texts, steps=2, batch_size=4, window=64, rows_at_a_time=2, num_heads=2, head_dim=8, seeds=1
    )
    assert (small.precision, small.dropout) == ("bf16", 0.4)
    context = RunContext(tmp_path, workers=2)
    found = wikitext.run(replace(small, held_out_windows=8), context).metrics["runs"]
    assert set(found) == {f"{arm}-seed0" for arm in ARMS}
    assert {m["tokens"] for m in found.values()} == {2 * 4 * 64}
    assert all(m["held_out"]["overall"]["perplexity"] < 2000 for m in found.values())


def test_losses_are_those_of_all_logits():
    torch.manual_seed(0)
    model = MemoryForCausalLM(
        configuration("bayesian_layer", vocab_size=31, layers=1, num_heads=2, head_dim=8, dropout=0)
    )
    ids = torch.randint(31, (3, 20))
    ours = NextToken(model)(ids)
    theirs = F.cross_entropy(model(ids).logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    torch.testing.assert_close(ours, theirs)
    gradients = []
    for losses in (ours, theirs):
        model.zero_grad()
        losses.mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(*gradients)


def test_smoke_from_end_to_end(tmp_path):
    done = CliRunner().invoke(
        app, ["reproduce", "wikitext", "--preset", "smoke", "--seeds", "1", "--workers", "1", "--out", str(tmp_path)]
    )
    assert done.exit_code == 0, done.output
    metrics = json.loads((tmp_path / "metrics.json").read_text())["metrics"]
    tried = {m["learning_rate"]: m["validation"]["loss"] for name, m in metrics["runs"].items() if "probe" in name}
    assert set(tried) == {1e-3, 2e-3}
    assert metrics["learning_rate"] == min(tried, key=lambda rate: tried[rate])
    runs = {name: m for name, m in metrics["runs"].items() if "probe" not in name}
    assert set(runs) == {f"{arm}-seed0" for arm in ARMS}
    counts = [{name: part["tokens"] for name, part in m["held_out"].items()} for m in runs.values()]
    assert counts[0] == counts[1] == counts[2]
    parts = counts[0]
    assert parts["overall"] == parts["hit"] + parts["other"]
    assert parts["hit"] == sum(parts[name] for name in ("hit 1–64", "hit 65–256", "hit 257–1,024"))
    assert parts["hit"] > 0
    report = (tmp_path / "report.md").read_text()
    for table in ("Held-out perplexity", "Validation loss by learning rate", "Sizes and cost"):
        assert table in report
    assert record.read(tmp_path).comparisons
    assert (tmp_path / "wikitext.png").stat().st_size > 10_000


def test_claims_are_the_paper_s_and_hold_for_its_own_table():
    perplexity = {
        arm: {s: {"mean": x, "std": 0.0} for s, x in zip(SLICES, values, strict=True)}
        for arm, values in PAPER_PERPLEXITY.items()
    }
    checks = claims(CPU, perplexity)
    assert [(check.tested, check.agrees) for check in checks] == [(True, True)] * 11
    perplexity["bayesian_layer"]["hit 65–256"] = {"mean": 30.0, "std": 0.0}
    assert [check.agrees for check in claims(CPU, perplexity)].count(False) == 1
    perplexity = {arm: {**slices, "hit": {"mean": 400.0, "std": 0.0}} for arm, slices in perplexity.items()}
    untested = [check.tested for check in claims(CPU, perplexity)]
    assert untested == [False] * 5 + [True] * 6, "no model recalls: orders on AR-hits say nothing"


def test_texts_that_are_not_there_are_named(tmp_path):
    done = CliRunner().invoke(app, ["reproduce", "wikitext", "--preset", "cpu", "--out", str(tmp_path / "a")])
    assert done.exit_code == 2
    assert "data: expected the folder that holds gutenberg/train" in " ".join(done.output.split())
    texts = Texts(("nowhere",), ("nowhere",), ("nowhere",), 512)
    with pytest.raises(TextsError, match="nowhere"):
        prepare(texts, RunContext(tmp_path / "b", data=tmp_path))
    (tmp_path / "some.txt").write_text("A text. " * 50)
    assert list(corpus_of(("some.txt",), tmp_path).documents()) == ["A text. " * 50]


def test_texts_that_changed_under_runs_are_refused(tmp_path):
    texts, context = Texts(("some.txt",), ("other.txt",), ("other.txt",), 258), RunContext(tmp_path, data=tmp_path)
    (tmp_path / "some.txt").write_text("A text. " * 50)
    (tmp_path / "other.txt").write_text("Another text. " * 50)
    prepare(texts, context)
    before = (context.runs / "texts.json").read_text()
    prepare(texts, context)
    (tmp_path / "other.txt").write_text("Yet another text. " * 50)
    with pytest.raises(TextsError, match="there are others for held_out, validation .*--out"):
        prepare(texts, context)
    assert (context.runs / "texts.json").read_text() == before
    prepare(texts, RunContext(tmp_path / "elsewhere", data=tmp_path))


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match="arms: expected names among bayesian_layer, .*, got 'lstm'"):
        replace(PAPER, arms=("lstm",))
    with pytest.raises(ValueError, match="probe_steps: expected at least 1 to choose a learning rate, got 0"):
        replace(PAPER, learning_rates=(1e-3, 2e-3))
    assert load("wikitext").TITLE == wikitext.TITLE
