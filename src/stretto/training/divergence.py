"""What to say when a loss or gradient is no number."""

import itertools
from collections.abc import Sequence
from typing import Final, final

from stretto.errors import StrettoError

MOST_NAMED: Final = 64


@final
class Diverged(StrettoError):  # noqa: N818
    """A loss or gradient is no number."""


def diverged(numbers: Sequence[int], value: float, *, where: str) -> Diverged:
    """The error that names the sequences of the batch.

    Args:
        numbers: Of the sequences on which it happened.
        value: What the loss or gradient is.
        where: When it happened, and which sequences these are, for example "at step 3, on training sequences".
    """
    named = ", ".join(map(str, itertools.islice(numbers, MOST_NAMED))) + (", ..." if len(numbers) > MOST_NAMED else "")
    return Diverged(
        f"the loss or gradient is {value} {where} {named}",
        fix="Lower --learning-rate or --clip-norm, or look at those sequences; the last checkpoint is untouched.",
    )
