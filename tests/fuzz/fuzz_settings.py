"""How many random cells are tried: always the same few, or new ones, as many as `STRETTO_FUZZ` says."""

import os
from typing import Final

from hypothesis import HealthCheck, settings

VARIABLE: Final = "STRETTO_FUZZ"
LONG_RUN: Final = int(os.environ.get(VARIABLE) or 0)
"""Examples of the largest test in a long run; none by default."""


def fuzzed(quick: int, *, share: float) -> settings:
    """Settings for a test of `quick` examples, always the same ones, or of a share of a long run."""
    return settings(
        max_examples=max(quick, int(share * LONG_RUN)),
        derandomize=not LONG_RUN,
        deadline=None,
        print_blob=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
