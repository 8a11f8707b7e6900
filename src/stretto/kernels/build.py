"""From a cell to something that runs, as fast as can be had, with the reasons where it is not the fastest."""

import contextlib
import threading
import time
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final

import torch
from torch import nn

from stretto.errors import StrettoError
from stretto.graph import Body, Plan, Untraceable, analyse, derive, trace
from stretto.kernels.compiler import NoCompiler
from stretto.kernels.cpp import CppKernel
from stretto.kernels.eager import EagerKernel
from stretto.kernels.generate import REALS
from stretto.kernels.kernel import AbstractKernel
from stretto.kernels.lower import Unsupported
from stretto.kernels.plain import PlainProgram
from stretto.kernels.program import Program
from stretto.kernels.row_products import warm_up
from stretto.state import flatten

Backend: TypeAlias = Literal["auto", "cpp", "eager", "torch"]
"""What runs a recurrent layer; "auto" takes the fastest that supports it."""
SaveChoice: TypeAlias = Literal["auto", "states"]


@final
@dataclass(slots=True)
class Built:
    """A cell made runnable.

    Attributes:
        program: What runs.
        backend: "cpp" if the loops are compiled, "eager" if they run operator by operator, "torch" if the cell
            itself is called at each step.
        reason: Why the fastest was not to be had; empty if it was.
        plan: Where everything goes; None for "plain".
        analysis_seconds: Time to trace, analyse and derive.
        compile_seconds: Time to generate and compile, or to find compiled code in the cache.
    """

    program: Program | PlainProgram
    backend: str
    reason: str
    plan: Plan | None
    analysis_seconds: float
    compile_seconds: float


def build(
    cell: nn.Module,
    *,
    x_shape: tuple[int, ...],
    x_dtype: torch.dtype,
    state: Any,
    backend: Backend = "auto",
    device: torch.device | None = None,
) -> Built:
    """Trace, analyse and compile one step of `cell`.

    Args:
        cell: Called as `cell(x_t, state)`.
        x_shape: Sizes of a row of the input.
        x_dtype: Of the input.
        state: A state, for its structure, shapes and dtypes.
        backend: "auto" uses generated code where possible; "cpp" requires it; "eager" runs the same loops operator by
            operator; "torch" calls the cell itself at each step.
        device: Where it will run; by default where the state is.

    Raises:
        StrettoError: If `backend` is "cpp" and no code can be generated; the reason is named.
    """
    if backend == "torch":
        return Built(PlainProgram(cell, state), "torch", "asked for", None, 0.0, 0.0)
    start = time.perf_counter()
    try:
        # Whoever calls first may be without gradients; what is built is for everybody.
        with torch.inference_mode(mode=False), _full_precision(cell, state):
            graph = trace(cell, x_shape=x_shape, x_dtype=x_dtype, state=state)
            plan = analyse(graph)
            bodies = [[derive(graph, loop) for loop in level] for level in plan.loops]
    except Untraceable as reason:
        _insist(backend, cell, str(reason))
        seconds = time.perf_counter() - start
        return Built(PlainProgram(cell, state), "torch", str(reason), None, seconds, 0.0)
    middle = time.perf_counter()
    kernels, used, why = _kernels(bodies, backend, cell, device or _device_of(cell, state))
    return Built(Program(plan, kernels), used, why, plan, middle - start, time.perf_counter() - middle)


def _full_precision(cell: nn.Module, state: Any) -> contextlib.AbstractContextManager[Any]:
    kind = _device_of(cell, state).type
    return contextlib.nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)


def _device_of(cell: nn.Module, state: Any) -> torch.device:
    tensors = [*cell.parameters(), *cell.buffers(), *flatten(state)]
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _kernels(
    bodies: list[list[Body]], backend: Backend, cell: nn.Module, device: torch.device
) -> tuple[list[list[AbstractKernel]], str, str]:
    eager: list[list[AbstractKernel]] = [[EagerKernel(body) for body in level] for level in bodies]
    if backend == "eager":
        return eager, "eager", "asked for"
    products = threading.Thread(target=warm_up, args=(_real_of(bodies),), daemon=True)
    try:
        if device.type == "cpu":
            products.start()
        made: list[list[AbstractKernel]] = [[_compiled(body, device) for body in level] for level in bodies]
    except (Unsupported, NoCompiler) as reason:
        _insist(backend, cell, str(reason))
        return eager, "eager", str(reason)
    finally:
        # Compiled side by side, for the first batch needs both.
        if products.ident is not None:
            products.join()
    return made, "cpp", ""


def _real_of(bodies: list[list[Body]]) -> torch.dtype:
    kinds = [node.dtype for level in bodies for body in level for node in body.next_states]
    return next((kind for kind in kinds if kind in REALS), torch.float32)


def _compiled(body: Body, device: torch.device) -> CppKernel:
    if device.type != "cpu":
        raise Unsupported(f"code is generated for the CPU, and this runs on {device.type}")
    kinds = {node.dtype for node in [*body.next_states, *body.outputs]} | {port.node.dtype for port in body.ports}
    real = [kind for kind in kinds if kind is not torch.bool]
    if len(real) != 1 or real[0] not in REALS:
        names = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        raise Unsupported(f"the loop's values are of {names}; code is generated for float32 or float64")
    return CppKernel(body, real[0])


def _insist(backend: Backend, cell: nn.Module, reason: str) -> None:
    if backend == "cpp":
        raise StrettoError(
            f"no code can be generated for {type(cell).__name__}: {reason}",
            fix="Choose backend='auto' to run it without, or change the cell.",
        )
