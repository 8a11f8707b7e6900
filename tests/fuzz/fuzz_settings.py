"""How many random cells are tried: a few in the quick suite, in proportion to `STRETTO_FUZZ` in a long run.

Examples are the same in every run, unless `STRETTO_FUZZ_NEW` is set: then they are new ones.
"""

import os
from typing import Final

from hypothesis import HealthCheck, settings

LONG_RUN: Final = int(os.environ.get("STRETTO_FUZZ") or 0)
"""Examples of the largest test in a long run; none by default."""
IS_NEW: Final = bool(os.environ.get("STRETTO_FUZZ_NEW"))


def fuzzed(quick: int, *, share: float) -> settings:
    """Settings for a test of `quick` examples, or of a share of a long run."""
    return settings(
        max_examples=max(quick, int(share * LONG_RUN)),
        derandomize=not IS_NEW,
        deadline=None,
        print_blob=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
