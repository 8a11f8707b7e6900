"""How many random cells are tried: always the same few, or as many new ones as `STRETTO_FUZZ` says."""

import os
from typing import Final

from hypothesis import HealthCheck, settings

VARIABLE: Final = "STRETTO_FUZZ"


def fuzzed(usual: int) -> settings:
    """Settings for a test of `usual` examples, always the same ones unless a long run is asked for."""
    asked = os.environ.get(VARIABLE)
    return settings(
        max_examples=int(asked) if asked else usual,
        derandomize=not asked,
        deadline=None,
        print_blob=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
