"""How a design is filtered: one folder per rule, in each the specification (`naive.py`) and its fast paths."""

from membydesign.ops.filtering import Filtered, filter_sequence, filter_step
from membydesign.ops.generalised_delta.sequence import generalised_delta_rule

__all__ = ["Filtered", "filter_sequence", "filter_step", "generalised_delta_rule"]
