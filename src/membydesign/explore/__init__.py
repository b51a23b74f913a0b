"""The explorer: one HTML file that runs our C decoding step in a browser, for a few designs side by side.

`page` joins the files of this folder. `step.wasm` is `filter/native/csrc/step.c`, compiled by `make explorer`.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

FOLDER = Path(__file__).parent
PARTS = ("style.css", "kernel.js", "engine.js", "story.js", "view.js")
"""The files that take the place of their names in page.html."""


def page(version: str) -> str:
    """Return the whole page, which loads nothing from elsewhere.

    Args:
        version: of the package, for the foot of the page.
    """
    kernel = (FOLDER / "step.wasm").read_bytes()
    contents = {name: (FOLDER / name).read_text(encoding="utf-8") for name in PARTS}
    contents["wasm"] = base64.b64encode(kernel).decode()
    contents["sha256"] = hashlib.sha256(kernel).hexdigest()
    contents["version"] = version
    template = (FOLDER / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{([\w.]+)\}\}", lambda match: contents[match[1]], template)
