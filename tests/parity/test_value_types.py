"""Integers, booleans, look-ups, draws and half precision inside the loop, beside the cell called step by step.

Shape legend: B sequences, T steps, F features of the input, H units.
"""

import copy
from typing import Any

import pytest
import torch
from parity_oracle import Batch, assert_close, assert_equal, assert_parity, defined, error_of
from torch import distributions, nn

import stretto
from stretto.state import flatten

F, H, T = 3, 6, 7
LENGTHS = [7, 3, 0, 1, 4]


def batch_of(dtype: torch.dtype, *, lengths: list[int] | None = None) -> Batch:
    """Random inputs, the same each time."""
    return Batch(x_BTF=torch.randn(5, T, F, generator=torch.Generator().manual_seed(1)).to(dtype), lengths=lengths)


class Step(stretto.Cell):
    """What the cells here have in common: a linear map of input and state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.input_size = F
        self.mix = nn.Linear(F + H, H)

    def new(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.mix(torch.cat([x, h], 1)))


class Clockwork(Step):
    """Units that work every 1, 2 or 4 steps, by a counter in the state."""

    periods: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("periods", 2 ** torch.arange(3).repeat_interleave(2))

    def initial_state(self, batch_size: int) -> tuple[torch.Tensor, ...]:
        return self.zeros(batch_size, H), torch.zeros(batch_size, dtype=torch.int64)

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h, t = state
        h = torch.where(t[:, None] % self.periods == 0, self.new(x_t, h), h) + 0.1 / (1 + t[:, None])
        return h, (h, t + 1)


class Refractory(Step):
    """Spikes, which are booleans in the state, and a count of the steps until a unit may spike again."""

    def initial_state(self, batch_size: int) -> tuple[torch.Tensor, ...]:
        rest = torch.zeros(batch_size, H, dtype=torch.int32)
        return self.zeros(batch_size, H), rest, torch.zeros(batch_size, H, dtype=torch.bool)

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        v, rest, spiked = state
        v = torch.where(rest > 0, v, 0.9 * v + self.mix(torch.cat([x_t, spiked.to(v.dtype)], 1)))
        spikes = (v > 0.2) & ~(rest > 0)
        soft = torch.sigmoid(4 * v)
        y = soft + (spikes.to(v.dtype) - soft).detach()
        rest = torch.where(spikes, torch.full_like(rest, 2), (rest - 1).clamp(min=0))
        share = spikes.sum(1, keepdim=True) / H
        return y * share, (v.masked_fill(spikes, 0.0), rest, spikes)


class Halting(Step):
    """A boolean for each sequence that, once set, keeps the state as it is."""

    def initial_state(self, batch_size: int) -> tuple[torch.Tensor, ...]:
        return self.zeros(batch_size, H), torch.zeros(batch_size, 1, dtype=torch.bool)

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h, done = state
        h = torch.where(done, h, self.new(x_t, h))
        return h * ~done, (h, done | (h > 0.8).any(1, keepdim=True) | torch.logical_not(h).all(1, keepdim=True))


class Wide(Step):
    """Part of the work in double precision, whatever the state is of."""

    def initial_state(self, batch_size: int) -> torch.Tensor:
        return self.zeros(batch_size, H)

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h = ((self.new(x_t, state).double() + 1e9) - 1e9).to(x_t.dtype)
        return h, h


class Greedy(Step):
    """A decoder that is fed the token it finds most likely; token 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, H, padding_idx=0)
        self.read_out = nn.Linear(H, 9)

    def initial_state(self, batch_size: int) -> tuple[torch.Tensor, ...]:
        return self.zeros(batch_size, H), torch.zeros(batch_size, dtype=torch.int64)

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h, token = state
        h = self.new(x_t, h * torch.sigmoid(self.embed(token)))
        y = self.read_out(h)
        best, position = y.max(1)
        return y * best[:, None], (h, torch.where(best > 0, position, y.argmin(-1)))


class Pointer(Step):
    """A ring of memory with a pointer; what is read is named by an index computed from it."""

    def initial_state(self, batch_size: int) -> tuple[torch.Tensor, ...]:
        return self.zeros(batch_size, H), self.zeros(batch_size, 4, H), torch.zeros(batch_size, 1, dtype=torch.int64)

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h, memory, at = state
        read = memory.gather(1, at[:, :, None].expand(-1, -1, H)).squeeze(1)
        liked = memory[torch.arange(len(h)), memory.sum(2).argmax(1)]
        h = self.new(x_t, h + read - 0.5 * liked)
        here = (torch.arange(4) == at)[:, :, None]
        return h, (h, torch.where(here, h[:, None], memory), (at + 1) % 4)


class Winners(Step):
    """Only the k largest units survive, and tables are read by position."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(5))
        self.shift = nn.Parameter(torch.randn(4, 2, H))

    def initial_state(self, batch_size: int) -> tuple[torch.Tensor, ...]:
        return self.zeros(batch_size, H), torch.zeros(batch_size, dtype=torch.int32)

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h, t = state
        h = self.new(x_t, h) * self.gain[t % 5][:, None] + self.shift[t.long() % 4 - 2].sum(1)
        largest, where = h.topk(3, dim=-1)
        h = 0.1 * h + torch.zeros_like(h).scatter(1, where, largest)
        falling, order = h.sort(dim=1, descending=True)
        y = falling.scatter_add(1, order, h) + h[:, [1, 0, -1, 2, 2, 1]]
        return y.scatter(1, order[:, :1], 0.5), (h, t + 1)


CELLS = [Clockwork, Refractory, Halting, Wide, Greedy, Pointer, Winners]


@pytest.mark.parametrize("cell", CELLS)
def test_cells_with_values_of_other_types_are_compiled(cell: type[Step]) -> None:
    assert_parity(stretto.RNN(cell()), batch_of(torch.float32, lengths=LENGTHS), kernels=["cpp"])


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [None, LENGTHS, [0] * 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("cell", CELLS)
def test_every_cell_in_both_precisions(cell: type[Step], dtype: torch.dtype, lengths: list[int] | None) -> None:
    assert_parity(stretto.RNN(cell().to(dtype)), batch_of(dtype, lengths=lengths))


class Integers(stretto.Cell):
    """Nothing but arithmetic of integers, which must be exact and wrap around as torch's does."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def initial_state(self, batch_size: int) -> tuple[torch.Tensor, ...]:
        return torch.zeros(batch_size, H, dtype=self.dtype), torch.zeros(batch_size, 1, dtype=torch.int64)

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        n, t = state
        n = n * 3 + x_t
        made = [
            *(n + t, n - 2 * n, -n, n.abs(), n**2, n & 12, n | x_t, n ^ 5, ~n, n << 2, n >> 1, n.sign()),
            *(n // 7, n // -7, n % 7, n % -7, n // (x_t * x_t + 1), torch.fmod(n, 5), n.clamp(-9, 100)),
            *(torch.div(n, 7, rounding_mode="trunc"), torch.maximum(n, x_t), torch.where(n > t, n, t)),
            *(n.sum(1, keepdim=True).expand_as(n), n.amax(1, keepdim=True).expand_as(n), (n > 3).sum(1)[:, None] + n),
            *(n.to(torch.int16), n.to(torch.uint8), (n / 4).to(torch.int64), n.bool().to(torch.int64)),
        ]
        y = torch.stack([item.to(torch.int64).expand(len(n), H) for item in made], 1)
        return y, (n, t + (n > 0).any(1, keepdim=True))


@pytest.mark.parametrize("dtype", [torch.int64, pytest.param(torch.int16, marks=pytest.mark.slow)])
def test_arithmetic_of_integers_is_exact(dtype: torch.dtype) -> None:
    rnn = stretto.RNN(Integers(dtype), backend="cpp")
    x_BTF = torch.randint(-9, 10, (4, T, H), generator=torch.Generator().manual_seed(0)).to(dtype)
    start = torch.tensor([2**53 + 1, -(2**61) - 3, 0, 77]).to(dtype)[:, None].expand(4, H)
    state = (start, torch.zeros(4, 1, dtype=torch.int64))
    y_BTF, after = rnn(x_BTF, state, lengths=[7, 5, 0, 6])
    expected, finals = defined(rnn, x_BTF, [7, 5, 0, 6], state)
    assert_equal([y_BTF, *flatten(after)], [expected, *finals])


class Divided(stretto.Cell):
    """Divides by what it is given."""

    def initial_state(self, batch_size: int) -> torch.Tensor:
        return torch.ones(batch_size, 1, dtype=torch.int64)

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        n = 4 // (x_t == state).to(torch.int64)
        return n, n


def test_a_division_by_zero_is_an_error_as_in_torch() -> None:
    rnn = stretto.RNN(Divided(), backend="cpp")
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        rnn(torch.tensor([[[1], [3]]]))
    assert rnn(torch.tensor([[[1], [4]]]))[1].item() == 4


@pytest.mark.parametrize("cell", [Greedy, pytest.param(Refractory, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_half_precision_is_single_precision_rounded_at_the_ends(cell: type[Step], dtype: torch.dtype) -> None:
    narrow = stretto.RNN(cell().to(dtype), backend="cpp")
    wide = copy.deepcopy(narrow).float()
    made = []
    for rnn, kind in ((narrow, dtype), (wide, torch.float32)):
        x_BTF = batch_of(dtype).x_BTF.to(kind).requires_grad_()
        y_BTF, after = rnn(x_BTF, lengths=LENGTHS)
        found = torch.autograd.grad((y_BTF * y_BTF.detach()).sum(), [x_BTF, *rnn.parameters()])
        made.append([y_BTF, *flatten(after), *found])
    assert made[0][1].dtype is dtype
    for one, other in zip(*made, strict=True):
        # The loss reads outputs that were rounded, so gradients differ by that as well.
        assert error_of(one, other) < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("layer", [nn.GRU, nn.LSTM, nn.RNN])
def test_autocast_leaves_accelerated_layers_in_the_precision_of_their_weights(layer: type[nn.RNNBase]) -> None:
    fast = stretto.accelerate(layer(F, H, batch_first=True), backend="cpp")
    x_BTF = batch_of(torch.float32).x_BTF
    expected, _ = fast(x_BTF.bfloat16().float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y_BTH, after = fast(x_BTF.bfloat16(), lengths=None)
    assert y_BTH.dtype is torch.bfloat16  # as torch's own
    assert_equal([y_BTH], [expected.to(y_BTH.dtype)])
    assert all(part.dtype is y_BTH.dtype for part in flatten(after))
    y_BTH.sum().backward()
    assert all(parameter.grad is not None for parameter in fast.parameters())


class Lookup(stretto.Cell):
    """Reads a table at the place that the state counts to."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(6.0).reshape(3, 2))

    def initial_state(self, batch_size: int) -> torch.Tensor:
        return torch.zeros(batch_size, dtype=torch.int64)

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        return nn.functional.embedding(state, self.table) + 0.0 * x_t, state + (x_t[:, 0] > 0)


def test_an_index_that_is_out_of_range_is_an_error() -> None:
    cell = Lookup()
    rnn = stretto.RNN(cell, backend="cpp")
    assert torch.equal(rnn(torch.ones(1, 3, 2))[0], cell.table[None])
    with pytest.raises(IndexError, match="out of range"):
        rnn(torch.ones(1, 4, 2))


def test_nan_counts_as_the_largest_as_in_torch() -> None:
    rnn = stretto.RNN(Greedy(), backend="cpp")
    x_BTF = torch.randn(2, 3, F)
    x_BTF[0, 1] = torch.nan
    _, (_, token_B) = rnn(x_BTF)
    assert torch.equal(token_B, defined(rnn, x_BTF)[1][1])


class Latents(Step):
    """A state with categorical latents, drawn from what the step computes, and a token drawn as a boolean is."""

    def initial_state(self, batch_size: int) -> tuple[torch.Tensor, ...]:
        return self.zeros(batch_size, H), torch.zeros(batch_size, dtype=torch.int64)

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h, token = state
        h = self.new(x_t, h) + 0.1 * token[:, None]
        latents = distributions.OneHotCategoricalStraightThrough(logits=h.view(-1, 2, 3)).rsample().flatten(1)
        noisy = distributions.Normal(h, torch.sigmoid(h) + 0.1).rsample()
        spikes = distributions.Bernoulli(logits=h).sample() + torch.bernoulli(torch.sigmoid(h))
        token = torch.multinomial(h.softmax(1), 2)[:, 0] + distributions.Categorical(logits=h).sample()
        return torch.cat([latents, torch.normal(h, 0.5)], 1), (0.3 * latents + 0.1 * spikes + 0.3 * noisy, token)


def test_draws_repeat_and_are_the_same_for_compiled_code() -> None:
    cell, x_BTF = Latents().double(), batch_of(torch.float64).x_BTF.requires_grad_()
    made = []
    for backend in ("cpp", "cpp", "eager"):
        rnn = stretto.RNN(cell, backend=backend)
        torch.manual_seed(3)
        y_BTF, after = rnn(x_BTF, lengths=LENGTHS)
        gradients = torch.autograd.grad((y_BTF * torch.arange(2 * H)).sum(), [x_BTF, *rnn.parameters()])
        made.append([y_BTF, *flatten(after), *gradients])
    assert_equal(made[0], made[1])
    assert_close(made[0], made[2])


class Chances(stretto.Cell):
    """Draws from chances that do not change."""

    def initial_state(self, batch_size: int) -> torch.Tensor:
        return self.zeros(batch_size, 3)

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        chances = (x_t + 0.0 * state).softmax(1)
        hot = nn.functional.one_hot(torch.multinomial(chances, 1)[:, 0], 3).to(x_t.dtype)
        several = nn.functional.one_hot(torch.multinomial(chances, 4, replacement=True), 3).to(x_t.dtype).mean(1)
        drawn = torch.bernoulli(chances)
        normal = torch.normal(chances, chances)
        return torch.cat([hot, several, drawn, normal, (normal - chances).square()], 1), drawn


def test_draws_are_of_the_distribution_that_was_asked_for() -> None:
    torch.manual_seed(0)
    rnn = stretto.RNN(Chances(), backend="cpp")
    logits_F = torch.tensor([0.3, -1.0, 1.2])
    y_BTF, _ = rnn(logits_F.expand(400, 50, 3))
    chances_F = logits_F.softmax(0)
    expected = torch.cat([chances_F.repeat(4), chances_F.square()])
    # 20,000 draws of a standard deviation below 1.1: six of the mean's are below 0.05.
    assert (y_BTF.mean((0, 1)) - expected).abs().max() < 0.05
