"""Settings of tasks whose net is a `stretto.RNN`: who walks through time."""

import dataclasses
from typing import Annotated, Final, Literal

from pydantic import Field

from stretto.errors import StrettoError
from stretto.solvers import MAX_KERNEL_ROWS, AbstractSolver, Multigrid, Shooting, TrajectoryCache
from stretto.training.config import Count, Positive, TrainConfig

Way = Literal["serial", "auto", "shooting", "carried", "multigrid"]
MEGABYTE: Final = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class SolverConfig(TrainConfig):
    """What a task whose net is a `stretto.RNN` can be told besides.

    Attributes:
        solver: How to walk through time. Serial: step after step. Shooting: many chunks of time at once, swept until
            they agree; exact. Carried: one sweep, each chunk from where its neighbour ended when the sequence was last
            seen; told, not exact. Multigrid: as published; told, not exact. Auto: whichever is expected to be fastest.
        chunks: For shooting and carried: chunks of the longest sequence in a batch; auto fills the rows of a kernel.
        tolerance: For shooting, and for multigrid to go on until then: what may be left where chunks meet.
        exact_epochs: For carried: walk step after step in so many epochs at the end.
        cache_megabytes: For carried: most memory for where sequences were; beyond it the least recently seen are
            forgotten and start anew.
    """

    solver: Way = "serial"
    chunks: Count | Literal["auto"] = "auto"
    tolerance: Positive | None = None
    exact_epochs: Annotated[int, Field(ge=0, lt=2**31)] = 0
    cache_megabytes: Annotated[float, Field(gt=0.0, lt=2**40, allow_inf_nan=False)] = 1024.0

    def made_solver(self) -> AbstractSolver | Literal["serial", "auto"]:
        """A solver of its own for one `stretto.RNN`: nets that share one would mix up what they remember.

        Raises:
            StrettoError: Settings contradict each other.
        """
        self.refuse_contradictions()
        if self.solver in ("serial", "auto"):
            return "serial" if self.solver == "serial" else "auto"
        if self.solver == "multigrid":
            return Multigrid(tolerance=self.tolerance)
        if self.solver == "carried":
            # Not by the rows of each batch, which change: a sequence that is cut otherwise is not found again.
            chunks = max(2, MAX_KERNEL_ROWS // self.rows) if self.chunks == "auto" else self.chunks
            cache = TrajectoryCache(max_bytes=max(1, int(self.cache_megabytes * MEGABYTE)))
            return Shooting(num_chunks=chunks, max_sweeps=1, cache=cache)
        return Shooting(num_chunks=self.chunks, tolerance=self.tolerance or Shooting().tolerance)

    def refuse_contradictions(self) -> None:
        """Refuse what would be passed over in silence."""
        chosen = f"the solver is {self.solver!r}"
        if self.backend == "torch" and self.solver != "serial":
            raise StrettoError(
                f"backend='torch' was given and {chosen}, which torch's own layers do not have",
                fix="Leave --backend or --solver out.",
            )
        if self.chunks != "auto" and self.solver not in ("shooting", "carried"):
            raise StrettoError(
                f"chunks={self.chunks} was given and {chosen}",
                fix="Leave --chunks out, or choose --solver shooting or carried.",
            )
        if self.tolerance is not None and self.solver not in ("shooting", "multigrid"):
            raise StrettoError(
                f"tolerance={self.tolerance} was given and {chosen}",
                fix="Leave --tolerance out, or choose --solver shooting or multigrid.",
            )
        if self.exact_epochs and self.solver != "carried":
            raise StrettoError(
                f"exact_epochs={self.exact_epochs} was given and {chosen}",
                fix="Leave --exact-epochs out, or choose --solver carried.",
            )
        if self.exact_epochs >= self.epochs and self.exact_epochs:
            raise StrettoError(
                f"exact_epochs={self.exact_epochs} of epochs={self.epochs} leave none in which boundaries are carried",
                fix="Lower --exact-epochs, or choose --solver serial.",
            )
        if self.solver == "carried" and self.chunks == 1:
            raise StrettoError(
                "the solver is 'carried' and chunks=1 has no boundaries to carry",
                fix="Give --chunks 2 or more, or choose --solver serial.",
            )
        if self.solver == "carried" and self.nproc > 1:
            raise refuse_workers(self.nproc)


def refuse_workers(workers: int) -> StrettoError:
    """Boundaries are carried by one worker alone."""
    return StrettoError(
        f"the solver is 'carried' and there are {workers} workers: sequences change hands every epoch, and where they "
        "were is known to the one that saw them last",
        fix="Train with one worker, or choose --solver serial or shooting.",
    )
