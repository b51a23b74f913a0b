"""Step parameters of any design, where no training sets them: stated variances, and a new layer's starting values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from membydesign.design import Gate, Learned, Spectrum
from membydesign.layers.parameters import sources_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from membydesign.design import Design


def fixed(design: Design, stated: Mapping[str, float]) -> dict[str, float]:
    """Return a number for every step parameter: as stated, no drift, or what a new layer starts with.

    Args:
        design: the assumptions.
        stated: variances by name; names that the design does not have are ignored.
    """
    values = {}
    for name, source in sources_of(design).items():
        if name in stated:
            values[name] = stated[name]
        elif isinstance(source, Spectrum):
            values[name] = 0.0  # neither decay nor rotation
        elif isinstance(source, Gate):  # λ next to r² = 1, or r² next to λ = 1
            ratio = source.initial / (1 - source.initial)
            values[name] = ratio if name == "prior_variance" else 1 / ratio
        else:
            values[name] = float(source.initial if isinstance(source, Learned) else source)
    return values
