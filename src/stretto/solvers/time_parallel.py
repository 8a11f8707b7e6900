r"""Time over ranks: each rank runs its own block of steps, all at once, and sends its last state to the next rank.

This is multiple shooting with one chunk per rank. The unknowns are the states between blocks:

    rank 0               rank 1               rank 2
    [---- block 0 ----]  [---- block 1 ----]  [---- block 2 ----]      round 1: all ranks from a guess
                      \  [--]               \  [--]                    round 2: from the received state, until the
                       `->                   `->                                run meets the one before

What neighbours disagree about is the whole error. After k rounds the first k blocks are exact, whatever the net, so
there are never more rounds than ranks. A net that forgets needs two, and the second only as many steps as it remembers:
a block is run in segments, each with its own autograd graph, and a run from new states stops at the first segment whose
start has not changed. The gradient is linear: what arrives late is added, as far back as it is felt.

Nothing that is sent is unpickled: values travel as tensors of numbers or bytes.

Shape legend: B sequences, P real steps of all sequences, F features.
"""

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, final

import torch
from torch import distributed

from stretto.checks import check_float, check_int
from stretto.errors import StrettoError
from stretto.kernels import Layout, differentiate
from stretto.solvers.adjoint import MaybeTensor
from stretto.solvers.base import (
    AbstractSolver,
    Problem,
    Result,
    Solution,
    residual_norm,
    run_sequentially,
    why_incomparable,
)

SEGMENT_STEPS: Final = 1024
NUM_HEADER_VALUES: Final = 4
"""Numbers that ranks exchange before they start."""


@final
class TimeParallel(AbstractSolver):
    """Splits time over the ranks of a group; outputs, states and gradients equal those of one rank within `tolerance`.

    Every rank calls the net with its own block of the steps of all sequences, as `stretto.distributed.TimeMesh` cuts
    it. Blocks may have any length, even none. A rank gets the outputs of its block and the states after its block;
    those of the last rank (of the first, for a direction that reads backwards) are the final states. An initial state
    counts on the first rank (the last, backwards); elsewhere it is the first guess.

    The loss is the sum of all ranks' losses. Each rank gets the gradient of that sum with respect to its own inputs and
    initial state, and its share of the gradients of parameters, which add up over ranks. All ranks must run forward and
    backward together: a rank whose loss does not depend on its outputs has to include them, as in `y.sum() * 0`. A rank
    that waits in vain for another fails after the group's timeout.

    Args:
        group: The ranks, in the order of time; all by default. A single rank runs sequentially.
        tolerance: The difference between blocks that is small enough, relative to states above 1; for gradients,
            relative to the largest.
        segment_steps: Steps after which a run is compared with the one before.
    """

    def __init__(
        self,
        *,
        group: "distributed.ProcessGroup | None" = None,
        tolerance: float = 1e-6,
        segment_steps: int = SEGMENT_STEPS,
    ) -> None:
        self.group = group
        self.tolerance = check_float(tolerance, name="tolerance", above=0.0, owner="TimeParallel")
        self.segment_steps = check_int(segment_steps, name="segment_steps", owner="TimeParallel")
        self._calls = 0

    def solve(self, problem: Problem) -> Result:
        """Run the block of this rank until all ranks agree; gradients flow across ranks."""
        ring = RankRing(self.group, reverse=problem.reverse)
        solution = Solution(solver="time_parallel", reason="there is only one rank")
        if ring.size == 1:
            return run_sequentially(problem, solution)
        if unreadable := why_incomparable(problem):
            raise StrettoError(
                f"ranks exchange states, and cannot: {unreadable}", fix="Run on meta with solver='serial'."
            )
        self._calls += 1
        needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in problem.inputs)
        facts = {
            "the pass": f"call {self._calls}",
            "the layer and direction": problem.name,
            "the number of sequences": problem.layout.num_rows,
            "the state": [(tuple(state.shape[1:]), str(state.dtype)) for state in problem.states],
            "the input of a step": (tuple(problem.x_PF.shape[1:]), str(problem.x_PF.dtype)),
            "whether gradients are asked for": needs_grad,
            "sample_ids": None if problem.sample_ids is None else sorted(problem.sample_ids),
            "the tolerance": self.tolerance,
        }
        steps = self._exchange_steps(ring, problem, facts)
        span = str(steps[0]) if len(set(steps)) == 1 else f"{min(steps)} to {max(steps)}"
        solution.reason = f"{ring.size} ranks of {span} steps"
        if problem.layout.num_rows == 0:
            return run_sequentially(problem, solution)
        block = _Block(self, problem, ring, facts, solution=solution)
        y_PF, *states = _TimeParallelRun.apply(block, *problem.inputs)  # type: ignore[no-untyped-call]
        return Result(y_PF=y_PF, states=states, solution=solution)

    @staticmethod
    def _exchange_steps(ring: "RankRing", problem: Problem, facts: dict[str, Any]) -> list[int]:
        """The steps of each rank's block, after checking that all ranks run the same pass and can match sequences."""
        ids = problem.sample_ids
        has_duplicates = ids is not None and len(set(ids)) < len(ids)
        header = [problem.layout.num_steps, not problem.layout.is_even, ids is None, has_duplicates]
        assert len(header) == NUM_HEADER_VALUES
        found = ring.require_equal(facts, values=header)
        if any(row[3] for row in found):
            raise StrettoError("two sequences of a batch have the same sample_ids", fix="Give each its own.")
        if any(row[1] for row in found) and found[0][2]:
            # Each rank sorts by the lengths in its own block: without ids, rows of two ranks cannot be matched.
            raise StrettoError(
                "sequences have unequal lengths and no ids",
                fix="Call rnn(x, lengths=..., sample_ids=ids), with the same integer for a sequence on all ranks.",
            )
        return [int(row[0]) for row in found]

    def __deepcopy__(self, memo: dict[int, Any]) -> "TimeParallel":
        return TimeParallel(group=self.group, tolerance=self.tolerance, segment_steps=self.segment_steps)


def count_ranks(group: "distributed.ProcessGroup | None") -> int:
    """Ranks of a group, or of all there are; 1 where torch.distributed is not in use."""
    running = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size(group) if running else 1


@final
class RankRing:
    """The ranks of a group in the order in which a sequence passes them: `reverse` if it is read backwards."""

    def __init__(self, group: "distributed.ProcessGroup | None", *, reverse: bool) -> None:
        self._group, self._reverse = group, reverse
        self.size = count_ranks(group)
        # In that order, from 0.
        self.place = self._mirror(distributed.get_rank(group)) if self.size > 1 else 0
        nccl = self.size > 1 and distributed.get_backend(group) == "nccl"
        self._device = torch.device("cuda") if nccl else torch.device("cpu")

    def _mirror(self, number: int) -> int:
        return self.size - 1 - number if self._reverse else number

    def require_equal(self, facts: Mapping[str, Any], *, values: Sequence[float] = ()) -> list[list[float]]:
        """Check that all ranks run the same pass, and all-gather each rank's values, in one exchange.

        Facts must be equal, and are as many on every rank, in the same order; digests of them are sent. If any two
        differ, there is an error on every rank. Values may differ, and are as many on every rank.
        """
        # Six bytes are exact as a float64.
        digests = [hashlib.sha256(str(value).encode()).digest()[:6] for value in facts.values()]
        sent = [*(float(int.from_bytes(digest, "big")) for digest in digests), *values]
        own = torch.tensor(sent, dtype=torch.float64, device=self._device)
        gathered = [torch.empty_like(own) for _ in range(self.size)]
        distributed.all_gather(gathered, own, group=self._group)
        found = [item.tolist() for item in gathered]
        for index, (what, value) in enumerate(facts.items()):
            others = [rank for rank, row in enumerate(found) if row[index] != found[0][index]]
            if others:
                raise StrettoError(
                    f"{what} of rank {', '.join(map(str, others))} differs from that of rank 0 (here: {value})",
                    fix="Give every rank of a time group its block of the same sequences, to the same net, and let all "
                    "of them do the same passes.",
                )
        return [row[len(facts) :] for row in found]

    def all_reduce_max(self, values: Sequence[float]) -> list[float]:
        """The largest of each value over all ranks; NaN counts as inf."""
        both = torch.tensor(values, dtype=torch.float64, device=self._device).nan_to_num(nan=math.inf, posinf=math.inf)
        distributed.all_reduce(both, op=distributed.ReduceOp.MAX, group=self._group)
        return [float(value) for value in both.tolist()]

    def shift(self, parts: Sequence[torch.Tensor], *, by: Literal[1, -1]) -> list[torch.Tensor] | None:
        """Send to the next rank (the previous, by -1), and receive the same from the other side; None at the edge."""
        if not parts:
            return None
        packed = torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts]).to(self._device)
        received = torch.empty_like(packed)
        receives = 0 <= self.place - by < self.size
        operations = []
        if 0 <= self.place + by < self.size:
            operations.append(self._operation(distributed.isend, packed, self.place + by))
        if receives:
            operations.append(self._operation(distributed.irecv, received, self.place - by))
        for work in distributed.batch_isend_irecv(operations):
            work.wait()
        if not receives:
            return None
        sizes = [part.numel() * part.element_size() for part in parts]
        # Copied: a part may not be aligned for its dtype.
        return [
            piece.clone().view(part.dtype).view(part.shape).to(part.device)
            for piece, part in zip(torch.split(received, sizes), parts, strict=True)
        ]

    def _operation(self, kind: Any, tensor: torch.Tensor, place: int) -> "distributed.P2POp":
        rank = self._mirror(place)
        peer = rank if self._group is None else distributed.get_global_rank(self._group, rank)
        return distributed.P2POp(kind, tensor, peer, self._group)


def largest_magnitude(parts: Sequence[torch.Tensor]) -> float:
    """The largest absolute value of all parts; infinite if one is NaN."""
    return max((float(part.abs().nan_to_num(nan=math.inf).max()) for part in parts if part.numel()), default=0.0)


@final
@dataclasses.dataclass(slots=True)
class _Segment:
    layout: Layout
    rows: slice
    x_PF: torch.Tensor
    starts: list[torch.Tensor] = dataclasses.field(default_factory=list)
    ends: list[torch.Tensor] = dataclasses.field(default_factory=list)
    y_PF: torch.Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))
    residual: float = 0.0


@final
class _Block:
    """The block of steps of one rank, in segments, and the rounds in which ranks come to agree."""

    def __init__(
        self, solver: TimeParallel, problem: Problem, ring: RankRing, facts: dict[str, Any], *, solution: Solution
    ) -> None:
        self.ring, self.problem = ring, problem.as_leaves()
        self._tolerance, self._facts, self._solution = solver.tolerance, facts, solution
        self._needs_grad = any(tensor.requires_grad for tensor in self.problem.inputs)
        # Before and after the last run.
        self.starts: list[torch.Tensor] = []
        self.ends: list[torch.Tensor] = []
        # Real steps, over all runs.
        self._steps_run = 0
        steps = range(0, problem.layout.num_steps, solver.segment_steps)
        self._segments = [self._segment(first, solver.segment_steps) for first in steps]

    def _segment(self, first: int, segment_steps: int) -> _Segment:
        layout, x_PF = self.problem.layout, self.problem.x_PF
        last = min(first + segment_steps, layout.num_steps)
        rows = slice(int(layout.starts_T[first]), int(layout.starts_T[last]))
        own_PF = x_PF[rows].detach().requires_grad_(x_PF.requires_grad)
        return _Segment(layout=layout.chunk(first, last), rows=rows, x_PF=own_PF)

    @property
    def y_PF(self) -> torch.Tensor:
        made = [segment.y_PF.detach() for segment in self._segments]
        if not made:
            with torch.no_grad():
                return self.problem.run(self.problem.layout, self.problem.x_PF, self.starts)[0]
        return made[0] if len(made) == 1 else torch.cat(made)

    def run(self) -> None:
        """Rounds until ranks agree."""
        ring, solution, tolerance = self.ring, self._solution, self._tolerance
        starts = [state.detach() for state in self.problem.states]
        left = 0.0
        for rounds in range(1, ring.size + 1):
            self._run_from(starts)
            solution.iterations = rounds
            if rounds == ring.size:
                left = 0.0
                break
            starts = self._shift(self.ends, by=1) or self.starts
            (left,) = ring.all_reduce_max([residual_norm(starts, self.starts)])
            if left <= tolerance:
                break
        solution.residual = max([left, *(segment.residual for segment in self._segments)])
        solution.work = self._steps_run / max(1, self.problem.layout.total)
        if not math.isfinite(largest_magnitude([end for end in self.ends if end.is_floating_point()])):
            solution.reason += "; a state is NaN or inf"

    def _run_from(self, starts: Sequence[torch.Tensor]) -> None:
        """Run from these states, up to a segment that was run from states within the tolerance before."""
        self.starts = now = [start.detach() for start in starts]
        for segment in self._segments:
            if segment.starts:
                segment.residual = residual_norm(now, segment.starts)
                if segment.residual <= self._tolerance:
                    return
            segment.residual = 0.0
            # Detached: the leaves of a graph are not shared with what is sent or compared.
            segment.starts = [s.detach().requires_grad_(self._needs_grad and s.is_floating_point()) for s in now]
            with torch.set_grad_enabled(self._needs_grad):
                segment.y_PF, segment.ends = self.problem.run(segment.layout, segment.x_PF, segment.starts)
            self._steps_run += segment.layout.total
            now = [end.detach() for end in segment.ends]
        # Without steps the ends are the starts, which belong to the caller.
        self.ends = now if self._segments else [part.clone() for part in now]

    def _shift(self, parts: list[torch.Tensor], *, by: Literal[1, -1]) -> list[torch.Tensor] | None:
        """Exchange rows with the ranks beside this one, in the order of their ids: that is the same on all ranks."""
        if self.problem.sample_ids is None:
            return self.ring.shift(parts, by=by)
        order_B = torch.argsort(torch.tensor(self.problem.sample_ids, device="cpu"))
        received = self.ring.shift([part[order_B.to(part.device)] for part in parts], by=by)
        inverse_B = torch.argsort(order_B)
        return None if received is None else [part[inverse_B.to(part.device)] for part in received]

    def pull_back(self, d_y_PF: MaybeTensor, d_ends: list[torch.Tensor], sums: list[MaybeTensor]) -> list[torch.Tensor]:
        """Rounds until no gradient moves from rank to rank any more.

        The gradients of input and parameters are added to `sums`, those of the states before the block are returned.
        """
        ring = self.ring
        # As long a message as in the forward pass: ranks that are in different passes compare theirs.
        facts = {**self._facts, "the pass": f"{self._facts['the pass']} backward"}
        ring.require_equal(facts, values=[0.0] * NUM_HEADER_VALUES)
        moving, left_out = self._pull_back(d_ends, sums, d_y_PF=d_y_PF)
        found, left, scale, rounds = list(moving), 0.0, 0.0, 1
        while rounds < ring.size:
            late = self._shift(moving, by=-1) or [torch.zeros_like(part) for part in moving]
            left, largest = ring.all_reduce_max([largest_magnitude(late), largest_magnitude(found)])
            # A gradient that is NaN or inf spreads to the first step, as it would on one rank.
            scale = largest if math.isfinite(largest) else 0.0
            if left <= self._tolerance * scale:
                break
            moving, more = self._pull_back(late, sums, negligible=self._tolerance * scale)
            found = [one + other for one, other in zip(found, moving, strict=True)]
            left, left_out, rounds = 0.0, max(left_out, more), rounds + 1
        self._solution.backward_iterations = rounds
        self._solution.backward_residual = max(left, left_out) / scale if scale else 0.0
        return found

    def _pull_back(
        self,
        d_ends: list[torch.Tensor],
        sums: list[MaybeTensor],
        *,
        d_y_PF: MaybeTensor = None,
        negligible: float = 0.0,
    ) -> tuple[list[torch.Tensor], float]:
        """Follow the gradients of the floating-point states after the block, and of its outputs, to those before.

        Without `d_y_PF` it ends where no gradient of a state is larger than `negligible`: zeros are then returned, and
        the largest that was left out.
        """
        d_states = d_ends
        d_x_PF, *d_parameters = sums
        for segment in reversed(self._segments):
            if d_y_PF is None and (left_out := largest_magnitude(d_states)) <= negligible:
                return [torch.zeros_like(part) for part in d_states], left_out
            pairs = list(zip([end for end in segment.ends if end.is_floating_point()], d_states, strict=True))
            if d_y_PF is not None:
                pairs.append((segment.y_PF, d_y_PF[segment.rows]))
            starts = [start for start in segment.starts if start.requires_grad]
            found = differentiate(pairs, [*starts, segment.x_PF, *self.problem.parameters.values()])
            own = None if d_x_PF is None else d_x_PF[segment.rows]
            for total, part in zip([own, *d_parameters], found[len(starts) :], strict=True):
                if total is not None and part is not None:
                    total.add_(part)
            d_states = [torch.zeros_like(s) if d is None else d for s, d in zip(starts, found, strict=False)]
        return d_states, 0.0


class _TimeParallelRun(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: _Block, *given: torch.Tensor) -> Any:  # noqa: ARG004
        ctx.set_materialize_grads(False)
        block.run()
        ctx.block = block
        ctx.mark_non_differentiable(*(end for end in block.ends if not end.is_floating_point()))
        return (block.y_PF, *block.ends)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_y_PF: MaybeTensor, *d_finals: MaybeTensor) -> Any:
        block: _Block = ctx.block
        problem = block.problem
        leaves = [problem.x_PF, *problem.parameters.values()]
        sums = [torch.zeros_like(leaf) if leaf.requires_grad else None for leaf in leaves]
        d_ends = [
            torch.zeros_like(end) if d is None else d
            for end, d in zip(block.ends, d_finals, strict=True)
            if end.is_floating_point()
        ]
        found = iter(block.pull_back(d_y_PF, d_ends, sums))
        d_states = [next(found) if state.is_floating_point() else None for state in problem.states]
        if block.ring.place:
            # Zeros, not None: an initial state made from parameters takes part in every exchange of gradients.
            d_states = [None if d is None else torch.zeros_like(d) for d in d_states]
        gradients = [sums[0], *d_states, *sums[1:]]
        return None, *(d if needs else None for d, needs in zip(gradients, ctx.needs_input_grad[1:], strict=True))
