"""`mbd evaluate`: measure what a language model can do, as tables, figures and files; one module per subcommand."""

from __future__ import annotations

import typer

from membydesign.cli.evaluate import compare, niah, perplexity

evaluate = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", pretty_exceptions_enable=False)


@evaluate.callback()
def about() -> None:
    """Evaluate a language model: needles in haystacks, perplexity by length.

    For example: `mbd evaluate niah my-model --lengths 1024,2048 --samples 50`

    The model may be one of this package, a Gated DeltaNet of flash-linear-attention, or any causal language model that
    Transformers reads.
    """


for command in (niah.niah, perplexity.perplexity, compare.compare):
    evaluate.command()(command)
