"""The command `mbd`. Its own packages load only when it runs."""

from __future__ import annotations

import sys

INSTALL = "pip install 'memory-by-design[command,figures]'"


def main() -> None:
    """Entry point of `mbd`; says what to install if the command's own packages are missing."""
    try:
        from membydesign.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        print(f"mbd needs {error.name}, which is not installed: {INSTALL}", file=sys.stderr)
        raise SystemExit(1) from None
    app()
