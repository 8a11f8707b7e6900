"""A layer of a graph: a node with a value at every step."""

import dataclasses
from typing import Final, Literal, TypeAlias, final

from stretto.errors import StrettoError
from stretto.graph.network.activation import ACTIVATIONS
from stretto.graph.network.argument import check_choice, checked_count, checked_flag, checked_name, checked_number

Role: TypeAlias = Literal["hidden", "input", "constant"]
Aggregation: TypeAlias = Literal["sum", "multiply"]

ROLES: Final = ("hidden", "input", "constant")
AGGREGATIONS: Final = ("sum", "multiply")


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A named vector that takes a new value at every step.

    Attributes:
        name: What connections and parameters call it.
        size: Its units.
        role: "hidden" is computed from what arrives, "input" is given at every step, "constant" never changes.
        aggregation: "sum" or "multiply": what happens to all that arrives.
        activation: What is then applied; "softmax" runs over the units, all others act on each alone.
        bias: Whether a vector of parameters is added to the sum.
        initial_bias: Where that vector starts.
        initial: The value at every step before the first; of a constant layer, its value at all steps.
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
        checked_name(self.name, what="the name of a layer")
        of = f"of layer {self.name!r}"
        object.__setattr__(self, "size", checked_count(self.size, what=f"the size {of}", least=1))
        for number in ("initial", "initial_bias"):
            object.__setattr__(self, number, checked_number(getattr(self, number), what=f"the {number!r} {of}"))
        for flag in ("bias", "learn_initial"):
            checked_flag(getattr(self, flag), what=f"the {flag!r} {of}")
        check_choice(self.role, what=f"the role {of}", choices=ROLES)
        check_choice(self.aggregation, what=f"the aggregation {of}", choices=AGGREGATIONS)
        check_choice(self.activation, what=f"the activation {of}", choices=ACTIVATIONS)
        self._check_combination()

    def __str__(self) -> str:
        if self.role == "constant":
            return f"constant {self.name}: {self.size}, value {self.initial:g}"
        told = [str(self.size)]
        if self.role == "hidden":
            told += [self.aggregation, self.activation]
        if self.bias:
            told.append("bias" if self.initial_bias == 0.0 else f"bias from {self.initial_bias:g}")
        if self.learn_initial:
            told.append(f"learns its initial value from {self.initial:g}")
        elif self.initial != 0.0:
            told.append(f"initial value {self.initial:g}")
        return f"{'layer' if self.role == 'hidden' else 'input'} {self.name}: {', '.join(told)}"

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
