"""Large buffers on huge pages: the first touch of an ordinary page costs as much as filling it many times."""

import ctypes
import sys
from functools import lru_cache
from typing import Any, Final

import torch

HUGE_PAGE: Final = 1 << 21
WORTH_IT: Final = 1 << 22
_MADV_HUGEPAGE: Final = 14


@lru_cache(maxsize=1)
def _madvise() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def fresh(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor on the CPU."""
    made = torch.empty(sizes, dtype=dtype)
    size = made.numel() * made.element_size()
    if size >= WORTH_IT and (advise := _madvise()) is not None:
        start = -(-made.data_ptr() // HUGE_PAGE) * HUGE_PAGE
        end = (made.data_ptr() + size) // HUGE_PAGE * HUGE_PAGE
        if end > start:
            advise(start, end - start, _MADV_HUGEPAGE)  # a wish: refusal changes nothing but the speed
    return made
