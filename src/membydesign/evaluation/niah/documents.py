"""Training documents in the style of the tasks, from which small models learn to answer such questions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar, final

import torch

from membydesign.data.seeds import generator
from membydesign.data.synthetic import SyntheticText
from membydesign.evaluation.niah.haystack import Essays, Noise
from membydesign.evaluation.niah.tasks import TASKS, Hidden, listed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Generator

    from membydesign.evaluation.niah.haystack import Haystack
    from membydesign.evaluation.niah.tasks import Posed, Task

LETTERS_OF_A_WORD = 16
"""Upper bound of the average letters per word in a stretch of text, including the space."""


@final
@dataclass(frozen=True)
class NeedleText(SyntheticText):
    """RULER's questions with answers, each about a random stretch of a corpus.

    All six tasks are equally frequent. Haystack lengths are log-uniform. Several values of one key are listed in the
    order of the text, values of several keys in the order of the question. If several keys are hidden, the document
    also queries each of them alone, because more answers per document speed up learning. The documents have their own
    random stream, so no evaluation contains the same questions, although keys are made of the same words.

    Attributes:
        corpus: source of the haystacks.
        count: number of documents.
        words: minimum and maximum number of words in a haystack.
        seed: random seed.

    Examples:
        >>> from membydesign.data.text import PythonHelp
        >>> document = next(NeedleText(PythonHelp(), 1).documents())
        >>> document[-39:]
        '6009150, 1368153, 8375392, and 1031325.'
    """

    kind: ClassVar[str] = "needles, every key asked for"
    words: tuple[int, int] = (5, 250)

    def documents(self) -> Iterator[str]:
        """Yield the documents."""
        texts = [*self.corpus.documents()]
        ends = [*accumulate(map(len, texts))]
        tasks = [*TASKS.values()]
        for index in range(self.count):
            stream = ("needle documents", self.seed, index)
            source = generator(*stream, "haystack")
            task = tasks[int(torch.randint(len(tasks), (), generator=source))]
            haystack, units = self._haystack(task, texts, ends, source)
            posed = Hidden.drawn(task, stream).pose(haystack, units)
            yield "\n".join([told(posed), *_more(posed, task, generator(*stream, "more"))])

    def _haystack(self, task: Task, texts: list[str], ends: list[int], source: Generator) -> tuple[Haystack, int]:
        """Draw a haystack and the number of its units."""
        words = self.draw_words(source)
        if task.haystack == "noise":
            noise = Noise()
            return noise, max(task.needles, round(words / len(noise.text(0, 1).split())))
        place = int(torch.randint(ends[-1], (), generator=source))
        number = next(i for i, end in enumerate(ends) if place < end)
        start = place - (ends[number] - len(texts[number]))
        stretch = texts[number][start : start + LETTERS_OF_A_WORD * words].split()[1 : words + 1]
        return Essays(" ".join(stretch or ["…"])), max(1, len(stretch))


def _more(posed: Posed, task: Task, source: Generator) -> Iterator[str]:
    """Yield further questions for one key each, with answers, in random order."""
    alone = posed.queried if len(posed.queried) == 1 else ()
    others = [needle for needle in posed.needles if task.keys > 1 and needle not in alone]
    for place in torch.randperm(len(others), generator=source).tolist():
        question, prefix = replace(task, queries=1).prompt("", others[place].key)
        yield f"{question.splitlines()[-1]}{prefix} {others[place].value}."


def told(posed: Posed) -> str:
    """Write a question with its answer."""
    needles = posed.queried
    if len({needle.key for needle in needles}) == 1:
        needles = tuple(sorted(needles, key=lambda needle: needle.depth))
    return f"{posed.prompt} {listed([needle.value for needle in needles])}."
