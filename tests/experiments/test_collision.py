"""The collision experiment, against a filter written out here in a few lines, and against itself in long runs."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from membydesign import theory
from membydesign.experiments.collision import run as collision
from membydesign.experiments.collision import trajectory
from membydesign.experiments.collision.figures import predicted_gains
from membydesign.reports.comparison import Comparison, printed

CONFIG = collision.PRESETS["paper"]


@pytest.fixture(scope="module")
def outcome():
    return collision.run(CONFIG)


def test_every_number_of_the_paper_agrees(outcome):
    disagreeing = [c for c in outcome.comparisons if not c.agrees]
    assert not disagreeing
    assert len(outcome.comparisons) == 68


def test_the_schedule_is_the_paper_s():
    written = trajectory.schedule(CONFIG).tolist()
    assert written == [0, 1, 2, 3, 4, 5] * 2 + [1] * 40 + [0] * 60
    assert (CONFIG.target_start, CONFIG.distractor_start, CONFIG.steps) == (12, 52, 112)
    k = trajectory.keys(CONFIG, 0.92)
    expected = torch.eye(6, dtype=torch.float64)
    expected[0, 1] = expected[1, 0] = 0.92
    torch.testing.assert_close(k @ k.T, expected)


def by_hand(rho: float, update: str, c: float = 0.05) -> torch.Tensor:
    """The margin after every step, from the update rules of the appendix and nothing of ours."""
    r2 = l2 = 0.05
    eye = torch.eye(16, dtype=torch.float64)
    k = [eye[0], rho * eye[0] + math.sqrt(1 - rho**2) * eye[1], eye[2], eye[3], eye[4], eye[5]]
    M, P, margins = torch.zeros(16, 6, dtype=torch.float64), 3.0 * eye, []
    for i in [0, 1, 2, 3, 4, 5] * 2 + [1] * 40 + [0] * 60:
        v = torch.eye(6, dtype=torch.float64)[i]
        if update == "linear":
            M = M + 0.5 * torch.outer(k[i], v)
        else:
            predicted = c * eye if update == "reset" else P + l2 * eye
            gain = predicted @ k[i] / (r2 + k[i] @ predicted @ k[i])
            M = M + torch.outer(gain, v - M.T @ k[i])
            P = predicted - torch.outer(gain, predicted @ k[i])
            if update == "diagonal":
                P = torch.diag(torch.diag(P))
        y = M.T @ k[1]
        margins.append(torch.tanh((y[1] - y[0]) / 2))
    return torch.stack(margins)


@pytest.mark.parametrize("rho", [0.92, 0.45])
def test_the_five_updates_by_hand(rho):
    ours = trajectory.updates(CONFIG, (rho,))
    names = {
        "Bayesian Layer": "dense",
        "Diagonal covariance": "diagonal",
        "Covariance reset": "reset",
        "DeltaNet-style": "reset",
        "Linear Attention": "linear",
    }
    assert list(ours) == list(names)
    for name, update in names.items():
        torch.testing.assert_close(ours[name].margin()[0], by_hand(rho, update), rtol=1e-11, atol=1e-11)


def test_the_fixed_priors_by_hand():
    margins = trajectory.gain_matched(CONFIG).margin()
    for i, c in enumerate(CONFIG.fixed_priors):
        torch.testing.assert_close(margins[i], by_hand(0.92, "reset", c), rtol=1e-11, atol=1e-11)


def test_plateaus_are_where_long_runs_end(outcome):
    """The exact limits, against 2,000 distractor writes."""
    from dataclasses import replace

    long = replace(CONFIG, distractor_writes=2000)
    runs = trajectory.updates(long, (long.overlap,))
    for name, limits in outcome.metrics["plateaus"].items():
        assert runs[name].retrieval()[0, -1].item() == pytest.approx(limits["p∞"], abs=1e-10)


def test_the_gain_trace_follows_its_closed_forms(outcome):
    key = outcome.metrics["warped_key"]
    gains = outcome.data["main"]["Bayesian Layer"].gain[0]
    waiting, decaying = predicted_gains(CONFIG, key["variance_perp"])
    torch.testing.assert_close(gains[52:], torch.tensor(decaying, dtype=torch.float64), rtol=1e-9, atol=1e-9)
    assert waiting[-1] < decaying[0] < theory.BOUNDARY_GAIN_CEILING
    assert key["simulated_gain"] == pytest.approx(key["closed_form_gain"], abs=1e-9)
    assert key["simulated_angle_degrees"] == pytest.approx(key["closed_form_angle_degrees"], abs=1e-6)
    assert key["simulated_angle_degrees"] < key["limit_angle_degrees"]


def test_reset_and_deltanet_coincide(outcome):
    assert outcome.metrics["largest_difference_of_reset_and_deltanet"] < 1e-12
    assert outcome.metrics["first_sub_chance_step"]["Bayesian Layer"] == "never"
    assert outcome.metrics["first_sub_chance_step"]["Linear Attention"] == 96


@settings(max_examples=30)
@given(value=st.floats(-1, 1), decimals=st.integers(1, 5))
def test_a_printed_number_agrees_with_what_was_rounded_and_not_with_its_neighbour(value, decimals):
    unit = 10.0**-decimals
    assert printed("", "", f"{value:.{decimals}f}", value).agrees or abs(value * 10**decimals % 1 - 0.5) < 1e-6
    assert not printed("", "", f"{round(value, decimals) + unit:.{decimals}f}", round(value, decimals)).agrees


def test_words_agree_only_with_themselves():
    assert Comparison("", "", "never", "never", 0).agrees
    assert not Comparison("", "", "never", 57, 100).agrees
    assert not Comparison("", "", 57, "never", 100).agrees


def test_only_two_rows_were_rounded_twice(outcome):
    wider = [c for c in outcome.comparisons if "rounded twice" in c.quantity]
    assert [(c.paper, round(c.ours, 5)) for c in wider] == [(-0.35, -0.34483), (0.34, 0.33497)]
    assert printed("", "", "-0.35", -0.34483, rounded_twice=True).agrees
    assert not printed("", "", "-0.35", -0.34483).agrees
