"""Operators that are recorded as simpler ones, in loops of generated code.

Shape legend: B sequences, T steps, F features.
"""

import math
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.nn import functional

import stretto
from rnn_definition import by_hand
from stretto.graph.decompose import KEPT
from stretto.kernels.lower import REDUCTIONS
from stretto.kernels.pointwise import POINTWISE

pytestmark = pytest.mark.usefixtures("quick_compiler")

F: Final = 6


def _matrix(a: torch.Tensor) -> torch.Tensor:
    """Two by two of each row, where the largest element of a column is not always on the diagonal."""
    return a[:, :4].view(-1, 2, 2) + torch.tensor([[0.5, 1.5], [2.0, 3.5]], dtype=a.dtype)


def _choose_columns(a: torch.Tensor) -> torch.Tensor:
    made = a.clone()
    made[:, torch.arange(F) % 2 == 0] = 0.5
    return made


OPERATORS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "cumsum": lambda a: a.cumsum(-1),
    "cumprod": lambda a: torch.tanh(a).cumprod(-1),
    "logcumsumexp": lambda a: a.logcumsumexp(-1),
    "prod": lambda a: torch.tanh(a).prod(-1, keepdim=True) * a,
    "std": lambda a: a.std(-1, keepdim=True) * a,
    "var_mean": lambda a: torch.cat(torch.var_mean(a, 1, keepdim=True), 1).mean(1, keepdim=True) * a,
    "group_norm": lambda a: functional.group_norm(a, 2),
    "rms_norm": lambda a: functional.rms_norm(a, (F,)),
    "layer_norm of a matrix": lambda a: functional.layer_norm(a.view(-1, 2, 3), (2, 3)).flatten(1),
    "normalize": lambda a: functional.normalize(a, dim=-1),
    "norm of order 3": lambda a: a.norm(3, dim=-1, keepdim=True) * a,
    "greatest": lambda a: a.norm(math.inf, dim=-1, keepdim=True) * a,
    "cosine similarity": lambda a: functional.cosine_similarity(a, a * a + 0.1, dim=-1)[:, None] * a,
    "logsumexp": lambda a: a.logsumexp(-1, keepdim=True) * a,
    "softmin": lambda a: functional.softmin(a, -1),
    "glu": lambda a: functional.glu(torch.cat([a, a * a], 1)),
    "one_hot": lambda a: functional.one_hot(a.argmax(-1), F) * a,
    "flip": lambda a: a.flip(-1),
    "roll": lambda a: a.roll(2, -1),
    "repeat": lambda a: a.repeat(1, 2)[:, 3:9],
    "pad": lambda a: functional.pad(a, (2, 1), value=0.3)[:, 1:7],
    "positions": lambda a: a[:, [2, 0, 1, -1, 3, 3]],
    "grid": lambda a: a.view(-1, 2, 3)[:, torch.tensor([[1], [-2], [0]]), torch.tensor([2, 0])].flatten(1),
    "places of each row": lambda a: a[torch.arange(len(a))[:, None], a.detach().argsort(-1)],
    "repeat for each row": lambda a: torch.linspace(0, 1, F, dtype=a.dtype).unsqueeze(0).repeat(a.shape[0], 1) * a,
    "distances": lambda a: torch.cdist(a.view(-1, 3, 2), a.view(-1, 3, 2) + 1).flatten(1)[:, :F],
    "transposed convolution": lambda a: functional.conv_transpose1d(
        a.view(-1, 2, 3), torch.linspace(-1, 1, 18, dtype=a.dtype).view(2, 3, 3), stride=2, padding=1, output_padding=1
    ).flatten(1)[:, 3 : 3 + F],
    "transposed convolution of groups": lambda a: functional.conv_transpose2d(
        a.view(-1, 2, 1, 3), torch.linspace(-1, 1, 8, dtype=a.dtype).view(2, 1, 2, 2), dilation=(1, 2), groups=2
    ).flatten(1)[:, :F],
    "resized": lambda a: functional.interpolate(a.view(-1, 1, 2, 3), (3, 2), mode="bilinear").flatten(1),
    "prelu": lambda a: functional.prelu(a, torch.tensor([0.2], dtype=a.dtype)),
    "logit": lambda a: torch.logit(torch.sigmoid(a)),
    "logaddexp": lambda a: torch.logaddexp(a, a * a),
    "tril": lambda a: (a[:, :, None] * a[:, None]).tril().sum(-1),
    "aminmax": lambda a: a * torch.aminmax(a, dim=-1, keepdim=True)[1],
    "diagonal": lambda a: _matrix(a).diagonal(-1, 1, 2).repeat(1, 6) * a,
    "trace": lambda a: torch.einsum("bii->b", _matrix(a))[:, None] * a,
    "kthvalue": lambda a: a.kthvalue(3, dim=-1, keepdim=True).values * a,
    "median": lambda a: a.median(-1, keepdim=True).values * a,
    "quantile": lambda a: a.quantile(0.3, dim=-1, keepdim=True) * a,
    "cummax": lambda a: a.cummax(-1).values - a.cummin(-1).values,
    "searchsorted": lambda a: torch.searchsorted(torch.tensor([-0.5, 0.1], dtype=a.dtype), a) * a,
    "copysign": lambda a: torch.copysign(a, a.flip(-1)),
    "scatter_reduce": lambda a: torch.zeros_like(a).scatter_reduce(1, torch.arange(F).expand_as(a) // 2, a, "sum"),
    "columns that a mask chooses": _choose_columns,
    "unsqueeze in place": lambda a: a.clone().unsqueeze_(1).mul_(0.5).squeeze_(1),
    "solve": lambda a: torch.linalg.solve(_matrix(a), a[:, :2]).repeat(1, 3),
    "inverse": lambda a: torch.linalg.inv(_matrix(a).transpose(-1, -2)).flatten(1).sum(-1, keepdim=True) * a,
    "determinants": lambda a: (torch.det(_matrix(a)) + torch.linalg.slogdet(_matrix(a))[1])[:, None] * a,
    "cholesky": lambda a: torch.linalg.cholesky(_matrix(a) @ _matrix(a).mT + 0.1).flatten(1).repeat(1, 2)[:, :F],
    "triangular": lambda a: torch.linalg.solve_triangular(_matrix(a), a.view(-1, 2, 3), upper=True).flatten(1),
    "max_pool": lambda a: functional.max_pool1d(a[:, None], 2, padding=1)[:, 0, :3].repeat(1, 2),
    "avg_pool": lambda a: functional.avg_pool2d(a.view(-1, 1, 2, 3), (1, 2), stride=1).flatten(1)[:, :3].repeat(1, 2),
    "instance_norm": lambda a: functional.instance_norm(a.view(-1, 2, 3)).flatten(1),
    "bilinear": lambda a: functional.bilinear(a, a, torch.ones(F, F, F, dtype=a.dtype)) * 0.01,
    "rrelu": functional.rrelu,
    "gamma": lambda a: torch.lgamma(a.abs() + 0.5) * 0.1 + torch.erfinv(0.9 * torch.tanh(a)),
}


class Along(stretto.Cell):
    """Several operators along the features, each on a product of its own."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names
        self.both = nn.ModuleList(nn.Linear(2 * F, F) for _ in names)

    def initial_state(self, batch_size: int) -> Any:
        """Zeros, which norms have a gradient at."""
        return self.zeros(batch_size, F)

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        """One step."""
        joined = torch.cat([x_t, state], 1)
        made = [OPERATORS[name](one(joined)) for name, one in zip(self.names, self.both, strict=True)]
        new = 0.5 * state + torch.tanh(torch.stack(made).mean(0))
        return new, new


def _check(names: list[str], backend: Any) -> None:
    torch.manual_seed(0)
    cell = Along(names).double()
    x_BTF = torch.randn(3, 5, F, dtype=torch.float64, requires_grad=True)
    leaves = [x_BTF, *cell.parameters()]
    found = stretto.RNN(cell, backend=backend)(x_BTF, lengths=[5, 2, 4])
    wanted = by_hand([cell], x_BTF, lengths=[5, 2, 4], state=None, num_directions=1)
    for one, other in zip(_with_gradients(found, leaves), _with_gradients(wanted, leaves), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


def _with_gradients(result: Any, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    y_BTF, state = result
    (state_BF,) = state if isinstance(state, list) else [state]
    return [y_BTF, state_BF, *torch.autograd.grad(y_BTF.square().sum() + state_BF.sin().sum(), leaves)]


def test_operators_along_features_equal_the_loop_operator_by_operator() -> None:
    _check(list(OPERATORS), "eager")


@pytest.mark.parametrize("start", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_operators_along_features_are_compiled(start: int) -> None:
    _check(list(OPERATORS)[start::3], "cpp")


def test_what_code_is_generated_for_is_recorded_as_it_is() -> None:
    assert {*POINTWISE, *REDUCTIONS} <= KEPT
