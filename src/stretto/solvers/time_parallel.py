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
from stretto.kernels import Layout
from stretto.solvers.adjoint import MaybeTensor, differentiate
from stretto.solvers.base import AbstractSolver, Problem, Result, Solution, residual_norm, run_sequentially

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
        call = _Call(self, problem, ring, facts, needs_grad, solution)
        y_PF, *states = _TimeParallelRun.apply(call, *problem.inputs)  # type: ignore[no-untyped-call]
        return Result(y_PF=y_PF, states=states, solution=solution)

    @staticmethod
    def _exchange_steps(ring: "RankRing", problem: Problem, facts: dict[str, Any]) -> list[int]:
        """The steps of each rank's block, if all ranks are about to do the same and can tell sequences apart."""
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
                fix="Call rnn(x, lengths=..., sample_ids=ids), with the same whole number for a sequence on all ranks.",
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
        """Check that all ranks are about to do the same, and gather each rank's values, in one exchange.

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
        # Copied: a part may start at an address that its type does not allow.
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
@dataclasses.dataclass(slots=True, kw_only=True)
class GradientSums:
    """Gradients of the input and the parameters of a block, where they are needed, added up over rounds."""

    x_PF: MaybeTensor
    parameters: dict[str, torch.Tensor]
    left_out: float = 0.0
    """The largest gradient of a state that was not followed further."""


@final
class LocalBlock:
    """The block of steps of one rank, in segments. The parameters of its problem are leaves."""

    def __init__(self, problem: Problem, *, segment_steps: int, needs_grad: bool, needs_input_grad: bool) -> None:
        self.problem, self.needs_grad, self.needs_input_grad = problem, needs_grad, needs_input_grad
        # Before and after the last run.
        self.starts: list[torch.Tensor] = []
        self.ends: list[torch.Tensor] = []
        # Real steps, over all runs.
        self.steps_run = 0
        self._segments = [
            self._segment(first, segment_steps) for first in range(0, problem.layout.num_steps, segment_steps)
        ]

    def _segment(self, first: int, segment_steps: int) -> _Segment:
        layout = self.problem.layout
        last = min(first + segment_steps, layout.num_steps)
        rows = slice(int(layout.starts_T[first]), int(layout.starts_T[last]))
        x_PF = self.problem.x_PF[rows].detach().requires_grad_(self.needs_input_grad)
        return _Segment(layout=layout.chunk(first, last), rows=rows, x_PF=x_PF)

    @property
    def residual(self) -> float:
        """The largest difference left where segments meet, and at the start."""
        return max((segment.residual for segment in self._segments), default=0.0)

    @property
    def y_PF(self) -> torch.Tensor:
        """Outputs of all rows."""
        made = [segment.y_PF.detach() for segment in self._segments]
        if not made:
            with torch.no_grad():
                return self.problem.run(self.problem.layout, self.problem.x_PF, self.starts)[0]
        return made[0] if len(made) == 1 else torch.cat(made)

    def run(self, starts: Sequence[torch.Tensor], *, tolerance: float) -> None:
        """Run from these states, up to a segment that was run from states within the tolerance before."""
        self.starts = now = [start.detach() for start in starts]
        for segment in self._segments:
            if segment.starts:
                segment.residual = residual_norm(now, segment.starts)
                if segment.residual <= tolerance:
                    return
            self._run(segment, now)
            now = [end.detach() for end in segment.ends]
        # Without steps the ends are the starts, which belong to the caller.
        self.ends = now if self._segments else [part.clone() for part in now]

    def _run(self, segment: _Segment, starts: Sequence[torch.Tensor]) -> None:
        segment.residual = 0.0
        # Detached: the leaves of a graph are not shared with what is sent or compared.
        segment.starts = [s.detach().requires_grad_(self.needs_grad and s.is_floating_point()) for s in starts]
        with torch.set_grad_enabled(self.needs_grad):
            segment.y_PF, segment.ends = self.problem.run(segment.layout, segment.x_PF, segment.starts)
        self.steps_run += segment.layout.total

    def pull_back(
        self,
        d_ends: Sequence[torch.Tensor],
        sums: GradientSums,
        *,
        d_y_PF: torch.Tensor | None = None,
        negligible: float = 0.0,
    ) -> list[torch.Tensor]:
        """Add the gradients that follow from those of the states after the block, and of its outputs.

        Args:
            d_ends: Gradients of the floating-point states after the block.
            sums: Where to add.
            d_y_PF: Gradients of the outputs.
            negligible: Stop where no gradient of a state is larger; only without `d_y_PF`.

        Returns:
            The gradients of the floating-point states before the block, or zeros if they are negligible there.
        """
        d_states = list(d_ends)
        for segment in reversed(self._segments):
            if d_y_PF is None and (left_out := largest_magnitude(d_states)) <= negligible:
                sums.left_out = max(sums.left_out, left_out)
                return [torch.zeros_like(part) for part in d_states]
            pairs = list(zip([end for end in segment.ends if end.is_floating_point()], d_states, strict=True))
            if d_y_PF is not None:
                pairs.append((segment.y_PF, d_y_PF[segment.rows]))
            starts = [start for start in segment.starts if start.requires_grad]
            parameters = [self.problem.parameters[name] for name in sums.parameters]
            *found, d_x_PF = differentiate(pairs, [*starts, *parameters, segment.x_PF])
            for name, gradient in zip(sums.parameters, found[len(starts) :], strict=True):
                if gradient is not None:
                    sums.parameters[name] += gradient
            if sums.x_PF is not None and d_x_PF is not None:
                sums.x_PF[segment.rows] += d_x_PF
            d_states = [torch.zeros_like(s) if d is None else d for s, d in zip(starts, found, strict=False)]
        return d_states


@final
@dataclasses.dataclass(slots=True)
class _Call:
    """One problem over ranks."""

    solver: TimeParallel
    problem: Problem
    ring: RankRing
    facts: dict[str, Any]
    needs_grad: bool
    solution: Solution

    def _shift(self, parts: list[torch.Tensor], *, by: Literal[1, -1]) -> list[torch.Tensor] | None:
        """Exchange rows with the ranks beside this one, in the order of their ids: that is the same on all ranks."""
        if self.problem.sample_ids is None:
            return self.ring.shift(parts, by=by)
        order_B = torch.argsort(torch.tensor(self.problem.sample_ids))
        received = self.ring.shift([part[order_B.to(part.device)] for part in parts], by=by)
        inverse_B = torch.argsort(order_B)
        return None if received is None else [part[inverse_B.to(part.device)] for part in received]

    def run(self, block: LocalBlock) -> None:
        """Rounds until ranks agree."""
        ring, solution, tolerance = self.ring, self.solution, self.solver.tolerance
        starts = [state.detach() for state in self.problem.states]
        left = 0.0
        for rounds in range(1, ring.size + 1):
            block.run(starts, tolerance=tolerance)
            solution.iterations = rounds
            if rounds == ring.size:
                left = 0.0
                break
            starts = self._shift(block.ends, by=1) or block.starts
            (left,) = ring.all_reduce_max([residual_norm(starts, block.starts)])
            if left <= tolerance:
                break
        solution.residual = max(left, block.residual)
        solution.work = block.steps_run / max(1, self.problem.layout.total)
        if not math.isfinite(largest_magnitude([end for end in block.ends if end.is_floating_point()])):
            solution.reason += "; a state is NaN or inf"

    def pull_back(
        self, block: LocalBlock, d_y_PF: torch.Tensor | None, d_ends: list[torch.Tensor], sums: GradientSums
    ) -> list[torch.Tensor]:
        """Rounds until no gradient moves from rank to rank any more; the gradients of the states before the block."""
        ring = self.ring
        # As long a message as in the forward pass: ranks that are in different passes compare theirs.
        facts = {**self.facts, "the pass": f"{self.facts['the pass']} backward"}
        ring.require_equal(facts, values=[0.0] * NUM_HEADER_VALUES)
        moving = block.pull_back(d_ends, sums, d_y_PF=d_y_PF)
        found, left, scale, rounds = list(moving), 0.0, 0.0, 1
        while rounds < ring.size:
            late = self._shift(moving, by=-1) or [torch.zeros_like(part) for part in moving]
            left, largest = ring.all_reduce_max([largest_magnitude(late), largest_magnitude(found)])
            # A gradient that is NaN or inf spreads to the first step, as it would on one rank.
            scale = largest if math.isfinite(largest) else 0.0
            if left <= self.solver.tolerance * scale:
                break
            moving = block.pull_back(late, sums, negligible=self.solver.tolerance * scale)
            found = [one + more for one, more in zip(found, moving, strict=True)]
            left, rounds = 0.0, rounds + 1
        self.solution.backward_iterations = rounds
        self.solution.backward_residual = max(left, sums.left_out) / scale if scale else 0.0
        return found


class _TimeParallelRun(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *given: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        problem, count = call.problem, len(call.problem.states)
        needs = [needed and call.needs_grad for needed in ctx.needs_input_grad[1:]]
        parameters = [t.detach().requires_grad_(n) for t, n in zip(given[1 + count :], needs[1 + count :], strict=True)]
        own = dataclasses.replace(problem.with_parameters(parameters), x_PF=given[0].detach())
        block = LocalBlock(
            own, segment_steps=call.solver.segment_steps, needs_grad=call.needs_grad, needs_input_grad=needs[0]
        )
        call.run(block)
        ctx.call, ctx.block = call, block
        ctx.mark_non_differentiable(*(end for end in block.ends if not end.is_floating_point()))
        return (block.y_PF, *block.ends)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_y_PF: torch.Tensor | None, *d_finals: torch.Tensor | None) -> Any:
        call: _Call = ctx.call
        block: LocalBlock = ctx.block
        leaves = block.problem.parameters.items()
        sums = GradientSums(
            x_PF=torch.zeros_like(block.problem.x_PF) if block.needs_input_grad else None,
            parameters={name: torch.zeros_like(leaf) for name, leaf in leaves if leaf.requires_grad},
        )
        d_ends = [
            torch.zeros_like(end) if d is None else d
            for end, d in zip(block.ends, d_finals, strict=True)
            if end.is_floating_point()
        ]
        found = iter(call.pull_back(block, d_y_PF, d_ends, sums))
        d_states = [next(found) if state.is_floating_point() else None for state in call.problem.states]
        if call.ring.place:
            # Zeros, not None: an initial state made from parameters takes part in every exchange of gradients.
            d_states = [None if d is None else torch.zeros_like(d) for d in d_states]
        gradients = [sums.x_PF, *d_states, *(sums.parameters.get(name) for name in call.problem.parameters)]
        return None, *(d if needs else None for d, needs in zip(gradients, ctx.needs_input_grad[1:], strict=True))
