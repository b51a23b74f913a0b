"""Silence Transformers."""

from transformers.utils import logging


def quiet() -> None:
    """Turn off Transformers' progress bars and all of its messages except errors."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
