"""Multiple shooting: all chunks of a sequence walk at once, each from what is assumed of the one before.

The unknowns are the states at the boundaries of chunks alone. What the walks disagree about there is the whole error:
inside a chunk every step is the cell's own. After k sweeps the first k chunks are right, whatever the net: it ends.

Shape legend: B sequences, C chunks of all sequences, S numbers of a state.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Final, Literal, final

import torch

from stretto.errors import StrettoError
from stretto.kernels import Layout
from stretto.solvers.chunks import Chunks
from stretto.solvers.habit import Habit, Key, alike
from stretto.solvers.reverse_sweep import Limits, Swept
from stretto.solvers.serial import Serial
from stretto.solvers.shooting.boundaries import assumed, remember, remember_adjoints
from stretto.solvers.shooting.escalation import Escalation
from stretto.solvers.shooting.memory import PROBED, Memory, probed
from stretto.solvers.shooting.starts import nearest_start
from stretto.solvers.shooting.trajectory_cache import TrajectoryCache
from stretto.solvers.solver import AbstractSolver, Chain, Solution, Solved, Walked
from stretto.solvers.sweep import mismatch, walk_chunks

MOST_ROWS: Final = 32
SHORTEST: Final = 64
MARGIN: Final = 1.25
"""How much longer to burn in than the probe says."""
ROOM: Final = 2.0
"""How much longer a chunk had better be than what it burns in."""
FEWEST: Final = 4
"""Chunks below which it is not worth while."""


@final
class Shooting(AbstractSolver):
    """Walks chunks of time at once, and sweeps until they agree at their boundaries.

    By default the result is that of walking step after step, within `tolerance`. A short probe tells how long the net
    remembers: if that is less than a chunk, the states at the boundaries are found by burning in, and a single sweep
    verifies them; if it is more, the net is walked step after step, and `Solution` says so. With `max_sweeps` given,
    that many sweeps are made and what is left is told in `Solution.residual`; gradients pass as many boundaries as
    there are sweeps.

    Args:
        num_chunks: Chunks of the longest sequence; "auto" takes as many as fill the rows of a kernel.
        tolerance: The mismatch at the boundaries that is small enough, relative to states above 1.
        max_sweeps: Sweeps to make at most; by default until the tolerance is reached.
        cache: Where sequences were when they were last seen; needs `sample_ids`.
        edges: Rising lengths, such as the edges of buckets, to which that of the longest sequence is rounded up before
            it is cut: sequences are then cut alike in every batch of their bucket, and found again in the cache.
        persist: Sweep until chunks agree, with ever stronger corrections of the boundaries, however long the net
            remembers, instead of walking step after step.
    """

    def __init__(
        self,
        *,
        num_chunks: int | Literal["auto"] = "auto",
        tolerance: float = 1e-6,
        max_sweeps: int | None = None,
        cache: TrajectoryCache | None = None,
        edges: Sequence[int] = (),
        persist: bool = False,
    ) -> None:
        if num_chunks != "auto" and (not isinstance(num_chunks, int) or num_chunks < 1):
            raise StrettoError(f"num_chunks is {num_chunks!r}", fix='Give a whole number from 1 on, or "auto".')
        if isinstance(tolerance, bool) or not (isinstance(tolerance, (int, float)) and 0 < tolerance < math.inf):
            raise StrettoError(f"tolerance is {tolerance!r}", fix="Give a number above 0, such as 1e-6.")
        if max_sweeps is not None and (not isinstance(max_sweeps, int) or max_sweeps < 1):
            raise StrettoError(f"max_sweeps is {max_sweeps!r}", fix="Give a whole number from 1 on, or None.")
        self.num_chunks: int | Literal["auto"] = num_chunks
        self.tolerance = float(tolerance)
        self.max_sweeps = max_sweeps
        self.cache = cache
        self.edges = tuple(edges)
        self.persist = persist
        self._habits: dict[Key, Habit] = {}
        self._memories: dict[Key, float] = {}

    def solve(self, chain: Chain) -> Solved:
        """Find the boundary states, then walk once with gradients."""
        if self.cache is not None and chain.sample_ids is None:
            raise StrettoError(
                "a cache of trajectories was given and sequences are not known by any number",
                fix="Call rnn(x, lengths=..., sample_ids=ids), with one whole number for each sequence.",
            )
        chunks = self._cut(chain.layout)
        if chunks.most <= 1:
            return self._serially(chain, reason="there is but one chunk")
        if self.max_sweeps is not None:
            return self._limited(chain, chunks, self.max_sweeps)
        if self.persist:
            return self._persisted(chain, chunks)
        key = alike(chain, chunks.most, chunks.length.bit_length())
        habit = self._habits.setdefault(key, Habit())
        skipped = habit.skipped()
        if skipped:
            return self._serially(chain, reason=skipped)
        known, work = self._memories.get(key), 0.0
        if known is None:
            memory = probed(chain, chunks, steps=max(1, chunks.length // PROBED), tolerance=self.tolerance)
            work += memory.walked / max(1, chain.layout.total)
            if MARGIN * memory.steps > self._cut(chain.layout, memory.steps).length:
                solved = self._serially(chain, reason=_too_long(memory, chunks), work=work)
                habit.learn(solved)
                return solved
            self._memories[key] = memory.steps
        solved = self._verified(chain, self._cut(chain.layout, self._memories[key]), self._memories[key], work)
        if solved.solution.fell_back:
            del self._memories[key]
        # A memory that has become longer since it was probed is probed again at once.
        if known is None or not solved.solution.fell_back:
            habit.learn(solved)
        return solved

    def _verified(self, chain: Chain, chunks: Chunks, memory: float, work: float) -> Solved:
        """One sweep from states that were burnt in; if it does not agree, step after step from where it is certain."""
        burn_in = max(1, min(chunks.length, math.ceil(MARGIN * memory)))
        guess = assumed(chain, chunks, cache=None, burn_in=burn_in)
        work += guess.work
        told = f"{chunks.most} chunks of {chunks.length} steps, {burn_in} of them walked before each"
        solution = Solution(solver="shooting", reason=told)
        limits = Limits(tolerance=self.tolerance, most=chunks.most, lead=burn_in)
        walked, ends = walk_chunks(chain, chunks, guess.states, backward=limits, report=_told_to(solution))
        arrived = [chunks.arrived(end) for end in ends]
        residual = mismatch(arrived, guess.states, ~chunks.is_first_C)
        if not residual <= self.tolerance:
            return self._from_certain(chain, chunks, arrived, residual, work=work)
        solution.residual, solution.work = residual, work + 1.0
        remember(chain, chunks, arrived, cache=self.cache)
        return Solved(walked=walked, solution=solution)

    def _persisted(self, chain: Chain, chunks: Chunks) -> Solved:
        """Sweep until chunks agree within the tolerance, with corrections as they are needed."""
        escalation = Escalation(chain, chunks, tolerance=self.tolerance)
        start = nearest_start(chain, chunks, escalation, cache=self.cache, tolerance=self.tolerance)
        solution = Solution(solver="shooting", reason=f"{chunks.most} chunks of {chunks.length} steps{start.told}")
        boundaries = escalation.next_boundaries(start.states, start.ends, start.residual)
        made = 1
        while True:
            made += 1
            last = escalation.is_near or made >= chunks.most
            if last:
                limits = Limits(tolerance=self.tolerance, most=chunks.most)
                walked, ends = walk_chunks(chain, chunks, boundaries, backward=limits, report=_told_to(solution))
            else:
                ends = escalation.walk(boundaries)
            arrived = [chunks.arrived(end) for end in ends]
            residual = mismatch(arrived, boundaries, ~chunks.is_first_C)
            if last and (residual <= self.tolerance or made >= chunks.most):
                break
            boundaries = escalation.next_boundaries(boundaries, ends, residual)
        solution.iterations, solution.residual, solution.work = made, residual, start.work + made - 1
        solution.reason += escalation.told + _no_number(residual)
        remember(chain, chunks, arrived, cache=self.cache)
        return Solved(walked=walked, solution=solution)

    def _limited(self, chain: Chain, chunks: Chunks, most: int) -> Solved:
        """As many sweeps as were asked for, or fewer if chunks agree."""
        # What was never seen is burnt in, if it is to be carried on from there.
        burn_in = 0 if self.cache is None else chunks.length // PROBED
        guess = assumed(chain, chunks, cache=self.cache, burn_in=burn_in)
        boundaries = guess.states
        solution = Solution(solver="shooting", reason=f"{chunks.most} chunks of {chunks.length} steps{guess.told}")
        swept, most = Swept(), min(most, chunks.most)
        while True:
            # A first sweep from nothing known does not agree: what its gradients would need is not stored.
            futile = swept.sweeps == 0 and guess.known == 0 and most > 1
            carried = guess.adjoints if most == 1 else None
            limits = Limits(tolerance=self.tolerance, most=most, arriving=carried)
            with torch.set_grad_enabled(torch.is_grad_enabled() and not futile):
                report = _told_to(solution, chain, chunks, self.cache)
                walked, ends = walk_chunks(chain, chunks, boundaries, backward=limits, report=report)
            arrived = [chunks.arrived(end) for end in ends]
            swept.residual = mismatch(arrived, boundaries, ~chunks.is_first_C)
            swept.sweeps += 1
            if swept.sweeps == most or (swept.residual <= self.tolerance and not futile):
                break
            if not math.isfinite(swept.residual):
                return self._serially(chain, reason="a state is no number", work=swept.sweeps)
            boundaries = arrived
        solution.iterations, solution.residual = round(swept.sweeps), swept.residual
        solution.work = guess.work + swept.sweeps
        solution.reason += _no_number(swept.residual)
        remember(chain, chunks, arrived, cache=self.cache)
        return Solved(walked=walked, solution=solution)

    def has_chunks(self, layout: Layout) -> bool:
        """Whether such a batch is cut at all."""
        return self._cut(layout).most > 1

    def _cut(self, layout: Layout, memory: float = 0.0) -> Chunks:
        """As asked, or into chunks that are much longer than the net's memory, if those are not too few."""
        if self.num_chunks != "auto":
            longest = next((edge for edge in self.edges if edge >= layout.num_steps), layout.num_steps)
            return Chunks.of(layout, length=max(1, -(-longest // int(self.num_chunks))))
        most = min(MOST_ROWS // max(1, layout.num_rows), layout.num_steps // SHORTEST)
        fitting = int(layout.num_steps / max(1.0, ROOM * MARGIN * memory))
        return Chunks.cut(layout, max(1, min(most, max(fitting, FEWEST))))

    def _serially(self, chain: Chain, *, reason: str, work: float = 0.0) -> Solved:
        solution = Solution(solver="shooting", fell_back=True, reason=reason, work=work + 1.0)
        return Solved(walked=Serial().solve(chain).walked, solution=solution)

    def _from_certain(
        self, chain: Chain, chunks: Chunks, arrived: list[torch.Tensor], residual: float, *, work: float
    ) -> Solved:
        """The first chunk as it is, which is certain, and the rest step after step."""
        head, places = chunks.first(1)
        at = head.whole.num_steps
        rows = int(chain.layout.starts_T[at])
        solution = Solution(
            solver="shooting",
            iterations=2,
            fell_back=True,
            reason=f"after one sweep chunks of {chunks.length} steps differ by {residual:.1e}{_no_number(residual)}",
            work=work + 2.0,
        )
        before = dataclasses.replace(chain, layout=head.whole, x_PF=chain.x_PF[:rows])
        limits = Limits(tolerance=self.tolerance, most=head.most)
        known = [part[places.to(part.device)] for part in arrived]
        first, _ = walk_chunks(before, head, known, backward=limits, report=_told_to(solution))
        rest = chain.run(chain.layout.chunk(at, chain.layout.num_steps), chain.x_PF[rows:], first.states)
        walked = Walked(y_PF=torch.cat([first.y_PF, rest.y_PF]), states=rest.states)
        return Solved(walked=walked, solution=solution)

    def __repr__(self) -> str:
        usual = {
            "num_chunks": "auto",
            "tolerance": 1e-6,
            "max_sweeps": None,
            "cache": None,
            "edges": (),
            "persist": False,
        }
        said = [f"{name}={getattr(self, name)!r}" for name, value in usual.items() if getattr(self, name) != value]
        return f"Shooting({', '.join(said)})"


def _too_long(memory: Memory, chunks: Chunks) -> str:
    if math.isfinite(memory.steps):
        return f"the net remembers about {memory.steps:.0f} steps, and a chunk has {chunks.length}"
    return f"the net does not forget within a chunk of {chunks.length} steps"


def _no_number(residual: float) -> str:
    return "; a state is no number" if math.isnan(residual) else ""


def _told_to(
    solution: Solution, chain: Chain | None = None, chunks: Chunks | None = None, cache: TrajectoryCache | None = None
) -> Callable[[Swept], None]:
    def report(back: Swept) -> None:
        solution.backward_iterations, solution.backward_residual = math.ceil(back.sweeps), back.residual
        if chain is not None and chunks is not None:
            remember_adjoints(chain, chunks, back.arriving, cache=cache)

    return report
