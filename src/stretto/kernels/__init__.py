"""Loops made runnable: the layout of ragged batches, programs, and the backends that run them."""

from stretto.kernels import backends as backends  # registers them
from stretto.kernels.autograd import run_by_torch, run_together
from stretto.kernels.backends.base import (
    AbstractBackend,
    AbstractKernel,
    Backend,
    Cotangents,
    LayerCall,
    LoopCall,
    LoopGradients,
    LoopResult,
    Program,
    Shown,
    TracedStep,
    all_backends,
    backend_names,
    register,
    unregister,
)
from stretto.kernels.backends.cpp.compiler import (
    MARCH_VARIABLE,
    Compiler,
    NoCompiler,
    describe_machine,
    find_compiler,
    library_folder,
    load,
)
from stretto.kernels.backends.plain import loop_over_steps
from stretto.kernels.backends.triton import compiles_for, interpreted
from stretto.kernels.backward import differentiate, differentiate_by_torch, is_transformed, without_weights
from stretto.kernels.buffer_pool import empty
from stretto.kernels.build import Built, SaveChoice, build, hooks_allowed, unseen_by_hooks, why_nothing_is_compiled
from stretto.kernels.export_c import CSource, export_c
from stretto.kernels.layout import Layout
from stretto.kernels.measure import keep_measurement, quiet_run, read_measurement, wait_for
from stretto.kernels.program import TracedProgram, wavefront_chunks
from stretto.kernels.registered import CALLS, kept_size, parameter_names, register_operators, register_programs, repeats

__all__ = [
    "CALLS",
    "MARCH_VARIABLE",
    "AbstractBackend",
    "AbstractKernel",
    "Backend",
    "Built",
    "CSource",
    "Compiler",
    "Cotangents",
    "LayerCall",
    "Layout",
    "LoopCall",
    "LoopGradients",
    "LoopResult",
    "NoCompiler",
    "Program",
    "SaveChoice",
    "Shown",
    "TracedProgram",
    "TracedStep",
    "all_backends",
    "backend_names",
    "build",
    "compiles_for",
    "describe_machine",
    "differentiate",
    "differentiate_by_torch",
    "empty",
    "export_c",
    "find_compiler",
    "hooks_allowed",
    "interpreted",
    "is_transformed",
    "keep_measurement",
    "kept_size",
    "library_folder",
    "load",
    "loop_over_steps",
    "parameter_names",
    "quiet_run",
    "read_measurement",
    "register",
    "register_operators",
    "register_programs",
    "repeats",
    "run_by_torch",
    "run_together",
    "unregister",
    "unseen_by_hooks",
    "wait_for",
    "wavefront_chunks",
    "why_nothing_is_compiled",
    "without_weights",
]
