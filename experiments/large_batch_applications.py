"""The five applications of the experiment with large batches: what is set once, at the baseline's batch.

Three tables: small ones that end in minutes, those of the papers, and tiny ones that show that all works.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, final

from experiments.large_batch_settings import ApplicationName
from stretto.large_batch import DecayName, OptimizerName

WARMUP_CAP: Final = 0.2
"""The largest share of a run that LEGW may spend on warming up."""
MULTIPLES: Final = (1, 4, 16, 64)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Application:
    """A task with the settings of its baseline.

    Attributes:
        name: Of the task.
        folder: Of its data, below the folder that is given.
        needs_folder: Whether embedded data will not do.
        batch_size: The baseline's, in sequences or streams.
        learning_rate: The peak for it; `TUNING` in the page's module says where these come from.
        lamb_rate: The same for LAMB.
        warmup_epochs: Until the peak.
        epochs: At every batch.
        optimizer: Of all rules but lamb.
        schedule: How the rate falls, in epochs.
        settings: All else that the task is told: sizes of the net and so on.
        num_train: Training sequences to use at most; None is all.
        num_held_out: The same for validation, and for test.
        num_steps: Steps of training sequences to use at most, about; None is any number.
        longest: Most steps of a sequence, as the data have them; longer ones are not used; None is any.
        num_words: Of the vocabulary of text, at most; None is all.
        multiples: Batches to run unless others are asked for.
        seconds: About, of a run at the baseline's batch and at very large ones, on one core.
    """

    name: ApplicationName
    folder: str
    needs_folder: bool = False
    batch_size: int
    learning_rate: float
    lamb_rate: float
    warmup_epochs: float = 0.1
    epochs: int
    optimizer: OptimizerName
    schedule: DecayName
    settings: Mapping[str, Any]
    num_train: int | None = None
    num_held_out: int | None = None
    num_steps: int | None = None
    longest: int | None = None
    num_words: int | None = None
    multiples: tuple[int, ...] = MULTIPLES
    seconds: tuple[float, float]

    def expected_seconds(self, multiple: int) -> float:
        """About, of a run: a part that follows the number of updates, and one that follows the data."""
        few, many = self.seconds[1], self.seconds[0]
        return few + (many - few) / multiple

    def told(self) -> dict[str, Any]:
        """As JSON-ready values."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**values, "settings": dict(self.settings), "warmup_cap": WARMUP_CAP}


def _by_name(*applications: Application) -> Mapping[ApplicationName, Application]:
    return MappingProxyType({application.name: application for application in applications})


_WHOLE_BATCHES: Final = {"dropout": 0.0, "num_buckets": 1}
"""Without length buckets, every batch but the last of an epoch has the size that the rules count with."""

MINIATURE: Final = _by_name(
    Application(
        name="digits",
        folder="mnist",
        batch_size=8,
        learning_rate=0.05,
        lamb_rate=0.01,
        epochs=7,
        optimizer="momentum",
        schedule="poly",
        settings={**_WHOLE_BATCHES, "hidden_size": 32, "row_size": 32},
        num_train=3072,
        num_held_out=400,
        seconds=(5.6, 1.0),
    ),
    Application(
        name="language-model",
        folder="ptb",
        batch_size=4,
        learning_rate=10.0,
        lamb_rate=0.01,
        epochs=5,
        optimizer="sgd",
        schedule="ptb",
        settings={
            "tokens": "words",
            "layout": "streams",
            "window": 20,
            "hidden_size": 48,
            "embedding_size": 48,
            "dropout": 0.0,
            "init_scale": 0.1,
            "clip_norm": 0.25,
            "flat_epochs": 3,
            "decay_factor": 0.5,
        },
        num_train=5000,
        num_held_out=500,
        num_steps=42_000,
        num_words=500,
        seconds=(5.7, 1.2),
    ),
    Application(
        name="translate",
        folder="multi30k_en_de",
        batch_size=4,
        learning_rate=5e-3,
        lamb_rate=0.01,
        epochs=5,
        optimizer="adam",
        schedule="poly",
        settings={
            **_WHOLE_BATCHES,
            "hidden_size": 48,
            "num_layers": 1,
            "label_smoothing": 0.0,
            "vocabulary_size": 300,
            "decoder": "greedy",
            "beam_width": 1,
        },
        num_train=1015,
        num_held_out=40,
        longest=50,
        seconds=(7.8, 1.8),
    ),
    Application(
        name="handwriting",
        folder="iam",
        batch_size=4,
        learning_rate=0.04,
        lamb_rate=0.03,
        epochs=7,
        optimizer="adam",
        schedule="poly",
        settings={**_WHOLE_BATCHES, "hidden_size": 32, "beam_width": 1},
        num_train=1024,
        num_held_out=64,
        longest=120,
        seconds=(6.2, 1.3),
    ),
    Application(
        name="digit-images",
        folder="mnist",
        batch_size=4,
        learning_rate=0.06,
        lamb_rate=0.02,
        epochs=4,
        optimizer="momentum",
        schedule="poly",
        settings={**_WHOLE_BATCHES, "hidden_size": 32},
        num_train=1280,
        num_held_out=400,
        seconds=(3.8, 1.6),
    ),
)

FULL: Final = _by_name(
    Application(
        name="digits",
        folder="mnist",
        needs_folder=True,
        batch_size=128,
        learning_rate=0.1,
        lamb_rate=0.01,
        epochs=25,
        optimizer="momentum",
        schedule="constant",
        settings={**_WHOLE_BATCHES, "hidden_size": 128, "row_size": 128},
        seconds=(230.0, 300.0),
    ),
    Application(
        name="language-model",
        folder="ptb",
        needs_folder=True,
        batch_size=20,
        learning_rate=20.0,
        lamb_rate=0.01,
        epochs=13,
        optimizer="sgd",
        schedule="ptb",
        settings={"preset": "ptb-small"},
        # As published: 20 to 640.
        multiples=(1, 4, 16, 32),
        seconds=(2100.0, 2300.0),
    ),
    Application(
        name="translate",
        folder="multi30k_en_de",
        needs_folder=True,
        batch_size=64,
        learning_rate=1e-3,
        lamb_rate=0.005,
        epochs=10,
        optimizer="adam",
        schedule="cosine",
        settings={"num_buckets": 1},
        seconds=(2700.0, 2500.0),
    ),
    Application(
        name="handwriting",
        folder="iam",
        batch_size=16,
        learning_rate=5e-3,
        lamb_rate=0.01,
        epochs=7,
        optimizer="adam",
        schedule="cosine",
        settings={"num_buckets": 1},
        seconds=(150.0, 130.0),
    ),
    Application(
        name="digit-images",
        folder="mnist",
        needs_folder=True,
        batch_size=128,
        learning_rate=0.05,
        lamb_rate=0.01,
        epochs=25,
        optimizer="momentum",
        schedule="constant",
        settings=_WHOLE_BATCHES,
        seconds=(300.0, 300.0),
    ),
)


def _tiny(application: Application, **changes: Any) -> Application:
    settings = {**application.settings, "hidden_size": 8, **changes.pop("settings", {})}
    return dataclasses.replace(
        application, settings=settings, epochs=2, multiples=(1, 4), seconds=(0.5, 0.3), **changes
    )


QUICK: Final = _by_name(
    _tiny(MINIATURE["digits"], num_train=192, num_held_out=32, batch_size=8, settings={"row_size": 8}),
    _tiny(
        MINIATURE["language-model"],
        num_train=200,
        num_held_out=20,
        batch_size=2,
        settings={"embedding_size": 8, "flat_epochs": 1},
    ),
    _tiny(MINIATURE["translate"], num_train=64, num_held_out=8, batch_size=4),
    _tiny(MINIATURE["handwriting"], num_train=64, num_held_out=8, batch_size=4),
    _tiny(MINIATURE["digit-images"], num_train=192, num_held_out=32, batch_size=8),
)
