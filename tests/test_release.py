"""What a release says of itself agrees in all the places that say it."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from packaging.version import Version

import membydesign

ROOT = Path(__file__).resolve().parents[1]
ARXIV = "2605.31163"


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def resolve():
    """The module that pins versions and checks them."""
    spec = importlib.util.spec_from_file_location("resolve", ROOT / ".ci" / "resolve.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_place_states_the_same_version():
    version = re.search(r'^version = "(.+)"$', text("pyproject.toml"), re.MULTILINE)
    cited = re.search(r"^version: (.+)$", text("CITATION.cff"), re.MULTILINE)
    assert version is not None
    assert cited is not None
    assert version.group(1) == cited.group(1) == membydesign.__version__


def test_the_paper_can_be_found():
    assert f"https://arxiv.org/abs/{ARXIV}" in text("README.md")
    assert f"arXiv preprint arXiv:{ARXIV}" in text("README.md")
    assert f"arXiv:{ARXIV}" in text("CITATION.cff")
    assert f'Paper = "https://arxiv.org/abs/{ARXIV}"' in text("pyproject.toml")


def test_supported_pythons_are_those_that_are_resolved(resolve):
    classified = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text("pyproject.toml"))
    assert tuple(classified) == resolve.PYTHONS
    assert f'requires-python = ">={resolve.PYTHONS[0]}"' in text("pyproject.toml")
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in resolve.PYTHONS


def test_pinned_versions_agree_with_each_other_and_with_the_ranges(resolve):
    """Ranges are of the packages that pyproject.toml names itself; `make resolve` checks all of them with the index."""
    assert resolve.disagreements() == []
    pins = dict(resolve.pins(text("constraints.txt")))
    for line in text("constraints.in").splitlines():
        if not line.startswith("#"):
            assert f"\n{line}\n" in text("constraints.txt")
    dependencies = text("pyproject.toml").partition("[project.optional-dependencies]")[2].partition("[project.")[0]
    ranges = dict(re.findall(r'"([a-z][a-z-]*)(?:\[\w+\])?>=([\d.]+)', dependencies))
    del ranges["fla-core"]  # not in .[dev]
    assert {"triton", "transformers", "pytest", "ruff", "twine"} <= set(ranges)
    for name, least in ranges.items():
        assert Version(pins[name]) >= Version(least), name


def test_an_unpinned_package_is_reported(resolve, monkeypatch, tmp_path):
    lock = tmp_path / "lock.txt"
    lock.write_text("torch==2.13.0\ntriton==1.0 \\\n    --hash=sha256:0\n")
    monkeypatch.setattr(resolve, "LOCK", lock)
    assert resolve.disagreements() == [
        "lock.txt: expected the versions of constraints.txt, got [('triton', '1.0')]",
    ]
