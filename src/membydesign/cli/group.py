"""The group of all commands, which ends any of them in good order when it is stopped."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from membydesign.cli.stopping import Stopped, say_stopped

WORDS = "membydesign.words"
"""Where a context keeps what the user typed."""


class StoppableGroup(TyperGroup):
    """Commands that end with 130 after Ctrl-C and with 143 after SIGTERM, and say how to resume if they can."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Keep the words of the command line, of which parsing leaves nothing."""
        words = list(args)
        context = super().make_context(info_name, args, parent, **extra)
        context.meta[WORDS] = words
        return context

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            stopped = Stopped.of(error)
            say_stopped(stopped, ctx.info_name or "mbd", ctx.meta[WORDS])
            raise typer.Exit(stopped.exit_code) from None
