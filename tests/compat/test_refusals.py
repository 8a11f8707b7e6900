"""Wrong calls: each is a StrettoError that names what was given and the way out, never a crash or a wrong result.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compat_cases import B, F, T
from torch import nn

import stretto
from stretto import cells

H = 6
pytestmark = pytest.mark.usefixtures("quick_compiler")
META = torch.device("meta")


class OnAnotherDevice(cells.Elman):
    def initial_state(self, batch_size: int) -> torch.Tensor:
        return torch.zeros(batch_size, H, device=META)


def _partly_on_meta() -> stretto.RNN:
    cell = cells.GRU(F, H)
    cell.weight_hh = nn.Parameter(cell.weight_hh.to(META))
    return stretto.RNN(cell)


def _rnn(**options: Any) -> stretto.RNN:
    return stretto.RNN(cells.GRU(F, H), **options)


def _layer(kind: type[nn.RNNBase], backend: str) -> Any:
    return stretto.accelerate(kind(F, H, batch_first=True), backend=backend)  # type: ignore[arg-type]


x_BTF = torch.randn(B, T, F)
lengths = [T, 1, 2]
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "state-elsewhere": (lambda: _rnn()(x_BTF, torch.zeros(B, H, device=META)), "the state of GRU on meta"),
    "state-of-a-layer-elsewhere": (
        lambda: _rnn(num_layers=2)(x_BTF, (torch.zeros(B, H), torch.zeros(B, H, device=META))),
        "the state of GRU on meta",
    ),
    "own-state-elsewhere": (lambda: stretto.RNN(OnAnotherDevice(F, H))(x_BTF), "the state of OnAnotherDevice on meta"),
    "parameters-elsewhere": (lambda: _rnn().to(META)(x_BTF), "the input is on cpu"),
    "a-parameter-elsewhere": (lambda: _partly_on_meta()(x_BTF), "the parameters of GRU on meta"),
    "whole-numbers": (lambda: _rnn()(x_BTF.long()), "GRU cannot take an input of torch.int64"),
    "complex-numbers": (lambda: _rnn()(x_BTF + 0j), "GRU cannot take an input of torch.complex64"),
    "state-of-whole-numbers": (lambda: _rnn()(x_BTF, torch.zeros(B, H).long()), "the state is of torch.int64"),
    "bidirectional": (lambda: _rnn(bidirectional="no"), "bidirectional='no'"),
    "batch-first": (lambda: _rnn(batch_first="no"), "batch_first='no'"),
    "explained-size": (lambda: _rnn().explain(-1), "input_size=-1"),
    "measure": (lambda: stretto.accelerate(nn.GRU(F, H), measure="no"), "measure='no'"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.filterwarnings("ignore:.* runs by backend")
def test_refused(name: str) -> None:
    call, problem = WRONG[name]
    with pytest.raises(stretto.StrettoError, match=problem):
        call()


@pytest.mark.parametrize(
    ("kind", "x", "state"),
    [
        (nn.GRU, x_BTF.tolist(), None),
        (nn.GRU, None, None),
        (nn.GRU, x_BTF, torch.zeros(1, B + 1, H)),
        (nn.GRU, x_BTF, (torch.zeros(1, B, H),)),
        (nn.LSTM, x_BTF, torch.zeros(1, B, H)),
        (nn.LSTM, x_BTF, (torch.zeros(1, B, H),)),
        (nn.LSTM, x_BTF, "zeros"),
    ],
)
@pytest.mark.parametrize("backend", ["cpp", "torch"])
def test_refused_with_lengths(kind: type[nn.RNNBase], x: Any, state: Any, backend: str) -> None:
    """Torch knows no lengths: its checks do not see these calls."""
    with pytest.raises(stretto.StrettoError, match=r"padded batches|the state is"):
        _layer(kind, backend)(x, state, lengths=lengths)
