"""Results of a layer, all gradients included, and how to compare those of two.

Shape legend: B sequences, T steps, F features.
"""

import copy
from typing import Any

import torch

import stretto
from stretto.state import flatten, unflatten

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def forgetful(rnn: stretto.RNN, scale: float = 0.3) -> stretto.RNN:
    """The same layer with recurrent weights scaled: below 1, states are forgotten within a few steps."""
    with torch.no_grad():
        for name, parameter in rnn.named_parameters():
            if "hh" in name:
                parameter.mul_(scale)
    return rnn


def pair(
    cell: torch.nn.Module, solver: Any, dtype: torch.dtype = torch.float64, *, scale: float = 0.3, **words: Any
) -> list[stretto.RNN]:
    """A layer that runs sequentially, and its twin with a solver."""
    serial = forgetful(stretto.RNN(cell, **words).to(dtype), scale)
    parallel = copy.deepcopy(serial)
    parallel.solver = solver
    return [serial, parallel]


def results(rnn: stretto.RNN, x_BTF: torch.Tensor, **words: Any) -> dict[str, torch.Tensor]:
    """Outputs, final states and every gradient: of the input, of a given initial state and of parameters."""
    x_BTF = x_BTF.detach().clone().requires_grad_()
    state = rnn.initial_state(len(x_BTF))
    generator = torch.Generator().manual_seed(3)
    given = [part.detach().clone().normal_(generator=generator).requires_grad_() for part in flatten(state)]
    y, after = rnn(x_BTF, unflatten(state, given), **words)
    generator = torch.Generator().manual_seed(5)
    found = {"y": y, **{f"final {n}": part for n, part in enumerate(flatten(after))}}
    loss = sum((t * torch.randn(t.shape, generator=generator, dtype=t.dtype)).sum() for t in found.values())
    inputs = {"x": x_BTF, **dict(rnn.named_parameters())} | {f"state {n}": part for n, part in enumerate(given)}
    gradients = torch.autograd.grad(loss, list(inputs.values()))  # type: ignore[arg-type]
    values = {name: tensor.detach() for name, tensor in found.items()}
    return values | {f"d {name}": g for name, g in zip(inputs, gradients, strict=True)}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float) -> None:
    """Check that the largest difference of each tensor is within a share of its largest magnitude."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        scale = max(1e-3, float(other[name].abs().max())) if value.numel() else 1.0
        worst = float((value - other[name]).abs().max()) / scale if value.numel() else 0.0
        assert worst <= tolerance, (name, worst)
