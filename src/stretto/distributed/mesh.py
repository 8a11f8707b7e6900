"""Ranks as a grid of data x time: ranks of one row divide the steps of the same sequences.

    time ->      block 0    block 1
    data 0       rank 0     rank 1      one half of the sequences
    data 1       rank 2     rank 3      the other half

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
        steps: The time steps that this rank owns.
        lengths: Real steps of each sequence among them.
        sample_ids: The id of each sequence, the same on all ranks: `rnn(x, lengths=..., sample_ids=...)`.
    """

    steps: range
    lengths: torch.Tensor
    sample_ids: tuple[int, ...]

    def of(self, x_BT: torch.Tensor) -> torch.Tensor:
        """The block of features, or of targets of each step (B, T, ...)."""
        return x_BT[:, self.steps.start : self.steps.stop]


@final
class TimeMesh:
    """All ranks as a grid: `time` neighbours divide steps, and their groups divide sequences.

    Every rank must create it, and call its methods together with the others.

    Args:
        time: Ranks that divide the steps of a sequence.
        minutes: How long a rank waits for another of its time group before it fails.

    Attributes:
        data: The ranks with the same block of steps: `data.rank` is this rank's share of the sequences, of `data.size`.
        time: The ranks with the same sequences: `time.rank` is this rank's block of steps, of `time.size`.
        devices: The grid as a torch DeviceMesh with the dimensions "data" and "time"; None for a single rank.

    Examples:
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
        # New groups even where one has all ranks: the default group all-reduces gradients of parameters meanwhile.
        create, timeout = distributed.new_subgroups_by_enumeration, dt.timedelta(minutes=minutes)
        across, along = (create(ranks.tolist(), timeout=timeout)[0] for ranks in (grid.T, grid))  # type: ignore[no-untyped-call]
        self.devices = DeviceMesh.from_group([across, along], device, grid, mesh_dim_names=("data", "time"))
        rank = distributed.get_rank()
        self.data = World(rank=rank // time, size=size // time, device=device, group=across)
        self.time = World(rank=rank % time, size=time, device=device, group=along)

    def solver(self, *, tolerance: float = 1e-6, segment_steps: int = SEGMENT_STEPS) -> TimeParallel:
        """Runs blocks of time on the ranks of this rank's time group."""
        return TimeParallel(group=self.time.group, tolerance=tolerance, segment_steps=segment_steps)

    def steps(self, num_steps: int) -> range:
        """The steps of this rank. Blocks are consecutive, and their lengths differ by at most one."""
        rank, size = self.time.rank, self.time.size
        return range(num_steps * rank // size, num_steps * (rank + 1) // size)

    def block(self, num_steps: int, lengths: Sequence[int] | torch.Tensor) -> TimeBlock:
        """This rank's block of a padded batch, which must be the same on all ranks of a time group.

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
            rnn: The layer that returned the state.
            state: What it returned on this rank: the state after its block.
        """
        if self.time.size == 1:
            return state
        states = [state] if len(rnn.cells) == 1 else list(state)
        found = []
        for number, one in enumerate(states):
            # The ranks of a time group are consecutive; a direction that reads backwards ends on the first.
            place = 0 if rnn.bidirectional and number % 2 else self.time.size - 1
            source = distributed.get_rank() - self.time.rank + place
            found.append(map_state(lambda part, source=source: self._broadcast(part, source), one))
        return found[0] if len(found) == 1 else tuple(found)

    def _broadcast(self, part: torch.Tensor, source: int) -> torch.Tensor:
        sent = part.detach().to(self.time.device, copy=True).contiguous()
        distributed.broadcast(sent, src=source, group=self.time.group)
        return sent.to(part.device)
