"""The bucketing experiment in small: its rows, its target, its files, and what it refuses.

Shape legend: S steps of all sequences, N sequences.
"""

import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from rich.console import Console

from experiments.bucketing import BucketingResult, BucketingSettings, reproduce_bucketing
from experiments.bucketing_page import bucketing_table, write_bucketing_page
from stretto.cli.main import main
from stretto.errors import StrettoError
from stretto.training import EpochRecord

HOSTILE = "<b>x & 'y'.npz"


@pytest.fixture(autouse=True)
def a_place_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    earlier = torch.get_num_threads()
    torch.set_num_threads(1)
    # A verb may set variables for its own process; here that is the process of all tests.
    with mock.patch.dict(os.environ):
        yield
    torch.set_num_threads(earlier)


def _write(name: str, **changes: Any) -> Path:
    rng = np.random.default_rng(0)
    labels_N = np.arange(60) % 2
    lengths_N = np.where(np.arange(60) % 4 < 2, rng.integers(2, 5, 60), rng.integers(30, 34, 60))
    features_SF = rng.normal(size=(lengths_N.sum(), 2)) + np.repeat(labels_N, lengths_N)[:, None]
    arrays: dict[str, Any] = {
        "x": features_SF.astype(np.float32),
        "offsets": np.cumsum([0, *lengths_N]),
        "y": labels_N,
        "split": np.repeat([0, 1, 2], [40, 12, 8]),
    }
    np.savez(name, **{key: value for key, value in (arrays | changes).items() if value is not None})
    return Path(name)


def _run(data: Path, watched: list[tuple[int, EpochRecord]] | None = None, **changes: Any) -> BucketingResult:
    settings: dict[str, Any] = {
        "data": data,
        "out": Path("out"),
        "buckets": (1, 2),
        "epochs": 2,
        "batch_size": 8,
        "hidden_size": 4,
    }
    watch = None if watched is None else lambda count, record: watched.append((count.buckets, record))
    return reproduce_bucketing(BucketingSettings(**(settings | changes)), watch=watch)


def _shown(result: BucketingResult) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(bucketing_table(result))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_rows_are_what_the_epochs_were() -> None:
    watched: list[tuple[int, EpochRecord]] = []
    result = _run(_write("signs.npz"), watched)
    assert (result.task, result.data, result.num_train) == ("classify", "signs", 40)
    assert [row.buckets for row in result.rows] == [1, 2]
    for row in result.rows:
        own = [record for count, record in watched if count == row.buckets]
        assert row.losses == tuple(record.valid_loss for record in own)
        assert row.seconds == tuple(record.seconds for record in own)
        assert row.valid_loss == min(row.losses)
        assert row.reached == (row.valid_loss <= result.target)
        reached_at = [number for number, loss in enumerate(row.losses, start=1) if loss <= result.target]
        assert row.epochs == (reached_at[0] if row.reached else len(row.losses))
        assert row.total_seconds == pytest.approx(sum(row.seconds[: row.epochs]))
    baseline, bucketed = result.rows
    assert result.target == min(baseline.losses)
    assert baseline.reached
    assert (baseline.speed_up, baseline.slot_ratio) == (1.0, 1.0)
    assert bucketed.padding < 0.1 < baseline.padding
    assert bucketed.slot_ratio == pytest.approx((1 - bucketed.padding) / (1 - baseline.padding))
    assert [count for count, _ in watched[:4]] == [1, 2, 1, 2]


def test_a_contender_does_not_depend_on_the_others_but_on_the_seed() -> None:
    first = _run(_write("signs.npz"), buckets=(1,))
    second = _run(Path("signs.npz"))
    assert second.rows[0].losses == first.rows[0].losses
    assert _run(Path("signs.npz"), seed=1).rows[0].losses != first.rows[0].losses


def test_the_baseline_is_always_taken_and_numbers_are_not_repeated() -> None:
    result = _run(_write("signs.npz"), buckets=(2, 2), epochs=1)
    assert [row.buckets for row in result.rows] == [1, 2]


def test_fewer_training_sequences_are_used_when_asked() -> None:
    result = _run(_write("signs.npz"), num_train=16, epochs=1)
    assert result.num_train == 16
    assert _run(Path("signs.npz"), num_train=16, epochs=1, full=True).num_train == 40


def test_the_json_file_has_all_of_it() -> None:
    result = _run(_write("signs.npz"))
    told = json.loads(Path("out/bucketing.json").read_text(encoding="utf-8"))
    assert told["target"] == result.target
    assert [row["buckets"] for row in told["rows"]] == [1, 2]
    assert told["rows"][1]["losses"] == list(result.rows[1].losses)
    assert told["settings"]["data"] == "signs.npz"
    assert [path.name for path in Path("out").iterdir()] == ["bucketing.json"]


def test_the_page_is_escaped_and_has_the_table() -> None:
    result = _run(_write(HOSTILE))
    page = Path("out/page.html")
    write_bucketing_page(result, page)
    text = page.read_text(encoding="utf-8")
    assert "<b>x" not in text
    assert "&lt;b&gt;x &amp;" in text
    for row in result.rows:
        assert f"{row.valid_loss:.4f}" in text
        assert f"{row.padding:.1%}" in text


def test_the_table_has_a_row_a_contender() -> None:
    result = _run(_write("signs.npz"))
    text = _shown(result)
    assert f"{result.target:.4f}" in text
    assert all(f"{row.valid_loss:.4f}" in text for row in result.rows)


def test_the_table_shows_a_name_as_it_is() -> None:
    result = _run(_write("red [bold] ink.npz"), epochs=1, buckets=(1,))
    assert "red [bold] ink" in _shown(result)


def test_the_command_writes_table_and_plots_where_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    _write("signs.npz")
    words = "reproduce bucketing --data signs.npz --buckets 2 --epochs 1 --batch-size 8 --hidden-size 4 --out".split()
    assert main([*words, "my [bold] out"]) == 0
    shown = capsys.readouterr().out
    for path in Path("my [bold] out").iterdir():
        assert str(path) in shown
    assert {path.suffix for path in Path("my [bold] out").iterdir()} == {".json", ".svg", ".html"}


def test_text_is_taken_for_language_modelling() -> None:
    passages = ["to be or not to be" * (1 + number % 3) for number in range(60)]
    Path("play.txt").write_text("\n\n".join(passages), encoding="utf-8")
    assert _run(Path("play.txt"), epochs=1, buckets=(1,)).task == "language-model"


def test_data_without_targets_are_refused() -> None:
    with pytest.raises(StrettoError, match="bare has nothing to learn"):
        _run(_write("bare.npz", y=None))
    assert not Path("out").exists()


def test_data_without_a_validation_part_are_refused() -> None:
    with pytest.raises(StrettoError, match="no sequence is in the valid split"):
        _run(_write("whole.npz", split=np.zeros(60, dtype=np.int64)))


def test_workers_are_the_second_axis(
    main_in_time: Callable[[Sequence[str]], int], capfd: pytest.CaptureFixture[str]
) -> None:
    data = _write("signs.npz")
    words = ["--data", str(data), "--out", "out", "--buckets", "2", "--epochs", "2", "--batch-size", "4"]
    code = main_in_time(["reproduce", "bucketing", *words, "--hidden-size", "4", "--nproc", "3"])
    done = capfd.readouterr()
    assert code == 0, done.err
    result = json.loads(Path("out/bucketing.json").read_text())
    assert [(row["workers"], row["buckets"]) for row in result["rows"]] == [
        (workers, buckets) for workers in (1, 2, 3) for buckets in (1, 2)
    ]
    losses = {(row["workers"], row["buckets"]): row["losses"][0] for row in result["rows"]}
    assert len(set(losses.values())) == len(losses)
    assert done.out.count("3 workers      2 buckets  epoch  1") == 1
    assert "3 workers, 2 buckets" in Path("out/bucketing.html").read_text()
    assert Path("out/bucketing.svg").read_text().count('stroke-dasharray="6 4"') == 4


def test_workers_must_be_as_many_as_were_asked_for() -> None:
    with pytest.raises(StrettoError, match="nproc=2 was started as 1"):
        _run(_write("signs.npz"), nproc=2)
