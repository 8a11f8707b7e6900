"""Training: settings, tasks, feeds, updates, the trainer, checkpoints and events."""

from stretto.training.checkpoint import CHECKPOINT_FOLDER
from stretto.training.config import (
    PRESET,
    Count,
    NotNegative,
    Positive,
    Share,
    SolverConfig,
    TrainConfig,
    check_compatible,
    read_toml,
    validate,
    with_preset,
)
from stretto.training.evaluate import evaluate
from stretto.training.events import EVENTS_FILE, AbstractLog, Event, EventLog, SilentLog, Subscriber, read_events
from stretto.training.feeds import AbstractFeed, StreamFeed, eval_windows
from stretto.training.solver import SolverRecord
from stretto.training.state import TrainState
from stretto.training.task import AbstractTask, LabelTrack, LossSum, Sample, Score
from stretto.training.trainer import MODEL_FILE, EpochRecord, Interrupted, RunResult, Trainer, stop_on_signals
from stretto.training.update import Diverged, Updater

__all__ = [
    "CHECKPOINT_FOLDER",
    "EVENTS_FILE",
    "MODEL_FILE",
    "PRESET",
    "AbstractFeed",
    "AbstractLog",
    "AbstractTask",
    "Count",
    "Diverged",
    "EpochRecord",
    "Event",
    "EventLog",
    "Interrupted",
    "LabelTrack",
    "LossSum",
    "NotNegative",
    "Positive",
    "RunResult",
    "Sample",
    "Score",
    "Share",
    "SilentLog",
    "SolverConfig",
    "SolverRecord",
    "StreamFeed",
    "Subscriber",
    "TrainConfig",
    "TrainState",
    "Trainer",
    "Updater",
    "check_compatible",
    "eval_windows",
    "evaluate",
    "read_events",
    "read_toml",
    "stop_on_signals",
    "validate",
    "with_preset",
]
