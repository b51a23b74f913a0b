"""Operations a second: the Bayesian Layer's, as a share of what the machine does in matrix products."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from membydesign.filter.native.dense import choice as native_choice
from membydesign_bench.problem import GRID, Size
from membydesign_bench.timing import Job, Row, Settings, interleaved, product, product_rate
from membydesign_bench.works import TRAINING, Task, bayesian, prepare

if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNK = 64


def chunk_operations(D: int, M: int, C: int) -> float:
    r"""Useful operations (additions and multiplications) of the dense filter: one head, one chunk of C tokens, forward.

    In the letters of docs/internals/chunk-form.md, a product of n×m by m×p being 2nmp operations, and half of that
    where only one triangle of it is read:

        K̃P₀, XᵀX                                          4 C D²
        K̃M₀, XᵀE, Q̃M₀                                    6 C D M
        G and H, with P₀ and with noise: four triangles     4 C² D
        E and X by forward substitution                     C² (D + M)
        W E, a triangle                                     C² M
        L, and W by substitution in a triangle              2/3 C³

    At M = D: 10 C D² + 7 C² D + 2/3 C³. With C = 1 it is the count of the recurrence itself, 10 D² and lower terms for
    each token: what no implementation can save. Decays and other work entry by entry, read variances, and the product
    Q̃P₀ (which only they need) are not counted.
    """
    return 4 * C * D * D + 6 * C * D * M + C * C * (5 * D + 2 * M) + 2 / 3 * C**3


def operations(size: Size, task: Task, C: int) -> float:
    """Useful operations of a task: those of all chunks and heads; three times as many with backward.

    The backward of a product is two products; what is recomputed to save memory is not counted.
    """
    return size.B * size.H * size.T / C * chunk_operations(size.D, size.D, C) * (3 if task == "forward+backward" else 1)


def rate(settings: Settings) -> Iterator[Job]:
    """The Bayesian Layer as it runs by default, and its chunk form in torch; each counted with its own chunks."""
    for task in TRAINING:
        for size in settings.sizes or GRID:
            yield Job(f"{task} at {size}: operations a second", partial(_rate, task, size, settings.rounds))


def _rate(task: Task, size: Size, rounds: int) -> list[Row]:
    C, choice = min(CHUNK, size.T), native_choice(size.D)
    methods = {
        "Bayesian Layer": (bayesian(), 1 if choice.by_token else min(choice.size, size.T)),
        f"chunks of {C} in torch": (bayesian(backend="torch", chunk_size=C), C),
    }
    works = {name: prepare(work, task, size) for name, (work, _) in methods.items()}
    times = interleaved({**works, "matrix product": product()}, rounds)
    reference = ("GFLOP/s", "matrix product", product_rate(times["matrix product"]))
    rates = {name: operations(size, task, counted) / times[name] / 1e6 for name, (_, counted) in methods.items()}
    return [Row("rate", task, str(size), name, value, *reference) for name, value in rates.items()]
