"""`mbd`, as a user types it."""

import json

import pytest
from typer.testing import CliRunner

from made_up import VERDICT
from membydesign import __version__, catalogue
from membydesign.cli.app import app

runner = CliRunner()


def mbd(*words: str, code: int = 0):
    result = runner.invoke(app, list(words), env={"COLUMNS": "300", "TERM": "xterm"})
    assert result.exit_code == code, result.output
    return result


def test_help_teaches():
    assert "mbd reproduce collision" in mbd("--help").output
    assert "--preset" in mbd("reproduce", "--help").output


def test_version():
    assert mbd("--version").output.strip() == f"memory-by-design {__version__}"


def test_version_comes_before_anything_else():
    assert mbd("--version", "catalogue").output.strip() == f"memory-by-design {__version__}"


def test_the_catalogue_lists_every_design():
    output = mbd("catalogue").output
    for name in catalogue:
        assert name in output
    listed = json.loads(mbd("catalogue", "--json").output)
    assert [row["name"] for row in listed] == list(catalogue)
    assert listed[0]["state"] == "D·M + D²"


@pytest.mark.parametrize("name", catalogue)
def test_the_catalogue_describes_one_design(name):
    description = str(catalogue[name].describe())
    text = mbd("catalogue", name).output.strip()
    assert text.startswith(f"{description}\n  kernels ")
    assert "loop over tokens" in text.removeprefix(description)


def test_the_catalogue_for_other_programs():
    assert mbd("catalogue", "kda", "--latex").output.strip() == catalogue["kda"].describe().latex
    assert json.loads(mbd("catalogue", "kda", "--json").output)["exactness"] == "covariance reset"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["catalogue", "transformer"], "NAME: expected one of bayesian_layer, "),
        (["catalogue", "kdaa"], "categorical_memory, hidden_markov, got 'kdaa' (did you mean 'kda'?)"),
        (["catalogue", "--latex"], "--latex: expected the NAME of a design"),
        (
            ["reproduce", "colision"],
            "EXPERIMENT: expected one of collision, recall, crowding, mqar, wikitext, retrofit, got 'colision' "
            "(did you mean 'collision'?)",
        ),
        (
            ["reproduce", "mqar", "--variant", "bse"],
            "--variant: expected one of base, update, block, got 'bse' (did you mean 'base'?)",
        ),
        (
            ["reproduce", "collision", "--preset", "smok"],
            "--preset: expected one of smoke, cpu, paper, got 'smok' (did you mean 'smoke'?)",
        ),
        (["bench", "--only", "sped"], "text, choices, got 'sped' (did you mean 'speed'?)"),
        (["evaluate", "niah", "x", "--tasks", "singel_1"], "got 'singel_1' (did you mean 'niah_single_1'?)"),
        (["convert", "a", "b", "--dtype", "float33"], "got 'float33' (did you mean 'float32'?)"),
        (
            ["reproduce", "everything"],
            "expected one of collision, recall, crowding, mqar, wikitext, retrofit, got 'everything'",
        ),
        (["reproduce", "collision", "--preset", "huge"], "--preset: expected one of smoke, cpu, paper"),
        (["reproduce", "collision", "--seeds", "3"], "--seeds: collision has no seeds to choose"),
        (["catalogue", "[/foo]"], "got '[/foo]'"),
        (["catalogue", "kda", "--markdown"], "--markdown: expected no NAME with it"),
        (["reproduce", "collision", "--out", "README.md"], "README.md is a file"),
        (["report", "nowhere"], "no metrics.json below nowhere"),
    ],
)
def test_mistakes_are_explained(words, message):
    error = mbd(*words, code=2).stderr
    assert message in error
    assert error.startswith("mbd: ")
    assert error.count("\n") == 1


def test_an_unknown_command_suggests_the_nearest():
    assert "Did you mean 'catalogue'?" in mbd("catalog", code=2).stderr
    assert "No such command 'zoo'." in mbd("zoo", code=2).stderr


def test_a_smoke_run_is_not_judged(tmp_path):
    result = mbd("reproduce", "collision", "--preset", "smoke", "--out", str(tmp_path))
    assert "smoke: not a test of the claims." in result.output
    assert "Bayesian Layer: margin at t=112" in result.output
    for text in (result.output, (tmp_path / "report.md").read_text()):
        assert not VERDICT.search(text)


def test_reproduce_writes_resumes_and_reports(tmp_path):
    out = tmp_path / "collision"
    result = mbd("reproduce", "collision", "--out", str(out))
    assert "68 of 68 comparisons agree" in result.output
    for name in ("config.json", "metrics.json", "report.md", "collision.png", "geometry.png", "write_dynamics.png"):
        assert (out / name).stat().st_size > 0

    written = (out / "metrics.json").stat().st_mtime_ns
    resumed = mbd("reproduce", "collision", "--out", str(out), "--resume", "--json")
    assert (out / "metrics.json").stat().st_mtime_ns == written
    metrics = json.loads(resumed.output)
    assert set(metrics["comparisons"][0]) == {"kind", "claim", "quantity", "paper", "ours", "tolerance", "agrees"}
    assert metrics["provenance"]["preset"] == "paper"
    assert metrics["title"].startswith("Controlled collision recall")
    assert {(out / name).exists() for name in metrics["figures"].values()} == {True}

    assert "68 of 68 comparisons agree" in mbd("report", str(tmp_path)).output
    assert json.loads(mbd("report", str(tmp_path), "--json").output)[str(out)] == metrics

    # A number that disagrees is shown and changes the exit code.
    metrics["comparisons"][0]["ours"] = 0.5
    (out / "metrics.json").write_text(json.dumps(metrics))
    spoilt = mbd("reproduce", "collision", "--out", str(out), "--resume", code=1)
    assert "67 of 68 comparisons agree" in spoilt.output
    assert "NO" in spoilt.output
