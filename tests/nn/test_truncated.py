"""Truncated BPTT against its definition.

Shape legend: B rows, T steps, F features, H hidden units.
"""

import math
import weakref
from typing import Any

import pytest
import torch
from bptt_definition import (
    NAMES,
    F,
    H,
    Loop,
    assert_same,
    batch_dim_of,
    by_definition,
    flat,
    loss_of,
    make_case,
    make_net,
    take_gradients,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.nn import Part, TruncatedBPTT, detach_state


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=25)
@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 8))
def test_gradients_are_those_of_the_definition(name: str, steps: int, step: int, overlap: int) -> None:
    net, (x_BTF, weight_BTH) = make_net(name), make_case(2, steps)
    parts: list[Part] = []
    bptt = TruncatedBPTT(net, x_BTF, window=step + overlap, step=step)
    for part in bptt:
        loss_of(part.y_new, weight_BTH[:, part.span]).backward()
        parts.append(part)
    found = take_gradients(net)
    expected, last = by_definition(net, x_BTF, weight_BTH, window=step + overlap, step=step)
    assert_same(found, expected)
    assert_same(flat(parts[-1].state), flat(last))
    assert len(bptt) == len(parts) == math.ceil(steps / step)
    assert [t for part in parts for t in range(steps)[part.span]] == list(range(steps))
    for part in parts:
        assert part.depth == part.span.stop - max(0, part.span.start - overlap)
        assert part.lengths.tolist() == [part.span.stop - part.span.start] * 2
        assert not any(tensor.requires_grad for tensor in flat(part.state))
    torch.testing.assert_close(torch.cat([part.y_new for part in parts], dim=1), net(x_BTF, None)[0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("step", [7, 50])
def test_one_part_is_full_back_propagation(name: str, step: int) -> None:
    net, (x_BTF, weight_BTH) = make_net(name), make_case(3, 7)
    (part,) = TruncatedBPTT(net, x_BTF, window=step, step=step)
    loss_of(part.y_new, weight_BTH).backward()
    found = take_gradients(net)
    loss_of(net(x_BTF)[0], weight_BTH).backward()
    assert_same(found, take_gradients(net))


@pytest.mark.parametrize("name", NAMES)
def test_a_window_over_everything_is_full_back_propagation(name: str) -> None:
    net, (x_BTF, weight_BTH) = make_net(name), make_case(3, 9)
    for part in TruncatedBPTT(net, x_BTF, window=100, step=2):
        loss_of(part.y_new, weight_BTH[:, part.span]).backward()
    found = take_gradients(net)
    loss_of(net(x_BTF)[0], weight_BTH).backward()
    assert_same(found, take_gradients(net))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("window", "step"), [(4, 4), (4, 2), (5, 2), (3, 2), (6, 1)])
def test_with_updates_each_part_has_the_gradient_of_its_window_under_the_weights_of_the_moment(
    name: str, window: int, step: int
) -> None:
    net, (x_BTF, weight_BTH) = make_net(name), make_case(2, 11)
    given_state = detach_state(net(x_BTF[:, :3])[1])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    stored = {0: given_state}
    for part in TruncatedBPTT(net, x_BTF, window=window, step=step, state=given_state):
        loss_of(part.y_new, weight_BTH[:, part.span]).backward()
        found = take_gradients(net)
        begin = max(0, part.span.start - (window - step))
        state, outputs = stored[begin], []
        for t in range(begin, part.span.stop):
            y_B1H, state = net(x_BTF[:, t : t + 1], state)
            outputs.append(y_B1H)
            stored[t + 1] = detach_state(state)
        loss_of(torch.cat(outputs, dim=1)[:, part.span.start - begin :], weight_BTH[:, part.span]).backward()
        expected = take_gradients(net)
        assert_same(found, expected)
        assert_same(flat(part.state), flat(stored[part.span.stop]))
        for parameter, gradient in zip(net.parameters(), found, strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()


def test_torch_refuses_to_go_back_through_a_graph_of_older_weights() -> None:
    net, (x_BTF, _) = make_net("loop"), make_case(2, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    y_BTH, state = net(x_BTF[:, :2])
    y_BTH.sum().backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        net(x_BTF[:, 2:], state)[0].sum().backward()


@pytest.mark.parametrize(("window", "step", "steps_run"), [(4, 4, 12), (8, 4, 4 + 8 + 8), (6, 4, 4 + 6 + 6)])
def test_how_often_a_step_is_run(window: int, step: int, steps_run: int) -> None:
    net, (x_BTF, _) = make_net("loop"), make_case(1, 12)
    assert isinstance(net, Loop)
    with_gradients = [part.y_new.detach() for part in TruncatedBPTT(net, x_BTF, window=window, step=step)]
    assert net.steps_run == steps_run
    with torch.no_grad():
        without = [part.y_new for part in TruncatedBPTT(net, x_BTF, window=window, step=step)]
    assert net.steps_run == steps_run + 12
    torch.testing.assert_close(with_gradients, without)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 10), min_size=1, max_size=4), st.integers(1, 5), st.integers(0, 6), st.integers(0, 2))
def test_ragged_rows_have_the_gradients_and_states_that_they_have_alone(
    name: str, lengths: list[int], step: int, overlap: int, behind: int
) -> None:
    net = make_net(name)
    x_BTF, weight_BTH = make_case(len(lengths), max(lengths) + behind)
    for row, length in enumerate(lengths):
        x_BTF[row, length:] = 1e3
    bptt = TruncatedBPTT(
        net, x_BTF, window=step + overlap, step=step, lengths=torch.tensor(lengths), batch_dim=batch_dim_of(net)
    )
    for part in bptt:
        loss_of(part.y_new[part.mask], weight_BTH[:, part.span][part.mask]).backward()
    found, expected = take_gradients(net), [torch.zeros_like(p) for p in net.parameters()]
    for row, length in enumerate(lengths):
        alone, last = by_definition(
            net,
            x_BTF[row : row + 1, :length],
            weight_BTH[row : row + 1, :length],
            window=step + overlap,
            step=step,
        )
        expected = [total + gradient for total, gradient in zip(expected, alone, strict=True)]
        assert_same(
            [t.select(batch_dim_of(net), row) for t in flat(part.state)],
            [t.select(batch_dim_of(net), 0) for t in flat(last)],
        )
    assert_same(found, expected)
    assert len(bptt) == math.ceil(max(lengths) / step)


@pytest.mark.parametrize("name", NAMES)
def test_the_given_state_is_used_without_its_graph(name: str) -> None:
    net, (x_BTF, _) = make_net(name), make_case(2, 6)
    state = net(x_BTF)[1]
    for part in TruncatedBPTT(net, x_BTF, window=6, step=2, state=state):
        part.y_new.sum().backward()
    net.zero_grad()
    expected = net(x_BTF, detach_state(state))[0]
    torch.testing.assert_close(part.y_new, expected[:, 4:])


def test_memory_does_not_grow_with_the_number_of_parts() -> None:
    net, (x_BTF, _) = make_net("loop"), make_case(1, 60)
    alive: list[weakref.ref[torch.Tensor]] = []

    def watched(x_BTF: torch.Tensor, state: Any) -> Any:
        y_BTH, state = net(x_BTF, state)
        alive.extend(weakref.ref(tensor) for tensor in (y_BTH, *flat(state)))
        return y_BTH, state

    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    counts = []
    for part in TruncatedBPTT(watched, x_BTF, window=6, step=2):
        part.y_new.sum().backward()
        optimizer.step()
        del part
        counts.append(sum(reference() is not None for reference in alive))
    assert len(alive) > 100
    assert counts == [0] * len(counts)


def test_inputs_that_are_leaves_get_their_gradients() -> None:
    net, (x_BTF, weight_BTH) = make_net("gru"), make_case(2, 6)
    x_BTF.requires_grad_()
    for part in TruncatedBPTT(net, x_BTF, window=9, step=2):
        loss_of(part.y_new, weight_BTH[:, part.span]).backward()
    assert x_BTF.grad is not None
    found_BTF = x_BTF.grad.clone()
    x_BTF.grad = None
    loss_of(net(x_BTF)[0], weight_BTH).backward()
    torch.testing.assert_close(found_BTF, x_BTF.grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["GRU", "LSTM", "LayerNormLSTM"])
@pytest.mark.parametrize(("window", "step"), [(5, 2), (4, 4), (3, 2)])
def test_what_is_taken_out_of_the_time_loop_fits_every_window(kind: str, window: int, step: int) -> None:
    rnn_module, cells = pytest.importorskip("stretto.nn.rnn"), pytest.importorskip("stretto.cells")
    torch.manual_seed(0)
    cell = getattr(cells, kind)(F, H).double()
    rnn = rnn_module.RNN(cell)

    def plain(x_B1F: torch.Tensor, state: Any) -> Any:
        y_BH, state = cell(x_B1F[:, 0], cell.initial_state(len(x_B1F)) if state is None else state)
        return y_BH[:, None], state

    lengths = [11, 4, 8]
    x_BTF, weight_BTH = make_case(3, 11)
    for part in TruncatedBPTT(rnn, x_BTF, window=window, step=step, lengths=lengths):
        loss_of(part.y_new[part.mask], weight_BTH[:, part.span][part.mask]).backward()
    found, expected = take_gradients(cell), [torch.zeros_like(p) for p in cell.parameters()]
    for row, length in enumerate(lengths):
        x_1TF, weight_1TH = x_BTF[row : row + 1, :length], weight_BTH[row : row + 1, :length]
        alone, _ = by_definition(cell, x_1TF, weight_1TH, window=window, step=step, run=plain)
        expected = [total + gradient for total, gradient in zip(expected, alone, strict=True)]
    assert_same(found, expected)
