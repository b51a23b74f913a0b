"""Documents with needles: read back by their wording alone."""

import re
from collections import Counter
from itertools import islice

import pytest

from membydesign.data.text import PythonHelp
from membydesign.evaluation.niah import TASKS
from membydesign.evaluation.niah.documents import NeedleText

NEEDLE = re.compile(r"One of the special magic (numbers|uuids) for (\S+) is: (\S+?)\.(?=\s)")
ANSWER = re.compile(r"The special magic \w+ for (.*) mentioned in the provided text (?:is|are) (.*)\.$")


def listed(text: str) -> list[str]:
    return re.split(r", and |, ", text)


@pytest.fixture(scope="module")
def documents():
    return [*NeedleText(PythonHelp(), 300).documents()]


def test_answers_are_what_the_needles_say(documents):
    kinds = Counter()
    for document in documents:
        lines = document.split("\n")
        start = next(i for i, line in enumerate(lines) if line.startswith("What "))
        found = NEEDLE.findall("\n".join(lines[:start]) + "\n")
        hidden: dict[str, list[str]] = {}
        for _, key, value in found:
            hidden.setdefault(key, []).append(value)
        told = []
        for question in lines[start:]:
            answer = ANSWER.search(question)
            assert answer is not None
            keys, values = map(listed, answer.groups())
            assert values == [value for key in keys for value in hidden[key]], document
            assert ("What is the" in question) == (len(values) == 1)
            told.append(keys)
        first, *others = told
        kinds[len(found), sum(len(hidden[key]) for key in first), found[0][0]] += 1
        if len(hidden) > 1:  # every key alone, and once
            alone = others + ([first] if len(first) == 1 else [])
            assert sorted(alone) == sorted([key] for key in hidden)
        else:
            assert not others
    # single 1 and 2, single 3, multikey, multivalue, multiquery
    assert set(kinds) == {(1, 1, "numbers"), (1, 1, "uuids"), (4, 1, "numbers"), (4, 4, "numbers")}
    assert all(300 / len(TASKS) * 0.6 < n for n in kinds.values())


def test_haystacks_are_short_more_often_than_long(documents):
    lengths = sorted(len(document.partition("\nWhat ")[0].split()) for document in documents)
    assert lengths[150] - lengths[0] < 0.6 * (lengths[-1] - lengths[150])
    assert lengths[-1] < 250 + 80


def test_a_document_does_not_depend_on_how_many_there_are(documents):
    assert [*NeedleText(PythonHelp(), 3).documents()] == documents[:3]
    assert [*islice(NeedleText(PythonHelp(), 5, seed=1).documents(), 3)] != documents[:3]


def test_it_says_what_it_is():
    described = NeedleText(PythonHelp(), 3, (5, 9)).describe()
    assert (described["count"], described["words"], described["of"]) == (3, [5, 9], PythonHelp().describe())
    with pytest.raises(ValueError, match=r"words: expected 1 <= minimum <= maximum, got \(9, 5\)"):
        NeedleText(PythonHelp(), 3, (9, 5))
    with pytest.raises(ValueError, match="count: expected"):
        NeedleText(PythonHelp(), 0)
