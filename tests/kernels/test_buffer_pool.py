"""The buffer pool never reuses a buffer that something still holds."""

import itertools
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stretto
from stretto.kernels import buffer_pool
from stretto.kernels.buffer_pool import BufferPool, empty
from stretto.state import flatten

NUMBERS = 1 << 20
"""Enough for a pooled buffer, in single precision."""


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> BufferPool:
    """A pool for buffers of every size."""
    own = BufferPool()
    monkeypatch.setattr(buffer_pool, "POOL", own)
    monkeypatch.setattr(buffer_pool, "MIN_POOLED_BYTES", 1)
    return own


def test_a_free_buffer_is_used_again(pool: BufferPool) -> None:
    place = empty(NUMBERS, dtype=torch.float32).data_ptr()
    again = empty(NUMBERS // 2, 2, dtype=torch.float32)
    assert again.data_ptr() == place
    assert again.is_contiguous()
    assert again.shape == (NUMBERS // 2, 2)
    assert empty(NUMBERS, dtype=torch.float32).data_ptr() != place


@pytest.mark.parametrize("how", ["itself", "view", "detached", "numpy", "storage", "graph"])
def test_a_buffer_in_use_is_not_reused(pool: BufferPool, how: str) -> None:
    weight = torch.ones(NUMBERS, requires_grad=True)
    held, place = _held(how, weight)
    others = [empty(NUMBERS, dtype=torch.float32).fill_(0.0) for _ in range(3)]
    assert all(other.data_ptr() != place for other in others)
    if how == "graph":
        (slope,) = torch.autograd.grad(held, [weight])
        assert bool((slope == 7.0).all())
    del held, others
    assert empty(NUMBERS, dtype=torch.float32).data_ptr() == place


def _held(how: str, weight: torch.Tensor) -> tuple[Any, int]:
    """Something that has a buffer full of sevens, and where that is."""
    made = empty(NUMBERS, dtype=torch.float32).fill_(7.0)
    ways: dict[str, Callable[[], Any]] = {
        "itself": lambda: made,
        "view": lambda: made[5:6],
        "detached": made.detach,
        "numpy": made.numpy,
        "storage": made.untyped_storage,
        "graph": (made * weight).sum,
    }
    return ways[how](), made.data_ptr()


def test_without_use_counts_nothing_is_pooled(pool: BufferPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_pool, "_USE_COUNT", None)
    one, other = (empty(NUMBERS, 2, dtype=torch.float64) for _ in range(2))
    assert one.shape == (NUMBERS, 2)
    assert one.data_ptr() != other.data_ptr()
    assert pool.size == 0


def test_shared_or_resized_buffers_are_not_used_again(pool: BufferPool) -> None:
    shared, resized = (empty(NUMBERS, dtype=torch.float32) for _ in range(2))
    shared.share_memory_()
    resized.untyped_storage().resize_(0)
    places = {shared.data_ptr()}
    del shared, resized
    found = [empty(NUMBERS, dtype=torch.float32) for _ in range(3)]
    assert not places & {tensor.data_ptr() for tensor in found}
    assert all(tensor.untyped_storage().nbytes() >= 4 * NUMBERS for tensor in found)


def test_a_child_process_starts_with_an_empty_pool(pool: BufferPool, monkeypatch: pytest.MonkeyPatch) -> None:
    place = empty(NUMBERS, dtype=torch.float32).data_ptr()
    number = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: number + 1)
    empty(NUMBERS, dtype=torch.float32)
    assert len(pool._buffers) == 1
    assert place


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 3000), st.booleans()), min_size=1, max_size=60))
def test_live_tensors_never_share_memory(steps: list[tuple[int, bool]]) -> None:
    pool, alive = BufferPool(), []
    for number, (size, lets_go) in enumerate(steps):
        storage = pool.take(size)
        made = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (size,), (1,))
        del storage
        alive.append((made.fill_(number % 251), number % 251))
        del made
        if lets_go:
            del alive[len(alive) // 2]
        places = sorted((t.data_ptr(), t.data_ptr() + len(t)) for t, _ in alive)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(places))
        assert all(bool((t == value).all()) for t, value in alive)


def test_the_pool_holds_little_more_than_was_needed_at_once() -> None:
    pool = BufferPool()
    for size in range(1, 200):
        several = [pool.take(1000 * size) for _ in range(3)]
        tensors = [torch.empty(0, dtype=torch.uint8).set_(storage, 0, (1,), (1,)) for storage in several]
        del several, tensors
    assert pool.size <= 1.5 * 1.125 * 3 * 200_000


def test_threads_get_memory_of_their_own(pool: BufferPool) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(200):
            mine = empty(1000, dtype=torch.float32).fill_(number)
            if not bool((mine == number).all()):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def _everything(rnn: stretto.RNN, x_BTF: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    rnn.zero_grad()
    x = x_BTF.clone().requires_grad_()
    y, state = rnn(x, lengths=lengths)
    # Two layers of graph, a first backward that keeps it, and a second that does not.
    loss = (y * y).sum() + sum(part.sum() for part in flatten(state))
    loss.backward(retain_graph=True)
    loss.backward()
    return [y.detach().clone(), x.grad.clone(), *(p.grad.clone() for p in rnn.parameters())]


@pytest.mark.parametrize("cell", ["GRU", "LSTM", "LayerNormLSTM"])
@pytest.mark.parametrize("save", ["auto", "states"])
def test_results_are_the_same_with_and_without_the_pool(
    cell: str, save: str, monkeypatch: pytest.MonkeyPatch, quick_compiler: None
) -> None:
    torch.manual_seed(0)
    make = getattr(stretto.cells, cell)
    rnn = stretto.RNN(make(3, 5), num_layers=2, bidirectional=True, save=save).double()
    batches = [(torch.randn(4, T, 3, dtype=torch.float64), [T, 1, T // 2, T - 1]) for T in (7, 12, 7, 30, 9, 7)]
    expected = [_everything(rnn, *batch) for batch in batches]
    own = BufferPool()
    monkeypatch.setattr(buffer_pool, "POOL", own)
    monkeypatch.setattr(buffer_pool, "MIN_POOLED_BYTES", 1)
    for turn in range(3):
        for batch, wanted in zip(batches, expected, strict=True):
            for found, other in zip(_everything(rnn, *batch), wanted, strict=True):
                assert torch.equal(found, other), f"turn {turn}"
    assert own.size > 0
