"""How a design is filtered: `filter_sequence` and `filter_step`; `loop.py` is the specification of every kernel."""

from membydesign.filter.api import Filtered, filter_sequence, filter_step

__all__ = ["Filtered", "filter_sequence", "filter_step"]
