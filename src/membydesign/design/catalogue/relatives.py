"""Relatives: published architectures that the paper's Table 1 does not have, by what they assume or throw away."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from membydesign.design.protocol import Design

ROWS: dict[str, Design] = {}
