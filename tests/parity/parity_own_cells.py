"""Cells that users might write: odd states, odd outputs, shared and frozen weights, and what cannot be traced.

Shape legend: B sequences, F features, H hidden units.
"""

from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

import stretto
from cell_settings import F
from stretto.cells import Cell

H: Final = 6


def own_layer(cell: type[Cell], **options: Any) -> stretto.RNN:
    """A layer of one of the cells below."""
    torch.manual_seed(0)
    return stretto.RNN(cell().double(), **options)


class OneState(Cell):
    """A cell with one state of H zeros, and two products to make steps of."""

    def __init__(self, input_size: int = F) -> None:
        super().__init__()
        self.input_size = input_size
        self.inward = nn.Linear(input_size, H)
        self.around = nn.Linear(H, H)

    def initial_state(self, batch_size: int) -> Any:
        return self.zeros(batch_size, H)

    def new(self, x_BF: torch.Tensor, h_BH: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inward(x_BF) + self.around(h_BH))

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h_BH = self.new(x_t, state)
        return h_BH, h_BH


class TwoStates(OneState):
    """Two states of H zeros."""

    def initial_state(self, batch_size: int) -> Any:
        return self.zeros(batch_size, H), self.zeros(batch_size, H)


class SharedWeight(OneState):
    """One matrix for the input, the state and, turned round, the output."""

    def __init__(self, input_size: int = H) -> None:
        super().__init__(input_size)
        self.inward = self.around

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h_BH = self.new(x_t, state)
        return h_BH @ self.around.weight, h_BH


class LearnedStart(OneState):
    """A learned initial state."""

    def __init__(self, input_size: int = F) -> None:
        super().__init__(input_size)
        self.first_H = nn.Parameter(torch.randn(H))

    def initial_state(self, batch_size: int) -> Any:
        return self.first_H.expand(batch_size, H)


class BufferWeight(OneState):
    """The recurrent matrix is a buffer, as in an echo state network."""

    weight_HH: torch.Tensor

    def __init__(self, input_size: int = F) -> None:
        super().__init__(input_size)
        del self.around
        self.register_buffer("weight_HH", 0.4 * torch.randn(H, H))

    def new(self, x_BF: torch.Tensor, h_BH: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inward(x_BF) + h_BH @ self.weight_HH)


class ConstantTensor(OneState):
    """A tensor that is neither parameter nor buffer."""

    def __init__(self, input_size: int = F) -> None:
        super().__init__(input_size)
        self.scale_H = [torch.linspace(0.5, 1.5, H, dtype=torch.float64)]

    def new(self, x_BF: torch.Tensor, h_BH: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inward(x_BF) + self.scale_H[0] * self.around(h_BH))


class UnusedState(TwoStates):
    """The second state is passed on and never read."""

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h_BH = self.new(x_t, state[0])
        return h_BH, (h_BH, state[1])


class ForgottenState(TwoStates):
    """The second state is written and never read."""

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h_BH = self.new(x_t, state[0])
        return h_BH, (h_BH, 2 * h_BH - self.inward(x_t))


class ConstantState(TwoStates):
    """The second state is read and never changes: what is known of a speaker."""

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h_BH = torch.sigmoid(state[1]) * self.new(x_t, state[0] * state[1])
        return h_BH * state[1], (h_BH, state[1])


class ClearedState(TwoStates):
    """The second state becomes zero, whatever it was."""

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h_BH = self.new(x_t, state[0] + state[1])
        return h_BH, (h_BH, torch.zeros_like(h_BH))


class DelayLine(TwoStates):
    """The input of two steps before, and a loop that reads it."""

    def initial_state(self, batch_size: int) -> Any:
        return self.zeros(batch_size, H), (self.zeros(batch_size, F), self.zeros(batch_size, F))

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h_BH, (one_BF, two_BF) = state
        h_BH = self.new(two_BF * x_t, h_BH)
        return torch.cat([h_BH, one_BF], dim=1), (h_BH, (x_t, one_BF))


class PureDelay(Cell):
    """No loop at all: the output is the input of the step before."""

    def __init__(self, input_size: int = F) -> None:
        super().__init__()
        self.input_size = input_size
        self.gain_F = nn.Parameter(torch.randn(input_size))

    def initial_state(self, batch_size: int) -> Any:
        return self.zeros(batch_size, self.input_size)

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        return self.gain_F * state, x_t


class Stateless(PureDelay):
    """No state either."""

    def initial_state(self, batch_size: int) -> Any:  # noqa: ARG002
        return ()

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:  # noqa: ARG002
        return torch.tanh(self.gain_F * x_t), ()


class TwoLoops(TwoStates):
    """Two loops that do not know of each other."""

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        one_BH, two_BH = self.new(x_t, state[0]), torch.sigmoid(x_t[:, :1] - state[1])
        return one_BH * two_BH, (one_BH, two_BH)


class LoopBehindLoop(TwoStates):
    """The second loop reads what the first has made, at this step and the one before."""

    def __init__(self, input_size: int = F) -> None:
        super().__init__(input_size)
        self.between = nn.Linear(H, H)

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        one_BH = self.new(x_t, state[0])
        two_BH = torch.tanh(self.between(one_BH * state[0]) + self.around(state[1]))
        return two_BH - x_t[:, :1], (one_BH, two_BH)


class Deaf(OneState):
    """Nothing depends on the input."""

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:  # noqa: ARG002
        h_BH = torch.tanh(self.around(state + self.inward.bias))
        return h_BH, h_BH


class ConstantOutput(OneState):
    """The output is a parameter."""

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h_BH = self.new(x_t, state)
        return self.around.bias.expand(len(x_t), H), h_BH


class InputAsOutput(OneState):
    """The output is the input."""

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        return x_t, self.new(x_t, state)


class OldState(OneState):
    """The output is the state before the step."""

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        return state, self.new(x_t, state)


class SwappedStates(TwoStates):
    """Two states that change places at each step."""

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h_BH = self.new(x_t, state[0])
        return h_BH + state[1], (state[1], h_BH)


class Detached(TwoStates):
    """The second state is read without a gradient."""

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h_BH = self.new(x_t, state[0] + state[1].detach())
        return h_BH, (h_BH, 0.5 * h_BH + 0.5 * state[1])


class WithoutGradient(TwoStates):
    """The second state is computed without a gradient."""

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h_BH = self.new(x_t, state[0] + state[1])
        with torch.no_grad():
            slow_BH = 0.5 * h_BH + 0.5 * state[1]
        return h_BH, (h_BH, slow_BH)


class WritesInPlace(OneState):
    """Values of the step's own are written in place."""

    def new(self, x_BF: torch.Tensor, h_BH: torch.Tensor) -> torch.Tensor:
        sum_BH: torch.Tensor = self.inward(x_BF)
        sum_BH += self.around(h_BH)
        return sum_BH.mul_(0.5).tanh_()


class WritesToParts(TwoStates):
    """Parts of the state, and views of them, are written in place."""

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h_BH = self.new(x_t, state[0])
        memory_BH = state[1].clone()
        memory_BH[:, 0] = h_BH[:, 1]
        memory_BH[:, 1::2] *= 0.5
        memory_BH.view(-1, 1, H)[:, 0].add_(x_t[:, :1])
        return h_BH + memory_BH, (h_BH, memory_BH.clamp_(-1, 1))


class TorchInside(TwoStates):
    """Torch's own cell and layer, which is called for one step, time first."""

    def __init__(self, input_size: int = F) -> None:
        super().__init__(input_size)
        self.cell = nn.GRUCell(input_size, H)
        self.layer = nn.LSTM(H, H)

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h_BH = self.cell(x_t, state[0])
        y_1BH, (_, c_1BH) = self.layer(h_BH[None], (h_BH[None], state[1].unsqueeze(0)))
        return y_1BH[0], (h_BH, c_1BH.squeeze(0))


class Spike(torch.autograd.Function):
    """A step with the derivative of something smoother."""

    @staticmethod
    def forward(ctx: Any, v_BH: torch.Tensor, slope: float) -> torch.Tensor:
        """One where positive."""
        ctx.save_for_backward(v_BH)
        ctx.slope = slope
        return (v_BH > 0).to(v_BH.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """That of a fast sigmoid."""
        (v_BH,) = ctx.saved_tensors
        return gradients[0] / (1 + ctx.slope * v_BH.abs()) ** 2, None


class Outer(torch.autograd.Function):
    """Two results, saved by `setup_context`, with gradients that are not those of what is computed."""

    @staticmethod
    def forward(a_BH: torch.Tensor, b_BH: torch.Tensor) -> Any:
        """A product and a sum."""
        return a_BH * b_BH, a_BH + b_BH

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        """Keep the factors."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Thrice the first product's, and half of the sum's."""
        a_BH, b_BH = ctx.saved_tensors
        product, total = gradients
        return 3 * product * b_BH + total if ctx.needs_input_grad[0] else None, product * a_BH + 0.5 * total


class Spiking(TwoStates):
    """Gradients of its own, inside the loop and on the input."""

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        v_BH = 0.9 * state[0] + self.new(Spike.apply(x_t, 1.0), state[1])  # type: ignore[no-untyped-call]
        spike_BH: torch.Tensor = Spike.apply(v_BH - 0.1, 2.0)  # type: ignore[no-untyped-call]
        product_BH, sum_BH = Outer.apply(spike_BH, v_BH)  # type: ignore[no-untyped-call]
        spike_BH = stretto.straight_through(spike_BH > 0.5, torch.sigmoid(spike_BH + v_BH))
        return spike_BH + product_BH, (v_BH * (1 - spike_BH), 0.3 * sum_BH)


class Concatenated(OneState):
    """One product of the input and the state concatenated."""

    def __init__(self, input_size: int = F) -> None:
        super().__init__(input_size)
        self.both = nn.Linear(input_size + H, H)

    def new(self, x_BF: torch.Tensor, h_BH: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.both(torch.cat([x_BF, h_BH], dim=1)))


class SeparateGates(TwoStates):
    """An LSTM with eight linear layers."""

    def __init__(self, input_size: int = F) -> None:
        super().__init__(input_size)
        self.inwards = nn.ModuleList(nn.Linear(input_size, H) for _ in range(4))
        self.arounds = nn.ModuleList(nn.Linear(H, H) for _ in range(4))

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h_BH, c_BH = state
        i, f, g, o = (one(x_t) + two(h_BH) for one, two in zip(self.inwards, self.arounds, strict=True))
        c_BH = torch.sigmoid(f) * c_BH + torch.sigmoid(i) * torch.tanh(g)
        h_BH = torch.sigmoid(o) * torch.tanh(c_BH)
        return h_BH, (h_BH, c_BH)


class Noisy(OneState):
    """Dropout on the state, and noise on the output."""

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h_BH = self.new(x_t, functional.dropout(state, 0.3, training=self.training))
        return h_BH + 0.1 * torch.randn_like(h_BH), h_BH


# Cells that no loop is made of, or no compiled one.


class Counting(OneState):
    """An integer step counter."""

    def initial_state(self, batch_size: int) -> Any:
        return self.zeros(batch_size, H), torch.zeros(batch_size, dtype=torch.long)

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h_BH, count_B = state
        h_BH = self.new(x_t, h_BH / (1 + count_B[:, None]))
        return h_BH, (h_BH, count_B + 1)


class Switch(OneState):
    """A boolean that is negated at each step."""

    def initial_state(self, batch_size: int) -> Any:
        return self.zeros(batch_size, H), torch.zeros(batch_size, 1, dtype=torch.bool)

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h_BH, on_B1 = state
        h_BH = torch.where(on_B1, self.new(x_t, h_BH), h_BH - x_t[:, :1])
        return h_BH, (h_BH, ~on_B1)


class Branching(OneState):
    """A branch that the data decide."""

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h_BH = self.new(x_t, state)
        if h_BH.sum() > 0:
            h_BH = 0.5 * h_BH
        return h_BH, h_BH


class BatchNormed(OneState):
    """A norm over the batch, which mixes rows."""

    def __init__(self, input_size: int = F) -> None:
        super().__init__(input_size)
        self.norm = nn.BatchNorm1d(H, track_running_stats=False)

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h_BH = torch.tanh(self.norm(self.inward(x_t) + self.around(state)))
        return h_BH, h_BH


class Centred(OneState):
    """The mean of the batch is subtracted, behind the loop."""

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h_BH = self.new(x_t, state)
        return h_BH - h_BH.mean(dim=0), h_BH


class Sorted(OneState):
    """Units in order."""

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h_BH = torch.sort(self.new(x_t, state), dim=1).values
        return h_BH, h_BH


class Bessel(OneState):
    """An operator within a row that no code is generated for."""

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h_BH = torch.special.i0e(2 + self.new(x_t, state))
        return h_BH, h_BH


ODD: dict[type[Cell], tuple[str, str]] = {
    Bessel: ("torch", "i0e"),
    Branching: ("torch", "depends on the data"),
    BatchNormed: ("torch", "batch"),
    Centred: ("torch", "mixes the rows"),
}
"""What runs each cell, and a word of the reason."""
