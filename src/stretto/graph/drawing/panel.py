"""What a picture of a graph shows: boxes in bands, and arrows between them."""

from dataclasses import dataclass, field
from enum import Enum
from typing import final

from stretto.graph.node import Node
from stretto.graph.summary import PRODUCTS, SAME_VALUE, Operator, format_shape


class Look(str, Enum):
    """What kind of box it is."""

    VALUE = "value"
    PRODUCT = "product"
    WORK = "work"
    VIEW = "view"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A value or an operator.

    Attributes:
        title: Its name.
        shape: Its format_shape.
        reads: Names of what it reads without an arrow: weights, and values of the forward pass.
        band: Number of the band it lies in.
        look: What kind of box it is.
        tip: What is shown when the mouse rests on it.
    """

    title: str
    shape: str
    reads: str
    band: int
    look: Look
    tip: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Operators that are computed at one place: what it is called, and the place that gives it its colour."""

    title: str
    note: str
    place: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Delayed:
    """An arrow into another step, from one box to another; `label` says how many steps, if more than one."""

    source: int
    target: int
    label: str = ""


@final
@dataclass(slots=True)
class Panel:
    """One picture: boxes in bands from top to bottom. Arrows within a step lead down; boxes are known by number."""

    title: str
    bands: list[Band] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)
    delayed: list[Delayed] = field(default_factory=list)

    def add(self, box: Box) -> int:
        """Add a box; its number."""
        self.boxes.append(box)
        return len(self.boxes) - 1

    def value(self, title: str, node: Node, *, band: int, note: str = "") -> int:
        """Add a box for something that is there, or that is a result."""
        tip = f"{title}, {note}" if note else title
        return self.add(
            Box(title=title, shape=format_shape(node.row_shape), reads=note, band=band, look=Look.VALUE, tip=tip)
        )

    def operator(self, node: Node, *, reads: list[str], band: int) -> int:
        """Add a box for an operator."""
        told = Operator.of(node)
        look = Look.PRODUCT if node.label in PRODUCTS else Look.VIEW if told.is_view else Look.WORK
        names = ", ".join(dict.fromkeys(reads))
        tip = f"{node.name}: {told}" + (f", reads {names}" if names else "")
        return self.add(
            Box(title=told.name, shape=format_shape(told.shape), reads=names, band=band, look=look, tip=tip)
        )


def shown(node: Node, *, hidden: frozenset[str] = SAME_VALUE) -> Node:
    """The node whose box stands for a value: bookkeeping operators have none."""
    while node.label in hidden:
        node = node.args[0]
    return node


def sources(node: Node, *, hidden: frozenset[str] = SAME_VALUE) -> list[Node]:
    """What a box reads; one of several results reads what the operator that made them reads."""
    read = node.args[0].inputs if node.label == "getitem" else node.inputs
    return [shown(item, hidden=hidden) for item in read]


def is_drawn(node: Node, *, hidden: frozenset[str] = SAME_VALUE) -> bool:
    """Whether an operator gets a box of its own."""
    return node.op is not None and node.dtype is not None and node.label not in hidden
