"""Kernels for GPUs, generated in Triton: interpreted and compiled, never run on a GPU."""

from stretto.kernels.backends.triton.interpreter import interpreted
from stretto.kernels.backends.triton.targets import compiles_for

__all__ = ["compiles_for", "interpreted"]
