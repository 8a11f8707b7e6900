"""The lengths of a set of sequences, checked once."""

import numpy as np
import numpy.typing as npt
import torch

from stretto.errors import StrettoError


def as_lengths(lengths: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Lengths as an array of int64: at least one sequence, each of at least one step."""
    given = lengths.cpu().numpy() if isinstance(lengths, torch.Tensor) else np.asarray(lengths)
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
    lengths_N = given.astype(np.int64)
    short = np.flatnonzero(lengths_N < 1)
    if len(short):
        raise StrettoError(
            f"sequence {short[0]} has length {lengths_N[short[0]]}", fix="Remove sequences that have no steps."
        )
    return lengths_N
