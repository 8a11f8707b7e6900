"""The multigrid experiment in small: its sequences, its rows, its files, and what it refuses. No time is judged.

Shape legend: S steps of all recordings, N recordings, T steps of one, B sequences, H hidden units, P labelled steps.
"""

import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from bench.recordings import Recording, Recordings
from experiments import multigrid
from experiments.__main__ import main
from experiments.multigrid import (
    EXACT,
    MULTIGRID,
    SERIAL,
    SOLVERS,
    WARM,
    Contender,
    MultigridResult,
    MultigridSettings,
    reproduce_multigrid,
)
from experiments.multigrid_data import CutRecordings, cut_pieces, cut_recordings, cut_windows, open_recordings
from stretto.cells import GRU
from stretto.errors import StrettoError
from stretto.solvers import Shooting

EPOCHS = 3
SHORT: dict[str, Any] = {"lengths": (40,), "epochs": 1, "hidden_size": 4, "batch_steps": 160}


@pytest.fixture(scope="module")
def quick(quick_compiler: None) -> MultigridResult:
    return reproduce_multigrid(MultigridSettings(quick=True))


def _write(path: Path, **changes: Any) -> Path:
    """Recordings of unequal length whose first feature follows the label, which changes every 50 steps."""
    rng = np.random.default_rng(0)
    lengths_N = np.array([210, 130, 90, 171, 60, 133])
    labels_S = np.concatenate([1 + (np.arange(length) // 50 + number) % 2 for number, length in enumerate(lengths_N)])
    labels_S[rng.random(len(labels_S)) < 0.1] = 0
    features_SF = np.stack([labels_S + rng.normal(size=len(labels_S)), rng.normal(size=len(labels_S))], axis=1)
    arrays: dict[str, Any] = {
        "x": features_SF.astype(np.float32),
        "offsets": np.cumsum([0, *lengths_N]),
        "y": labels_S,
        "split": np.array([0, 0, 0, 1, 2, 2]),
    }
    np.savez(path, **{key: value for key, value in (arrays | changes).items() if value is not None})
    return path


def _run(folder: Path, **changes: Any) -> MultigridResult:
    return reproduce_multigrid(MultigridSettings(**({"data": folder / "made.npz"} | SHORT | changes)))


def _cut(path: Path, length: Any = 40, *, batch_steps: int = 160) -> tuple[Recordings, CutRecordings]:
    recordings = open_recordings(path)
    return recordings, cut_recordings(recordings, length, max_label=6, batch_steps=batch_steps)


def test_every_solver_trains_at_every_length_from_the_same_weights(quick: MultigridResult) -> None:
    lengths = (128, 256, "whole")
    assert [(row.length, row.solver) for row in quick.rows] == [(length, s) for length in lengths for s in SOLVERS]
    assert {len(row.epochs) for row in quick.rows} == {EPOCHS}
    for setting in quick.lengths:
        assert len({row.initial_loss for row in quick.at(setting.length).values()}) == 1
    assert len({row.initial_loss for row in quick.rows}) == len(lengths)


def test_exact_solving_trains_as_serially(quick: MultigridResult) -> None:
    by_chunks = 0
    for setting in quick.lengths:
        rows = quick.at(setting.length)
        assert rows[EXACT].loss_gap < 1e-4
        for own, serial in zip(rows[EXACT].epochs, rows[SERIAL].epochs, strict=True):
            assert own.loss == pytest.approx(serial.loss, rel=1e-4)
            assert own.residual <= 1e-6
            assert own.test_residual <= 1e-6
            assert own.differing <= 0.01
            by_chunks += own.batches - own.fell_back
    # Otherwise the serial solver would be compared with itself.
    assert by_chunks > EPOCHS


def test_approximate_solvers_report_their_residual(quick: MultigridResult) -> None:
    for setting in quick.lengths:
        rows = quick.at(setting.length)
        for solver in (MULTIGRID, WARM):
            assert all(0.01 < epoch.residual < 2 for epoch in rows[solver].epochs[1:])
            assert rows[solver].fell_back == 0
            assert rows[solver].last.test_residual > 0.01
            assert rows[solver].last.backward_residual is not None
        assert [rows[solver].last.iterations for solver in (SERIAL, MULTIGRID, WARM)] == [1, 2, 1]
        # The boundaries of all sequences are known from the second epoch on.
        known = [re.search(r"(\d+) of (\d+) sequences", epoch.reason) for epoch in rows[WARM].epochs]
        assert [found is not None and found[1] == found[2] for found in known] == [False, True, True]
        assert [epoch.residual for epoch in rows[SERIAL].epochs] == [0.0] * EPOCHS
        assert rows[SERIAL].last.backward_residual is None


def test_the_serial_row_is_its_own_reference(quick: MultigridResult) -> None:
    for row in quick.rows:
        shares = (row.last.parallel, row.last.serial, row.last.differing, row.fell_back)
        assert all(0 <= share <= 1 for share in shares)
        if row.solver == SERIAL:
            assert (row.speed_up, row.loss_gap, row.fell_back, row.last.differing) == (1.0, 0.0, 0.0, 0.0)
            assert row.last.parallel == row.last.serial


def test_sequences_are_cut_alike_whatever_comes_with_them(tmp_path: Path, quick_compiler: None) -> None:
    recordings, cut = _cut(_write(tmp_path / "made.npz"), "whole", batch_steps=420)
    # Two at a time: one of the longest sequence, and one that would be cut elsewhere by its own longest.
    for epoch in range(3):
        assert len({batch.x_BTF.shape[1] for batch in cut.train_batches(epoch, seed=0)}) == 2
    contender = Contender(WARM, cut, recordings, MultigridSettings(**(SHORT | {"chunks": 2})))
    for _ in range(3):
        contender.train_epoch()
    assert isinstance(contender.solver, Shooting)
    assert contender.solver.cache is not None
    keys = contender.solver.cache.state_dict()["keys"]
    assert {key["chunk_length"] for key in keys} == {105}
    # The shortest has a single chunk and no boundary to keep.
    assert [len(sequence) for sequence in cut.train] == [210, 130, 90, 171]
    assert sorted(key["sample_id"] for key in keys) == [0, 1, 3]


def test_the_serial_contender_is_plain_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_compiler: None
) -> None:
    """The same by the cell in a Python loop, with autograd's gradients, all of which are clipped."""
    monkeypatch.setattr(multigrid, "CLIP_NORM", 0.05)
    settings = MultigridSettings(**SHORT)
    recordings, cut = _cut(_write(tmp_path / "made.npz"))
    contender = Contender(SERIAL, cut, recordings, settings)
    contender.warm_up()
    result = contender.train_epoch()
    torch.manual_seed(settings.seed)
    cell, head = GRU(2, 4), nn.Linear(4, 3)
    weights = [*cell.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(weights, lr=settings.learning_rate)

    def scores(sequence: Recording) -> torch.Tensor:
        state, outputs = cell.initial_state(1), []
        for x_F in sequence.x_TF:
            y_BH, state = cell(x_F[None], state)
            outputs.append(y_BH)
        return head(torch.cat(outputs)[sequence.labels_T != 0])  # type: ignore[no-any-return]

    losses = []
    for batch in cut.train_batches(0, seed=settings.seed):
        members = [cut.train[number] for number in batch.sample_ids]
        labels_P = torch.cat([sequence.labels_T[sequence.labels_T != 0] for sequence in members])
        loss = functional.cross_entropy(torch.cat([scores(sequence) for sequence in members]), labels_P)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        assert float(nn.utils.clip_grad_norm_(weights, 0.05)) > 0.05
        optimizer.step()
        losses.append(float(loss.detach()))
    assert len(losses) > 2
    assert result.loss == pytest.approx(statistics.fmean(losses), rel=1e-5)
    with torch.no_grad():
        right = [scores(each).argmax(dim=1) == each.labels_T[each.labels_T != 0] for each in cut.test]
    assert result.serial == pytest.approx(float(torch.cat(right).float().mean()), abs=1e-6)


def test_an_epoch_has_every_sequence_once_in_its_own_order(tmp_path: Path) -> None:
    _, cut = _cut(_write(tmp_path / "made.npz"))
    assert cut.batch_size == 4
    orders = [
        [number for batch in cut.train_batches(epoch, seed=seed) for number in batch.sample_ids]
        for epoch, seed in ((0, 0), (0, 0), (1, 0), (0, 1))
    ]
    assert all(sorted(order) == list(range(len(cut.train))) for order in orders)
    assert orders[0] == orders[1]
    assert orders[0] not in (orders[2], orders[3])
    for batch in (*cut.train_batches(0, seed=0), *cut.test_batches()):
        assert batch.x_BTF.shape[:2] == batch.labels_BT.shape
        assert int(batch.lengths_B.max()) == batch.x_BTF.shape[1] <= 40
    tested = [number for batch in cut.test_batches() for number in batch.sample_ids]
    assert sorted(tested) == list(range(len(cut.test)))


@given(
    runs=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 260)), min_size=1, max_size=5),
    max_label=st.integers(1, 4),
    label_at_end=st.booleans(),
)
def test_windows_are_64_apart_and_have_one_label(
    runs: list[tuple[int, int]], max_label: int, label_at_end: bool
) -> None:
    labels = [label for label, count in runs for _ in range(count)]
    whole = Recording(x_TF=torch.arange(len(labels), dtype=torch.float32)[:, None], labels_T=torch.tensor(labels))
    wanted = []
    for first in range(0, len(labels) - 127, 64):
        inside = labels[first : first + 128]
        if 1 <= inside[-1] <= max_label and (label_at_end or set(inside) == {inside[-1]}):
            wanted.append((first, inside[-1]))
    found = cut_windows(whole, max_label=max_label, label_at_end=label_at_end)
    assert [(int(each.x_TF[0]), int(each.labels_T[-1])) for each in found] == wanted
    for each in found:
        assert each.x_TF[:, 0].diff().tolist() == [1.0] * 127
        assert each.labels_T[:-1].tolist() == [0] * 127


@given(labels=st.lists(st.integers(0, 2), min_size=1, max_size=30), length=st.integers(2, 12) | st.just("whole"))
def test_pieces_are_all_that_has_a_label(labels: list[int], length: Any) -> None:
    whole = Recording(x_TF=torch.arange(len(labels), dtype=torch.float32)[:, None], labels_T=torch.tensor(labels))
    steps = len(labels) if length == "whole" else length
    wanted = [labels[first : first + steps] for first in range(0, len(labels), steps)]
    found = cut_pieces(whole, length=length)
    assert [each.labels_T.tolist() for each in found] == [part for part in wanted if any(part)]
    for each in found:
        assert [labels[int(step)] for step in each.x_TF[:, 0]] == each.labels_T.tolist()


def test_fewer_recordings_are_used_when_asked(tmp_path: Path) -> None:
    data = _write(tmp_path / "made.npz")
    found = {count: open_recordings(data, num_train=count) for count in (None, 1, 2, 4, 100)}
    trained = [[len(each) for each in found[count].train] for count in (None, 1, 2)]
    assert trained == [[210, 130, 90, 171], [210], [210, 171]]
    assert [len(found[count].train) for count in (4, 100)] == [4, 4]
    assert [len(found[count].test) for count in (None, 1, 2, 4, 100)] == [2, 1, 1, 2, 2]


def test_windows_of_phones_are_as_many_as_their_notes_say(shared_data: Path) -> None:
    path = shared_data / "hapt" / "hapt.npz"
    if not path.is_file():
        pytest.skip("there is no hapt")
    recordings, cut = _cut(path, 128, batch_steps=12_800)
    assert (len(recordings.train), len(recordings.test)) == (42, 19)
    assert (len(cut.train), len(cut.test), cut.batch_size) == (7136, 2877, 100)


def test_the_command_trains_each_length_once_from_the_shortest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], quick_compiler: None
) -> None:
    data, out = _write(tmp_path / "made.npz"), tmp_path / "my [bold] out"
    words = f"--data {data} --lengths whole 40 40 --epochs 1 --hidden-size 4 --batch-steps 160 --chunks 5".split()
    assert main(["multigrid", *words, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert re.findall(r"^length (\w+)", printed, flags=re.MULTILINE) == ["40", "whole"]
    turns = re.findall(r"^ +40  ([a-z, ]+?) +epoch", printed, flags=re.MULTILINE)
    assert turns == list(SOLVERS)
    assert {path.suffix for path in out.iterdir()} == {".json", ".svg", ".html"}
    assert all(str(path) in printed for path in out.iterdir())
    result = json.loads((out / "multigrid.json").read_text(encoding="utf-8"))["result"]
    assert [setting["chunks"] for setting in result["lengths"]] == [5, 5]
    counts = [setting["num_train"] + setting["num_test"] + setting["num_dropped"] for setting in result["lengths"]]
    assert counts == [24, 6]
    assert result["lengths"][-1]["median_steps"] == 150


def test_the_published_net_can_be_trained(tmp_path: Path, quick_compiler: None) -> None:
    _write(tmp_path / "made.npz")
    result = _run(tmp_path, cell="implicit", num_layers=2, lengths=(90,), batch_steps=90)
    usual = _run(tmp_path, num_layers=2, lengths=(90,), batch_steps=90)
    rows = result.at(90)
    assert rows[EXACT].last.loss == pytest.approx(rows[SERIAL].last.loss, rel=1e-4)
    assert "levels" in rows[MULTIGRID].last.reason
    assert rows[SERIAL].last.loss != usual.at(90)[SERIAL].last.loss


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"y": None}, "made has no label per step"),
        ({"y": np.arange(6) % 2}, "made has no label per step"),
        ({"y": np.zeros(794, dtype=np.int64)}, "no labelled step in the train recordings"),
        ({"split": np.full(6, 2)}, "all recordings are for testing"),
        ({"split": np.zeros(6, dtype=np.int64)}, "no sequence is in the test split"),
        ({}, "no window of 128 steps with one label of 1 to 6 in the train recordings"),
    ],
)
def test_data_that_do_not_fit_are_refused_before_training(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    _write(tmp_path / "made.npz", **changes)
    with pytest.raises(StrettoError, match=said):
        _run(tmp_path, lengths=(40, 128))


def test_training_that_diverges_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_compiler: None
) -> None:
    _write(tmp_path / "made.npz")
    right = Contender._loss
    monkeypatch.setattr(Contender, "_loss", lambda own, batch: right(own, batch) * math.nan)
    with pytest.raises(StrettoError, match=r"serial at length 40: in epoch 1 a loss is nan .*--learning-rate"):
        _run(tmp_path)
