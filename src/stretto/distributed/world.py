"""The workers of a run, as one of them sees them: sums, comparisons and messages, numbers only.

Nothing that is sent is unpickled: values travel as tensors of numbers or bytes.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Final, final

import torch
from torch import distributed

from stretto.errors import StrettoError

DONE: Final = "done:"
REFUSED: Final = "refused:"
APART: Final = "\0"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """All workers, and which of them this is. The default is one alone.

    Attributes:
        rank: This worker.
        size: How many there are.
        local_size: How many of them are on this machine.
        restarts: How often all were started again after one was lost.
        launch: The name that torchrun knows all of them by, across restarts and changes of their number; may be empty.
        device: Where tensors that are sent must lie.
        group: Torch's name for them; None is all that it knows of.
    """

    rank: int = 0
    size: int = 1
    local_size: int = 1
    restarts: int = 0
    launch: str = ""
    device: str = "cpu"
    group: "distributed.ProcessGroup | None" = None

    @property
    def is_first(self) -> bool:
        """Whether this worker writes what only one may write."""
        return self.rank == 0

    def total(self, values: Sequence[float]) -> list[float]:
        """Sums over all workers, each worker with equally many values."""
        return self.begin_total(values)()

    def begin_total(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """Begin to sum over all workers, each with equally many values; what is returned waits and gives the sums."""
        if self.size == 1:
            return lambda: list(values)
        sums = torch.tensor(values, dtype=torch.float64, device=self.device)
        work = distributed.all_reduce(sums, async_op=True, group=self.group)

        def finish() -> list[float]:
            if work is not None:
                work.wait()
            return [float(value) for value in sums.tolist()]

        return finish

    def gathered(self, values: Sequence[float]) -> list[list[float]]:
        """The values of every worker, by rank."""
        if self.size == 1:
            return [list(values)]
        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        found = [torch.empty_like(own) for _ in range(self.size)]
        distributed.all_gather(found, own, group=self.group)
        return [item.tolist() for item in found]

    def told(self, text: str) -> str:
        """The first worker's text, on all of them."""
        if self.size == 1:
            return text
        encoded = text.encode() if self.is_first else b""
        length = torch.tensor([len(encoded)], device=self.device)
        distributed.broadcast(length, src=0, group=self.group)
        content = torch.zeros(int(length), dtype=torch.uint8, device=self.device)
        if self.is_first and encoded:
            content.copy_(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))
        distributed.broadcast(content, src=0, group=self.group)
        return bytes(content.tolist()).decode()

    def by_first(self, work: Callable[[], str]) -> str:
        """What the first worker's `work` gives, on all workers; its error too."""
        answer = ""
        if self.is_first:
            try:
                answer = f"{DONE}{work()}"
            except StrettoError as error:
                if self.size == 1:
                    raise
                answer = f"{REFUSED}{error.problem}{APART}{error.fix}"
        answer = self.told(answer)
        if answer.startswith(REFUSED):
            problem, _, fix = answer.removeprefix(REFUSED).partition(APART)
            raise StrettoError(problem, fix=fix)
        return answer.removeprefix(DONE)

    def wait_for_all(self) -> None:
        """Go on when every worker has come here."""
        self.total([0.0])

    def refuse_differences(self, what: str, value: str, *, fix: str) -> None:
        """Check that all workers have the same.

        Args:
            what: Named in the error: "the training data".
            value: A description of what this worker has; only its digest is sent.
            fix: What to do about it.

        Raises:
            StrettoError: On every worker, if any two differ.
        """
        digest = hashlib.sha256(value.encode()).digest()
        # Four bytes at a time are exact as real numbers.
        numbers = [float(int.from_bytes(digest[at : at + 4], "big")) for at in range(0, 16, 4)]
        found = self.gathered(numbers)
        others = [rank for rank, item in enumerate(found) if item != found[0]]
        if others:
            raise StrettoError(f"{what} of rank {', '.join(map(str, others))} differs from that of rank 0", fix=fix)
