"""The functions that a layer of a graph may apply to its sum or product.

Shape legend: B rows of the batch, N units of the layer.
"""

from collections.abc import Callable
from typing import Final, TypeAlias

import torch
from torch.nn import functional

Activation: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


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
