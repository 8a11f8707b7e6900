"""Training: settings, tasks, feeds, updates, the trainer, checkpoints and events."""

from stretto.training.auto import AUTO_FILE, run_auto
from stretto.training.checkpoint import BEST_FILE, CHECKPOINT_FOLDER, model_of_newest_checkpoint
from stretto.training.config import (
    MAY_CHANGE,
    PRESET,
    Count,
    LoggerName,
    NotNegative,
    Positive,
    Share,
    SolverConfig,
    TrainConfig,
    check_compatible,
    read_toml,
    settings_to_toml,
    validate,
    with_preset,
)
from stretto.training.evaluate import Evaluation, evaluate, evaluation_mode
from stretto.training.events import EVENTS_FILE, AbstractLog, Event, EventLog, SilentLog, Subscriber, read_events
from stretto.training.feeds import AbstractFeed, StreamFeed, eval_windows
from stretto.training.solver import SolverRecord
from stretto.training.state import TrainState
from stretto.training.task import AbstractTask, Confusion, LabelTrack, LossSum, Sample, Score
from stretto.training.trainer import MODEL_FILE, EpochRecord, Interrupted, RunResult, Trainer, stop_on_signals
from stretto.training.update import Diverged, Updater

__all__ = [
    "AUTO_FILE",
    "BEST_FILE",
    "CHECKPOINT_FOLDER",
    "EVENTS_FILE",
    "MAY_CHANGE",
    "MODEL_FILE",
    "PRESET",
    "AbstractFeed",
    "AbstractLog",
    "AbstractTask",
    "Confusion",
    "Count",
    "Diverged",
    "EpochRecord",
    "Evaluation",
    "Event",
    "EventLog",
    "Interrupted",
    "LabelTrack",
    "LoggerName",
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
    "evaluation_mode",
    "model_of_newest_checkpoint",
    "read_events",
    "read_toml",
    "run_auto",
    "settings_to_toml",
    "stop_on_signals",
    "validate",
    "with_preset",
]
