"""How a run goes through time: which rank has which steps, which solver runs in which epoch, and what it reports."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, final

import torch
from torch import nn

from stretto.batching import Batch
from stretto.distributed import TimeMesh, World
from stretto.nn import RNN
from stretto.solvers import Shooting, Solution, TrajectoryCache
from stretto.training.checkpoint import Checkpoint
from stretto.training.config import SolverConfig, TrainConfig

CHECKPOINT_KEY: Final = "solver"
CACHE_KEY: Final = "carried"


@final
class TimeParallelSetup:
    """The ranks as a grid of sequences x steps: `count` ranks divide the steps of the same sequences.

    `data` has this rank's share of the sequences, and `time` its block of their steps; with a count of 1 each rank has
    its own sequences, whole.
    """

    def __init__(self, count: int, *, world: World, timeout_minutes: float = 10.0) -> None:
        self._mesh = TimeMesh(time=count, minutes=timeout_minutes) if count > 1 else None
        self.data, self.time = (world, World()) if self._mesh is None else (self._mesh.data, self._mesh.time)

    def set_solvers(self, model: nn.Module) -> None:
        """Let the model's recurrent layers run through time over ranks."""
        if self._mesh is not None:
            for layer in _rnns(model):
                layer.solver = self._mesh.solver()

    def cut(self, batch: Batch) -> Batch:
        """This rank's block of the steps of a batch, which all ranks that share its sequences have whole."""
        if self._mesh is None:
            return batch
        block = self._mesh.block(batch.features_BTF.shape[1], batch.lengths)
        targets = block.of(batch.targets) if isinstance(batch.targets, torch.Tensor) else batch.targets
        return dataclasses.replace(
            batch, features_BTF=block.of(batch.features_BTF), lengths=block.lengths, targets=targets
        )


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SolverRecord:
    """How the solver did in one epoch, over all ranks.

    Residuals are those where chunks of time meet, the largest of each batch: their mean and maximum; 0 is exact. They
    are None for gradients if the solver has none.
    """

    solver: str
    exact: bool
    """Whether this is one of the epochs that run sequentially."""
    batches: int
    residual_mean: float
    residual_max: float
    iterations: float
    """Passes over a sequence, on average; 1 is sequential, or one sweep."""
    backward_residual_mean: float | None
    backward_residual_max: float | None
    fell_back: int
    """Batches that ran sequentially in the end."""
    reason: str
    """Of the last batch: why, or what was chosen."""
    cache_bytes: int | None
    """Memory for chunk boundaries; None where none are carried."""


@final
@dataclasses.dataclass(slots=True, kw_only=True)
class _Totals:
    """Sums and maxima of one rank over the current epoch."""

    batches: float = 0.0
    residual: float = 0.0
    residual_max: float = 0.0
    iterations: float = 0.0
    backward_batches: float = 0.0
    backward_residual: float = 0.0
    backward_residual_max: float = 0.0
    fell_back: float = 0.0

    def add(self, solutions: list[Solution]) -> None:
        """Count one batch; of several layers and directions, the worst."""
        residual = max(item.residual for item in solutions)
        self.batches += 1
        self.residual += residual
        self.residual_max = max(self.residual_max, residual)
        self.iterations += max(item.iterations for item in solutions)
        self.fell_back += any(item.fell_back for item in solutions)
        back = [item.backward_residual for item in solutions if item.backward_residual is not None]
        if back:
            self.backward_batches += 1
            self.backward_residual += max(back)
            self.backward_residual_max = max(self.backward_residual_max, *back)


@final
class SolverMonitor:
    """Chooses the solver of each epoch and collects what it reports: `epochs` has a record of each that is finished.

    `last` has the residual and the iterations of this rank's last batch. With a serial solver on whole sequences both
    stay empty. A carried sequence is cut at the same `edges` in every batch of its bucket.
    """

    def __init__(self, model: nn.Module, *, config: TrainConfig, world: World, edges: Sequence[int] = ()) -> None:
        solves = config.time_parallel > 1 or (isinstance(config, SolverConfig) and config.solver != "serial")
        self._config = config if isinstance(config, SolverConfig) and solves else None
        self._world = world
        self._layers = _rnns(model) if self._config else []
        self._solvers = [layer.solver for layer in self._layers]
        carrying = [solver for solver in self._solvers if isinstance(solver, Shooting) and solver.cache is not None]
        for solver in carrying:
            solver.edges = tuple(edges)
        self._caches = [solver.cache for solver in carrying if solver.cache is not None]
        self._totals, self._reason = _Totals(), ""
        self._exact = False
        self.last: dict[str, float] = {}
        self.epochs: list[SolverRecord] = []

    @property
    def differs_in_use(self) -> bool:
        """Whether a trained model may also be used with its solver, and then gives other results than sequentially."""
        return self._config is not None and self._config.solver == "multigrid"

    def begin_epoch(self, epoch: int) -> None:
        """Choose the solver of this epoch, counted from 0."""
        if self._config is None:
            return
        self._exact = epoch >= self._config.epochs - self._config.exact_epochs
        if self._exact:
            # No later epoch carries anything.
            for cache in self._caches:
                cache.clear()
        for layer, solver in zip(self._layers, self._solvers, strict=True):
            layer.solver = "serial" if self._exact else solver

    def observe(self, num_sequences: int) -> None:
        """Collect what the layers report of a batch after its backward pass; an empty share did not run."""
        self.last = {}
        if self._config is None or num_sequences == 0:
            return
        found = [item for layer in self._layers for item in layer.solutions or (layer.solution,)]
        if not all(math.isfinite(left) for item in found for left in (item.residual, item.backward_residual or 0.0)):
            # The update is refused; its states and gradients would spoil all later ones.
            for cache in self._caches:
                cache.clear()
            return
        self._totals.add(found)
        worst = max(found, key=lambda item: item.residual)
        self._reason = worst.reason
        self.last = {"residual": worst.residual, "iterations": max(item.iterations for item in found)}

    def end_epoch(self) -> SolverRecord | None:
        """The record of the epoch over all ranks, each of which must call; None if there is nothing to report."""
        if self._config is None:
            return None
        own = dataclasses.asdict(self._totals)
        found = [_Totals(**dict(zip(own, row, strict=True))) for row in self._world.all_gather(list(own.values()))]
        self._totals = _Totals()
        batches, backward = (max(1.0, sum(getattr(t, n) for t in found)) for n in ("batches", "backward_batches"))
        went_back = any(totals.backward_batches for totals in found)
        record = SolverRecord(
            solver="time_parallel" if self._config.time_parallel > 1 else self._config.solver,
            exact=self._exact,
            # Ranks that divide the steps of a batch have each counted it.
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
        self.epochs.append(record)
        return record

    def to_checkpoint(self) -> Checkpoint:
        """The records so far, the sums of this rank's current epoch, and the chunk boundaries."""
        if self._config is None:
            return Checkpoint()
        packed = pack_caches(self._caches)
        own = {
            "totals": dataclasses.asdict(self._totals),
            "reason": self._reason,
            "epochs": [dataclasses.asdict(record) for record in self.epochs],
        }
        return Checkpoint(tensors=packed.tensors, state={**packed.state, CHECKPOINT_KEY: own})

    def load(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint; its sums are rank 0's, and the other ranks start theirs at zero."""
        if self._config is None:
            return
        unpack_caches(checkpoint, self._caches)
        # It is missing if time was not divided when the checkpoint was written.
        saved = checkpoint.state.get(CHECKPOINT_KEY, {"totals": {}, "reason": "", "epochs": []})
        self.epochs = [SolverRecord(**record) for record in saved["epochs"]]
        if self._world.is_rank0:
            self._totals, self._reason = _Totals(**saved["totals"]), saved["reason"]


def summarize_solver(epochs: Sequence[SolverRecord]) -> dict[str, Any] | None:
    """A whole run from the records of its epochs: last and largest residual, memory; None if there are none."""
    if not epochs:
        return None
    solved = [epoch for epoch in epochs if not epoch.exact] or epochs
    caches = [epoch.cache_bytes for epoch in epochs if epoch.cache_bytes is not None]
    return {
        "solver": epochs[-1].solver,
        "batches": sum(epoch.batches for epoch in epochs),
        "fell_back": sum(epoch.fell_back for epoch in epochs),
        "exact_epochs": sum(epoch.exact for epoch in epochs),
        "residual_mean": solved[-1].residual_mean,
        "residual_max": max(epoch.residual_max for epoch in epochs),
        "iterations": solved[-1].iterations,
        "backward_residual_mean": solved[-1].backward_residual_mean,
        "cache_bytes": max(caches, default=None),
        "residuals": [epoch.residual_mean for epoch in epochs],
    }


def _rnns(model: nn.Module) -> list[RNN]:
    return [layer for layer in model.modules() if isinstance(layer, RNN)]


@contextlib.contextmanager
def run_serially(model: nn.Module) -> Iterator[None]:
    """Within it, all recurrent layers run sequentially: exactly, and without a trace in what solvers remember."""
    layers = _rnns(model)
    earlier = [layer.solver for layer in layers]
    for layer in layers:
        layer.solver = "serial"
    try:
        yield
    finally:
        for layer, solver in zip(layers, earlier, strict=True):
            layer.solver = solver


def pack_caches(caches: Sequence[TrajectoryCache]) -> Checkpoint:
    """All that caches hold, in their order of use.

    Sequences are many and their states small, so that the bytes of all states lie end to end in one tensor.
    """
    tensors: dict[str, torch.Tensor] = {}
    described = []
    for number, cache in enumerate(caches):
        held = cache.state_dict()
        flat = [state.reshape(-1).view(torch.uint8) for states in held["states"] for state in states]
        tensors[f"{CACHE_KEY}.{number}"] = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)
        kinds = [[[_name(state.dtype), *state.shape] for state in states] for states in held["states"]]
        described.append({"keys": held["keys"], "kinds": kinds})
    return Checkpoint(tensors=tensors, state={CACHE_KEY: described} if caches else {})


def unpack_caches(checkpoint: Checkpoint, caches: Sequence[TrajectoryCache]) -> None:
    """Let caches hold what they held when `pack_caches` was called.

    Raises:
        KeyError: The checkpoint is of a run that carried nothing.
        ValueError: It does not fit.
    """
    for number, (cache, described) in enumerate(
        zip(caches, checkpoint.state[CACHE_KEY] if caches else [], strict=True)
    ):
        kinds = [(getattr(torch, name), shape) for parts in described["kinds"] for name, *shape in parts]
        sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in kinds]
        pieces = zip(kinds, torch.split(checkpoint.tensors[f"{CACHE_KEY}.{number}"], sizes), strict=True)
        # Copies, which are aligned for their type.
        loaded = iter([piece.clone().view(dtype).reshape(shape) for (dtype, shape), piece in pieces])
        states = [list(itertools.islice(loaded, len(parts))) for parts in described["kinds"]]
        cache.load_state_dict({"keys": described["keys"], "states": states})


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
