"""Text to measure on, from where a user says."""

from __future__ import annotations

from pathlib import Path

from membydesign.data.text import Corpus, JoinedText, PythonHelp
from membydesign.data.text_files import TextFiles

EMBEDDED = "embedded"
"""The name of the text that every Python carries, its own help."""


def read_text(source: str | Path) -> str:
    """A text as one string.

    Args:
        source: "embedded" for Python's own help, or a file or folder that `TextFiles` reads; files are taken in the
            order of their paths, with an empty line between them.
    """
    corpus: Corpus = JoinedText((PythonHelp("train"), PythonHelp("validation")))
    if str(source) != EMBEDDED:
        if not Path(source).exists():
            raise ValueError(f"text: expected {EMBEDDED!r}, a file or a folder, got no such path {str(source)!r}")
        corpus = TextFiles(Path(source), cut="whole")
    try:
        return "\n\n".join(corpus.documents())
    except ValueError as error:
        raise ValueError(f"text: {str(error).partition(': ')[2]}") from error
