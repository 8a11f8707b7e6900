"""The harness checks before it times, keeps what was measured, and renders it."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from bench.harness import ROOT, Registry, Report, Settings, Table, format_cell, render
from stretto.errors import StrettoError
from stretto.timing import QUICK, TimingBudget, check_equal, time_interleaved, torch_threads

TABLE = Table(title="Speed", columns=("net", "ms", "met"), rows=(("GRU", 1.23456, True), ("LSTM", math.inf, None)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Settings(Settings):
    """Flags of a made-up benchmark.

    Attributes:
        size: How large.
    """

    size: int = 3


@pytest.fixture
def registry() -> Registry:
    made = Registry("made_up")

    @made("speed", title="How fast it is")
    def run(settings: _Settings, report: Report) -> None:
        report.progress("measuring")
        report.table(**dataclasses.asdict(TABLE))
        report.skip("JAX", "not installed")
        report.goal("ratio", float(settings.size), at_least=2)
        report.failed = settings.size == 0

    return made


def test_tasks_take_turns_and_all_run_equally_often() -> None:
    order: list[str] = []
    tasks = {name: lambda name=name: order.append(name) for name in "ab"}
    timings = time_interleaved(tasks, budget=TimingBudget(rounds=4, seconds=60.0))
    assert order == list("abababab")
    assert all(timing.rounds == 4 and 0 < timing.minimum <= timing.median for timing in timings.values())


def test_a_budget_that_is_spent_ends_the_run_after_three_rounds() -> None:
    assert time_interleaved({"a": int}, budget=TimingBudget(rounds=50, seconds=0.0))["a"].rounds == 3
    assert time_interleaved({"a": int}, budget=QUICK)["a"].rounds == 1


def test_threads_are_restored_after_an_error() -> None:
    before = torch.get_num_threads()

    def fail() -> None:
        with torch_threads(before + 1) as count:
            assert count == torch.get_num_threads() == before + 1
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    "wrong",
    [torch.ones(3) + 1e-2, torch.ones(4), torch.tensor([1.0, math.nan, 1.0]), torch.tensor([1.0, math.inf, 1.0])],
)
def test_the_check_refuses_wrong_results(wrong: torch.Tensor) -> None:
    with pytest.raises(StrettoError, match=r"gradient of w of ours differs from theirs"):
        check_equal({"gradient of w": wrong}, {"w": torch.ones(3)}, name="ours", peer="theirs", where="T=1")


def test_the_check_returns_the_largest_error_and_refuses_other_counts() -> None:
    found = {"a": torch.tensor([2.0, 4.0]), "b": torch.zeros(0)}
    wanted = {"a": torch.tensor([2.0, 4.0 - 2e-4]), "b": torch.zeros(0)}
    assert check_equal(found, wanted, name="a", peer="b", where="") == pytest.approx(5e-5, rel=1e-2)
    with pytest.raises(StrettoError, match="2 results"):
        check_equal(found, {}, name="a", peer="b", where="here")


def test_json_holds_the_raw_numbers_the_machine_and_the_command(registry: Registry, tmp_path: Path) -> None:
    assert registry.main(["speed", "--size", "5", "--json", str(tmp_path / "speed.json"), "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "speed.json").read_text())
    assert result["tables"][0] == {
        "title": "Speed",
        "columns": ["net", "ms", "met"],
        "rows": [["GRU", 1.23456, True], ["LSTM", "inf", None]],
        "caption": "",
    }
    assert result["tables"][1]["rows"] == [["ratio", 5.0, "at least 2", True]]
    assert torch.__version__.partition("+")[0] in result["machine"]
    assert result["commit"]
    assert result["command"].startswith("python -m made_up speed --size 5 --json")
    assert result["notes"] == ["left out: JAX: not installed"]
    assert "1.23" in (tmp_path / "speed.html").read_text()


def test_words_on_the_page_are_escaped(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>"
    report = Report("speed", title=hostile, command=hostile)
    report.note(hostile)
    report.table(title=hostile, columns=(hostile,), rows=((hostile,),), caption=hostile)
    report.write(tmp_path)
    page = (tmp_path / "speed.html").read_text()
    assert hostile not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 7


def test_an_interrupted_run_keeps_the_parts_it_has(tmp_path: Path) -> None:
    report = Report("speed", title="", json=tmp_path / "speed.json")
    report.table(**dataclasses.asdict(TABLE))
    assert len(json.loads((tmp_path / "speed.json").read_text())["tables"]) == 1


def test_a_failed_benchmark_exits_with_1_and_a_smoke_test_says_so(
    registry: Registry, capsys: pytest.CaptureFixture[str]
) -> None:
    assert registry.main(["speed", "--size", "0", "--quick"]) == 1
    assert "smoke test" in capsys.readouterr().out
    with pytest.raises(StrettoError, match="speed"):
        registry.main(["sped"])


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (1.23456, "1.23"),
        (12345.6, "12,346"),
        (0.01234, "0.0123"),
        (3, "3"),
        (None, "-"),
        (False, "no"),
        (1e-9, "1e-09"),
    ],
)
def test_numbers_show_three_digits(cell: float | None, text: str) -> None:
    assert format_cell(cell) == text


def test_a_row_that_does_not_fit_its_columns_is_refused() -> None:
    with pytest.raises(ValueError, match="2 columns"):
        Table(title="t", columns=("a", "b"), rows=((1,),))


def test_results_become_pages_and_outdated_pages_are_found(registry: Registry, tmp_path: Path) -> None:
    results, pages = tmp_path / "results", tmp_path / "pages"
    registry.main(["speed", "--json", str(results / "fast.json")])
    assert {path.name for path in render(results=results, pages=pages)} == {"fast.md", "index.md"}
    page = (pages / "fast.md").read_text()
    assert page.startswith("# How fast it is\n")
    assert "| GRU | 1.23 | yes |" in page
    assert render(results=results, pages=pages, check=True) == []
    (pages / "fast.md").write_text("old")
    (pages / "gone.md").write_text("old")
    assert [path.name for path in render(results=results, pages=pages, check=True)] == ["fast.md", "gone.md"]
    render(results=results, pages=pages)
    assert not (pages / "gone.md").exists()


def test_a_file_without_a_result_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(StrettoError, match=r"bad\.json"):
        render(results=tmp_path, pages=tmp_path)


def test_the_pages_of_the_documentation_show_the_stored_results() -> None:
    assert render(check=True) == [], "run `python -m bench render`"
    assert (ROOT / "docs" / "measurements" / "index.md").exists()
