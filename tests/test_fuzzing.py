"""The fuzzer finds what is planted, agrees with healthy code, survives crashes, and resumes."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import membydesign as mbd
from fuzzing import campaign, cases, judging, known, reference
from fuzzing.cases import Case
from membydesign.filter import loop, packing
from membydesign.filter.native import dense as native_dense

SEED = 0


def numbers(pattern: str, count: int, **fields: object) -> list[Case]:
    """The first cases that match a pattern, without extreme numbers that could hide a planted error."""
    usual = {
        "keys": "usual",
        "decays": "usual",
        "noises": dict.fromkeys(("process_noise", "write_noise", "prior_variance"), "usual"),
    }
    matching = (case for n in range(20_000) if (case := cases.draw(SEED, n)).matches([pattern]))
    return [replace(next(matching), **{**usual, **fields}) for _ in range(count)]


def findings(case: Case) -> list[str]:
    problem = cases.problem(case)
    found = judging.judge(case, problem).findings
    return [finding for finding in found if known.explanation(case, problem, finding) is None]


@pytest.mark.parametrize(
    "mode", ["loop", "torch", "native-token", "native-chunk", "auto", "steps", "packed", "resumed"]
)
def test_healthy_code_passes(mode):
    for case in numbers(f"*/{mode}/", 4):
        assert findings(case) == [], case.label


def test_finds_a_flipped_sign(monkeypatch):
    """The native filter adds what it should take away: its keys are negative."""
    healthy = native_dense.filter_native

    def flipped(drift, rows, initial, x, size, **options):
        return healthy(drift, rows, initial, x._replace(k=-x.k), size, **options)

    monkeypatch.setattr(native_dense, "filter_native", flipped)
    assert all(findings(case) for case in numbers("dense-[is]*/native-*", 4))


def test_finds_a_wrong_gradient_of_right_values(monkeypatch):
    """The gradient of v is twice what it should be; values are right."""
    healthy = native_dense.filter_native

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, *grads):
            return 2 * grads[0]

    def wrong(drift, rows, initial, x, size, **options):
        return healthy(drift, rows, initial, x._replace(v=Doubled.apply(x.v)), size, **options)

    monkeypatch.setattr(native_dense, "filter_native", wrong)
    for case in numbers("dense-[is]*/native-*", 4, target="output"):
        assert [finding.split(":")[0] for finding in findings(case)] == ["gradient of v"]


def test_finds_a_lost_gradient(monkeypatch):
    """A filter that cuts its results off from autograd."""
    healthy = native_dense.filter_native
    monkeypatch.setattr(native_dense, "filter_native", torch.no_grad()(healthy))
    for case in numbers("dense-[is]*/native-*", 3, target="output"):
        assert findings(case) == ["output: has no gradient"]


def test_finds_a_dropped_decay(monkeypatch):
    """One step forgets to decay the mean."""
    monkeypatch.setattr(mbd.ScalarDecay, "apply", lambda self, x, step: x)
    assert all(findings(case) for case in numbers("dense-scalar/loop", 3, initial_dtype=torch.float64))


def test_finds_an_off_by_one_in_packing(monkeypatch):
    """The boundaries of packed sequences are one token late."""
    healthy = packing.run_packed

    def late(design, request, run, *, pad):
        first, *inner, last = request.bounds
        moved = [first, *(min(bound + 1, last) for bound in inner), last]
        return healthy(design, request._replace(bounds=moved), run, pad=pad)

    monkeypatch.setattr("membydesign.filter.kernels.run_packed", late)
    every = numbers("reset-*/packed", 12)
    cut = [case for case in every if any(0 < bound < case.sizes[1] for bound in case.options["segments"])]
    assert cut
    assert all(findings(case) for case in cut)


def test_finds_a_wrong_decoding_step(monkeypatch):
    """The step reads before it writes."""
    healthy = loop.step

    def stale(design, state, x, t):
        written, _ = healthy(design, state, x, t)
        return written, design.read(state, x.q[:, t], x.step(t))

    monkeypatch.setattr(loop, "step", stale)
    monkeypatch.setattr("membydesign.filter.api.native_step", lambda *_: None)
    assert all(findings(case) for case in numbers("additive-nothing-*/steps", 3))


def test_finds_a_changed_argument(monkeypatch):
    healthy = native_dense.filter_native

    def careless(drift, rows, initial, x, size, **options):
        out = healthy(drift, rows, initial, x, size, **options)
        x.v.data.zero_()
        return out

    monkeypatch.setattr(native_dense, "filter_native", careless)
    every = numbers("dense-*/native-*/float32", 6, parameter_dtype=torch.float32, initial_dtype=None, state_dtype=None)
    assert any("v: the argument was changed" in findings(case) for case in every)


def test_finds_an_error_without_a_cause(monkeypatch):
    """A typed error counts as a finding unless the reference confirms that the problem is ill-conditioned."""

    def refuse(*_, **__):
        raise mbd.NotPositiveDefiniteError("the covariance stopped being positive definite")

    monkeypatch.setattr(native_dense, "filter_native", refuse)
    (case,) = numbers("dense-[is]*/native-*", 1)
    assert findings(case)[0].startswith("raised NotPositiveDefiniteError")


def test_the_reference_shares_nothing_with_the_library():
    """It imports the names of designs for its types only, and nothing of membydesign."""
    tree = ast.parse(inspect.getsource(reference))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert imported == {"__future__", "math", "random", "typing", "torch", "collections.abc", "fuzzing.specs"}


def test_a_case_is_named_by_seed_and_number():
    first, second = (cases.problem(cases.draw(SEED, 7)) for _ in range(2))
    for name, x in first.tensors.items():
        assert torch.equal(torch.as_tensor(x), torch.as_tensor(second.tensors[name]))
    assert cases.draw(SEED, 7) != cases.draw(SEED + 1, 7)


def test_every_design_is_drawn():
    drawn = {cases.draw(SEED, n).spec for n in range(2_000)}
    assert drawn == set(cases.SPECS)


class Dying:
    """A worker that ends with a signal at the first case."""

    PROGRAM = "import os, signal, sys; sys.stdin.readline(); os.kill(os.getpid(), signal.SIGSEGV)"

    def __call__(self) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, "-c", self.PROGRAM], stdin=pipe, stdout=pipe, text=True)


def run_campaign(path: Path, count: int, **options) -> campaign.Progress:
    progress = campaign.Progress.load(path, SEED, [])
    return campaign.Campaign(progress, path, cases=count, seconds=None, workers=1, **options).run()


def test_a_crash_is_a_finding_and_the_campaign_goes_on(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(campaign, "start_worker", Dying())
    progress = run_campaign(tmp_path / "state.json", 2)
    assert [entry["findings"] for entry in progress.findings] == [["the process ended with SIGSEGV"]] * 2
    assert f"make fuzz CASE={SEED}:0" in capsys.readouterr().out


def test_a_case_without_end_is_a_finding(monkeypatch, tmp_path):
    monkeypatch.setattr(Dying, "PROGRAM", "import time; time.sleep(60)")
    monkeypatch.setattr(campaign, "start_worker", Dying())
    progress = run_campaign(tmp_path / "state.json", 1, patience=0.2)
    assert progress.findings[0]["findings"] == ["no end within 0 seconds"]


ECHO = """
import json, sys
for line in sys.stdin:
    number = int(line.split(":")[1])
    print(json.dumps({"number": number, "findings": [], "known": [], "judged": 1, "about": ""}), flush=True)
"""


def test_a_campaign_resumes_where_it_stopped(monkeypatch, tmp_path):
    monkeypatch.setattr(Dying, "PROGRAM", ECHO)
    monkeypatch.setattr(campaign, "start_worker", Dying())
    state = tmp_path / "state.json"
    assert run_campaign(state, 5).next == 5
    assert json.loads(state.read_text())["cases"] == 5
    progress = run_campaign(state, 8)
    assert (progress.cases, progress.next, progress.judged) == (8, 8, 8)
    assert campaign.Progress.load(state, SEED + 1, []).cases == 0


@pytest.mark.slow
def test_the_command_runs_and_reports(tmp_path):
    """With real workers: a short campaign, and the exit code."""
    command = [sys.executable, "-m", "fuzzing", "--cases", "6", "--state", str(tmp_path / "state.json")]
    folder = Path(__file__).parent
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "6 cases" in result.stdout
