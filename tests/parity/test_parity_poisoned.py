"""Nothing is read that was not written: all memory comes full of NaN, and the numbers are those of the definition.

Shape legend: B sequences, T steps, H hidden units.
"""

from collections.abc import Callable

import pytest
import torch
from parity_cells import drawn, layer
from parity_oracle import assert_parity, assert_same_bits, found
from parity_own_cells import ConstantState, DelayLine, LoopBehindLoop, TwoLoops, own_layer

from cell_settings import SETTINGS
from stretto.cells import Cell

BATCHES: dict[str, tuple[int, list[int]]] = {
    "even": (5, [5, 5, 5]),
    "ragged": (9, [3, 0, 9, 9, 1, 4]),
    "one-row": (8, [8]),
    "one-going": (6, [0, 6, 0]),
    "empty": (4, [0, 0]),
    "many": (3, [3, 1, 2] * 6),
}


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("setting", [name for name in SETTINGS if not name.endswith("-bare")])
def test_no_cell_reads_what_was_not_written(setting: str) -> None:
    rnn = layer(setting, 7, num_layers=2, bidirectional=True)
    T, lengths = BATCHES["ragged"]
    assert_parity(rnn, drawn(rnn, T=T, B=len(lengths), lengths=lengths, given=True), kernels=["cpp"])


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("setting", ["lstm", "attention", "layer-norm-gru"])
def test_no_batch_reads_what_was_not_written(setting: str, batch: str) -> None:
    rnn = layer(setting, 7)
    T, lengths = BATCHES[batch]
    assert_parity(rnn, drawn(rnn, T=T, B=len(lengths), lengths=lengths))


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("cell", [ConstantState, DelayLine, LoopBehindLoop, TwoLoops])
def test_no_own_cell_reads_what_was_not_written(cell: type[Cell]) -> None:
    rnn = own_layer(cell)
    T, lengths = BATCHES["ragged"]
    assert_parity(rnn, drawn(rnn, T=T, B=len(lengths), lengths=lengths, given=True))


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("setting", ["lstm", "attention", "layer-norm-gru"])
def test_nothing_unwritten_is_read_without_gradients(setting: str, mode: type[torch.no_grad]) -> None:
    rnn = layer(setting, 7, backend="cpp", num_layers=2, bidirectional=True)
    T, lengths = BATCHES["ragged"]
    batch = drawn(rnn, T=T, B=len(lengths), lengths=lengths)
    with mode():
        y_BTO, _ = rnn(batch.x_BTF, lengths=lengths)
    assert torch.equal(y_BTO, found(rnn, batch).values["y"])


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("read", ["y", "h", "c"])
def test_nothing_unwritten_is_read_when_the_loss_reads_one_result(read: str) -> None:
    rnn = layer("lstm", 7, backend="cpp")
    T, lengths = BATCHES["ragged"]
    x_BTF = drawn(rnn, T=T, B=len(lengths)).x_BTF.requires_grad_()
    for backend in ("cpp", "eager"):
        rnn.backend = backend
        y_BTH, (h_BH, c_BH) = rnn(x_BTF, lengths=lengths)
        total = {"y": y_BTH, "h": h_BH, "c": c_BH}[read].sum()
        for gradient in torch.autograd.grad(total, [x_BTF, *rnn.parameters()], allow_unused=True):
            assert gradient is None or bool(gradient.isfinite().all())


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("rows", [1, 3])
def test_threads_that_share_a_row_read_nothing_unwritten(rows: int, set_threads: Callable[[int], None]) -> None:
    rnn = layer("lstm", 100, backend="cpp")
    set_threads(4)
    assert_parity(rnn, drawn(rnn, T=6, B=rows, given=True), kernels=["cpp"])


@pytest.mark.usefixtures("poisoned_memory", "waves")
def test_layers_as_a_wave_read_nothing_unwritten(set_threads: Callable[[int], None]) -> None:
    rnn = layer("lstm", 7, num_layers=3, backend="cpp")
    batch = drawn(rnn, T=100, B=2, lengths=[70, 100], given=True)
    one_by_one = found(rnn, batch)
    set_threads(4)
    assert_parity(rnn, batch, kernels=["cpp"])
    assert_same_bits(found(rnn, batch), found(rnn, batch))
    assert torch.equal(found(rnn, batch).values["y"], one_by_one.values["y"])
