"""How a design is filtered: `filter_sequence` and `filter_step`; `loop.py` is the specification of every kernel."""

from membydesign.filter.api import Filtered, filter_sequence, filter_step
from membydesign.filter.context.plan import Stretch

__all__ = ["Filtered", "Stretch", "filter_sequence", "filter_step"]
