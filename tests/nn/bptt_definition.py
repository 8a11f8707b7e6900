"""The definition of truncated BPTT, a step at a time with plain autograd, and nets to try it on.

Shape legend: B rows, T steps, F features, H hidden units.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from stretto.nn import detach_state

F, H = 2, 3
NAMES = ["lstm", "gru", "loop"]


class Loop(nn.Module):
    """A cell in a Python loop, with a nested state, a learned initial state and, as `stretto.RNN` has it, lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(F + H, H)
        self.first = nn.Parameter(torch.linspace(-0.5, 0.5, H))
        self.steps_run = 0

    def initial_state(self, batch_size: int) -> Any:
        first_BH = self.first.expand(batch_size, H)
        return first_BH, (0.1 * first_BH,)

    def forward(self, x_BTF: torch.Tensor, state: Any = None, lengths: torch.Tensor | None = None) -> Any:
        hidden_BH, (slow_BH,) = self.initial_state(len(x_BTF)) if state is None else state
        lengths_B = torch.full((len(x_BTF),), x_BTF.shape[1]) if lengths is None else lengths
        assert (lengths_B > 0).all()
        outputs = []
        for t, x_BF in enumerate(x_BTF.unbind(1)):
            real_B1 = (t < lengths_B)[:, None]
            new_BH = torch.tanh(self.mix(torch.cat([x_BF, hidden_BH + slow_BH], dim=1)))
            slow_BH = torch.where(real_B1, 0.9 * slow_BH + 0.1 * new_BH, slow_BH)
            hidden_BH = torch.where(real_B1, new_BH, hidden_BH)
            outputs.append(new_BH * real_B1)
        self.steps_run += x_BTF.shape[1]
        return torch.stack(outputs, dim=1), (hidden_BH, (slow_BH,))


def make_net(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    made = {
        "lstm": lambda: nn.LSTM(F, H, num_layers=2, batch_first=True),
        "gru": lambda: nn.GRU(F, H, batch_first=True),
        "loop": Loop,
    }
    return made[name]().double()


def batch_dim_of(net: nn.Module) -> int:
    return 1 if isinstance(net, nn.RNNBase) else 0


def make_case(rows: int, steps: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and weights of the outputs in the loss."""
    generator = torch.Generator().manual_seed(seed)
    x_BTF = torch.randn(rows, steps, F, dtype=torch.float64, generator=generator)
    return x_BTF, torch.randn(rows, steps, H, dtype=torch.float64, generator=generator)


def loss_of(y_BTH: torch.Tensor, weight_BTH: torch.Tensor) -> torch.Tensor:
    return ((y_BTH + y_BTH**2) * weight_BTH).sum()


def take_gradients(net: nn.Module) -> list[torch.Tensor]:
    found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    return found


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def by_definition(
    net: nn.Module,
    x_BTF: torch.Tensor,
    weight_BTH: torch.Tensor,
    *,
    window: int,
    step: int,
    run: Callable[..., Any] | None = None,
) -> tuple[list[torch.Tensor], Any]:
    """BPTT(h; h'): for every part, all steps from the start, with the state detached h steps before the part's end."""
    state = None
    for begin in range(0, x_BTF.shape[1], step):
        state, outputs = None, []
        for t in range(min(begin + step, x_BTF.shape[1])):
            if t == begin + step - window and state is not None:
                state = detach_state(state)
            y_B1H, state = (run or net)(x_BTF[:, t : t + 1], state)
            outputs.append(y_B1H)
        new_BTH = torch.cat(outputs[begin:], dim=1)
        loss_of(new_BTH, weight_BTH[:, begin : begin + step]).backward()
    return take_gradients(net), detach_state(state)  # type: ignore[arg-type]


def flat(state: Any) -> list[torch.Tensor]:
    return [state] if isinstance(state, torch.Tensor) else [tensor for inner in state for tensor in flat(inner)]
