"""Every Python block in README and docs runs; links lead somewhere; the site's reference is complete.

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
from website import catalogue, sources, when
from website.commands import pages as command_pages

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
        *ROOT.glob("docs/**/*.md"),
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


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page != README], ids=lambda page: str(page.relative_to(ROOT))
)
def test_the_blocks_of_a_page_run_in_order(page):
    if page.name in NEEDS:
        pytest.importorskip(NEEDS[page.name])
    torch.manual_seed(0)
    namespace = {"__name__": f"docs_{page.stem}"}
    for block in python_blocks(page):
        exec(compile(block, str(page), "exec"), namespace)


def test_the_pages_with_code_have_code():
    counts = {str(page.relative_to(ROOT)): page.read_text().count("```python") for page in PAGES}
    assert counts["README.md"] >= 1
    assert counts["docs/howto/design-your-own-memory.md"] >= 5
    for start in ("first-layer", "first-model", "first-design"):
        assert counts[f"docs/start/{start}.md"] >= 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert sources.exists(page, target), f"{page.relative_to(ROOT)} links to {target}"


def test_paths_of_pages_in_the_code_exist():
    folders = ("src", "tests", "benchmarks", "website", "examples", ".ci")
    texts = [ROOT / "pyproject.toml", ROOT / "Makefile", ROOT / "hatch_build.py", ROOT / ".ci" / "run"]
    texts += [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    for path in texts:
        for page in re.findall(r"(?<![\w/])(docs/[\w/-]+\.md)", path.read_text()):
            assert (ROOT / page).is_file(), f"{path.relative_to(ROOT)} names {page}"


def test_every_design_has_a_page_and_a_row_of_the_table():
    pages, index = catalogue.pages(), catalogue.index()
    assert set(when.WHEN) == set(membydesign.catalogue)
    for name, design in membydesign.catalogue.items():
        page = pages[f"reference/catalogue/{name}.md"]
        assert design.describe().latex in page
        assert design.state_formula() in page
        row = next(line for line in index.splitlines() if line.startswith(f"| [`{name}`]"))
        assert design.exactness in row
        assert all(f"`{part}`" in row for part in design.assumptions())


def test_every_command_has_a_page_with_its_options():
    pages = command_pages()
    for name in ("catalogue", "explore", "reproduce", "report", "generate", "convert", "compare", "bench"):
        assert f"reference/commands/{name}.md" in pages
    assert "`--latex`" in pages["reference/commands/catalogue.md"]
    assert "reference/commands/kernels-check.md" in pages


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name):
    module = importlib.import_module(name)
    namespace = {**vars(membydesign), "torch": torch, **vars(module)}
    result = doctest.testmod(module, extraglobs=namespace)
    assert result.failed == 0


def test_examples_of_docstrings_are_a_section_that_the_reference_shows_as_code():
    for path in (ROOT / "src").rglob("*.py"):
        assert not re.search(r"^ +Example:$", path.read_text(), re.M), f"{path.relative_to(ROOT)}: write Examples:"


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
