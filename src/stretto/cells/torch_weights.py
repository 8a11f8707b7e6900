"""Weights from and to the recurrent modules of torch."""

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import torch
from torch import nn

from stretto.cells.cell import Cell
from stretto.cells.elman import Elman
from stretto.cells.gru import GRU
from stretto.cells.lstm import LSTM, ProjectedLSTM
from stretto.errors import StrettoError

StepFunction: TypeAlias = Callable[[torch.Tensor, Any], tuple[torch.Tensor, Any]]
WEIGHT_NAMES: Final = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def cell_from(module: nn.Module, *, layer: int = 0, reverse: bool = False) -> Cell:
    """The cell of Stretto that matches a cell, or a layer, of torch and shares its parameters: training one trains the
    other, and `state_dict` and optimiser of the original go on as they were.

    Args:
        module: A `torch.nn.RNNCell`, `GRUCell` or `LSTMCell`, or a `torch.nn.RNN`, `GRU` or `LSTM`.
        layer: Which of its layers.
        reverse: Whether to take the backward direction of a bidirectional one.

    Raises:
        StrettoError: The module is anything else, a subclass included, it has no such layer, or its weights are not
            plain parameters.
    """
    # A subclass may compute something else, so only torch's own classes match.
    is_layer = type(module) in (nn.RNN, nn.GRU, nn.LSTM)
    if not is_layer and type(module) not in (nn.RNNCell, nn.GRUCell, nn.LSTMCell):
        raise StrettoError(
            f"{type(module).__name__} has no matching cell",
            fix="Give a torch.nn.RNNCell, GRUCell, LSTMCell, RNN, GRU or LSTM, not a subclass.",
        )
    assert isinstance(module, (nn.RNNCellBase, nn.RNNBase))
    suffix = _suffix(layer, reverse=reverse) if is_layer else ""
    if not hasattr(module, f"weight_ih{suffix}") or (not is_layer and (layer or reverse)):
        raise _no_layer(module, layer, reverse=reverse)
    parameters = {name: getattr(module, name + suffix, None) for name in (*WEIGHT_NAMES, "weight_hr")}
    kind, options = matching_cell(module)
    sizes = {"proj_size": module.proj_size} if kind is ProjectedLSTM else {}
    width = getattr(module, f"weight_ih{suffix}").shape[1]
    # These parameters are replaced below, so spend neither memory nor random numbers on them.
    with torch.device("meta"):
        cell: Cell = kind(width, module.hidden_size, bias=module.bias, **options, **sizes)
    for name, parameter in parameters.items():
        if parameter is not None and not isinstance(parameter, nn.Parameter):
            raise StrettoError(
                f"{name}{suffix} of the {type(module).__name__} is computed from other tensors and cannot be shared",
                fix="Remove its parametrisation, weight norm or pruning first.",
            )
        if parameter is not None or name in WEIGHT_NAMES:
            setattr(cell, name, parameter)
    return cell.train(module.training)


def step_of_torch(cell: nn.Module) -> StepFunction | None:
    """One step of a cell by PyTorch's function for it, which takes less time than the cell's own operators.

    None for other cells, and for those changed by a subclass, by hooks or by weights that are computed.
    """
    find = _STEPS_OF_TORCH.get(type(cell))
    if find is None or "forward" in cell.__dict__ or cell._forward_hooks or cell._forward_pre_hooks:
        return None
    return find(cell)


def _step_elman(cell: Elman) -> StepFunction:
    run = torch.rnn_relu_cell if cell.nonlinearity == "relu" else torch.rnn_tanh_cell
    return lambda x, state: (_gates(run, cell, x, state),) * 2


def _step_gru(cell: GRU) -> StepFunction | None:
    return (lambda x, state: (_gates(torch.gru_cell, cell, x, state),) * 2) if cell.reset == "after" else None


def _step_lstm(cell: LSTM) -> StepFunction:
    def step(x: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        after = _gates(torch.lstm_cell, cell, x, state)
        return after[0], after

    return step


def _gates(run: Any, cell: Any, x: torch.Tensor, state: Any) -> Any:
    return run(x, state, cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh)


_STEPS_OF_TORCH: Final[dict[type, Callable[[Any], StepFunction | None]]] = {
    Elman: _step_elman,
    GRU: _step_gru,
    LSTM: _step_lstm,
}


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


def matching_cell(module: nn.Module) -> tuple[Any, dict[str, str]]:
    """The class that does a step of a module of torch, and the option that decides what it computes."""
    if isinstance(module, (nn.RNN, nn.RNNCell)):
        return Elman, {"nonlinearity": module.nonlinearity}
    if isinstance(module, (nn.GRU, nn.GRUCell)):
        return GRU, {"reset": "after"}
    return ProjectedLSTM if isinstance(module, nn.LSTM) and module.proj_size else LSTM, {}


def _describe(kind: type, options: Mapping[str, str]) -> str:
    return " with ".join([kind.__name__, *(f"{name}={value!r}" for name, value in options.items())])


def _pairs(cell: Cell, module: nn.Module, *, layer: int, reverse: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(parameter of the cell, parameter of the layer), after checking that all of them match."""
    if not isinstance(module, (nn.RNN, nn.GRU, nn.LSTM)):
        raise StrettoError(
            f"{type(module).__name__} has no layers of recurrent weights", fix="Give a torch.nn.RNN, GRU or LSTM."
        )
    kind, options = matching_cell(module)
    given = {name: str(getattr(cell, name)) for name in ("nonlinearity", "reset") if hasattr(cell, name)}
    if type(cell) is not kind or given != options:
        raise StrettoError(
            f"{_describe(type(cell), given)} does not compute what a layer of {type(module).__name__} does",
            fix=f"Use {_describe(kind, options)}; for a wrapped cell, give its .cell.",
        )
    suffix = _suffix(layer, reverse=reverse)
    inside = dict(cell.named_parameters())
    outside = {name[: -len(suffix)]: value for name, value in module.named_parameters() if name.endswith(suffix)}
    if not outside:
        raise _no_layer(module, layer, reverse=reverse)
    here, there = _describe_sizes(inside), _describe_sizes(outside)
    if here != there:
        raise StrettoError(
            f"the cell has {here}, layer {layer} of the {type(module).__name__} has {there}",
            fix="Make the cell with the sizes, the bias and the dtype of that layer.",
        )
    return [(inside[name], outside[name]) for name in inside]


def _suffix(layer: int, *, reverse: bool) -> str:
    return f"_l{layer}{'_reverse' if reverse else ''}"


def _no_layer(module: nn.Module, layer: int, *, reverse: bool) -> StrettoError:
    return StrettoError(
        f"{module} has no layer {layer}{' in reverse' if reverse else ''}",
        fix="Count layers from 0, and ask for reverse only if the module is bidirectional.",
    )


def _describe_sizes(parameters: dict[str, nn.Parameter]) -> str:
    return ", ".join(f"{name} {tuple(value.shape)} of {value.dtype}" for name, value in sorted(parameters.items()))
