"""Text to measure on, from where a user says."""

from __future__ import annotations

from pathlib import Path

EMBEDDED = "embedded"
SUFFIXES = (".txt", ".md", ".tokens")


def read_text(source: str | Path) -> str:
    """A text as one string.

    Args:
        source: "embedded" for Python's own help (`pydoc_data.topics`), a file, or a folder, of which all .txt, .md and
            .tokens files are taken in the order of their names, with a line between them.
    """
    if str(source) == EMBEDDED:
        from pydoc_data.topics import topics

        return "\n\n".join(topics[name] for name in sorted(topics))
    path = Path(source)
    if not path.exists():
        raise ValueError(f"text: expected {EMBEDDED!r}, a file or a folder, got no such path {str(source)!r}")
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
        if not files:
            raise ValueError(f"text: expected {', '.join(SUFFIXES)} files in {str(path)!r}, got none")
    try:
        text = "\n\n".join(file.read_text(encoding="utf-8") for file in files)
    except UnicodeDecodeError as error:
        raise ValueError(f"text: expected UTF-8 in {str(source)!r}, got {error}") from error
    if not text.strip():
        raise ValueError(f"text: expected some text in {str(source)!r}, got none")
    return text
