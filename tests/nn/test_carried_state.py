"""The state between chunks: cut off, reset by row, and the same as if there had been no chunks.

Shape legend: B rows, T steps, F features, H hidden units, L layers.
"""

from typing import NamedTuple

import pytest
import torch
from torch import nn

from stretto.errors import StrettoError
from stretto.nn import CarriedState, Streams, detach_state, reset_rows


class Memory(NamedTuple):
    hidden: torch.Tensor
    cell: torch.Tensor


def test_detaching_keeps_form_and_values() -> None:
    a, b, c = (torch.randn(2, 3, requires_grad=True) * 2 for _ in range(3))
    one, (two, three) = detach_state((a, (b, c)))
    assert [t.requires_grad for t in (one, two, three)] == [False] * 3  # type: ignore[union-attr]
    assert torch.equal(two, b)  # type: ignore[arg-type]
    assert torch.equal(three, c)  # type: ignore[arg-type]
    named = detach_state(Memory(a, b))
    assert isinstance(named, Memory)
    assert torch.equal(named.cell, b)
    assert not named.hidden.requires_grad


@pytest.mark.parametrize("batch_dim", [0, 1, -2])
def test_rows_are_reset_and_others_are_not(batch_dim: int) -> None:
    shape = (3, 5) if batch_dim == 0 else (2, 3, 5)
    old, new = torch.randn(shape, requires_grad=True), torch.randn(shape, requires_grad=True)
    rows_B = torch.tensor([True, False, True])
    ((found,),) = reset_rows(((old,),), rows_B, initial=((new,),), batch_dim=batch_dim)
    assert isinstance(found, torch.Tensor)
    for row in range(3):
        expected = (new if rows_B[row] else old).select(batch_dim, row)
        assert torch.equal(found.select(batch_dim, row), expected)
    found.sum().backward()
    assert old.grad is not None
    assert new.grad is not None
    for row in range(3):
        assert (old.grad.select(batch_dim, row) == float(not rows_B[row])).all()
        assert (new.grad.select(batch_dim, row) == float(rows_B[row])).all()


def test_rows_are_zero_without_an_initial_state() -> None:
    found = reset_rows(torch.full((2, 3), torch.nan), torch.tensor([True, False]))
    assert isinstance(found, torch.Tensor)
    assert found[0].tolist() == [0.0, 0.0, 0.0]
    assert found[1].isnan().all()


@pytest.mark.parametrize(
    ("state", "rows", "options", "message"),
    [
        (torch.zeros(2, 3), [1, 0], {}, "rows are torch.int64"),
        (torch.zeros(2, 3), [[True], [False]], {}, r"shape \(2, 1\)"),
        (torch.zeros(1, 2, 3), [True, False], {}, "2 rows in dimension 0.*batch_dim"),
        (torch.zeros(2), [True, False], {"batch_dim": 1}, "dimension 1"),
        ("no state", [True, False], {}, "this is str"),
        (torch.zeros(2, 3), [True, False], {"initial": (torch.zeros(2, 3),)}, r"Tensor against \(Tensor\)"),
        ((torch.zeros(2, 3),) * 2, [True, False], {"initial": (torch.zeros(2, 3),)}, r"\(Tensor, Tensor\) against"),
    ],
)
def test_what_does_not_fit_is_refused(
    state: object, rows: list[bool], options: dict[str, object], message: str
) -> None:
    with pytest.raises(StrettoError, match=message):
        reset_rows(state, torch.tensor(rows), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("net", [nn.LSTM, nn.GRU])
def test_chunks_with_a_carried_state_are_the_sequences_themselves(net: type[nn.LSTM | nn.GRU]) -> None:
    torch.manual_seed(0)
    rnn = net(2, 4, num_layers=2, batch_first=True).double()
    sequences = [torch.randn(length, 2, dtype=torch.float64) for length in (11, 3, 7, 5, 2, 8)]
    found = [torch.zeros(len(sequence), 4, dtype=torch.float64) for sequence in sequences]
    carried = CarriedState(batch_dim=1)
    for chunk in Streams(sequences, num_streams=2, chunk=3):
        y_BTH, state = rnn(chunk.x_BT, carried.start(chunk.resets))
        carried.keep(state)
        for row, length in enumerate(chunk.lengths.tolist()):
            begin = int(chunk.offsets[row])
            found[int(chunk.sequences[row])][begin : begin + length] = y_BTH[row, :length].detach()
    for sequence, outputs in zip(sequences, found, strict=True):
        torch.testing.assert_close(outputs, rnn(sequence[None])[0][0], rtol=0, atol=1e-12)
    assert not any(tensor.requires_grad for tensor in detach_state(carried.state))  # type: ignore[arg-type, union-attr]


def test_the_initial_state_may_be_made_for_the_rows_or_given() -> None:
    asked = []

    def make(count: int) -> torch.Tensor:
        asked.append(count)
        return torch.full((count, 1), 7.0)

    for initial in (make, torch.full((3, 1), 7.0)):
        carried = CarriedState(initial=initial)
        first = carried.start(torch.tensor([True, True, True]))
        assert isinstance(first, torch.Tensor)
        assert first.flatten().tolist() == [7, 7, 7]
        carried.keep(torch.tensor([[1.0], [2.0], [3.0]]))
        second = carried.start(torch.tensor([False, True, False]))
        assert isinstance(second, torch.Tensor)
        assert second.flatten().tolist() == [1, 7, 3]
    assert asked == [3, 3]


def test_rows_that_continue_need_a_state_to_continue_from() -> None:
    resets_B = torch.tensor([True, False])
    assert CarriedState().start(torch.tensor([True, True])) is None
    with pytest.raises(StrettoError, match="1 of 2 rows continue"):
        CarriedState().start(resets_B)
    resumed = CarriedState(state=torch.ones(2, 1)).start(resets_B)
    assert isinstance(resumed, torch.Tensor)
    assert resumed.flatten().tolist() == [0, 1]
