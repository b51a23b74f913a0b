"""Benchmarks and kernel checks come with a checkout: they are not in the wheel, and commands say so."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import membydesign
from kernel_checks import compiled
from membydesign.cli.app import app
from membydesign.cli.completion import sections
from membydesign.cli.requirements import benchmarks_folder
from membydesign.reports.record import Provenance
from membydesign_bench import child, run

ROOT = Path(__file__).resolve().parents[2]


def benchmark_modules(names: Iterable[str]) -> list[str]:
    return [name for name in names if re.search("bench|kernel_checks|roofline", name) and Path(name).name != "bench.py"]


def test_hatch_selects_the_package_alone():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    [wheel] = re.findall(r"^\[tool\.hatch\.build\.targets\.wheel\]\n(.*?)(?=^\[)", project, re.DOTALL | re.MULTILINE)
    assert wheel.strip() == 'packages = ["src/membydesign"]'
    assert "force-include" not in project
    assert benchmark_modules(str(path.relative_to(ROOT)) for path in ROOT.glob("src/**/*.py")) == []


@pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="a wheel is built with hatchling")
def test_the_wheel_has_no_benchmarks(tmp_path):
    pytest.importorskip("build")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "membydesign/cli/bench.py" in names
    assert benchmark_modules(names) == []


def checkout(root: Path, name: str = "memory-by-design") -> Path:
    """A folder that looks like a checkout of a project; its benchmarks leave a file where they are imported."""
    package = root / "src" / "membydesign"
    package.mkdir(parents=True)
    (root / "pyproject.toml").write_text(f'[project]\nname = "{name}"\n')
    for module in ("membydesign_bench", "kernel_checks"):
        (root / "benchmarks" / module).mkdir(parents=True)
        (root / "benchmarks" / module / "__init__.py").write_text("open('imported', 'w').close()\n")
    return package


def test_the_checkout_is_that_of_the_running_package(tmp_path):
    assert benchmarks_folder() == child.FOLDER == ROOT / "benchmarks"
    assert benchmarks_folder(checkout(tmp_path / "ours")) == tmp_path / "ours" / "benchmarks"
    assert benchmarks_folder(checkout(tmp_path / "other", "another-project")) is None
    assert benchmarks_folder(tmp_path / "ours" / "lib" / "membydesign") is None
    shutil.rmtree(tmp_path / "ours" / "benchmarks")
    assert benchmarks_folder(tmp_path / "ours" / "src" / "membydesign") is None


OUTSIDE = """
from typer.testing import CliRunner
from membydesign.cli.app import app
from membydesign.cli.completion import sections
for words in (["bench", "--only", "speed"], ["kernels", "check"], ["bench", "-h"], ["kernels", "check", "-h"]):
    result = CliRunner().invoke(app, words)
    print(result.exit_code, " ".join(result.output.split()))
print(sections("s"))
"""


def test_outside_a_checkout_the_commands_explain_themselves(tmp_path):
    """As from a wheel, with somebody's checkout as the working directory: nothing is loaded from there."""
    site, work = tmp_path / "site-packages", tmp_path / "work"
    shutil.copytree(Path(membydesign.__file__).parent, site / "membydesign", ignore=shutil.ignore_patterns("*.pyc"))
    checkout(work)
    environment = {**os.environ, "PYTHONPATH": str(site), "COLUMNS": "300"}
    command = [sys.executable, "-W", "ignore", "-c", OUTSIDE]
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    bench, kernels, bench_help, kernels_help, completed = done.stdout.splitlines()
    package = site / "membydesign"
    assert bench.startswith("2 mbd: mbd bench needs a checkout of memory-by-design")
    assert f"not part of the installed package ({package}). In a checkout, run make bench," in bench
    assert kernels.startswith("2 mbd: mbd kernels check needs a checkout of memory-by-design")
    assert kernels.endswith(
        "run make kernels, which sets up everything, or pip install --editable '.[dev]' and then mbd kernels check"
    )
    assert bench_help.startswith("0 ")
    assert "Runs from a checkout" in bench_help
    assert kernels_help.startswith("0 ")
    assert completed == "[]"
    assert not (work / "imported").exists()


def test_help_names_everything_that_the_kernel_checks_know():
    text = " ".join(CliRunner().invoke(app, ["kernels", "check", "-h"], env={"COLUMNS": "200"}).output.split())
    for names in (compiled.TARGETS, map(str, compiled.SIZES), compiled.VARIANTS):
        assert f": {', '.join(names)}. Default: all" in text


def test_sections_complete_in_a_checkout():
    assert sections("speed,m") == ["speed,models", "speed,memory"]


def test_a_child_process_runs_this_code():
    options = child.options(NAME="value")
    assert options["cwd"] == ROOT / "benchmarks"
    assert options["env"]["NAME"] == "value"
    assert options["env"]["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT / "src")
    assert child.command("membydesign_bench.memory", "ours", 3)[-3:] == ["membydesign_bench.memory", "ours", "3"]


@pytest.mark.parametrize(
    ("commit", "status", "marked"),
    [
        ("abc", "", "abc"),
        ("abc", " M membydesign_bench/speed.py\n", "abc (with uncommitted changes)"),
        ("abc (with uncommitted changes)", " M membydesign_bench/speed.py\n", "abc (with uncommitted changes)"),
        ("unknown", " M membydesign_bench/speed.py\n", "unknown"),
    ],
)
def test_results_of_a_changed_benchmark_are_marked(commit, status, marked, monkeypatch):
    def git(words, **_):
        return subprocess.CompletedProcess(words, 0, stdout=status)

    monkeypatch.setattr(run.subprocess, "run", git)
    provenance = Provenance("bench", "speed", "mbd bench", commit, "", 1.0, {})
    assert run._with_own_changes(provenance).commit == marked
