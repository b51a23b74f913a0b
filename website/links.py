"""Check every link of a built site: files and anchors exist, and nothing is loaded from elsewhere."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from pathlib import Path

_LOADING = {"script": "src", "img": "src", "source": "src", "iframe": "src", "link": "href"}
"""What a browser fetches by itself when it shows a page."""


class _Page(HTMLParser):
    """Anchors and links of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.anchors: set[str] = {""}
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {values[key] or "" for key in ("id", "name") if key in values}
        if tag == "a" and values.get("href"):
            self.links.append(values["href"] or "")
        if tag in _LOADING and values.get(_LOADING[tag]):
            self.loads.append(values[_LOADING[tag]] or "")


def problems(site: Path) -> list[str]:
    """Return a line for every link that leads nowhere and every file that would come from another host."""
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        for target in (*page.links, *page.loads):
            reason = _reason(target, path, pages, loaded=target in page.loads)
            if reason:
                found.append(f"{path.relative_to(site)}: {target}: {reason}")
    return found


def _reason(target: str, path: Path, pages: dict[Path, _Page], *, loaded: bool) -> str:
    parts = urlsplit(target)
    if parts.scheme in ("http", "https") or parts.netloc:
        return "loaded from another host" if loaded else ""
    if parts.scheme:
        return "" if parts.scheme in ("mailto", "data", "javascript") else "expected a file or a web address"
    if parts.path.startswith("/"):
        return "expected a relative path, so that the site can stand anywhere"
    file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if file.is_dir():
        file /= "index.html"
    if not file.is_file():
        return "no such file"
    if parts.fragment and file in pages and unquote(parts.fragment) not in pages[file].anchors:
        return "no such anchor"
    return ""
