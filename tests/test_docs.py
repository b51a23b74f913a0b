"""Every Python block in README and docs runs; pages written by a command are up to date; links lead somewhere.

A block of README runs by itself, as a visitor pastes the one that interests them. The blocks of a page of docs run in
order and share their names, as someone reads who follows the page from its top.
"""

import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import membydesign
from membydesign import theory
from membydesign.cli.catalogue import catalogue_page

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("benchmarks/*.md"),
    ]
)
MODULES = sorted(m.name for m in pkgutil.walk_packages(membydesign.__path__, "membydesign."))


README = ROOT / "README.md"
NEEDS = {"export.md": "onnxruntime"}
"""Packages that are not available for every Python, by the page that needs one."""


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("index", range(len(python_blocks(README))))
def test_each_block_of_readme_runs_by_itself(index):
    torch.manual_seed(0)
    exec(compile(python_blocks(README)[index], str(README), "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("page", [page for page in PAGES if page != README], ids=lambda page: page.name)
def test_the_blocks_of_a_page_run_in_order(page):
    if page.name in NEEDS:
        pytest.importorskip(NEEDS[page.name])
    torch.manual_seed(0)
    namespace = {"__name__": f"docs_{page.stem}"}
    for block in python_blocks(page):
        exec(compile(block, str(page), "exec"), namespace)


def test_the_pages_with_code_have_code():
    counts = {str(page.relative_to(ROOT)): page.read_text().count("```python") for page in PAGES}
    assert counts["README.md"] >= 3
    assert counts["docs/design-your-own-memory.md"] >= 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_catalogue_page_is_up_to_date():
    written = (ROOT / "docs" / "catalogue.md").read_text()
    assert written == catalogue_page(), "write it anew: mbd catalogue --markdown > docs/catalogue.md"


def test_readme_has_the_whole_catalogue():
    readme = (ROOT / "README.md").read_text()
    page = catalogue_page()
    for name, design in membydesign.catalogue.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| [{name}]"))
        cells = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", cell.strip()) for cell in row.strip("|").split("|")]
        in_readme = "| " + " | ".join([*(f"`{cell}`" for cell in cells[:4]), *cells[4:]]) + " |"
        assert in_readme in readme, design.title


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name):
    module = importlib.import_module(name)
    namespace = {**vars(membydesign), "torch": torch, **vars(module)}
    result = doctest.testmod(module, extraglobs=namespace)
    assert result.failed == 0


PUBLIC = {
    **{f"membydesign.{name}": getattr(membydesign, name) for name in membydesign.__all__ if name != "theory"},
    **{f"theory.{name}": x for name, x in vars(theory).items() if not name.startswith("_") and callable(x)},
}


@pytest.mark.parametrize("name", [name for name in PUBLIC if PUBLIC[name].__class__.__module__ != "typing"])
def test_public_names_are_documented(name):
    value = PUBLIC[name]
    if getattr(value, "__module__", "").startswith("membydesign"):
        documented = value if inspect.isclass(value) or inspect.isfunction(value) else type(value)
        assert documented.__doc__, name
        assert "Alias for field" not in documented.__doc__
        if inspect.isclass(documented):
            for member, f in vars(documented).items():
                if inspect.isfunction(f) and not member.startswith("_") and f.__module__.startswith("membydesign"):
                    assert inspect.getdoc(f), f"{name}.{member}"


WITH_EQUATION = [
    "Belief",
    "DampedRotation",
    "Dense",
    "DesignModel",
    "Diagonal",
    "DiagonalDecay",
    "Filtered",
    "Identity",
    "LatentInput",
    "ObserveMemory",
    "PerColumnReset",
    "Reset",
    "ScalarDecay",
    "Transition",
    "filter_sequence",
    "filter_step",
]


@pytest.mark.parametrize("name", WITH_EQUATION)
def test_the_mathematics_is_in_the_docstring(name):
    """A class or function that computes opens with its equation; what takes tensors gives their shapes."""
    text = getattr(membydesign, name).__doc__
    assert "$" in text
    if name in ("Belief", "Filtered", "filter_sequence", "ScalarDecay", "DiagonalDecay", "DampedRotation"):
        assert re.search(r"\[B,(T,)?H", text)


def test_no_file_is_long():
    for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        assert len(path.read_text().splitlines()) <= 400, path
