"""Truncated BPTT over the chunks of streams, whose rows start at different times.

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
from bptt_definition import (
    NAMES,
    F,
    H,
    Loop,
    assert_same,
    batch_dim_of,
    by_definition,
    loss_of,
    make_case,
    make_net,
    take_gradients,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stretto.errors import StrettoError
from stretto.nn import Streams, TruncatedBPTT


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
    net, (num_streams, chunk, overlap) = make_net(name), sizes
    cases = [make_case(1, length, seed) for seed, length in enumerate(lengths)]
    streams = Streams(
        [x_BTF[0] for x_BTF, _ in cases],
        num_streams=min(num_streams, len(lengths)),
        chunk=chunk,
        targets=[weight_BTH[0] for _, weight_BTH in cases],
    )
    bptt = TruncatedBPTT(
        net if takes_lengths else _without_lengths(net),
        streams,
        window=chunk + overlap,
        step=chunk,
        initial=getattr(net, "initial_state", None),
        batch_dim=batch_dim_of(net),
    )
    parts = 0
    for part in bptt:
        assert part.chunk is not None
        assert part.chunk.targets_BT is not None
        loss_of(part.y_new[part.mask], part.chunk.targets_BT[part.mask]).backward()
        parts += 1
    assert parts == len(bptt) == len(streams)
    found, expected = take_gradients(net), [torch.zeros_like(p) for p in net.parameters()]
    for x_BTF, weight_BTH in cases:
        alone, _ = by_definition(net, x_BTF, weight_BTH, window=chunk + overlap, step=chunk)
        expected = [total + gradient for total, gradient in zip(expected, alone, strict=True)]
    assert_same(found, expected)


def _without_lengths(net: nn.Module) -> Callable[..., Any]:
    def run(x_BTF: torch.Tensor, state: Any) -> Any:
        return net(x_BTF, state)

    return run


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


@pytest.mark.slow
def test_a_book_in_streams_is_learned_with_either_truncation(shared_data: Path) -> None:
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
