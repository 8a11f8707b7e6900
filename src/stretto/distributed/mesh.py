"""Ranks as a grid of data x time: each row of it has a share of the sequences, each column a block of their steps.

Shape legend: B sequences, T steps, F features.
"""

import dataclasses
import datetime as dt
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from stretto.distributed.world import World
from stretto.errors import StrettoError
from stretto.nn import RNN
from stretto.solvers import SEGMENT_STEPS, TimeParallel, count_ranks
from stretto.state import map_state


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TimeBlock:
    """What one rank has of a padded batch: all sequences, some steps.

    Attributes:
        steps: Which.
        lengths: Real steps of each sequence among them.
        sample_ids: What each sequence is known by, on all ranks: `rnn(x, lengths=..., sample_ids=...)`.
    """

    steps: range
    lengths: torch.Tensor
    sample_ids: tuple[int, ...]

    def of(self, x_BT: torch.Tensor) -> torch.Tensor:
        """The block of features, or of targets of each step (B, T, ...)."""
        return x_BT[:, self.steps.start : self.steps.stop]


@final
class TimeMesh:
    """All ranks as a grid: `time` neighbours share sequences and divide their steps, and there are as many such groups
    as there are ranks for.

    Every rank must make it, and take part in everything that is asked of it.

    Args:
        time: Ranks that divide the steps of a sequence.
        minutes: How long a rank waits for another of its time group before it fails.

    Attributes:
        data: Which share of the sequences this rank has, of how many.
        time: Which block of their steps this rank has, of how many.
        devices: The grid as torch knows it, with the dimensions "data" and "time"; None for one rank alone.

    Example:
        mesh = stretto.distributed.TimeMesh(time=2)
        rnn = stretto.RNN(stretto.cells.GRU(8, 32), solver=mesh.solver())
        block = mesh.block(x_BTF.shape[1], lengths)
        y, state = rnn(block.of(x_BTF), lengths=block.lengths, sample_ids=block.sample_ids)
    """

    def __init__(self, *, time: int, minutes: float = 10.0) -> None:
        size = count_ranks(None)
        device = "cuda" if size > 1 and distributed.get_backend() == "nccl" else "cpu"
        every = World(size=size, device=device)
        every.require_equal("the number of ranks that divide steps,", str(time), fix="Make the same mesh on all.")
        if not isinstance(time, int) or time < 1 or size % time:
            raise StrettoError(
                f"steps cannot be divided over {time!r} ranks each: there are {size} ranks",
                fix="Choose a number that divides them, or start more with torchrun --nproc-per-node.",
            )
        self.data, self.time = World(), World()
        self.devices: DeviceMesh | None = None
        if size == 1:
            return
        grid = torch.arange(size).reshape(-1, time)
        # Groups of their own, also where one is all ranks: gradients of parameters travel on that at the same time.
        across, along = (_group(ranks.tolist(), minutes=minutes) for ranks in (grid.T, grid))
        self.devices = DeviceMesh.from_group([across, along], device, grid, mesh_dim_names=("data", "time"))
        rank = distributed.get_rank()
        self.data = World(rank=rank // time, size=size // time, device=device, group=across)
        self.time = World(rank=rank % time, size=time, device=device, group=along)

    def solver(self, *, tolerance: float = 1e-6, segment_steps: int = SEGMENT_STEPS) -> TimeParallel:
        """Runs blocks of time on the ranks of this rank's time group."""
        return TimeParallel(group=self.time.group, tolerance=tolerance, segment_steps=segment_steps)

    def steps(self, num_steps: int) -> range:
        """The steps of this rank: those of all ranks follow each other and differ by one in number, at most."""
        rank, size = self.time.rank, self.time.size
        return range(num_steps * rank // size, num_steps * (rank + 1) // size)

    def block(self, num_steps: int, lengths: Sequence[int] | torch.Tensor) -> TimeBlock:
        """This rank's block of a padded batch; all ranks of a time group must ask for that of the same.

        Args:
            num_steps: T of the batch.
            lengths: Real steps of each sequence.

        Raises:
            StrettoError: On every rank of the time group, if their batches differ.
        """
        lengths_B = torch.as_tensor(lengths, dtype=torch.int64)
        self.time.require_equal(
            "the number of steps, or the lengths,",
            str([num_steps, lengths_B.tolist()]),
            fix="Give all ranks of a time group the same batch, whole.",
        )
        wrong = [length for length in lengths_B.tolist() if not 0 <= length <= num_steps]
        if wrong:
            raise StrettoError(
                f"a length is {wrong[0]} and the batch has {num_steps} steps",
                fix=f"Give lengths between 0 and {num_steps}.",
            )
        steps = self.steps(num_steps)
        return TimeBlock(
            steps=steps,
            lengths=(lengths_B - steps.start).clamp(0, len(steps)),
            sample_ids=tuple(range(len(lengths_B))),
        )

    def final_state(self, rnn: RNN, state: Any) -> Any:
        """The state after whole sequences, on every rank of the time group; no gradient flows through it.

        Args:
            rnn: Who returned the state.
            state: What it returned here: the state after this rank's block.
        """
        if self.time.size == 1:
            return state
        states = [state] if len(rnn.cells) == 1 else list(state)
        found = []
        for number, one in enumerate(states):
            # The ranks of a time group follow each other; a layer that reads backwards ends on the first.
            place = 0 if rnn.bidirectional and number % 2 else self.time.size - 1
            source = distributed.get_rank() - self.time.rank + place
            found.append(map_state(lambda part, source=source: self._from(part, source), one))
        return found[0] if len(found) == 1 else tuple(found)

    def _from(self, part: torch.Tensor, source: int) -> torch.Tensor:
        sent = part.detach().to(self.time.device, copy=True).contiguous()
        distributed.broadcast(sent, src=source, group=self.time.group)
        return sent.to(part.device)


def _group(rows: list[list[int]], *, minutes: float) -> "distributed.ProcessGroup":
    """The group of this rank among several that share all ranks out."""
    made = [distributed.new_group(ranks, timeout=dt.timedelta(minutes=minutes)) for ranks in rows]
    own: distributed.ProcessGroup = next(g for g, r in zip(made, rows, strict=True) if distributed.get_rank() in r)
    return own
