"""A text in streams: what batches hold, where they go on after a stop, and what a model carries between them.

Shape legend: B streams, T steps, S words, H hidden units.
"""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stretto.batching import Batch
from stretto.data import SequenceSet
from stretto.distributed import World
from stretto.errors import StrettoError
from stretto.nn import CarriedState, fresh_state
from stretto.state import flatten
from stretto.training import StreamFeed, TrainConfig, eval_windows
from stretto.training.feeds import BucketFeed


def _text(num_words: int, *, seed: int = 0) -> SequenceSet:
    """Words numbered by their place, in sentences of 2 to 5 and a rest."""
    rng, lengths = np.random.default_rng(seed), []
    while sum(lengths) < num_words:
        lengths.append(min(int(rng.integers(2, 6)), num_words - sum(lengths)))
    offsets = np.cumsum([0, *lengths])
    split_N = np.zeros(len(lengths), dtype=np.int64)
    return SequenceSet.from_flat(np.arange(num_words), offsets=offsets, split_N=split_N, name="words")


def _feed(num_words: int = 50, *, rank: int = 0, size: int = 1, **changes: Any) -> StreamFeed:
    values: dict[str, Any] = {"window": 4, "batch_size": 3, **changes}
    return StreamFeed(_text(num_words), world=World(rank=rank, size=size), **values)


class _Model(nn.Module):
    """Carries the last word of each row, and refuses a row that does not continue from it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.carried = CarriedState(batch_dim=1)

    def follow(self, batch: Batch) -> None:
        state = self.carried.rows(slice(len(batch)))
        if state is not None:
            assert torch.equal(batch.features_BTF[:, 0, 0], state[0][0, :, 0].long() + 1)
        last_B = batch.features_BTF[torch.arange(len(batch)), batch.lengths - 1, 0]
        self.carried.keep((last_B[None, :, None].double(),))


def _pairs(batches: list[Batch]) -> list[tuple[int, int]]:
    """Each word with the one that is to be said after it."""
    found = []
    for batch in batches:
        mask_BT = batch.mask
        assert (batch.targets[~mask_BT] == -1).all()
        found += zip(batch.features_BTF[mask_BT][:, 0].tolist(), batch.targets[mask_BT].tolist(), strict=True)
    return found


@settings(deadline=None, max_examples=60)
@given(
    num_words=st.integers(2, 200),
    batch_size=st.integers(1, 12),
    window=st.integers(1, 9),
    size=st.integers(1, 4),
)
def test_every_word_but_the_first_is_said_once(num_words: int, batch_size: int, window: int, size: int) -> None:
    settings_ = {"batch_size": batch_size, "window": window, "size": size}
    if batch_size * size > num_words - 1:
        with pytest.raises(StrettoError, match=f"makes {batch_size * size} streams of a text of {num_words - 1} words"):
            _feed(num_words, **settings_)
        return
    feeds = [_feed(num_words, rank=rank, **settings_) for rank in range(size)]
    by_rank = [list(feed) for feed in feeds]
    assert {len(batches) for batches in by_rank} == {len(feeds[0])} == {feeds[0].report()["batches"]}
    pairs = sorted(pair for batches in by_rank for pair in _pairs(batches))
    assert pairs == [(word, word + 1) for word in range(num_words - 1)]
    padded_steps = sum(batch.num_padded_steps for batches in by_rank for batch in batches)
    assert feeds[0].report()["padding"] == pytest.approx(1 - (num_words - 1) / padded_steps)
    for batches in by_rank:
        model = _Model()
        for batch in batches:
            if len(batch):
                model.follow(batch)


def test_rows_are_named_by_the_sentence_they_begin_in() -> None:
    text = _text(50)
    batch = next(iter(StreamFeed(text, window=4, batch_size=3, world=World())))
    assert batch.indices is not None
    for first, index in zip(batch.features_BTF[:, 0, 0].tolist(), batch.indices.tolist(), strict=True):
        assert first in text[index].features_TF[:, 0].tolist()


def test_sentences_that_do_not_lie_end_to_end_are_joined_in_order() -> None:
    text = _text(50)
    chosen = text.subset([2, 0, 5])
    words = np.concatenate([text[index].features_TF[:, 0].numpy() for index in (2, 0, 5)])
    (batch,) = StreamFeed(chosen, window=50, batch_size=1, world=World())
    assert batch.features_BTF[0, :, 0].tolist() == words[:-1].tolist()
    assert batch.targets[0].tolist() == words[1:].tolist()


@pytest.mark.parametrize("used", range(5))
def test_the_same_streams_continue_where_they_were_left(used: int) -> None:
    whole, model = _feed(), _Model()
    whole.begin_epoch(2, model)
    batches = list(whole)
    for batch in batches[:used]:
        model.follow(batch)
    resumed, later = _feed(), _Model()
    resumed_as = resumed.load_state_dict(whole.state_dict(epoch=2, batches_done=used))
    resumed.load_carried(whole.carried(model), later)
    assert resumed_as == (False, "")
    resumed.begin_epoch(2, later)
    assert (later.carried.state is None) == (used == 0)
    rest = list(resumed)
    assert _pairs(rest) == _pairs(batches[used:])
    for batch in rest:
        later.follow(batch)
    resumed.begin_epoch(3, later)
    assert _pairs(list(resumed)) == _pairs(batches)
    assert later.carried.state is None


def test_the_same_streams_on_other_ranks_keep_their_states() -> None:
    """Two ranks with three streams each, then one with six."""
    feeds = [_feed(rank=rank, size=2) for rank in range(2)]
    alone = _feed(batch_size=6)
    for feed in feeds:
        feed.begin_epoch(0, _Model())
    state = {**feeds[0].state_dict(epoch=0, batches_done=1)}
    model, after = _Model(), _Model()
    alone.begin_epoch(0, model)
    model.follow(next(iter(alone)))
    resumed_as = _feed(batch_size=6).load_state_dict(state)
    assert not resumed_as[0]
    for rank, feed in enumerate(feeds):
        feed.load_state_dict(alone.state_dict(epoch=0, batches_done=1))
        feed.load_carried(alone.carried(model), after)
        assert torch.equal(after.carried.state[0], model.carried.state[0][:, 3 * rank : 3 * rank + 3])
        for batch in feed:
            if len(batch):
                after.follow(batch)


def test_another_size_cuts_what_is_left() -> None:
    feed, model = _feed(), _Model()
    feed.begin_epoch(0, model)
    read, batches = [], iter(feed)
    for _ in range(2):
        read.append(next(batches))
        model.follow(read[-1])
    feed.resize(5, batches_done=2)
    assert (feed.batch_size, feed.left) == (5, 25 / 49)
    feed.begin_epoch(0, model)
    assert model.carried.state is None
    rest = list(feed)
    assert len(rest[0]) == 5
    assert sorted(_pairs([*read, *rest])) == [(word, word + 1) for word in range(49)]
    resumed = _feed()
    resumed.load_state_dict(feed.state_dict(epoch=0, batches_done=1))
    resumed.begin_epoch(0, _Model())
    assert _pairs(list(resumed)) == _pairs(rest[1:])
    feed.begin_epoch(1, model)
    assert (feed.batch_size, len(next(iter(feed))), feed.left) == (5, 5, 1.0)
    assert sorted(_pairs(list(feed))) == [(word, word + 1) for word in range(49)]
    later = _feed()
    later.load_state_dict(feed.state_dict(epoch=2, batches_done=0))
    assert later.batch_size == 5
    later.resize(2)
    assert (later.batch_size, len(next(iter(later)))) == (2, 2)


def test_a_bucket_feed_changes_its_size_likewise() -> None:
    text, model = _text(90), nn.Module()
    feeds = [BucketFeed(text, config=TrainConfig(), batch_size=4, world=World()) for _ in range(2)]
    feed = feeds[0]
    feed.begin_epoch(0, model)
    first = next(iter(feed))
    feed.resize(7, batches_done=1)
    assert (feed.batch_size, feed.left) == (7, 1 - len(first) / len(text))
    state = feed.state_dict(epoch=0, batches_done=0)
    batches = list(feed)
    assert max(len(batch) for batch in batches) == 7
    assert len(first) + sum(len(batch) for batch in batches) == len(text) == feed.num_sequences
    resumed_as = feeds[1].load_state_dict(state)
    feeds[1].begin_epoch(0, model)
    assert not resumed_as[0]
    assert feeds[1].batch_size == 7
    assert [batch.indices.tolist() for batch in feeds[1]] == [batch.indices.tolist() for batch in batches]
    feed.begin_epoch(1, model)
    assert (feed.left, len(feed)) == (1.0, feed.whole_epoch)
    assert sum(len(batch) for batch in feed) == len(text)


def test_examples_are_of_the_size_and_length_that_is_asked_for() -> None:
    feed, model = _feed(), _Model()
    feed.begin_epoch(0, model)
    before = _pairs(list(feed))
    assert feed.example(7, 4).features_BTF.shape == (7, 4, 1)
    assert (feed.shares, feed.num_sequences) == ({4: 1.0}, 12)
    assert _pairs(list(feed)) == before
    buckets = BucketFeed(_text(90), config=TrainConfig(num_buckets=2), batch_size=4, world=World())
    assert sum(buckets.shares.values()) == pytest.approx(1.0)
    assert list(buckets.shares) == buckets.edges
    for edge in buckets.edges:
        batch = buckets.example(50, edge)
        assert batch.features_BTF.shape == (50, edge, 1)
        assert int(batch.lengths.min()) > max([0, *(other for other in buckets.edges if other < edge)])


@pytest.mark.parametrize(("num_words", "most"), [(6, 1), (50, 12), (300, 20)])
def test_evaluation_reads_everything_once_in_up_to_twenty_streams(num_words: int, most: int) -> None:
    for size in (1, 2, 3, 30):
        worlds = [World(rank=rank, size=size) for rank in range(size)]
        by_rank = [list(eval_windows(_text(num_words), window=4, world=world, device="cpu")) for world in worlds]
        pairs = sorted(pair for batches in by_rank for pair in _pairs(batches))
        assert pairs == [(word, word + 1) for word in range(num_words - 1)]
        assert sum(len(batches[0]) for batches in by_rank) == most
        assert len({len(batches) for batches in by_rank}) == 1


def test_a_model_evaluates_with_a_state_of_its_own() -> None:
    model, (first, second, *_) = _Model(), _feed()
    model.follow(first)
    with fresh_state(model):
        assert model.carried.state is None
        model.follow(first)
        model.follow(second)
    model.follow(second)


def test_what_is_carried_is_no_part_of_the_trained_model() -> None:
    model = _Model()
    model.carried.keep((torch.ones(1, 2, 3),))
    assert model.state_dict().keys() == {"weight"}


def test_a_nested_state_comes_back_from_a_checkpoint_as_it_was() -> None:
    feed, model, later = _feed(), _Model(), _Model()
    feed.begin_epoch(0, model)
    batches = iter(feed)
    next(batches)
    for carried in (model.carried, later.carried):
        carried.batch_dim = 0
    model.carried.keep((torch.randn(3, 2), (torch.randn(3, 4, dtype=torch.float64), torch.arange(3))))
    feed.load_state_dict(feed.state_dict(epoch=0, batches_done=1))
    feed.load_carried(feed.carried(model), later)
    one, (two, three) = later.carried.state
    assert (two.dtype, three.dtype) == (torch.float64, torch.int64)
    assert all(map(torch.equal, (one, two, three), flatten(model.carried.state)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 50}, "makes 50 streams of a text of 49 words"),
        ({"max_padded_steps": 11}, "3 streams with windows of 4 make 12 padded steps, more than max_padded_steps=11"),
        ({"num_words": 1}, "a single word"),
    ],
)
def test_what_cannot_be_cut_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StrettoError, match=message):
        _feed(**changes)


def test_a_position_in_another_text_is_refused() -> None:
    state = _feed().state_dict(epoch=0, batches_done=1)
    for other in (_feed(51), _feed(window=5)):
        with pytest.raises(StrettoError, match="another text or window"):
            other.load_state_dict(state)
    with pytest.raises(StrettoError, match="version 1, not 3"):
        _feed().load_state_dict(state | {"version": 1})
    with pytest.raises(StrettoError, match="50 streams"):
        _feed().resize(50)
