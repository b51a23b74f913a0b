"""Generate a model's answers to needle-in-a-haystack questions, score them as in RULER, and save them as JSON lines."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, final

from membydesign.evaluation.generation import batch_for, generate_greedy
from membydesign.evaluation.niah.tasks import TASKS
from membydesign.evaluation.tokens import check_vocabulary
from membydesign.files import append_text, parse_json, write_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from membydesign.evaluation.niah.samples import NIAH, Sample


Key = tuple[str, int, int]
"""Task, length and index of a sample."""


@final
@dataclass(frozen=True)
class Answered:
    """A sample with a model's answer.

    Attributes:
        task: name of the task.
        length: context length in tokens.
        seed: random seed of the samples.
        index: number of the sample.
        prompt_sha256: first 16 digits of the prompt's hash.
        prompt_tokens: number of prompt tokens.
        haystack_units: number of lines or words of the haystack.
        answers: right values, in the order of the question.
        depths: depths of their needles.
        other_depths: depths of the needles that are not queried.
        correct: for each right value, whether the generation contains it.
        generation: text that the model generated.
        score: RULER's score: percentage of right values that the generation contains.
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
        """Score a model's answer to a sample."""
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
            depths=tuple(needle.depth for needle in sample.queried),
            other_depths=tuple(needle.depth for needle in sample.needles if needle not in sample.queried),
            correct=correct,
            generation=generation,
            score=100 * sum(correct) / len(correct),
        )

    @property
    def key(self) -> Key:
        """Identifier of the sample among those with the same seed."""
        return self.task, self.length, self.index


def contained(generation: str, answers: Sequence[str]) -> tuple[bool, ...]:
    """Test which answers a generation contains, ignoring case."""
    lowered = generation.lower()
    return tuple(answer.lower() in lowered for answer in answers)


def ruler_score(generations: Sequence[str], answers: Sequence[Sequence[str]]) -> float:
    """Compute RULER's `string_match_all`: the percentage of answers contained, averaged over samples.

    Examples:
        >>> ruler_score(["It is 1234567.", "No idea."], [["1234567", "7654321"], ["1111111"]])
        25.0
    """
    shares = []
    for generation, right in zip(generations, answers, strict=True):
        correct = contained(generation, right)
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
    """Generate and score a model's answers to all samples, except those already in `file`.

    Args:
        model: causal language model of Transformers.
        niah: generator of samples.
        tasks: names in `TASKS`.
        lengths: context lengths in tokens.
        samples: samples per task and length.
        seed: random seed of the samples.
        share: index of this process, counted from 0, and number of processes that divide the samples among them.
        batch_size: prompts per batch; None for about 16,384 tokens per batch.
        file: JSON lines file to which every finished batch is appended; answers already in it are not repeated.
        progress: called with the number of samples done and the total.

    Returns:
        Answers of this process, ordered by task, length and index.
    """
    mine = range(share[0], samples, share[1])
    requested = [(task, length, index) for task in tasks for length in lengths for index in mine]
    for task in tasks:
        for length in lengths:
            niah.check_length(task, length, samples, seed)
    done: dict[Key, Answered] = {}
    if file is not None and file.exists():
        _drop_incomplete_line(file)
        done = {one.key: one for one in read_answers(file)}
    if any(one.seed != seed for one in done.values()):
        raise ValueError(f"seed: expected that of {file}, {next(iter(done.values())).seed}, got {seed}")
    known = next((key for key in requested if key in done), None)
    if known is not None and niah.sample(*known, seed).fingerprint != done[known].prompt_sha256:
        raise ValueError(f"file: expected answers to these samples in {file}, got answers to other prompts")
    left = [key for key in requested if key not in done]
    report = progress or (lambda *_: None)
    report(len(requested) - len(left), len(requested))
    model.eval()
    for keys in _batches(left, batch_size):
        batch = [niah.sample(*key, seed) for key in keys]
        check_vocabulary(model, max(max(sample.token_ids) for sample in batch))
        prompts = [sample.token_ids for sample in batch]
        generated = generate_greedy(model, prompts, niah.new_tokens, niah.encode.padding)
        answered = [Answered.of(sample, niah.encode.decode(ids)) for sample, ids in zip(batch, generated, strict=True)]
        if file is not None:
            _append(file, answered)
        done.update({one.key: one for one in answered})
        left = left[len(keys) :]
        report(len(requested) - len(left), len(requested))
    return [done[key] for key in requested]


def _batches(keys: Sequence[Key], batch_size: int | None) -> Iterator[Sequence[Key]]:
    """Group samples of the same task and length, whose prompts need little padding."""
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
    append_text(file, "".join(lines), sync=True)


def read_answers(file: Path) -> list[Answered]:
    """Read the answers that `answer` wrote, each sample once; an incomplete last line is ignored."""
    answers: dict[Key, Answered] = {}
    for number, line in enumerate(_whole_lines(file), 1):
        try:
            one = Answered(**{name: _tuple(value) for name, value in parse_json(line).items()})
        except (ValueError, TypeError, AttributeError) as error:
            known = ", ".join(field.name for field in fields(Answered))
            raise ValueError(
                f"file: expected lines with {known} in {str(file)!r}, got another in line {number}"
            ) from error
        answers[one.key] = one
    return list(answers.values())


def _whole_lines(file: Path) -> list[str]:
    data = file.read_bytes()
    return data[: data.rfind(b"\n") + 1].decode("utf-8").split("\n")[:-1]


def _drop_incomplete_line(file: Path) -> None:
    """Remove an incomplete last line, which a killed process may leave, before new lines are appended."""
    if file.exists() and not file.read_bytes().endswith(b"\n"):
        write_text(file, "".join(f"{line}\n" for line in _whole_lines(file)))


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
