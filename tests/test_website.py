"""The documentation site: complete reference, formulas as MathML, no broken link, no foreign host."""

import importlib
import inspect
import json
import re
from pathlib import Path

import pytest

import membydesign
from membydesign.reports import record
from membydesign.reports.comparison import by_claim
from website import DOCS, ROOT, claims, links, mathematics, sources, versions
from website.__main__ import configuration

API = sorted((DOCS / "reference" / "api").glob("*.md"))
DIRECTIVES = [name for page in API for name in re.findall(r"^::: ([\w.]+)", page.read_text(), re.M)]
PACKAGES = (
    "membydesign",
    "membydesign.layers",
    "membydesign.models",
    "membydesign.retrofit",
    "membydesign.training",
    "membydesign.testing",
    "membydesign.integrations.transformers",
    "membydesign.integrations.onnx",
)


def named(name: str) -> object:
    """The module, class, function or constant that a directive names."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        return getattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_in_the_reference(package):
    module = importlib.import_module(package)
    documented = [named(name) for name in DIRECTIVES]  # under this name or, if it is exported twice, the other
    missing = [name for name in module.__all__ if not any(getattr(module, name) is x for x in documented)]
    assert set(missing) - {"layers"} == set(), "add them to a page of docs/reference/api"


@pytest.mark.parametrize("name", DIRECTIVES)
def test_the_reference_has_public_names_only(name):
    package, _, attribute = name.rpartition(".")
    assert not attribute.startswith("_")
    if package in PACKAGES and not inspect.ismodule(named(name)):
        assert attribute in importlib.import_module(package).__all__


def test_modules_that_docs_import_are_in_the_reference():
    texts = [path.read_text() for path in DOCS.rglob("*.md")]
    imported = {module for text in texts for module in re.findall(r"^from (membydesign[\w.]*) import", text, re.M)}
    covered = {*PACKAGES, *DIRECTIVES, *(name.rpartition(".")[0] for name in DIRECTIVES)}
    assert imported - covered == set()


def test_no_name_is_in_the_reference_twice():
    assert len(set(DIRECTIVES)) == len(DIRECTIVES)


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"[\w/-]+\.md", json.dumps(json.loads(configuration(versioned=False))["nav"])))
    made = {name for name in sources.generated() if name.endswith(".md")}
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} | made
    assert pages - listed == set(), "add them to nav in website/mkdocs.yml"
    assert listed - pages == set(), "no such pages"


def test_every_claim_has_a_page_with_its_verdict():
    pages = claims.pages()
    for folder in claims.EXPERIMENTS:
        result = record.read(ROOT / "results" / folder)
        for number, (claim, rows) in enumerate(by_claim(result.comparisons).items(), 1):
            page = pages[f"results/claims/{folder.replace('/', '-')}-{number}.md"]
            assert f"**Verdict: {result.judge.claim(rows).text.lower()}.**" in page, claim
            assert result.provenance.command in page
            assert result.provenance.commit[:12] in page
    reports = {path.parent.relative_to(ROOT / "results").as_posix() for path in (ROOT / "results").rglob("report.md")}
    assert reports - set(claims.EXPERIMENTS) == {"compare", "length", "retrofit-softplus"}, (
        "results without claim pages"
    )


def test_links_to_the_repository_lead_to_copies(tmp_path):
    sources.stage(tmp_path)
    page = (tmp_path / "concepts" / "recurrence.md").read_text()
    assert "](../repository/src/membydesign/filter/loop.py.md)" in page
    assert "def step(design: Design" in (tmp_path / "repository/src/membydesign/filter/loop.py.md").read_text()
    assert (tmp_path / "repository/results/collision/collision.png").is_file()


def test_a_link_to_nothing_stops_the_build():
    with pytest.raises(ValueError, match=r"docs/index\.md: .* got nowhere/x\.py"):
        sources.with_links("[x](nowhere/x.py)", "docs/index.md", "index.md")


def test_code_is_left_alone():
    text = "```python\nrow[0](nowhere.py)\n```\n"
    assert sources.with_links(text, "docs/index.md", "index.md") == (text, [])


def test_formulas_become_mathml():
    page = mathematics.render(r'<span class="arithmatex">\(M_t = \bar{M}_t &lt; 1\)</span>')
    assert page.startswith("<math")
    assert "arithmatex" not in page
    assert "&#x0003C;" in page
    block = mathematics.mathml(r"\begin{aligned} a &= b \\ &= c \end{aligned}", block=True)
    assert block.count("<mtr>") == 2
    assert '<div class="formula" tabindex="0">' in block
    assert "<mo>&#x0223C;</mo><mi>&#x1D4A9;</mi>" in mathematics.mathml(r"S \sim \mathcal N(M, P)", block=False)
    assert "\U0001d736" in mathematics.mathml(r"\boldsymbol{\alpha}", block=False)
    with pytest.raises(ValueError, match="nosuch"):
        mathematics.mathml(r"\nosuch{x}", block=False)


def test_every_displayed_formula_is_known_to_the_converter():
    texts = [re.sub(r"```.*?```", "", path.read_text(), flags=re.S) for path in DOCS.rglob("*.md")]
    formulas = [tex for text in texts for tex in re.findall(r"\$\$(.+?)\$\$", text, re.S)]
    formulas += [design.describe().latex for design in membydesign.catalogue.values()]
    assert len(formulas) > 60
    for tex in formulas:
        assert mathematics.mathml(tex, block=True).endswith("</math></div>")


def site(folder: Path, body: str) -> Path:
    (folder / "index.html").write_text(f"<html><body><h1 id=top>x</h1>{body}</body></html>")
    (folder / "other.html").write_text("<p id=there>")
    return folder


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('<a href="missing.html">', "no such file"),
        ('<a href="other.html#nowhere">', "no such anchor"),
        ('<a href="#nowhere">', "no such anchor"),
        ('<script src="https://cdn.example/x.js"></script>', "loaded from another host"),
        ('<link rel="stylesheet" href="//fonts.example/x.css">', "loaded from another host"),
        ('<a href="/index.html">', "expected a relative path"),
    ],
)
def test_broken_links_and_foreign_hosts_are_found(tmp_path, body, problem):
    assert problem in "".join(links.problems(site(tmp_path, body)))


def test_good_links_are_not_reported(tmp_path):
    body = '<a href="other.html#there"><a href="#top"><a href="https://example.org/"><img src="data:x">'
    assert links.problems(site(tmp_path, body)) == []


def test_versions_stand_side_by_side(tmp_path):
    for version in ("0.9.0", "0.10.0rc1", "0.10.0", "0.9.1", "0.9.1"):
        versions.add(tmp_path, version)
    listed = json.loads((tmp_path / "versions.json").read_text())
    assert [entry["version"] for entry in listed] == ["0.10.0", "0.10.0rc1", "0.9.1", "0.9.0"]
    assert [entry["aliases"] for entry in listed] == [["latest"], [], [], []]
    assert "url=0.10.0/index.html" in (tmp_path / "index.html").read_text()
