"""Documents in the manner of needle-in-a-haystack, from which a small model learns to answer such questions at all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar, final

import torch

from membydesign.data.made import MadeText
from membydesign.data.seeds import generator
from membydesign.evaluation.niah import TASKS, Hidden, listed
from membydesign.evaluation.niah_haystack import Essays, Noise

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Generator

    from membydesign.evaluation.niah import Posed, Task
    from membydesign.evaluation.niah_haystack import Haystack

LETTERS_OF_A_WORD = 16
"""At most, on average over a stretch of text, with the space."""


@final
@dataclass(frozen=True)
class NeedleText(MadeText):
    """RULER's questions with their answers, each about a stretch of text from anywhere in a corpus.

    All six tasks come equally often. Haystacks are short more often than long: the logarithms of their lengths are
    uniform. Values of one key are told in the order in which they stand, others in the order of the question. Where
    several keys are hidden, each that was not asked for alone is asked for once more, alone: the more answers a
    document has, the sooner they are learned. Random numbers are of a stream of their own: no evaluation has the same
    questions, though keys are of the same words.

    Attributes:
        corpus: where haystacks come from.
        count: how many documents there are.
        words: the fewest and the most words of a haystack.
        seed: another one gives other documents.

    Example:
        >>> from membydesign.data.text import PythonHelp
        >>> document = next(NeedleText(PythonHelp(), 1).documents())
        >>> document[-39:]
        '6009150, 1368153, 8375392, and 1031325.'
    """

    kind: ClassVar[str] = "needles, every key asked for"
    words: tuple[int, int] = (5, 250)

    def documents(self) -> Iterator[str]:
        """The documents, each the same whatever the count."""
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
        """A haystack, and how many units of it are taken."""
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
    """Questions for one key each, with their answers, in any order."""
    alone = posed.asked if len(posed.asked) == 1 else ()
    others = [needle for needle in posed.needles if task.keys > 1 and needle not in alone]
    for place in torch.randperm(len(others), generator=source).tolist():
        question, prefix = replace(task, queries=1).prompt("", others[place].key)
        yield f"{question.splitlines()[-1]}{prefix} {others[place].value}."


def told(posed: Posed) -> str:
    """A question with its answer."""
    asked = posed.asked
    if len({needle.key for needle in asked}) == 1:
        asked = tuple(sorted(asked, key=lambda needle: needle.depth))
    return f"{posed.prompt} {listed([needle.value for needle in asked])}."
