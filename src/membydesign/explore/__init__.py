"""The explorer: HTML files that need no network, one for designs side by side and one for a model that reads a text.

`page` runs our C decoding step in a browser. `step.wasm` is `filter/native/csrc/step.c`, compiled by `make explorer`.
`text_page` shows what `membydesign.explore.text` measured.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

FOLDER = Path(__file__).parent


def page(version: str) -> str:
    """Return the page of designs side by side, which loads nothing from elsewhere.

    Args:
        version: of the package, for the foot of the page.
    """
    kernel = (FOLDER / "step.wasm").read_bytes()
    made = {
        "wasm": base64.b64encode(kernel).decode(),
        "sha256": hashlib.sha256(kernel).hexdigest(),
        "version": version,
    }
    return _joined("page.html", made)


def text_page(version: str, reading: Mapping[str, Any]) -> str:
    """Return the page of a model that reads a text, which loads nothing from elsewhere.

    Args:
        version: of the package, for the foot of the page.
        reading: what `membydesign.explore.text.Reading.as_dict` returns.
    """
    data = json.dumps(reading, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _joined("text.html", {"data": data.replace("<", "\\u003c"), "version": version})


def _joined(template: str, made: Mapping[str, str]) -> str:
    """Put files of this folder, and what was made, in the place of their names."""

    def content(match: re.Match[str]) -> str:
        name = match[1]
        return made[name] if name in made else (FOLDER / name).read_text(encoding="utf-8")

    return re.sub(r"\{\{([\w.]+)\}\}", content, (FOLDER / template).read_text(encoding="utf-8"))
