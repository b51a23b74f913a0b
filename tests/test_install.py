"""Hints name a place that pip can install from."""

import json
import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from membydesign import install
from membydesign.install import install_hint, portable_install_hint

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("record", "hint", "portable"),
    [
        (
            {"url": "file:///home/me/my%20code", "dir_info": {}},
            "pip install '/home/me/my code[models]'",
            "pip install '/path/to/memory-by-design[models]'",
        ),
        (
            {"url": "file:///home/me/code", "dir_info": {"editable": True}},
            "pip install --editable '/home/me/code[models]'",
            "pip install '/path/to/memory-by-design[models]'",
        ),
        (
            {"url": "file:///tmp/memory_by_design-1-py3-none-any.whl", "archive_info": {}},
            "pip install '/tmp/memory_by_design-1-py3-none-any.whl[models]'",
            "pip install '/path/to/memory-by-design[models]'",
        ),
        (
            {"url": "https://host/code.git", "vcs_info": {"vcs": "git", "requested_revision": "v1", "commit_id": "1"}},
            "pip install 'memory-by-design[models] @ git+https://host/code.git@v1'",
            "pip install 'memory-by-design[models] @ git+https://host/code.git@v1'",
        ),
        (
            {"url": "ssh://git@host/code", "vcs_info": {"vcs": "git", "commit_id": "1"}},
            "pip install 'memory-by-design[models] @ git+ssh://git@host/code'",
            "pip install 'memory-by-design[models] @ git+ssh://git@host/code'",
        ),
        (None, "pip install 'memory-by-design[models]'", "pip install 'memory-by-design[models]'"),
    ],
)
def test_a_hint_names_where_this_copy_came_from(record, hint, portable, monkeypatch):
    text = None if record is None else json.dumps(record)
    monkeypatch.setattr(install, "distribution", lambda name: SimpleNamespace(read_text=lambda file: text))
    assert install_hint("models") == hint
    assert portable_install_hint("models") == portable


def test_a_checkout_that_is_not_installed_names_itself(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(install, "distribution", missing)
    assert install_hint() == f"pip install --editable {ROOT}"


def test_no_message_or_page_recommends_a_package_that_is_not_published():
    folders = (ROOT / "src", ROOT / "docs", ROOT / "examples", ROOT / "benchmarks")
    pages = [*ROOT.glob("*.md"), *(file for folder in folders for file in folder.rglob("*"))]
    assert {ROOT / "README.md", ROOT / "docs/howto/models.md", Path(install.__file__)} <= set(pages)
    recommended = re.compile(r"""pip install\s+["']?memory-by-design""")
    wrong = [
        str(page.relative_to(ROOT))
        for page in pages
        if page.suffix in (".py", ".md")
        and page.name not in ("install.py", "releasing.md")
        and recommended.search(page.read_text(encoding="utf-8"))
    ]
    assert wrong == []
