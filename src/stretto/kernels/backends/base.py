"""The interface of a backend, and the registry of all of them.

    cell --trace, analyse, derive--> TracedStep --backend--> Program, with an AbstractKernel for each loop

A backend says with `supports` whether it can run the body of a loop, or why not, and builds kernels of bodies. Adding
one is a folder here and a line in `backends/__init__.py`; outside of `stretto.kernels` nothing knows its classes.

Shape legend: B sequences, P rows of all steps together; each tensor has further dimensions.
"""

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, Self, TypeAlias, final

import torch
from torch import nn

from stretto.errors import StrettoError
from stretto.graph import Body, Kind, Node, Plan
from stretto.kernels.batched_ops import Deferral
from stretto.kernels.layout import Layout
from stretto.signature import PLAIN, Packing, StepSignature

Backend: TypeAlias = Literal["auto", "cpp", "triton", "cudagraph", "eager", "torch"]
"""What runs a recurrent layer; "auto" is the first of the registry that can."""

Shown: TypeAlias = Literal["", "rows", "steps"]
"""How the output of a layer is returned to a user; see `LayerCall`."""

LoopCoroutine: TypeAlias = "Generator[list[LoopCall], list[LoopResult], tuple[torch.Tensor, list[torch.Tensor]]]"
"""A program under way: it yields loops to run, is sent their results, and returns outputs (P, ...) and final states."""


@final
@dataclass(slots=True)
class LoopCall:
    """A loop to run over one batch: initial states (B, ...), values of each step (P, ...), weights, which are the same
    for all rows and steps, and parts of the state that never change (B, ...).
    """

    kernel: "AbstractKernel"
    layout: Layout
    states: list[torch.Tensor]
    per_step: list[torch.Tensor]
    weights: list[torch.Tensor]
    constants: list[torch.Tensor]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of them, in the order of the body's ports."""
        return [*self.states, *self.per_step, *self.weights, *self.constants]


@final
@dataclass(slots=True)
class LoopResult:
    """What a loop makes: states after each step, outputs and stored values (P, ...), final states (B, ...)."""

    after: list[torch.Tensor]
    outputs: list[torch.Tensor]
    finals: list[torch.Tensor]
    saved: list[torch.Tensor] = field(default_factory=list)

    def by_node(self, body: Body) -> dict[Node, torch.Tensor]:
        """What it has for each step, by the node that computed it."""
        nodes = (*body.next_states, *body.outputs, *body.saved)
        return dict(zip(nodes, (*self.after, *self.outputs, *self.saved), strict=True))


@final
@dataclass(slots=True)
class Cotangents:
    """Gradients of what a loop made; None where nothing depends on it."""

    after: list[torch.Tensor | None]
    outputs: list[torch.Tensor | None]
    finals: list[torch.Tensor | None]


@final
@dataclass(slots=True)
class LoopGradients:
    """What a backward loop makes: gradients of its inputs but weights, and what those are computed from (P, ...)."""

    states: list[torch.Tensor]
    per_step: list[torch.Tensor | None]
    constants: list[torch.Tensor | None]
    to_deferred: list[torch.Tensor]


@final
@dataclass(frozen=True, slots=True)
class Cost:
    """What loops cost per row and step, forward and backward."""

    work: int
    """Multiplications, or as much other work as takes as long."""
    shares_columns: bool
    """Whether several threads usually share few rows."""


@final
@dataclass(frozen=True, slots=True)
class KernelChoice:
    """What runs a loop by measurement: the backend of the last batch, and what was measured, in words."""

    backend: str
    measured: tuple[str, ...]


class AbstractKernel(ABC):
    """Runs the loop of one body over a batch.

    Attributes:
        num_inputs: Tensors of a `LoopCall`: states, values of each step, weights, constants.
        num_results: Tensors of a `LoopResult` without the saved ones: states after each step, outputs, final states.
        copied_states: Initial states of which the backward loop reads a copy, and the products after it what was given.
            So do the operators of torch's GRU: what is computed from a state has a value of its own, which a change
            that autograd does not see, as through `.data`, leaves as it was.
    """

    def __init__(self, body: Body) -> None:
        self.body = body
        self.deferral = Deferral(body.deferred)
        self.num_inputs = [len(body.ports_of(kind)) for kind in Kind]
        self.num_results = (len(body.next_states), len(body.outputs), len(body.next_states))
        read = self.deferral.read.intersection(item for node in body.backward for item in node.inputs)
        self.copied_states = [index for index, port in enumerate(body.ports_of(Kind.STATE)) if port.node in read]

    @abstractmethod
    def forward(self, call: LoopCall, *, keep: bool) -> LoopResult:
        """Run all steps; store what the backward pass needs if `keep`."""

    @abstractmethod
    def backward(self, call: LoopCall, result: LoopResult, cotangents: Cotangents) -> LoopGradients:
        """Run all steps backward."""

    @classmethod
    def forward_all(cls, calls: Sequence[LoopCall], *, keep: bool) -> list[LoopResult]:
        """Run loops of this class that do not depend on each other."""
        return [call.kernel.forward(call, keep=keep) for call in calls]

    @classmethod
    def backward_all(
        cls, calls: Sequence[LoopCall], results: Sequence[LoopResult], cotangents: Sequence[Cotangents]
    ) -> list[LoopGradients]:
        """Run the same loops backward."""
        together = zip(calls, results, cotangents, strict=True)
        return [call.kernel.backward(call, result, arriving) for call, result, arriving in together]

    @property
    def cost(self) -> Cost | None:
        """What the loop costs; None if that is not known."""
        return None

    @property
    def fallback(self) -> str:
        """Why it runs a loop another way than its backend says; empty if it does not."""
        return ""

    @property
    def passes(self) -> tuple[int, int] | None:
        """Loops over a row's elements per step, forward and backward; None if there is one for each operator."""
        return None

    @property
    def choice(self) -> KernelChoice | None:
        """What was measured to be fastest; None if it is always the same, or nothing was measured."""
        return None


class LayerOperator(ABC):
    """Runs whole programs, where that takes less time than their parts one by one."""

    @abstractmethod
    def fits(self, call: "LayerCall") -> bool:
        """Whether it takes these tensors."""

    @classmethod
    @abstractmethod
    def run_all(cls, calls: "Sequence[LayerCall]") -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
        """Run programs that do not depend on each other; outputs (P, ...) and final states of each."""

    @abstractmethod
    def kept_shapes(self, total: int, num_rows: int) -> list[tuple[int, ...]]:
        """The shapes of what `run_forward` keeps for so many rows of all steps and sequences, which may be symbols."""

    @classmethod
    @abstractmethod
    def run_forward(
        cls, operators: "Sequence[Self]", layout: Layout, tensors: Sequence[torch.Tensor], *, keep: bool
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Without autograd: outputs and final states of each program, and what is kept for the backward pass.

        Args:
            operators: Of programs that do not depend on each other.
            layout: Of all of them.
            tensors: Of each the rows, initial states and parameters, contiguous.
            keep: Whether there will be a backward pass.
        """

    @classmethod
    @abstractmethod
    def run_backward(
        cls,
        operators: "Sequence[Self]",
        layout: Layout,
        tensors: Sequence[torch.Tensor],
        kept: Sequence[torch.Tensor],
        cotangents: Sequence[torch.Tensor | None],
        *,
        needed: Sequence[bool],
    ) -> list[torch.Tensor | None]:
        """Gradients of `tensors`, of which some are needed, from what was kept and the gradients of results."""


class Program(ABC):
    """One layer in one direction, ready to run.

    Attributes:
        loops: What runs its loops, in order; none if nothing is known about the cell.
        operator: What runs all of it at once, if there is such a thing.
        outputs: The packing of several outputs of a step, once it is known; None for one.
    """

    loops: Sequence[AbstractKernel] = ()
    operator: LayerOperator | None = None
    outputs: Packing | None = None

    @property
    def bodies(self) -> list[Body]:
        """The loops' bodies."""
        return [kernel.body for kernel in self.loops]

    @property
    def cost(self) -> Cost | None:
        """What its loops cost; None if that is not known."""
        return None

    @abstractmethod
    def coroutine(
        self,
        layout: Layout,
        x_PF: torch.Tensor,
        states: Sequence[torch.Tensor],
        parameters: Mapping[str, torch.Tensor],
    ) -> LoopCoroutine:
        """Do everything but the loops, which are asked for, so that those of several programs can run at once.

        Args:
            layout: Of the rows.
            x_PF: The input's rows.
            states: Initial states (B, ...), sequences sorted as in `layout`.
            parameters: Parameters and buffers of the cell by name.
        """


@final
@dataclass(slots=True)
class LayerCall:
    """A program to run over one batch: rows (P, ...), initial states (B, ...), parameters and buffers by name.

    Attributes:
        shown: Whether a user gets the output as it is, and then how: as "rows" (P, ...), or of sequences that are
            equally long as "steps" (T, B, ...). It is no view then, and whatever is done to it, with autograd's
            knowledge or without, leaves the backward pass as it is.
    """

    program: Program
    layout: Layout
    x_PF: torch.Tensor
    states: Sequence[torch.Tensor]
    parameters: Mapping[str, torch.Tensor]
    shown: Shown = ""

    def shape_of(self, features: Sequence[int]) -> tuple[int, ...]:
        """The shape in which an output is given back."""
        layout = self.layout
        lead = (layout.num_steps, layout.num_rows) if self.shown == "steps" else (layout.total,)
        return (*lead, *features)


@final
@dataclass(slots=True)
class TracedStep:
    """One step of a cell, as a backend gets it, with a state for its structure, and how it is called."""

    cell: nn.Module
    state: Any
    device: torch.device
    signature: StepSignature = PLAIN
    plan: Plan | None = None
    """What is computed where; None if the cell could not be traced."""
    bodies: list[list[Body]] = field(default_factory=list)
    """The loops by level."""
    untraceable: str = ""
    """Why it could not be traced."""
    operands: torch.dtype | None = None
    """What products round their operands to under autocast; None where it is off."""
    measures: bool = False
    """Whether what is fastest may be found by measuring: no backend was named."""

    @property
    def narrow(self) -> torch.dtype | None:
        """The 16-bit dtype of products' operands: that of autocast, or of the cell outside of its loops; or None."""
        kinds = set() if self.plan is None else set(self.plan.graph.narrow.values())
        return self.operands or (next(iter(kinds)) if len(kinds) == 1 else None)


class AbstractBackend(ABC):
    """One way to run cells.

    Attributes:
        name: What a user calls it.
        description: What happens, in a few words for `explain`.
        needs_graph: Whether it runs only cells that could be traced.
        generates_code: Whether it compiles something. If a user names such a backend, nothing else runs instead.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    needs_graph: ClassVar[bool] = True
    generates_code: ClassVar[bool] = True

    @property
    def is_reference(self) -> bool:
        """Whether it is slower than calling the cell, so that "auto" chooses it only if loops are needed."""
        return False

    def is_meant_for(self, device: torch.device) -> bool:  # noqa: ARG002
        """Whether a user should be told why it does not run a cell on a device."""
        return self.generates_code

    def unavailable(self) -> str | None:
        """Why it runs nothing on this machine; None if it does."""
        return None

    def idle(self) -> str | None:
        """Why it runs no cell on this machine, though it may be able to build some; None if it may run some."""
        return self.unavailable()

    def supports(self, body: Body, device: torch.device) -> str | None:  # noqa: ARG002
        """Why it cannot run a loop on a device; None if it can, as by default."""
        return None

    def leaves(self, step: TracedStep) -> str | None:  # noqa: ARG002
        """Why "auto" should skip it although it could run a cell; None if it should not, as by default."""
        return None

    @abstractmethod
    def build(self, step: TracedStep) -> Program:
        """Make a program, after `refuses` said that it can.

        Raises:
            Unsupported: If it turns out now that it cannot.
        """

    def refuses(self, step: TracedStep) -> str | None:
        """Why it cannot run a cell; None if it can."""
        if step.plan is None and self.needs_graph:
            return step.untraceable
        reasons = (self.supports(body, step.device) for level in step.bodies for body in level)
        return next((reason for reason in reasons if reason is not None), None) or self.unavailable()


_REGISTRY: Final[list[AbstractBackend]] = []


def register(backend: AbstractBackend, *, before: str | None = None) -> None:
    """Add a backend, as the last choice of "auto" or ahead of another one."""
    names = [other.name for other in _REGISTRY]
    if backend.name in names or backend.name == "auto":
        raise StrettoError(f"there is a backend {backend.name!r} already", fix="Give it another name.")
    if before is not None and before not in names:
        raise StrettoError(f"there is no backend {before!r}", fix=f"Choose one of {', '.join(names)}.")
    _REGISTRY.insert(len(names) if before is None else names.index(before), backend)


def unregister(name: str) -> None:
    """Remove a backend."""
    _REGISTRY[:] = [backend for backend in _REGISTRY if backend.name != name]


def all_backends() -> tuple[AbstractBackend, ...]:
    """The backends in the order in which "auto" tries them."""
    return tuple(_REGISTRY)


def backend_names() -> tuple[str, ...]:
    """What `backend=` may be."""
    return ("auto", *(backend.name for backend in _REGISTRY))
