"""The result of `stretto bench workers` as one page with plots, and as a picture."""

from pathlib import Path

from bench.workers import APART, GOALS, WorkersBench
from bench.workers_tables import bench_tables
from stretto.extras import optional
from stretto.files import write_text_atomically
from stretto.report import (
    AMBER,
    BLUE,
    GREY,
    PALE,
    TEAL,
    BigNumber,
    Html,
    Line,
    Section,
    bullets,
    columns,
    figure,
    grid,
    headline,
    joined,
    line_chart,
    page,
    paragraph,
    plot,
)


def write_workers_page(bench: WorkersBench, path: Path) -> None:
    """All tables and plots on one self-contained page."""
    sections = [Section(title="Plots", body=grid([_efficiency(bench), _shares(bench)]))]
    for table in bench_tables(bench):
        body = joined([columns(table.headings, table.rows), paragraph(table.caption)])
        sections.append(Section(title=table.title, body=body))
    if bench.missing:
        sections.append(Section(title="Left out", body=bullets(bench.missing)))
    numbers = [
        BigNumber(label=f"2 workers over {way}", value=f"{bench.ratios[way]:.2f} x", detail=f"goal {goal:.1f} x")
        for way, goal in GOALS.items()
    ]
    numbers.append(
        BigNumber(
            label="Of what two cores give", value=f"{bench.ratios[APART]:.0%}", detail="nothing exchanged is 100 %"
        )
    )
    text = page(
        title="Several workers",
        subtitle=f"{bench.settings['task']}, batches of {bench.settings['batch_size']} a worker; {bench.machine}",
        top=[headline(numbers)],
        sections=sections,
        footer="Made by stretto bench workers.",
    )
    write_text_atomically(path, text)


def write_workers_figure(bench: WorkersBench, path: Path) -> None:
    """Predicted efficiency against the number of workers, and what takes the rest, as SVG."""
    rows = bench.predictions
    chart = line_chart(
        [
            Line(name="efficiency", values=tuple(row.efficiency for row in rows)),
            Line(name="summing gradients", values=tuple(row.summing for row in rows)),
            Line(name="waiting for the slowest", values=tuple(row.stragglers for row in rows)),
        ],
        places=[f"{row.workers:,}" for row in rows],
        across="workers",
        up="share of the time",
        ticks=[(share / 100, f"{share} %") for share in range(0, 101, 20)],
    )
    write_text_atomically(path, chart)


def _efficiency(bench: WorkersBench) -> Html:
    graph_objects = optional("plotly.graph_objects")
    rows = bench.predictions
    names = [f"{row.workers:,}" for row in rows]
    traces = [
        graph_objects.Scatter(
            x=names, y=[100 * value for value in values], name=name, line={"color": colour, "width": 2}
        )
        for name, colour, values in (
            ("efficiency", BLUE, [row.efficiency for row in rows]),
            ("summing gradients", AMBER, [row.summing for row in rows]),
            ("waiting for the slowest", TEAL, [row.stragglers for row in rows]),
        )
    ]
    drawn = plot(
        traces,
        name="efficiency",
        x={"title": "workers", "type": "category"},
        y={"title": "% of the time", "range": [0, 102]},
    )
    return figure(drawn, title="Predicted efficiency", caption="And what takes the rest of the time.")


def _shares(bench: WorkersBench) -> Html:
    graph_objects = optional("plotly.graph_objects")
    traces = [
        graph_objects.Scatter(
            x=[str(size) for size in row.simulated],
            y=[100 * share for share in row.simulated.values()],
            name=row.sampler,
            line={"color": colour, "width": 2},
        )
        for row, colour in zip(bench.stragglers, (BLUE, AMBER, GREY, PALE), strict=False)
    ]
    drawn = plot(
        traces,
        name="stragglers",
        x={"title": "workers", "type": "category"},
        y={"title": "% of the time", "rangemode": "tozero"},
    )
    return figure(drawn, title="Waiting for the slowest, simulated", caption="By whose batches workers take.")
