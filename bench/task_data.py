"""The data of a task: data sets in a folder where they are there, or the embedded ones."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from stretto.data import PARTS, Part, SequenceSet, open_sequences
from stretto.errors import StrettoError
from stretto.tasks import find_task

FOLDERS: Final = {
    "digits": "mnist",
    "digit-images": "mnist",
    "language-model": "ptb",
    "translate": "multi30k_en_de",
}
"""The data set of a task, within the folder that is given."""


NO_CHECKPOINTS: Final = 1e6
"""Minutes between checkpoints within an epoch, so that there are none."""


def check_tasks(tasks: Sequence[str], known: Sequence[str]) -> None:
    """Refuse to train nothing, or a task twice."""
    if not tasks or len(set(tasks)) < len(tasks):
        raise StrettoError(f"the tasks to train are {list(tasks)}", fix=f"Name each once, of {', '.join(known)}.")


def open_data(name: str, folder: Path | None) -> tuple[SequenceSet, bool]:
    """The data of a task in a folder of data sets, or the embedded ones if there are none; and whether it is those."""
    if folder is not None and not folder.is_dir():
        raise StrettoError(
            f"there is no folder {str(folder)!r}",
            fix=f"Give one that holds any of {', '.join(sorted(set(FOLDERS.values())))}, or leave --data out.",
        )
    if folder is None or name not in FOLDERS or not (folder / FOLDERS[name]).exists():
        return find_task(name).embedded_data(), True
    return open_sequences(folder / FOLDERS[name]), False


def take_share(data: SequenceSet, *, part: Part, share: float, seed: int) -> SequenceSet:
    """The same set with fewer sequences in one of its parts, at least one; of a text, the beginning is kept."""
    places = np.flatnonzero(data.split_N == PARTS.index(part))
    count = max(1, round(share * len(places)))
    if not data.vocabulary:
        places = np.random.default_rng(seed).permutation(places)
    return data.subset(np.setdiff1d(np.arange(len(data)), places[count:]))
