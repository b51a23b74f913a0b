"""The documentation site: pages of docs/ and pages made from the code, built into one folder that needs no network.

`python -m website` builds it (`make docs`). `sources` collects the pages, `mathematics` turns TeX into MathML, and
`links` checks the result. The builder itself is Zensical, with mkdocstrings for docstrings.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
