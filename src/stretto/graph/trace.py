"""Tracing one step of a cell to a graph of operators."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stretto.errors import StrettoError
from stretto.graph.node import Node
from stretto.graph.recorder import TWO_SIZES, Recording, Untraceable, merged, record, refuse_own_gradients
from stretto.state import flatten, unflatten


@dataclass(slots=True)
class StepGraph:
    """One step `(x_t, state) -> (y_t, state')` as nodes in the order they ran.

    Attributes:
        nodes: All nodes, inputs included.
        x: The step's input.
        states: The state before the step, part by part.
        next_states: The state after it.
        y: The step's output.
        parameters: Parameters and buffers of the cell by name, as they are used.
        constants: Tensors the cell reaches without being parameters or buffers.
    """

    nodes: list[Node]
    x: Node
    states: list[Node]
    next_states: list[Node]
    y: Node
    parameters: dict[str, Node]
    constants: dict[Node, torch.Tensor]


def trace(cell: nn.Module, *, x_shape: tuple[int, ...], x_dtype: torch.dtype, state: Any) -> StepGraph:
    """Record one step of `cell`.

    Args:
        cell: Called as `cell(x_t, state)`.
        x_shape: Sizes of a row of the input.
        x_dtype: Of the input.
        state: A state for any number of rows, for its structure, shapes and dtypes.

    Raises:
        Untraceable: If the step is no fixed graph of operators; the reason is in the message.
        StrettoError: If the cell does not keep to the contract of a cell.
    """
    tensors: Mapping[str, torch.Tensor] = {**dict(cell.named_parameters()), **dict(cell.named_buffers())}
    device = next((tensor.device for tensor in (*tensors.values(), *flatten(state))), torch.device("cpu"))
    row_shapes = [(tuple(part.shape[1:]), part.dtype) for part in flatten(state)]
    recordings: list[tuple[Recording, dict[str, Any]]] = []
    for rows in TWO_SIZES:

        def run(recorder: Any, rows: int = rows) -> dict[str, Any]:
            x = _example((rows, *x_shape), x_dtype, device)
            parts = [_example((rows, *shape), dtype, device) for shape, dtype in row_shapes]
            found: dict[str, Any] = {"x": recorder.enter(x, "x")}
            found["states"] = [recorder.enter(part, f"state{index}") for index, part in enumerate(parts)]
            found["parameters"] = {
                name: recorder.enter(tensor, name.replace(".", "_")) for name, tensor in tensors.items()
            }
            with recorder:
                y, after = _tried(cell, x, unflatten(state, parts))
            _check_step(cell, y, after, parts)
            refuse_own_gradients(recorder, [y, *flatten(after)])
            found["y"], found["next"] = recorder.look_up(y), [recorder.look_up(part) for part in flatten(after)]
            return found

        with torch.enable_grad():
            recordings.append(record(run, heeds_no_grad=True))
    (first, found), (second, _) = recordings
    nodes = merged(first, second)
    return StepGraph(
        nodes=nodes,
        x=found["x"],
        states=found["states"],
        next_states=found["next"],
        y=found["y"],
        parameters=found["parameters"],
        constants=first.constants,
    )


def _example(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor that gradients flow through, like those that will be there."""
    made = torch.zeros(shape, dtype=dtype, device=device)
    return made.requires_grad_().clone() if dtype.is_floating_point else made


def _tried(cell: nn.Module, x: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
    try:
        return call_cell(cell, x, state)
    except (Untraceable, StrettoError):
        raise
    except Exception as error:  # if it is the cell's own, it comes again when the cell runs as it is
        raise Untraceable(f"the step failed when it was traced: {type(error).__name__}: {error}") from error


def call_cell(cell: nn.Module, x: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
    """One step, for our cells and for torch's, which return the next state alone."""
    result = cell(x, state)
    if isinstance(cell, nn.LSTMCell):
        return result[0], result
    if isinstance(cell, (nn.GRUCell, nn.RNNCell)):
        return result, result
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], torch.Tensor):
        raise StrettoError(
            f"{type(cell).__name__}.forward returned {type(result).__name__}, not an output and the next state",
            fix="Return (y_t, new_state) from forward.",
        )
    return result


def _check_step(cell: nn.Module, y: torch.Tensor, after: Any, before: list[torch.Tensor]) -> None:
    name = type(cell).__name__
    now = flatten(after)
    if [(part.shape, part.dtype) for part in now] != [(part.shape, part.dtype) for part in before]:
        was, new = (", ".join(f"{tuple(p.shape[1:])} {p.dtype}" for p in parts) for parts in (before, now))
        raise StrettoError(
            f"{name}.forward takes a state with rows of {was} and returns one with rows of {new}",
            fix="Return a state of the same shapes and dtypes as it was given.",
        )
    if y.dim() == 0 or (before and len(y) != len(before[0])):
        raise StrettoError(
            f"{name}.forward returned an output of shape {tuple(y.shape)}",
            fix="Return one output row for each row of x_t.",
        )
