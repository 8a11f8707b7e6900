"""A text as one long stream, read in windows by parallel rows, each word with the one that follows.

Shape legend: N sequences, S words of the text, B rows of a batch, T steps of a window, F one feature.
"""

from collections.abc import Iterator
from typing import Final, final

import numpy as np
import torch

from stretto.batching import NO_STEP, Batch
from stretto.data import SequenceSet
from stretto.distributed import World
from stretto.errors import StrettoError
from stretto.training.stream_cut import Run, StreamCut, Window

EVALUATION_STREAMS: Final = 20
"""Rows that a text is measured in: each starts from a state of zero, and together they read every word once."""


@final
class StreamText:
    """The sequences of a set joined in order.

    Every word but the last is read, and the one that follows it is to be said; so every word but the first is said
    exactly once.

    Args:
        part: Sequences of words or characters, one number a step.

    Attributes:
        num_steps: Words to be read.
    """

    def __init__(self, part: SequenceSet) -> None:
        self._words_S = _joined(part)
        self._numbers_N = part.numbers_N
        self._ends_N = np.cumsum(part.lengths_N)
        self.num_steps = len(self._words_S) - 1
        if self.num_steps < 1:
            raise StrettoError(f"{part.name} has a single word, which nothing follows", fix="Give a longer text.")

    @property
    def runs(self) -> tuple[Run, ...]:
        """All of it."""
        return ((0, self.num_steps),)

    def batch(self, window: Window) -> Batch:
        """The words of a window, and as targets those that follow; indices are of the sequences that rows begin in."""
        places_BT, lengths_B = window.places_BT, window.lengths_B
        words_BT, next_BT = (self._words_S[places_BT + ahead].astype(np.int64) for ahead in (0, 1))
        if len(lengths_B) and lengths_B[-1] < places_BT.shape[1]:
            behind_BT = np.arange(places_BT.shape[1]) >= lengths_B[:, None]
            words_BT[behind_BT], next_BT[behind_BT] = 0, NO_STEP
        first_B = places_BT[:, 0] if len(lengths_B) else lengths_B
        sequences_B = np.searchsorted(self._ends_N, first_B, side="right")
        return Batch(
            features_BTF=torch.from_numpy(words_BT)[:, :, None],
            lengths=torch.from_numpy(lengths_B),
            targets=torch.from_numpy(next_BT),
            indices=torch.from_numpy(self._numbers_N[sequences_B]),
        )


def eval_windows(part: SequenceSet, *, window: int, world: World, device: str) -> Iterator[Batch]:
    """A text to be measured on: windows of up to 20 streams, however many workers share these.

    Args:
        part: What to measure on.
        window: Most steps of a window.
        world: The workers; one for which no stream is left gets empty batches.
        device: Where batches are to be.
    """
    text = StreamText(part)
    cut = StreamCut(text.runs, num_streams=max(1, min(EVALUATION_STREAMS, text.num_steps // window)), window=window)
    share = cut.share(rank=world.rank, size=world.size)
    for number in range(cut.num_windows):
        yield text.batch(cut.read(number, share)).to(device)


def _joined(part: SequenceSet) -> np.ndarray[tuple[int], np.dtype[np.integer]]:
    """Without a copy where the sequences lie end to end."""
    ends_N = part.starts_N + part.lengths_N
    if np.array_equal(part.starts_N[1:], ends_N[:-1]):
        return part.features_SF[part.starts_N[0] : ends_N[-1], 0]
    pieces = zip(part.starts_N, ends_N, strict=True)
    return np.concatenate([part.features_SF[begin:end, 0] for begin, end in pieces])
