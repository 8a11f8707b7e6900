"""Training: settings, tasks, feeds, updates, the trainer, checkpoints and events."""

from stretto.training.batch_policy import TunedBatch
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
from stretto.training.feeds import AbstractFeed, BucketFeed, StreamFeed, eval_windows
from stretto.training.solver import SolverRecord, summarize_solver
from stretto.training.state import TrainState
from stretto.training.task import AbstractTask, LabelTrack, LossSum, Sample, Score
from stretto.training.trainer import MODEL_FILE, EpochRecord, Interrupted, RunResult, Trainer, stop_on_signals
from stretto.training.update import Diverged, Update, Updater

__all__ = [
    "CHECKPOINT_FOLDER",
    "EVENTS_FILE",
    "MODEL_FILE",
    "PRESET",
    "AbstractFeed",
    "AbstractLog",
    "AbstractTask",
    "BucketFeed",
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
    "TunedBatch",
    "Update",
    "Updater",
    "check_compatible",
    "eval_windows",
    "evaluate",
    "read_events",
    "read_toml",
    "stop_on_signals",
    "summarize_solver",
    "validate",
    "with_preset",
]
