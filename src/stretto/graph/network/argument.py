"""What a name, a count, a number, a switch or a choice in the description of a graph may be."""

import math
import numbers
from collections.abc import Collection

from stretto.errors import StrettoError


def checked_name(value: object, *, what: str) -> str:
    """`value` if it is a plain name, which parameters can be called after."""
    if not isinstance(value, str) or not value.isidentifier():
        raise StrettoError(
            f"{what} is {value!r}, which is no plain name",
            fix="Use letters, digits and underscores, with no digit in front.",
        )
    return value


def checked_count(value: object, *, what: str, least: int) -> int:
    """`value` as a whole number that is not below `least`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise StrettoError(f"{what} is {value!r}", fix=f"Give a whole number of at least {least}.")
    return int(value)


def checked_number(value: object, *, what: str) -> float:
    """`value` as a finite float."""
    try:
        number = float(value) if not isinstance(value, bool) and isinstance(value, numbers.Real) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise StrettoError(f"{what} is {value!r}", fix="Give a finite number.")
    return number


def checked_flag(value: object, *, what: str) -> bool:
    """`value` if it is True or False."""
    if not isinstance(value, bool):
        raise StrettoError(f"{what} is {value!r}", fix="Give True or False.")
    return value


def check_choice(value: object, *, what: str, choices: Collection[str]) -> None:
    """Refuse what is not among `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise StrettoError(f"{what} is {value!r}", fix=f"Choose one of: {', '.join(choices)}.")
