"""Several versions of the site next to each other, in the layout of folders that mike made common."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

FRONT = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Memory by Design</title>
<meta http-equiv="refresh" content="0; url={newest}/index.html">
</head>
<body><p><a href="{newest}/index.html">Memory by Design {newest}</a></p></body>
</html>
"""


def add(folder: Path, version: str) -> None:
    """Add a version to the list that pages read, and lead visitors of the folder to the newest."""
    listed = folder / "versions.json"
    known = json.loads(listed.read_text(encoding="utf-8")) if listed.is_file() else []
    names = sorted({version, *(entry["version"] for entry in known)}, key=_order, reverse=True)
    entries = [{"version": name, "title": name, "aliases": ["latest"] if name == names[0] else []} for name in names]
    listed.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    (folder / "index.html").write_text(FRONT.format(newest=names[0]), encoding="utf-8")


def _order(version: str) -> tuple[tuple[int, ...], bool]:
    """Sort numbers as numbers, and a release after its candidates."""
    numbers = tuple(int(n) for n in re.findall(r"\d+", version.split("rc")[0]))
    return numbers, "rc" not in version
