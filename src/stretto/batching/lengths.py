"""The lengths of a set of sequences, checked once."""

import numpy as np
import numpy.typing as npt
import torch

from stretto.errors import StrettoError


def as_lengths(lengths: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Lengths as an array of int64: at least one sequence, each of at least one step."""
    try:
        given = lengths.cpu().numpy() if isinstance(lengths, torch.Tensor) else np.asarray(lengths)
    except ValueError as error:
        raise StrettoError(
            f"lengths are no flat list ({error})", fix="Give one whole number a sequence, as a flat list or array."
        ) from error
    if given.ndim != 1:
        raise StrettoError(
            f"lengths have shape {given.shape}", fix="Give one whole number a sequence, as a flat list or array."
        )
    if len(given) == 0:
        raise StrettoError("there are no lengths", fix="Give the length of at least one sequence.")
    if not np.issubdtype(given.dtype, np.integer):
        whole = np.issubdtype(given.dtype, np.floating) and bool(np.isfinite(given).all() and (given % 1 == 0).all())
        if not whole:
            raise StrettoError(
                f"lengths of type {given.dtype} are not whole numbers of steps", fix="Give whole numbers."
            )
    # All slots of an epoch must fit in an int64, however they are padded.
    great = np.flatnonzero(given > np.iinfo(np.int64).max // len(given))
    if len(great):
        raise StrettoError(
            f"sequence {great[0]} has length {given[great[0]]}, more than can be counted", fix="Check the lengths."
        )
    lengths_N = given.astype(np.int64)
    short = np.flatnonzero(lengths_N < 1)
    if len(short):
        raise StrettoError(
            f"sequence {short[0]} has length {lengths_N[short[0]]}", fix="Remove sequences that have no steps."
        )
    return lengths_N
