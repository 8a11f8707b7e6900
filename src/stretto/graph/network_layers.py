"""Layers and connections: the parts of a `Graph`. Each checks its own settings.

Shape legend: B rows of the batch, N units of the layer.
"""

import dataclasses
from collections.abc import Callable
from typing import Final, Literal, TypeAlias, final

import torch
from torch.nn import functional

from stretto.checks import check_bool, check_choice, check_float, check_int
from stretto.errors import StrettoError

Role: TypeAlias = Literal["hidden", "input", "constant"]
Aggregation: TypeAlias = Literal["sum", "multiply"]
ConnectionKind: TypeAlias = Literal["full", "identity", "broadcast", "diagonal"]
Range: TypeAlias = tuple[int, int]
Activation: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

ROLES: Final = ("hidden", "input", "constant")
AGGREGATIONS: Final = ("sum", "multiply")
CONNECTION_KINDS: Final = ("full", "identity", "broadcast", "diagonal")


def _linear(x_BN: torch.Tensor) -> torch.Tensor:
    return x_BN


def _softmax(x_BN: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x_BN, dim=-1)


def _one_minus(x_BN: torch.Tensor) -> torch.Tensor:
    return 1.0 - x_BN


ACTIVATIONS: Final[dict[str, Activation]] = {
    "linear": _linear,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "softplus": functional.softplus,
    "softmax": _softmax,
    "one_minus": _one_minus,
    "negate": torch.neg,
    "abs": torch.abs,
    "cos": torch.cos,
    "elu": functional.elu,
    "erf": torch.erf,
    "exp": torch.exp,
    "gelu": functional.gelu,
    "hardtanh": functional.hardtanh,
    "leaky_relu": functional.leaky_relu,
    "logsigmoid": functional.logsigmoid,
    "mish": functional.mish,
    "selu": functional.selu,
    "silu": functional.silu,
    "sin": torch.sin,
    "softsign": functional.softsign,
    "square": torch.square,
}
"""The functions that a layer may apply to its sum or product, by name."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A named vector that takes a new value at every step.

    Attributes:
        name: What connections and parameters call it.
        size: Its units.
        role: "hidden" is computed from what arrives, "input" is given at every step, "constant" never changes.
        aggregation: "sum" or "multiply": how everything that arrives is combined.
        activation: Applied to the result; "softmax" runs over the units, all others act on each unit.
        bias: Whether a vector of parameters is added to the sum.
        initial_bias: Where that vector starts.
        initial: The value at every step before the first; for a constant layer, its value at all steps.
        learn_initial: Whether that value is a vector of parameters, which starts at `initial`.
    """

    name: str
    size: int
    role: Role = "hidden"
    aggregation: Aggregation = "sum"
    activation: str = "linear"
    bias: bool = False
    initial_bias: float = 0.0
    initial: float = 0.0
    learn_initial: bool = False

    def __post_init__(self) -> None:
        check_name(self.name, what="the name of a layer")
        owner = f"layer {self.name!r}"
        object.__setattr__(self, "size", check_int(self.size, name="size", owner=owner))
        for number in ("initial", "initial_bias"):
            object.__setattr__(self, number, check_float(getattr(self, number), name=number, owner=owner))
        for flag in ("bias", "learn_initial"):
            check_bool(getattr(self, flag), name=flag, owner=owner)
        check_choice(self.role, name="role", choices=ROLES, owner=owner)
        check_choice(self.aggregation, name="aggregation", choices=AGGREGATIONS, owner=owner)
        check_choice(self.activation, name="activation", choices=ACTIVATIONS, owner=owner)
        self._check_combination()

    def __str__(self) -> str:
        if self.role == "constant":
            return f"constant {self.name}: {self.size}, value {self.initial:g}"
        words = [str(self.size)]
        if self.role == "hidden":
            words += [self.aggregation, self.activation]
        if self.bias:
            words.append("bias" if self.initial_bias == 0.0 else f"bias from {self.initial_bias:g}")
        if self.learn_initial:
            words.append(f"learns its initial value from {self.initial:g}")
        elif self.initial != 0.0:
            words.append(f"initial value {self.initial:g}")
        return f"{'layer' if self.role == 'hidden' else 'input'} {self.name}: {', '.join(words)}"

    def _check_combination(self) -> None:
        """Refuse settings that could have no effect."""
        computes = self.aggregation != "sum" or self.activation != "linear" or self.bias
        if self.role != "hidden" and computes:
            raise StrettoError(
                f"the {self.role} layer {self.name!r} has an aggregation, an activation or a bias of its own",
                fix="Only hidden layers compute: connect it to one that does.",
            )
        if self.role == "constant" and self.learn_initial:
            raise StrettoError(
                f"the constant layer {self.name!r} has 'learn_initial' set",
                fix="Connect a constant layer with a full connection, whose weights are learned.",
            )
        if self.bias and self.aggregation == "multiply":
            raise StrettoError(
                f"layer {self.name!r} multiplies and has a bias",
                fix="Add the bias in a layer with aggregation 'sum', connected to this one or fed by it.",
            )
        if self.initial_bias != 0.0 and not self.bias:
            raise StrettoError(f"layer {self.name!r} has an 'initial_bias' and no bias", fix="Set bias=True.")


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """An edge that carries one layer's value, of this or an earlier step, to another layer.

    Attributes:
        source: The layer that is read.
        destination: The layer that the value arrives at.
        kind: "full" multiplies with a matrix of weights, "diagonal" with one weight per unit; "identity" has no
            weights, and neither has "broadcast", which repeats a single unit.
        delay: How many steps ago the source had the value; 0 is this step.
        source_range: The units that are read, as (first, end); None for all.
        destination_range: The units that the value arrives at, likewise.
    """

    source: str
    destination: str
    kind: ConnectionKind = "full"
    delay: int = 0
    source_range: Range | None = None
    destination_range: Range | None = None

    def __post_init__(self) -> None:
        check_name(self.source, what="the source of a connection")
        check_name(self.destination, what="the destination of a connection")
        owner = f"the connection {self.ends}"
        check_choice(self.kind, name="kind", choices=CONNECTION_KINDS, owner=owner)
        object.__setattr__(self, "delay", check_int(self.delay, name="delay", at_least=0, owner=owner))
        for end in ("source_range", "destination_range"):
            object.__setattr__(self, end, check_range(getattr(self, end), name=end, owner=owner))

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


def check_name(value: object, *, what: str) -> str:
    """`value` if it is a plain name, which parameters can be called after."""
    if not isinstance(value, str) or not value.isidentifier():
        raise StrettoError(
            f"{what} is {value!r}, which is not a plain name",
            fix="Use letters, digits and underscores, with no digit in front.",
        )
    return value


def check_range(value: object, *, name: str, owner: str) -> Range | None:
    """`value`, a slice or a pair of unit numbers, as a pair; None and `slice(None)` are all units."""
    if value is None or (isinstance(value, slice) and value == slice(None)):
        return None
    if isinstance(value, slice) and value.step in (None, 1):
        value = (0 if value.start is None else value.start, value.stop)
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise StrettoError(
            f"{owner} got {name}={value!r}", fix="Give a slice without a step, or the first unit and the end."
        )
    first, end = (check_int(unit, name=f"a unit of {name}", at_least=0, owner=owner) for unit in value)
    if first >= end:
        raise StrettoError(
            f"{owner} got {name}={value!r}, which holds no unit", fix="Give an end above the first unit."
        )
    return first, end
