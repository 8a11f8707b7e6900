"""How many random cells are tried: always the same few, or as many new ones as `STRETTO_FUZZ` says."""

import os
from typing import Final

from hypothesis import HealthCheck, settings

VARIABLE: Final = "STRETTO_FUZZ"
LONG_RUN: Final = int(os.environ.get(VARIABLE) or 0)
"""Examples of each test in a long run; none by default."""


def fuzzed(usual: int) -> settings:
    """Settings for a test of `usual` examples, always the same ones unless a long run is asked for."""
    return settings(
        max_examples=LONG_RUN or usual,
        derandomize=not LONG_RUN,
        deadline=None,
        print_blob=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
