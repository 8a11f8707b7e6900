"""The kernel benchmark in small: its rows, its gate, its files, and what it refuses. No time is ever judged.

Shape legend: T steps, B sequences, F features of the input, H hidden units, S points of a sweep.
"""

import dataclasses
import importlib
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console

from bench.interleaved import Timing
from bench.kernel_comparison import SHAPES, Comparison
from bench.kernels import PARTS, KernelsBench, KernelsBenchSettings, run_kernels_bench
from bench.kernels_page import write_kernels_page
from bench.kernels_tables import bench_tables, shown, slower_lines, tables
from stretto import extras
from stretto.cli.main import main
from stretto.errors import StrettoError
from stretto.kernels import CppKernel, NoCompiler, find_compiler

HERE = tuple(part for part in PARTS if part not in ("memory", "compile"))


@pytest.fixture(scope="module")
def compiler() -> None:
    try:
        find_compiler()
    except NoCompiler as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def without_jax() -> Iterator[None]:
    real = importlib.import_module

    def import_module(name: str, package: str | None = None) -> ModuleType:
        if name.partition(".")[0] == "jax":
            raise ImportError(f"No module named {name!r}")
        return real(name, package)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extras.importlib, "import_module", import_module)
        yield


@pytest.fixture(scope="module")
def quick(compiler: None, without_jax: None) -> KernelsBench:
    return run_kernels_bench(KernelsBenchSettings(quick=True, only=HERE, threads=1))


def _printed(bench: KernelsBench, *, width: int) -> str:
    stream = io.StringIO()
    console = Console(width=width, file=stream)
    for table in tables(bench, width=width):
        console.print(table)
    return stream.getvalue()


def _wrong_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    right = CppKernel.forward_together

    def wrong(self: CppKernel, *args: Any, **kwargs: Any) -> Any:
        made = right(self, *args, **kwargs)
        for outputs in made:
            outputs.after[0].mul_(1.001)
        return made

    monkeypatch.setattr(CppKernel, "forward_together", wrong)


def _wrong_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    right = CppKernel.backward_together

    def wrong(self: CppKernel, *args: Any, **kwargs: Any) -> Any:
        made = right(self, *args, **kwargs)
        for gradients in made:
            for step in [*gradients.steps, *gradients.handed]:
                if step is not None:
                    step.mul_(1.001)
        return made

    monkeypatch.setattr(CppKernel, "backward_together", wrong)


def test_every_part_gives_its_rows(quick: KernelsBench) -> None:
    found = {(row.topic, row.net, row.peer) for row in quick.comparisons}
    fixed = [("GRU", "nn.GRU"), ("LSTM", "nn.LSTM")]
    assert found == {
        ("shapes", "LayerNormLSTM", "Python loop"),
        ("bidirectional", "2-layer BiGRU", "nn.GRU"),
        ("stack", "3-layer GRU", "layer by layer"),
        ("stack", "3-layer GRU", "nn.GRU"),
        *((topic, *pair) for topic in ("shapes", "hidden", "threads") for pair in fixed),
    }
    assert {row.threads for row in quick.comparisons if row.topic == "threads"} == {1, 2}
    assert {row.threads for row in quick.comparisons if row.topic != "threads"} == {1}
    assert [row.way for row in quick.ragged] == [
        "stretto, all full",
        "stretto, ragged",
        "nn.LSTM, padded",
        "nn.LSTM, packed",
    ]
    assert {(row.limit, row.net, row.threads) for row in quick.limits} == {
        (limit, net, threads) for limit in ("products", "reads") for net in ("GRU", "LSTM") for threads in (1, 2)
    }
    assert [item.axis for item in quick.growth] == ["num_steps", "batch", "hidden_size"]
    assert (quick.memory, quick.compiling) == ((), ())


def test_the_numbers_of_a_row_fit_together(quick: KernelsBench) -> None:
    for row in quick.comparisons:
        assert row.ratio == row.theirs.least / row.ours.least
        assert row.ours.rounds == row.theirs.rounds == 1
        assert 0 <= row.error <= 1e-4
        assert row.kernel == "cpp"
    full, ragged, padded, packed = quick.ragged
    assert full.over_full == 1
    assert full.real_steps == full.slots == ragged.slots
    assert ragged.real_steps == padded.real_steps == packed.real_steps < full.slots
    for limit in quick.limits:
        assert limit.share == pytest.approx(limit.work / limit.timing.least / limit.machine_rate)
    assert slower_lines(quick) == []


def test_without_jax_the_rest_runs_and_it_is_told(quick: KernelsBench) -> None:
    (line,) = quick.missing
    assert line.startswith("JAX scan: ")
    assert "pip install 'stretto[peers]'" in line


@pytest.mark.usefixtures("compiler")
def test_a_jax_that_does_not_import_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str, package: str | None = None) -> ModuleType:
        raise RuntimeError("built for another processor")

    monkeypatch.setattr(extras.importlib, "import_module", broken)
    (line,) = run_kernels_bench(KernelsBenchSettings(quick=True, only=("shapes",))).missing
    assert "built for another processor" in line


@pytest.mark.usefixtures("compiler", "without_jax")
@pytest.mark.parametrize("part", ["shapes", "bidirectional", "stack", "ragged", "threads"])
@pytest.mark.parametrize(
    ("break_it", "what"), [(_wrong_outputs, "output"), (_wrong_gradients, "gradient of")], ids=["forward", "backward"]
)
def test_a_wrong_kernel_stops_the_benchmark(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, part: str, break_it: Any, what: str
) -> None:
    break_it(monkeypatch)
    before = torch.get_num_threads()
    settings = KernelsBenchSettings(quick=True, only=(part,), json=tmp_path / "out.json")
    with pytest.raises(StrettoError, match=rf"the {what}.* of our .* differs from that of .*No time counts"):
        run_kernels_bench(settings)
    assert torch.get_num_threads() == before
    assert not list(tmp_path.iterdir())


def test_json_round_trip(quick: KernelsBench) -> None:
    read = json.loads(quick.to_json())
    assert set(read) == {field.name for field in dataclasses.fields(quick)}
    first = read["comparisons"][0]
    timings = {name: Timing(**first[name]) for name in ("ours", "theirs")}
    assert Comparison(**(first | timings)) == quick.comparisons[0]
    assert read["quick"] is True


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_and_no_number_is_cut_off(quick: KernelsBench, width: int) -> None:
    slow = Timing(least=9.87654, median=9.9, rounds=10)
    sizes = {"num_steps": 10_000, "batch": 1, "input_size": 8, "hidden_size": 32}
    large = tuple(
        dataclasses.replace(row, ours=slow, theirs=slow, ratio=172.34, ratio_of_medians=171.5, goal=150.0, **sizes)
        for row in quick.comparisons
    )
    text = _printed(dataclasses.replace(quick, comparisons=large), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text


def test_goals_are_judged_in_the_table(quick: KernelsBench) -> None:
    row = quick.comparisons[0]
    met = dataclasses.replace(row, ratio=150.0, goal=150.0)
    missed = dataclasses.replace(row, ratio=149.9, goal=150.0)
    (table,) = bench_tables(dataclasses.replace(_nothing(quick), comparisons=(met, missed, row)))
    judged = list(table.headings).index("met")
    assert [cells[judged] for cells in table.rows] == ["yes", "no", "-" if row.goal is None else "yes"]


def test_numbers_have_three_digits_that_count() -> None:
    assert [shown(value) for value in (0.004, 1.234, 12.34, 123.4, 12345.6)] == ["0.00", "1.23", "12.3", "123", "12346"]


def test_a_fall_back_is_told(quick: KernelsBench) -> None:
    slow = dataclasses.replace(quick.comparisons[0], kernel="eager: no compiler")
    told = slower_lines(dataclasses.replace(_nothing(quick), comparisons=(slow, slow)))
    assert told == [f"{slow.net} ran without generated code, eager: no compiler"]


@pytest.mark.usefixtures("without_jax")
def test_without_a_compiler_it_runs_and_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    bench = run_kernels_bench(KernelsBenchSettings(quick=True, only=("bidirectional", "compile", "limits")))
    (line,) = bench.missing
    assert line.startswith("compiled kernels: ")
    assert "no-such-compiler" in line
    assert bench.compiling == ()
    assert {row.limit for row in bench.limits} == {"products"}
    (told,) = slower_lines(bench)
    assert told.startswith("2-layer BiGRU ran without generated code, eager: ")


def test_every_net_has_a_goal_at_every_shape() -> None:
    nets = {("GRU", "nn.GRU"), ("GRU", "JAX scan"), ("LayerNormLSTM", "Python loop"), ("LSTM", "nn.LSTM")}
    assert len(SHAPES) == 5
    assert all(set(entry.goals) == nets and min(entry.goals.values()) >= 1 for entry in SHAPES)


def test_the_page_has_all_tables_and_escapes(quick: KernelsBench, tmp_path: Path) -> None:
    hostile = dataclasses.replace(quick, missing=("<b>JAX</b>: gone",))
    write_kernels_page(hostile, tmp_path / "new" / "page.html")
    text = (tmp_path / "new" / "page.html").read_text(encoding="utf-8")
    assert "<b>JAX" not in text
    assert "left out: &lt;b&gt;JAX" in text
    for row in quick.comparisons:
        assert shown(1e3 * row.ours.least) in text
    assert all(f"plot-growth-{axis}" in text for axis in ("num-steps", "batch", "hidden-size"))


@pytest.mark.usefixtures("compiler", "without_jax")
def test_the_command_writes_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--json", str(tmp_path / "k.json"), "--out", str(tmp_path / "page [x]")]
    assert main(["bench", "kernels", "--quick", "--only", "ragged,growth", *words]) == 0
    shown = capsys.readouterr().out
    assert "its times mean nothing" in shown
    assert str(tmp_path / "page [x]" / "kernels.html") in shown
    assert (tmp_path / "page [x]" / "kernels.html").exists()
    read = json.loads((tmp_path / "k.json").read_text(encoding="utf-8"))
    assert read == json.loads((tmp_path / "page [x]" / "kernels.json").read_text(encoding="utf-8"))
    assert read["comparisons"] == []
    assert len(read["ragged"]) == 4
    assert all(math.isfinite(item["exponent"]) for item in read["growth"])


def test_parts_are_separated_by_blanks_or_commas() -> None:
    assert KernelsBenchSettings(only=("shapes,ragged", "stack")).parts == ("shapes", "ragged", "stack")
    assert KernelsBenchSettings().parts == PARTS


@pytest.mark.parametrize("bad", [{"repeats": 0}, {"threads": 0}, {"thread_counts": ()}, {"thread_counts": (2, 0)}])
def test_bad_settings_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(StrettoError, match="too little"):
        KernelsBenchSettings(**bad)


def test_an_unknown_part_is_refused_with_the_names() -> None:
    with pytest.raises(StrettoError, match=r"no part 'speed'.*shapes.*growth"):
        KernelsBenchSettings(only=("shapes,speed",))


def _nothing(bench: KernelsBench) -> KernelsBench:
    empty = {"comparisons": (), "ragged": (), "memory": (), "compiling": (), "limits": (), "growth": ()}
    return dataclasses.replace(bench, **empty)
