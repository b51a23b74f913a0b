"""The MQAR experiment: learning rates chosen by validation, claims, notes, and all variants from end to end."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from membydesign.cli.app import app
from membydesign.experiments import load
from membydesign.experiments.mqar import paper
from membydesign.experiments.mqar import run as mqar
from membydesign.experiments.mqar.claims import compare
from membydesign.experiments.mqar.config import CPU, CPU_LONG, PAPER, SMOKE, VARIANTS, MQARConfig
from membydesign.experiments.mqar.models import ARMS
from membydesign.experiments.mqar.results import choose, entries, mean
from membydesign.experiments.mqar.tables import notes, tables
from membydesign.experiments.shared.run_context import RunContext
from membydesign.reports import record
from spent import cpu_seconds


def every(config):
    """All runs of a grid."""
    task = config.task
    models = [(arm, width) for width in task.widths for arm in task.arms]
    return [run for model in models for rate in task.learning_rates for run in config.runs(*model, rate)]


@pytest.mark.parametrize(
    "variant", ["base", *(pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS if name != "base")]
)
def test_the_smoke_command(variant, tmp_path):
    """In well under two minutes, with a complete report, and `--resume` trains nothing again."""
    out, started = tmp_path / "out", cpu_seconds()
    command = ["reproduce", "mqar", "--variant", variant, "--preset", "smoke", "--workers", "1", "--out", str(out)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert cpu_seconds() - started < 120
    found = record.read(out)
    assert found.title == f"{mqar.TITLE} ({variant})"
    assert found.comparisons
    assert not found.missing_figures
    (out / "metrics.json").unlink()
    refused = CliRunner().invoke(app, command)
    assert "holds training runs; continue them with --resume" in " ".join(refused.output.split())
    stamps = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/metrics.json")}
    assert CliRunner().invoke(app, [*command, "--resume"]).exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in out.glob("runs/*/metrics.json")} == stamps
    assert record.read(out).comparisons == found.comparisons


@pytest.mark.parametrize("variant", VARIANTS[:1])
def test_smoke_from_end_to_end(variant, tmp_path):
    config = replace(SMOKE, variant=variant, epochs=1)
    seen, totals = [], []
    context = RunContext(tmp_path, watch=lambda name, now: seen.append(name), total=totals.append)
    outcome = mqar.run(config, context)
    runs = every(config)
    assert totals == [len(runs)]
    assert set(seen) == {run.name for run in runs} == set(outcome.metrics["runs"])
    assert {(e["arm"], e["width"]) for e in outcome.metrics["arms"]} == {(run.arm, run.width) for run in runs}
    figures = mqar.plot(outcome, tmp_path)
    assert {path.name for path in figures.values()} == {f"mqar_{variant}.png", "learning_curves.png"}
    made = record.Provenance.now("mqar", "smoke", 1.0)
    report = record.write(tmp_path, outcome, made, mqar.TITLE, figures).read_text(encoding="utf-8")
    for table in outcome.tables:
        assert table.title in report
    for arm in config.task.arms:
        assert ARMS[arm].title in report
    assert record.read(tmp_path).comparisons == outcome.comparisons
    assert outcome.comparisons, "every variant has claims to compare"

    again = mqar.run(config, RunContext(tmp_path, watch=lambda name, now: seen.append("again"), total=totals.append))
    assert again.metrics == outcome.metrics
    assert (totals[1:], "again" in seen) == ([0], False)


INVENTED = {
    "bayesian_layer": {1e-2: 0.1, 3e-3: 0.2, 1e-3: 0.6, 3e-4: 0.4},
    "gated_deltanet": {1e-2: 0.995},
    "mamba2": {1e-2: None, 3e-3: None, 1e-3: 0.1, 3e-4: 0.2, 1e-4: 0.3},
    "mamba2_no_conv": {1e-2: 0.03, 3e-3: 0.02, 1e-3: 0.02, 3e-4: 0.9, 1e-4: 0.1},
    "attention": {1e-2: 0.7, 3e-3: 0.6},
}
"""Validation accuracies by arm and learning rate, None for one that diverges."""


class Invented(RunContext):
    """Runs that take no time."""

    def sweep(self, runs, *, alone=False):
        found = {run.name: (run.config.arm, run.config.learning_rate) for run in runs}
        return {
            name: made_up(accuracy, arm=arm, rate=rate, diverged=7 if accuracy is None else None)
            for name, (arm, rate) in found.items()
            for accuracy in [INVENTED[arm][rate]]
        }


def test_smaller_learning_rates_are_tried_while_they_are_better():
    """What is not in the table above would be a KeyError."""
    task = replace(CPU.base, arms=tuple(INVENTED), learning_rates=(1e-4, 3e-4, 1e-3, 3e-3, 1e-2))
    outcome = mqar.run(replace(CPU, base=task), Invented())
    assert {e["arm"]: set(e["validation"]) for e in outcome.metrics["arms"]} == {
        arm: {f"{rate:g}" for rate in rates} for arm, rates in INVENTED.items()
    }
    assert [e["learning_rate"] for e in outcome.metrics["arms"]] == [1e-3, 1e-2, 1e-4, 3e-4, 1e-2]
    (table,) = (t for t in outcome.tables if t.title.startswith("Validation accuracy"))
    assert table.headings == ["model", "0.0001", "0.0003", "0.001", "0.003", "0.01", "chosen"]
    assert list(table.rows[0][1:]) == ["not tried", "40.0", "60.0", "20.0", "10.0", "0.001"]
    assert list(table.rows[2][1:]) == ["30.0", "20.0", "10.0", "diverged", "diverged", "0.0001"]
    assert "no further once a smaller one was worse" in table.note
    assert any("smaller learning rates were not tried" in note for note in outcome.notes)


def test_it_is_registered():
    assert load("mqar").TITLE == mqar.TITLE
    assert list(load("mqar").PRESETS) == ["smoke", "cpu", "cpu-long", "paper"]


def test_the_paper_s_settings_to_the_letter():
    assert MQARConfig() == PAPER
    assert (PAPER.epochs, PAPER.batch_size, PAPER.warmup, PAPER.head_dim, PAPER.seeds) == (40, 256, 1024, 32, 1)
    assert PAPER.base.learning_rates == (1e-4, 3e-4, 1e-3)
    assert PAPER.update.learning_rates == (5e-4, 1e-3, 3e-3, 5e-3)
    assert PAPER.block.learning_rates == (1e-4, 3e-4, 5e-4, 1e-3)
    assert [getattr(PAPER, v).train_examples for v in VARIANTS] == [100_000, 160_000, 120_000]
    assert PAPER.base.widths == (64, 128, 256)
    assert PAPER.update.widths == PAPER.block.widths == (128,)
    assert {kind.vocab_size for v in VARIANTS for kind in getattr(PAPER, v).kinds} == {8192}
    for variant in VARIANTS:
        config = replace(PAPER, variant=variant)
        assert config.share_of_paper == 1
        runs = every(config)
        assert len(runs) == len(config.task.arms) * len(config.task.widths) * len(config.task.learning_rates)
        assert {run.warmup for run in runs} == {1024}
        assert {run.train.steps for run in runs} == {config.steps}


def test_cpu_has_the_paper_s_models_and_vocabulary_short_sequences_and_large_learning_rates():
    for variant in VARIANTS:
        ours, theirs = getattr(CPU, variant), getattr(PAPER, variant)
        largest = max(theirs.learning_rates)
        if variant != "block":  # whose runs are long: two learning rates, both above the paper's
            assert {rate for rate in theirs.learning_rates if rate >= 1e-3} <= set(ours.learning_rates)
        assert max(ours.learning_rates) > largest
        assert {kind.vocab_size for kind in ours.kinds} == {8192}
        assert {kind.length for kind in ours.kinds} == {64}
        if variant != "base":  # for which the paper gives neither lengths nor pairs
            assert {k.pairs for k in ours.kinds} <= {k.pairs for k in theirs.kinds}
            assert {(k.updates, k.block) for k in ours.kinds} <= {(k.updates, k.block) for k in theirs.kinds}
        assert 128 in ours.widths
        config = replace(CPU, variant=variant)
        assert config.share_of_paper < 1
        assert {run.warmup for run in every(config)} == {config.steps // 10}


def test_cpu_long_has_the_paper_s_sequences():
    for variant in VARIANTS:
        long, short, theirs = (getattr(preset, variant) for preset in (CPU_LONG, CPU, PAPER))
        assert long.kinds == theirs.kinds != short.kinds
        assert set(long.arms) < set(short.arms)
        assert replace(CPU_LONG, variant=variant).share_of_paper == replace(CPU, variant=variant).share_of_paper


def test_seeds_are_runs_of_their_own():
    config = replace(SMOKE, seeds=3)
    assert len(every(config)) == 3 * len(every(SMOKE))
    assert len({run.name for run in every(config)}) == len(every(config))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"variant": "blocks"}, "variant: expected one of base, update, block, got 'blocks'"),
        ({"seeds": 0}, "seeds: expected at least 1, got 0"),
        ({"epochs": 0}, "epochs: expected at least 1, got 0"),
    ],
)
def test_bad_settings_are_named(bad, message):
    with pytest.raises(ValueError, match=message):
        replace(SMOKE, **bad)


def test_bad_tasks_are_named():
    with pytest.raises(ValueError, match="arms: expected names among bayesian_layer, .*, got 'lstm'"):
        replace(PAPER.base, arms=("bayesian_layer", "lstm"))
    with pytest.raises(ValueError, match=r"learning_rates: expected at least one, and no two alike, got \(\)"):
        replace(PAPER.base, learning_rates=())
    with pytest.raises(ValueError, match=r"widths: expected at least one, and no two alike, got \(128, 128\)"):
        replace(PAPER.base, widths=(128, 128))


def made_up(validation, *, loss=1.0, test=0.5, arm="bayesian_layer", width=128, rate=1e-3, seed=0, diverged=None):
    """Metrics of a run; those of one that diverged have neither validation nor test."""
    cell = {"accuracy": test, "cross_entropy": 1.0, "queries": 400}
    split = {"untouched": cell, "updated": cell, "by_rewrites": {"0": cell, "1": cell}}
    valid = {"accuracy": validation, "cross_entropy": loss, "queries": 100}
    return {
        "arm": arm,
        "width": width,
        "learning_rate": rate,
        "seed": seed,
        "parameters": 10,
        "state": {"mean": 4096, "covariance": 4096, "convolution": 0, "recurrent": 8192},
        "steps": 100,
        "tokens": 1000,
        "seconds": 2.0,
        "diverged": diverged,
        "validation": None if diverged is not None else valid,
        "test": None
        if diverged is not None
        else {**cell, **split, "by_kind": [], "by_pairs": {key: {**cell, **split} for key in ("4", "16")}},
        "curve": [] if diverged is not None else [{"step": n, **valid} for n in (10, 20, 30)],
    }


def test_validation_chooses_and_the_test_does_not():
    rates = {1e-4: [made_up(0.6, test=0.9)], 1e-3: [made_up(0.7, test=0.1)], 1e-2: [made_up(0.5, test=0.99)]}
    assert choose(rates) == 1e-3
    found = entries([{**run, "learning_rate": rate} for rate, runs in rates.items() for run in runs])
    assert [(e["learning_rate"], e["test"]["accuracy"]) for e in found] == [(1e-3, 0.1)]
    assert {rate: cell["accuracy"] for rate, cell in found[0]["validation"].items()} == {
        "0.0001": 0.6,
        "0.001": 0.7,
        "0.01": 0.5,
    }
    assert (found[0]["seconds"], found[0]["seconds_of_all"]) == (2.0, 6.0)


def test_equal_accuracies_are_decided_by_cross_entropy():
    assert (
        choose({1e-4: [made_up(1.0, loss=0.3)], 1e-3: [made_up(1.0, loss=0.1)], 1e-2: [made_up(1.0, loss=0.2)]}) == 1e-3
    )


def test_what_diverged_is_not_chosen():
    assert choose({1e-4: [made_up(0.01)], 1e-2: [made_up(0.9, diverged=3)]}) == 1e-4
    steady, shaky = [made_up(0.2), made_up(0.2)], [made_up(0.9), made_up(0.9, diverged=3)]
    assert choose({1e-4: steady, 1e-2: shaky}) == 1e-4
    assert choose({1e-2: [made_up(0.9, diverged=3)]}) is None


def test_means_are_over_seeds():
    found = entries([made_up(0.5, test=0.4, seed=0), made_up(0.7, test=0.8, seed=1)])
    assert found[0]["test"]["accuracy"] == pytest.approx(0.6)
    assert found[0]["accuracy_by_seed"] == [0.4, 0.8]
    assert found[0]["curve"][0] == {"step": 10, "accuracy": pytest.approx(0.6), "cross_entropy": 1.0, "queries": 100}
    assert mean([{"a": [1, None]}, {"a": [2, None]}]) == {"a": [1.5, None]}


def accuracies(**arms):
    return entries([made_up(0.5, arm=arm, test=x) for arm, x in arms.items()])


def test_claims_of_update():
    config = replace(PAPER, variant="update")
    held, missing = compare(config, accuracies(bayesian_layer=0.87, gated_deltanet=0.61, mamba2=0.58))
    assert [check.agrees for check in held] == [True] * 4
    assert missing == []
    better, _ = compare(config, accuracies(bayesian_layer=0.9999, gated_deltanet=0.61, mamba2=0.58))
    assert [check.agrees for check in better] == [True] * 4
    lost, _ = compare(config, accuracies(bayesian_layer=0.5, gated_deltanet=0.61, mamba2=0.3))
    assert [check.agrees for check in lost] == [False, True, False, False]
    alone, missing = compare(config, accuracies(bayesian_layer=0.9))
    assert [type(check).__name__ for check in alone] == ["Bound"]
    assert missing == ["Not compared with the paper, since not run or diverged: Gated DeltaNet, Mamba-2."]
    other, _ = compare(replace(CPU, variant="update"), accuracies(bayesian_layer=0.9, gated_deltanet=0.999))
    assert [(type(check).__name__, check.agrees) for check in other] == [("Ordering", False)]


def test_claims_of_base():
    held, _ = compare(
        replace(PAPER, variant="base"), accuracies(bayesian_layer=0.995, gated_deltanet=0.999, mamba2=0.5)
    )
    assert [check.agrees for check in held] == [True, True]
    assert "Gated DeltaNet, 99.90 %" in held[1].quantity
    lost, _ = compare(PAPER, accuracies(bayesian_layer=0.98, attention=1.0))
    assert [check.agrees for check in lost] == [False, False]
    alone, _ = compare(PAPER, accuracies(bayesian_layer=0.995))
    assert len(alone) == 1
    widths = entries([made_up(0.5, width=64, test=0.9), made_up(0.5, width=256, test=0.995)])
    checks, _ = compare(PAPER, widths)
    assert [(check.agrees, round(check.as_dict()["ours"], 6)) for check in checks] == [(True, 99.5), (True, 9.5)]
    assert not any(check.tested for check in checks), "the paper has a third width"
    assert [check.tested for check in held] == [False, True]
    every_width = entries([made_up(0.5, width=width, test=0.995) for width in PAPER.base.widths])
    assert all(check.tested for check in compare(PAPER, every_width)[0])
    nothing, missing = compare(PAPER, accuracies(attention=1.0))
    assert (nothing, len(missing)) == ([], 1)


def test_claims_of_block():
    block = replace(PAPER, variant="block")
    checks, missing = compare(
        replace(PAPER, variant="block"), accuracies(bayesian_layer=0.95, gated_deltanet=0.2, gated_deltanet_no_conv=0.5)
    )
    assert [(check.agrees, missing) for check in checks] == [(True, []), (False, [])]
    checks, missing = compare(block, accuracies(bayesian_layer=0.95, gated_deltanet=1.0))
    assert len(checks) == 1
    assert "Gated DeltaNet, no conv." in missing[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_arm_that_always_diverges_is_shown_as_such(variant, tmp_path):
    config = replace(CPU, variant=variant)
    arms = {arm: None if arm == "gated_deltanet_no_conv" else 0.9 for arm in config.task.arms}
    runs = [
        made_up(0.5, arm=arm, rate=rate, test=x or 0, diverged=7 if x is None else None)
        for arm, x in arms.items()
        for rate in config.task.learning_rates
    ]
    found = entries(runs)
    made = {table.title: table for table in tables(config, found)}
    rates = next(row for row in made["Validation accuracy by learning rate (%)"].rows if "no conv." in str(row[0]))
    assert list(rates[1:]) == ["diverged"] * len(config.task.learning_rates) + ["—"]
    assert any("Diverged, and not chosen: Gated DeltaNet, no conv. at" in note for note in notes(config, found))
    outcome = record.Outcome(config, [], {"variant": variant, "arms": found}, tables=list(made.values()))
    assert len(mqar.plot(outcome, tmp_path)) == 2


def test_notes_claim_no_more_than_was_trained():
    found = accuracies(bayesian_layer=0.5)
    short = notes(replace(CPU, variant="update"), found)
    assert short[0].startswith("Every model saw 1.5 % of the paper's training: 2 epochs of 48,000 sequences")
    assert "batches of 32, not 256" in short[1]
    whole = notes(PAPER, found)
    assert whole[0].startswith("Every model was trained as long as in the paper: 40 epochs of 100,000 sequences")
    assert not any(note.startswith("Unlike the paper") for note in whole)
    assert paper.NOTES["base"][0] in whole
    rising = [{**found[0], "curve": [{"step": n, "accuracy": n / 100} for n in (10, 20, 30)]}]
    assert any("still rose over the last fifth of training: Bayesian Layer" in note for note in notes(PAPER, rising))
    assert any("Chosen at an edge of the grid" in note for note in whole)
