"""Checks of what a cell is made with."""

import math
import operator
from numbers import Real
from typing import Any

from torch import nn

from stretto.errors import StrettoError


def positive(value: Any, *, name: str, cell: nn.Module) -> int:
    """A size or a count, which must be a whole number of at least 1."""
    try:
        size = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        size = 0
    if size < 1:
        raise StrettoError(
            f"{type(cell).__name__} got {name}={value!r}",
            fix=f"Give {name} as a whole number, at least 1.",
        )
    return size


def probability(value: Any, *, name: str, cell: nn.Module) -> float:
    """A probability below 1: at 1 nothing would ever pass."""
    no_number = isinstance(value, bool) or not isinstance(value, Real)
    share = math.nan if no_number else float(value)
    if not 0 <= share < 1:
        raise StrettoError(
            f"{type(cell).__name__} got {name}={value!r}",
            fix=f"Give {name} as a number from 0 up to, but not including, 1.",
        )
    return share


def one_of(value: Any, *choices: str, name: str, cell: nn.Module) -> None:
    """A setting that must be one of the choices."""
    if value not in choices:
        raise StrettoError(
            f"{type(cell).__name__} got {name}={value!r}",
            fix=f"Choose {' or '.join(map(repr, choices))}.",
        )
