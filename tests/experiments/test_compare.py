"""The comparison of all designs: predictive probabilities against closed forms, budgets, and small runs."""

import json
import math
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from membydesign.cli.app import app
from membydesign.design import catalogue
from membydesign.experiments.collision.claims import MARGINS_BAYESIAN, MARGINS_RESET
from membydesign.experiments.compare import calibration, collision, tables
from membydesign.experiments.compare.calibration import NOISES, Calibration, Streams
from membydesign.experiments.compare.config import BUDGET, PRESETS, CompareConfig, CompareRun, work
from membydesign.experiments.compare.model import RecallModel
from membydesign.experiments.compare.parameters import fixed as numbers_of
from membydesign.experiments.compare.run import lacks
from membydesign.experiments.compare.sizes import MOST, Cannot, fit, most_keys, most_values
from membydesign.filter import filter_sequence

fixed: Any = numbers_of  # its numbers go to filter_sequence as keywords, whose types differ
TOLD = {"process_noise": 0.0, "write_noise": 0.1, "prior_variance": 1.0}


def normal_cdf(x):
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def student_cdf_of_4(x):
    """The distribution function of a Student-t with four degrees of freedom."""
    return 0.5 + 3 / 8 * x / (1 + x**2 / 4).sqrt() * (1 - x**2 / (12 * (1 + x**2 / 4)))


@pytest.mark.parametrize("name", ["bayesian_layer", "unknown_scale"])
def test_the_probability_below_a_value_is_that_of_the_predictive_density(name):
    torch.manual_seed(0)
    design, B = catalogue[name], 5
    k = torch.nn.functional.normalize(torch.randn(B, 1, 4, dtype=torch.float64), dim=-1)
    v = torch.randn(B, 1, 1, dtype=torch.float64)
    state = design.prior(calibration.Sizes(B, 1, 4, 1), dtype=torch.float64, device=None)
    found = calibration.probability_below(design, fixed(design, TOLD), state, k, v, 401)
    deviation = math.sqrt(0.1 + 1.0)  # r² and the prior variance along a unit key
    if name == "bayesian_layer":
        expected = normal_cdf(v / deviation)
    else:  # a = 2, b = 1
        expected = student_cdf_of_4(v / (math.sqrt(1 / 2) * deviation))
    torch.testing.assert_close(found, expected[:, 0, 0], rtol=0, atol=2e-4)


def test_coverage_as_told_is_nominal_and_a_larger_noise_shows():
    config = Calibration(D=4, keys=6, writes=120, streams=64, judged=15)
    plain, scaled = catalogue["bayesian_layer"], catalogue["unknown_scale"]
    told = calibration.judge(plain, config, config.draw("as told", 0))
    assert told["coverage 90"] == pytest.approx(0.9, abs=0.04)
    assert told["coverage 50"] == pytest.approx(0.5, abs=0.06)
    larger = config.draw("larger", 0)
    assert calibration.judge(plain, config, larger)["coverage 90"] < 0.75
    assert calibration.judge(scaled, config, larger)["coverage 90"] == pytest.approx(0.9, abs=0.04)


def test_predictions_are_judged_in_doublings_of_the_length():
    assert Calibration(writes=240).doublings() == [range(30, 60, 3), range(60, 120, 7), range(120, 240, 15)]
    assert Calibration(writes=16, judged=2).doublings() == [range(8, 16, 4)]
    config = Calibration(D=4, keys=6, writes=60, streams=8)
    found = calibration.judge(catalogue["bayesian_layer"], config, config.draw("as told", 0))
    assert found["by writes"] == pytest.approx({"30 to 60": found["coverage 90"]})


def test_standard_errors_are_those_of_means_over_streams():
    config = Calibration(D=4, keys=6, writes=80, streams=400, judged=4)
    design = catalogue["bayesian_layer"]
    found = [calibration.judge(design, config, config.draw("as told", seed)) for seed in (0, 1)]
    for each in found:
        # noise as told: predictions are independent, so the error is binomial
        binomial = math.sqrt(0.9 * 0.1 / (400 * 4))
        assert each["coverage 90 error"] == pytest.approx(binomial, rel=0.2)
    mean = (found[0]["coverage 90"] + found[1]["coverage 90"]) / 2
    error = math.hypot(*(each["coverage 90 error"] for each in found)) / 2
    assert tables.with_error([{"a": each} for each in found], "a", "coverage 90") == f"{mean:.3f} ± {error:.3f}"


def test_log_scores_are_those_of_the_filter():
    config = Calibration(D=4, keys=6, writes=20, streams=3)
    design, streams = catalogue["bayesian_layer"], config.draw("as told", 0)
    k, v = streams.k[:, :, None], streams.values[..., None, None]
    out = filter_sequence(design, k, k, v, return_evidence=True, **fixed(design, TOLD))
    found = calibration.judge(design, config, streams)["log score"]
    assert out.write_log_evidence is not None
    assert found == pytest.approx(out.write_log_evidence[:, 10:].mean().item(), abs=1e-12)


def test_what_was_never_written_by_counting():
    config = Calibration(D=4, keys=6, writes=4, streams=3)
    design, streams = catalogue["bayesian_layer_diagonal"], config.draw("as told", 0)
    wins = []
    for b in range(3):
        k, v = streams.k[b : b + 1, :, None], streams.values[b : b + 1, :, None, None]
        belief = filter_sequence(design, k, k, v, **fixed(design, TOLD)).belief
        variance = [belief.variance(key[None, None]).item() for key in streams.codebook[b]]
        seen = set(streams.written[b].tolist())
        wins += [float(variance[i] > variance[j]) for i in range(6) if i not in seen for j in seen]
    # the mean is over all pairs of all streams
    found = calibration.judge(design, config, streams)["never written"]
    assert found == pytest.approx(sum(wins) / len(wins), abs=1e-12)


@pytest.mark.parametrize("noise", NOISES)
def test_noises_are_what_they_are_called(noise):
    config = Calibration(streams=400, writes=200)
    streams: Streams = config.draw(noise, 0)
    quiet = config.draw("as told", 0)
    assert torch.equal(streams.written, quiet.written)
    factor = calibration._factor(noise, 400, 200, torch.Generator().manual_seed(0))
    low, high = {
        "as told": (1, 1),
        "smaller": (1 / 8, 1 / 2),
        "larger": (2, 8),
        "changing": (1 / 4, 4),
        "heavy-tailed": (1, 100),
    }[noise]
    assert low <= factor.min() <= factor.max() <= high
    constant = bool((factor == factor[:, :1]).all())
    assert constant == (noise in ("as told", "smaller", "larger"))
    if noise == "heavy-tailed":
        assert (factor == 100).double().mean().item() == pytest.approx(0.1, abs=0.01)
    if noise == "changing":
        switches = (factor[:, 1:] != factor[:, :-1]).double().mean().item()
        assert switches == pytest.approx(1 / 40, abs=0.003)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("linear_attention", "states no variance"),
        ("count_memory", "keys must be >= 0"),
        ("hidden_markov", "not a density of the value"),
    ],
)
def test_designs_that_cannot_be_judged_say_why(name, why):
    config = Calibration(D=4, keys=6, writes=16, streams=2)
    with pytest.raises(Cannot, match=why):
        config.measure(name, 0)
    done = work(CompareRun(design=name, task=config, seed=0), None, lambda _: None)  # pyright: ignore[reportArgumentType]
    assert why in done["cannot"]


def test_collisions_end_as_in_the_paper():
    task = collision.Collision()
    reset = task.measure("covariance_reset", 0)
    assert reset["at_the_end"] == pytest.approx(float(MARGINS_RESET["t=112"]), abs=0.005)
    assert reset["before_distractors"] == pytest.approx(float(MARGINS_RESET["t=52"]), abs=0.005)
    design = catalogue["bayesian_layer"]
    from_three = design.replace(covariance=design.covariance.with_prior(3.0))  # the paper's prior
    found = collision.collide(from_three, task.schedule, collision.stated(task.schedule))
    assert found["at_the_end"] == pytest.approx(float(MARGINS_BAYESIAN["t=112"]), abs=0.005)
    assert found["below_chance_from"] == "never"


def test_budgets_are_spent_and_kept():
    expected = {"bayesian_layer": (16, 16), "deltanet": (32, 32), "unknown_scale": (16, 16)}
    for name, (rows, columns) in expected.items():
        assert rows == most_keys(catalogue[name], 16, BUDGET).D
        assert columns == most_values(catalogue[name], 16, BUDGET).M
    for name, design in catalogue.items():
        rows, columns = most_keys(design, 16, BUDGET), most_values(design, 16, BUDGET)
        assert rows.state == design.state_size(rows.D, 16).total <= BUDGET, name
        assert columns.state == design.state_size(16, columns.M).total <= BUDGET, name
        larger = [fit(design, D, 16) for D in range(rows.D + 1, MOST + 1)]
        larger += [fit(design, 16, M) for M in range(columns.M + 1, MOST + 1)]
        assert all(each is None or each.state > BUDGET for each in larger), name
    with pytest.raises(Cannot, match="above the budget"):
        most_values(catalogue["bayesian_layer"], 16, 100)


@pytest.mark.parametrize("name", catalogue)
def test_every_design_can_be_given_keys(name):
    design = catalogue[name]
    sizes = most_values(design, 16, BUDGET)
    torch.manual_seed(0)
    model = RecallModel(design, sizes, 33, 16)
    addresses = torch.nn.functional.normalize(torch.randn(2, 6, 16), dim=-1)
    logits = model(torch.randn(2, 6, 33), addresses, 2)
    assert logits.shape == (2, 2, 16)
    logits.sum().backward()
    # a query that nothing was written at reads something else than one at a written address
    assert model.memory.v_proj.weight.grad is not None
    assert model.memory.v_proj.weight.grad.abs().sum() > 0
    inputs = model.memory.step_inputs(torch.randn(2, 6, 64), None, None)[0]
    if design.key_bound == "finite":
        torch.testing.assert_close(inputs.k[:, :, 0], addresses, rtol=0, atol=1e-5)
    else:
        torch.testing.assert_close(inputs.k[:, :, 0], (8 * addresses).softmax(-1), rtol=0, atol=1e-5)
    assert torch.equal(inputs.q, inputs.k)


def test_every_number_of_a_fixed_parameter_is_within_its_bounds():
    for design in catalogue.values():
        values = fixed(design, TOLD)
        assert set(values) == {parameter.name for parameter in design.step_parameters}
        q = torch.zeros(1, 2, 1, 16, dtype=torch.float64)
        filter_sequence(design, q, q, torch.zeros(1, 2, 1, 6, dtype=torch.float64), **values)  # checks bounds


def test_results_that_lack_a_design_are_not_finished():
    config = CompareConfig()
    each = {"collision": [{}], "recall": [{}] * 3, "crowding": [{}] * 3, "calibration": [{}] * 3}
    everything = {"designs": {name: dict(each) for name in catalogue}}
    assert not lacks(config, everything)
    everything["designs"]["deltanet"]["recall"] = [{}]
    assert lacks(config, everything)
    del everything["designs"]["deltanet"]
    assert lacks(config, everything)
    assert not lacks(CompareConfig(designs=("bayesian_layer",)), everything)
    with pytest.raises(ValueError, match="designs: expected names of the catalogue"):
        CompareConfig(designs=("delta_net",))


def test_the_command_writes_a_report_and_adds_designs(tmp_path):
    out = tmp_path / "compare"
    command = ["compare", "--preset", "smoke", "--seeds", "1", "--workers", "1", "--out", str(out), "--only"]
    done = CliRunner().invoke(app, [*command, "bayesian_layer"])
    assert done.exit_code == 0, done.output
    first = (out / "runs" / "recall-bayesian_layer-seed0" / "metrics.json").stat().st_mtime_ns
    done = CliRunner().invoke(app, [*command, "bayesian_layer,count_memory", "--resume"])
    assert done.exit_code == 0, done.output
    assert (out / "runs" / "recall-bayesian_layer-seed0" / "metrics.json").stat().st_mtime_ns == first
    found = json.loads((out / "metrics.json").read_text())
    assert list(found["metrics"]["designs"]) == ["bayesian_layer", "count_memory"]
    assert {(out / name).read_bytes()[:4] for name in found["figures"].values()} == {b"\x89PNG"}
    report = (out / "report.md").read_text()
    assert "keys must be >= 0 and values >= 0" in report
    assert f"budget of {BUDGET} numbers per head" in report.replace("\n", " ")
    done = CliRunner().invoke(app, [*command, "bayesian_layer,deltanet", "--finished"])
    assert done.exit_code == 0, done.output
    found = json.loads((out / "metrics.json").read_text())
    assert [table["rows"] for table in found["tables"]][-1] == [
        ["deltanet", task, "not run"] for task in ("collision", "recall", "crowding", "calibration")
    ]
    assert not (out / "runs" / "recall-deltanet-seed0").exists()
    again = CliRunner().invoke(app, [*command, "bayesian_layer"])
    assert again.exit_code == 2
    wrong = CliRunner().invoke(app, [*command, "bayes"])
    assert wrong.exit_code == 2
    assert "expected names of the catalogue" in wrong.stderr


def test_the_presets_have_the_tasks_of_the_docs():
    cpu = PRESETS["cpu"]
    assert cpu.names == tuple(catalogue)
    assert len(cpu.runs()) == len(catalogue) * (1 + 3 * cpu.seeds)
