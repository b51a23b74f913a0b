"""Beliefs that are not Gaussian."""

from __future__ import annotations

from typing import TYPE_CHECKING

from membydesign.design.categories import CategoricalMemory
from membydesign.design.counts import CountMemory
from membydesign.design.hidden_markov import HiddenMarkov

if TYPE_CHECKING:
    from membydesign.design.protocol import Design

ROWS: dict[str, Design] = {
    "count_memory": CountMemory(),
    "categorical_memory": CategoricalMemory(),
    "hidden_markov": HiddenMarkov(),
}
