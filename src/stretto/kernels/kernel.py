"""What runs a loop: the eager reference or generated code.

Shape legend: B sequences, P rows of all steps together; each tensor has further dimensions of its own.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stretto.graph import Body
from stretto.kernels.folded import Deferral
from stretto.kernels.layout import Layout


@dataclass(slots=True)
class Inputs:
    """What a loop reads: initial states (B, ...), values of each step (P, ...), weights, kept states (B, ...)."""

    states: list[torch.Tensor]
    steps: list[torch.Tensor]
    once: list[torch.Tensor]
    kept: list[torch.Tensor]


@dataclass(slots=True)
class Outputs:
    """What a loop makes: states after each step, emitted and stored values (P, ...), final states (B, ...)."""

    after: list[torch.Tensor]
    emits: list[torch.Tensor]
    finals: list[torch.Tensor]
    saved: list[torch.Tensor]


@dataclass(slots=True)
class Gradients:
    """What a backward loop makes: gradients of the inputs but weights, and what those are computed from (P, ...)."""

    states: list[torch.Tensor]
    steps: list[torch.Tensor | None]
    kept: list[torch.Tensor | None]
    handed: list[torch.Tensor]


@dataclass(slots=True)
class Cotangents:
    """Gradients of what a loop made; None where nothing depends on it."""

    after: list[torch.Tensor | None]
    emits: list[torch.Tensor | None]
    finals: list[torch.Tensor | None]


class AbstractKernel(ABC):
    """Runs the loop of one body over a batch."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.deferral = Deferral(body.deferred)

    @abstractmethod
    def forward(self, layout: Layout, inputs: Inputs, *, keep: bool) -> Outputs:
        """Run all steps; store what the backward pass needs if `keep`."""

    @abstractmethod
    def backward(self, layout: Layout, inputs: Inputs, outputs: Outputs, cotangents: Cotangents) -> Gradients:
        """Run all steps backward."""

    def forward_together(
        self,
        kernels: "Sequence[AbstractKernel]",
        layouts: Sequence[Layout],
        inputs: Sequence[Inputs],
        *,
        keep: bool,
    ) -> list[Outputs]:
        """Run loops that do not depend on each other, this one among them."""
        together = zip(kernels, layouts, inputs, strict=True)
        return [kernel.forward(layout, item, keep=keep) for kernel, layout, item in together]

    def backward_together(
        self,
        kernels: "Sequence[AbstractKernel]",
        layouts: Sequence[Layout],
        inputs: Sequence[Inputs],
        outputs: Sequence[Outputs],
        cotangents: Sequence[Cotangents],
    ) -> list[Gradients]:
        """Run the same loops backward."""
        together = zip(kernels, layouts, inputs, outputs, cotangents, strict=True)
        return [kernel.backward(layout, item, made, arriving) for kernel, layout, item, made, arriving in together]
