"""Every activation of a graph against its formula, value and gradient.

Shape legend: B rows, F features, N units.
"""

import math

import pytest
import torch

from stretto.graph import Graph
from stretto.graph.network.activation import ACTIVATIONS

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}


def _erf(x: torch.Tensor) -> torch.Tensor:
    """Erf by its Maclaurin series, good for small arguments."""
    terms = [(-1) ** n / (math.factorial(n) * (2 * n + 1)) * x ** (2 * n + 1) for n in range(40)]
    return 2.0 / math.sqrt(math.pi) * torch.stack(terms).sum(dim=0)


def _selu(x: torch.Tensor) -> torch.Tensor:
    scale, alpha = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717
    return scale * torch.where(x > 0, x, alpha * (x.exp() - 1.0))


FORMULAS = {
    "linear": lambda x: x,
    "sigmoid": lambda x: 1.0 / (1.0 + (-x).exp()),
    "tanh": lambda x: (x.exp() - (-x).exp()) / (x.exp() + (-x).exp()),
    "relu": lambda x: torch.where(x > 0, x, 0.0),
    "softplus": lambda x: (1.0 + x.exp()).log(),
    "softmax": lambda x: x.exp() / x.exp().sum(dim=1, keepdim=True),
    "one_minus": lambda x: 1.0 - x,
    "negate": lambda x: -x,
    "abs": lambda x: torch.where(x > 0, x, -x),
    "cos": lambda x: torch.sin(x + math.pi / 2.0),
    "elu": lambda x: torch.where(x > 0, x, x.exp() - 1.0),
    "erf": _erf,
    "exp": lambda x: math.e**x,
    "gelu": lambda x: 0.5 * x * (1.0 + _erf(x / math.sqrt(2.0))),
    "hardtanh": lambda x: x.clamp(-1.0, 1.0),
    "leaky_relu": lambda x: torch.where(x > 0, x, 0.01 * x),
    "logsigmoid": lambda x: -(1.0 + (-x).exp()).log(),
    "mish": lambda x: x * torch.tanh((1.0 + x.exp()).log()),
    "selu": _selu,
    "silu": lambda x: x / (1.0 + (-x).exp()),
    "sin": lambda x: torch.cos(x - math.pi / 2.0),
    "softsign": lambda x: x / (1.0 + torch.where(x > 0, x, -x)),
    "square": lambda x: x * x,
}


def test_every_activation_has_a_formula() -> None:
    assert FORMULAS.keys() == ACTIVATIONS.keys()


@pytest.mark.parametrize("name", FORMULAS)
def test_an_activation_is_its_formula(name: str) -> None:
    graph = Graph()
    graph.input("x", 4)
    graph.layer("h", 4, activation=name)
    graph.connect("x", "h", kind="identity")
    graph.output("h")
    x_BF = torch.linspace(-1.7, 1.9, 12, dtype=torch.float64).reshape(3, 4).requires_grad_()
    ours_BN, _ = graph.cell()(x_BF, ())
    theirs_BN = FORMULAS[name](x_BF)
    torch.testing.assert_close(ours_BN, theirs_BN, **TOLERANCE)
    weights_BN = torch.arange(12.0, dtype=torch.float64).reshape(3, 4)
    gradients = [torch.autograd.grad((y_BN * weights_BN).sum(), x_BF)[0] for y_BN in (ours_BN, theirs_BN)]
    torch.testing.assert_close(*gradients, **TOLERANCE)
