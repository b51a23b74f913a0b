"""Texts of results, however odd, are rendered in time proportional to their length."""

import time

import pytest

from membydesign.data.splitting import HEADING
from membydesign.evaluation.niah.haystack import Essays
from membydesign.reports.comparison import Bound
from membydesign.reports.page_html import note
from membydesign.reports.page_markdown import plain

LENGTH = 40_000
SECONDS = 2.0
"""Linear time takes a tenth of this at most; quadratic time several times as much."""

UNPAIRED = [
    *("[", "]", "(", "*", "|", "`", "\\", "_", "&"),
    *("*a ", "**a ", "**[", "*[", "[x](a", "[a](b ", "[a]", "](", "`a ", "&a", "&#"),
]


def spent(function, *inputs) -> float:
    start = time.process_time()
    function(*inputs)
    return time.process_time() - start


@pytest.mark.parametrize("unpaired", UNPAIRED)
def test_notes(unpaired):
    text = unpaired * (LENGTH // len(unpaired))
    assert spent(note, text) < SECONDS
    assert spent(plain, text) < SECONDS


def test_bounds():
    start = time.process_time()
    with pytest.raises(ValueError, match="paper: expected >, ≥, < or ≤ and a number"):
        Bound("claim", "quantity", "> " + "1" * LENGTH + "x", 1.0)
    assert time.process_time() - start < SECONDS


@pytest.mark.parametrize("word", [".", "!'", "="])
def test_texts(word):
    long = word * (LENGTH // len(word))
    assert spent(lambda: Essays(f"{long}x A word. {long} Another.", "essays")) < SECONDS
    assert spent(HEADING.fullmatch, f"= {long}x") < SECONDS


def test_marks_mean_what_they_did():
    for text, expected in {
        "a `b*c*` d": "a <code>b*c*</code> d",
        "**a *b* c**, *d*": "<strong>a <em>b</em> c</strong>, <em>d</em>",
        r"\*a\* \x": r"*a* \x",
        "[a **b**](https://c.org/?d&e)": '<a href="https://c.org/?d&amp;e">a <strong>b</strong></a>',
        "[a](b.md) [c] (d) [](e) [f](g h)": "a [c] (d) [](e) [f](g h)",
        "``a` * b * c": "`<code>a</code> * b * c",
    }.items():
        assert note(text) == expected
