"""A graph of layers and connections as a recurrent cell, in plain PyTorch.

Shape legend: B rows of the batch, F features of the input, N units of a layer.
"""

import functools
import operator
from typing import final

import torch
from torch import nn
from torch.nn import functional

from stretto.cells import Cell, State
from stretto.errors import StrettoError
from stretto.graph.network.activation import ACTIVATIONS
from stretto.graph.network.connection import Range
from stretto.graph.network.layer import Layer
from stretto.graph.network.wiring import Wire, Wiring


@final
class GraphCell(Cell):
    """One step of a `stretto.Graph`; made by `Graph.cell`.

    The state holds the last d outputs of each layer that is read with a delay of up to d, a tensor each, and nothing
    else. Weights start even in plus or minus 1 / sqrt(n), n being the longer side of the matrix, as `torch.nn.LSTM`
    does with its hidden size; biases and learned initial values start where the layers say.

    Attributes:
        wiring: The graph, checked and laid out.
    """

    def __init__(self, wiring: Wiring) -> None:
        super().__init__()
        self.wiring = wiring
        for layer in wiring.layers:
            if layer.role == "constant":
                self.register_buffer(f"constant_{layer.name}", torch.empty(layer.size), persistent=False)
            if layer.bias:
                self.register_parameter(f"bias_{layer.name}", nn.Parameter(torch.empty(layer.size)))
            if layer.learn_initial:
                self.register_parameter(f"initial_value_{layer.name}", nn.Parameter(torch.empty(layer.size)))
            elif layer.name in wiring.depths:
                self.register_buffer(f"initial_value_{layer.name}", torch.empty(layer.size), persistent=False)
            for wire in wiring.wires.get(layer.name, ()):
                if wire.weight is not None:
                    self.register_parameter(wire.weight, nn.Parameter(torch.empty(wire.weight_shape)))
        self.reset_parameters()

    @property
    def state_names(self) -> tuple[str, ...]:
        """For each tensor of the state the layer that it is a value of, and of how many steps ago."""
        return tuple(f"{name}_{delay}" for name, delay in self._kept())

    def reset_parameters(self) -> None:
        """Draw the weights anew and put everything else back to its start."""
        with torch.no_grad():
            for layer in self.wiring.layers:
                for name, start in (
                    (f"constant_{layer.name}", layer.initial),
                    (f"initial_value_{layer.name}", layer.initial),
                    (f"bias_{layer.name}", layer.initial_bias),
                ):
                    vector_N = getattr(self, name, None)
                    if vector_N is not None:
                        vector_N.fill_(start)
                for wire in self.wiring.wires.get(layer.name, ()):
                    if wire.weight is not None:
                        bound = max(wire.weight_shape) ** -0.5
                        self.get_parameter(wire.weight).uniform_(-bound, bound)

    def initial_state(self, batch_size: int) -> State:
        """The initial value of every layer that is kept, as often as it is kept."""
        return tuple(getattr(self, f"initial_value_{name}").repeat(batch_size, 1) for name, _ in self._kept())

    def forward(self, x_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """One step; `x_t` holds the inputs of the graph side by side, the output its output layers likewise."""
        kept = self._kept()
        self._check(x_t, state=state, num_kept=len(kept))
        # Under (name, d) is what the layer gave d steps ago; each value kept moves on by one.
        values: dict[tuple[str, int], torch.Tensor] = dict(zip(kept, state, strict=True))
        values.update(self._inputs(x_t))
        for layer in self.wiring.layers:
            if layer.role == "constant":
                values[layer.name, 0] = self.get_buffer(f"constant_{layer.name}")
            elif layer.role == "hidden":
                values[layer.name, 0] = self._value(layer, values=values)
        rows = len(x_t)
        outputs = [_with_rows(values[name, 0], rows=rows) for name in self.wiring.outputs]
        following = tuple(_with_rows(values[name, delay - 1], rows=rows) for name, delay in kept)
        return _side_by_side(outputs), following

    @property
    def input_size(self) -> int:
        """Features of a step."""
        return self.wiring.input_size

    def with_input_size(self, input_size: int) -> Cell:
        """A cell of the same graph with fresh parameters and an input of another size.

        Raises:
            StrettoError: If the graph has several inputs, or cannot have an input of that size.
        """
        cell = GraphCell(self.wiring.resized(input_size))
        like = next(iter((*self.parameters(), *self.buffers())), None)
        return cell if like is None else cell.to(device=like.device, dtype=like.dtype)

    def extra_repr(self) -> str:
        """The layers in the order of a step, and the connections."""
        return "\n".join(map(str, (*self.wiring.layers, *self.wiring.connections)))

    def _kept(self) -> list[tuple[str, int]]:
        return [(name, delay) for name, depth in self.wiring.depths.items() for delay in range(1, depth + 1)]

    def _check(self, x_t: torch.Tensor, *, state: State, num_kept: int) -> None:
        inputs, size = ", ".join(map(repr, self.wiring.inputs)), self.wiring.input_size
        if x_t.dim() != 2 or x_t.shape[1] != size:
            raise StrettoError(
                f"the graph was given an input of shape {tuple(x_t.shape)} for its input {inputs} of {size} features",
                fix=f"Give rows of the batch times {size} features.",
            )
        if not isinstance(state, tuple) or len(state) != num_kept:
            raise StrettoError(
                f"the graph was given a state that is no tuple of {num_kept} tensors",
                fix="Begin with initial_state(batch_size) and pass on what each step returns.",
            )

    def _inputs(self, x_BF: torch.Tensor) -> dict[tuple[str, int], torch.Tensor]:
        sizes = {layer.name: layer.size for layer in self.wiring.layers}
        names, values, first = self.wiring.inputs, {}, 0
        for name in names:
            values[name, 0] = x_BF if len(names) == 1 else x_BF[:, first : first + sizes[name]]
            first += sizes[name]
        return values

    def _value(self, layer: Layer, *, values: dict[tuple[str, int], torch.Tensor]) -> torch.Tensor:
        """What a hidden layer gives in this step."""
        wires = self.wiring.wires[layer.name]
        arriving = [self._carried(values[wire.source, wire.delay], wire=wire) for wire in wires]
        combine = operator.mul if layer.aggregation == "multiply" else operator.add
        combined = []
        for part in self.wiring.parts[layer.name]:
            terms = [_cut(arriving[number], of=wires[number].destination_range, to=part.units) for number in part.wires]
            if layer.bias:
                terms.insert(0, _cut(self.get_parameter(f"bias_{layer.name}"), of=(0, layer.size), to=part.units))
            combined.append(functools.reduce(combine, terms))
        return ACTIVATIONS[layer.activation](_side_by_side(combined))

    def _carried(self, value_BN: torch.Tensor, *, wire: Wire) -> torch.Tensor:
        """What a wire makes of its source's value."""
        if wire.source_range is not None:
            value_BN = value_BN[..., wire.source_range[0] : wire.source_range[1]]
        if wire.kind == "broadcast":
            first, end = wire.destination_range
            return value_BN.expand(*value_BN.shape[:-1], end - first)
        if wire.weight is None:
            return value_BN
        weight = self.get_parameter(wire.weight)
        return functional.linear(value_BN, weight) if wire.kind == "full" else value_BN * weight


def _cut(value_BN: torch.Tensor, *, of: Range, to: Range) -> torch.Tensor:
    """The columns `to` of a value that stands at the columns `of`."""
    return value_BN if of == to else value_BN[..., to[0] - of[0] : to[1] - of[0]]


def _with_rows(value: torch.Tensor, *, rows: int) -> torch.Tensor:
    """A value that parameters alone decide is a vector, the same for every row."""
    return value if value.dim() == 2 else value.expand(rows, -1)


def _side_by_side(values: list[torch.Tensor]) -> torch.Tensor:
    if len(values) == 1:
        return values[0]
    rows = next((len(value) for value in values if value.dim() == 2), None)
    return torch.cat(values if rows is None else [_with_rows(value, rows=rows) for value in values], dim=-1)
