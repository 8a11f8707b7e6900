"""The output of a step as the input of the next one, compared with a loop that does so.

Shape legend: B sequences, T steps, F features.
"""

from typing import Any

import pytest
import torch
from torch import nn

import stretto
from stretto import StrettoError

pytestmark = pytest.mark.usefixtures("quick_compiler")

B, T, F = 5, 8, 3


def _loop(rnn: stretto.RNN, x: torch.Tensor, state: Any, *, teacher: torch.Tensor, lengths: Any, resets: Any) -> Any:
    rows, ends = [], []
    for row, length in enumerate(lengths):
        now = tuple(part[row : row + 1] for part in state)
        y, outputs = torch.zeros(1, F, dtype=x.dtype), []
        for step in range(length):
            if resets[row, step]:
                now = tuple(cell.initial_state(1) for cell in rnn.cells)
            reads = step == 0 or bool(teacher[row, step] | resets[row, step])
            y, after = x[row : row + 1, step] if reads else y, []
            for cell, own in zip(rnn.cells, now, strict=True):
                y, new = cell(y, own)
                after.append(new)
            now = tuple(after)
            outputs.append(y)
        rows.append(torch.stack([*outputs, *[torch.zeros(1, F, dtype=x.dtype)] * (T - length)], 1))
        ends.append(now)
    return torch.cat(rows), [torch.cat(parts) for parts in zip(*ends, strict=True)]


@pytest.mark.parametrize("backend", ["cpp", "eager", "torch"])
@pytest.mark.parametrize("num_layers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_step_reads_the_last_output_where_nobody_teaches(num_layers: int, backend: Any) -> None:
    torch.manual_seed(0)
    rnn = stretto.RNN(stretto.cells.GRU(F, F), num_layers=num_layers, backend=backend).double()
    x = torch.randn(B, T, F, dtype=torch.float64, requires_grad=True)
    parts = [torch.randn(B, F, dtype=torch.float64, requires_grad=True) for _ in rnn.cells]
    for share in (0.0, 0.5, 1.0):
        teacher, resets, lengths = torch.rand(B, T) < share, torch.rand(B, T) < 0.2, [8, 3, 0, 1, 8]
        y, after = rnn(x, parts[0] if num_layers == 1 else tuple(parts), lengths, teacher=teacher, resets=resets)
        wanted, ends = _loop(rnn, x, parts, teacher=teacher, lengths=lengths, resets=resets)
        torch.testing.assert_close(y, wanted, rtol=1e-10, atol=1e-10)
        found = [after] if num_layers == 1 else list(after)
        torch.testing.assert_close(found, ends, rtol=1e-10, atol=1e-10)
        leaves = [x, *parts, *rnn.parameters()]
        losses = (
            torch.sin(out).sum() + sum(end.square().sum() for end in last) for out, last in ((y, found), (wanted, ends))
        )
        pairs = zip(*(torch.autograd.grad(loss, leaves) for loss in losses), strict=True)
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    everything = torch.ones(B, T, dtype=torch.bool)
    torch.testing.assert_close(rnn(x, teacher=everything)[0], rnn(x)[0], rtol=1e-10, atol=1e-10)


class Greedy(nn.Module):
    """Samples the likeliest token, which it reads next."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.cell, self.out = nn.Embedding(7, F), stretto.cells.GRU(F, F), nn.Linear(F, 7)

    def forward(self, inputs: Any, h: torch.Tensor, constants: Any) -> Any:
        (token,) = inputs
        h = self.cell(self.table(token) + constants, h)[0]
        return (self.out(h).argmax(1),), h


def test_tokens_and_constants() -> None:
    cell = Greedy()
    rnn = stretto.RNN(cell, state=F, backend="torch")
    first, context = torch.randint(7, (B, T)), torch.randn(B, F)
    (tokens,), after = rnn((first,), constants=context, teacher=torch.zeros(B, T, dtype=torch.bool))
    token, h = first[:, 0], torch.zeros(B, F)
    for step in range(T):
        (token,), h = cell((token,), h, context)
        assert torch.equal(tokens[:, step], token)
    torch.testing.assert_close(after, h)


def test_what_cannot_be_fed_back_is_refused() -> None:
    x, teacher = torch.randn(B, T, F), torch.ones(B, T, dtype=torch.bool)
    with pytest.raises(StrettoError, match=r"^GRU returned .* cannot be its next input"):
        stretto.RNN(stretto.cells.GRU(F, F + 1))(x, teacher=teacher)
    with pytest.raises(StrettoError, match="layers of one direction"):
        stretto.RNN(stretto.cells.GRU(F, F), bidirectional=True)(x, teacher=teacher)
    for wrong in (teacher.float(), teacher[:, 1:], True):
        with pytest.raises(StrettoError, match="teacher is"):
            stretto.RNN(stretto.cells.GRU(F, F))(x, teacher=wrong)  # type: ignore[arg-type]
