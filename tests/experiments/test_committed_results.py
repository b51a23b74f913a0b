"""The settings of committed results are those that today's presets describe, so that `--resume` recognises them."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from membydesign.experiments import load
from membydesign.experiments.shared.addressed_sweep import Choice
from membydesign.files import to_json
from membydesign.reports import page, record
from membydesign.reports.page_markdown import markdown

RESULTS = Path(__file__).parents[2] / "results"


def settings(folder):
    """The settings of a committed result: its preset, as the command would choose it."""
    kept = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    name = folder.relative_to(RESULTS).parts[0]
    preset = load("designs" if name == "compare" else name).PRESETS[kept.pop("preset")]
    options = ("variant", "seeds") if hasattr(preset, "designs") else ("variant",)
    changes = {option: kept[option] for option in options if option in kept}
    return kept, replace(preset, **changes)  # pyright: ignore[reportArgumentType]


def runs_of(config):
    """The settings of every run of an experiment, by the name of its folder."""
    if hasattr(config, "designs"):
        return {run.name: run.config for run in config.runs()}
    if hasattr(config, "compared"):
        choices = [*(Choice(update, seeds=config.seeds) for update in config.compared), *config.choices]
        return by_name(run for choice in choices for run in config.runs(choice))
    if hasattr(config, "task"):
        task = config.task
        models = [(arm, width) for width in task.widths for arm in task.arms]
        return by_name(run for model in models for rate in task.learning_rates for run in config.runs(*model, rate))
    rate = max(config.learning_rates)  # the one that was chosen
    return by_name([*config.probes(), *config.runs(rate)])


def by_name(runs):
    """The settings of runs that have a name themselves."""
    return {run.name: run for run in runs}


@pytest.mark.parametrize(
    "name",
    [
        *("collision", "recall", "crowding", "mqar/base", "mqar/update", "mqar/block", "wikitext", "retrofit"),
        *("compare", "length"),
    ],
)
def test_the_settings_of_an_experiment_are_recognised(name):
    kept, config = settings(RESULTS / name)
    assert json.loads(to_json(asdict(config))) == kept


@pytest.mark.parametrize(
    "name", ["recall", "crowding", "mqar/base", "mqar/update", "mqar/block", "wikitext", "retrofit"]
)
def test_the_share_of_the_papers_training_follows_from_the_settings(name):
    metrics = json.loads((RESULTS / name / "metrics.json").read_text())
    assert metrics["training_share"] == settings(RESULTS / name)[1].share_of_paper


@pytest.mark.parametrize("path", sorted(RESULTS.glob("**/report.md")), ids=lambda path: path.parent.name)
def test_reports_are_those_of_their_results(path):
    shown = page.result(record.read(path.parent))
    assert path.read_text(encoding="utf-8") == markdown(shown, path.parent)


@pytest.mark.parametrize(
    "name", ["recall", "crowding", "mqar/base", "mqar/update", "mqar/block", "wikitext", "compare", "length"]
)
def test_finished_runs_are_recognised(name):
    runs = {run: json.loads(to_json(asdict(own))) for run, own in runs_of(settings(RESULTS / name)[1]).items()}
    folders = sorted((RESULTS / name / "runs").glob("*/config.json"))
    assert folders
    for path in folders:
        assert runs[path.parent.name] == json.loads(path.read_text(encoding="utf-8"))


def test_intervals_for_noise_of_unknown_size_are_calibrated_if_the_scale_is_learned():
    designs = json.loads((RESULTS / "compare" / "metrics.json").read_text())["metrics"]["designs"]

    def coverage(name, noise):
        seeds = [each[noise]["coverage 90"] for each in designs[name]["calibration"]]
        assert len(seeds) == 3
        return sum(seeds) / len(seeds)

    for noise in ("smaller", "larger"):
        assert 0.88 <= coverage("unknown_scale", noise) <= 0.92
    assert coverage("bayesian_layer", "smaller") > 0.95
    assert coverage("bayesian_layer", "larger") < 0.7
    assert 0.88 <= coverage("bayesian_layer", "as told") <= 0.92


def test_gains_far_beyond_training_are_those_of_training_if_drift_is_stationary():
    found = json.loads((RESULTS / "length" / "metrics.json").read_text())["metrics"]

    def distances(kind, name):
        return [each["gains"]["64"]["distance"] for each in found[kind][name]]

    def mean(kind, name):
        return sum(distances(kind, name)) / len(distances(kind, name))

    assert min(distances("untrained", "bayesian_layer")) > 0.4
    for name in ("stationary_bayesian_layer", "partial_reset"):
        assert max(distances("untrained", name)) < 0.2
        assert max(distances("designs", name)) < 0.12
        assert 2 * mean("designs", name) < mean("designs", "bayesian_layer")
