"""Transformers without words of its own."""

from transformers.utils import logging


def quiet() -> None:
    """Let Transformers draw no bars of its own and say nothing but errors."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
