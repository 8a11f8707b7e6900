"""Where sequences were at the boundaries of their chunks, the last time they were seen.

Shape legend: D boundaries of one sequence.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final, final

import torch

from stretto.errors import StrettoError

MOST_BYTES: Final = 1 << 30


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Whose boundaries: of which chain of a net, of which sequence, cut after how many steps."""

    chain: str
    sample_id: int
    length: int


@final
class TrajectoryCache:
    """Boundary states by sequence; the next visit starts from them.

    It holds chunks times the size of a state for each sequence, chain and length of chunks. Beyond `most_bytes` it
    forgets what was not used for longest.

    Args:
        most_bytes: How much to hold at most.
        adjoints: Whether to carry the gradients at the boundaries too: a reversed chunk then starts from the gradient
            that its neighbour ended with the last time.
    """

    def __init__(self, *, most_bytes: int = MOST_BYTES, adjoints: bool = False) -> None:
        if most_bytes < 1:
            raise StrettoError(f"most_bytes is {most_bytes}", fix="Give at least 1.")
        self.most_bytes = most_bytes
        self.adjoints = adjoints
        self._held: OrderedDict[Place, list[torch.Tensor]] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def get(self, place: Place) -> list[torch.Tensor] | None:
        """The states (D, ...) at the boundaries, one tensor for each part of the state; None if they are not known."""
        found = self._held.get(place)
        if found is not None:
            self._held.move_to_end(place)
        return found

    def put(self, place: Place, states: Sequence[torch.Tensor]) -> None:
        """Keep the states at the boundaries."""
        self._forget(place)
        self._held[place] = kept = [state.detach().clone() for state in states]
        self.num_bytes += _bytes_of(kept)
        while self.num_bytes > self.most_bytes:
            self._forget(next(iter(self._held)))

    def clear(self) -> None:
        """Forget everything."""
        self._held.clear()
        self.num_bytes = 0

    def _forget(self, place: Place) -> None:
        self.num_bytes -= _bytes_of(self._held.pop(place, []))

    def state_dict(self) -> dict[str, Any]:
        """All that is held, least recently used first: for a checkpoint."""
        return {
            "places": [dataclasses.asdict(place) for place in self._held],
            "states": [list(states) for states in self._held.values()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hold what a cache held when it was saved."""
        self.clear()
        for place, states in zip(state["places"], state["states"], strict=True):
            self.put(Place(**place), states)


def _bytes_of(states: Sequence[torch.Tensor]) -> int:
    return sum(state.numel() * state.element_size() for state in states)
