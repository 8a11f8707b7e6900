"""The same bits from run to run, whatever the number of threads, and however the work is shared among them.

Shape legend: B sequences, T steps, H hidden units.
"""

from collections.abc import Callable

import pytest
import torch
from parity_cells import drawn, layer
from parity_oracle import Result, assert_parity, assert_same_bits, found
from parity_own_cells import TwoLoops

import stretto

THREADS = (1, 2, 4)


def _with_each(rnn: stretto.RNN, set_threads: Callable[[int], None], **batch: object) -> list[Result]:
    given = drawn(rnn, **batch)  # type: ignore[arg-type]
    results = []
    for threads in THREADS:
        set_threads(threads)
        results += [found(rnn, given), found(rnn, given)]
    return results


def _assert_all_the_same(results: list[Result]) -> None:
    for other in results[1:]:
        assert_same_bits(results[0], other)


@pytest.mark.parametrize("kernel", ["cpp", "eager"])
@pytest.mark.parametrize("setting", ["lstm", "layer-norm-gru", "attention"])
def test_threads_take_rows(setting: str, kernel: str, set_threads: Callable[[int], None]) -> None:
    lengths = [9, 3, 0, 14, 14, 1, 2, 7, 5, 5, 11, 0, 6, 3, 14, 8, 2]
    rnn = layer(setting, 7, kernel=kernel, num_layers=2, bidirectional=True)
    _assert_all_the_same(_with_each(rnn, set_threads, T=14, B=17, lengths=lengths, given=True))


@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("both_ways", [True, False])
def test_threads_share_few_rows(B: int, both_ways: bool, set_threads: Callable[[int], None]) -> None:
    """Weights of a step this large are shared out by columns when there are more threads than rows."""
    rnn = layer("lstm", 100, kernel="cpp", bidirectional=both_ways)
    _assert_all_the_same(_with_each(rnn, set_threads, T=20, B=B, given=True))


@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize("lengths", [None, [20], [0, 20, 13]])
def test_shared_rows_equal_the_definition(
    threads: int, lengths: list[int] | None, set_threads: Callable[[int], None]
) -> None:
    rnn = layer("lstm", 100, kernel="cpp")
    set_threads(threads)
    assert_parity(rnn, drawn(rnn, T=20, B=1 if lengths is None else len(lengths), lengths=lengths), kernels=["cpp"])


@pytest.mark.parametrize("setting", ["gru-before", "layer-norm-gru"])
def test_shared_rows_of_other_cells(setting: str, set_threads: Callable[[int], None]) -> None:
    rnn = layer(setting, 110, kernel="cpp")
    batch = drawn(rnn, T=9, B=2, lengths=[9, 4])
    alone = found(rnn, batch)
    set_threads(4)
    results = assert_parity(rnn, batch, kernels=["cpp"])
    assert_same_bits(results["cpp"], alone)


@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("num_layers", [2, 3])
def test_layers_as_a_wave_equal_the_definition(B: int, num_layers: int, set_threads: Callable[[int], None]) -> None:
    """Few rows and many steps: layers work on different stretches of time at once."""
    rnn = layer("lstm", 7, kernel="cpp", num_layers=num_layers)
    set_threads(4)
    lengths = None if B == 1 else [100, 37, 64]
    assert_parity(rnn, drawn(rnn, T=100, B=B, lengths=lengths, given=True))


@pytest.mark.parametrize("T", [63, 64, 65, 100, 600])
def test_a_wave_makes_the_same_bits(T: int, set_threads: Callable[[int], None]) -> None:
    rnn = layer("lstm", 7, kernel="cpp", num_layers=3)
    _assert_all_the_same(_with_each(rnn, set_threads, T=T, B=1, given=True))


def test_a_wave_over_ragged_rows_makes_the_same_bits(set_threads: Callable[[int], None]) -> None:
    rnn = layer("gru", 7, kernel="cpp", num_layers=2)
    _assert_all_the_same(_with_each(rnn, set_threads, T=130, B=3, lengths=[40, 0, 130]))


def test_independent_loops_make_the_same_bits(set_threads: Callable[[int], None]) -> None:
    torch.manual_seed(0)
    rnn = stretto.RNN(TwoLoops().double(), bidirectional=True)
    _assert_all_the_same(_with_each(rnn, set_threads, T=20, B=2, lengths=[20, 3]))


@pytest.mark.parametrize("B", [1, 4, 32])
def test_weight_gradients_in_single_precision(B: int, set_threads: Callable[[int], None]) -> None:
    """They are products over the rows of all steps, by torch, which shares large ones out to threads as it likes."""
    rnn = layer("lstm", 100, dtype=torch.float32, kernel="cpp")
    _assert_all_the_same(_with_each(rnn, set_threads, T=100, B=B))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_sequence_does_not_depend_on_its_neighbours(threads: int, set_threads: Callable[[int], None]) -> None:
    rnn = layer("lstm", 7, kernel="cpp")
    set_threads(threads)
    batch = drawn(rnn, T=20, B=6)
    y_BTH, (h_BH, _) = rnn(batch.x_BTF, lengths=[20, 3, 7, 20, 1, 12])
    for row, length in enumerate([20, 3, 7, 20, 1, 12]):
        alone_BTH, (alone_BH, _) = rnn(batch.x_BTF[row : row + 1, :length])
        torch.testing.assert_close(alone_BTH[0], y_BTH[row, :length], rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(alone_BH[0], h_BH[row], rtol=1e-13, atol=1e-13)
