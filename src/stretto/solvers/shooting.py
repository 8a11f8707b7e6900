"""Multiple shooting: all chunks of a sequence walk at once, each from what is assumed of the one before.

The unknowns are the states at the boundaries of chunks alone. What the walks disagree about there is the whole error:
inside a chunk every step is the cell's own. After k sweeps the first k chunks are right, whatever the net: it ends.

Shape legend: B sequences, C chunks of all sequences.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Final, Literal, final

import torch

from stretto.errors import StrettoError
from stretto.solvers.chunks import Chunks
from stretto.solvers.serial import Serial
from stretto.solvers.solver import AbstractSolver, Chain, Solution, Solved
from stretto.solvers.sweep import Limits, Swept, mismatch, walk_chunks
from stretto.solvers.trajectory_cache import Place, TrajectoryCache

MOST_ROWS: Final = 32
SHORTEST: Final = 64
TRIED: Final = 3
"""Sweeps before a net that does not forget is given up."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """How many sequences were seen before, and how to say so."""

    count: int = 0
    told: str = ""


@final
class Shooting(AbstractSolver):
    """Walks chunks of time at once, and sweeps until they agree at their boundaries.

    With the default `max_sweeps` the result is that of walking step after step, within `tolerance`: a net whose memory
    is longer than its chunks, so that sweeps would not pay, is walked step after step, and `Solution` says so. With
    `max_sweeps` given, that many sweeps are made and what is left is told in `Solution.residual`; gradients pass as
    many boundaries as there are sweeps.

    Args:
        num_chunks: Chunks of the longest sequence; "auto" takes as many as fill the rows of a kernel.
        tolerance: The mismatch at the boundaries that is small enough, relative to states above 1.
        max_sweeps: Sweeps to make at most; by default until the tolerance is reached.
        cache: Where sequences were when they were last seen; needs `sample_ids`.
    """

    def __init__(
        self,
        *,
        num_chunks: int | Literal["auto"] = "auto",
        tolerance: float = 1e-6,
        max_sweeps: int | None = None,
        cache: TrajectoryCache | None = None,
    ) -> None:
        if num_chunks != "auto" and (not isinstance(num_chunks, int) or num_chunks < 1):
            raise StrettoError(f"num_chunks is {num_chunks!r}", fix='Give a whole number from 1 on, or "auto".')
        if not (isinstance(tolerance, (int, float)) and 0 < tolerance < math.inf):
            raise StrettoError(f"tolerance is {tolerance!r}", fix="Give a number above 0, such as 1e-6.")
        if max_sweeps is not None and (not isinstance(max_sweeps, int) or max_sweeps < 1):
            raise StrettoError(f"max_sweeps is {max_sweeps!r}", fix="Give a whole number from 1 on, or None.")
        self.num_chunks: int | Literal["auto"] = num_chunks
        self.tolerance = float(tolerance)
        self.max_sweeps = max_sweeps
        self.cache = cache

    def solve(self, chain: Chain) -> Solved:
        """Sweep until chunks agree; gradients flow through the last sweep."""
        chunks = Chunks.cut(chain.layout, self._count(chain))
        if chunks.most <= 1:
            return self._serially(chain, Swept(), reason="there is but one chunk")
        most = min(chunks.most, self.max_sweeps or chunks.most)
        boundaries, known = self._assumed(chain, chunks)
        solution = Solution(solver="shooting", reason=f"{chunks.most} chunks of {chunks.length} steps{known.told}")

        def report(back: Swept) -> None:
            solution.backward_iterations, solution.backward_residual = back.sweeps, back.residual

        swept = Swept(residual=math.inf)
        while True:
            # A first sweep from nothing known does not agree: what its gradients would need is not stored.
            futile = swept.sweeps == 0 and known.count == 0 and most > 1
            with torch.set_grad_enabled(torch.is_grad_enabled() and not futile):
                walked, ends = walk_chunks(
                    chain, chunks, boundaries, backward=Limits(tolerance=self.tolerance, most=most), report=report
                )
            arrived = [chunks.arrived(end) for end in ends]
            before, swept.residual = swept.residual, mismatch(arrived, boundaries, ~chunks.is_first_C)
            swept.sweeps += 1
            if swept.sweeps == most or (swept.residual <= self.tolerance and not futile):
                break
            boundaries, given_up = arrived, self._given_up(swept, before, chunks)
            if given_up:
                return self._serially(chain, swept, reason=given_up)
        solution.iterations, solution.residual, solution.work = swept.sweeps, swept.residual, float(swept.sweeps)
        self._remember(chain, chunks, arrived)
        return Solved(walked=walked, solution=solution)

    def _count(self, chain: Chain) -> int:
        if self.num_chunks != "auto":
            return int(self.num_chunks)
        return max(1, min(MOST_ROWS // max(1, chain.layout.num_rows), chain.layout.num_steps // SHORTEST))

    def _given_up(self, swept: Swept, before: float, chunks: Chunks) -> str:
        """Why to walk step after step instead; empty if sweeps are worth while."""
        if not math.isfinite(swept.residual):
            return "a state is no number"
        if self.max_sweeps is not None or swept.sweeps < TRIED or swept.residual <= self.tolerance:
            return ""
        rate = swept.residual / before if before else 0.0
        more = math.inf if rate >= 1 else math.log(self.tolerance / swept.residual) / math.log(max(rate, 1e-30))
        if swept.sweeps + more < chunks.most / 2:
            return ""
        left = f"each sweep leaves {rate:.2f} of the gap"
        return f"chunks of {chunks.length} steps are shorter than the net's memory: {left}"

    def _serially(self, chain: Chain, swept: Swept, *, reason: str) -> Solved:
        walked = Serial().solve(chain).walked
        solution = Solution(
            solver="shooting",
            iterations=swept.sweeps + 1,
            fell_back=True,
            reason=reason,
            work=swept.sweeps + 1.0,
        )
        return Solved(walked=walked, solution=solution)

    def _assumed(self, chain: Chain, chunks: Chunks) -> tuple[list[torch.Tensor], "_Known"]:
        """States before each chunk: where the sequence was last time, or where it began."""
        boundaries = [state.detach().index_select(0, chunks.sequence_C.to(state.device)) for state in chain.states]
        if self.cache is None:
            return boundaries, _Known()
        if chain.sample_ids is None:
            raise StrettoError(
                "a cache of trajectories was given and sequences are not known by any number",
                fix="Call rnn(x, lengths=..., sample_ids=ids), with one whole number for each sequence.",
            )
        known = 0
        for sequence, places_D in chunks.inner.items():
            held = self.cache.get(self._place(chain, chunks, sequence))
            if held is None or [part.shape[1:] for part in held] != [part.shape[1:] for part in boundaries]:
                continue
            if len(held[0]) != len(places_D):
                continue
            known += 1
            for boundary, part in zip(boundaries, held, strict=True):
                boundary[places_D] = part.to(boundary)
        told = f", {known} of {chain.layout.num_going} sequences from where they were last time"
        return boundaries, _Known(count=known, told=told)

    def _remember(self, chain: Chain, chunks: Chunks, arrived: Sequence[torch.Tensor]) -> None:
        if self.cache is not None:
            for sequence, places_D in chunks.inner.items():
                place = self._place(chain, chunks, sequence)
                self.cache.put(place, [part[places_D.to(part.device)] for part in arrived])

    @staticmethod
    def _place(chain: Chain, chunks: Chunks, sequence: int) -> Place:
        assert chain.sample_ids is not None
        return Place(chain=chain.name, sample_id=chain.sample_ids[sequence], length=chunks.length)

    def __repr__(self) -> str:
        usual = {"num_chunks": "auto", "tolerance": 1e-6, "max_sweeps": None, "cache": None}
        said = [f"{name}={getattr(self, name)!r}" for name, value in usual.items() if getattr(self, name) != value]
        return f"Shooting({', '.join(said)})"
