"""Build the site: `python -m website` writes site/, and fails on any warning, broken link or foreign host."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import yaml

from website import ROOT, links, mathematics, sources, versions

SOURCES = ROOT / "runs" / "website"
THEME = Path(__file__).parent / "theme"


def main() -> int:
    """Build the site and say where it is; the exit code says whether everything was right."""
    parser = argparse.ArgumentParser(prog="python -m website", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "site", help="the folder to write (default: site)")
    parser.add_argument("--version", default="", help="write OUT/VERSION and add it to the versions that OUT has")
    arguments = parser.parse_args()
    start, site = time.perf_counter(), arguments.out / arguments.version
    sources.stage(SOURCES / "docs")
    shutil.copytree(THEME, SOURCES / "docs" / "theme", dirs_exist_ok=True)
    (SOURCES / "mkdocs.yml").write_text(configuration(versioned=bool(arguments.version)), encoding="utf-8")
    if not build():
        return 1
    finish(SOURCES / "site")
    found = links.problems(SOURCES / "site")
    for problem in found:
        print(problem, file=sys.stderr)
    if found:
        return 1
    shutil.rmtree(site, ignore_errors=True)
    shutil.copytree(SOURCES / "site", site)
    if arguments.version:
        versions.add(arguments.out, arguments.version)
    count = sum(1 for _ in site.rglob("*.html"))
    print(f"{site / 'index.html'}: {count} pages in {time.perf_counter() - start:.1f} s")
    return 0


def configuration(*, versioned: bool) -> str:
    """Return mkdocs.yml with all pages in its navigation, as JSON, which is YAML."""
    settings = yaml.safe_load((Path(__file__).parent / "mkdocs.yml").read_text(encoding="utf-8"))
    settings["nav"] = _with_pages(settings["nav"])
    settings["plugins"][-1]["mkdocstrings"]["handlers"]["python"]["paths"] = [str(ROOT / "src")]
    if versioned:
        settings["extra"]["version"] = {"provider": "mike"}  # the layout of folders, not the program
    return json.dumps(settings, indent=1, ensure_ascii=False)


def _with_pages(entries: list) -> list:
    """Replace each "FOLDER/*" by the pages of the folder that are made from the code."""
    result = []
    for entry in entries:
        if isinstance(entry, dict):
            result.append({title: _with_pages(below) for title, below in entry.items()})
        elif entry.endswith("/*"):
            names = [name for name in sources.generated() if name.startswith(entry[:-1])]
            result += [{Path(name).stem.replace("-", " "): name} for name in names if not name.endswith("/index.md")]
        else:
            result.append(entry)
    return result


def build() -> bool:
    """Run the builder; print what it says if it does not succeed."""
    shutil.rmtree(SOURCES / "site", ignore_errors=True)
    program = Path(sys.executable).with_name("zensical")
    if not program.is_file():
        print(f"expected {program}: pip install --editable '.[docs]', with Python 3.11 or newer", file=sys.stderr)
        return False
    command = [str(program), "build", "--strict", "--clean"]
    done = subprocess.run(command, cwd=SOURCES, env={**os.environ, "NO_COLOR": "1"}, capture_output=True, text=True)
    if done.returncode:
        said = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
        print(re.sub(r"\nTraceback .*?\n(?=\w+Error)", "\n", said, flags=re.DOTALL), file=sys.stderr)
    return not done.returncode


def finish(site: Path) -> None:
    """Render formulas, and serve every script from the site itself."""
    (site / "404.html").unlink()  # its links would be those of a site at the root of a host
    for path in site.rglob("*.html"):
        depth = len(path.relative_to(site).parents) - 1
        text = mathematics.render(path.read_text(encoding="utf-8"))
        text = text.replace("https://unpkg.com/iframe-worker/shim", f"{'../' * depth}theme/file-worker.js")
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
