"""The data of an application in the experiment with large batches: opened, and made as small as the run asks.

Shape legend: N sequences, S steps of all sequences together, F features, V words.
"""

import dataclasses
from pathlib import Path

import numpy as np

from experiments.large_batch_applications import Application
from stretto.data import SequenceSet, open_sequences
from stretto.errors import StrettoError
from stretto.tasks import task_named

UNKNOWN = "<unk>"


def open_data(application: Application, folder: Path | None) -> SequenceSet:
    """The data of an application.

    Args:
        application: Which, with its sizes.
        folder: Has a subfolder for it; without one, and where that is not there, the embedded data are taken.

    Raises:
        StrettoError: It must not be the embedded data and there are no others, or they cannot be read.
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
        data = task_named(application.name).embedded_data()
    return _fewer_words(_first_of(data, application), application.num_words)


def _first_of(data: SequenceSet, application: Application) -> SequenceSet:
    """The first sequences of each part that are not too long, in memory of their own; all if no number is given."""
    if application.num_train is None:
        return data
    most = (application.num_train, application.num_held_out, application.num_held_out)
    is_short_N = data.lengths_N <= (application.longest or data.lengths_N.max())
    chosen = [np.flatnonzero((data.split_N == number) & is_short_N)[:count] for number, count in enumerate(most)]
    if application.num_steps is not None:
        chosen[0] = chosen[0][np.cumsum(data.lengths_N[chosen[0]]) <= application.num_steps]
    taken = data.subset(np.sort(np.concatenate(chosen)))
    places = zip(taken.starts_N, taken.lengths_N, strict=True)
    features_SF = np.concatenate([data.features_SF[start : start + length] for start, length in places])
    return dataclasses.replace(taken, features_SF=features_SF, starts_N=np.cumsum(taken.lengths_N) - taken.lengths_N)


def _fewer_words(data: SequenceSet, num_words: int | None) -> SequenceSet:
    """Text with the most frequent words of its training part; all others become one."""
    if num_words is None or len(data.vocabulary) <= num_words:
        return data
    train = data.part("train")
    places = zip(train.starts_N, train.lengths_N, strict=True)
    words_S = np.concatenate([data.features_SF[start : start + length, 0] for start, length in places])
    counts_V = np.bincount(words_S, minlength=len(data.vocabulary))
    counts_V[[number for number, word in enumerate(data.vocabulary) if word == UNKNOWN]] = 0
    kept = np.sort(np.argsort(-counts_V, kind="stable")[: num_words - 1])
    number_of_V = np.zeros(len(data.vocabulary), dtype=np.int64)
    number_of_V[kept] = np.arange(1, num_words)
    return dataclasses.replace(
        data,
        features_SF=number_of_V[data.features_SF],
        vocabulary=(UNKNOWN, *(data.vocabulary[number] for number in kept.tolist())),
        notes=(*data.notes, f"words but the {num_words - 1:,} most frequent are {UNKNOWN}"),
    )
