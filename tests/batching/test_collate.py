"""Padding against a naive loop, in all forms that sequences come in, and in a DataLoader.

Shape legend: B sequences, T steps of the longest, F features.
"""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from gpu_stand_in import GpuStandIn
from stretto.batching import Batch, BucketSampler, collate
from stretto.data import Sample, SequenceSet
from stretto.errors import StrettoError

DTYPES = [torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8]


def rows_of(steps: int, num_features: int, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + steps)
    return torch.randint(1, 100, (steps, num_features), generator=generator).to(dtype)


@settings(deadline=None, max_examples=80)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    num_features=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES),
    edges=st.sampled_from([None, [30], [1, 2, 3, 5, 8, 13, 21, 34], np.array([10, 20, 30]), torch.tensor([15, 40])]),
    form=st.sampled_from(["tensor", "array", "pair", "sample"]),
)
def test_batch_equals_naive_padding(
    lengths: list[int], num_features: int, dtype: torch.dtype, edges: Any, form: str
) -> None:
    rows = [rows_of(steps, num_features, dtype=dtype, seed=seed) for seed, steps in enumerate(lengths)]
    forms: dict[str, list[Any]] = {
        "tensor": rows,
        "array": [part.numpy() for part in rows],
        "pair": [(part, None) for part in rows],
        "sample": [Sample(features_TF=part, target=None, index=7 + place) for place, part in enumerate(rows)],
    }
    batch = collate(forms[form], edges=edges)
    padded = max(lengths) if edges is None else min(int(edge) for edge in edges if edge >= max(lengths))
    assert batch.features_BTF.shape == (len(lengths), padded, num_features)
    assert batch.features_BTF.dtype == dtype
    for row, part in enumerate(rows):
        for step in range(padded):
            wanted = part[step].tolist() if step < len(part) else [0] * num_features
            assert batch.features_BTF[row, step].tolist() == wanted
            assert bool(batch.mask[row, step]) == (step < len(part))
    assert batch.lengths.tolist() == lengths
    assert (batch.lengths.dtype, batch.lengths.device.type) == (torch.int64, "cpu")
    assert (len(batch), batch.num_steps, batch.num_padded_steps) == (len(lengths), sum(lengths), len(lengths) * padded)
    assert batch.targets is None
    if form == "sample":
        assert batch.indices is not None
        assert batch.indices.tolist() == list(range(7, 7 + len(rows)))
    else:
        assert batch.indices is None


def test_flat_sequences_get_one_feature() -> None:
    batch = collate([torch.tensor([1.0, 2.0, 3.0]), np.array([4.0], dtype=np.float32)])
    assert batch.features_BTF.tolist() == [[[1.0], [2.0], [3.0]], [[4.0], [0.0], [0.0]]]


@pytest.mark.parametrize(
    "labels", [[3, 0, 5], [np.int64(3), np.uint8(0), 5], [torch.tensor(3), torch.tensor(0), torch.tensor(5)]]
)
def test_labels_become_one_tensor(labels: list[Any]) -> None:
    targets = collate([(rows_of(2, 1), label) for label in labels]).targets
    assert targets.dtype == torch.int64
    assert targets.tolist() == [3, 0, 5]


def test_other_targets_stay_a_list() -> None:
    texts = ["abc", "", "de"]
    assert collate([(rows_of(2, 1), text) for text in texts]).targets == texts
    assert collate([(rows_of(2, 1), target) for target in (1, None)]).targets == [1, None]
    for arrays in (
        [torch.tensor([1, 2]), torch.tensor([3])],
        [torch.tensor(0.75), torch.tensor(1.5)],
        [np.ones(2)] * 2,
    ):
        found = collate([(rows_of(2, 1), array) for array in arrays]).targets
        assert [one is other for one, other in zip(found, arrays, strict=True)] == [True, True]


def test_items_are_left_as_they_are() -> None:
    rows = rows_of(3, 2)
    batch = collate([rows, rows_of(5, 2)])
    batch.features_BTF.zero_()
    assert rows.tolist() == rows_of(3, 2).tolist()


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0, dtype=np.float32).reshape(3, 2)[::-1],
        np.arange(12.0, dtype=np.float32).reshape(3, 4)[:, ::2],
        np.arange(6.0, dtype=">f4").reshape(3, 2),
        np.broadcast_to(np.float32(4.0), (3, 2)),
    ],
    ids=["reversed", "strided", "big-endian", "read-only"],
)
def test_arrays_of_any_layout_are_taken(array: Any) -> None:
    assert collate([array]).features_BTF[0].tolist() == array.tolist()


def test_mixed_widths_and_types_are_refused() -> None:
    with pytest.raises(StrettoError, match=r"2.*3"):
        collate([rows_of(4, 2), rows_of(4, 3)])
    with pytest.raises(StrettoError, match=r"float32.*float64"):
        collate([rows_of(4, 2), rows_of(4, 2, dtype=torch.float64)])


@pytest.mark.parametrize(
    ("item", "named"),
    [
        (torch.zeros(2, 2, 2), r"item 1 .*\(2, 2, 2\)"),
        (torch.tensor(1.0), r"item 1 .*\(\)"),
        ((torch.zeros(2, 2, 2), 5), r"item 1 .*\(2, 2, 2\)"),
        ((torch.zeros(2, 2), 5, 6), "item 1"),
        ("text", "item 1"),
        (None, "item 1"),
        (np.array([1, None]), "item 1"),
    ],
)
def test_items_that_are_no_sequence_are_named(item: Any, named: str) -> None:
    with pytest.raises(StrettoError, match=named):
        collate([torch.zeros(2, 2), item])


@pytest.mark.parametrize("edges", [[3, 4], [4], []])
def test_a_sequence_beyond_the_last_edge_is_refused(edges: list[int]) -> None:
    assert collate([rows_of(4, 1)], edges=[2, 4, 9]).num_padded_steps == 4
    with pytest.raises(StrettoError, match=r"5 steps"):
        collate([rows_of(5, 1)], edges=edges)


def test_an_empty_batch_has_its_width_and_nothing_else() -> None:
    batch = collate([], num_features=3, edges=[4])
    assert batch.features_BTF.shape == (0, 0, 3)
    assert (len(batch), batch.num_steps, batch.num_padded_steps) == (0, 0, 0)
    assert batch.mask.shape == (0, 0)
    assert batch.lengths.dtype == torch.int64
    assert batch.indices is not None
    assert batch.indices.tolist() == []
    assert batch.to("cpu").targets is None
    assert collate([]).features_BTF.shape == (0, 0, 0)


@pytest.mark.parametrize("targets", [None, ["a", "b"], torch.tensor([1, 2])])
def test_moving_takes_all_but_the_lengths(targets: Any) -> None:
    batch = Batch(
        features_BTF=rows_of(4, 2)[None].repeat(2, 1, 1), lengths=torch.tensor([4, 2]), targets=targets, indices=None
    )
    moved = batch.to("meta")
    assert moved.features_BTF.device.type == "meta"
    assert moved.mask.device.type == "meta"
    assert moved.lengths.device.type == "cpu"
    assert moved.lengths.tolist() == [4, 2]
    if isinstance(targets, torch.Tensor):
        assert moved.targets.device.type == "meta"
    else:
        assert moved.targets == targets
    assert batch.features_BTF.device.type == "cpu"


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("world_size", "count"), [(2, 40), (16, 5)])
def test_a_plain_loader_draws_every_sequence_and_restores(num_workers: int, world_size: int, count: int) -> None:
    lengths = np.random.default_rng(5).integers(1, 60, count)
    offsets = np.append(0, np.cumsum(lengths))
    data = SequenceSet.from_flat(np.arange(offsets[-1], dtype=np.float32), offsets=offsets, split_N=np.zeros(count))
    seen: list[list[int]] = []
    for rank in range(world_size) if num_workers == 0 else (0, world_size - 1):
        sampler, again = (BucketSampler(lengths, batch_size=4, rank=rank, world_size=world_size) for _ in range(2))
        pad = functools.partial(collate, edges=sampler.edges, num_features=1)
        wanted = list(BucketSampler(lengths, batch_size=4, rank=rank, world_size=world_size))
        loader = DataLoader(data, batch_sampler=sampler, collate_fn=pad, num_workers=num_workers)
        batches, used = list(loader), len(loader) // 2
        assert [batch.indices.tolist() for batch in batches] == wanted
        for batch, indices in zip(batches, wanted, strict=True):
            assert batch.lengths.tolist() == lengths[indices].tolist()
            assert batch.features_BTF.shape[2] == 1
            assert batch.features_BTF[:, :1].flatten().tolist() == offsets[indices].tolist()
        again.load_state_dict(sampler.state_dict(epoch=0, batches_done=used))
        rest = DataLoader(data, batch_sampler=again, collate_fn=pad, num_workers=num_workers)
        assert [batch.indices.tolist() for batch in rest] == wanted[used:]
        seen += wanted
    assert num_workers or sorted(index for batch in seen for index in batch) == list(range(count))
    assert world_size <= count or [] in seen


def test_a_batch_goes_to_a_gpu_through_pinned_memory() -> None:
    """The CPU stands in for the GPU."""
    batch = collate([(torch.randn(5, 2), 1), (torch.randn(3, 2), 0)])
    with GpuStandIn() as gpu:
        moved = batch.to("cuda")
        assert (gpu.pinned, gpu.asynchronous, gpu.waiting) == (2, 2, [])
        batch.pin_memory()
        assert gpu.pinned == 4
    assert torch.equal(moved.features_BTF, batch.features_BTF)
    assert torch.equal(moved.targets, batch.targets)
    assert moved.lengths.device.type == "cpu"


def test_without_memory_that_can_be_pinned_a_batch_is_copied_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.Tensor, "pin_memory", fail)
    batch = collate([torch.randn(5, 2)])
    with GpuStandIn() as gpu:
        assert torch.equal(batch.to("cuda").features_BTF, batch.features_BTF)
    assert gpu.waiting == [(1, 5, 2)]
