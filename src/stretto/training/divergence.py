"""What to say when a loss or gradient is no number."""

import itertools
from collections.abc import Sequence
from typing import Final

from stretto.errors import StrettoError

MOST_NAMED: Final = 64


def diverged(numbers: Sequence[int], value: float, *, where: str) -> StrettoError:
    """The error that names the sequences of the batch.

    Args:
        numbers: Of the sequences on which it happened.
        value: What the loss or gradient is.
        where: When it happened, and which sequences these are, for example "at step 3, on training sequences".
    """
    named = ", ".join(map(str, itertools.islice(numbers, MOST_NAMED))) + (", ..." if len(numbers) > MOST_NAMED else "")
    return StrettoError(
        f"the loss or gradient is {value} {where} {named}",
        fix="Lower --learning-rate or --clip-norm, or look at those sequences; the last checkpoint is untouched.",
    )
