"""The tasks by name."""

from typing import Any, Final

from stretto.errors import StrettoError
from stretto.tasks.classify import Classify, ClassifyConfig
from stretto.tasks.digit_images import DigitImages, DigitImagesConfig
from stretto.tasks.digits import Digits, DigitsConfig
from stretto.tasks.handwriting import Handwriting, HandwritingConfig
from stretto.tasks.label_steps import LabelSteps, LabelStepsConfig
from stretto.tasks.language_model import LanguageModelConfig, LanguageModelling
from stretto.tasks.translate import Translate, TranslateConfig
from stretto.tasks.video import Video, VideoConfig
from stretto.training import AbstractTask, TrainConfig

TASKS: Final[dict[str, type[AbstractTask[Any]]]] = {
    task.name: task
    for task in (Handwriting, Classify, LanguageModelling, LabelSteps, Video, Digits, DigitImages, Translate)
}
CONFIGS: Final[dict[str, type[TrainConfig]]] = {
    Handwriting.name: HandwritingConfig,
    Classify.name: ClassifyConfig,
    LanguageModelling.name: LanguageModelConfig,
    LabelSteps.name: LabelStepsConfig,
    Video.name: VideoConfig,
    Digits.name: DigitsConfig,
    DigitImages.name: DigitImagesConfig,
    Translate.name: TranslateConfig,
}


def task_named(name: str) -> type[AbstractTask[Any]]:
    """The task class, or an error that lists the tasks."""
    if name not in TASKS:
        raise StrettoError(f"there is no task {name!r}", fix=f"Choose one of {', '.join(TASKS)}.")
    return TASKS[name]
