"""A real browser for tests: Debian's Chromium, driven by Playwright; skips with the reason if either is missing."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
AXE = Path(os.environ.get("MBD_AXE", Path(__file__).parents[1] / ".venv/axe/node_modules/axe-core/axe.min.js"))
"""The file of axe-core: `npm install --prefix .venv/axe axe-core`."""


@contextmanager
def chromium() -> Iterator[Any]:
    """Start Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the Python package playwright")
    if CHROMIUM is None:
        pytest.skip("needs Chromium (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, path: Path, fragment: str = "", **options: Any) -> Iterator[Any]:
    """Open a file; in the end, fail if the page logged an error or asked for anything but the file itself."""
    context = browser.new_context(**{"viewport": {"width": 1100, "height": 900}, **options})
    page, problems, requests = context.new_page(), [], []
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(f"{path.as_uri()}#{fragment}")
    page.wait_for_selector("#numbers td")
    yield page
    page.wait_for_timeout(50)
    assert problems == []
    assert {url.partition("#")[0] for url in requests if not url.startswith("data:")} == {path.as_uri()}
    context.close()


def settle(page: Any) -> None:
    """Wait until what was changed is drawn."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def until(page: Any, condition: str, seconds: float = 10) -> None:
    """Wait until an expression is true. Playwright's own way needs eval, which the page forbids."""
    end = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(50)


def visit(page: Any, fragment: str) -> None:
    """Change the part of the address after #, and wait until the page shows it."""
    page.evaluate("(text) => { location.hash = text; }", fragment)
    page.wait_for_timeout(20)  # the event comes after this task
    settle(page)


def cells(page: Any, table: str) -> list[list[str]]:
    """The full numbers of a table, row by row."""
    return page.eval_on_selector_all(
        f"{table} tbody tr", "(rows) => rows.map((row) => [...row.querySelectorAll('td')].map((cell) => cell.title))"
    )


def serious(page: Any) -> list[str]:
    """What axe-core finds serious or critical; skips if it is not installed."""
    if not AXE.is_file():
        pytest.skip(f"needs axe-core at {AXE} (npm install --prefix .venv/axe axe-core), or MBD_AXE")
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run()")["violations"]
    return [f"{x['id']}: {x['nodes'][0]['html'][:150]}" for x in found if x["impact"] in ("serious", "critical")]
