"""The gate before the clock: who computes something else is not timed."""

from collections.abc import Mapping
from typing import Final

import torch

from stretto.errors import StrettoError

TOLERANCE: Final = 1e-4
FAULT: Final = "No time counts until that is mended: report it, with the output of `stretto doctor`."


def relative_error(found: torch.Tensor, *, wanted: torch.Tensor) -> float:
    """The largest difference over the largest wanted value; infinite where the shapes differ or a number is none."""
    if found.shape != wanted.shape or not bool(found.isfinite().all()):
        return float("inf")
    largest = float(wanted.abs().max()) if wanted.numel() else 0.0
    difference = float((found - wanted).abs().max()) if wanted.numel() else 0.0
    return difference / largest if largest else difference


def pass_gate(
    found: Mapping[str, torch.Tensor],
    *,
    wanted: Mapping[str, torch.Tensor],
    name: str,
    peer: str,
    where: str,
    tolerance: float = TOLERANCE,
) -> float:
    """Compare outputs and gradients of two contestants, position by position.

    Args:
        found: Of one.
        wanted: Of the other.
        name: The one.
        peer: The other.
        where: On what, for the message.
        tolerance: The largest error allowed.

    Returns:
        The largest relative error.

    Raises:
        StrettoError: If they are not the same.
    """
    if len(found) != len(wanted):
        raise StrettoError(f"{name} gives {len(found)} results and {peer} gives {len(wanted)} at {where}", fix=FAULT)
    worst = 0.0
    for (what, value), reference in zip(found.items(), wanted.values(), strict=True):
        error = relative_error(value, wanted=reference)
        if not error <= tolerance:
            raise StrettoError(
                f"the {what} of {name} differs from that of {peer} by {error:.1e} of its largest value at {where}, "
                f"and {tolerance:.0e} is allowed",
                fix=FAULT,
            )
        worst = max(worst, error)
    return worst
