"""Learned recall and random-key crowding: metrics by hand, the paper's settings, and small runs from end to end."""

import json
import math
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from membydesign.cli.app import app
from membydesign.data.seeds import generator
from membydesign.experiments.crowding import run as crowding
from membydesign.experiments.crowding.config import best_scale
from membydesign.experiments.crowding.unlearned import unlearned_answers
from membydesign.experiments.recall import run as recall
from membydesign.experiments.recall.config import metrics
from membydesign.experiments.shared.addressed import COMPARED, PRIOR, UPDATES, WRITE_NOISE
from membydesign.experiments.shared.addressed_sweep import OPEN, Results
from spent import cpu_seconds


def test_metrics_by_hand():
    logits = torch.tensor([[[2.0, 1.0, 0.0, -1.0], [0.0, 3.0, 1.0, 1.0]]])
    found = metrics(logits, torch.tensor([[0, 2]]), torch.tensor([[1, 1]]))
    p = [[math.exp(x) / sum(map(math.exp, row)) for x in row] for row in logits[0].tolist()]
    pairwise = [math.exp(2) / (math.exp(2) + math.exp(1)), math.exp(1) / (math.exp(1) + math.exp(3))]
    assert found["accuracy"] == 0.5
    assert found["pairwise_margin"] == pytest.approx(sum(2 * x - 1 for x in pairwise) / 2, rel=1e-5)
    assert found["full_margin"] == pytest.approx((p[0][0] - p[0][1] + p[1][2] - p[1][1]) / 2, rel=1e-5)
    assert found["cross_entropy"] == pytest.approx(-(math.log(p[0][0]) + math.log(p[1][2])) / 2, rel=1e-5)


def test_calibration_finds_the_factor():
    torch.manual_seed(0)
    true = torch.randn(20000, 8)
    answers = torch.distributions.Categorical(logits=true).sample()
    assert best_scale(true, answers) == pytest.approx(1, rel=0.06)
    assert best_scale(4 * true, answers) == pytest.approx(0.25, rel=0.06)


def test_the_settings_are_the_paper_s():
    config = recall.PRESETS["paper"]
    train = config.train
    assert (train.steps, train.batch_size, train.learning_rate) == (2500, 256, 3e-4)
    assert (train.betas, train.weight_decay, train.clip) == ((0.9, 0.999), 1e-4, 1.0)
    assert {train.rate(step) for step in (0, 100, 2499)} == {3e-4}
    assert config.seeds == 3
    assert config.compared == COMPARED
    run = config.runs(OPEN[0])[0]
    assert (run.task.pairs, run.task.target_writes) == (8, 4)
    assert (run.distractor_writes, run.overlap) == ((1, 2, 4, 8), (0.60, 0.80))
    assert (run.test_range_writes, run.test_range_overlap) == ((16, 32, 64), (0.85, 0.95))
    assert (run.test_distractor_writes[-1], run.test_overlaps[-1], run.test_writes) == (256, 0.95, 64)
    crowded = crowding.PRESETS["paper"]
    assert crowded.train == train
    assert (crowded.writes, crowded.test_writes) == ((16, 32, 48, 64), (16, 32, 48, 64, 96, 128, 192, 256))
    task = crowded.task
    assert (task.raw_dim, task.address_dim, task.labels, task.queries) == (64, 16, 64, 8)


def test_every_model_of_a_seed_sees_the_same_sequences():
    batches = [recall.PRESETS["paper"].runs(choice)[0].batch(3) for choice in OPEN[:2]]
    assert torch.equal(batches[0]["tokens"], batches[1]["tokens"])


def test_results_over_seeds():
    runs = [{"steps": 5, "tests": {"5": {"a": {"x": value}}, "2": {"a": {"x": 0.0}}}} for value in (1.0, 2.0, 6.0)]
    results = Results({}, {"bayesian_layer": runs})
    assert results.test("bayesian_layer", "a", "x") == pytest.approx((3.0, math.sqrt(7)))
    assert results.test("bayesian_layer", "a", "x", step=2).mean == 0
    assert str(results.test("bayesian_layer", "a", "x")) == "3.000 ± 2.646"


def test_without_process_noise_the_unlearned_filter_is_ridge_regression():
    config = replace(crowding.PRESETS["smoke"], test_examples=4)
    step = {"process_noise": 0.0, "write_noise": WRITE_NOISE}
    logits, answers = unlearned_answers(config, 24, "test", UPDATES["bayesian_layer"].design, step)
    batch = config.task.sample(4, 24, generator("crowding", "test", 24))
    keys, asked = batch.addresses.double().split((24, config.task.queries), 1)
    values = batch.tokens[:, :24, -config.task.labels :].double()
    ridge = keys.mT @ keys + WRITE_NOISE / PRIOR * torch.eye(config.task.address_dim)
    expected = asked @ torch.linalg.solve(ridge, keys.mT @ values)
    torch.testing.assert_close(logits.double(), expected.flatten(0, 1), rtol=0, atol=1e-5)
    assert torch.equal(answers, batch.answers.flatten())


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["recall", "crowding"])
def test_a_smoke_run_writes_a_complete_report(experiment, tmp_path):
    out, started = tmp_path / "result", cpu_seconds()
    command = ["reproduce", experiment, "--preset", "smoke", "--out", str(out), "--workers", "1"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert cpu_seconds() - started < 120
    found = json.loads((out / "metrics.json").read_text())
    assert len(found["comparisons"]) == {"recall": 22, "crowding": 5}[experiment]
    assert {name for name in found["figures"].values() if (out / name).is_file()} == set(found["figures"].values())
    report = (out / "report.md").read_text()
    assert all(UPDATES[update].title in report for update in COMPARED)
    assert "What the paper leaves open" in report
    assert len(list((out / "runs").glob("*/metrics.json"))) == {"recall": 14, "crowding": 16}[experiment]
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 2
    assert "holds training runs; continue them with --resume" in again.stderr
    before = (out / "metrics.json").read_text()
    assert CliRunner().invoke(app, [*command, "--resume"]).exit_code == 0
    assert (out / "metrics.json").read_text() == before
    other = CliRunner().invoke(app, [*command[:3], "paper", *command[4:], "--resume"])
    assert other.exit_code == 2
    assert "holds a run with other settings" in other.stderr


def test_models_learn_recall_in_a_few_steps(tmp_path):
    """Thirty steps tell the Bayesian Layer from a raw delta rule where overlaps are larger than in training."""
    from membydesign.experiments.shared.addressed_runs import work

    smoke = recall.PRESETS["smoke"]
    found = {}
    for update in ("bayesian_layer", "deltanet_style"):
        choice = type(OPEN[0])(update)
        found[update] = work(smoke.runs(choice)[0], tmp_path / update, lambda _: None)["tests"]["30"]
    assert found["bayesian_layer"]["training_range"]["accuracy"] > 0.95
    assert found["bayesian_layer"]["overlap"]["0.95"]["accuracy"] > 0.5
    assert found["deltanet_style"]["overlap"]["0.95"]["accuracy"] < 0.2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["recall", "--variant", "base"], "--variant: recall has no variant to choose"),
        (["recall", "--preset", "huge"], "--preset: expected one of smoke, cpu, paper, got 'huge'"),
        (["collision", "--seeds", "3"], "--seeds: collision has no seeds to choose"),
    ],
)
def test_bad_options_are_named(words, message):
    done = CliRunner().invoke(app, ["reproduce", *words])
    assert done.exit_code == 2
    assert message in done.stderr
