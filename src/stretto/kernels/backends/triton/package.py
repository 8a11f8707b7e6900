"""Triton itself, imported when it is first needed."""

import os
from types import ModuleType
from typing import Final

from stretto import extras
from stretto.files import fallback_cache

CACHE_VARIABLE: Final = "TRITON_CACHE_DIR"
HOME_VARIABLE: Final = "TRITON_HOME"


def optional(module: str) -> ModuleType:
    """Import a module of Triton's, or say which extra brings it.

    Triton keeps what it compiles in the user's home and fails without one; then it is given a folder in our cache. It
    reads the variable when it is imported or later.
    """
    if not {CACHE_VARIABLE, HOME_VARIABLE} & os.environ.keys():
        folder = fallback_cache("triton", usual="~/.triton/cache")
        if folder is not None:
            os.environ[CACHE_VARIABLE] = str(folder)
    return extras.optional(module)
