"""Where threads that work on the same rows must wait for each other: the hazards between the groups of a step.

    group 1   writes scratch0        thread 0 | thread 1 | ...      each its own elements
    --------- barrier ---------      if group 2 reads elements of scratch0 that another thread wrote
    group 2   reads scratch0

A read after a write, a write after a read and a write after a write are hazards. Steps follow each other: the first
groups of the next step must not clash with the last ones of this, where a state is the state before.

Who touches which element is up to the target: accesses carry an owner. On a GPU any thread may touch any element.
"""

from dataclasses import dataclass, field
from typing import TypeAlias, final

Owner: TypeAlias = "tuple[int, int] | str | None"
"""Accesses with the same owner touch the same elements from the same thread; None is every thread, any element."""


@final
@dataclass(slots=True)
class Accesses:
    """The memory that some work reads and writes, by name, with whose share of it."""

    reads: list[tuple[str, Owner]] = field(default_factory=list)
    writes: list[tuple[str, Owner]] = field(default_factory=list)


@final
class Hazards:
    """Finds the barriers of a step, given the accesses of its parts in order."""

    def __init__(self) -> None:
        self._since: list[Accesses] = []
        self._head: list[Accesses] | None = None

    def must_wait(self, wanted: Accesses) -> bool:
        """Whether a part reads or overwrites what another thread made or reads since the last barrier."""
        if any(_clash(earlier, wanted) for earlier in self._since):
            self._head = self._head or self._since
            self._since = [wanted]
            return True
        self._since.append(wanted)
        return False

    def must_wait_at_end(self) -> bool:
        """Whether the first parts of the next step must wait for the last ones of this."""
        return any(_clash(_in_next_step(tail), head) for tail in self._since for head in self._head or self._since)


def _clash(earlier: Accesses, later: Accesses) -> bool:
    pairs = ((earlier.writes, later.reads), (earlier.reads, later.writes), (earlier.writes, later.writes))
    return any(
        name == other and (mine is None or mine != theirs)
        for one, two in pairs
        for name, mine in one
        for other, theirs in two
    )


def _in_next_step(accesses: Accesses) -> Accesses:
    """The same memory by the names it has in the next step."""
    return Accesses(
        reads=[(later, owner) for name, owner in accesses.reads if (later := _later(name))],
        writes=[(later, owner) for name, owner in accesses.writes if (later := _later(name))],
    )


def _later(name: str) -> str | None:
    """A state becomes the state before; gradients of states swap places; of other things each step has its own."""
    role = name.rstrip("0123456789")
    swapped = {"after": "before", "carry_out": "carry_in", "carry_in": "carry_out"}
    if role in swapped:
        return swapped[role] + name.removeprefix(role)
    return name if role in {"scratch", "private", "saved", "d_constant"} else None
