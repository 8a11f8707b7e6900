"""All steps taken at once from states that are assumed, and how each step moves its state.

Shape legend: B sequences, P real steps of all sequences, S numbers of a state, all its parts side by side, F features.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, TypeAlias, final

import torch

from stretto.kernels import Layout
from stretto.solvers.newton.line import Line
from stretto.solvers.solver import Chain

Form: TypeAlias = Literal["dense", "diagonal"]


@final
class Steps:
    """The steps of a chain, apart from each other. Nothing here is recorded for gradients of the chain.

    Args:
        chain: Whose steps.
        line: In which order they are.
    """

    def __init__(self, chain: Chain, line: Line) -> None:
        self._chain = dataclasses.replace(
            chain,
            # Derivatives cannot be taken through tensors that were made in inference mode.
            parameters={n: t.clone() if t.is_inference() else t.detach() for n, t in chain.parameters.items()},
        )
        self._x_PF = chain.x_PF.detach().index_select(0, line.rows_P.to(chain.x_PF.device))
        self._layout = Layout.even(num_steps=1, num_rows=line.layout.total)
        self._sizes = [math.prod(state.shape[1:]) for state in chain.states]

    @property
    def size(self) -> int:
        """S."""
        return sum(self._sizes)

    def joined(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        """Parts of states side by side."""
        sized = zip(states, self._sizes, strict=True)
        return torch.cat([state.detach().reshape(len(state), size) for state, size in sized], dim=1)

    def parts(self, states_PS: torch.Tensor) -> list[torch.Tensor]:
        """The parts again, in their own shapes."""
        pieces = states_PS.split_with_sizes(self._sizes, dim=1)
        return [
            piece.reshape(-1, *own.shape[1:]).to(own.dtype)
            for piece, own in zip(pieces, self._chain.states, strict=True)
        ]

    def after(self, earlier_PS: torch.Tensor) -> torch.Tensor:
        """The states after each step."""
        with torch.no_grad():
            return self.joined(self._chain.run(self._layout, self._x_PF, self.parts(earlier_PS)).states)

    def taken(self, earlier_PS: torch.Tensor) -> "Taken":
        """The same, ready for Jacobians."""
        with torch.enable_grad():
            before = [part.detach().requires_grad_() for part in self.parts(earlier_PS)]
            after = self._chain.run(self._layout, self._x_PF, before).states
        return Taken(before, after, after_PS=self.joined(after))


@final
class Taken:
    """Steps that were taken at once.

    Attributes:
        after_PS: The states after each.
        products: Vector-Jacobian products so far, each of all steps.
    """

    def __init__(self, before: list[torch.Tensor], after: list[torch.Tensor], *, after_PS: torch.Tensor) -> None:
        self._before, self._after = before, after
        self.after_PS = after_PS
        self.products = 0

    def jacobians(self, form: Form) -> torch.Tensor:
        """Of each step (P, S, S), or their diagonals (P, S), from one product for each number of a state."""
        rows, size = self.after_PS.shape
        linear_P = self.after_PS.new_empty((rows, size, size) if form == "dense" else (rows, size))
        unit_PS = torch.zeros_like(self.after_PS)
        for place in range(size):
            unit_PS[:, place] = 1
            row_PS = self._pulled(unit_PS)
            linear_P[:, place] = row_PS if form == "dense" else row_PS[:, place]
            unit_PS[:, place] = 0
        return linear_P

    def diagonals_if_that_is_all(self) -> torch.Tensor | None:
        """The diagonals of Jacobians (P, S) that have nothing else, from few products; None if they have.

        If no number moves another, weighing the rows by 1 or 2 weighs the result alike, to the last bit. Any two
        numbers are weighed apart by some binary digit of their places. What cancels out to the last bit is missed.
        """
        _, size = self.after_PS.shape
        sums_PS = self._pulled(torch.ones_like(self.after_PS))
        place_S = torch.arange(size, device=sums_PS.device)
        for digit in range((size - 1).bit_length()):
            weights_S = (1 + (place_S >> digit & 1)).to(sums_PS)
            if not torch.equal(self._pulled(weights_S.expand_as(sums_PS)), weights_S * sums_PS):
                return None
        return sums_PS

    def _pulled(self, d_after_PS: torch.Tensor) -> torch.Tensor:
        """The vector-Jacobian product of each step."""
        self.products += 1
        rows = len(d_after_PS)
        pieces = d_after_PS.split_with_sizes([part[0].numel() for part in self._after], dim=1)
        # A part that no state leads to has no gradient to ask for.
        pairs = [(p, d.reshape(p.shape).to(p)) for p, d in zip(self._after, pieces, strict=True) if p.requires_grad]
        if not pairs:
            return torch.zeros_like(d_after_PS)
        found = torch.autograd.grad(
            [part for part, _ in pairs], self._before, [d for _, d in pairs], retain_graph=True, materialize_grads=True
        )
        return torch.cat([d.reshape(rows, -1) for d in found], dim=1)
