"""RULER's needle-in-a-haystack tasks.

tasks      the six tasks: how needles are drawn and questions are worded
haystack   the text that needles are hidden in: RULER's noise, or essays
samples    prompts that fill a context length, for any tokenizer
run        a model's answers, scored as in RULER and saved
scores     scores by task, length and depth, and differences between two models
documents  training documents in the style of the tasks
words      adjectives and nouns that keys are made of
"""

from membydesign.evaluation.niah.samples import NEW_TOKENS, NIAH, Sample
from membydesign.evaluation.niah.tasks import TASKS, Task

__all__ = ["NEW_TOKENS", "NIAH", "TASKS", "Sample", "Task"]
