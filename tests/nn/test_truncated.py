"""Truncated BPTT against its definition, computed a step at a time with plain autograd.

Shape legend: B rows, T steps, F features, H hidden units.
"""

import copy
import gzip
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stretto.errors import StrettoError
from stretto.nn.carried_state import detach_state
from stretto.nn.streams import Streams
from stretto.nn.truncated import Part, TruncatedBPTT

F, H = 2, 3
NAMES = ["lstm", "gru", "loop"]


class Loop(nn.Module):
    """A cell in a Python loop, with a nested state, a learnt initial state and, as `stretto.RNN` has it, lengths."""

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


def _net(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    made = {
        "lstm": lambda: nn.LSTM(F, H, num_layers=2, batch_first=True),
        "gru": lambda: nn.GRU(F, H, batch_first=True),
        "loop": Loop,
    }
    return made[name]().double()


def _batch_dim(net: nn.Module) -> int:
    return 1 if isinstance(net, nn.RNNBase) else 0


def _case(rows: int, steps: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and weights of the outputs in the loss."""
    generator = torch.Generator().manual_seed(seed)
    x_BTF = torch.randn(rows, steps, F, dtype=torch.float64, generator=generator)
    return x_BTF, torch.randn(rows, steps, H, dtype=torch.float64, generator=generator)


def _loss(y_BTH: torch.Tensor, weight_BTH: torch.Tensor) -> torch.Tensor:
    return ((y_BTH + y_BTH**2) * weight_BTH).sum()


def _gradients(net: nn.Module) -> list[torch.Tensor]:
    found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    return found


def _assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def _by_definition(
    net: nn.Module, x_BTF: torch.Tensor, weight_BTH: torch.Tensor, *, window: int, step: int
) -> tuple[list[torch.Tensor], Any]:
    """BPTT(h; h'): for every part, all steps from the start, with the state detached h steps before the part's end."""
    state = None
    for begin in range(0, x_BTF.shape[1], step):
        state, outputs = None, []
        for t in range(min(begin + step, x_BTF.shape[1])):
            if t == begin + step - window and state is not None:
                state = detach_state(state)
            y_B1H, state = net(x_BTF[:, t : t + 1], state)
            outputs.append(y_B1H)
        new_BTH = torch.cat(outputs[begin:], dim=1)
        _loss(new_BTH, weight_BTH[:, begin : begin + step]).backward()
    return _gradients(net), detach_state(state)  # type: ignore[arg-type]


def _flat(state: Any) -> list[torch.Tensor]:
    return [state] if isinstance(state, torch.Tensor) else [tensor for inner in state for tensor in _flat(inner)]


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=25)
@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 8))
def test_gradients_are_those_of_the_definition(name: str, steps: int, step: int, overlap: int) -> None:
    net, (x_BTF, weight_BTH) = _net(name), _case(2, steps)
    parts: list[Part] = []
    walk = TruncatedBPTT(net, x_BTF, window=step + overlap, step=step)
    for part in walk:
        _loss(part.y_new, weight_BTH[:, part.span]).backward()
        parts.append(part)
    found = _gradients(net)
    expected, last = _by_definition(net, x_BTF, weight_BTH, window=step + overlap, step=step)
    _assert_same(found, expected)
    _assert_same(_flat(parts[-1].state), _flat(last))
    assert len(walk) == len(parts) == math.ceil(steps / step)
    assert [t for part in parts for t in range(steps)[part.span]] == list(range(steps))
    for part in parts:
        assert part.depth == part.span.stop - max(0, part.span.start - overlap)
        assert part.lengths.tolist() == [part.span.stop - part.span.start] * 2
    torch.testing.assert_close(torch.cat([part.y_new for part in parts], dim=1), net(x_BTF, None)[0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("step", [7, 50])
def test_one_part_is_full_back_propagation(name: str, step: int) -> None:
    net, (x_BTF, weight_BTH) = _net(name), _case(3, 7)
    (part,) = TruncatedBPTT(net, x_BTF, window=step, step=step)
    _loss(part.y_new, weight_BTH).backward()
    found = _gradients(net)
    _loss(net(x_BTF)[0], weight_BTH).backward()
    _assert_same(found, _gradients(net))


@pytest.mark.parametrize("name", NAMES)
def test_a_window_over_everything_is_full_back_propagation(name: str) -> None:
    net, (x_BTF, weight_BTH) = _net(name), _case(3, 9)
    for part in TruncatedBPTT(net, x_BTF, window=100, step=2):
        _loss(part.y_new, weight_BTH[:, part.span]).backward()
    found = _gradients(net)
    _loss(net(x_BTF)[0], weight_BTH).backward()
    _assert_same(found, _gradients(net))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("window", "step"), [(4, 4), (4, 2), (5, 2), (3, 2), (6, 1)])
def test_with_updates_each_part_has_the_gradient_of_its_window_under_the_weights_of_the_moment(
    name: str, window: int, step: int
) -> None:
    net, (x_BTF, weight_BTH) = _net(name), _case(2, 11)
    given_state = detach_state(net(x_BTF[:, :3])[1])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    stored = {0: given_state}
    for part in TruncatedBPTT(net, x_BTF, window=window, step=step, state=given_state):
        _loss(part.y_new, weight_BTH[:, part.span]).backward()
        found = _gradients(net)
        begin = max(0, part.span.start - (window - step))
        state, outputs = stored[begin], []
        for t in range(begin, part.span.stop):
            y_B1H, state = net(x_BTF[:, t : t + 1], state)
            outputs.append(y_B1H)
            stored[t + 1] = detach_state(state)
        _loss(torch.cat(outputs, dim=1)[:, part.span.start - begin :], weight_BTH[:, part.span]).backward()
        expected = _gradients(net)
        _assert_same(found, expected)
        _assert_same(_flat(part.state), _flat(stored[part.span.stop]))
        for parameter, gradient in zip(net.parameters(), found, strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()


def test_torch_refuses_to_go_back_through_a_graph_of_older_weights() -> None:
    net, (x_BTF, _) = _net("loop"), _case(2, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    y_BTH, state = net(x_BTF[:, :2])
    y_BTH.sum().backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        net(x_BTF[:, 2:], state)[0].sum().backward()


@pytest.mark.parametrize(("window", "step", "steps_run"), [(4, 4, 12), (8, 4, 4 + 8 + 8), (6, 4, 4 + 6 + 6)])
def test_how_often_a_step_is_run(window: int, step: int, steps_run: int) -> None:
    net, (x_BTF, _) = _net("loop"), _case(1, 12)
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
    net = _net(name)
    x_BTF, weight_BTH = _case(len(lengths), max(lengths) + behind)
    for row, length in enumerate(lengths):
        x_BTF[row, length:] = 1e3
    walk = TruncatedBPTT(
        net, x_BTF, window=step + overlap, step=step, lengths=torch.tensor(lengths), batch_dim=_batch_dim(net)
    )
    for part in walk:
        _loss(part.y_new[part.mask], weight_BTH[:, part.span][part.mask]).backward()
    found, expected = _gradients(net), [torch.zeros_like(p) for p in net.parameters()]
    for row, length in enumerate(lengths):
        alone, last = _by_definition(
            net,
            x_BTF[row : row + 1, :length],
            weight_BTH[row : row + 1, :length],
            window=step + overlap,
            step=step,
        )
        expected = [total + gradient for total, gradient in zip(expected, alone, strict=True)]
        _assert_same(
            [t.select(_batch_dim(net), row) for t in _flat(part.state)],
            [t.select(_batch_dim(net), 0) for t in _flat(last)],
        )
    _assert_same(found, expected)
    assert len(walk) == math.ceil(max(lengths) / step)


@pytest.mark.parametrize("takes_lengths", [True, False])
@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=15)
@given(
    st.lists(st.integers(1, 10), min_size=1, max_size=6),
    st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(0, 6)),
)
def test_no_gradient_crosses_from_one_sequence_of_a_stream_to_the_next(
    name: str, takes_lengths: bool, lengths: list[int], sizes: tuple[int, int, int]
) -> None:
    net, (num_streams, chunk, overlap) = _net(name), sizes
    cases = [_case(1, length, seed) for seed, length in enumerate(lengths)]
    streams = Streams(
        [x_BTF[0] for x_BTF, _ in cases],
        num_streams=min(num_streams, len(lengths)),
        chunk=chunk,
        targets=[weight_BTH[0] for _, weight_BTH in cases],
    )
    walk = TruncatedBPTT(
        net if takes_lengths else _without_lengths(net),
        streams,
        window=chunk + overlap,
        step=chunk,
        initial=getattr(net, "initial_state", None),
        batch_dim=_batch_dim(net),
    )
    parts = 0
    for part in walk:
        assert part.chunk is not None
        assert part.chunk.targets_BT is not None
        _loss(part.y_new[part.mask], part.chunk.targets_BT[part.mask]).backward()
        parts += 1
    assert parts == len(walk) == len(streams)
    found, expected = _gradients(net), [torch.zeros_like(p) for p in net.parameters()]
    for x_BTF, weight_BTH in cases:
        alone, _ = _by_definition(net, x_BTF, weight_BTH, window=chunk + overlap, step=chunk)
        expected = [total + gradient for total, gradient in zip(expected, alone, strict=True)]
    _assert_same(found, expected)


def _without_lengths(net: nn.Module) -> Callable[..., Any]:
    def run(x_BTF: torch.Tensor, state: Any) -> Any:
        return net(x_BTF, state)

    return run


def test_one_long_sequence_in_streams_is_its_parts_side_by_side() -> None:
    net, (x_1SF, weight_1SH) = _net("lstm"), _case(1, 24)
    streams = Streams(x_1SF[0], num_streams=3, chunk=2, targets=weight_1SH[0])
    for part in TruncatedBPTT(net, streams, window=5, step=2, batch_dim=1):
        assert part.chunk is not None
        _loss(part.y_new, part.chunk.targets_BT).backward()  # type: ignore[arg-type]
    found = _gradients(net)
    expected, _ = _by_definition(net, x_1SF.view(3, 8, F), weight_1SH.view(3, 8, H), window=5, step=2)
    _assert_same(found, expected)


def test_streams_go_on_from_a_given_state() -> None:
    net, (x_1SF, _) = _net("gru"), _case(1, 20)
    whole = [*TruncatedBPTT(net, Streams(x_1SF[0], num_streams=2, chunk=3), window=6, step=3, batch_dim=1)]
    streams = Streams(x_1SF[0], num_streams=2, chunk=3)
    streams.load_state_dict(streams.state_dict(used=2))
    rest = TruncatedBPTT(net, streams, window=6, step=3, batch_dim=1, state=whole[1].state)
    torch.testing.assert_close([p.y_new for p in rest], [p.y_new for p in whole[2:]], rtol=0, atol=1e-12)
    streams.load_state_dict(streams.state_dict(used=2))
    with pytest.raises(StrettoError, match="2 of 2 rows continue"):
        list(TruncatedBPTT(net, streams, window=6, step=3, batch_dim=1))


@pytest.mark.parametrize("name", NAMES)
def test_the_given_state_is_used_without_its_graph(name: str) -> None:
    net, (x_BTF, _) = _net(name), _case(2, 6)
    state = net(x_BTF)[1]
    for part in TruncatedBPTT(net, x_BTF, window=6, step=2, state=state):
        part.y_new.sum().backward()
    net.zero_grad()
    expected = net(x_BTF, detach_state(state))[0]
    torch.testing.assert_close(part.y_new, expected[:, 4:])


def test_memory_does_not_grow_with_the_number_of_parts() -> None:
    net, (x_BTF, _) = _net("loop"), _case(1, 60)
    alive: list[weakref.ref[torch.Tensor]] = []

    def watched(x_BTF: torch.Tensor, state: Any) -> Any:
        y_BTH, state = net(x_BTF, state)
        alive.extend(weakref.ref(tensor) for tensor in (y_BTH, *_flat(state)))
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


def test_a_chunk_is_let_go_when_the_window_has_passed_it() -> None:
    net, (x_1SF, _) = _net("gru"), _case(1, 60)
    chunks: list[weakref.ref[torch.Tensor]] = []

    def watched() -> Any:
        for chunk in Streams(x_1SF[0], num_streams=1, chunk=2):
            chunks.append(weakref.ref(chunk.x_BT))
            yield chunk

    counts = []
    for part in TruncatedBPTT(net, watched(), window=6, step=2, batch_dim=1):
        part.y_new.sum().backward()
        del part
        counts.append(sum(reference() is not None for reference in chunks))
    assert len(chunks) == 30
    assert max(counts) <= 4


def test_inputs_that_are_leaves_get_their_gradients() -> None:
    net, (x_BTF, weight_BTH) = _net("gru"), _case(2, 6)
    x_BTF.requires_grad_()
    for part in TruncatedBPTT(net, x_BTF, window=9, step=2):
        _loss(part.y_new, weight_BTH[:, part.span]).backward()
    assert x_BTF.grad is not None
    found_BTF = x_BTF.grad.clone()
    x_BTF.grad = None
    _loss(net(x_BTF)[0], weight_BTH).backward()
    torch.testing.assert_close(found_BTF, x_BTF.grad, rtol=0, atol=1e-10)


def test_inputs_from_other_layers_are_refused_where_their_graph_would_be_used_twice() -> None:
    net, (x_BTF, _) = _net("gru"), _case(2, 6)
    made_BTF = nn.Linear(F, F).double()(x_BTF)
    with pytest.raises(StrettoError, match="output of other layers"):
        list(TruncatedBPTT(net, made_BTF, window=4, step=2))
    (part,) = TruncatedBPTT(net, made_BTF, window=6, step=6)
    part.y_new.sum().backward()
    with torch.no_grad():
        assert len(list(TruncatedBPTT(net, made_BTF, window=4, step=2))) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 1}, "window=1 is shorter than step=2"),
        ({"step": 0}, "step=0"),
        ({"step": 1.0}, "step=1.0"),
        ({"window": True}, "window=True"),
        ({"x": torch.zeros(3)}, r"shape \(3,\)"),
        ({"x": torch.zeros(2, 0, F)}, r"shape \(2, 0, 2\)"),
        ({"lengths": [3]}, "1 lengths"),
        ({"lengths": [3, 7]}, "up to 7 steps"),
        ({"lengths": [3, 0]}, "sequence 1 has length 0"),
        ({"lengths": [3, 2], "batch_dim": 0}, "batch_dim=1"),
        ({"x": Streams(torch.zeros(4, F), num_streams=1, chunk=2), "lengths": [4]}, "which have their own"),
        ({"x": Streams(torch.zeros(4, F), num_streams=1, chunk=2), "batch_dim": 0}, "batch_dim=1"),
        ({"x": Streams(torch.zeros(4, F), num_streams=1, chunk=3)}, "chunk 0 has 3 steps, more than step=2"),
        ({"x": [torch.zeros(2, 3, F)]}, "gave a Tensor"),
        ({"state": "nothing"}, "expected form: str"),
        ({"rnn": nn.GRU(F, H)}, "batch_first=False"),
        ({"rnn": nn.GRU(F, H, batch_first=True, bidirectional=True)}, "bidirectional"),
        ({"rnn": lambda x, state: (x, state), "lengths": [3, 2]}, "takes none"),
        ({"rnn": lambda *given: given[0]}, "gave Tensor instead of outputs and state"),
        ({"rnn": lambda x, state: (x[:, :1], state)}, r"outputs of shape \(2, 1, 2\) for \(2, 2, 2\)"),
    ],
)
def test_what_cannot_be_used_is_refused(options: dict[str, Any], message: str) -> None:
    settings_ = {
        "rnn": nn.GRU(F, H, batch_first=True),
        "x": torch.zeros(2, 3, F),
        "window": 4,
        "step": 2,
        "batch_dim": 1,
    }
    settings_.update(options)
    with pytest.raises(StrettoError, match=message):
        list(TruncatedBPTT(settings_.pop("rnn"), settings_.pop("x"), **settings_))


class Characters(nn.Module):
    """Characters in, the logits of the next ones out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 16)
        self.lstm = nn.LSTM(16, 48, batch_first=True)
        self.logits = nn.Linear(48, 128)

    def forward(self, x_BT: torch.Tensor, state: Any = None) -> Any:
        y_BTH, state = self.lstm(self.embedding(x_BT), state)
        return self.logits(y_BTH), state


def test_a_book_in_streams_is_learnt_with_either_truncation(shared_data: Path) -> None:
    text = gzip.decompress((shared_data / "tinyshakespeare" / "input.txt.gz").read_bytes())[:24_000]
    characters = torch.tensor(list(text))
    share_C = torch.bincount(characters) / len(text)
    unigram = -(share_C * share_C.clamp(min=1e-9).log()).sum().item()
    streams = Streams(characters, num_streams=16, chunk=16, targets="next")
    torch.manual_seed(0)
    untrained = Characters()
    for window in (16, 32):
        net = copy.deepcopy(untrained)
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
        losses = []
        for part in TruncatedBPTT(net, streams, window=window, step=16, batch_dim=1):
            assert part.chunk is not None
            assert part.chunk.targets_BT is not None
            loss = nn.functional.cross_entropy(part.y_new[part.mask], part.chunk.targets_BT[part.mask])
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert losses[0] == pytest.approx(math.log(128), rel=0.05)
        assert sum(losses[-10:]) / 10 < 0.8 * unigram
