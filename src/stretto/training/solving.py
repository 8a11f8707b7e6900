"""How a run walks through time: which solver when, what it left over, and what it remembers."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, final

from torch import nn

from stretto.distributed import World
from stretto.nn import RNN
from stretto.solvers import Shooting, Solution
from stretto.training.carried import pack_caches, unpack_caches
from stretto.training.checkpoint import Checkpoint
from stretto.training.config import TrainConfig
from stretto.training.solver_config import SolverConfig, refuse_workers

PART: Final = "solving"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SolverRecord:
    """How the batches of an epoch were walked, over all workers.

    Attributes:
        solver: As it was set.
        exact: Whether this is one of the epochs that are walked step after step.
        batches: How many were walked.
        residual_mean: What was left where chunks of time meet, a batch's largest, on average; 0 is exact.
        residual_max: The largest.
        iterations: Passes over a sequence, on average; 1 is step after step, or one sweep.
        backward_residual_mean: The same for gradients; None where a solver has none.
        backward_residual_max: The largest.
        fell_back: Batches that were walked step after step in the end.
        reason: Of the last batch: why, or what was chosen.
        cache_bytes: Memory for where sequences were; None where nothing is carried.
    """

    solver: str
    exact: bool
    batches: int
    residual_mean: float
    residual_max: float
    iterations: float
    backward_residual_mean: float | None
    backward_residual_max: float | None
    fell_back: int
    reason: str
    cache_bytes: int | None


@final
@dataclasses.dataclass(slots=True, kw_only=True)
class _Totals:
    """Sums and maxima over the epoch under way, of one worker."""

    batches: float = 0.0
    residual: float = 0.0
    residual_max: float = 0.0
    iterations: float = 0.0
    backward_batches: float = 0.0
    backward_residual: float = 0.0
    backward_residual_max: float = 0.0
    fell_back: float = 0.0

    def add(self, found: list[Solution]) -> None:
        """One batch; of several layers and directions, the worst."""
        residual = max(item.residual for item in found)
        self.batches += 1
        self.residual += residual
        self.residual_max = max(self.residual_max, residual)
        self.iterations += max(item.iterations for item in found)
        self.fell_back += any(item.fell_back for item in found)
        back = [item.backward_residual for item in found if item.backward_residual is not None]
        if back:
            self.backward_batches += 1
            self.backward_residual += max(back)
            self.backward_residual_max = max(self.backward_residual_max, *back)


@final
class Solving:
    """Looks after the solvers of a model's recurrent layers.

    Where all is walked step after step by its settings, it does nothing and tells nothing.

    Args:
        model: The model.
        config: Of the run.
        world: The workers.
        edges: Of the buckets: a sequence that is carried is cut alike in every batch of its bucket.

    Attributes:
        last: Of this worker's last batch: residual and iterations; empty if nothing is to be told.
    """

    def __init__(self, model: nn.Module, *, config: TrainConfig, world: World, edges: Sequence[int] = ()) -> None:
        solves = config.time_parallel > 1 or (isinstance(config, SolverConfig) and config.solver != "serial")
        self._config = config if isinstance(config, SolverConfig) and solves else None
        if self._config is not None:
            self._config.refuse_contradictions()
            if self._config.solver == "carried" and world.size > 1:
                raise refuse_workers(world.size)
        self._world = world
        self._layers = [layer for layer in model.modules() if isinstance(layer, RNN)] if self._config else []
        self._solvers = [layer.solver for layer in self._layers]
        carrying = [solver for solver in self._solvers if isinstance(solver, Shooting) and solver.cache is not None]
        for solver in carrying:
            solver.edges = tuple(edges)
        self._caches = [solver.cache for solver in carrying if solver.cache is not None]
        self._totals, self._reason = _Totals(), ""
        self._exact = False
        self.last: dict[str, float] = {}

    @property
    def differs_in_use(self) -> bool:
        """Whether a trained net may also be used with its solver, and give something else than step after step."""
        return self._config is not None and self._config.solver == "multigrid"

    def begin_epoch(self, epoch: int) -> None:
        """Choose how to walk in this epoch, counted from 0."""
        if self._config is None:
            return
        self._exact = epoch >= self._config.epochs - self._config.exact_epochs
        if self._exact:
            # No later epoch carries anything.
            for cache in self._caches:
                cache.clear()
        for layer, solver in zip(self._layers, self._solvers, strict=True):
            layer.solver = "serial" if self._exact else solver

    def note(self, *, num_rows: int) -> None:
        """Add up how the batch was walked of which the gradients are there; an empty share was not walked."""
        self.last = {}
        if self._config is None or num_rows == 0:
            return
        found = [item for layer in self._layers for item in layer.solutions or (layer.solution,)]
        if not all(math.isfinite(left) for item in found for left in (item.residual, item.backward_residual or 0.0)):
            # The update is refused; what was remembered of its states and gradients would spoil all that follow.
            for cache in self._caches:
                cache.clear()
            return
        self._totals.add(found)
        worst = max(found, key=lambda item: item.residual)
        self._reason = worst.reason
        self.last = {"residual": worst.residual, "iterations": max(item.iterations for item in found)}

    def end_epoch(self) -> SolverRecord | None:
        """What the epoch came to, over all workers, and begin anew; None if all is walked step after step."""
        if self._config is None:
            return None
        own = dataclasses.asdict(self._totals)
        found = [_Totals(**dict(zip(own, row, strict=True))) for row in self._world.all_gather(list(own.values()))]
        self._totals = _Totals()
        batches, backward = (max(1.0, sum(getattr(t, n) for t in found)) for n in ("batches", "backward_batches"))
        went_back = any(totals.backward_batches for totals in found)
        return SolverRecord(
            solver="time_parallel" if self._config.time_parallel > 1 else self._config.solver,
            exact=self._exact,
            # Workers that divide the steps of a batch have each counted it.
            batches=int(sum(totals.batches for totals in found)) // self._config.time_parallel,
            residual_mean=sum(totals.residual for totals in found) / batches,
            residual_max=max(totals.residual_max for totals in found),
            iterations=sum(totals.iterations for totals in found) / batches,
            backward_residual_mean=sum(t.backward_residual for t in found) / backward if went_back else None,
            backward_residual_max=max(totals.backward_residual_max for totals in found) if went_back else None,
            fell_back=int(sum(totals.fell_back for totals in found)),
            reason="" if self._exact else self._reason,
            cache_bytes=sum(cache.num_bytes for cache in self._caches) if self._caches else None,
        )

    def to_checkpoint(self) -> Checkpoint:
        """The epoch's sums so far, of this worker, and what is carried."""
        if self._config is None:
            return Checkpoint(tensors={}, state={})
        packed = pack_caches(self._caches)
        told = {"totals": dataclasses.asdict(self._totals), "reason": self._reason}
        return Checkpoint(tensors=packed.tensors, state={**packed.state, PART: told})

    def load(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint; the sums are those of the first worker, and the others begin anew."""
        if self._config is None:
            return
        unpack_caches(checkpoint, self._caches)
        # Not there if the run went on a single worker, or several that each had whole sequences.
        told = checkpoint.state.get(PART)
        if self._world.is_rank0 and told is not None:
            self._totals, self._reason = _Totals(**told["totals"]), told["reason"]


@contextlib.contextmanager
def step_after_step(model: nn.Module) -> Iterator[None]:
    """Within it, all recurrent layers walk serially: exactly, and without a trace in what solvers remember."""
    layers = [layer for layer in model.modules() if isinstance(layer, RNN)]
    earlier = [layer.solver for layer in layers]
    for layer in layers:
        layer.solver = "serial"
    try:
        yield
    finally:
        for layer, solver in zip(layers, earlier, strict=True):
            layer.solver = solver


def summary_of(epochs: list[Mapping[str, Any]]) -> dict[str, Any] | None:
    """A whole run from the records of its epochs: the last residual, the largest, and the memory it took.

    Args:
        epochs: Each a `SolverRecord` as the event of its epoch has it.
    """
    if not epochs:
        return None
    solved = [epoch for epoch in epochs if not epoch["exact"]] or epochs
    return {
        "solver": epochs[-1]["solver"],
        "batches": sum(epoch["batches"] for epoch in epochs),
        "fell_back": sum(epoch["fell_back"] for epoch in epochs),
        "exact_epochs": sum(epoch["exact"] for epoch in epochs),
        "residual_mean": solved[-1]["residual_mean"],
        "residual_max": max(epoch["residual_max"] for epoch in epochs),
        "iterations": solved[-1]["iterations"],
        "backward_residual_mean": solved[-1]["backward_residual_mean"],
        "cache_bytes": max((epoch["cache_bytes"] or 0 for epoch in epochs), default=0)
        if epochs[-1]["cache_bytes"] is not None
        else None,
        "residuals": [epoch["residual_mean"] for epoch in epochs],
    }
