"""The command `mbd`. Its own packages load only when it runs."""

from __future__ import annotations

import sys

from membydesign.cli.stopping import Stopped, say_stopped, sigterm_stops
from membydesign.install import install_hint


def main() -> None:
    """Entry point of `mbd`; says what to install if the command's own packages are missing."""
    try:
        with sigterm_stops():
            _run()
    except KeyboardInterrupt as error:  # while packages load; once a command runs, its group makes an exit code of it
        stopped = Stopped.of(error)
        say_stopped(stopped)
        raise SystemExit(stopped.exit_code) from None


def _run() -> None:
    try:
        from membydesign.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        print(f"mbd needs {error.name}, which is not installed: {install_hint('command,figures')}", file=sys.stderr)
        raise SystemExit(1) from None
    app()
