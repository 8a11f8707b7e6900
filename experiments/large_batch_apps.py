"""The applications of the large-batch experiment: their settings, how their quality is measured, and their data.

Shape legend: N sequences, S steps of all sequences together, F features, V words.
"""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, final, get_args

import numpy as np
import pydantic

from stretto.data import SequenceSet, open_sequences
from stretto.errors import StrettoError
from stretto.large_batch import DecayName, OptimizerName
from stretto.tasks import find_task
from stretto.training import read_toml

ApplicationName: TypeAlias = Literal["digits", "language-model", "translate", "handwriting", "digit-images"]
Scale: TypeAlias = Literal["quick", "miniature", "full"]
SETTINGS: Final = Path(__file__).with_name("large_batch_apps.toml")
WARMUP_CAP: Final = 0.2
"""The largest share of a run that LEGW may spend on warming up."""
UNKNOWN: Final = "<unk>"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Application:
    """A task with the settings of its baseline."""

    name: ApplicationName
    folder: str  # of its data, below the folder that is given
    needs_folder: bool = False  # whether embedded data are not enough
    batch_size: int  # the baseline's, in sequences or streams
    learning_rate: float  # the peak, for the baseline's batch
    lamb_rate: float  # the same for LAMB
    warmup_epochs: float = 0.1  # until the peak
    epochs: int  # at every batch
    optimizer: OptimizerName  # of all rules but lamb
    schedule: DecayName
    settings: Mapping[str, Any]  # all other settings of the task
    num_train: int | None = None  # training sequences to use at most
    num_held_out: int | None = None  # the same for validation, and for test
    num_steps: int | None = None  # steps of training sequences to use at most
    max_length: int | None = None  # longer sequences are not used
    num_words: int | None = None  # size of the vocabulary, at most
    multiples: tuple[int, ...] = (1, 4, 16, 64)  # batches to run unless others are asked for


@functools.cache
def applications(scale: Scale) -> Mapping[ApplicationName, Application]:
    """All applications at one scale."""
    tables = read_toml(SETTINGS)
    found: dict[ApplicationName, Application] = {}
    for name in get_args(ApplicationName):
        values = tables["full" if scale == "full" else "miniature"][name]
        if scale == "quick":
            changes = {"epochs": 2, "multiples": [1, 4], **tables["quick"][name]}
            sizes = {**values["settings"], "hidden_size": 8, **changes.get("settings", {})}
            values = {**values, **changes, "settings": sizes}
        found[name] = pydantic.TypeAdapter(Application).validate_python({"name": name, **values})
    return found


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """How the quality of an application is measured, and when it counts as equal to the baseline's."""

    name: str
    better: Literal["higher", "lower"]
    scale: float = 1.0  # factor for display; 100 for shares, which are shown in per cent
    tolerance: float = 1.0  # how much worse still counts as equal: in points as shown, or as a share
    is_relative: bool = False  # whether the tolerance is a fraction of the baseline's value

    def loss_against(self, value: float, baseline: float) -> float:
        """How much worse than the baseline a value is, in the unit of `tolerance`; negative if it is better."""
        sign = 1.0 if self.better == "lower" else -1.0
        return sign * (value / baseline - 1.0 if self.is_relative else self.scale * (value - baseline))

    def is_within(self, value: float, baseline: float) -> bool:
        """Whether a value is as good as the baseline's, or better."""
        # The difference of two rounded numbers may miss the bound by a rounding error.
        return self.loss_against(value, baseline) <= self.tolerance * (1 + 1e-9)

    def is_better(self, value: float, other: float) -> bool:
        """Whether a value is better than another."""
        return value < other if self.better == "lower" else value > other

    def format(self, value: float) -> str:
        """A value without its unit."""
        shown = self.scale * value
        return f"{shown:.1f}" if abs(shown) < 1e5 else f"{shown:.0e}"

    def describe(self, value: float, baseline: float) -> str:
        """A value and the baseline's, as text."""
        loss = self.loss_against(value, baseline)
        size = f"{abs(loss):.1%}" if self.is_relative else f"{abs(loss):.1f} points"
        side = "worse" if loss > 0 else "better"
        return f"{self.unit} {self.format(value)} against {self.format(baseline)}, {size} {side}"

    @property
    def unit(self) -> str:
        """Name and unit."""
        return f"{self.name} %" if self.scale == 100 else self.name


METRICS: Final[dict[ApplicationName, Metric]] = {
    "digits": Metric(name="accuracy", better="higher", scale=100.0),
    "language-model": Metric(name="perplexity", better="lower", tolerance=0.03, is_relative=True),
    "translate": Metric(name="bleu", better="higher"),
    "handwriting": Metric(name="cer", better="lower", scale=100.0),
    "digit-images": Metric(name="accuracy", better="higher", scale=100.0),
}


def open_data(application: Application, folder: Path | None) -> SequenceSet:
    """Open the data of an application, no more of them than it asks for.

    Without a subfolder for it in the folder, the embedded data are used.

    Raises:
        StrettoError: If embedded data are not enough and there are no others, or they cannot be read.
    """
    place = None if folder is None else folder / application.folder
    if place is not None and place.is_dir():
        data = open_sequences(place)
    elif application.needs_folder:
        raise StrettoError(
            f"{application.name} in full needs the data {application.folder!r}, and "
            f"{'no folder was given' if folder is None else f'{str(folder)!r} has none'}",
            fix=f"Name a folder that has {application.folder} in it with --data, or leave --full out.",
        )
    else:
        data = find_task(application.name).embedded_data()
    return _limit_vocabulary(_take_first(data, application), application.num_words)


def _take_first(data: SequenceSet, application: Application) -> SequenceSet:
    """The first sequences of each part that are not too long, copied into memory of their own."""
    if application.num_train is None:
        return data
    counts = (application.num_train, application.num_held_out, application.num_held_out)
    is_short_N = data.lengths_N <= (application.max_length or data.lengths_N.max())
    chosen = [np.flatnonzero((data.split_N == part) & is_short_N)[:count] for part, count in enumerate(counts)]
    if application.num_steps is not None:
        chosen[0] = chosen[0][np.cumsum(data.lengths_N[chosen[0]]) <= application.num_steps]
    chosen_set = data.subset(np.sort(np.concatenate(chosen)))
    features_SF = np.concatenate(chosen_set.arrays())
    return dataclasses.replace(
        chosen_set,
        features_SF=features_SF,
        starts_N=np.cumsum(chosen_set.lengths_N) - chosen_set.lengths_N,
    )


def _limit_vocabulary(data: SequenceSet, num_words: int | None) -> SequenceSet:
    """Text with the most frequent words of its training part; all others become one."""
    if num_words is None or len(data.vocabulary) <= num_words:
        return data
    words_S = np.concatenate(data.part("train").arrays())[:, 0]
    counts_V = np.bincount(words_S, minlength=len(data.vocabulary))
    counts_V[[number for number, word in enumerate(data.vocabulary) if word == UNKNOWN]] = 0
    kept = np.sort(np.argsort(-counts_V, kind="stable")[: num_words - 1])
    new_number_V = np.zeros(len(data.vocabulary), dtype=np.int64)
    new_number_V[kept] = np.arange(1, num_words)
    return dataclasses.replace(
        data,
        features_SF=new_number_V[data.features_SF],
        vocabulary=(UNKNOWN, *(data.vocabulary[number] for number in kept.tolist())),
        notes=(*data.notes, f"words but the {num_words - 1:,} most frequent are {UNKNOWN}"),
    )
