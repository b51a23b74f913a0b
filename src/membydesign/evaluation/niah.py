"""RULER's needle-in-a-haystack tasks: samples for any tokenizer and context length.

    A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the
    number afterwards.
    … One of the special magic numbers for quiet-harbor is: 4519028. …
    What is the special magic number for quiet-harbor mentioned in the provided text? The special magic number for
    quiet-harbor mentioned in the provided text is

As NVIDIA/RULER makes them (Hsieh et al. 2024, `scripts/data/synthetic/niah.py`): the wording, kinds of needles, depths
and the budget of tokens. What differs is said in docs/evaluation.md.
"""

from __future__ import annotations

import hashlib
import uuid
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, final

import torch

from membydesign.data.seeds import generator
from membydesign.evaluation.niah_haystack import Haystack, Noise
from membydesign.evaluation.niah_words import ADJECTIVES, NOUNS
from membydesign.evaluation.tokens import Encoder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Generator

NEW_TOKENS = 128
"""Tokens that a model may answer with, and which count as part of the context."""

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
    """One kind of question.

    Attributes:
        name: as RULER calls it.
        haystack: "noise" or "essay".
        kind: what values are, "numbers" of seven digits or "uuids".
        keys: how many keys there are.
        values: how many values each key has.
        queries: how many of the keys are asked for.
    """

    name: str
    haystack: Literal["noise", "essay"]
    kind: Literal["numbers", "uuids"]
    keys: int = 1
    values: int = 1
    queries: int = 1

    @property
    def needles(self) -> int:
        """How many sentences are hidden."""
        return self.keys * self.values

    @property
    def answers(self) -> int:
        """How many values are asked for."""
        return self.queries * self.values

    def prompt(self, context: str, query: str) -> tuple[str, str]:
        """The question about a context, and how its answer begins."""
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
    """A sentence in the haystack.

    Attributes:
        key: what it is about.
        value: what it says.
        kind: what values are.
        depth: where it stands, from 0 (first) to 1 (last): the share of the haystack's sentences, or of the lines of
            noise, that come before it.
    """

    key: str
    value: str
    kind: str
    depth: float

    @property
    def text(self) -> str:
        """The sentence."""
        return NEEDLE.format(kind=self.kind, key=self.key, value=self.value)


@final
@dataclass(frozen=True)
class Posed:
    """A question about a haystack.

    Attributes:
        prompt: what a model is given, up to the beginning of its answer.
        answer_prefix: the end of the prompt.
        needles: all that are hidden, in the order in which they stand.
        asked: those that are asked for, in the order of the question.
    """

    prompt: str
    answer_prefix: str
    needles: tuple[Needle, ...]
    asked: tuple[Needle, ...]


@final
@dataclass(frozen=True)
class Hidden:
    """What is hidden and asked, before there is a haystack.

    Attributes:
        task: the kind of question.
        stream: of random numbers, from which depths are drawn too.
        pairs: of key and value.
        keys: that are asked for.
    """

    task: Task
    stream: tuple[str | int, ...]
    pairs: tuple[tuple[str, str], ...]
    keys: tuple[str, ...]

    @staticmethod
    def drawn(task: Task, stream: tuple[str | int, ...]) -> Hidden:
        """Keys and values at random, all different, so that a question has one answer."""
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
        """The question about so many units of a haystack."""
        depths = haystack.draw_depths(self.task.needles, units, generator(*self.stream, "depths"))
        needles = [
            Needle(key, value, self.task.kind, depth) for (key, value), depth in zip(self.pairs, depths, strict=True)
        ]
        standing = sorted(needles, key=lambda needle: needle.depth)
        context = haystack.hide([needle.text for needle in standing], [needle.depth for needle in standing], units)
        question, prefix = self.task.prompt(context, listed(self.keys))
        asked = tuple(needle for key in self.keys for needle in needles if needle.key == key)
        return Posed(question + prefix, prefix, tuple(standing), asked)


@final
@dataclass(frozen=True)
class Sample:
    """One question.

    Attributes:
        task: its name.
        length: of the context, answer included, in tokens.
        seed: that it was drawn with.
        index: its number.
        prompt: what the model is given, up to the beginning of its answer.
        answer_prefix: the end of the prompt, with which the answer begins.
        needles: all that are hidden, in the order in which they stand.
        asked: those that are asked for, in the order of the question.
        units: lines or words of the haystack.
        token_ids: of the prompt.
    """

    task: str
    length: int
    seed: int
    index: int
    prompt: str
    answer_prefix: str
    needles: tuple[Needle, ...]
    asked: tuple[Needle, ...]
    units: int
    token_ids: tuple[int, ...]

    @property
    def answers(self) -> tuple[str, ...]:
        """The values that are right."""
        return tuple(needle.value for needle in self.asked)

    @property
    def fingerprint(self) -> str:
        """The same for the same prompt."""
        return hashlib.sha256(self.prompt.encode()).hexdigest()[:16]


@final
class NIAH:
    """Makes the samples of a context length.

    Args:
        tokenizer: of the model, as Transformers has them.
        essays: the haystack of all tasks but the first.
        new_tokens: kept free for the answer.

    Example:
        >>> from membydesign.evaluation.niah_haystack import read_essays
        >>> class Letters:
        ...     def __call__(self, text, **_):
        ...         return {"input_ids": [ord(letter) for letter in text]}
        >>> niah = NIAH(Letters(), read_essays("embedded"))
        >>> sample = niah.sample("niah_single_1", length=2048, index=0)
        >>> len(sample.token_ids) + 128 <= 2048, sample.answers
        (True, ('4700407',))
    """

    def __init__(self, tokenizer: Any, essays: Haystack, new_tokens: int = NEW_TOKENS) -> None:
        self.encode = Encoder(tokenizer)
        self.haystacks: dict[str, Haystack] = {"noise": Noise(), "essay": essays}
        self.new_tokens = new_tokens
        self._counts = {name: _Counts(haystack, self.encode) for name, haystack in self.haystacks.items()}

    def sample(self, task: str, length: int, index: int, seed: int = 0) -> Sample:
        """The sample of a number, whichever others were made before, with as much haystack as fits.

        Args:
            task: a name among `TASKS`.
            length: tokens of prompt and answer together.
            index: its number, from 0.
            seed: another one gives other samples.
        """
        drawn = _Drawn.of(task, length, seed, index)
        fits = self._made(drawn, self._least(drawn.task))
        room = length - self.new_tokens
        if len(fits.token_ids) > room:
            raise self._too_short(drawn, len(fits.token_ids) + self.new_tokens)
        # Guessed from the haystack's own tokens, and seldom far off: `fits` fits, `tight` units do not.
        counts, tried, tight = self._counts[drawn.task.haystack], fits, None
        while len(fits.token_ids) < room and (tight is None or fits.units + 1 < tight):
            guess = max(counts.moved(tried.units, room - len(tried.token_ids)), fits.units + 1)
            tried = self._made(drawn, guess if tight is None else min(guess, tight - 1))
            if len(tried.token_ids) > room:
                tight = tried.units
            else:
                fits = tried
        return fits

    def check_length(self, task: str, length: int, samples: int, seed: int = 0) -> None:
        """Refuse a length that is too short for one of the first samples; the error names the shortest that would do.

        Args:
            task: a name among `TASKS`.
            length: tokens of prompt and answer together.
            samples: how many there will be.
            seed: of the samples.
        """
        needed = 0
        for index in range(samples):
            drawn = _Drawn.of(task, length, seed, index)
            least = len(self._made(drawn, self._least(drawn.task)).token_ids) + self.new_tokens
            if length >= 2 * least:  # no other sample's needles are that much longer
                return
            needed = max(needed, least)
        if needed > length:
            raise self._too_short(_Drawn.of(task, length, seed, 0), needed)

    def _least(self, task: Task) -> int:
        return max(self.haystacks[task.haystack].least, task.needles)

    def _too_short(self, drawn: _Drawn, needed: int) -> ValueError:
        task = drawn.task
        return ValueError(
            f"length: expected at least {needed:,} tokens for {task.name} with this tokenizer ({self._least(task)} "
            f"{self.haystacks[task.haystack].unit} of haystack, needles, question, and {self.new_tokens} tokens of "
            f"answer), got {drawn.length:,}"
        )

    def _made(self, drawn: _Drawn, units: int) -> Sample:
        """The sample with so much haystack, whether it fits or not."""
        posed = drawn.hidden.pose(self.haystacks[drawn.task.haystack], units)
        return Sample(
            task=drawn.task.name,
            length=drawn.length,
            seed=drawn.seed,
            index=drawn.index,
            prompt=posed.prompt,
            answer_prefix=posed.answer_prefix,
            needles=posed.needles,
            asked=posed.asked,
            units=units,
            token_ids=tuple(self.encode(posed.prompt)),
        )


@final
@dataclass(frozen=True)
class _Drawn:
    """A sample before there is a haystack."""

    task: Task
    length: int
    seed: int
    index: int
    hidden: Hidden

    @staticmethod
    def of(name: str, length: int, seed: int, index: int) -> _Drawn:
        if name not in TASKS:
            raise ValueError(f"task: expected one of {', '.join(TASKS)}, got {name!r}")
        return _Drawn(TASKS[name], length, seed, index, Hidden.drawn(TASKS[name], ("niah", name, length, seed, index)))


@final
class _Counts:
    """How many tokens a haystack's units take, each by itself: exact for some tokenizers, a good guess for others."""

    def __init__(self, haystack: Haystack, encode: Encoder) -> None:
        self.haystack, self.encode = haystack, encode
        self.sizes: dict[str, int] = {}
        self.totals = [0]

    def _total(self, units: int) -> int:
        """Of the first units; counted once, and each word once."""
        while len(self.totals) <= units:
            unit = self.haystack.text(len(self.totals) - 1, len(self.totals))
            if unit not in self.sizes:
                self.sizes[unit] = max(1, len(self.encode.stream(self.haystack.separator + unit)))
            self.totals.append(self.totals[-1] + self.sizes[unit])
        return self.totals[units]

    def moved(self, units: int, tokens: int) -> int:
        """How many units there can be if there are to be so many tokens more than with `units`, or fewer."""
        wanted = self._total(units) + tokens
        while self.totals[-1] < wanted:
            self._total(len(self.totals))
        return bisect_right(self.totals, wanted) - 1


def _below(n: int, source: Generator) -> int:
    return int(torch.randint(n, (), generator=source))


def _number(source: Generator) -> str:
    return str(1_000_000 + _below(9_000_000, source))


def _uuid(source: Generator) -> str:
    drawn = torch.randint(256, (16,), generator=source).tolist()
    return str(uuid.UUID(bytes=bytes(drawn), version=4))


_VALUES = {"numbers": _number, "uuids": _uuid}


def listed(names: Sequence[str]) -> str:
    """Keys as a question names them: a, b, c, and d."""
    return f"{', '.join(names[:-1])}, and {names[-1]}" if len(names) > 1 else names[0]
