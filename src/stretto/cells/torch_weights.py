"""Weights from and to the recurrent modules of torch."""

from typing import Final, Literal

import torch
from torch import nn

from stretto.cells.cell import Cell
from stretto.cells.elman import Elman
from stretto.cells.gru import GRU
from stretto.cells.lstm import LSTM, ProjectedLSTM
from stretto.errors import StrettoError

WEIGHT_NAMES: Final = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def cell_from(module: nn.Module) -> Cell:
    """The cell of Stretto that matches a cell of torch and shares its parameters: training one trains the other.

    Args:
        module: A `torch.nn.RNNCell`, `GRUCell` or `LSTMCell`.

    Raises:
        StrettoError: The module is anything else, a subclass included, or its weights are not plain parameters.
    """
    # These parameters are replaced below, so spend neither memory nor random numbers on them.
    with torch.device("meta"):
        cell = _matching_cell(module)
    for name in WEIGHT_NAMES:
        parameter = getattr(module, name)
        if parameter is not None and not isinstance(parameter, nn.Parameter):
            raise StrettoError(
                f"{name} of the {type(module).__name__} is computed from other tensors and cannot be shared",
                fix="Remove its parametrisation, weight norm or pruning first.",
            )
        setattr(cell, name, parameter)
    return cell.train(module.training)


def load_layer(cell: Cell, module: nn.Module, *, layer: int = 0, reverse: bool = False) -> None:
    """Copy the weights of one layer of a module of torch into a cell.

    Args:
        cell: An `Elman`, `GRU`, `LSTM` or `ProjectedLSTM`, changed in place.
        module: The `torch.nn.RNN`, `GRU` or `LSTM` of the same kind and sizes.
        layer: Which layer.
        reverse: Whether to take the backward direction of a bidirectional module.

    Raises:
        StrettoError: Cell and module differ in kind, sizes or dtype, or the module has no such layer.
    """
    with torch.no_grad():
        for inside, outside in _pairs(cell, module, layer=layer, reverse=reverse):
            inside.copy_(outside)


def store_layer(cell: Cell, module: nn.Module, *, layer: int = 0, reverse: bool = False) -> None:
    """Copy the weights of a cell into one layer of a module of torch.

    Args:
        cell: An `Elman`, `GRU`, `LSTM` or `ProjectedLSTM`.
        module: The `torch.nn.RNN`, `GRU` or `LSTM` of the same kind and sizes, changed in place.
        layer: Which layer.
        reverse: Whether to fill the backward direction of a bidirectional module.

    Raises:
        StrettoError: Cell and module differ in kind, sizes or dtype, or the module has no such layer.
    """
    with torch.no_grad():
        for inside, outside in _pairs(cell, module, layer=layer, reverse=reverse):
            outside.copy_(inside)


def _matching_cell(module: nn.Module) -> Cell:
    # A subclass may compute something else, so only torch's own classes match.
    if type(module) is nn.RNNCell:
        squash: Literal["tanh", "relu"] = "relu" if module.nonlinearity == "relu" else "tanh"
        return Elman(module.input_size, module.hidden_size, bias=module.bias, nonlinearity=squash)
    if type(module) is nn.GRUCell:
        return GRU(module.input_size, module.hidden_size, bias=module.bias)
    if type(module) is nn.LSTMCell:
        return LSTM(module.input_size, module.hidden_size, bias=module.bias)
    raise StrettoError(
        f"{type(module).__name__} has no matching cell",
        fix="Give a torch.nn.RNNCell, GRUCell or LSTMCell, not a subclass; for layers see stretto.cells.load_layer.",
    )


def _pairs(cell: Cell, module: nn.Module, *, layer: int, reverse: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(parameter of the cell, parameter of the layer), after checking that all of them match."""
    wanted, given = _describe_layer(module), _describe_cell(cell)
    if wanted != given:
        raise StrettoError(
            f"{given} does not compute what a layer of {type(module).__name__} does",
            fix=f"Use {wanted}; for a wrapped cell, give its .cell.",
        )
    suffix = f"_l{layer}{'_reverse' if reverse else ''}"
    inside = dict(cell.named_parameters())
    outside = {name[: -len(suffix)]: value for name, value in module.named_parameters() if name.endswith(suffix)}
    if not outside:
        raise StrettoError(
            f"{module} has no layer {layer}{' in reverse' if reverse else ''}",
            fix="Count layers from 0, and ask for reverse only if the module is bidirectional.",
        )
    here, there = _describe_sizes(inside), _describe_sizes(outside)
    if here != there:
        raise StrettoError(
            f"the cell has {here}, layer {layer} of the {type(module).__name__} has {there}",
            fix="Make the cell with the sizes, the bias and the dtype of that layer.",
        )
    return [(inside[name], outside[name]) for name in inside]


def _describe_layer(module: nn.Module) -> str:
    if isinstance(module, nn.RNN):
        return f"Elman with nonlinearity={module.nonlinearity!r}"
    if isinstance(module, nn.GRU):
        return "GRU with reset='after'"
    if isinstance(module, nn.LSTM):
        return "ProjectedLSTM" if module.proj_size else "LSTM"
    raise StrettoError(
        f"{type(module).__name__} has no layers of recurrent weights", fix="Give a torch.nn.RNN, GRU or LSTM."
    )


def _describe_cell(cell: Cell) -> str:
    if isinstance(cell, Elman):
        return f"Elman with nonlinearity={cell.nonlinearity!r}"
    if isinstance(cell, GRU):
        return f"GRU with reset={cell.reset!r}"
    return type(cell).__name__ if isinstance(cell, LSTM | ProjectedLSTM) else f"the cell {type(cell).__name__}"


def _describe_sizes(parameters: dict[str, nn.Parameter]) -> str:
    return ", ".join(f"{name} {tuple(value.shape)} of {value.dtype}" for name, value in sorted(parameters.items()))
