"""Pages in a real browser: no errors, readable at two widths, in the dark and by keyboard, and refreshed in place."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from browser import CHROMIUM, Page, browser
from run_events import epoch, started, update
from test_watch import record, watching

from stretto.data import Labels, SequenceSet
from stretto.report import SweepRun, inspect_lengths, write_inspection_page, write_run_report, write_sweep_page

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")]

WIDER_THAN_THE_SCREEN = "document.documentElement.scrollWidth > innerWidth"
# Words of a page that are less than 3 times as bright as what is behind them, or the other way round.
FAINT = """
(() => {
  const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
  const linear = v => v <= 10 ? v / 3294 : ((v / 255 + 0.055) / 1.055) ** 2.4;
  const light = colour => colour.slice(0, 3).map(linear)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0.05);
  const ground = element => {
    for (let e = element; e; e = e.parentElement) {
      const colour = numbers(getComputedStyle(e).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  return [...document.querySelectorAll("h1, h2, h3, p, td, th, li, dt, dd, mark, figcaption, .label, .value, .detail")]
    .filter(e => e.textContent.trim())
    .filter(e => {
      const [a, b] = [light(numbers(getComputedStyle(e).color)), light(ground(e))];
      return Math.max(a, b) / Math.min(a, b) < 3;
    })
    .map(e => e.textContent);
})()
"""
BRIGHTNESS = "getComputedStyle(document.body).backgroundColor"


def wait_until(page: Page, condition: str) -> None:
    """Look up to 6,000 times; how soon it comes true decides nothing."""
    look = f"const look = left => {condition} ? done() : left ? setTimeout(look, 50, left - 1) : give_up('never')"
    page.run(f"new Promise((done, give_up) => {{ {look}; look(6000); }})")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    ink = [[3.0, 1.0, 0.0], [2.0, -4.0, 0.0], [1.0, 2.0, 1.0]]
    samples = {"event": "samples", "items": [{"target": "abc <b>", "output": "abd", "ink": ink}]}
    finished = {"event": "finished", "time": 1.0, "metrics": {"cer": 0.2, "loss": 1.5}, "seconds": 9.0}
    names = [f"<b>{number}</b> of a long name" if number % 9 == 0 else str(number) for number in range(62)]
    pairs = [[n, n, 9] for n in range(62)] + [[n, (n * 7) % 62, 1 + n % 8] for n in range(62) if (n * 6) % 62]
    confusions = [
        {"event": "confusion", "names": names[:count], "pairs": [pair for pair in pairs if max(pair[:2]) < count]}
        for count in (62, 10, 2)
    ]
    runs = []
    for number in range(3):
        run = folder / f"{number}"
        run.mkdir()
        record(
            run,
            started(),
            *map(update, range(1, 11)),
            epoch(1),
            epoch(2, value=0.1 + 0.1 * number),
            confusions[number],
            samples,
            finished,
        )
        runs.append(SweepRun(number=number, changes={"learning_rate": 0.1**number, "seed": 0}, folder=run))
    rng = np.random.default_rng(0)
    lengths = rng.integers(4, 200, 300)
    data = SequenceSet.from_flat(
        rng.normal(size=(lengths.sum(), 2)).astype(np.float32),
        offsets=np.cumsum([0, *lengths]),
        targets=Labels(values_N=np.arange(300) % 2, names=("low", "high")),
        name="levels",
    )
    inspection = inspect_lengths(data, batch_size=16, max_padded_steps=None, num_buckets="auto")
    write_inspection_page(inspection, folder / "inspect.html")
    sweep = write_sweep_page(runs, folder / "sweep.html", title="Sweep", higher_is_better=False)
    reports = {name: write_run_report(run.folder) for name, run in zip(("run", "few", "two"), runs, strict=True)}
    return {**reports, "sweep": sweep, "inspect": folder / "inspect.html"}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("name", ["run", "few", "sweep", "inspect"])
def test_a_page_is_whole_and_readable(page: Page, pages: dict[str, Path], name: str, width: int, dark: bool) -> None:
    page.open(pages[name], width=width, dark=dark)
    assert page.complaints() == []
    assert not page.run(WIDER_THAN_THE_SCREEN)
    plots = page.run('document.querySelectorAll(".js-plotly-plot .subplot.xy").length')
    assert plots == page.run('document.querySelectorAll(".plotly-graph-div").length') > 0
    assert page.run(FAINT) == []
    red = int(re.findall(r"\d+", page.run(BRIGHTNESS))[0])
    assert red < 60 if dark else red > 240


@pytest.mark.parametrize(("name", "count"), [("run", 62), ("few", 10), ("two", 2)])
def test_a_confusion_matrix_scrolls_by_itself_and_keeps_its_classes_in_sight(
    page: Page, pages: dict[str, Path], name: str, count: int
) -> None:
    page.open(pages[name], width=1400)
    assert page.run("document.querySelectorAll('.confusion tbody th').length") == count
    box = "document.querySelector('.confusion').parentElement"
    assert page.run(f"{box}.scrollWidth - {box}.clientWidth") == 0
    page.open(pages[name], width=400)
    page.run(f"{box}.scrollLeft = 200")
    left = "document.querySelector('.confusion tbody th').getBoundingClientRect().left"
    assert page.run(f"{left} - {box}.getBoundingClientRect().left") == pytest.approx(0, abs=3)
    assert page.run("document.querySelectorAll('.confusion b').length") == 0


def test_a_faint_text_and_an_error_would_be_found(page: Page, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text('<p style="color: #eee; width: 900px">faint</p><script>throw new Error("so")</script>')
    page.open(file, width=400)
    assert page.run(FAINT) == ["faint"]
    assert page.run(WIDER_THAN_THE_SCREEN)
    assert any("so" in complaint for complaint in page.complaints())


def test_curves_are_hidden_and_tables_are_reached_by_keyboard(page: Page, pages: dict[str, Path]) -> None:
    page.open(pages["sweep"], width=400)
    seen = []
    for _ in range(40):
        page.press("Tab")
        name = page.run("document.activeElement.getAttribute('class')")
        seen.append(name)
        if seen.count("legendtoggle") == 2:
            break
    assert page.run("document.activeElement.getAttribute('aria-label')").startswith("show or hide 1: ")
    hidden = "[...document.getElementById('plot-sweep-value').data].map(trace => trace.visible === 'legendonly')"
    assert page.run(hidden) == [False, False, False]
    page.press("Enter")
    wait_until(page, f"({hidden}).includes(true)")
    assert page.run(hidden) == [False, True, False]
    for _ in range(40):
        page.press("Tab")
        seen.append(page.run("document.activeElement.getAttribute('class')"))
    assert "scroll" in seen
    assert page.complaints() == []


def test_a_watched_page_is_refreshed_in_place(page: Page, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, started(), *map(update, range(1, 6)), epoch(1))
    with ExitStack() as stack:
        watch, training = stack.enter_context(watching(tmp_path, capsys))
        page.open(f"http://127.0.0.1:{watch.port}{watch.key}", width=1400)

        def wait_for(words: str) -> None:
            wait_until(page, f"document.querySelector('main').textContent.includes({json.dumps(words)})")

        wait_for("update 5")
        page.run(
            "Plotly.relayout('plot-loss', {'xaxis.range[0]': 2, 'xaxis.range[1]': 4}).then(() => scrollTo(0, 300))"
        )
        page.run("window.sameDocument = true")
        record(tmp_path, update(6), update(7))
        wait_for("update 7")
        assert page.run("window.sameDocument") is True
        assert page.run("document.getElementById('plot-loss').layout.xaxis.range") == [2, 4]
        assert page.run("scrollY") == 300
        record(tmp_path, {"event": "finished", "time": 1.0, "metrics": {"cer": 0.2}, "seconds": 9.0})
        training.close()
        wait_for("Finished")
    assert page.complaints() == []
