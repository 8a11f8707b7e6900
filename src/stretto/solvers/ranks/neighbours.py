"""The ranks that time is laid over, as one of them sees them: who is before it, who behind, and what all agree on.

Nothing that is sent is unpickled: values travel as tensors of numbers or bytes.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import distributed

from stretto.errors import StrettoError


def count_ranks(group: "distributed.ProcessGroup | None") -> int:
    """Ranks of a group, or of all there are; 1 where there are no groups."""
    running = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size(group) if running else 1


@final
class Neighbours:
    """The ranks of a group in the order in which a sequence passes them.

    Args:
        group: Torch's name for them; None is all that it knows of.
        backwards: Whether the last rank comes first, as for a layer that reads from the end.

    Attributes:
        place: Where this rank comes, from 0 on.
        size: How many there are.
    """

    def __init__(self, group: "distributed.ProcessGroup | None", *, backwards: bool) -> None:
        self._group, self._backwards = group, backwards
        self.size = count_ranks(group)
        self.place = self._turned(distributed.get_rank(group)) if self.size > 1 else 0
        nccl = self.size > 1 and distributed.get_backend(group) == "nccl"
        self._device = torch.device("cuda") if nccl else torch.device("cpu")

    def _turned(self, number: int) -> int:
        return self.size - 1 - number if self._backwards else number

    def agree(self, facts: Mapping[str, Any], *, told: Sequence[float] = ()) -> list[list[float]]:
        """Check that all ranks are about to do the same, and hear what each has to tell, in one exchange.

        Args:
            facts: What must be the same, by how it is called: as many on every rank, in one order. Digests are sent.
            told: What may differ: equally many numbers on every rank.

        Returns:
            What each rank told, by rank.

        Raises:
            StrettoError: On every rank, if facts of any two differ.
        """
        # Six bytes are exact as a real number.
        digests = [hashlib.sha256(str(value).encode()).digest()[:6] for value in facts.values()]
        found = self._gathered([*(float(int.from_bytes(digest, "big")) for digest in digests), *told])
        for index, (what, value) in enumerate(facts.items()):
            others = [rank for rank, row in enumerate(found) if row[index] != found[0][index]]
            if others:
                raise StrettoError(
                    f"{what} of rank {', '.join(map(str, others))} differs from that of rank 0 (here: {value})",
                    fix="Give every rank of a time group its block of the same sequences, to the same net, and let all "
                    "of them do the same passes.",
                )
        return [row[len(facts) :] for row in found]

    def _gathered(self, values: Sequence[float]) -> list[list[float]]:
        own = torch.tensor(values, dtype=torch.float64, device=self._device)
        found = [torch.empty_like(own) for _ in range(self.size)]
        distributed.all_gather(found, own, group=self._group)
        return [item.tolist() for item in found]

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest of each value over all ranks."""
        both = torch.tensor(values, dtype=torch.float64, device=self._device)
        distributed.all_reduce(both, op=distributed.ReduceOp.MAX, group=self._group)
        return [float(value) for value in both.tolist()]

    def pass_on(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Send to the rank behind this one, and receive the same from the one before; None at the first."""
        return self._passed(parts, way=1)

    def pass_back(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Send to the rank before this one, and receive the same from the one behind; None at the last."""
        return self._passed(parts, way=-1)

    def _passed(self, parts: Sequence[torch.Tensor], *, way: int) -> list[torch.Tensor] | None:
        if not parts:
            return None
        packed = torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts]).to(self._device)
        room = torch.empty_like(packed)
        receives = 0 <= self.place - way < self.size
        operations = []
        if 0 <= self.place + way < self.size:
            operations.append(self._operation(distributed.isend, packed, self.place + way))
        if receives:
            operations.append(self._operation(distributed.irecv, room, self.place - way))
        for work in distributed.batch_isend_irecv(operations):
            work.wait()
        if not receives:
            return None
        sizes = [part.numel() * part.element_size() for part in parts]
        # Copied, for parts need not begin where their type may.
        return [
            piece.clone().view(part.dtype).view(part.shape).to(part.device)
            for piece, part in zip(torch.split(room, sizes), parts, strict=True)
        ]

    def _operation(self, kind: Any, tensor: torch.Tensor, place: int) -> "distributed.P2POp":
        rank = self._turned(place)
        peer = rank if self._group is None else distributed.get_global_rank(self._group, rank)
        return distributed.P2POp(kind, tensor, peer, self._group)
