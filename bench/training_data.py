"""What `stretto bench training` trains on: data sets of a folder where they are there, or the embedded ones."""

import dataclasses
from pathlib import Path
from typing import Final, final

import numpy as np

from stretto.data import PARTS, Part, SequenceSet, open_sequences
from stretto.errors import StrettoError
from stretto.tasks import task_named

FOLDERS: Final = {
    "digits": "mnist",
    "digit-images": "mnist",
    "language-model": "ptb",
    "translate": "multi30k_en_de",
}
"""Where the data of a task are, within the folder that is given."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The data of a task.

    Attributes:
        data: To train and measure on.
        is_embedded: Whether they come with the package.
        note: On what was not there; empty if nothing is to be said.
    """

    data: SequenceSet
    is_embedded: bool = True
    note: str = ""


def open_data(name: str, folder: Path | None) -> Opened:
    """The data of a task.

    Args:
        name: The task.
        folder: Holds data sets by name; left out, or where it lacks that of the task, the embedded data are taken.

    Raises:
        StrettoError: There is no such folder, or what is in it cannot be read.
    """
    embedded = task_named(name).embedded_data
    if folder is None or name not in FOLDERS:
        return Opened(data=embedded())
    if not folder.is_dir():
        raise StrettoError(
            f"there is no folder {str(folder)!r}",
            fix=f"Give one that holds any of {', '.join(sorted(set(FOLDERS.values())))}, or leave --data out.",
        )
    place = folder / FOLDERS[name]
    if not place.exists():
        return Opened(data=embedded(), note=f"{name}: {str(folder)!r} has no {place.name}; it trained on embedded data")
    return Opened(data=open_sequences(place), is_embedded=False)


def some_of(data: SequenceSet, *, part: Part, fraction: float, seed: int) -> SequenceSet:
    """The same set with fewer sequences in one of its parts.

    Args:
        data: The set.
        part: Which to take from.
        fraction: The share of its sequences that stays, at least one of them; of a text the beginning, otherwise
            drawn at random.
        seed: Of the drawing.
    """
    places = np.flatnonzero(data.split_N == PARTS.index(part))
    count = max(1, round(fraction * len(places)))
    if not data.vocabulary:
        places = np.random.default_rng(seed).permutation(places)
    return data.subset(np.setdiff1d(np.arange(len(data)), places[count:]))
