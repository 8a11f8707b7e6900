"""The multigrid experiment in small: its sequences, its rows, its files, and what it refuses. No time is ever judged.

Shape legend: S steps of all recordings, N recordings, T steps of one, B sequences, H hidden units, P labelled steps.
"""

import dataclasses
import io
import json
import math
import re
import statistics
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn
from torch.nn import functional

from experiments import multigrid_contestant
from experiments.multigrid import MultigridResult, MultigridRow, reproduce_multigrid
from experiments.multigrid_contestant import CARRIED, EXACT, MULTIGRID, SERIAL, WAYS, Contestant
from experiments.multigrid_figure import write_multigrid_figure
from experiments.multigrid_page import PUBLISHED, write_multigrid_page
from experiments.multigrid_pieces import Piece, course_of, open_recordings, stretches_of, windows_of
from experiments.multigrid_settings import MultigridSettings
from experiments.multigrid_table import multigrid_table
from stretto.cells import GRU
from stretto.cli.main import main
from stretto.errors import StrettoError
from stretto.solvers import Shooting

EPOCHS = 3
SHORT = {"lengths": (40,), "epochs": 1, "hidden_size": 4, "batch_steps": 160}


@pytest.fixture(scope="module")
def quick(quick_compiler: None, tmp_path_factory: pytest.TempPathFactory) -> MultigridResult:
    return reproduce_multigrid(MultigridSettings(quick=True, out=tmp_path_factory.mktemp("multigrid")))


def _write(path: Path, **changes: Any) -> Path:
    """Recordings of unequal length, the first feature of which tells the label, which changes every 50 steps."""
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


def _run(tmp_path: Path, **changes: Any) -> MultigridResult:
    settings = {"data": tmp_path / "made.npz", "out": tmp_path / "out"} | SHORT | changes
    return reproduce_multigrid(MultigridSettings(**settings))


def _row(result: MultigridResult, way: str) -> MultigridRow:
    return next(row for row in result.rows if row.way == way)


def _shown(result: MultigridResult, *, width: int) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(multigrid_table(result))
    return stream.getvalue()


def test_every_way_is_taken_at_every_length(quick: MultigridResult) -> None:
    assert [(row.length, row.way) for row in quick.rows] == [
        (length, way) for length in (128, 256, "whole") for way in WAYS
    ]
    assert {len(row.epochs) for row in quick.rows} == {EPOCHS}
    assert [course.length for course in quick.courses] == [128, 256, "whole"]


def test_all_begin_with_the_same_weights_and_batches(quick: MultigridResult) -> None:
    for course in quick.courses:
        assert len({row.initial_loss for row in quick.at(course.length)}) == 1
    assert len({row.initial_loss for row in quick.rows}) == len(quick.courses)


def test_exact_solving_trains_as_step_after_step_does(quick: MultigridResult) -> None:
    by_chunks = 0
    for course in quick.courses:
        rows = {row.way: row for row in quick.at(course.length)}
        for one, other in zip(rows[EXACT].epochs, rows[SERIAL].epochs, strict=True):
            assert one.loss == pytest.approx(other.loss, rel=1e-4)
            assert one.residual <= 1e-6
            assert one.test_residual <= 1e-6
            assert one.differing <= 0.01
            by_chunks += one.batches - one.fell_back
    # Else all of it would be step after step compared with itself.
    assert by_chunks > EPOCHS


def test_what_is_not_exact_is_told(quick: MultigridResult) -> None:
    for course in quick.courses:
        rows = {row.way: row for row in quick.at(course.length)}
        for way in (MULTIGRID, CARRIED):
            assert all(0.01 < epoch.residual < 2 for epoch in rows[way].epochs[1:])
            assert rows[way].fell_back == 0
            assert rows[way].last.test_residual > 0.01
            assert rows[way].last.backward_residual is not None
        assert [rows[way].last.iterations for way in (SERIAL, MULTIGRID, CARRIED)] == [1, 2, 1]
        assert [epoch.residual for epoch in rows[SERIAL].epochs] == [0.0] * EPOCHS
        assert rows[SERIAL].last.backward_residual is None
        # How far the losses drift apart is not compared: on short sequences both gaps are rounding errors.
        assert rows[EXACT].loss_gap < 1e-4
        assert rows[EXACT].last.test_residual <= 1e-6


def test_boundaries_are_carried_from_epoch_to_epoch(quick: MultigridResult) -> None:
    for row in quick.rows:
        if row.way == CARRIED:
            known = [re.search(r"(\d+) of (\d+) sequences from where", epoch.reason) for epoch in row.epochs]
            assert all(found is not None and int(found[2]) > 0 for found in known)
            assert [found is not None and found[1] == found[2] for found in known] == [False, True, True]


def test_sequences_are_cut_alike_whatever_comes_with_them(tmp_path: Path, quick_compiler: None) -> None:
    changes = {"lengths": ("whole",), "batch_steps": 420, "chunks": 2}
    settings = MultigridSettings(data=_write(tmp_path / "made.npz"), **(SHORT | changes))  # type: ignore[arg-type]
    recordings = open_recordings(settings)
    course = course_of(recordings, "whole", settings)
    # Two at a time: one of the longest sequence, and one that would be cut elsewhere by its own longest.
    for epoch in range(3):
        assert len({batch.x_BTF.shape[1] for batch in course.epoch(epoch, seed=0)}) == 2
    contestant = Contestant(CARRIED, course, recordings, settings)
    for _ in range(3):
        contestant.learn()
    solver = contestant._training
    assert isinstance(solver, Shooting)
    assert solver.cache is not None
    places = solver.cache.state_dict()["places"]
    assert {place["length"] for place in places} == {105}
    # The shortest has a single chunk and nothing to carry.
    assert [len(piece) for piece in course.train] == [210, 130, 90, 171]
    assert sorted(place["sample_id"] for place in places) == [0, 1, 3]


def test_the_numbers_of_a_row_fit_together(quick: MultigridResult) -> None:
    for row in quick.rows:
        base = next(other for other in quick.at(row.length) if other.way == SERIAL)
        pairs = list(zip(base.epochs, row.epochs, strict=True))
        seconds = [epoch.seconds for epoch in row.epochs]
        assert row.median_seconds == statistics.median(seconds)
        assert row.least_seconds == min(seconds)
        assert row.speed_up == statistics.median(one.seconds / other.seconds for one, other in pairs)
        assert row.loss_gap == max(abs(one.loss - other.loss) / one.loss for one, other in pairs)
        assert 0 <= row.fell_back <= 1
        assert all(0 <= share <= 1 for share in (row.last.parallel, row.last.serial, row.last.differing))
        if row.way == SERIAL:
            assert (row.speed_up, row.loss_gap, row.fell_back, row.last.differing) == (1.0, 0.0, 0.0, 0.0)
            assert row.last.parallel == row.last.serial


def test_step_after_step_is_plain_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_compiler: None
) -> None:
    """The same by the cell in a Python loop, with autograd's gradients, all of which are clipped."""
    monkeypatch.setattr(multigrid_contestant, "CLIP_NORM", 0.05)
    settings = MultigridSettings(data=_write(tmp_path / "made.npz"), **SHORT)  # type: ignore[arg-type]
    recordings = open_recordings(settings)
    course = course_of(recordings, 40, settings)
    contestant = Contestant(SERIAL, course, recordings, settings)
    contestant.warm_up()
    lesson = contestant.learn()
    torch.manual_seed(settings.seed)
    cell, head = GRU(2, 4), nn.Linear(4, 3)
    weights = [*cell.parameters(), *head.parameters()]
    optimiser = torch.optim.Adam(weights, lr=settings.learning_rate)

    def scores(piece: Piece) -> torch.Tensor:
        state, outputs = cell.initial_state(1), []
        for x_F in piece.x_TF:
            y_BH, state = cell(x_F[None], state)
            outputs.append(y_BH)
        return head(torch.cat(outputs)[piece.labels_T != 0])  # type: ignore[no-any-return]

    losses = []
    for batch in course.epoch(0, seed=settings.seed):
        some = [course.train[number] for number in batch.sample_ids]
        labels_P = torch.cat([piece.labels_T[piece.labels_T != 0] for piece in some])
        loss = functional.cross_entropy(torch.cat([scores(piece) for piece in some]), labels_P)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        assert float(nn.utils.clip_grad_norm_(weights, 0.05)) > 0.05
        optimiser.step()
        losses.append(float(loss.detach()))
    assert len(losses) > 2
    assert lesson.loss == pytest.approx(statistics.fmean(losses), rel=1e-5)
    with torch.no_grad():
        right = [scores(piece).argmax(dim=1) == piece.labels_T[piece.labels_T != 0] for piece in course.test]
    assert lesson.serial == pytest.approx(float(torch.cat(right).float().mean()), abs=1e-6)


def test_an_epoch_has_every_sequence_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    settings = MultigridSettings(data=_write(tmp_path / "made.npz"), **SHORT)  # type: ignore[arg-type]
    course = course_of(open_recordings(settings), 40, settings)
    assert course.batch_size == 4
    orders = [
        [number for batch in course.epoch(epoch, seed=seed) for number in batch.sample_ids]
        for epoch, seed in ((0, 0), (0, 0), (1, 0), (0, 1))
    ]
    assert all(sorted(order) == list(range(len(course.train))) for order in orders)
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert orders[0] != orders[3]
    for batch in (*course.epoch(0, seed=0), *course.tests()):
        assert batch.x_BTF.shape[:2] == batch.labels_BT.shape
        assert int(batch.lengths_B.max()) == batch.x_BTF.shape[1] <= 40
    tested = [number for batch in course.tests() for number in batch.sample_ids]
    assert sorted(tested) == list(range(len(course.test)))


@given(
    runs=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 260)), min_size=1, max_size=5),
    most_label=st.integers(1, 4),
    by_last=st.booleans(),
)
def test_windows_are_64_apart_and_have_one_label(runs: list[tuple[int, int]], most_label: int, by_last: bool) -> None:
    labels = [label for label, count in runs for _ in range(count)]
    whole = Piece(x_TF=torch.arange(len(labels), dtype=torch.float32)[:, None], labels_T=torch.tensor(labels))
    wanted = []
    for first in range(0, len(labels) - 127, 64):
        inside = labels[first : first + 128]
        if 1 <= inside[-1] <= most_label and (by_last or set(inside) == {inside[-1]}):
            wanted.append((first, inside[-1]))
    found = windows_of(whole, most_label=most_label, by_last=by_last)
    assert [(int(piece.x_TF[0]), int(piece.labels_T[-1])) for piece in found] == wanted
    for piece in found:
        assert piece.x_TF[:, 0].diff().tolist() == [1.0] * 127
        assert piece.labels_T[:-1].tolist() == [0] * 127


@given(labels=st.lists(st.integers(0, 2), min_size=1, max_size=30), length=st.integers(2, 12) | st.just("whole"))
def test_stretches_are_all_that_has_a_label(labels: list[int], length: Any) -> None:
    whole = Piece(x_TF=torch.arange(len(labels), dtype=torch.float32)[:, None], labels_T=torch.tensor(labels))
    steps = len(labels) if length == "whole" else length
    wanted = [labels[first : first + steps] for first in range(0, len(labels), steps)]
    found = stretches_of(whole, length=length)
    assert [piece.labels_T.tolist() for piece in found] == [part for part in wanted if any(part)]
    for piece in found:
        assert [labels[int(step)] for step in piece.x_TF[:, 0]] == piece.labels_T.tolist()


def test_windows_of_phones_are_as_many_as_its_notes_say(shared_data: Path) -> None:
    path = shared_data / "hapt" / "hapt.npz"
    if not path.is_file():
        pytest.skip("there is no hapt")
    settings = MultigridSettings(data=path)
    recordings = open_recordings(settings)
    assert (len(recordings.train), len(recordings.test)) == (42, 19)
    course = course_of(recordings, 128, settings)
    assert (len(course.train), len(course.test), course.batch_size) == (7136, 2877, 100)
    assert course_of(recordings, "whole", settings).batch_size == 1


def test_fewer_recordings_are_used_when_asked(tmp_path: Path) -> None:
    data = _write(tmp_path / "made.npz")
    found = {count: open_recordings(MultigridSettings(data=data, num_train=count)) for count in (None, 1, 2, 4, 100)}
    assert [[len(piece) for piece in found[count].train] for count in (None, 1, 2)] == [
        [210, 130, 90, 171],
        [210],
        [210, 171],
    ]
    assert [len(found[count].train) for count in (4, 100)] == [4, 4]
    assert [len(found[count].test) for count in (None, 1, 2, 4, 100)] == [2, 1, 1, 2, 2]


def test_lengths_are_taken_once_from_the_shortest_on(tmp_path: Path, quick_compiler: None) -> None:
    _write(tmp_path / "made.npz")
    result = _run(tmp_path, lengths=("whole", 60, 40, 60))
    assert [course.length for course in result.courses] == [40, 60, "whole"]
    assert [course.num_train + course.num_test + course.left_out for course in result.courses] == [24, 16, 6]
    assert result.courses[-1].median_steps == 150
    assert [course.chunks for course in result.courses] == [8, 16, 32]


def test_contestants_take_turns(tmp_path: Path, quick_compiler: None) -> None:
    lines: list[str] = []
    settings = MultigridSettings(data=_write(tmp_path / "made.npz"), out=tmp_path, **(SHORT | {"epochs": 2}))  # type: ignore[arg-type]
    reproduce_multigrid(settings, tell=lines.append)
    assert lines[0].startswith("length 40: 18 sequences, batches of 4")
    assert [line[8:26].strip() for line in lines[1:]] == [*WAYS, *WAYS]


def test_the_published_net_will_do(tmp_path: Path, quick_compiler: None) -> None:
    _write(tmp_path / "made.npz")
    result = _run(tmp_path, cell="implicit", num_layers=2, lengths=(90,), batch_steps=90)
    usual = _run(tmp_path, num_layers=2, lengths=(90,), batch_steps=90)
    assert _row(result, EXACT).last.loss == pytest.approx(_row(result, SERIAL).last.loss, rel=1e-4)
    assert "levels" in _row(result, MULTIGRID).last.reason
    assert _row(result, SERIAL).last.loss != _row(usual, SERIAL).last.loss
    assert "implicit GRU, 2 layers of 4 units" in _shown(result, width=120)
    assert "GRU, 2 layers of 4 units" in _shown(usual, width=120)


def test_chunks_are_as_many_as_asked_for(tmp_path: Path, quick_compiler: None) -> None:
    _write(tmp_path / "made.npz")
    assert _row(_run(tmp_path, chunks=5), CARRIED).last.reason.startswith("5 chunks of 8 steps")


def test_the_json_file_has_all_of_it(quick: MultigridResult) -> None:
    read = json.loads((Path(quick.settings["out"]) / "multigrid.json").read_text(encoding="utf-8"))
    assert [(row["length"], row["way"]) for row in read["rows"]] == [(row.length, row.way) for row in quick.rows]
    assert [row["epochs"][-1]["residual"] for row in read["rows"]] == [row.last.residual for row in quick.rows]
    assert read["courses"][0] == dataclasses.asdict(quick.courses[0])
    assert read["settings"]["hidden_size"] == 8


@pytest.mark.parametrize("width", [104, 200])
def test_the_table_fits_and_has_a_row_for_each_contestant(quick: MultigridResult, width: int) -> None:
    text = _shown(quick, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert multigrid_table(quick).row_count == len(quick.rows)
    assert f"{_row(quick, MULTIGRID).last.residual:.2f}" in text


def test_the_table_and_the_page_show_a_name_as_it_is(quick: MultigridResult, tmp_path: Path) -> None:
    named = dataclasses.replace(quick, data="<b>my [bold] data")
    assert "<b>my [bold] data" in _shown(named, width=200)
    write_multigrid_page(named, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<b>my" not in text
    assert "&lt;b&gt;my [bold] data" in text


def test_the_page_has_all_rows_and_what_was_published(quick: MultigridResult, tmp_path: Path) -> None:
    write_multigrid_page(quick, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    for row in quick.rows:
        name = "whole recordings" if row.length == "whole" else f"{row.length} steps"
        assert f"<td>{name}: {row.way}</td><td>{row.median_seconds:.2f}</td>" in text
    for epoch, parallel, serial in PUBLISHED:
        assert f"<td>{epoch}</td><td>{parallel} %</td><td>{serial} %</td>" in text
    assert text.count("Published:") == 3
    plots = {f"plot-{kind}-{length}" for kind in ("residual", "accuracy") for length in (128, 256, "whole")}
    assert all(f'id="{name}"' in text for name in plots | {"plot-times"})
    for row in quick.rows:
        for drawn in ("parallel", "serial"):
            assert json.dumps([100 * getattr(epoch, drawn) for epoch in row.epochs], separators=(",", ":")) in text


@pytest.mark.parametrize("epochs", [1, EPOCHS])
def test_the_picture_has_a_line_for_each_contestant(quick: MultigridResult, tmp_path: Path, epochs: int) -> None:
    rows = tuple(dataclasses.replace(row, epochs=row.epochs[:epochs]) for row in quick.rows)
    write_multigrid_figure(dataclasses.replace(quick, rows=rows), tmp_path / "multigrid.svg")
    picture = ET.parse(tmp_path / "multigrid.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    lines = [line.attrib["points"].split() for line in picture.iter(f"{space}polyline")]
    assert [len(points) for points in lines] == [3] * len(WAYS) + [epochs] * 3 * len(WAYS)
    words = {text.text for text in picture.iter(f"{space}text")}
    assert {*WAYS, "residual, whole recordings", "seconds an epoch, the median"} <= words
    heights = [float(point.split(",")[1]) for points in lines for point in points]
    assert min(heights) >= 34
    assert max(heights) <= 206


def test_the_command_writes_table_and_plots_where_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quick_compiler: None
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    data, out = _write(tmp_path / "made.npz"), tmp_path / "my [bold] out"
    words = f"reproduce multigrid --data {data} --lengths 40 whole --epochs 1 --hidden-size 4 --batch-steps 160".split()
    assert main([*words, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == {"multigrid.json", "multigrid.svg", "multigrid.html"}
    assert all(str(path) in shown for path in out.iterdir())
    assert "smoke test" not in shown


def test_a_smoke_test_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quick_compiler: None
) -> None:
    monkeypatch.setattr(MultigridSettings, "tiny", lambda own: dataclasses.replace(own, **SHORT))
    assert main(["reproduce", "multigrid", "--quick", "--out", str(tmp_path / "out")]) == 0
    assert "its times mean nothing" in capsys.readouterr().out


def test_without_room_for_windows_it_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    _write(tmp_path / "made.npz")
    with pytest.raises(StrettoError, match="no window of 128 steps with one label of 1 to 6 in the train recordings"):
        _run(tmp_path, lengths=(40, 128))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"y": None}, "made has no labels of steps"),
        ({"y": np.arange(6) % 2}, "made has no labels of steps"),
        ({"y": np.zeros(794, dtype=np.int64)}, "no labelled step in the train recordings"),
        ({"split": np.full(6, 2)}, "all recordings are for testing"),
        ({"split": np.zeros(6, dtype=np.int64)}, "no sequence is in the test split"),
    ],
)
def test_data_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    _write(tmp_path / "made.npz", **changes)
    with pytest.raises(StrettoError, match=said):
        _run(tmp_path)


def test_training_that_diverges_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_compiler: None) -> None:
    _write(tmp_path / "made.npz")
    right = Contestant._loss
    monkeypatch.setattr(Contestant, "_loss", lambda own, batch: right(own, batch) * math.nan)
    with pytest.raises(StrettoError, match=r"serial at length 40: in epoch 1 a loss is nan .*--learning-rate"):
        _run(tmp_path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--lengths 1", "lengths"),
        ("--lengths 0 whole", "lengths"),
        ("--lengths", "there are no lengths"),
        ("--lengths half", "half"),
        ("--epochs 0", "epochs"),
        ("--chunks 1", "chunks"),
        ("--cell lstm", "lstm"),
        ("--learning-rate 0", "learning_rate"),
        ("--learning-rate 1e38", "learning_rate"),
        ("--seed -1", "seed"),
        ("--data nowhere.npz", "nowhere.npz"),
    ],
)
def test_nonsense_is_refused(
    words: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code: Any = main(["reproduce", "multigrid", *words.split()])
    except SystemExit as left:
        code = left.code
    assert code == 2
    told = capsys.readouterr()
    assert said in told.err + told.out
    assert not list(tmp_path.iterdir())
