"""Runs of MQAR: states that match, logits at the queries alone, splits, resumption, and runs that diverge."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from membydesign.data.mqar import MQAR
from membydesign.data.mqar_mixture import Mixture, base_mixture, update_mixture
from membydesign.experiments.mqar import models as mqar_models
from membydesign.experiments.mqar import training as mqar_runs
from membydesign.experiments.mqar.config import MQARRun
from membydesign.experiments.mqar.models import ARMS, PAPER_STATE, Arm, make_model
from membydesign.experiments.mqar.training import Answers, answers, at_queries, losses, summary, work
from membydesign.training import Run, Trained, stages, sweep

KINDS = base_mixture(((16, 2), (32, 4)), vocab_size=64).kinds
SMALL = (16, 8)
"""Width and head_dim."""
RUN = MQARRun(
    variant="base",
    arm="bayesian_layer",
    kinds=KINDS,
    learning_rate=1e-2,
    width=SMALL[0],
    head_dim=SMALL[1],
    train_examples=64,
    validation_examples=16,
    test_examples=32,
    curve_examples=8,
    curve_points=4,
    epochs=3,
    batch_size=8,
    warmup=2,
)


@pytest.mark.parametrize("arm", ARMS)
def test_recurrent_states_are_the_paper_s(arm):
    with torch.device("meta"):
        model = make_model(arm)
    size = model.state_size()
    if not ARMS[arm].recurrent:
        assert size is None
        return
    assert size is not None
    assert size.recurrent == PAPER_STATE
    assert (size.mean, size.covariance) == ((4096, 4096) if arm.startswith("bayesian_layer") else (8192, 0))
    assert bool(size.convolution) == ARMS[arm].convolution
    for width in (64, 256):
        with torch.device("meta"):
            size = make_model(arm, width).state_size()
        assert size is not None
        assert size.recurrent == PAPER_STATE * width // 128


def test_a_state_of_another_size_is_refused(monkeypatch):
    monkeypatch.setitem(
        mqar_models.ARMS, "small", Arm("small", "gated_deltanet", convolution=True, options={"value_dim": 32})
    )
    expected = "state of small: expected 8192 numbers in each layer at width 128 with heads of 32, got 4096 in layer 0"
    with torch.device("meta"), pytest.raises(ValueError, match=expected):
        make_model("small")
    monkeypatch.setitem(mqar_models.ARMS, "fixed", Arm("fixed", "gla", convolution=False, recurrent=False))
    with torch.device("meta"), pytest.raises(ValueError, match="state of fixed: expected one that grows"):
        make_model("fixed")


def test_bad_arms_and_widths_are_named():
    with pytest.raises(ValueError, match="arm: expected one of bayesian_layer, .*, got 'transformer'"):
        make_model("transformer")
    with pytest.raises(ValueError, match="width: expected a multiple of head_dim = 32, got 100"):
        make_model("attention", 100)


def test_models_have_two_mixers_no_mlp_and_a_readout_that_is_tied_unless_asked():
    model = make_model("bayesian_layer", *SMALL, vocab_size=64).language_model
    assert len(model.model.layers) == 2
    assert all(block.mlp is None for block in model.model.layers)
    assert model.lm_head.weight.data_ptr() == model.model.embeddings.weight.data_ptr()
    own = make_model("bayesian_layer", *SMALL, vocab_size=64, tied=False).language_model
    assert own.lm_head.weight.data_ptr() != own.model.embeddings.weight.data_ptr()


def test_starting_weights_have_the_standard_deviation_that_was_asked_for():
    torch.manual_seed(0)
    model = make_model("gated_deltanet", 64, vocab_size=512, embedding_range=0.05, tied=False).language_model
    weights = dict(model.named_parameters())
    assert weights["model.embeddings.weight"].std().item() == pytest.approx(0.05, rel=0.05)
    for name in ("lm_head", "model.layers.0.mixer.v_proj", "model.layers.1.mixer.o_proj"):
        assert weights[f"{name}.weight"].std().item() == pytest.approx(2 / 8, rel=0.05)


@pytest.mark.parametrize("arm", ARMS)
def test_losses_at_queries_are_those_of_all_logits_and_what_follows_is_not_read(arm):
    """Cross-entropy by torch, over logits of whole sequences, with labels of −100 where nothing is asked."""
    torch.manual_seed(1)
    model = make_model(arm, *SMALL, vocab_size=64, length=32).double()
    examples = MQAR(32, 3, vocab_size=64).sample(7, "losses", 0)
    batch = at_queries(examples)
    logits = model.language_model(examples.input_ids).logits
    expected = F.cross_entropy(logits.transpose(1, 2), examples.labels, reduction="none", ignore_index=-100)
    torch.testing.assert_close(losses(model, batch), expected[examples.queried], rtol=1e-9, atol=1e-9)
    last = max(t for t in range(32) if examples.queried[:, t].any())
    assert batch["input_ids"].shape == (7, last + 1)
    assert torch.equal(batch["input_ids"], examples.input_ids[:, : last + 1])


def test_batches_hold_what_is_asked_in_order():
    examples = MQAR(40, 4, 3, vocab_size=64).sample(5, "batch", 0)
    batch = at_queries(examples)
    for b in range(5):
        asked = [t for t in range(40) if examples.labels[b, t] != -100]
        assert batch["queries"][b].tolist() == asked
        assert batch["labels"][b].tolist() == [int(examples.labels[b, t]) for t in asked]
        assert batch["rewrites"][b].tolist() == [int(examples.rewrites[b, t]) for t in asked]


def test_a_batch_can_be_split_among_processes():
    """Each process takes its rows of every tensor, and the losses of all are those of the batch."""
    model = RUN.model()
    batch = RUN.batch(3)
    halves = [{name: x[rows] for name, x in batch.items()} for rows in (slice(0, 4), slice(4, 8))]
    together = torch.cat([losses(model, half) for half in halves])
    torch.testing.assert_close(together, losses(model, batch))


def test_steps_and_tokens_are_those_of_the_pool():
    run = replace(RUN, train_examples=75)
    pool = Mixture(KINDS).pool(75, "train", 0)
    assert run.train.steps == run.epochs * pool.steps_per_epoch(8)
    assert run.train.steps == 3 * 8
    batches = [pool.batch(step, 8) for step in range(run.train.steps)]
    assert run.tokens == sum(batch.input_ids.numel() for batch in batches)
    assert run.milestones == [6, 12, 18, 24]


def test_the_optimiser_is_the_paper_s():
    settings = MQARRun(variant="base", arm="bayesian_layer", kinds=base_mixture().kinds, learning_rate=3e-4).train
    assert (settings.betas, settings.eps, settings.weight_decay) == ((0.9, 0.95), 1e-8, 0.1)
    assert (settings.batch_size, settings.warmup, settings.clip, settings.decayed) == (256, 1024, None, "matrices")
    assert settings.steps == 40 * 4 * (25_000 // 256)
    assert settings.rate(settings.steps) == pytest.approx(3e-5)


def test_splits_against_a_slow_count():
    kinds = update_mixture((64,), (2, 8), vocab_size=64).kinds
    pool = Mixture(kinds).pool(90, "test", 0)
    torch.manual_seed(0)
    model = make_model("gated_deltanet", *SMALL, vocab_size=64)
    given = answers(model, pool)
    found = summary(given, kinds)
    seen: dict[tuple, list[tuple[bool, float]]] = {}
    for kind, part in zip(kinds, pool.parts, strict=True):
        for row in range(len(part)):
            tokens = part.input_ids[row].tolist()
            logits = model.language_model(torch.tensor([tokens])).logits[0].detach().log_softmax(-1)
            context = tokens[: 2 * kind.writes]
            for t in range(2 * kind.writes, 64):
                if tokens[t]:
                    writes = [i for i in range(0, len(context), 2) if context[i] == tokens[t]]
                    label = context[writes[-1] + 1]
                    right = int(logits[t].argmax()) == label
                    at = (kind.pairs, kind.updates, len(writes) - 1)
                    seen.setdefault(at, []).append((right, -float(logits[t, label])))

    def check(cell, chosen):
        rows = [row for at, rows in seen.items() if chosen(*at) for row in rows]
        if not rows:
            assert cell is None
            return
        assert cell["queries"] == len(rows)
        assert cell["accuracy"] == pytest.approx(sum(right for right, _ in rows) / len(rows))
        assert cell["cross_entropy"] == pytest.approx(sum(loss for _, loss in rows) / len(rows), rel=1e-4)

    check(found, lambda *_: True)
    check(found["untouched"], lambda D, U, n: n == 0)
    check(found["updated"], lambda D, U, n: n > 0)
    assert set(found["by_rewrites"]) == {str(n) for _, _, n in seen}
    for n, cell in found["by_rewrites"].items():
        check(cell, lambda D, U, times, n=n: times == int(n))
    for pairs, cell in found["by_pairs"].items():
        check(cell, lambda D, U, n, pairs=pairs: int(pairs) == D)
        check(cell["updated"], lambda D, U, n, pairs=pairs: int(pairs) == D and n > 0)
    for kind, cell in zip(kinds, found["by_kind"], strict=True):
        assert (cell["L"], cell["D"], cell["U"]) == (kind.length, kind.pairs, kind.updates)
        check(cell, lambda D, U, n, kind=kind: (kind.pairs, kind.updates) == (D, U))


def test_a_run_learns_and_tells_what_it_did(tmp_path):
    run = replace(RUN, train_examples=800, kinds=(MQAR(12, 1, vocab_size=8),), epochs=2, width=32)
    run = replace(run, embedding_range=0.1)
    metrics = work(run, tmp_path, lambda _: None)
    assert metrics["test"]["accuracy"] > 0.9
    assert metrics["validation"]["accuracy"] > 0.9
    assert metrics["diverged"] is None
    assert [point["step"] for point in metrics["curve"]] == run.milestones
    assert metrics["curve"][-1]["cross_entropy"] < metrics["curve"][0]["cross_entropy"]
    assert metrics["state"] == {"mean": 256, "covariance": 256, "convolution": 0, "recurrent": 512}
    assert metrics["parameters"] == sum(p.numel() for p in run.model().parameters())
    assert metrics["steps"] == run.train.steps == 200


class Killed(Exception):
    pass


@pytest.mark.parametrize("arm", ["bayesian_layer", "gated_deltanet"])
def test_a_sweep_that_was_killed_goes_on_to_the_same_metrics(tmp_path, arm):
    run = replace(RUN, arm=arm)
    runs = [Run(run.name, run, work)]
    whole = sweep(runs, tmp_path / "whole")
    for until in (7, 19):  # after the first and the third of the milestones 6, 12, 18, 24

        def kill(name, progress, until=until):
            if progress is not None and progress.step == until:
                raise Killed

        with pytest.raises(Killed):
            sweep(runs, tmp_path / "killed", watch=kill)
    assert unlike_time(sweep(runs, tmp_path / "killed")) == unlike_time(whole)
    assert [point["step"] for point in whole[run.name]["curve"]] == [6, 12, 18, 24]


def unlike_time(metrics):
    return {name: {key: value for key, value in each.items() if key != "seconds"} for name, each in metrics.items()}


@pytest.mark.parametrize("arm", ["bayesian_layer", "attention"])
def test_a_run_that_diverges_is_a_result(tmp_path, arm):
    run = replace(RUN, arm=arm, learning_rate=1e30)
    metrics = sweep([Run(run.name, run, work)], tmp_path)[run.name]
    assert 0 <= metrics["diverged"] < run.train.steps
    assert metrics["validation"] is None
    assert metrics["test"] is None
    assert metrics["why"]
    assert metrics["curve"] == []


def test_weights_that_overflow_at_the_last_step_have_diverged(tmp_path, monkeypatch):
    def overflow(ready, *args, **options):
        with torch.no_grad():
            ready.model.language_model.lm_head.weight.fill_(float("inf"))
        return Trained(options["until"], 0.0, 0.0)

    monkeypatch.setattr(stages, "take_steps", overflow)
    metrics = work(replace(RUN, tied=False), tmp_path, lambda _: None)
    assert metrics["diverged"] == 6
    assert "cross-entropy on validation examples" in metrics["why"]


def test_a_mistake_is_not_taken_for_divergence(tmp_path):
    with pytest.raises(ValueError, match="batch_size: expected at most 8, the examples of a kind, got 9"):
        work(replace(RUN, kinds=(*KINDS, MQAR(20, 2, vocab_size=64)), train_examples=26, batch_size=9), tmp_path, print)


def test_nothing_is_answered_for_no_queries():
    empty = Answers(*(torch.zeros(0) for _ in range(4)))
    assert mqar_runs.cell(empty) is None
