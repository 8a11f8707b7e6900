"""Model, loss and metric for a kind of data."""

import importlib.metadata
from typing import Any, Final

from stretto.errors import StrettoError
from stretto.tasks.classify import Classification, Classify
from stretto.tasks.digits import DigitImages, Digits
from stretto.tasks.handwriting import Handwriting
from stretto.tasks.label_steps import LabelSteps, LabelStepsModel
from stretto.tasks.language_model import LanguageModelling
from stretto.tasks.recurrent import GRULayers, Unpadded
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
    "GRULayers",
    "Handwriting",
    "LabelSteps",
    "LabelStepsModel",
    "LanguageModelling",
    "Translate",
    "Unpadded",
    "Video",
    "detect_bleu_words",
    "find_task",
    "installed_tasks",
]

TASKS: Final[dict[str, type[AbstractTask[Any]]]] = {
    task.name: task
    for task in (Handwriting, Classify, LanguageModelling, LabelSteps, Video, Digits, DigitImages, Translate)
}
"""The tasks by the name that the command line has for them."""


ENTRY_POINTS: Final = "stretto.tasks"
"""The group of entry points by which an installed package adds tasks, each by its `name`."""


def installed_tasks() -> dict[str, importlib.metadata.EntryPoint]:
    """The tasks of other packages by name, not loaded yet; the names of Stretto's own tasks stay theirs."""
    return {each.name: each for each in importlib.metadata.entry_points(group=ENTRY_POINTS) if each.name not in TASKS}


def find_task(name: str) -> type[AbstractTask[Any]]:
    """The class of one of Stretto's tasks or of an installed package's, or an error that lists them."""
    if name in TASKS:
        return TASKS[name]
    installed = installed_tasks()
    if name not in installed:
        raise StrettoError(
            f"there is no task {name!r}",
            fix=f"Choose one of {', '.join([*TASKS, *installed])}; your own is named as MODULE:NAME or FILE.py:NAME.",
        )
    place = installed[name].value
    try:
        found = installed[name].load()
    except Exception as error:
        raise StrettoError(
            f"the task {name!r} could not be loaded from {place}: {type(error).__name__}: {error}",
            fix="Repair or uninstall the package that has it.",
        ) from error
    if not (isinstance(found, type) and issubclass(found, AbstractTask) and found.name == name):
        raise StrettoError(
            f"{place} is not a task named {name!r}",
            fix=f"The entry point must name a subclass of stretto.training.AbstractTask with name = {name!r}.",
        )
    return found
