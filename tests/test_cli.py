"""`mbd`, as a user types it."""

import json

import pytest
from typer.testing import CliRunner

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


def test_zoo_lists_every_design():
    output = mbd("zoo").output
    for name in catalogue:
        assert name in output
    listed = json.loads(mbd("zoo", "--json").output)
    assert [row["name"] for row in listed] == list(catalogue)
    assert listed[0]["state"] == "D·M + D²"


def test_zoo_describes_one_design():
    assert mbd("zoo", "kda").output.strip() == str(catalogue["kda"].describe())
    assert mbd("zoo", "kda", "--latex").output.strip() == catalogue["kda"].describe().latex
    assert json.loads(mbd("zoo", "kda", "--json").output)["exactness"] == "covariance reset"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["zoo", "transformer"], "no design named 'transformer'"),
        (["zoo", "--latex"], "--latex needs the name of a design"),
        (
            ["reproduce", "everything"],
            "expected one of collision, recall, crowding, mqar, wikitext, retrofit, got 'everything'",
        ),
        (["reproduce", "collision", "--preset", "huge"], "--preset: expected one of smoke, cpu, paper"),
        (["reproduce", "collision", "--seeds", "3"], "--seeds: collision has no seeds to choose"),
        (["zoo", "[/foo]"], "no design named '[/foo]'"),
        (["zoo", "kda", "--markdown"], "--markdown is the page of every design"),
        (["reproduce", "collision", "--out", "README.md"], "README.md is a file"),
        (["report", "nowhere"], "no metrics.json below nowhere"),
    ],
)
def test_mistakes_are_explained(words, message):
    assert message in mbd(*words, code=2).stderr


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
