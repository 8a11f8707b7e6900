"""Steps that do something besides computing: attributes that they set, lists that they append to.

What nothing reads at the next step is left as it was, and said once; all else runs as the loop does, exactly.
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import stretto

pytestmark = pytest.mark.usefixtures("quick_compiler")

F, H, B, T = 3, 5, 4, 6


class Base(nn.Module):
    """A GRU whose subclasses do something besides."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRUCell(F, H)
        self.kept: Any = None
        self.count = 0
        self.seen: list[torch.Tensor] = []
        self.register_buffer("decay", torch.ones(()))


class Computes(Base):
    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return self.gru(x, h)  # type: ignore[no-any-return]


class Shows(Base):
    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        h = self.gru(x, h)
        self.kept = h.sigmoid()
        return h


class WritesBeforeItReads(Base):
    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        self.kept = (h > 0.1).to(h)
        return self.gru(x, h) - 0.1 * self.kept


class Remembers(Base):
    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = torch.zeros_like(h)
        self.kept = 0.5 * self.kept + h
        return self.gru(x, h) + self.kept


class Counts(Base):
    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.gru(x, h) * 0.9**self.count


class DecaysBuffer(Base):
    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        self.decay = self.decay * 0.9
        return self.gru(x, h) * self.decay


class Appends(Base):
    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        h = self.gru(x, h)
        self.seen.append(h)
        return h


def loop(cell: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    h, ys = torch.zeros(B, H), []
    for t in range(T):
        h = cell(x[:, t], h)
        ys.append(h)
    return torch.stack(ys, 1)


def by_rnn(cell: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, Callable[[], Any]]:
    rnn = stretto.RNN(cell, state=H)
    return rnn(x)[0], rnn.explain


def by_scan(cell: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, Callable[[], Any]]:
    def step(h: torch.Tensor, x_t: torch.Tensor) -> Any:
        h = cell(x_t, h)
        return h, h

    step.__name__ = type(cell).__name__
    start = torch.zeros(B, H)
    return stretto.scan(step, start, x)[1], lambda: stretto.explain(step, start, x)


@pytest.mark.parametrize("run", [by_rnn, by_scan])
@pytest.mark.parametrize("kind", [Shows, WritesBeforeItReads])
def test_what_is_left_for_others_is_left_as_it_was_and_said(kind: type[Base], run: Any) -> None:
    torch.manual_seed(0)
    cell, x = type(f"{kind.__name__}_{run.__name__}", (kind,), {})(), torch.randn(B, T, F)  # a name of its own
    plain = loop(copy.deepcopy(cell), x)
    with pytest.warns(UserWarning, match="sets kept at each step"):
        ys, explain = run(cell, x)
    torch.testing.assert_close(ys, plain)
    assert explain().backend == "cpp"
    assert cell.kept is None


@pytest.mark.parametrize("run", [by_rnn, by_scan])
@pytest.mark.parametrize("kind", [Remembers, Counts, DecaysBuffer, Appends])
def test_what_the_next_step_needs_runs_as_the_loop(kind: type[Base], run: Any) -> None:
    torch.manual_seed(0)
    cell, x = kind(), torch.randn(B, T, F)
    other = copy.deepcopy(cell)
    plain = loop(other, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ys, explain = run(cell, x)
        torch.testing.assert_close(ys, plain)
        assert (cell.count, len(cell.seen)) == (other.count, len(other.seen))
        assert (cell.kept is None) == (other.kept is None)
        torch.testing.assert_close(cell.decay, other.decay)
        assert explain().backend == "torch"


def test_weights_that_hooks_compute_are_not_spoken_of() -> None:
    cell, x = Computes(), torch.randn(B, T, F)
    nn.utils.weight_norm(cell.gru, "weight_hh")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ys, _ = by_rnn(cell, x)
    torch.testing.assert_close(ys, loop(cell, x))


def test_compiled_functions_inside_a_step_are_called_as_they_are() -> None:
    cell, x = nn.GRUCell(F, H), torch.randn(B, T, F)

    @torch.compile(backend="eager")
    def compiled(x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(cell(x, h)) * 2

    def step(h: torch.Tensor, x_t: torch.Tensor) -> Any:
        h = compiled(x_t, h)
        return h, h

    start = torch.zeros(B, H)
    ys = stretto.scan(step, start, x)[1]
    torch.testing.assert_close(ys, loop(compiled, x))
    assert stretto.explain(step, start, x).backend == "cpp"
