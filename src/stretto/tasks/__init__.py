"""Model, loss and metric for a kind of data."""

from typing import Any, Final

from stretto.errors import StrettoError
from stretto.tasks.classify import Classification, Classify
from stretto.tasks.digits import DigitImages, Digits
from stretto.tasks.handwriting import Handwriting
from stretto.tasks.label_steps import LabelSteps
from stretto.tasks.language_model import LanguageModelling
from stretto.tasks.translate import PAD, Translate, detect_bleu_words
from stretto.tasks.video import Video
from stretto.training import AbstractTask

__all__ = [
    "PAD",
    "TASKS",
    "Classification",
    "Classify",
    "DigitImages",
    "Digits",
    "Handwriting",
    "LabelSteps",
    "LanguageModelling",
    "Translate",
    "Video",
    "detect_bleu_words",
    "find_task",
]

TASKS: Final[dict[str, type[AbstractTask[Any]]]] = {
    task.name: task
    for task in (Handwriting, Classify, LanguageModelling, LabelSteps, Video, Digits, DigitImages, Translate)
}
"""The tasks by the name that the command line has for them."""


def find_task(name: str) -> type[AbstractTask[Any]]:
    """The task class, or an error that lists the tasks."""
    if name not in TASKS:
        raise StrettoError(f"there is no task {name!r}", fix=f"Choose one of {', '.join(TASKS)}.")
    return TASKS[name]
