"""What a release says of itself agrees in all the places that say it."""

import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
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


def test_users_get_ranges():
    """A pin in the package itself would forbid its users every other version, also those with fixes."""
    project = requirements()
    assert len(project) > 20
    for requirement in project:
        specifiers = Requirement(requirement).specifier
        assert all(one.operator in (">=", ">", "<", "<=", "!=", "~=") for one in specifiers), requirement


def requirements() -> list[str]:
    """What the built package requires, with all of its extras."""
    metadata = importlib.metadata.requires("memory-by-design")
    section = re.search(r"(?ms)^\[project\.optional-dependencies\]\n(.*?)\n\n", text("pyproject.toml"))
    assert section is not None
    assert metadata is not None
    without_comments = re.sub(r"#.*$", "", section[1], flags=re.MULTILINE)
    return [*metadata, *re.findall(r'"([^"]+)"', without_comments)]


def test_actions_are_named_by_commit_and_have_few_permissions():
    for workflow in (ROOT / ".github" / "workflows").glob("*.yml"):
        content = workflow.read_text(encoding="utf-8")
        used = re.findall(r"uses: (\S+)(.*)", content)
        assert used
        for action, comment in used:
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action), action
            assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), f"{action}: say which version it is"
        assert "\npermissions: {}\n" in content
        assert set(re.findall(r"^      (\S+): write$", content, re.MULTILINE)) <= {"id-token"}


def test_the_lock_has_a_hash_of_everything_that_is_installed(resolve):
    lock = text("requirements-dev.txt")
    blocks = re.split(r"\n(?=[a-z0-9-]+==)", lock)[1:]
    assert len(blocks) == len(resolve.pins(lock))
    for block in blocks:
        assert "--hash=sha256:" in block
    assert "hatchling" in dict(resolve.pins(lock)), "an installation without build isolation needs it"


def test_the_makefile_installs_with_hashes_and_without():
    make = text("Makefile")
    assert "--require-hashes --requirement requirements-dev.txt" in make
    assert "--constraint constraints.txt --editable '.[dev]'" in make
    assert "make package HASHES=1" in text(".github/workflows/release.yml")
    for file in re.findall(r"\]\(((?:tests|docs)/[^)#]+)", text("SECURITY.md")):
        assert (ROOT / file).is_file(), file
