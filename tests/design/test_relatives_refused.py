"""Fields and states of the relatives that make no sense are refused by name."""

import pytest
import torch

import membydesign as mbd
from membydesign.testing import random_problem


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mbd.KalmaNetMemory(ridge_ratio=0.0), r"KalmaNetMemory\(ridge_ratio\): .*, got 0.0"),
        (lambda: mbd.Palimpsa(precision=-1.0), r"Palimpsa\(precision\): .*, got -1.0"),
        (
            lambda: mbd.PenalisedLeastSquares(prior_variance=0.0),
            r"PenalisedLeastSquares\(prior_variance\): .*, got 0.0",
        ),
        (lambda: mbd.PenalisedLeastSquares(unit_gain=1), r"\(unit_gain\): expected True or False, got 1"),  # pyright: ignore
        (lambda: mbd.Isotropic(times_counted=0.0), r"Isotropic\(times_counted\): .*, got 0.0"),
        (lambda: mbd.InformationDiagonal(prior=-1.0), r"InformationDiagonal\(prior\).*got -1.0"),
    ],
)
def test_bad_fields_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_states_that_no_filter_leaves_are_refused():
    for name, part, value in (
        ("mesa_net", "keys", -1.0),
        ("kla", "precision", -1.0),
        ("vla", "inverse_penalty", -1.0),
        ("kalman_delta_isotropic", "covariance", -1.0),
        ("kalman_delta_diagonal", "covariance", -1.0),
    ):
        problem = random_problem(mbd.catalogue[name])
        bad = problem.prior()._replace(**{part: torch.full_like(getattr(problem.prior(), part), value)})
        with pytest.raises(mbd.NotPositiveDefiniteError, match=part):
            problem.filter(initial=bad)
