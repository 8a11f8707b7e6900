"""The same bits from run to run, whatever the number of threads, and however the work is shared among them.

Shape legend: B sequences, T steps, H hidden units.
"""

import itertools
from collections.abc import Callable
from typing import final

import pytest
import torch
from parity_cells import drawn, layer
from parity_oracle import Batch, assert_parity, assert_same_bits, errors_of, found
from parity_own_cells import TwoLoops
from torch.nn import functional

import stretto
from stretto.kernels import Layout, wavefront_chunks
from stretto.kernels.backends.cpp import generate

THREADS = (1, 2, 4)


def _assert_the_same(
    rnn: stretto.RNN, batch: Batch, set_threads: Callable[[int], None], *, but: Callable[[str], bool] = lambda _: False
) -> None:
    """Check that all threads and runs make the same bits, `but` for some gradients, which differ in the last digits."""
    alone = None
    for threads in THREADS:
        set_threads(threads)
        result = found(rnn, batch)
        assert_same_bits(result, found(rnn, batch))
        alone = alone or result
        assert_same_bits(alone, result, but=but)
        assert max(errors_of(alone, result).values()) < 1e-13 or batch.x_BTF.dtype != torch.float64


def _is_a_weight(name: str) -> bool:
    return name != "x" and not name.startswith("state")


@pytest.mark.parametrize("setting", ["lstm", "layer-norm-gru", "attention"])
def test_threads_take_rows(setting: str, set_threads: Callable[[int], None]) -> None:
    lengths = [9, 3, 0, 14, 14, 1, 2, 7, 5, 5, 11, 0, 6, 3, 14, 8, 2]
    rnn = layer(setting, 7, backend="cpp", num_layers=2, bidirectional=True)
    batch = drawn(rnn, T=14, B=17, lengths=lengths, given=True)
    _assert_the_same(rnn, batch, set_threads)


@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("both_ways", [True, False])
def test_threads_share_few_rows(B: int, both_ways: bool, set_threads: Callable[[int], None]) -> None:
    """Weights of a step this large are shared out by columns when there are more threads than rows."""
    rnn = layer("lstm", 100, backend="cpp", bidirectional=both_ways)
    _assert_the_same(rnn, drawn(rnn, T=20, B=B, given=True), set_threads)


@pytest.mark.parametrize(
    ("setting", "H"),
    [
        ("lstm", 100),
        ("gru-before", 110),
        ("layer-norm-gru", 110),
        # A thread's share of a product is its share of the pointwise work, and no thread waits in between.
        *itertools.product(["gru", "lstm", "layer-norm-lstm", "gru-before"], [64, 96, 128]),
    ],
)
def test_shared_rows_equal_the_definition(setting: str, H: int, set_threads: Callable[[int], None]) -> None:
    rnn = layer(setting, H, backend="cpp")
    batch = drawn(rnn, T=11, B=2, lengths=[11, 6], given=True)
    alone = found(rnn, batch)
    for threads in (2, 4):
        set_threads(threads)
        assert_same_bits(assert_parity(rnn, batch, kernels=["cpp"])["cpp"], alone)


@pytest.mark.parametrize("lengths", [[20], [0, 20, 13]])
def test_shared_rows_of_other_batches(lengths: list[int], set_threads: Callable[[int], None]) -> None:
    rnn = layer("lstm", 100, backend="cpp")
    for threads in (2, 4):
        set_threads(threads)
        assert_parity(rnn, drawn(rnn, T=20, B=len(lengths), lengths=lengths), kernels=["cpp"])


@pytest.mark.usefixtures("waves")
@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("num_layers", [2, 3])
def test_layers_as_a_wave_equal_the_definition(B: int, num_layers: int, set_threads: Callable[[int], None]) -> None:
    """Layers work on different chunks of time at once."""
    rnn = layer("lstm", 7, backend="cpp", num_layers=num_layers)
    set_threads(4)
    lengths = None if B == 1 else [100, 37, 64]
    assert_parity(rnn, drawn(rnn, T=100, B=B, lengths=lengths, given=True))


@pytest.mark.usefixtures("waves")
@pytest.mark.parametrize("T", [1, 2, 5, 64, 65, 600])
def test_a_wave_makes_the_same_bits(T: int, set_threads: Callable[[int], None]) -> None:
    """But for weight gradients, which are summed up chunk by chunk then."""
    rnn = layer("lstm", 7, backend="cpp", num_layers=3)
    _assert_the_same(rnn, drawn(rnn, T=T, B=1, given=True), set_threads, but=_is_a_weight)


@pytest.mark.usefixtures("waves")
def test_a_wave_over_ragged_rows_makes_the_same_bits(set_threads: Callable[[int], None]) -> None:
    rnn = layer("gru", 7, backend="cpp", num_layers=2)
    _assert_the_same(rnn, drawn(rnn, T=130, B=3, lengths=[40, 0, 130]), set_threads, but=_is_a_weight)


@pytest.mark.parametrize(
    ("hidden", "T", "threads", "some"), [(7, 100, 4, False), (24, 200_000, 4, True), (24, 200_000, 1, False)]
)
def test_a_wave_is_made_where_it_pays(
    hidden: int, T: int, threads: int, some: bool, set_threads: Callable[[int], None]
) -> None:
    """Long loops over small layers, and more threads than sequences."""
    rnn = layer("lstm", hidden, backend="cpp", num_layers=4, dtype=torch.float32)
    rnn(torch.zeros(1, 2, rnn.cells[0].input_size))
    programs = [built.program for built in rnn._built.values()]
    set_threads(threads)
    assert (wavefront_chunks(programs, Layout.even(num_steps=T, num_rows=1)) > 1) == some


def test_independent_loops_make_the_same_bits(set_threads: Callable[[int], None]) -> None:
    torch.manual_seed(0)
    rnn = stretto.RNN(TwoLoops().double(), bidirectional=True)
    _assert_the_same(rnn, drawn(rnn, T=20, B=2, lengths=[20, 3]), set_threads)


@pytest.mark.parametrize("B", [1, 4, 32])
def test_weight_gradients_in_single_precision(B: int, set_threads: Callable[[int], None]) -> None:
    """They are products over the rows of all steps."""
    rnn = layer("lstm", 100, dtype=torch.float32, backend="cpp")
    _assert_the_same(rnn, drawn(rnn, T=30, B=B), set_threads)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_sequence_does_not_depend_on_its_neighbours(threads: int, set_threads: Callable[[int], None]) -> None:
    rnn = layer("lstm", 7, backend="cpp")
    set_threads(threads)
    batch = drawn(rnn, T=20, B=6)
    y_BTH, (h_BH, _) = rnn(batch.x_BTF, lengths=[20, 3, 7, 20, 1, 12])
    for row, length in enumerate([20, 3, 7, 20, 1, 12]):
        alone_BTH, (alone_BH, _) = rnn(batch.x_BTF[row : row + 1, :length])
        torch.testing.assert_close(alone_BTH[0], y_BTH[row, :length], rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(alone_BH[0], h_BH[row], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("setting", ["gru", "layer-norm-lstm"])
@pytest.mark.parametrize("H", [64, 70])
def test_loops_long_enough_to_try_both_ways(setting: str, H: int, set_threads: Callable[[int], None]) -> None:
    """Some stretches of time are run by all threads and some by one; the clock decides which."""
    rnn = layer(setting, H, backend="cpp")
    batch = drawn(rnn, T=700, B=1)
    _assert_the_same(rnn, batch, set_threads)


@final
class Table(stretto.Cell):
    """A state of two rows, which a product takes row by row and another all at once."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = torch.nn.Parameter(torch.randn(3, 3))
        self.across = torch.nn.Parameter(torch.randn(6, 6))

    def initial_state(self, batch_size: int) -> torch.Tensor:
        """Zeros."""
        return torch.zeros(batch_size, 2, 3, dtype=torch.float64)

    def forward(self, x_t: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002
        """One step."""
        mixed = functional.linear(functional.linear(state, self.inside).reshape(-1, 6), self.across)
        state = torch.tanh(mixed.reshape(-1, 2, 3))
        return state, state


@pytest.mark.slow
def test_shared_tables_make_the_same_bits(set_threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops over tables are shared or not, depending on how they lie in memory; all threads wait for them."""
    monkeypatch.setattr(generate, "TEAM_MIN_ELEMENTS", 1)
    monkeypatch.setattr(generate, "TEAM_USUAL_ELEMENTS", 1)
    torch.manual_seed(0)
    rnn = stretto.RNN(Table().double(), backend="cpp")
    # Short loops, often: a thread that comes late to the first steps finds what others have already overwritten.
    for T in (2, 3) * 20:
        x_BTF, state = torch.zeros(1, T, 3, dtype=torch.float64), torch.randn(1, 2, 3, dtype=torch.float64)
        _assert_the_same(rnn, Batch(x_BTF=x_BTF, state=state), set_threads)
