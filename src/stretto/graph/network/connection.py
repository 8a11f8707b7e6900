"""A connection of a graph: an edge that carries one layer's value, now or of an earlier step, to another."""

import dataclasses
from typing import Final, Literal, TypeAlias, final

from stretto.errors import StrettoError
from stretto.graph.network.argument import check_choice, checked_count, checked_name

Kind: TypeAlias = Literal["full", "identity", "broadcast", "diagonal"]
Range: TypeAlias = tuple[int, int]

KINDS: Final = ("full", "identity", "broadcast", "diagonal")


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """What arrives at `destination` from `source`.

    Attributes:
        source: The layer that is read.
        destination: The layer that this arrives at.
        kind: "full" multiplies with a matrix of weights, "diagonal" with one weight for each unit; "identity" has no
            weights, and neither has "broadcast", which repeats a single unit.
        delay: How many steps ago the source had the value; 0 is this step.
        source_range: The units that are read, from the first up to but without the second; None is all.
        destination_range: The units that this arrives at, likewise.
    """

    source: str
    destination: str
    kind: Kind = "full"
    delay: int = 0
    source_range: Range | None = None
    destination_range: Range | None = None

    def __post_init__(self) -> None:
        checked_name(self.source, what="the source of a connection")
        checked_name(self.destination, what="the destination of a connection")
        of = f"of the connection {self.ends}"
        check_choice(self.kind, what=f"the kind {of}", choices=KINDS)
        object.__setattr__(self, "delay", checked_count(self.delay, what=f"the delay {of}", least=0))
        for end in ("source_range", "destination_range"):
            object.__setattr__(self, end, checked_range(getattr(self, end), what=f"the {end!r} {of}"))

    @property
    def ends(self) -> str:
        """Both layers, as messages quote them."""
        return f"{self.source!r} -> {self.destination!r}"

    def __str__(self) -> str:
        source, destination = (
            name if units is None else f"{name}[{units[0]}:{units[1]}]"
            for name, units in ((self.source, self.source_range), (self.destination, self.destination_range))
        )
        return f"{source} -> {destination}: {self.kind}{f', delay {self.delay}' if self.delay else ''}"


def checked_range(value: object, *, what: str) -> Range | None:
    """`value`, a slice or a pair of unit numbers, as a pair; None and `slice(None)` are all units."""
    if value is None or (isinstance(value, slice) and value == slice(None)):
        return None
    if isinstance(value, slice) and value.step in (None, 1):
        value = (0 if value.start is None else value.start, value.stop)
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise StrettoError(f"{what} is {value!r}", fix="Give a slice with no step, or the first unit and the end.")
    first, end = (checked_count(unit, what=f"a unit in {what}", least=0) for unit in value)
    if first >= end:
        raise StrettoError(f"{what} is {value!r}, which holds no unit", fix="Give an end above the first unit.")
    return first, end
