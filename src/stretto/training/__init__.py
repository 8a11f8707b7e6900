"""Settings, loop, checkpoints, events."""

from stretto.training.batch_tuning import BatchTuning
from stretto.training.checkpoint import FOLDER
from stretto.training.config import Count, NotNegative, Positive, Share, TrainConfig, checked, read_toml
from stretto.training.divergence import Diverged
from stretto.training.evaluate import evaluate
from stretto.training.events import EVENTS_FILE, AbstractLog, Event, EventLog, SilentLog, Subscriber, read_events
from stretto.training.feed import AbstractFeed
from stretto.training.loop import MODEL_FILE, EpochRecord, Trainer
from stretto.training.outcome import Interrupted
from stretto.training.preset import PRESET, with_preset
from stretto.training.solver_config import SolverConfig
from stretto.training.solving import summary_of
from stretto.training.state import TrainState
from stretto.training.stopping import stop_on_signals
from stretto.training.stream_feed import StreamFeed, eval_windows
from stretto.training.task import AbstractTask, LabelTrack, LossSum, Sample, Score
from stretto.training.update import Updater

__all__ = [
    "EVENTS_FILE",
    "FOLDER",
    "MODEL_FILE",
    "PRESET",
    "AbstractFeed",
    "AbstractLog",
    "AbstractTask",
    "BatchTuning",
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
    "Sample",
    "Score",
    "Share",
    "SilentLog",
    "SolverConfig",
    "StreamFeed",
    "Subscriber",
    "TrainConfig",
    "TrainState",
    "Trainer",
    "Updater",
    "checked",
    "eval_windows",
    "evaluate",
    "read_events",
    "read_toml",
    "stop_on_signals",
    "summary_of",
    "with_preset",
]
