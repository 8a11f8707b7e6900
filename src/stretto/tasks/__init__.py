"""Model, loss and metric for a kind of data."""

from typing import Any, Final

from stretto.errors import StrettoError
from stretto.tasks.classification import Classification
from stretto.tasks.classify import Classify
from stretto.tasks.digit_images import DigitImages
from stretto.tasks.digits import Digits
from stretto.tasks.handwriting import Handwriting
from stretto.tasks.label_steps import LabelSteps
from stretto.tasks.language_model import LanguageModelling
from stretto.tasks.translate import Translate, fitting_words
from stretto.tasks.translate_model import PAD
from stretto.tasks.video import Video
from stretto.training import AbstractTask, TrainConfig

__all__ = [
    "CONFIGS",
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
    "fitting_words",
    "task_named",
]

TASKS: Final[dict[str, type[AbstractTask[Any]]]] = {
    task.name: task
    for task in (Handwriting, Classify, LanguageModelling, LabelSteps, Video, Digits, DigitImages, Translate)
}
"""The tasks by the name that the command line has for them."""
CONFIGS: Final[dict[str, type[TrainConfig]]] = {name: task.Config for name, task in TASKS.items()}
"""The settings of each task."""


def task_named(name: str) -> type[AbstractTask[Any]]:
    """The task class, or an error that lists the tasks."""
    if name not in TASKS:
        raise StrettoError(f"there is no task {name!r}", fix=f"Choose one of {', '.join(TASKS)}.")
    return TASKS[name]
