"""The state between chunks, and truncated BPTT against its definition: a step at a time with plain autograd.

Shape legend: B rows, T steps, F features, H hidden units.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import stretto
from stretto.errors import StrettoError
from stretto.nn import CarriedState, Part, Streams, TruncatedBPTT, detach_state, reset_rows
from stretto.state import flatten

F, H = 2, 3
NAMES = ["lstm", "gru", "loop"]


class Loop(nn.Module):
    """A cell in a Python loop, with a nested state, a learned initial state and, as `stretto.RNN` has it, lengths."""

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


def make_net(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    made = {
        "lstm": lambda: nn.LSTM(F, H, num_layers=2, batch_first=True),
        "gru": lambda: nn.GRU(F, H, batch_first=True),
        "loop": Loop,
    }
    return made[name]().double()


def batch_dim_of(net: nn.Module) -> int:
    return 1 if isinstance(net, nn.RNNBase) else 0


def make_case(rows: int, steps: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and weights of the outputs in the loss."""
    generator = torch.Generator().manual_seed(seed)
    x_BTF = torch.randn(rows, steps, F, dtype=torch.float64, generator=generator)
    return x_BTF, torch.randn(rows, steps, H, dtype=torch.float64, generator=generator)


def rows_of(
    x_BTF: torch.Tensor, weight_BTH: torch.Tensor, lengths: list[int]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The cases of single rows."""
    return [(x_BTF[row, None, :length], weight_BTH[row, None, :length]) for row, length in enumerate(lengths)]


def loss_of(y_BTH: torch.Tensor, weight_BTH: torch.Tensor) -> torch.Tensor:
    return ((y_BTH + y_BTH**2) * weight_BTH).sum()


def take_gradients(net: nn.Module) -> list[torch.Tensor]:
    found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    return found


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def by_definition(
    net: nn.Module,
    x_BTF: torch.Tensor,
    weight_BTH: torch.Tensor,
    *,
    window: int,
    step: int,
    run: Callable[..., Any] | None = None,
) -> tuple[list[torch.Tensor], Any]:
    """BPTT(h; h'): for every part, all steps from the start, with the state detached h steps before the part's end."""
    state = None
    for begin in range(0, x_BTF.shape[1], step):
        state, outputs = None, []
        for t in range(min(begin + step, x_BTF.shape[1])):
            if t == begin + step - window and state is not None:
                state = detach_state(state)
            y_B1H, state = (run or net)(x_BTF[:, t : t + 1], state)
            outputs.append(y_B1H)
        new_BTH = torch.cat(outputs[begin:], dim=1)
        loss_of(new_BTH, weight_BTH[:, begin : begin + step]).backward()
    return take_gradients(net), detach_state(state)  # type: ignore[arg-type]


def by_definition_alone(
    net: nn.Module, cases: Sequence[tuple[torch.Tensor, torch.Tensor]], **options: Any
) -> tuple[list[torch.Tensor], list[Any]]:
    """The gradients of all sequences together, each run by itself, and the state after each."""
    expected, states = [torch.zeros_like(p) for p in net.parameters()], []
    for x_1TF, weight_1TH in cases:
        alone, state = by_definition(net, x_1TF, weight_1TH, **options)
        expected = [total + gradient for total, gradient in zip(expected, alone, strict=True)]
        states.append(state)
    return expected, states


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
    assert_same(flatten(parts[-1].state), flatten(last))
    assert len(bptt) == len(parts) == math.ceil(steps / step)
    assert [t for part in parts for t in range(steps)[part.span]] == list(range(steps))
    for part in parts:
        assert part.depth == part.span.stop - max(0, part.span.start - overlap)
        assert part.lengths.tolist() == [part.span.stop - part.span.start] * 2
        assert not any(tensor.requires_grad for tensor in flatten(part.state))
    torch.testing.assert_close(torch.cat([part.y_new for part in parts], dim=1), net(x_BTF, None)[0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("window", "step"), [(4, 4), (4, 2), (5, 2), (3, 2), (6, 1)])
def test_with_updates_each_part_has_the_gradient_of_its_window_under_the_weights_of_the_moment(
    name: str, window: int, step: int
) -> None:
    net, (x_BTF, weight_BTH) = make_net(name), make_case(2, 11)
    given_state = net(x_BTF[:, :3])[1]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    # The given state is used without its graph.
    stored = {0: detach_state(given_state)}
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
        assert_same(flatten(part.state), flatten(stored[part.span.stop]))
        for parameter, gradient in zip(net.parameters(), found, strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()


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
    found, cases = take_gradients(net), rows_of(x_BTF, weight_BTH, lengths)
    expected, states = by_definition_alone(net, cases, window=step + overlap, step=step)
    assert_same(found, expected)
    for row, last in enumerate(states):
        assert_same(
            [t.select(batch_dim_of(net), row) for t in flatten(part.state)],
            [t.select(batch_dim_of(net), 0) for t in flatten(last)],
        )
    assert len(bptt) == math.ceil(max(lengths) / step)


def test_memory_does_not_grow_with_the_number_of_parts() -> None:
    net, (x_BTF, _) = make_net("loop"), make_case(1, 60)
    alive: list[weakref.ref[torch.Tensor]] = []

    def watched(x_BTF: torch.Tensor, state: Any) -> Any:
        y_BTH, state = net(x_BTF, state)
        alive.extend(weakref.ref(tensor) for tensor in (y_BTH, *flatten(state)))
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
    torch.manual_seed(0)
    cell = getattr(stretto.cells, kind)(F, H).double()
    rnn = stretto.RNN(cell)

    def plain(x_B1F: torch.Tensor, state: Any) -> Any:
        y_BH, state = cell(x_B1F[:, 0], cell.initial_state(len(x_B1F)) if state is None else state)
        return y_BH[:, None], state

    lengths = [11, 4, 8]
    x_BTF, weight_BTH = make_case(3, 11)
    for part in TruncatedBPTT(rnn, x_BTF, window=window, step=step, lengths=lengths):
        loss_of(part.y_new[part.mask], weight_BTH[:, part.span][part.mask]).backward()
    found, cases = take_gradients(cell), rows_of(x_BTF, weight_BTH, lengths)
    assert_same(found, by_definition_alone(cell, cases, window=window, step=step, run=plain)[0])


@pytest.mark.parametrize("takes_lengths", [True, False])
@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=15)
@given(
    st.lists(st.integers(1, 10), min_size=1, max_size=6),
    st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 6)),
    st.integers(1, 3),
)
def test_no_gradient_crosses_from_one_sequence_of_a_stream_to_the_next(
    name: str, takes_lengths: bool, lengths: list[int], sizes: tuple[int, int, int], world_size: int
) -> None:
    """However many ranks divide the streams, some of which end before others or have none."""
    net, (num_streams, chunk, overlap) = make_net(name), sizes
    cases = [make_case(1, length, seed) for seed, length in enumerate(lengths)]
    for rank in range(world_size):
        streams = Streams(
            [x_BTF[0] for x_BTF, _ in cases],
            num_streams=min(num_streams, len(lengths)),
            chunk=chunk,
            targets=[weight_BTH[0] for _, weight_BTH in cases],
            rank=rank,
            world_size=world_size,
        )
        bptt = TruncatedBPTT(
            net if takes_lengths else lambda x_BTF, state: net(x_BTF, state),  # noqa: PLW0108 - the signature counts
            streams,
            window=chunk + overlap,
            step=chunk,
            initial=getattr(net, "initial_state", None),
            batch_dim=batch_dim_of(net),
        )
        if not len(streams.read(0)):
            with pytest.raises(StrettoError, match=r"chunk 0 of x has no rows.*num_streams .* multiple of world_size"):
                list(bptt)
            continue
        parts = 0
        for part in bptt:
            assert part.chunk is not None
            assert part.chunk.targets_BT is not None
            loss_of(part.y_new[part.mask], part.chunk.targets_BT[part.mask]).backward()
            parts += 1
        assert parts == len(bptt) == len(streams)
    found = take_gradients(net)
    assert_same(found, by_definition_alone(net, cases, window=chunk + overlap, step=chunk)[0])


def test_one_long_sequence_in_streams_is_its_parts_side_by_side() -> None:
    net, (x_1SF, weight_1SH) = make_net("lstm"), make_case(1, 24)
    streams = Streams(x_1SF[0], num_streams=3, chunk=2, targets=weight_1SH[0])
    for part in TruncatedBPTT(net, streams, window=5, step=2, batch_dim=1):
        assert part.chunk is not None
        loss_of(part.y_new, part.chunk.targets_BT).backward()  # type: ignore[arg-type]
    found = take_gradients(net)
    expected, _ = by_definition(net, x_1SF.view(3, 8, F), weight_1SH.view(3, 8, H), window=5, step=2)
    assert_same(found, expected)


def test_nothing_is_run_again_from_before_a_start_of_all_rows() -> None:
    net = make_net("loop")
    assert isinstance(net, Loop)
    sequences = [make_case(1, length)[0][0] for length in (4, 4, 6, 6)]
    parts = [*TruncatedBPTT(net, Streams(sequences, num_streams=2, chunk=2), window=6, step=2)]
    starts = [bool(part.chunk.resets.all()) for part in parts if part.chunk is not None]
    assert starts == [True, False, True, False, False]
    assert [part.depth for part in parts] == [2, 4, 2, 4, 6]
    assert net.steps_run == 2 + 4 + 2 + 4 + 6


def test_streams_continue_from_a_given_state() -> None:
    net, (x_1SF, _) = make_net("gru"), make_case(1, 20)
    whole = [*TruncatedBPTT(net, Streams(x_1SF[0], num_streams=2, chunk=3), window=6, step=3, batch_dim=1)]
    streams = Streams(x_1SF[0], num_streams=2, chunk=3)
    streams.load_state_dict(streams.state_dict(used=2))
    rest = TruncatedBPTT(net, streams, window=6, step=3, batch_dim=1, state=whole[1].state)
    torch.testing.assert_close([p.y_new for p in rest], [p.y_new for p in whole[2:]], rtol=0, atol=1e-12)
    streams.load_state_dict(streams.state_dict(used=2))
    with pytest.raises(StrettoError, match="2 of 2 rows continue"):
        list(TruncatedBPTT(net, streams, window=6, step=3, batch_dim=1))


def test_a_chunk_is_let_go_when_the_window_has_passed_it() -> None:
    net, (x_1SF, _) = make_net("gru"), make_case(1, 60)
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


def test_inputs_from_other_layers_are_refused_where_their_graph_would_be_used_twice() -> None:
    net, (x_BTF, _) = make_net("gru"), make_case(2, 6)
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
        ({"state": "nothing"}, "this is str"),
        ({"initial": torch.zeros(1, 2, H)}, "instead of `initial`"),
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
