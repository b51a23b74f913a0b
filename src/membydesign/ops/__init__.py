"""How a design is filtered: one folder per rule, in each the specification (`naive.py`) and its fast paths."""

from membydesign.ops.filtering import Filtered, filter_sequence, filter_step

__all__ = ["Filtered", "filter_sequence", "filter_step"]
