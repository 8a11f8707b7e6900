"""Time over ranks: each walks its own block of steps, all at once, and hands its last state to the one behind.

The unknowns are the states between blocks. What ranks disagree about there is the whole error. After k rounds the first
k blocks are right, whatever the net, so that there are never more rounds than ranks; a net that forgets needs two, and
of the second only as many steps as it remembers.

Shape legend: B sequences, P real steps of all sequences, F features.
"""

import dataclasses
import math
from typing import Any, Final, final

import torch
from torch import distributed

from stretto.errors import StrettoError
from stretto.solvers.ranks.leg import Leg, Sums, gap, size
from stretto.solvers.ranks.neighbours import Neighbours
from stretto.solvers.solver import AbstractSolver, Chain, Solution, Solved, Walked

PIECE: Final = 1024
TOLD: Final = 4
"""Numbers that ranks tell each other before they begin."""


@final
class Relay(AbstractSolver):
    """Lays time over the ranks of a group; outputs, states and gradients are those of one rank, within `tolerance`.

    Every rank calls the net with its own block of the steps of all sequences, as `stretto.distributed.TimeMesh` cuts
    it: blocks may be of any length, and empty. It gets the outputs of its block and the states after its block; those
    of the last rank (of the first, for a direction that reads backwards) are the final states. An initial state counts
    on the first rank (the last, backwards); elsewhere it is the first guess.

    The loss is the sum of all ranks' losses. Each rank gets the gradient of that sum with respect to its own inputs and
    initial state, and its share of the gradients of parameters: these add up over ranks. All ranks must run forward and
    backward together: a rank whose loss does not depend on its outputs has to include them, as in `y.sum() * 0`. A rank
    that waits for another in vain fails when the group's own time-out is over.

    Args:
        group: The ranks, in the order of time; by default all there are. Alone, a rank walks step after step.
        tolerance: The mismatch between blocks that is small enough, relative to states above 1; for gradients, relative
            to the largest.
        piece: Steps after which a walk is compared with the one before.
    """

    def __init__(
        self, *, group: "distributed.ProcessGroup | None" = None, tolerance: float = 1e-6, piece: int = PIECE
    ) -> None:
        if not (isinstance(tolerance, (int, float)) and 0 < tolerance < math.inf):
            raise StrettoError(f"tolerance is {tolerance!r}", fix="Give a number above 0, such as 1e-6.")
        if not isinstance(piece, int) or piece < 1:
            raise StrettoError(f"piece is {piece!r}", fix="Give a whole number of steps from 1 on.")
        self.group = group
        self.tolerance = float(tolerance)
        self.piece = piece
        self._calls = 0

    def solve(self, chain: Chain) -> Solved:
        """Walk the block of this rank until all ranks agree; gradients flow over ranks."""
        ranks = Neighbours(self.group, backwards=chain.backwards)
        if ranks.size == 1:
            walked = chain.run(chain.layout, chain.x_PF, chain.states)
            return Solved(walked=walked, solution=Solution(solver="relay", reason="there is but one rank"))
        self._calls += 1
        names = list(chain.parameters)
        given = [chain.x_PF, *chain.states, *(chain.parameters[name] for name in names)]
        keeps = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
        facts = {
            "the pass": f"call {self._calls}",
            "the layer and direction": chain.name,
            "the number of sequences": chain.layout.num_rows,
            "the state": [(tuple(state.shape[1:]), str(state.dtype)) for state in chain.states],
            "the input of a step": (tuple(chain.x_PF.shape[1:]), str(chain.x_PF.dtype)),
            "whether gradients are asked for": keeps,
            "sample_ids": None if chain.sample_ids is None else sorted(chain.sample_ids),
            "the tolerance": self.tolerance,
        }
        steps = self._steps(ranks, chain, facts)
        solution = Solution(solver="relay", reason=f"{ranks.size} ranks of {_told(steps)} steps")
        if chain.layout.num_rows == 0:
            return Solved(walked=chain.run(chain.layout, chain.x_PF, chain.states), solution=solution)
        call = _Call(self, chain, ranks, facts, names, keeps, solution)
        made = _Relayed.apply(call, *given)  # type: ignore[no-untyped-call]
        return Solved(walked=Walked(y_PF=made[0], states=list(made[1:])), solution=solution)

    @staticmethod
    def _steps(ranks: Neighbours, chain: Chain, facts: dict[str, Any]) -> list[int]:
        """Steps of each rank's block, by rank, if all are about to do the same and can tell sequences apart."""
        ids = chain.sample_ids
        twice = ids is not None and len(set(ids)) < len(ids)
        found = ranks.agree(facts, told=[chain.layout.num_steps, not chain.layout.is_even, ids is None, twice])
        assert len(found[0]) == TOLD
        if any(row[3] for row in found):
            raise StrettoError("two sequences of a batch have the same sample_ids", fix="Give each its own.")
        if any(row[1] for row in found) and found[0][2]:
            # Each rank sorts by the lengths in its own block: without a name, rows of two ranks cannot be matched.
            raise StrettoError(
                "sequences are of unequal length and are not known by any number",
                fix="Call rnn(x, lengths=..., sample_ids=ids), with the same whole number for a sequence on all ranks.",
            )
        return [int(row[0]) for row in found]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Relay":
        return Relay(group=self.group, tolerance=self.tolerance, piece=self.piece)

    def __repr__(self) -> str:
        usual = {"tolerance": 1e-6, "piece": PIECE}
        said = [f"{name}={getattr(self, name)!r}" for name, value in usual.items() if getattr(self, name) != value]
        return f"Relay({', '.join(said)})"


def _told(steps: list[int]) -> str:
    return str(steps[0]) if len(set(steps)) == 1 else f"{min(steps)} to {max(steps)}"


@final
@dataclasses.dataclass(slots=True)
class _Call:
    """One chain over ranks."""

    solver: Relay
    chain: Chain
    ranks: Neighbours
    facts: dict[str, Any]
    names: list[str]
    keeps: bool
    solution: Solution

    def common(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """Rows in an order that all ranks know."""
        return parts if self._order is None else [part[self._order.to(part.device)] for part in parts]

    def own(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """Rows in the order of this rank's layout."""
        if self._order is None:
            return parts
        back_B = torch.argsort(self._order)
        return [part[back_B.to(part.device)] for part in parts]

    @property
    def _order(self) -> torch.Tensor | None:
        return None if self.chain.sample_ids is None else torch.argsort(torch.tensor(self.chain.sample_ids))

    def walk(self, leg: Leg) -> None:
        """Rounds until ranks agree."""
        ranks, solution, tolerance = self.ranks, self.solution, self.solver.tolerance
        starts = [state.detach() for state in self.chain.states]
        left = 0.0
        for rounds in range(1, ranks.size + 1):
            leg.walk(starts, close=tolerance)
            solution.iterations = rounds
            if rounds == ranks.size:
                left = 0.0
                break
            arrived = ranks.pass_on(self.common(leg.ends))
            starts = leg.starts if arrived is None else self.own(arrived)
            (left,) = ranks.largest([gap(starts, leg.starts)])
            if left <= tolerance:
                break
        solution.residual = max(left, leg.residual)
        solution.work = leg.walked / max(1, self.chain.layout.total)
        if not math.isfinite(size([end for end in leg.ends if end.is_floating_point()])):
            solution.reason += "; a state is no number"

    def back(self, leg: Leg, d_y_PF: torch.Tensor | None, d_ends: list[torch.Tensor], sums: Sums) -> list[torch.Tensor]:
        """Rounds until no gradient moves on from rank to rank.

        Returns:
            The gradient of the states before this rank's block.
        """
        ranks = self.ranks
        # Just as long a message: ranks that are in different passes compare them too.
        ranks.agree({**self.facts, "the pass": f"{self.facts['the pass']} backward"}, told=[0.0] * TOLD)
        moving = leg.back(d_ends, sums, d_y_PF=d_y_PF)
        found, left, scale, rounds = list(moving), 0.0, 0.0, 1
        while rounds < ranks.size:
            arrived = ranks.pass_back(self.common(moving))
            late = [torch.zeros_like(part) for part in moving] if arrived is None else self.own(arrived)
            left, largest = ranks.largest([size(late), size(found)])
            # What is no number goes all the way, as it would on one rank.
            scale = largest if math.isfinite(largest) else 0.0
            if left <= self.solver.tolerance * scale:
                break
            moving = leg.back(late, sums, negligible=self.solver.tolerance * scale)
            found = [one + more for one, more in zip(found, moving, strict=True)]
            left, rounds = 0.0, rounds + 1
        self.solution.backward_iterations = rounds
        self.solution.backward_residual = max(left, sums.left_out) / scale if scale else 0.0
        return found


class _Relayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *given: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        needs = [needed and call.keeps for needed in ctx.needs_input_grad[1:]]
        leaves = [t.detach().requires_grad_(needed) for t, needed in zip(given, needs, strict=True)]
        count = len(call.chain.states)
        own = dataclasses.replace(
            call.chain, x_PF=given[0].detach(), parameters=dict(zip(call.names, leaves[1 + count :], strict=True))
        )
        leg = Leg(own, length=call.solver.piece, keeps=call.keeps, needs_input=needs[0])
        call.walk(leg)
        ctx.call, ctx.leg = call, leg
        ctx.mark_non_differentiable(*(end for end in leg.ends if not end.is_floating_point()))
        return (leg.y_PF, *leg.ends)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_y_PF: torch.Tensor | None, *d_finals: torch.Tensor | None) -> Any:
        call: _Call = ctx.call
        leg: Leg = ctx.leg
        states, needed = call.chain.states, ctx.needs_input_grad[1:]
        sums = Sums(leg)
        d_ends = [
            torch.zeros_like(end) if d is None else d
            for end, d in zip(leg.ends, d_finals, strict=True)
            if end.is_floating_point()
        ]
        found = iter(call.back(leg, d_y_PF, d_ends, sums))
        d_states = [next(found) if state.is_floating_point() else None for state in states]
        if call.ranks.place:
            # Zeros, not nothing: what an initial state is made of takes part in every exchange of gradients.
            d_states = [None if d is None else torch.zeros_like(d) for d in d_states]
        gradients = [sums.x_PF, *d_states, *(sums.parameters.get(name) for name in call.names)]
        return None, *(d if needs else None for d, needs in zip(gradients, needed, strict=True))
