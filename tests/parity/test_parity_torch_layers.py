"""Layers of torch with the same weights: outputs, states and gradients, in stacks, both ways, padded and packed.

Shape legend: B sequences, T steps, F features, H hidden units, P projected units.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity_cells import F
from parity_oracle import error_of, noise
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import stretto
from stretto import cells
from stretto.cells import Cell, load_layer

H, P = 7, 3
KINDS: dict[str, tuple[Callable[..., nn.Module], Callable[[], Cell]]] = {
    "rnn": (nn.RNN, lambda: cells.Elman(F, H)),
    "rnn-relu": (lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k), lambda: cells.Elman(F, H, nonlinearity="relu")),
    "gru": (nn.GRU, lambda: cells.GRU(F, H)),
    "lstm": (nn.LSTM, lambda: cells.LSTM(F, H)),
    "projected": (lambda *a, **k: nn.LSTM(*a, proj_size=P, **k), lambda: cells.ProjectedLSTM(F, H, proj_size=P)),
}


def _pair(kind: str, num_layers: int, both_ways: bool, *, batch_first: bool = True) -> tuple[nn.Module, stretto.RNN]:
    torch.manual_seed(0)
    make, cell = KINDS[kind]
    theirs = make(F, H, num_layers=num_layers, bidirectional=both_ways, batch_first=batch_first).double()
    ours = stretto.RNN(cell().double(), num_layers, both_ways, batch_first=batch_first, backend="cpp")
    for index, one in enumerate(ours.cells):
        layer, reverse = divmod(index, 2) if both_ways else (index, 0)
        load_layer(one, theirs, layer=layer, reverse=bool(reverse))  # type: ignore[arg-type]
    return theirs, ours


def _parts(state: Any, ours: stretto.RNN) -> list[torch.Tensor]:
    """Our states as torch has them: all h, one on the other, then all c."""
    each = [state] if len(ours.cells) == 1 else list(state)
    parts = [part if isinstance(part, tuple) else (part,) for part in each]
    return [torch.stack(group) for group in zip(*parts, strict=True)]


def _names(module: nn.Module) -> list[str]:
    """Names of parameters as torch has them."""
    if not isinstance(module, stretto.RNN):
        return [name for name, _ in module.named_parameters()]
    names = []
    for name, _ in module.cells.named_parameters():
        index, _, kind = name.partition(".")
        layer, reverse = divmod(int(index), 2) if module.bidirectional else (int(index), 0)
        names.append(f"{kind}_l{layer}{'_reverse' if reverse else ''}")
    return names


def _assert_same(
    modules: tuple[nn.Module, stretto.RNN], ours: Any, theirs: Any, x_BTF: torch.Tensor, *, gradients: bool = True
) -> None:
    """Check outputs, states and gradients of a layer of torch and ours."""
    results = []
    for module, (y, state) in zip(modules, (theirs, ours), strict=True):
        states = list(state) if isinstance(state, tuple) else [state]
        made = [y, *(_parts(state, module) if isinstance(module, stretto.RNN) else states)]
        found = dict(zip(["y", "h", "c"], made, strict=False))
        if gradients:
            weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
            total = (y * weights).sum() + sum((part**2).sum() * (1 + number) for number, part in enumerate(made[1:]))
            # By name: parameters of projected cells come in another order than torch's.
            slopes = torch.autograd.grad(total, [x_BTF, *module.parameters()])
            found |= dict(zip(["x", *_names(module)], slopes, strict=True))
        results.append(found)
    assert results[0].keys() == results[1].keys()
    for name, wanted in results[0].items():
        assert error_of(results[1][name], wanted) < 1e-10, name


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_padded_batches(kind: str, num_layers: int, both_ways: bool) -> None:
    theirs, ours = _pair(kind, num_layers, both_ways)
    x_BTF = noise(3, 8, F).requires_grad_()
    _assert_same((theirs, ours), ours(x_BTF), theirs(x_BTF), x_BTF)


@pytest.mark.parametrize("sort", [True, False])
@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize("kind", ["rnn", "gru", "lstm", "projected"])
def test_packed_batches(kind: str, both_ways: bool, sort: bool) -> None:
    theirs, ours = _pair(kind, 2, both_ways)
    lengths = torch.tensor([8, 8, 3, 1] if sort else [3, 8, 1, 8])
    x_BTF = noise(4, 8, F).requires_grad_()
    (one, state), (other, expected) = (
        module(pack_padded_sequence(x_BTF, lengths, batch_first=True, enforce_sorted=sort)) for module in (ours, theirs)
    )
    for field in ("batch_sizes", "sorted_indices", "unsorted_indices"):
        mine, their = getattr(one, field), getattr(other, field)
        assert mine is their is None or torch.equal(mine, their)
    one, other = (pad_packed_sequence(y, batch_first=True)[0] for y in (one, other))
    _assert_same((theirs, ours), (one, state), (other, expected), x_BTF)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_first_with_a_given_state(kind: str) -> None:
    theirs, ours = _pair(kind, 2, True, batch_first=False)
    x_TBF = noise(8, 3, F)
    given = [torch.randn_like(part) for part in _parts(ours(x_TBF)[1], ours)]
    nested = tuple(tuple(part[index] for part in given) for index in range(4))
    made = ours(x_TBF, nested if len(given) > 1 else tuple(part[0] for part in nested))
    wanted = theirs(x_TBF, tuple(given) if len(given) > 1 else given[0])
    _assert_same((theirs, ours), made, wanted, x_TBF, gradients=False)
