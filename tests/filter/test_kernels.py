"""The ordered list of kernels: what each can run, and the reasons that a user is told."""

import pytest
import torch
from typer.testing import CliRunner

import membydesign as mbd
from membydesign.cli.app import app
from membydesign.filter import kernels, loop
from problems import DESIGNS, REMOVAL, random_problem


def test_the_list_ends_with_the_loop_which_runs_everything():
    assert kernels.KERNELS[-1] is loop
    names = [kernel.NAME for kernel in kernels.KERNELS]
    assert len(set(names)) == len(names)
    assert {kernel.BACKEND for kernel in kernels.KERNELS} == set(kernels.BACKENDS) - {"auto"}


@pytest.mark.parametrize("name", DESIGNS)
def test_every_kernel_runs_or_says_why_not(name):
    reasons = kernels.why_not_each(DESIGNS[name])
    assert reasons[loop.NAME] is None
    for kernel, reason in reasons.items():
        assert reason is None or reason.startswith(("for ", "on ", "in ")), f"{kernel}: {reason}"
    assert kernels.why_not_each_step(DESIGNS[name])["native, one token"] is None


def test_a_design_of_ones_own_runs_in_the_loop(monkeypatch):
    class Halving(mbd.Transition):
        @property
        def matrix(self):
            return mbd.Identity().matrix

        def apply(self, x, step):
            return 0.5 * x

    design = mbd.DesignModel(Halving(), mbd.ObserveMemory(), mbd.Dense())
    assert [name for name, reason in kernels.why_not_each(design).items() if reason is None] == [loop.NAME]
    assert "Halving" in str(kernels.why_not_each_step(design)["native, one token"])
    problem = random_problem(design)
    with pytest.raises(ValueError, match=r'^backend: expected "auto" or "torch" for .*Halving.*, got "native"$'):
        problem.filter(backend="native")


def test_a_named_backend_that_is_missing_is_refused(monkeypatch):
    monkeypatch.setattr("membydesign.filter.native.build.available", lambda *_: False)
    problem = random_problem(DESIGNS["dense-scalar"])
    with pytest.raises(ValueError, match='^backend: .*native code is unavailable.* got "native"$'):
        problem.filter(backend="native")
    assert torch.isfinite(problem.filter().output).all()


def test_the_removal_has_a_native_step():
    assert kernels.why_not_each_step(REMOVAL)["native, one token"] is None
    kept = mbd.DesignModel(mbd.DecayAndRemoval(), mbd.ObserveMemory(), mbd.Dense())
    assert "does not move a covariance" in str(kernels.why_not_each_step(kept)["native, one token"])


def test_the_command_says_which_kernels_run_a_design():
    text = CliRunner().invoke(app, ["catalogue", "gla"], env={"COLUMNS": "200"}).output
    assert "native, gains then chunks of the mean" in text
    assert "native, one token" in text
    assert "dense covariance" not in text
    text = CliRunner().invoke(app, ["catalogue", "gla", "--kernels"], env={"COLUMNS": "200"}).output
    assert "native, dense covariance: for GLA" in text
