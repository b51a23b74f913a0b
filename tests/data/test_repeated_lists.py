"""Lists that are said again: read back by splitting them."""

from collections import Counter

import pytest

from membydesign.data.repeated_lists import RepeatedWords
from membydesign.data.text import PythonHelp


def said(document: str) -> tuple[list[str], int]:
    """The shortest list that a document repeats, and how often."""
    words = document.split()
    sizes = (n for n in range(1, len(words) + 1) if words == words[:n] * (len(words) // n))
    size = next(sizes)
    return words[:size], len(words) // size


@pytest.fixture(scope="module")
def documents():
    return [*RepeatedWords(PythonHelp(), 300, (2, 40)).documents()]


def test_lists_are_said_again(documents):
    lists, times = zip(*map(said, documents), strict=True)
    assert set(times) == {2, 3, 4}
    assert min(Counter(times).values()) > 60
    lengths = sorted(map(len, lists))
    assert (lengths[0], lengths[-1]) == (2, 40)
    assert 6 < lengths[150] < 13  # the middle of logarithms from 2 to 40 is 9


def test_words_are_of_the_text_and_a_quarter_are_numbers(documents):
    known = {word for text in PythonHelp().documents() for word in text.split()}
    words = [word for document in documents for word in said(document)[0]]
    others = [word for word in words if word not in known]
    assert all(word.isdigit() and len(word) <= 7 for word in others)
    assert 0.18 < sum(word.isdigit() for word in words) / len(words) < 0.32
    assert len(set(words)) > 0.5 * len(words), "any word is as likely as any other"


def test_a_document_does_not_depend_on_how_many_there_are(documents):
    assert [*RepeatedWords(PythonHelp(), 3, (2, 40)).documents()] == documents[:3]
    assert [*RepeatedWords(PythonHelp(), 3, (2, 40), seed=1).documents()] != documents[:3]


def test_it_says_what_it_is():
    described = RepeatedWords(PythonHelp(), 3, (5, 9)).describe()
    assert (described["count"], described["words"], described["of"]) == (3, [5, 9], PythonHelp().describe())
    with pytest.raises(ValueError, match=r"words: expected 1 <= minimum <= maximum, got \(9, 5\)"):
        RepeatedWords(PythonHelp(), 3, (9, 5))
    with pytest.raises(ValueError, match="count: expected"):
        RepeatedWords(PythonHelp(), 0)
