"""The bucketing experiment in small: its rows, its target, its files, and what it refuses.

Shape legend: S steps of all sequences, N sequences.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.__main__ import main
from experiments.bucketing import BucketingResult, BucketingSettings, reproduce_bucketing
from stretto.errors import StrettoError


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _write(name: str = "signs.npz", **changes: Any) -> Path:
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


def _run(data: Path, lines: list[str] | None = None, **changes: Any) -> BucketingResult:
    sizes = {"data": data, "buckets": (2,), "epochs": 2, "batch_size": 8, "hidden_size": 4}
    shown = [] if lines is None else lines
    return reproduce_bucketing(BucketingSettings(**(sizes | changes)), progress=shown.append)


def test_rows_fit_together_and_contenders_take_turns() -> None:
    lines: list[str] = []
    result = _run(_write(), lines)
    assert (result.task, result.data, result.num_train) == ("classify", "signs", 40)
    assert [row.contender.buckets for row in result.rows] == [1, 2]
    assert [line.partition(" epoch")[0].strip() for line in lines[:4]] == ["no buckets", "2 buckets"] * 2
    for row in result.rows:
        assert row.valid_loss == min(row.losses)
        assert row.reached == (row.valid_loss <= result.target)
        reached_at = [number for number, loss in enumerate(row.losses, start=1) if loss <= result.target]
        assert row.epochs == (reached_at[0] if row.reached else len(row.losses))
        assert row.total_seconds == pytest.approx(sum(row.seconds[: row.epochs]))
    baseline, bucketed = result.rows
    assert result.target == min(baseline.losses)
    assert baseline.reached
    assert (baseline.speed_up, baseline.padded_step_ratio) == (1.0, 1.0)
    assert bucketed.padding < 0.1 < baseline.padding
    assert bucketed.padded_step_ratio == pytest.approx((1 - bucketed.padding) / (1 - baseline.padding))


def test_a_contender_depends_on_the_seed_and_not_on_the_others() -> None:
    alone = _run(_write(), buckets=(1,), num_train=16, epochs=1)
    together = _run(Path("signs.npz"), buckets=(2, 2), num_train=16, epochs=1)
    assert alone.num_train == 16
    assert [row.contender.buckets for row in together.rows] == [1, 2]
    assert together.rows[0].losses == alone.rows[0].losses
    assert _run(Path("signs.npz"), buckets=(1,), num_train=16, epochs=1, seed=1).rows[0].losses != alone.rows[0].losses


def test_the_command_writes_its_files_whatever_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    _write("<b>x & 'y'.npz")
    words = "--buckets 2 --epochs 1 --batch-size 8 --hidden-size 4".split()
    assert main(["bucketing", "--data", "<b>x & 'y'.npz", *words, "--out", "my [bold] out"]) == 0
    printed = capsys.readouterr().out
    assert "<b>x & 'y'" in printed
    assert all(str(path) in printed for path in Path("my [bold] out").iterdir())
    assert {path.suffix for path in Path("my [bold] out").iterdir()} == {".json", ".svg", ".html"}
    stored = json.loads(Path("my [bold] out/bucketing.json").read_text(encoding="utf-8"))["result"]
    assert stored["target"] == min(stored["rows"][0]["losses"])
    assert [row["contender"]["buckets"] for row in stored["rows"]] == [1, 2]
    assert stored["settings"]["data"] == "<b>x & 'y'.npz"


def test_text_is_used_for_language_modelling() -> None:
    passages = ["to be or not to be" * (1 + number % 3) for number in range(60)]
    Path("play.txt").write_text("\n\n".join(passages), encoding="utf-8")
    assert _run(Path("play.txt"), epochs=1, buckets=(1,)).task == "language-model"


def test_data_that_do_not_fit_are_refused() -> None:
    with pytest.raises(StrettoError, match="bare has nothing to learn"):
        _run(_write("bare.npz", y=None))
    with pytest.raises(StrettoError, match="no sequence is in the valid split"):
        _run(_write("whole.npz", split=np.zeros(60, dtype=np.int64)))
    with pytest.raises(StrettoError, match="nproc=2 was started as 1"):
        _run(_write(), nproc=2)


def test_ranks_are_the_second_axis(capfd: pytest.CaptureFixture[str]) -> None:
    words = f"bucketing --data {_write()} --out out --buckets 2 --epochs 2 --batch-size 4 --hidden-size 4 --nproc 3"
    code = main(words.split())
    printed = capfd.readouterr()
    assert code == 0, printed.err
    rows = json.loads(Path("out/bucketing.json").read_text())["result"]["rows"]
    contenders = [(row["contender"]["ranks"], row["contender"]["buckets"]) for row in rows]
    assert contenders == [(ranks, buckets) for ranks in (1, 2, 3) for buckets in (1, 2)]
    assert len({row["losses"][0] for row in rows}) == len(rows)
    assert printed.out.count("3 ranks, 2 buckets     epoch  1") == 1
    # Four lines in the panel and four in the legend.
    assert Path("out/bucketing.svg").read_text().count('stroke-dasharray="6 4"') == 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("dance", "bucketing, graph, large-batch, multigrid"),
        ("graph --streams 0", "streams"),
        ("multigrid --lengths 1", "lengths"),
        ("multigrid --lengths", "no lengths"),
        ("multigrid --chunks 1", "chunks"),
        ("multigrid --data nowhere", "nowhere"),
        ("large-batch --quick --full", "both --quick and --full were given"),
        ("large-batch --full --applications digits", "digits in full needs the data 'mnist', and no folder was given"),
        ("large-batch --full --applications language-model --data .", "language-model in full needs the data 'ptb'"),
        ("large-batch --data nowhere", "there is no folder 'nowhere'"),
        ("large-batch --multiples 0", "multiples"),
        ("large-batch --quick --rules", "there are no rules"),
    ],
)
def test_what_cannot_be_run_is_refused(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert words.startswith("large-batch") or not list(tmp_path.iterdir())
