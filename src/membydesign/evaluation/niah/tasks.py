"""RULER's needle-in-a-haystack tasks: which needles are hidden, and how questions are worded.

    A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the
    number afterwards.
    … One of the special magic numbers for quiet-harbor is: 4519028. …
    What is the special magic number for quiet-harbor mentioned in the provided text? The special magic number for
    quiet-harbor mentioned in the provided text is

Wording, kinds of needles, depths and token budget follow NVIDIA/RULER (Hsieh et al. 2024,
`scripts/data/synthetic/niah.py`). docs/howto/evaluation.md lists the differences.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

import torch

from membydesign.data.seeds import generator
from membydesign.evaluation.niah.words import ADJECTIVES, NOUNS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Generator

    from membydesign.evaluation.niah.haystack import Haystack

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
PROMPT = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What are all the special magic {kind} for {query} mentioned in the provided text?"
)
ANSWER_PREFIX = " The special magic {kind} for {query} mentioned in the provided text are"


@final
@dataclass(frozen=True)
class Task:
    """One of RULER's tasks.

    Attributes:
        name: RULER's name of the task.
        haystack: "noise" or "essay".
        kind: type of the values, "numbers" of seven digits or "uuids".
        keys: number of keys.
        values: values per key.
        queries: number of queried keys.
    """

    name: str
    haystack: Literal["noise", "essay"]
    kind: Literal["numbers", "uuids"]
    keys: int = 1
    values: int = 1
    queries: int = 1

    @property
    def needles(self) -> int:
        """Number of hidden sentences."""
        return self.keys * self.values

    @property
    def answers(self) -> int:
        """Number of values in the right answer."""
        return self.queries * self.values

    def prompt(self, context: str, query: str) -> tuple[str, str]:
        """Return the question about a context, and the beginning of its answer."""
        question, prefix, kind = PROMPT, ANSWER_PREFIX, str(self.kind)
        if self.answers == 1:
            question = question.replace("Some", "A").replace("are all", "is").replace("are", "is")
            prefix, kind = prefix.replace("are", "is"), kind.removesuffix("s")
        return question.format(kind=kind, context=context, query=query), prefix.format(kind=kind, query=query)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("niah_single_1", "noise", "numbers"),
        Task("niah_single_2", "essay", "numbers"),
        Task("niah_single_3", "essay", "uuids"),
        Task("niah_multikey_1", "essay", "numbers", keys=4),
        Task("niah_multivalue", "essay", "numbers", values=4),
        Task("niah_multiquery", "essay", "numbers", keys=4, queries=4),
    )
}
"""The six tasks of the paper, by name."""


@final
@dataclass(frozen=True)
class Needle:
    """A sentence hidden in the haystack.

    Attributes:
        key: key of the sentence.
        value: value of the key.
        kind: type of the value.
        depth: position from 0 (first) to 1 (last): the fraction of the haystack's sentences, or lines of noise, that
            precede it.
    """

    key: str
    value: str
    kind: str
    depth: float

    @property
    def text(self) -> str:
        """Text of the sentence."""
        return NEEDLE.format(kind=self.kind, key=self.key, value=self.value)


@final
@dataclass(frozen=True)
class Posed:
    """A question about a haystack.

    Attributes:
        prompt: model input, up to the beginning of the answer.
        answer_prefix: end of the prompt, with which the answer begins.
        needles: all hidden needles, in the order of the text.
        queried: queried needles, in the order of the question.
    """

    prompt: str
    answer_prefix: str
    needles: tuple[Needle, ...]
    queried: tuple[Needle, ...]


@final
@dataclass(frozen=True)
class Hidden:
    """Needles and question of a sample, independent of the haystack.

    Attributes:
        task: task of the sample.
        stream: name of the random stream, from which depths are drawn too.
        pairs: hidden keys and values.
        keys: queried keys.
    """

    task: Task
    stream: tuple[str | int, ...]
    pairs: tuple[tuple[str, str], ...]
    keys: tuple[str, ...]

    @staticmethod
    def drawn(task: Task, stream: tuple[str | int, ...]) -> Hidden:
        """Draw distinct random keys and values, so that a question has one answer."""
        source = generator(*stream)
        keys: dict[str, None] = {}
        while len(keys) < task.keys:
            adjective, noun = (words[_below(len(words), source)] for words in (ADJECTIVES, NOUNS))
            keys.setdefault(f"{adjective}-{noun}")
        values: dict[str, None] = {}
        while len(values) < task.needles:
            values.setdefault(_VALUES[task.kind](source))
        repeated = [key for key in keys for _ in range(task.values)]
        order = torch.randperm(task.keys, generator=source)[: task.queries].tolist()
        pairs = tuple(zip(repeated, values, strict=True))
        return Hidden(task, stream, pairs, tuple(list(keys)[i] for i in order))

    def pose(self, haystack: Haystack, units: int) -> Posed:
        """Hide the needles in the first units of a haystack and ask the question."""
        depths = haystack.draw_depths(self.task.needles, units, generator(*self.stream, "depths"))
        needles = [
            Needle(key, value, self.task.kind, depth) for (key, value), depth in zip(self.pairs, depths, strict=True)
        ]
        in_order = sorted(needles, key=lambda needle: needle.depth)
        context = haystack.hide([needle.text for needle in in_order], [needle.depth for needle in in_order], units)
        question, prefix = self.task.prompt(context, listed(self.keys))
        queried = tuple(needle for key in self.keys for needle in needles if needle.key == key)
        return Posed(question + prefix, prefix, tuple(in_order), queried)


def _below(n: int, source: Generator) -> int:
    return int(torch.randint(n, (), generator=source))


def _number(source: Generator) -> str:
    return str(1_000_000 + _below(9_000_000, source))


def _uuid(source: Generator) -> str:
    drawn = torch.randint(256, (16,), generator=source).tolist()
    return str(uuid.UUID(bytes=bytes(drawn), version=4))


_VALUES = {"numbers": _number, "uuids": _uuid}


def listed(names: Sequence[str]) -> str:
    """Join names as in a question: a, b, c, and d."""
    return f"{', '.join(names[:-1])}, and {names[-1]}" if len(names) > 1 else names[0]
