"""`mbd report`, as a user types it."""

import json

import pytest
from typer.testing import CliRunner

import made_up
from membydesign.cli.app import app


def mbd(*words: object, code: int = 0):
    result = CliRunner().invoke(app, ["report", *map(str, words)], env={"COLUMNS": "300", "TERM": "xterm"})
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def results(tmp_path):
    made_up.write(tmp_path / "results" / "one")
    made_up.write(tmp_path / "results" / "more" / "two", ours=-1.0)
    return tmp_path / "results"


def test_tables_here(results):
    output = mbd(results).output
    assert "1 of 2 claims hold; this does not: Orders a < b" in output
    assert "0 of 2 claims hold; these do not: The bounds hold; Orders" in output
    assert "5 of 6 comparisons agree" in output.replace("\n", " ")
    assert "Bayesian Layer lowest" in output
    assert output.count("DOES NOT HOLD") == 3
    loaded = json.loads(mbd(results, "--json").output)
    assert loaded == {
        str(folder): json.loads((folder / "metrics.json").read_text())
        for folder in (results / "more" / "two", results / "one")
    }
    assert not list(results.glob("report.*"))


def test_one_page(results, tmp_path):
    out = tmp_path / "new" / "page"
    output = mbd(results, "--out", out).output
    for name in ("report.md", "report.html"):
        assert str(out / name) in output
    text = (out / "report.md").read_text()
    summary = [line for line in text.splitlines() if line.startswith("| [") and "](#" in line]
    assert summary == [
        "| [more/two](#more-two) | cpu | 2.4 % | **0/2** | **4/6** | 0123456789ab | 1.50 | — |",
        "| [one](#one) | cpu | 2.4 % | **1/2** | **5/6** | 0123456789ab | 1.50 | — |",
    ]
    assert (out / "report.html").read_text().count("data:image/png;base64,") == 2
    assert json.loads(mbd(results, "--out", out, "--json").output).keys() == {
        str(results / "one"),
        str(results / "more" / "two"),
    }
    # One result alone is named by its folder.
    mbd(results / "one", "--out", out)
    assert "- folder: one\n" in (out / "report.md").read_text()


def test_smoke_runs_come_without_verdicts(tmp_path):
    made_up.write(tmp_path / "results" / "one", preset="smoke", ours=-1.0)
    output = mbd(tmp_path / "results").output
    assert "smoke: not a test of the claims." in output
    assert output.count("not tested") == 2
    assert "Bayesian Layer lowest" in output  # the numbers are there
    short = mbd(tmp_path / "results", "--out", tmp_path / "page").output
    assert "one: smoke: not a test of the claims.\n" in short
    for text in (output, short):
        assert not made_up.VERDICT.search(text.replace(made_up.HOLDS, ""))


def test_training_runs_of_a_result_are_no_results(results):
    run = results / "one" / "runs" / "bayesian_layer-seed0"
    run.mkdir(parents=True)
    (run / "metrics.json").write_text('{"steps": 3}')
    assert len(json.loads(mbd(results, "--json").output)) == 2


def test_a_missing_figure_is_named(results, tmp_path):
    missing = results / "one" / "loss (a).png"
    missing.unlink()
    mbd(results)
    result = mbd(results, "--out", tmp_path / "page", code=1)
    assert f"no figure {missing}" in result.stderr.replace("\n", "")
    assert "FIGURE MISSING: loss (a).png" in (tmp_path / "page" / "report.html").read_text()


def test_mistakes_are_explained(results, tmp_path):
    assert "holds a result" in mbd(results, "--out", results / "one", code=2).stderr
    assert "0 of 2" not in (results / "one" / "report.md").read_text()
    file = tmp_path / "file"
    file.write_text("")
    assert "--out: expected a folder" in mbd(results, "--out", file, code=2).stderr
    assert "expected to write a page" in mbd(results, "--out", file / "below", code=2).stderr
    corrupt = results / "more" / "two" / "metrics.json"
    corrupt.write_text("{")
    for more in ([], ["--json"], ["--out", tmp_path / "page"]):
        assert f"{corrupt}: expected a result of mbd reproduce" in mbd(results, *more, code=2).stderr


def test_links_out_of_a_result_are_not_followed(results, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("the secret of another user")
    figure = results / "one" / "loss (a).png"
    figure.unlink()
    figure.symlink_to(secret)
    assert "expected a file in" in mbd(results, "--out", tmp_path / "page", code=2).stderr.replace("\n", " ")
    assert not (tmp_path / "page").exists()
    figure.unlink()
    (results / "one" / "metrics.json").rename(tmp_path / "metrics.json")
    (results / "one" / "metrics.json").symlink_to(tmp_path / "metrics.json")
    assert "metrics.json: expected a file in" in mbd(results, code=2).stderr.replace("\n", " ")


def test_pages_are_not_written_through_links(results, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    page = tmp_path / "page"
    page.mkdir()
    for name in ("report.md", "report.html"):
        (page / f"{name}.partial").symlink_to(victim)
    mbd(results, "--out", page)
    assert victim.read_text() == "precious"
    assert not (page / "report.html").is_symlink()


def test_nested_metrics_are_refused(results):
    (results / "one" / "metrics.json").write_text("[" * 100_000)
    assert "metrics.json: expected a result of mbd reproduce" in mbd(results, code=2).stderr.replace("\n", " ")
