"""From a cell to a program: trace it, analyse it, and choose the first backend that can run it."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias, final

import torch
from torch import nn

from stretto.checks import check_choice
from stretto.errors import StrettoError
from stretto.graph import PRODUCTS, Plan, Untraceable, analyse, derive, trace, widen
from stretto.kernels.backends.base import (
    AbstractBackend,
    Backend,
    Program,
    TracedStep,
    all_backends,
    backend_names,
)
from stretto.kernels.ir import Unsupported
from stretto.signature import PLAIN, Packing, StepSignature
from stretto.state import flatten

SaveChoice: TypeAlias = Literal["auto", "states"]
USED: Final = "used"


@final
@dataclass(slots=True)
class Built:
    """A compiled cell: its program, the backend that runs it, and why that one."""

    program: Program
    backend: str
    description: str
    choices: tuple[tuple[str, str], ...]
    """Every backend with "used", or why it is not."""
    plan: Plan | None
    """Where everything is computed; None if the cell was not traced."""
    analysis_seconds: float
    compile_seconds: float
    """Time to generate and compile, or to find compiled code in the cache; 0 if none is."""
    fastest: str
    """The backend that "auto" would use on this device if it could run every cell."""

    @property
    def outputs(self) -> Packing | None:
        """The packing of several outputs of a step; None for one."""
        return self.program.outputs if self.plan is None else self.plan.graph.outputs

    @property
    def unset(self) -> Sequence[str]:
        """Names of what the step sets, and compiled code does not."""
        return () if self.plan is None else self.plan.graph.unset

    @property
    def measured(self) -> tuple[str, ...]:
        """What was measured to find what runs the loops, in words; empty if nothing was."""
        choices = (kernel.choice for kernel in self.program.loops)
        return tuple(dict.fromkeys(line for choice in choices if choice is not None for line in choice.measured))

    def now(self) -> "Built":
        """As of the last run: a backend that was measured to be faster may have replaced the expected one."""
        choices = [kernel.choice for kernel in self.program.loops]
        used = {self.backend if choice is None else choice.backend for choice in choices}
        if len(used) != 1 or used == {self.backend}:
            return self
        (name,) = used
        reasons = {self.backend: f"{name} was measured to be faster", name: USED}
        first = f"{self.backend} comes first"
        return replace(
            self,
            backend=name,
            fastest=name,
            description=next(item.description for item in all_backends() if item.name == name),
            choices=tuple(
                (other, reasons.get(other, f"{name} comes first" if reason == first else reason))
                for other, reason in self.choices
            ),
        )

    @property
    def reason(self) -> str:
        """Why the fastest backend is not used, or runs another way than it should; empty if all is as it should be."""
        if fallback := next((kernel.fallback for kernel in self.program.loops if kernel.fallback), ""):
            return fallback
        first = dict(self.choices)[self.fastest]
        return "" if first == USED else first


def build(
    cell: nn.Module,
    *,
    x_shape: tuple[int, ...],
    x_dtype: torch.dtype,
    state: Any,
    backend: Backend = "auto",
    device: torch.device | None = None,
    signature: StepSignature = PLAIN,
    needs_loops: bool = False,
    holders: Sequence[Any] | None = None,
    operands: torch.dtype | None = None,
) -> Built:
    """Trace, analyse and compile one step of `cell`.

    Args:
        cell: Called as `signature` says.
        x_shape: Sizes of a row of the input.
        x_dtype: Of the input.
        state: A state, for its structure, shapes and dtypes.
        backend: "auto" uses generated code where possible; "cpp" and "triton" require it, for the CPU and for GPUs;
            "cudagraph" replays the loops' operators on a GPU; "eager" runs them one by one; "torch" calls the cell
            itself at each step.
        device: Where it will run; by default where the state is.
        signature: By default `cell(x_t, state)`.
        needs_loops: Whether a solver runs the loops, so that "auto" takes a backend that has some if it can.
        holders: What the step may change besides, which is undone; by default attributes of the cell.
        operands: What products of single precision round their operands to, as under autocast of a GPU; nothing else
            has fewer bits.

    Raises:
        StrettoError: If `backend` generates code and cannot for this cell; the reason is named.
    """
    check_choice(backend, name="backend", choices=backend_names())
    start = time.perf_counter()
    step = TracedStep(cell, state, device or _device_of(cell, state), signature)
    step.measures, step.operands = backend == "auto", operands
    if any(item.needs_graph for item in all_backends() if backend in {"auto", item.name}):
        _trace(step, x_shape, x_dtype, needs_loops=needs_loops, holders=holders)
    middle = time.perf_counter()
    chosen, program, choices = _choose(step, backend, needs_loops=needs_loops)
    return Built(
        program=program,
        backend=chosen.name,
        description=chosen.description,
        choices=choices,
        plan=step.plan if chosen.needs_graph else None,
        analysis_seconds=middle - start,
        compile_seconds=time.perf_counter() - middle if chosen.generates_code else 0.0,
        fastest=_fastest(step) or choices[0][0],
    )


def _fastest(step: TracedStep) -> str | None:
    """The backend that "auto" would use on the device if all could run the cell."""
    meant = (item for item in all_backends() if item.is_meant_for(step.device))
    return next((item.name for item in meant if not item.leaves(step)), None)


@contextlib.contextmanager
def unseen_by_hooks() -> Iterator[None]:
    """Keep what autograd saves inside from hooks on saved tensors, such as those of gradient checkpointing.

    It is freed afterwards: an output that its own operator saves would keep itself and its whole graph alive.
    """
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> int:
        saved.append(tensor)
        return len(saved) - 1

    try:
        with hooks_allowed(), torch.autograd.graph.saved_tensors_hooks(pack, saved.__getitem__):
            yield
    finally:
        saved.clear()


@contextlib.contextmanager
def hooks_allowed() -> Iterator[None]:
    """Allow hooks on saved tensors even inside `torch.autograd.graph.disable_saved_tensors_hooks`."""
    autograd = torch._C._autograd
    message = autograd._saved_tensors_hooks_get_disabled_error_message()
    autograd._saved_tensors_hooks_enable()
    try:
        yield
    finally:
        if message is not None:
            autograd._saved_tensors_hooks_disable(message)


@contextlib.contextmanager
def _without_inference_tensors(cell: nn.Module) -> Iterator[None]:
    """Replace parameters and buffers made in inference mode, which cannot be differentiated, by ordinary ones.

    A program is for all weights of these shapes, and gets the current ones when it runs.
    """
    replaced: dict[int, torch.Tensor] = {}
    changed: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    own: dict[str, Any]
    for module in cell.modules():
        for own in (module._parameters, module._buffers):
            changed += [(own, name, t) for name, t in own.items() if t is not None and t.is_inference()]
    for own, name, tensor in changed:
        if id(tensor) not in replaced:
            copied = tensor.detach().clone()
            is_parameter = isinstance(tensor, nn.Parameter)
            replaced[id(tensor)] = nn.Parameter(copied, tensor.requires_grad) if is_parameter else copied
        own[name] = replaced[id(tensor)]
    try:
        yield
    finally:
        for own, name, tensor in changed:
            own[name] = tensor


def _trace(
    step: TracedStep,
    x_shape: tuple[int, ...],
    x_dtype: torch.dtype,
    *,
    needs_loops: bool,
    holders: Sequence[Any] | None,
) -> None:
    kind = _device_of(step.cell, step.state).type
    full_precision = contextlib.nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)
    try:
        # The first caller may be in no_grad or anomaly mode; what is built serves all later callers.
        unchecked = torch.autograd.set_detect_anomaly
        ordinary = _without_inference_tensors(step.cell)
        with torch.inference_mode(mode=False), ordinary, full_precision, unseen_by_hooks(), unchecked(False):
            graph = trace(
                step.cell,
                x_shape=x_shape,
                x_dtype=x_dtype,
                state=step.state,
                signature=step.signature,
                holders=holders,
            )
            if step.device.type in {"cpu", "cuda"} and not needs_loops:
                widen(graph)
            plan = analyse(graph)
            step.bodies = [[derive(graph, loop) for loop in level] for level in plan.loops]
            step.plan = plan
            if step.operands is not None:
                _round_operands(step, step.operands)
    except Untraceable as reason:
        step.untraceable = str(reason)


def _round_operands(step: TracedStep, operands: torch.dtype) -> None:
    """Round the operands of all products of single precision, in loops and outside of them, forward and backward."""
    assert step.plan is not None
    bodies = [body for level in step.bodies for body in level]
    bodies += [body.under_autograd for body in bodies if body.under_autograd is not None]
    lists = [step.plan.graph.nodes, *step.plan.maps]
    lists += [nodes for body in bodies for nodes in (body.forward, body.backward, body.deferred)]
    for nodes in lists:
        for node in nodes:
            if node.label in PRODUCTS and node.dtype is torch.float32 and not node.kwargs:
                node.operands = operands


def _device_of(cell: nn.Module, state: Any) -> torch.device:
    tensors = [*cell.parameters(), *cell.buffers(), *flatten(state)]
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def why_nothing_is_compiled(device: torch.device) -> str:
    """Why no code can be compiled for a device on this machine, whatever the cell; empty if it can."""
    backend = next((backend for backend in all_backends() if backend.is_meant_for(device)), None)
    try:
        return "" if backend is None else backend.unavailable() or ""
    except StrettoError as error:
        # The cache of kernels cannot be used.
        return error.problem


def _choose(
    step: TracedStep, wanted: str, *, needs_loops: bool
) -> tuple[AbstractBackend, Program, tuple[tuple[str, str], ...]]:
    """The first backend that can run the step, its program, and why each backend is or is not used."""
    choices: list[tuple[str, str]] = []
    found: tuple[AbstractBackend, Program] | None = None
    passed = wanted == "auto"
    for backend in all_backends():
        passed = passed or backend.name == wanted
        if not passed:
            reason = f"backend={wanted!r} was asked for"
        elif found is not None:
            reason = f"{found[0].name} comes first"
        elif wanted == "auto" and backend.is_reference and not needs_loops:
            reason = "the cell as it is takes less time"
        elif wanted == "auto" and backend.is_meant_for(step.device) and (left := backend.leaves(step)):
            reason = left
        else:
            program, reason = _try(backend, step, wanted)
            if program is not None:
                found = backend, program
            elif backend.name == wanted and backend.generates_code:
                raise StrettoError(
                    f"no code can be generated for {type(step.cell).__name__}: {reason}",
                    fix="Choose backend='auto' to run it without, or change the cell.",
                )
        choices.append((backend.name, reason))
    assert found is not None, "the last backend runs everything"
    return *found, tuple(choices)


def _try(backend: AbstractBackend, step: TracedStep, wanted: str) -> tuple[Program | None, str]:
    try:
        reason = backend.refuses(step)
        return (backend.build(step), USED) if reason is None else (None, reason)
    except Unsupported as late:
        return None, str(late)
    except StrettoError as error:
        # The cache of kernels cannot be used: a reason to choose another backend, unless this one was asked for.
        if wanted == backend.name:
            raise
        return None, str(error)
