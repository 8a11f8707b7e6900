"""How many random cells are tried: always the same few, or new ones, as many as `STRETTO_FUZZ` says."""

import os
from typing import Final

from hypothesis import HealthCheck, settings

VARIABLE: Final = "STRETTO_FUZZ"
LONG_RUN: Final = int(os.environ.get(VARIABLE) or 0)
"""Examples of the largest test in a long run, of the others in proportion; none by default."""
LARGEST: Final = 200


def fuzzed(usual: int) -> settings:
    """Settings for a test of `usual` examples, always the same ones unless a long run is asked for."""
    return settings(
        max_examples=max(usual, LONG_RUN * usual // LARGEST),
        derandomize=not LONG_RUN,
        deadline=None,
        print_blob=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
