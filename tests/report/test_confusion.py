"""Which classes were taken for which: counted by every task with classes, drawn for few classes and for many."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from html_pages import Elements, assert_self_contained
from run_events import epoch, finished, started, update

import stretto
from stretto.cli.main import main
from stretto.data import Labels, SequenceSet, StepLabels, make_regimes, write_npz
from stretto.distributed import World
from stretto.report import confusion_html, most_confused, write_run_report
from stretto.tasks import find_task
from stretto.training import evaluate, read_events

SMALL = {"epochs": 1, "hidden_size": 4, "batch_size": 16, "backend": "torch"}


def matrix(text: str) -> list[list[str]]:
    """The cells of the matrix, row by row: the true class, its counts, the share that is right."""
    table = text.partition('<table class="confusion')[2].partition("<tbody>")[2].partition("</tbody>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", table)
    return [[Elements(cell).text for cell in re.findall(r"<t[hd].*?</t[hd]>", row)] for row in rows]


def signs(names: tuple[str, ...] = ("left", "right", "still"), *, count: int = 60) -> SequenceSet:
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 9, count)
    return SequenceSet.from_flat(
        rng.normal(size=(lengths.sum(), 2)).astype(np.float32),
        offsets=np.cumsum([0, *lengths]),
        targets=Labels(values_N=np.arange(count) % len(names), names=names),
        name="signs",
    )


def test_rows_are_true_classes_and_columns_found_ones() -> None:
    confusion = {"names": ["a", "b", "never"], "pairs": [[0, 0, 3], [0, 1, 1], [1, 1, 2_000]]}
    text = confusion_html(confusion)
    assert matrix(text) == [
        ["a", "3", "1", "", "75.0%"],
        ["b", "", "2,000", "", "100.0%"],
        ["never", "", "", "", "-"],
    ]
    assert "a taken for b: 1 of 4" in text
    assert most_confused(confusion) == [("a", "b", 1, 4)]
    assert "No class was taken for another" in confusion_html({"names": ["a", "b"], "pairs": [[0, 0, 3]]})
    assert "Nothing with a class" in confusion_html({"names": ["a", "b"], "pairs": []})


@pytest.mark.parametrize("count", [20, 21, 62, 200])
def test_many_classes_are_small_squares_of_those_with_errors(count: int) -> None:
    names = [f"class {number}" for number in range(count)]
    pairs = [[number, number, 9] for number in range(count)] + [[count - 1, 3, 5]]
    text = confusion_html({"names": names, "pairs": pairs})
    rows = matrix(text)
    assert len(rows) == min(count, 64)
    assert all(len(row) == len(rows) + 2 for row in rows)
    assert ("many" in text) == (count > 20)
    assert any(row[1:-1] != [""] * len(rows) for row in rows) == (count <= 20)
    assert {"class 3", f"class {count - 1}"} <= {row[0] for row in rows}
    assert (f"Of {count} classes" in text) == (count > 64)
    assert len(text) < 300_000


def test_names_from_the_data_are_text(tmp_path: Path) -> None:
    hostile = '</table><script>alert(1)</script>"&'
    confusion = {"event": "confusion", "time": 0.0, "names": [hostile, "b"], "pairs": [[0, 1, 2], [1, 1, 1]]}
    events = [started(), update(1), epoch(1), confusion, finished()]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    text = write_run_report(tmp_path).read_text(encoding="utf-8")
    assert_self_contained(text)
    assert "<script>alert" not in text
    assert hostile in Elements(text).text


def _expected(task: Any, model: torch.nn.Module, part: SequenceSet) -> dict[tuple[int, int], int]:
    """Counted sequence by sequence and label by label."""
    counts: dict[tuple[int, int], int] = {}
    model.eval()
    with torch.no_grad():
        for batch in task.eval_batches(part, world=World(), device="cpu"):
            true_P, found_P = task.classes(model(batch), batch)
            for pair in zip(true_P.tolist(), found_P.tolist(), strict=True):
                counts[pair] = counts.get(pair, 0) + 1
    return counts


@pytest.mark.parametrize("name", ["classify", "label-steps"])
def test_the_counts_are_those_of_every_label_and_agree_with_the_accuracy(name: str) -> None:
    kind = find_task(name)
    task = kind(kind.Config(**SMALL), signs() if name == "classify" else make_regimes(num_train=12, median_length=30))
    torch.manual_seed(0)
    model, part = task.build_model(), task.data.part("test")
    found = evaluate(task, model, part, device="cpu", final=True)
    assert found.confusion is not None
    assert found.confusion.names == task.class_names
    counts = {(true, other): count for true, other, count in found.confusion.pairs}
    assert counts == _expected(task, model, part)
    right = sum(count for (true, other), count in counts.items() if true == other)
    assert right / sum(counts.values()) == found.metrics["accuracy"]
    assert isinstance(task.data.targets, (Labels, StepLabels))
    assert evaluate(task, model, part, device="cpu").confusion is None


def test_a_run_and_an_evaluation_show_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_npz(tmp_path / "signs.npz", signs(("[red]left", "right", "still")))
    stretto.train("classify", data="signs.npz", out="run", **SMALL)
    (event,) = (event for event in read_events(Path("run")) if event["event"] == "confusion")
    report = Path("run/report.html").read_text(encoding="utf-8")
    assert "Classes taken for others" in report
    assert [row[0] for row in matrix(report)] == ["[red]left", "right", "still"]
    capsys.readouterr()
    assert main(["evaluate", "run", "signs.npz", "--json", "found.json", "--html", "found.html"]) == 0
    said = capsys.readouterr().out
    assert "taken for" in said
    assert "[red]left" in said
    found = json.loads(Path("found.json").read_text(encoding="utf-8"))["confusion"]
    assert (found["names"], found["pairs"]) == (event["names"], event["pairs"])
    page = Path("found.html").read_text(encoding="utf-8")
    assert_self_contained(page)
    assert matrix(page) == matrix(report)
    assert main(["evaluate", "run", "signs.npz", "--html", "signs.npz"]) == 2


def test_a_task_whose_classes_have_no_name_is_told_so() -> None:
    kind = find_task("classify")
    task = kind(kind.Config(**SMALL), signs())
    model = task.build_model()
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr(task, "class_names", ("one", "two"))
        with pytest.raises(stretto.StrettoError, match="2 class names and found a class with another number"):
            evaluate(task, model, task.data, device="cpu", final=True)
