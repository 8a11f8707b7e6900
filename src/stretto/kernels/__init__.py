"""Loops made runnable: the eager reference, generated C++, and what shares them out."""

from stretto.kernels.build import Backend, Built, SaveChoice, build
from stretto.kernels.compiler import Compiler, NoCompiler, compiled, find_compiler, library_folder
from stretto.kernels.cpp import CppKernel
from stretto.kernels.layout import Layout
from stretto.kernels.loops import without_weights
from stretto.kernels.plain import PlainProgram
from stretto.kernels.program import Program, run_together

__all__ = [
    "Backend",
    "Built",
    "Compiler",
    "CppKernel",
    "Layout",
    "NoCompiler",
    "PlainProgram",
    "Program",
    "SaveChoice",
    "build",
    "compiled",
    "find_compiler",
    "library_folder",
    "run_together",
    "without_weights",
]
