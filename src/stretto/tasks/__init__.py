"""Model, loss and metric for a kind of data."""

from stretto.tasks.bleu import fitting_words
from stretto.tasks.registry import CONFIGS, TASKS, task_named
from stretto.tasks.translate import Translate
from stretto.tasks.translate_vocabulary import PAD

__all__ = [
    "CONFIGS",
    "PAD",
    "TASKS",
    "Translate",
    "fitting_words",
    "task_named",
]
