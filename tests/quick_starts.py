"""Processes for tests that need not wait until everything is imported."""

import multiprocessing
import multiprocessing.context
from typing import Final

PRELOADED: Final = (
    "stretto.training.trainer",
    "stretto.tasks",
    "stretto.kernels.build",
    "torch._dynamo",
    "pytest",
)


def quick_starts() -> multiprocessing.context.ForkServerContext:
    """Where processes start from a server that has imported what takes long, and runs nothing.

    Each is a fresh copy of it: it has computed nothing, and holds no lock and no thread.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context
