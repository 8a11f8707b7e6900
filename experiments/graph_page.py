"""The graph experiment as a table for the terminal and a page with plots."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from rich import box
from rich.table import Table
from rich.text import Text

from experiments.graph import ANALYSIS, FUSION, LOOP, VARIANTS, GraphResult, GraphRow
from stretto.extras import optional
from stretto.files import write_text_atomically
from stretto.report import (
    AMBER,
    BLUE,
    GREY,
    TEAL,
    BigNumber,
    Html,
    Section,
    bullets,
    columns,
    escaped,
    figure,
    grid,
    headline,
    joined,
    log_axis,
    page,
    paragraph,
    plot,
)

HEADER: Final = ("network", "streams", "step by step", "analysis", "fusion", "analysis x", "fusion x", "over loop")
SHADES: Final = (BLUE, AMBER, TEAL, GREY)
COLOURS: Final = {LOOP: AMBER, ANALYSIS: TEAL, FUSION: BLUE}
MEANING: Final = (
    "Real steps of all streams a second, by the least time. x: over step by step with 1 stream, from one interleaved "
    "run. over loop: fusion over step by step with as many streams"
)
PLACES: Final = ("loops", "once", "hoisted", "loop", "sunk", "deferred")


def graph_table(result: GraphResult) -> Table:
    """A row for each network and number of streams."""
    table = Table(
        title=Text(f"Training throughput, {_sizes(result)}"),
        title_justify="left",
        caption=Text(f"{MEANING}. {_window_note(result)}"),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    for number, name in enumerate(HEADER):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    rows = list(_by_streams(result))
    for number, cells in enumerate(rows):
        following = rows[number + 1][0] if number + 1 < len(rows) else cells[0]
        table.add_row(*map(Text, cells), end_section=following != cells[0])
    return table


def write_graph_page(result: GraphResult, path: Path) -> None:
    """Table and plots on one self-contained page."""
    networks = list(dict.fromkeys(row.network for row in result.rows))
    plots = [_overview_figure(result, networks)]
    plots += [draw(result, network) for network in networks for draw in (_throughput_figure, _speed_figure)]
    plans = [(network, *(plan.get(place, 0) for place in PLACES)) for network, plan in result.plans.items()]
    text = page(
        title="Parallelism from the graph",
        subtitle=f"{_sizes(result)}; {result.machine}, threads: {result.threads}",
        top=[headline(_numbers(result))],
        sections=[
            Section(title="Throughput and speed-up", body=grid(plots)),
            Section(title="All measurements", body=columns(HEADER, _by_streams(result))),
            Section(title="What the analysis found", body=columns(("network", *PLACES), plans)),
            Section(title="How it was measured", body=_measured(result)),
        ],
        footer="Made by stretto reproduce graph, after Hwang and Sung (2015).",
    )
    write_text_atomically(path, text)


def _measured(result: GraphResult) -> Html:
    gate = (
        "Before the clock ran, outputs and gradients of all variants were compared: they differ by at most "
        f"{max(result.errors.values()):.0e} of the largest value. A step is forward and backward with the gradients of "
        "all weights, from a state of zeros. All streams and variants of a network take turns in one run."
    )
    meanings = bullets(f"{variant}: {meaning}." for variant, meaning in VARIANTS.items())
    return joined([paragraph(f"{MEANING}. {_window_note(result)}"), paragraph(gate), meanings])


def _numbers(result: GraphResult) -> list[BigNumber]:
    """For each network the speed-up with one stream, and the best."""
    numbers = []
    for network in result.plans:
        fused = [row for row in result.rows if row.network == network and row.variant == FUSION]
        alone = next(row for row in fused if row.streams == 1)
        best = max(fused, key=lambda row: row.speed_up)
        numbers.append(
            BigNumber(
                label=f"{network}, one stream",
                value=f"{alone.speed_up:.1f} x",
                detail=f"{best.speed_up:.0f} x with {best.streams} streams",
            )
        )
    return numbers


def _by_streams(result: GraphResult) -> Iterator[tuple[str, ...]]:
    found: dict[tuple[str, int], dict[str, GraphRow]] = {}
    for row in result.rows:
        found.setdefault((row.network, row.streams), {})[row.variant] = row
    for (network, streams), rows in found.items():
        yield (
            network,
            str(streams),
            *(f"{rows[variant].steps_per_second:,.0f}" for variant in VARIANTS),
            f"{rows[ANALYSIS].speed_up:.1f}",
            f"{rows[FUSION].speed_up:.1f}",
            f"{rows[FUSION].over_loop:.1f}",
        )


def _overview_figure(result: GraphResult, networks: Sequence[str]) -> Html:
    draw = optional("plotly.graph_objects").Scatter
    fused = [row for row in result.rows if row.variant == FUSION]
    traces = [
        draw(
            x=[row.streams for row in fused if row.network == network],
            y=[row.speed_up for row in fused if row.network == network],
            name=escaped(network),
            mode="lines+markers",
            line={"color": SHADES[number % len(SHADES)], "width": 2},
        )
        for number, network in enumerate(networks)
    ]
    drawn = plot(
        traces,
        name="overview",
        x=_streams_axis(result),
        y=log_axis("times the baseline", [row.speed_up for row in fused]),
        height=360,
    )
    caption = "Over step by step with one stream; both axes logarithmic."
    return figure(drawn, title=f"Speed-up by {FUSION}", caption=caption, wide=True)


def _throughput_figure(result: GraphResult, network: str) -> Html:
    drawn = plot(
        _traces(result, network, "steps_per_second"),
        name=f"throughput-{_slug(network)}",
        x=_streams_axis(result),
        y=log_axis("real steps a second", _values(result, network, "steps_per_second")),
    )
    return figure(drawn, title=f"{network}: throughput", caption="Both axes logarithmic.")


def _speed_figure(result: GraphResult, network: str) -> Html:
    drawn = plot(
        _traces(result, network, "speed_up"),
        name=f"speed-{_slug(network)}",
        x=_streams_axis(result),
        y=log_axis("times the baseline", _values(result, network, "speed_up")),
    )
    return figure(drawn, title=f"{network}: speed-up", caption="Over step by step with one stream.")


def _values(result: GraphResult, network: str, value: str) -> list[float]:
    return [getattr(row, value) for row in result.rows if row.network == network]


def _traces(result: GraphResult, network: str, value: str) -> list[object]:
    draw = optional("plotly.graph_objects").Scatter
    traces = []
    for variant in VARIANTS:
        rows = [row for row in result.rows if row.network == network and row.variant == variant]
        traces.append(
            draw(
                x=[row.streams for row in rows],
                y=[getattr(row, value) for row in rows],
                name=variant,
                mode="lines+markers",
                line={"color": COLOURS[variant], "width": 2},
            )
        )
    return traces


def _streams_axis(result: GraphResult) -> dict[str, object]:
    counts = sorted({row.streams for row in result.rows})
    return {"title": "parallel streams", "type": "log", "tickvals": counts, "ticktext": list(map(str, counts))}


def _sizes(result: GraphResult) -> str:
    chosen = result.settings
    return f"{chosen['hidden_size']} units a layer, {chosen['input_size']} inputs, windows of {chosen['window']} steps"


def _window_note(result: GraphResult) -> str:
    chosen = result.settings
    if chosen["loop_window"] == chosen["window"]:
        return "All windows are the same."
    return (
        f"Step by step runs windows of {chosen['loop_window']} steps, to save time: what it needs for a step hardly "
        "depends on how many there are, and short windows rather flatter it."
    )


def _slug(network: str) -> str:
    return network.lower().replace(" ", "-")
