"""What to say when a loss or gradient is no number."""

import itertools
from typing import Final

from stretto.batching.collate import Batch
from stretto.errors import StrettoError

MOST_NAMED: Final = 64


def diverged(batch: Batch, value: float, *, where: str) -> StrettoError:
    """The error that names the sequences of the batch.

    Args:
        batch: The batch on which it happened.
        value: What the loss or gradient is.
        where: When it happened, and which sequences these are, for example "at step 3, on training sequences".
    """
    numbers = [] if batch.indices is None else batch.indices.tolist()
    named = ", ".join(map(str, itertools.islice(numbers, MOST_NAMED))) + (", ..." if len(numbers) > MOST_NAMED else "")
    return StrettoError(
        f"the loss or gradient is {value} {where} {named}",
        fix="Lower --learning-rate or --clip-norm, or look at those sequences; the last checkpoint is untouched.",
    )
