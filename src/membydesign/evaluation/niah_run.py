"""A model's answers to needle-in-a-haystack questions, scored as RULER does, and kept one line each."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, final

from membydesign.evaluation.generation import batch_for, generate_greedy
from membydesign.evaluation.niah import TASKS
from membydesign.evaluation.tokens import check_vocabulary
from membydesign.files import write_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from membydesign.evaluation.niah import NIAH, Sample


Key = tuple[str, int, int]
"""Task, length and number of a sample."""


@final
@dataclass(frozen=True)
class Answered:
    """A sample and what a model said to it.

    Attributes:
        task: its name.
        length: of the context, in tokens.
        seed: of the samples.
        index: its number.
        prompt_sha256: the first 16 digits, which are the same for the same prompt.
        prompt_tokens: how many the prompt has.
        haystack_units: lines or words of the haystack.
        answers: the values that are right, in the order of the question.
        depths: of their needles.
        other_depths: of needles that are not asked for.
        correct: which of the answers the generation contains.
        generation: what the model said.
        score: RULER's, the share of answers that it contains, in per cent.
    """

    task: str
    length: int
    seed: int
    index: int
    prompt_sha256: str
    prompt_tokens: int
    haystack_units: int
    answers: tuple[str, ...]
    depths: tuple[float, ...]
    other_depths: tuple[float, ...]
    correct: tuple[bool, ...]
    generation: str
    score: float

    @staticmethod
    def of(sample: Sample, generation: str) -> Answered:
        """A sample with what a model said to it."""
        correct = contained(generation, sample.answers)
        return Answered(
            task=sample.task,
            length=sample.length,
            seed=sample.seed,
            index=sample.index,
            prompt_sha256=sample.fingerprint,
            prompt_tokens=len(sample.token_ids),
            haystack_units=sample.units,
            answers=sample.answers,
            depths=tuple(needle.depth for needle in sample.asked),
            other_depths=tuple(needle.depth for needle in sample.needles if needle not in sample.asked),
            correct=correct,
            generation=generation,
            score=100 * sum(correct) / len(correct),
        )

    @property
    def key(self) -> Key:
        """Which sample it answers, of those with its seed."""
        return self.task, self.length, self.index


def contained(generation: str, answers: Sequence[str]) -> tuple[bool, ...]:
    """Which answers a generation contains, whatever the case of their letters."""
    said = generation.lower()
    return tuple(answer.lower() in said for answer in answers)


def ruler_score(generations: Sequence[str], answers: Sequence[Sequence[str]]) -> float:
    """RULER's `string_match_all`: the share of answers contained, averaged over samples, in per cent.

    Example:
        >>> ruler_score(["It is 1234567.", "No idea."], [["1234567", "7654321"], ["1111111"]])
        25.0
    """
    shares = []
    for said, right in zip(generations, answers, strict=True):
        correct = contained(said, right)
        shares.append(sum(correct) / len(correct))
    return 100 * sum(shares) / len(shares)


def answer(
    model: Any,
    niah: NIAH,
    *,
    tasks: Sequence[str] = tuple(TASKS),
    lengths: Sequence[int],
    samples: int = 100,
    seed: int = 0,
    share: tuple[int, int] = (0, 1),
    batch_size: int | None = None,
    file: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Answered]:
    """Ask a model everything, or what is left of it.

    Args:
        model: a causal language model of Transformers.
        niah: makes the samples.
        tasks: names among `TASKS`.
        lengths: of contexts, in tokens.
        samples: of each task and length.
        seed: of the samples.
        share: of several processes that ask together, the number of this one, from 0, and how many there are; each
            takes every so-manieth sample.
        batch_size: prompts at a time; as many as make 16,384 tokens if none is given.
        file: JSON lines to which every batch is added when it is done; what it holds already is not asked again.
        progress: told how many samples are done, of how many.

    Returns:
        The answers of this process, by task, length and number.
    """
    mine = range(share[0], samples, share[1])
    wanted = [(task, length, index) for task in tasks for length in lengths for index in mine]
    for task in tasks:
        for length in lengths:
            niah.check_length(task, length, samples, seed)
    done: dict[Key, Answered] = {}
    if file is not None and file.exists():
        _mend(file)
        done = {one.key: one for one in read_answers(file)}
    if any(one.seed != seed for one in done.values()):
        raise ValueError(f"seed: expected that of {file}, {next(iter(done.values())).seed}, got {seed}")
    known = next((key for key in wanted if key in done), None)
    if known is not None and niah.sample(*known, seed).fingerprint != done[known].prompt_sha256:
        raise ValueError(f"file: expected answers to these samples in {file}, got some to other prompts")
    left = [key for key in wanted if key not in done]
    tell = progress or (lambda *_: None)
    tell(len(wanted) - len(left), len(wanted))
    model.eval()
    for keys in _batches(left, batch_size):
        batch = [niah.sample(*key, seed) for key in keys]
        check_vocabulary(model, max(max(sample.token_ids) for sample in batch))
        said = generate_greedy(model, [sample.token_ids for sample in batch], niah.new_tokens, niah.encode.padding)
        found = [Answered.of(sample, niah.encode.decode(ids)) for sample, ids in zip(batch, said, strict=True)]
        if file is not None:
            _append(file, found)
        done.update({one.key: one for one in found})
        left = left[len(keys) :]
        tell(len(wanted) - len(left), len(wanted))
    return [done[key] for key in wanted]


def _batches(keys: Sequence[Key], batch_size: int | None) -> Iterator[Sequence[Key]]:
    """Runs of one task and length, whose prompts are about equally long, so that there is little padding."""
    start = 0
    while start < len(keys):
        task, length, _ = keys[start]
        most = batch_for(length, batch_size)
        stop = start + 1
        while stop < len(keys) and stop - start < most and keys[stop][:2] == (task, length):
            stop += 1
        yield keys[start:stop]
        start = stop


def _append(file: Path, answered: Sequence[Answered]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(asdict(one), ensure_ascii=False, allow_nan=False) + "\n" for one in answered]
    with file.open("a", encoding="utf-8") as opened:
        opened.write("".join(lines))
        opened.flush()
        os.fsync(opened.fileno())


def read_answers(file: Path) -> list[Answered]:
    """What `answer` wrote, each sample once, without a last line that is not whole."""
    found: dict[Key, Answered] = {}
    for number, line in enumerate(_whole_lines(file), 1):
        try:
            one = Answered(**{name: _tuple(value) for name, value in json.loads(line).items()})
        except (ValueError, TypeError, AttributeError) as error:
            known = ", ".join(field.name for field in fields(Answered))
            raise ValueError(
                f"file: expected in {str(file)!r} lines with {known}, got another in line {number}"
            ) from error
        found[one.key] = one
    return list(found.values())


def _whole_lines(file: Path) -> list[str]:
    data = file.read_bytes()
    return data[: data.rfind(b"\n") + 1].decode("utf-8").split("\n")[:-1]


def _mend(file: Path) -> None:
    """Take a last line off that a kill cut short, so that the next one begins a line."""
    if file.exists() and not file.read_bytes().endswith(b"\n"):
        write_text(file, "".join(f"{line}\n" for line in _whole_lines(file)))


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
