"""Checks of arguments: each returns the value in its plain type, or raises a StrettoError that names the argument."""

import math
import operator
import os
from collections.abc import Collection, Iterable
from numbers import Real
from pathlib import Path
from typing import Any, Final

import numpy as np

from stretto.errors import StrettoError

MAX_INT: Final = 2**63 - 1
"""What torch and numpy count with."""


def check_int(value: Any, *, name: str, at_least: int = 1, at_most: float = MAX_INT, owner: str = "") -> int:
    """An integer: Python's, numpy's, or anything else with `__index__`, but not a bool.

    The error says whose argument it is if an `owner` is given: "GRU".
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not at_least <= number <= at_most:
        bound = "" if number is None or number < at_least else f", at most {at_most:,}"
        raise _invalid(value, name, owner, fix=f"Give {name} as an integer, at least {at_least}{bound}.")
    return number


def check_float(
    value: Any,
    *,
    name: str,
    above: float = -math.inf,
    at_least: float = -math.inf,
    below: float = math.inf,
    at_most: float = math.inf,
    owner: str = "",
) -> float:
    """A finite number within the bounds."""
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and above < number < below and at_least <= number <= at_most):
        words = [
            f"above {above:g}" if above > -math.inf else "",
            f"at least {at_least:g}" if at_least > -math.inf else "",
            f"below {below:g}" if below < math.inf else "",
            f"at most {at_most:g}" if at_most < math.inf else "",
        ]
        bounds = ", ".join(word for word in words if word)
        raise _invalid(value, name, owner, fix=f"Give {name} as a finite number{bounds and ', '}{bounds}.")
    return number


def check_bool(value: Any, *, name: str, owner: str = "") -> bool:
    """True or False: Python's or numpy's."""
    if not isinstance(value, (bool, np.bool_)):
        raise _invalid(value, name, owner, fix=f"Give {name} as True or False.")
    return bool(value)


def check_choice(value: Any, *, name: str, choices: Collection[str], owner: str = "") -> str:
    """One of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise _invalid(value, name, owner, fix=f"Choose one of: {', '.join(map(repr, choices))}.")
    return value


def check_path(value: Any, *, name: str, owner: str = "") -> Path:
    """A file or folder, as a string or as a path."""
    if not (isinstance(value, str) or (isinstance(value, os.PathLike) and isinstance(os.fspath(value), str))):
        raise _invalid(value, name, owner, fix=f"Give {name} as a string or a pathlib.Path.")
    return Path(value)


def check_kind(value: Any, *kinds: type, name: str, fix: str, owner: str = "") -> None:
    """An instance of one of the kinds; `fix` says which."""
    if not isinstance(value, kinds):
        raise _invalid(value, name, owner, fix=fix)


def check_list(value: Any, *, name: str, fix: str, owner: str = "") -> list[Any]:
    """The items of anything that has some, but not the characters of a string or the keys of a mapping."""
    if isinstance(value, (str, bytes, dict)) or not isinstance(value, Iterable):
        raise _invalid(value, name, owner, fix=fix)
    try:
        return list(value)
    except TypeError as error:
        # A tensor or array without dimensions.
        raise _invalid(value, name, owner, fix=fix) from error


def check_callable(value: Any, *, name: str, owner: str = "") -> None:
    """Something that can be called."""
    if not callable(value):
        raise _invalid(value, name, owner, fix=f"Give {name} as a function.")


def _invalid(value: Any, name: str, owner: str, *, fix: str) -> StrettoError:
    return StrettoError(f"{owner} got {name}={value!r}" if owner else f"{name}={value!r} cannot be used", fix=fix)
