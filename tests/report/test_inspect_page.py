"""Inspection: its numbers equal a plain recomputation, in the terminal and on the page."""

import io
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from stretto.batching import BucketSampler, shuffled_padded_steps
from stretto.data import AbstractTargets, Labels, SequenceSet, StepLabels, Transcripts
from stretto.report import Inspection, inspect_lengths, length_histogram, render, write_inspection_page
from stretto.report.inspect_page import LengthBars, LengthHistogram

HOSTILE = "<script>alert(1)</script>[bold]\x1b[31m"


def _set(
    lengths: list[int],
    *,
    split: list[int] | None = None,
    targets: AbstractTargets | None = None,
    name: str = "steps",
    notes: tuple[str, ...] = (),
) -> SequenceSet:
    return SequenceSet.from_flat(
        np.zeros((sum(lengths), 2), dtype=np.float32),
        offsets=np.cumsum([0, *lengths]),
        split_N=np.array(split if split is not None else [0] * len(lengths)),
        targets=targets,
        name=name,
        notes=notes,
    )


def _random_set(*, count: int = 400) -> SequenceSet:
    rng = np.random.default_rng(7)
    lengths = np.maximum(1, rng.lognormal(4, 0.8, size=count)).astype(int).tolist()
    return _set(lengths, split=rng.choice(3, size=count, p=[0.8, 0.1, 0.1]).tolist())


def _printed(inspection: Inspection, *, width: int, encoding: str = "utf-8") -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    Console(file=stream, width=width, color_system=None).print(render(inspection))
    stream.seek(0)
    return stream.read()


def _plain_padded_steps(lengths: list[int], *, batch_size: int | None, max_padded_steps: int | None) -> int:
    """Batches as lists, one sequence after the other."""
    batches: list[list[int]] = [[]]
    for length in np.random.default_rng(0).permutation(lengths).tolist():
        grown = [*batches[-1], length]
        too_wide = max_padded_steps is not None and len(grown) * max(grown) > max_padded_steps
        if batches[-1] and (too_wide or len(grown) > (batch_size or len(lengths))):
            batches.append([length])
        else:
            batches[-1] = grown
    return sum(len(batch) * max(batch) for batch in batches)


@settings(deadline=None, max_examples=80)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    batch_size=st.one_of(st.none(), st.integers(1, 9)),
    max_padded_steps=st.one_of(st.none(), st.integers(40, 200)),
)
def test_shuffled_padded_steps_equal_those_of_listed_batches(
    lengths: list[int], batch_size: int | None, max_padded_steps: int | None
) -> None:
    if batch_size is None and max_padded_steps is None:
        batch_size = 4
    found = shuffled_padded_steps(np.array(lengths), batch_size=batch_size, max_padded_steps=max_padded_steps)
    assert found == _plain_padded_steps(lengths, batch_size=batch_size, max_padded_steps=max_padded_steps)


@pytest.mark.parametrize(
    ("batch_size", "max_padded_steps", "num_buckets"),
    [(16, None, "auto"), (None, 2000, 5), (8, 2000, 1), (16, None, 64)],
)
def test_numbers_equal_a_plain_recomputation(
    batch_size: int | None, max_padded_steps: int | None, num_buckets: int | Literal["auto"]
) -> None:
    data = _random_set()
    found = inspect_lengths(data, batch_size=batch_size, max_padded_steps=max_padded_steps, num_buckets=num_buckets)
    lengths = data.lengths_N[data.split_N == 0]
    sampler = BucketSampler(lengths, batch_size=batch_size, max_padded_steps=max_padded_steps, num_buckets=num_buckets)
    batches = [lengths[batch] for batch in sampler]
    padded = sum(len(batch) * int(batch.max()) for batch in batches)
    shuffled = _plain_padded_steps(lengths.tolist(), batch_size=batch_size, max_padded_steps=max_padded_steps)

    assert found.parts == {name: int((data.split_N == k).sum()) for k, name in enumerate(("train", "valid", "test"))}
    assert found.whose == "training sequences"
    assert found.quantiles == {share: np.quantile(lengths, share) for share in (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)}
    assert found.mean == lengths.mean()
    assert found.edges == sampler.edges.tolist()
    assert found.batches == len(batches)
    assert found.padding == pytest.approx(1 - lengths.sum() / padded)
    assert found.shuffled_padding == pytest.approx(1 - lengths.sum() / shuffled)
    assert found.padded_steps_ratio == pytest.approx(shuffled / padded)

    lows = [0, *found.edges[:-1]]
    for low, bucket in zip(lows, found.buckets, strict=True):
        own = [batch for batch in batches if low < batch.max() <= bucket.edge]
        assert bucket.sequences == int(((lengths > low) & (lengths <= bucket.edge)).sum())
        assert bucket.batches == len(own)
        assert bucket.rows == max(map(len, own))
        real, all_padded = sum(int(b.sum()) for b in own), sum(len(b) * int(b.max()) for b in own)
        assert bucket.padding == pytest.approx(1 - real / all_padded)


@settings(deadline=None, max_examples=80)
@given(lengths=st.lists(st.one_of(st.integers(1, 50), st.integers(1, 5000)), min_size=1, max_size=80))
def test_bins_and_lines_of_the_terminal_count_every_sequence_once(lengths: list[int]) -> None:
    histogram = length_histogram(np.array(lengths))
    assert len(histogram.bounds) == len(histogram.counts) + 1 <= 241
    assert len(set(np.diff(histogram.bounds))) == 1
    for low, high, count in zip(histogram.bounds, histogram.bounds[1:], histogram.counts, strict=False):
        assert count == sum(low <= length < high for length in lengths)
    assert sum(histogram.counts) == len(lengths)
    lines = LengthBars(histogram=histogram, edges=[max(lengths)], longest=max(lengths)).lines()
    assert len(lines) <= 19
    assert (lines[0][0], lines[-1][1]) == (min(lengths), max(lengths))
    for low, high, count in lines:
        assert count == sum(low <= length <= high for length in lengths)
    assert sum(count for _, _, count in lines) == len(lengths)


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_terminal_shows_the_numbers_at_any_width(width: int) -> None:
    found = inspect_lengths(_random_set(), batch_size=16, max_padded_steps=None, num_buckets=6)
    text = _printed(found, width=width)
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    assert f"{found.shuffled_padding:.1%} of padded steps when shuffled, {found.padding:.1%} in 6 buckets" in words
    assert f"{found.padded_steps_ratio:.2f}x fewer padded steps" in words
    assert "█" in text
    for bucket in found.buckets:
        assert f"{bucket.edge:,} {bucket.sequences:,} {bucket.batches:,} {bucket.rows:,} {bucket.padding:.1%}" in words
    marks = [part for line in text.splitlines() if "◂" in line for part in line.split("◂")[1].split(",")]
    assert [int(mark) for mark in marks] == found.edges


def test_a_plain_terminal_gets_plain_characters() -> None:
    text = _printed(
        inspect_lengths(_random_set(), batch_size=16, max_padded_steps=None, num_buckets=6), width=80, encoding="ascii"
    )
    assert "#" in text
    assert "< " in text


def test_many_edges_on_one_line_are_counted() -> None:
    histogram = LengthHistogram(bounds=(1, 101), counts=(9,))
    bars = LengthBars(histogram=histogram, edges=[5, 9, 14, 30, 60, 100], longest=100)
    stream = io.StringIO()
    Console(file=stream, width=100).print(bars)
    assert "◂ 6 edges, 5 to 100" in stream.getvalue()


def test_without_training_sequences_all_are_looked_at() -> None:
    found = inspect_lengths(_set([3, 4, 90], split=[2, 2, 2]), batch_size=2, max_padded_steps=None, num_buckets=2)
    assert found.whose == "sequences"
    assert sum(found.histogram.counts) == 3
    assert found.parts == {"train": 0, "valid": 0, "test": 3}


def test_equal_lengths_need_one_bucket_and_no_padding() -> None:
    found = inspect_lengths(_set([28] * 50), batch_size=8, max_padded_steps=None, num_buckets="auto")
    assert found.edges == [28]
    assert found.padding == found.shuffled_padding == 0.0
    assert found.padded_steps_ratio == 1.0
    assert found.histogram.counts == (50,)
    assert "28" in _printed(found, width=80)


@pytest.mark.parametrize(
    ("targets", "kind"),
    [
        (Labels(values_N=np.array([0, 1]), names=("a", "b")), "labels"),
        (Transcripts.of(["ab", "c"]), "transcripts"),
        (StepLabels.check(np.zeros(7, int), offsets=np.array([0, 3, 7]), names=None, source=""), "labels of steps"),
        (None, "none"),
    ],
)
def test_the_kind_of_targets_is_named(targets: AbstractTargets | None, kind: str) -> None:
    found = inspect_lengths(_set([3, 4], targets=targets), batch_size=2, max_padded_steps=None, num_buckets=1)
    assert f"targets {kind} Lengths" in " ".join(_printed(found, width=80).split())


def test_hostile_names_do_nothing_in_a_terminal() -> None:
    data = _set([3, 4], name=HOSTILE, notes=(HOSTILE,))
    text = _printed(inspect_lengths(data, batch_size=2, max_padded_steps=None, num_buckets=1), width=100)
    assert "\x1b" not in text
    assert text.count("<script>alert(1)</script>[bold]") == 2


def test_the_page_shows_the_numbers_and_escapes_names(tmp_path: Path) -> None:
    data = _set([3, 4, 5, 50, 60, 70], name=HOSTILE, notes=(HOSTILE,))
    found = inspect_lengths(data, batch_size=3, max_padded_steps=None, num_buckets=2)
    write_inspection_page(found, tmp_path / "new" / "page.html")
    text = (tmp_path / "new" / "page.html").read_text(encoding="utf-8")
    assert "<script>alert(1)" not in text
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 3
    for shown in (f"{found.padding:.1%}", f"{found.shuffled_padding:.1%}", f"{found.padded_steps_ratio:.1f}x fewer"):
        assert f'<div class="value">{shown}</div>' in text
    assert "<td>6 to 70</td><td>3</td><td>1</td><td>3</td>" in text
    assert 'id="plot-lengths"' in text
    assert '"text":"70"' in text
