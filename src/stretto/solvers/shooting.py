"""Multiple shooting, also known as parareal where a coarse model makes the guesses.

A sequence is cut into chunks, and all chunks run at once, each from a guess of the state before it:

    guess:        h_0          s_1          s_2          s_3
                   |            |            |            |
                [chunk 0]    [chunk 1]    [chunk 2]    [chunk 3]       one sweep
                   |            |            |            |
    ends:         e_0          e_1          e_2          e_3
                     e_0 = s_1?   e_1 = s_2?   e_2 = s_3?

The unknowns are the states at the boundaries. Inside a chunk every step is the cell's own, so the differences
e_c - s_{c+1} are the whole error. The next guess, with corrections M_c that approximate the Jacobian of chunk c, is

    s'_{c+1} = e_c + M_c (s'_c - s_c).

M = 0 is the plain sweep: information moves on by one chunk per sweep, and after k sweeps the first k chunks are exact,
whatever the net. M = Jacobian is Newton's method on the boundaries. Three modes are built on this:

    default            estimate how fast the net forgets, burn in, verify by one sweep, or run sequentially
    until_converged    sweep until chunks agree, with stronger corrections as they are needed
    max_sweeps         a fixed number of sweeps, with a `cache` from the boundary states of the last visit (warm start)

Literature: Lions, Maday, Turinici (2001), parareal; Gander and Vandewalle (2007), parareal as multiple shooting.

Shape legend: B sequences, C chunks of all sequences, D those that are not the first of their sequence, F features,
L steps of a chunk, P real steps of all sequences, R pairs of sweeps, S all units of a state, W full chunks.
"""

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal, final

import torch
from torch import nn

from stretto.checks import check_bool, check_float, check_int
from stretto.errors import StrettoError
from stretto.kernels import Layout
from stretto.solvers.adjoint import AdjointStats, ReverseSweeps, differentiable_chunks
from stretto.solvers.backoff import Backoff, BackoffKey, backoff_key
from stretto.solvers.base import (
    AbstractSolver,
    Problem,
    Result,
    Solution,
    fall_back,
    is_finite,
    residual_norm,
    why_incomparable,
)
from stretto.solvers.chunks import Chunks
from stretto.state import flatten, pack, unpack

MAX_KERNEL_ROWS: Final = 32
"""Rows that a kernel runs about as fast as one: "auto" cuts a batch into so many chunks."""
MIN_CHUNK_STEPS: Final = 64
"""The shortest chunk that "auto" makes."""
MIN_CHUNKS: Final = 4
"""Fewer chunks than this do not pay."""
BURN_IN_MARGIN: Final = 1.25
"""How much longer to burn in than the estimated forgetting time."""
MIN_CHUNK_PER_BURN_IN: Final = 2.0
"""How much longer than its burn-in a chunk should be."""
PROBE_SHARE: Final = 8
"""A probe runs one in so many steps of a chunk."""
MAX_CACHE_BYTES: Final = 1 << 30
MAX_SECANT_PAIRS: Final = 8
MIN_SECANT_SIZE: Final = 1e-3
"""Directions this much shorter than the longest hold rounding errors only."""
PATIENT_SWEEPS: Final = 2.0
"""No stronger correction while the last sweep's rate promises convergence within so many sweeps."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheKey:
    """Whose boundary states: the layer and direction, the sequence, and the length of its chunks."""

    layer: str
    sample_id: int
    chunk_length: int


@final
class TrajectoryCache:
    """Boundary states of each sequence from its last visit, from which the next visit starts.

    It holds one state per chunk of each sequence, for each layer, direction and length of chunks. When it is full, the
    least recently used are dropped.

    Args:
        max_bytes: How much to hold at most.
        adjoints: Whether to keep the gradients at the boundaries too: a backward pass then starts from the gradients
            that arrived at the end of each chunk the last time.
    """

    def __init__(self, *, max_bytes: int = MAX_CACHE_BYTES, adjoints: bool = False) -> None:
        self.max_bytes = check_int(max_bytes, name="max_bytes", owner="TrajectoryCache")
        self.adjoints = check_bool(adjoints, name="adjoints", owner="TrajectoryCache")
        self._held: OrderedDict[CacheKey, list[torch.Tensor]] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: CacheKey) -> list[torch.Tensor] | None:
        """The states (D, ...) at the boundaries, one tensor per part of the state; None if they are not known."""
        found = self._held.get(key)
        if found is not None:
            self._held.move_to_end(key)
        return found

    def put(self, key: CacheKey, states: Sequence[torch.Tensor]) -> None:
        """Keep a copy of the states at the boundaries."""
        self._drop(key)
        self._held[key] = kept = [state.detach().clone() for state in states]
        self.num_bytes += _bytes_of(kept)
        while self.num_bytes > self.max_bytes:
            self._drop(next(iter(self._held)))

    def clear(self) -> None:
        """Drop everything."""
        self._held.clear()
        self.num_bytes = 0

    def _drop(self, key: CacheKey) -> None:
        self.num_bytes -= _bytes_of(self._held.pop(key, []))

    def state_dict(self) -> dict[str, Any]:
        """Everything that is held, least recently used first, for a checkpoint."""
        return {
            "keys": [dataclasses.asdict(key) for key in self._held],
            "states": [list(states) for states in self._held.values()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.clear()
        for key, states in zip(state["keys"], state["states"], strict=True):
            self.put(CacheKey(**key), states)


def _bytes_of(states: Sequence[torch.Tensor]) -> int:
    return sum(state.numel() * state.element_size() for state in states)


@final
class Shooting(AbstractSolver):
    """Runs chunks of time at once, and sweeps until they agree at their boundaries.

    By default the result equals that of a sequential run within `tolerance`. A short probe estimates how many steps the
    net takes to forget where it started. If that is less than a chunk, the boundary states are found by burning in, and
    a single sweep verifies them; if it is more, the net runs sequentially, and `Solution` says so. With `max_sweeps`,
    so many sweeps are made and `Solution.residual` reports what is left; gradients then pass as many boundaries as
    there are sweeps.

    Args:
        num_chunks: Chunks of the longest sequence; "auto" makes as many as fill the rows of a kernel.
        tolerance: The difference at the boundaries that is small enough, relative to states above 1.
        max_sweeps: Sweeps to make at most; by default until the tolerance is reached.
        cache: Boundary states of each sequence's last visit to start from; needs `sample_ids`.
        edges: Ascending lengths, such as the edges of buckets, to which the longest sequence is rounded up before it is
            cut. A sequence is then cut the same way in every batch of its bucket, and found again in the cache.
        until_converged: However slowly the net forgets, sweep until chunks agree, with stronger corrections of the
            boundaries as they are needed, instead of running sequentially.
    """

    def __init__(
        self,
        *,
        num_chunks: int | Literal["auto"] = "auto",
        tolerance: float = 1e-6,
        max_sweeps: int | None = None,
        cache: TrajectoryCache | None = None,
        edges: Sequence[int] = (),
        until_converged: bool = False,
    ) -> None:
        if cache is not None and not isinstance(cache, TrajectoryCache):
            raise StrettoError(f"cache={cache!r} is no TrajectoryCache", fix="Give a TrajectoryCache, or leave it out.")
        self.num_chunks: int | Literal["auto"] = "auto"
        if num_chunks != "auto":
            self.num_chunks = check_int(num_chunks, name="num_chunks", owner="Shooting")
        self.tolerance = check_float(tolerance, name="tolerance", above=0.0, owner="Shooting")
        self.max_sweeps = None if max_sweeps is None else check_int(max_sweeps, name="max_sweeps", owner="Shooting")
        self.cache = cache
        self.edges = tuple(edges)
        self.until_converged = check_bool(until_converged, name="until_converged", owner="Shooting")
        self._backoffs: dict[BackoffKey, Backoff] = {}
        self._forgetting: dict[BackoffKey, float] = {}

    def solve(self, problem: Problem) -> Result:
        """Find the boundary states, then run once with gradients."""
        if self.cache is not None and problem.sample_ids is None:
            raise StrettoError(
                "a trajectory cache was given and the sequences have no ids",
                fix="Call rnn(x, lengths=..., sample_ids=ids), with an integer for each sequence.",
            )
        chunks, unfit = self._cut(problem.layout), why_incomparable(problem)
        if unfit or chunks.max_per_sequence <= 1:
            return fall_back(problem, solver="shooting", reason=unfit or "there is only one chunk")
        if self.max_sweeps is not None:
            return self._sweep_at_most(problem, chunks, self.max_sweeps)
        if self.until_converged:
            return self._sweep_until_converged(problem, chunks)
        return self._burn_in_and_verify(problem, chunks)

    # --- default: estimate, burn in, verify --------------------------------------------------------------------------

    def _burn_in_and_verify(self, problem: Problem, chunks: Chunks) -> Result:
        key = backoff_key(problem, chunks.max_per_sequence, chunks.length.bit_length())
        backoff = self._backoffs.setdefault(key, Backoff())
        skip = backoff.should_skip()
        if skip:
            return fall_back(problem, solver="shooting", reason=skip)
        known, work = self._forgetting.get(key), 0.0
        if known is None:
            steps, cost = estimate_forgetting(
                problem, chunks, steps=max(1, chunks.length // PROBE_SHARE), tolerance=self.tolerance
            )
            work += cost / max(1, problem.layout.total)
            if BURN_IN_MARGIN * steps > self._cut(problem.layout, steps).length:
                reason = f"the net does not forget within a chunk of {chunks.length} steps"
                if math.isfinite(steps):
                    reason = f"the net remembers about {steps:.0f} steps, and a chunk has {chunks.length}"
                result = fall_back(problem, solver="shooting", reason=reason, work=work)
                backoff.record(result)
                return result
            self._forgetting[key] = steps
        forgetting = self._forgetting[key]
        result = self._verify(problem, self._cut(problem.layout, forgetting), forgetting, work)
        if result.solution.fell_back:
            del self._forgetting[key]
        # An old estimate that turns out too short is not a failure: the next call estimates again.
        if known is None or not result.solution.fell_back:
            backoff.record(result)
        return result

    def _verify(self, problem: Problem, chunks: Chunks, forgetting: float, work: float) -> Result:
        """One sweep from states that were burnt in, or a sequential run where it disagrees."""
        burn_in = max(1, min(chunks.length, math.ceil(BURN_IN_MARGIN * forgetting)))
        guess = _guess(problem, chunks, cache=None, burn_in=burn_in)
        adjoint = ReverseSweeps(tolerance=self.tolerance, max_sweeps=chunks.max_per_sequence, lead_steps=burn_in)
        source = f", burnt in over {burn_in} steps"
        result = self._sweep(problem, chunks, guess, adjoint, max_sweeps=1, source=source, work=work + guess.work)
        residual = result.solution.residual
        if residual <= self.tolerance:
            return result
        reason = f"after one sweep chunks of {chunks.length} steps differ by {residual:.1e}{_nonfinite(residual)}"
        return fall_back(problem, solver="shooting", reason=reason, iterations=1, work=result.solution.work)

    # --- until_converged ---------------------------------------------------------------------------------------------

    def _sweep_until_converged(self, problem: Problem, chunks: Chunks) -> Result:
        sweeps = CorrectedSweeps(problem, chunks, tolerance=self.tolerance)
        start, ends, residual, work = _best_guess(problem, chunks, sweeps, cache=self.cache, tolerance=self.tolerance)
        reason = f"{chunks.max_per_sequence} chunks of {chunks.length} steps{start.source}"
        solution = Solution(solver="shooting", reason=reason)
        adjoint = ReverseSweeps(tolerance=self.tolerance, max_sweeps=chunks.max_per_sequence)
        boundaries = sweeps.next_boundaries(start.states, ends, residual)
        done = 1
        while True:
            done += 1
            is_last = sweeps.sweeps_needed <= 1.0 or done >= chunks.max_per_sequence
            if is_last:
                y_PF, states, ends = differentiable_chunks(
                    problem, chunks, boundaries, adjoint=adjoint, solution=solution
                )
            else:
                ends = sweeps.run(boundaries)
            arrived = chunks.previous_ends(ends)
            residual = chunks.residual(arrived, boundaries)
            if is_last and (residual <= self.tolerance or done >= chunks.max_per_sequence):
                break
            boundaries = sweeps.next_boundaries(boundaries, ends, residual)
        solution.iterations, solution.residual, solution.work = done, residual, work + done - 1
        if sweeps.correction is not None:
            solution.reason += f", corrected by {sweeps.correction.name}"
        solution.reason += _nonfinite(residual)
        _store_cached(problem, chunks, arrived, cache=self.cache)
        return Result(y_PF=y_PF, states=states, solution=solution)

    # --- max_sweeps --------------------------------------------------------------------------------------------------

    def _sweep_at_most(self, problem: Problem, chunks: Chunks, max_sweeps: int) -> Result:
        # Without a cache, nothing is burnt in: the sweeps themselves are what was asked for.
        burn_in = 0 if self.cache is None else chunks.length // PROBE_SHARE
        guess = _guess(problem, chunks, cache=self.cache, burn_in=burn_in)
        max_sweeps = min(max_sweeps, chunks.max_per_sequence)
        adjoint = ReverseSweeps(
            tolerance=self.tolerance, max_sweeps=max_sweeps, arriving=guess.adjoints if max_sweeps == 1 else None
        )
        return self._sweep(problem, chunks, guess, adjoint, max_sweeps=max_sweeps, source=guess.source, work=guess.work)

    # --- shared ------------------------------------------------------------------------------------------------------

    def _sweep(
        self,
        problem: Problem,
        chunks: Chunks,
        guess: "_Guess",
        adjoint: ReverseSweeps,
        *,
        max_sweeps: int,
        source: str,
        work: float,
    ) -> Result:
        """Plain sweeps from a guess, which has cost `work`, until chunks agree or there were so many."""
        solution = Solution(
            solver="shooting", reason=f"{chunks.max_per_sequence} chunks of {chunks.length} steps{source}"
        )

        def remember_adjoints(stats: AdjointStats) -> None:
            if guess.adjoints is not None:
                _store_cached(problem, chunks, stats.arriving, cache=self.cache, adjoint=True)

        boundaries, done = guess.states, 0
        while True:
            # A first sweep from initial states will not agree, so what its gradients would need is not stored.
            is_futile = done == 0 and guess.known == 0 and max_sweeps > 1
            with torch.set_grad_enabled(torch.is_grad_enabled() and not is_futile):
                y_PF, states, ends = differentiable_chunks(
                    problem, chunks, boundaries, adjoint=adjoint, solution=solution, on_backward=remember_adjoints
                )
            arrived = chunks.previous_ends(ends)
            residual = chunks.residual(arrived, boundaries)
            done += 1
            if done == max_sweeps or (residual <= self.tolerance and not is_futile):
                break
            if not math.isfinite(residual):
                return fall_back(problem, solver="shooting", reason="a state is NaN or inf", work=done)
            boundaries = arrived
        solution.iterations, solution.residual, solution.work = done, residual, work + done
        solution.reason += _nonfinite(residual)
        if self.max_sweeps is not None or residual <= self.tolerance:
            _store_cached(problem, chunks, arrived, cache=self.cache)
        return Result(y_PF=y_PF, states=states, solution=solution)

    def has_chunks(self, layout: Layout) -> bool:
        """Whether a batch of this layout is cut at all."""
        return self._cut(layout).max_per_sequence > 1

    def _cut(self, layout: Layout, forgetting: float = 0.0) -> Chunks:
        """As asked; or, for "auto", into chunks much longer than the forgetting time, if those are not too few."""
        if self.num_chunks != "auto":
            longest = next((edge for edge in self.edges if edge >= layout.num_steps), layout.num_steps)
            return Chunks.of_length(layout, max(1, -(-longest // int(self.num_chunks))))
        most = min(MAX_KERNEL_ROWS // max(1, layout.num_rows), layout.num_steps // MIN_CHUNK_STEPS)
        fitting = int(layout.num_steps / max(1.0, MIN_CHUNK_PER_BURN_IN * BURN_IN_MARGIN * forgetting))
        return Chunks.cut(layout, max(1, min(most, max(fitting, MIN_CHUNKS))))


def _nonfinite(residual: float) -> str:
    return "; a state is NaN or inf" if math.isnan(residual) else ""


# --- how long the net remembers --------------------------------------------------------------------------------------


def burn_in_states(
    problem: Problem, chunks: Chunks, steps: int, states: Sequence[torch.Tensor], *, chunks_D: torch.Tensor
) -> list[torch.Tensor]:
    """States (D, ...) before some chunks, after running the last steps before each from given states (D, ...)."""
    with torch.no_grad():
        rows_P = chunks.rows_before(chunks_D, steps=steps).to(problem.x_PF.device)
        layout = Layout.even(num_steps=steps, num_rows=len(chunks_D))
        return problem.run(layout, problem.x_PF.index_select(0, rows_P), states)[1]


def estimate_forgetting(problem: Problem, chunks: Chunks, *, steps: int, tolerance: float) -> tuple[float, int]:
    """Run the last `steps` before each boundary from two different states, and measure how fast the two runs meet.

        gap    |x                        e^(-t / memory)
               |     x                   measured at the start, in the middle and at the end of the probe,
               |            x - - - -    extrapolated down to the tolerance
               +------------|----------> steps

    Returns:
        The forgetting time: steps after which the two agree within the tolerance, extrapolated from the rate at which
        their difference shrinks in the last half of the probe; infinite if it does not shrink. And the steps computed,
        over all boundaries.
    """
    every_D = chunks.sequence_C[chunks.later_D]
    one = [state.detach().index_select(0, every_D.to(state.device)) for state in problem.states]
    # A state that the net reached by itself at another boundary is a plausible start.
    other = [part.roll(1, 0) for part in burn_in_states(problem, chunks, steps, one, chunks_D=chunks.later_D)]
    count = len(every_D)
    gaps = [residual_norm(one, other)]
    half = max(1, steps // 2)
    # Both runs side by side, as rows of one batch.
    rows_TD = chunks.rows_before(chunks.later_D, steps=steps).reshape(steps, count).repeat(1, 2)
    both = [torch.cat(pair) for pair in zip(one, other, strict=True)]
    with torch.no_grad():
        for first, last in ((0, half), (half, steps)):
            if first == last:
                continue
            rows_P = rows_TD[first:last].reshape(-1).to(problem.x_PF.device)
            layout = Layout.even(num_steps=last - first, num_rows=2 * count)
            _, both = problem.run(layout, problem.x_PF.index_select(0, rows_P), both)
            gaps.append(residual_norm([part[:count] for part in both], [part[count:] for part in both]))
    cost = 3 * steps * count
    if not all(map(math.isfinite, gaps)):
        return math.inf, cost
    if gaps[-1] == 0.0:
        return float(half if gaps[-2] == 0.0 else steps), cost
    if gaps[-1] <= tolerance:
        return float(steps), cost
    rate = (gaps[-1] / gaps[-2]) ** (1 / (steps - half or half)) if gaps[-2] else 0.0
    return steps + (math.inf if rate >= 1 else math.log(tolerance / gaps[-1]) / math.log(rate)), cost


# --- guesses of the boundary states ----------------------------------------------------------------------------------


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Guess:
    """A guess of the boundary states."""

    states: list[torch.Tensor]
    """Before each chunk (C, ...)."""
    adjoints: list[torch.Tensor] | None
    """Gradients that arrive at the end of each chunk (C, ...), if the cache keeps them."""
    known: int
    """Sequences of several chunks that were in the cache."""
    source: str
    """The same in words; empty without a cache."""
    work: float
    """Steps computed for it, as a multiple of the steps there are."""


def _guess(problem: Problem, chunks: Chunks, *, cache: TrajectoryCache | None, burn_in: int) -> _Guess:
    """From the cache if a sequence is in it; else by burning in so many steps; else the initial state."""
    states = chunks.repeat_initial([state.detach() for state in problem.states])
    known = _load_cached(problem, chunks, states, cache=cache)
    fresh_D = chunks.later_D[[int(chunks.sequence_C[place]) not in known for place in chunks.later_D]]
    work = 0.0
    if burn_in and len(fresh_D):
        initial = [part[fresh_D.to(part.device)] for part in states]
        found = burn_in_states(problem, chunks, burn_in, initial, chunks_D=fresh_D)
        for part, burnt in zip(states, found, strict=True):
            part[fresh_D.to(part.device)] = burnt
        work = burn_in * len(fresh_D) / max(1, problem.layout.total)
    source, adjoints = "", None
    if cache is not None:
        source = f", {len(known)} of {len(chunks.later_by_sequence)} sequences from where they were last time"
        if cache.adjoints:
            adjoints = [torch.zeros_like(state) for state in states]
            _load_cached(problem, chunks, adjoints, cache=cache, adjoint=True)
    return _Guess(states=states, adjoints=adjoints, known=len(known), source=source, work=work)


def _best_guess(
    problem: Problem, chunks: Chunks, sweeps: "CorrectedSweeps", *, cache: TrajectoryCache | None, tolerance: float
) -> tuple[_Guess, list[torch.Tensor], float, float]:
    """Of the cached, the burnt-in and the initial states, those with the smallest residual after one sweep.

    Returns:
        The guess, the ends of its sweep (C, ...), what the two differ by, and the work of all guesses and their sweeps.
    """
    burn_in = chunks.length // PROBE_SHARE
    sources: list[tuple[TrajectoryCache | None, int]] = [] if cache is None else [(cache, burn_in)]
    sources += [(None, burn_in), (None, 0)] if burn_in else [(None, 0)]
    tried: list[tuple[_Guess, list[torch.Tensor], float]] = []
    work = 0.0
    for held, steps in sources:
        guess = _guess(problem, chunks, cache=held, burn_in=steps)
        work += guess.work
        if held is not None and not guess.known:
            continue
        ends = sweeps.run(guess.states)
        work += 1.0
        residual = chunks.residual(chunks.previous_ends(ends), guess.states)
        tried.append((guess, ends, residual))
        if residual <= tolerance:
            break
    return *min(tried, key=lambda start: (math.isnan(start[2]), start[2])), work


def _cache_entries(problem: Problem, chunks: Chunks, *, adjoint: bool) -> Iterator[tuple[int, CacheKey, torch.Tensor]]:
    """Each sequence of several chunks, its key, and the chunks whose states or gradients a cache holds.

    That is one row per boundary. The states there belong to the chunk after it, the gradients to the chunk before.
    """
    assert problem.sample_ids is not None
    layer = f"{problem.name} adjoint" if adjoint else problem.name
    for sequence, later_D in chunks.later_by_sequence.items():
        key = CacheKey(layer=layer, sample_id=problem.sample_ids[sequence], chunk_length=chunks.length)
        yield sequence, key, chunks.previous_C[later_D] if adjoint else later_D


def _store_cached(
    problem: Problem,
    chunks: Chunks,
    parts: Sequence[torch.Tensor],
    *,
    cache: TrajectoryCache | None,
    adjoint: bool = False,
) -> None:
    """Cache the states or gradients (C, ...) at the boundaries of each sequence, unless one is NaN or inf."""
    if cache is None:
        return
    for _, key, rows_D in _cache_entries(problem, chunks, adjoint=adjoint):
        held = [part[rows_D.to(part.device)] for part in parts]
        if is_finite(held):
            cache.put(key, held)


def _load_cached(
    problem: Problem,
    chunks: Chunks,
    parts: Sequence[torch.Tensor],
    *,
    cache: TrajectoryCache | None,
    adjoint: bool = False,
) -> frozenset[int]:
    """Write what is cached of each sequence into `parts` (C, ...); the sequences that were found."""
    found = set()
    if cache is None:
        return frozenset()
    for sequence, key, rows_D in _cache_entries(problem, chunks, adjoint=adjoint):
        held = cache.get(key)
        shapes = [(len(rows_D), *part.shape[1:]) for part in parts]
        if held is not None and [part.shape for part in held] == shapes:
            found.add(sequence)
            for part, row in zip(parts, held, strict=True):
                part[rows_D.to(part.device)] = row.to(part)
    return frozenset(found)


# --- sweeps with corrections -----------------------------------------------------------------------------------------


@final
class CorrectedSweeps:
    """Sweeps over chunks, each with the weakest correction that is expected to do.

    Plain sweeps come first. While the measured rate of convergence calls for more than a few further sweeps, stronger
    corrections join in: products of the cell's gates, then secants of the sweeps so far, and dense Jacobians where a
    state has fewer units than there are sweeps to save.
    """

    def __init__(self, problem: Problem, chunks: Chunks, *, tolerance: float) -> None:
        self._problem, self._chunks, self._tolerance = problem, chunks, tolerance
        self._residuals: list[float] = []
        self.correction: _Correction | None = None
        self._stronger: list[_Correction] = []
        dtypes = {part.dtype for part in problem.states}
        if len(dtypes) == 1 and next(iter(dtypes)).is_floating_point:
            gates = [_GateProducts()] if hasattr(problem.variants.cell, "retention") else []
            self._stronger = [*gates, _Secants(gates[0] if gates else _Correction()), _DenseJacobians()]

    @property
    def sweeps_needed(self) -> float:
        """Sweeps still needed, at the rate of the last one."""
        if self._residuals and self._residuals[-1] <= self._tolerance:
            return 0.0
        if len(self._residuals) < 2:
            return math.inf
        before, now = self._residuals[-2:]
        rate = now / before
        return math.log(self._tolerance / now) / math.log(rate) if 0 < rate < 1 else math.inf

    def run(self, boundaries: list[torch.Tensor]) -> list[torch.Tensor]:
        """The states after each chunk (C, ...) from those before; no gradient flows."""
        starts = self._chunks.starts([state.detach() for state in self._problem.states], boundaries)
        if self.correction is None:
            return _run_chunks(self._problem, self._chunks, starts)
        return unpack(self.correction.run(self._problem, self._chunks, pack(starts)), starts)

    def next_boundaries(
        self, boundaries: list[torch.Tensor], ends: list[torch.Tensor], residual: float
    ) -> list[torch.Tensor]:
        """The states before each chunk for the next sweep; also chooses its correction."""
        self._residuals.append(residual)
        if self.correction is None:
            fresh = self._chunks.previous_ends(ends)
        else:
            starts_CS, ends_CS = pack(boundaries), pack(ends)
            self.correction.update(starts_CS, ends_CS)
            fresh = unpack(self.correction.next_starts(self._chunks, starts_CS, ends_CS), boundaries)
        is_slow = len(self._residuals) > 1 and self.sweeps_needed > PATIENT_SWEEPS
        if is_slow and self._stronger and self._pays(self._stronger[0]):
            self.correction = self._stronger.pop(0)
        return fresh

    def _pays(self, correction: "_Correction") -> bool:
        """Dense Jacobians cost one sweep per unit of the state."""
        left = self._chunks.max_per_sequence - len(self._residuals)
        size = sum(state[0].numel() for state in self._problem.states)
        return not isinstance(correction, _DenseJacobians) or size < left


def _run_chunks(problem: Problem, chunks: Chunks, starts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        return problem.run(chunks.layout, chunks.to_chunks(problem.x_PF), starts)[1]


class _Correction:
    """An approximation M of the chunks' Jacobians, zero here: runs all chunks, and says where to start next."""

    name: str

    def run(self, problem: Problem, chunks: Chunks, starts_CS: torch.Tensor) -> torch.Tensor:
        """The states (C, S) after each chunk; no gradient flows."""
        return pack(_run_chunks(problem, chunks, unpack(starts_CS, problem.states)))

    def update(self, starts_CS: torch.Tensor, ends_CS: torch.Tensor) -> None:
        """Update M by a sweep's starts and ends."""

    def multiply(self, places: torch.Tensor, moved_S: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """M times a change of the starts (.., S) of some chunks: the change of their ends."""
        return torch.zeros_like(moved_S)

    def next_starts(self, chunks: Chunks, starts_CS: torch.Tensor, ends_CS: torch.Tensor) -> torch.Tensor:
        """The states before each chunk for the next sweep, chunk by chunk; first chunks keep theirs."""
        fresh_CS = starts_CS.clone()
        for number in range(1, chunks.max_per_sequence):
            places = chunks.numbered(number)
            previous = chunks.previous_C[places]
            change = self.multiply(previous, fresh_CS[previous] - starts_CS[previous])
            # A run from a wrong state may overflow where that from the right one does not.
            fresh_CS[places] = ends_CS[previous] + change.nan_to_num(0.0, 0.0, 0.0)
        return fresh_CS


class _StepWithRetention(nn.Module):
    """A cell whose output is what it retains, unit by unit."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x_t: torch.Tensor, state: object) -> tuple[torch.Tensor, object]:
        _, after = self.cell(x_t, state)
        retained = self.cell.retention(x_t, state)  # type: ignore[operator]
        return pack(flatten(retained)), after


@final
class _GateProducts(_Correction):
    """A diagonal M: the product over a chunk of what each step retains, for cells that have a `retention`."""

    name = "products of gates"

    def __init__(self) -> None:
        self._product_CS = torch.empty(0)

    def run(self, problem: Problem, chunks: Chunks, starts_CS: torch.Tensor) -> torch.Tensor:
        layout, x_PF, states = chunks.layout, chunks.to_chunks(problem.x_PF), unpack(starts_CS, problem.states)
        with torch.no_grad():
            gates_PS, ends = problem.variants.run(
                "gates", _StepWithRetention, layout, x_PF, states, parameters=problem.parameters
            )
        # Only a full chunk is followed by another, and full chunks come first in every step.
        full = int((layout.lengths_B == chunks.length).sum())
        rows_LW = torch.from_numpy(layout.starts_T[: chunks.length, None]) + torch.arange(full, device="cpu")
        picked_LWS = gates_PS.index_select(0, rows_LW.reshape(-1).to(gates_PS.device)).reshape(chunks.length, full, -1)
        self._product_CS = torch.zeros_like(starts_CS)
        self._product_CS[:full] = picked_LWS.prod(0)
        return pack(ends)

    def multiply(self, places: torch.Tensor, moved_S: torch.Tensor) -> torch.Tensor:
        # Zero before the first run.
        return self._product_CS[places] * moved_S if len(self._product_CS) else torch.zeros_like(moved_S)


@final
class _Secants(_Correction):
    """A low-rank M, as in Broyden's method: how ends moved when starts moved between the last sweeps.

    In all other directions M is that of another correction, `base`.
    """

    name = "secants of earlier sweeps"

    def __init__(self, base: _Correction) -> None:
        self._base = base
        self._starts: list[torch.Tensor] = []
        self._ends: list[torch.Tensor] = []
        self._directions_CSR: torch.Tensor | None = None
        self._responses_CSR = torch.empty(0)

    def run(self, problem: Problem, chunks: Chunks, starts_CS: torch.Tensor) -> torch.Tensor:
        return self._base.run(problem, chunks, starts_CS)

    def update(self, starts_CS: torch.Tensor, ends_CS: torch.Tensor) -> None:
        if not is_finite([starts_CS, ends_CS]):
            return
        self._starts = [*self._starts, starts_CS][-1 - MAX_SECANT_PAIRS :]
        self._ends = [*self._ends, ends_CS][-1 - MAX_SECANT_PAIRS :]
        if len(self._starts) > 1:
            moved_CSR = torch.stack([starts_CS - old for old in self._starts[:-1]], dim=-1)
            response_CSR = torch.stack([ends_CS - old for old in self._ends[:-1]], dim=-1)
            self._fit(moved_CSR, response_CSR)

    def _fit(self, moved_CSR: torch.Tensor, response_CSR: torch.Tensor) -> None:
        """Orthonormal directions of the moves, and the response to a unit move along each, beyond the base's."""
        left_CSR, size_CR, right_CRR = torch.linalg.svd(moved_CSR, full_matrices=False)
        known_CR = size_CR > MIN_SECANT_SIZE * size_CR[:, :1].clamp_min(torch.finfo(size_CR.dtype).tiny)
        inverse_CR = torch.where(known_CR, 1 / size_CR, 0.0)
        combine_CRR = right_CRR.mT * inverse_CR[:, None, :]
        self._directions_CSR = left_CSR * known_CR[:, None, :]
        every = torch.arange(len(moved_CSR), device=moved_CSR.device)
        base_CSR = torch.stack([self._base.multiply(every, part) for part in moved_CSR.unbind(-1)], dim=-1)
        self._responses_CSR = (response_CSR - base_CSR) @ combine_CRR

    def multiply(self, places: torch.Tensor, moved_S: torch.Tensor) -> torch.Tensor:
        change = self._base.multiply(places, moved_S)
        if self._directions_CSR is None:
            return change
        along = self._directions_CSR[places].mT @ moved_S[..., None]
        return change + (self._responses_CSR[places] @ along)[..., 0]


@final
class _DenseJacobians(_Correction):
    """The full Jacobian of each chunk, by finite differences: one more run per unit of the state."""

    name = "dense Jacobians"

    def __init__(self) -> None:
        self._jacobian_CSS = torch.empty(0)

    def run(self, problem: Problem, chunks: Chunks, starts_CS: torch.Tensor) -> torch.Tensor:
        ends_CS = super().run(problem, chunks, starts_CS)
        count = starts_CS.shape[1]
        step = torch.finfo(starts_CS.dtype).eps ** 0.5 * max(1.0, float(starts_CS.abs().max()))
        self._jacobian_CSS = torch.empty(len(starts_CS), count, count, dtype=starts_CS.dtype, device=starts_CS.device)
        for unit in range(count):
            nudged_CS = starts_CS.clone()
            nudged_CS[:, unit] += step
            self._jacobian_CSS[:, :, unit] = (super().run(problem, chunks, nudged_CS) - ends_CS) / step
        return ends_CS

    def multiply(self, places: torch.Tensor, moved_S: torch.Tensor) -> torch.Tensor:
        return (self._jacobian_CSS[places] @ moved_S[..., None])[..., 0]
