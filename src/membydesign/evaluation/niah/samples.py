"""Samples of the needle-in-a-haystack tasks that fill a context length, for any tokenizer."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from membydesign.evaluation.niah.haystack import Haystack, Noise
from membydesign.evaluation.niah.tasks import TASKS, Hidden
from membydesign.evaluation.tokens import Encoder

if TYPE_CHECKING:
    from membydesign.evaluation.niah.tasks import Needle, Task

NEW_TOKENS = 128
"""Tokens reserved for the model's answer; they count as part of the context length."""


@final
@dataclass(frozen=True)
class Sample:
    """One question.

    Attributes:
        task: name of the task.
        length: context length in tokens, including the answer.
        seed: random seed.
        index: number of the sample.
        prompt: model input, up to the beginning of the answer.
        answer_prefix: end of the prompt, with which the answer begins.
        needles: all hidden needles, in the order of the text.
        queried: queried needles, in the order of the question.
        units: number of lines or words of the haystack.
        token_ids: tokens of the prompt.
    """

    task: str
    length: int
    seed: int
    index: int
    prompt: str
    answer_prefix: str
    needles: tuple[Needle, ...]
    queried: tuple[Needle, ...]
    units: int
    token_ids: tuple[int, ...]

    @property
    def answers(self) -> tuple[str, ...]:
        """Right values."""
        return tuple(needle.value for needle in self.queried)

    @property
    def fingerprint(self) -> str:
        """Hash of the prompt."""
        return hashlib.sha256(self.prompt.encode()).hexdigest()[:16]


@final
class NIAH:
    """Generator of samples that fill a context length.

    Args:
        tokenizer: Transformers tokenizer of the model.
        essays: haystack of all tasks except the first.
        new_tokens: tokens reserved for the answer.

    Examples:
        >>> from membydesign.evaluation.niah.haystack import read_essays
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
        """Generate one sample, independently of others, with as much haystack as fits.

        Args:
            task: name in `TASKS`.
            length: tokens of prompt and answer together.
            index: number of the sample, counted from 0.
            seed: random seed.
        """
        drawn = _Drawn.of(task, length, seed, index)
        fits = self._made(drawn, self._least(drawn.task))
        room = length - self.new_tokens
        if len(fits.token_ids) > room:
            raise self._too_short(drawn, len(fits.token_ids) + self.new_tokens)
        # Guess the number of units from the haystack's own tokens. Invariant: `fits` fits, `tight` units do not.
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
        """Raise an error if a length is too short for one of the samples; it names the minimum length.

        Args:
            task: name in `TASKS`.
            length: tokens of prompt and answer together.
            samples: number of samples.
            seed: random seed of the samples.
        """
        needed = 0
        for index in range(samples):
            drawn = _Drawn.of(task, length, seed, index)
            least = len(self._made(drawn, self._least(drawn.task)).token_ids) + self.new_tokens
            if length >= 2 * least:  # needles of other samples are never that much longer
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
        """Build the sample with a given amount of haystack, whether it fits or not."""
        posed = drawn.hidden.pose(self.haystacks[drawn.task.haystack], units)
        return Sample(
            task=drawn.task.name,
            length=drawn.length,
            seed=drawn.seed,
            index=drawn.index,
            prompt=posed.prompt,
            answer_prefix=posed.answer_prefix,
            needles=posed.needles,
            queried=posed.queried,
            units=units,
            token_ids=tuple(self.encode(posed.prompt)),
        )


@final
@dataclass(frozen=True)
class _Drawn:
    """A sample before its haystack is chosen."""

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
    """Token counts of a haystack's units, each tokenised by itself: exact for some tokenizers, close for others."""

    def __init__(self, haystack: Haystack, encode: Encoder) -> None:
        self.haystack, self.encode = haystack, encode
        self.sizes: dict[str, int] = {}
        self.totals = [0]

    def _total(self, units: int) -> int:
        """Return the tokens of the first units; cached, and each distinct unit is tokenised once."""
        while len(self.totals) <= units:
            unit = self.haystack.text(len(self.totals) - 1, len(self.totals))
            if unit not in self.sizes:
                self.sizes[unit] = max(1, len(self.encode.stream(self.haystack.separator + unit)))
            self.totals.append(self.totals[-1] + self.sizes[unit])
        return self.totals[units]

    def moved(self, units: int, tokens: int) -> int:
        """Return how many units fit if the haystack grows by `tokens` tokens from `units` units; may be negative."""
        budget = self._total(units) + tokens
        while self.totals[-1] < budget:
            self._total(len(self.totals))
        return bisect_right(self.totals, budget) - 1
