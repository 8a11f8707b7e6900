"""The result of the kernel benchmark as one page."""

from pathlib import Path
from typing import Final

from bench.kernels import KernelsBench
from bench.kernels_tables import AXES, bench_tables, machine_line, shown, slower_lines
from stretto.extras import optional
from stretto.files import write_text_atomically
from stretto.report import (
    BLUE,
    BigNumber,
    Html,
    Section,
    bullets,
    columns,
    figure,
    grid,
    headline,
    joined,
    page,
    paragraph,
    plot,
)

GATE: Final = (
    "Before any clock ran, outputs and gradients of each pair were compared: they differ by less than 1e-4 of the "
    "largest value, else there would be no page. Contestants take turns in one run. Ratios are of the least times; "
    "medians stand beside them."
)


def write_kernels_page(bench: KernelsBench, path: Path) -> None:
    """All tables, and plots of the growth, on one self-contained page."""
    sections = []
    for table in bench_tables(bench):
        body = [columns(tuple(table.headings), table.rows)]
        body += [paragraph(line) for line in table.caption.splitlines()]
        sections.append(Section(title=table.title, body=joined(body)))
    if bench.growth:
        sections.append(Section(title="Growth", body=grid(_growth_figures(bench))))
    told = [*slower_lines(bench), *(f"left out: {line}" for line in bench.missing)]
    if told:
        sections.append(Section(title="Notes", body=bullets(told)))
    text = page(
        title="Generated kernels beside their peers",
        subtitle=machine_line(bench),
        top=[headline(_numbers(bench)), paragraph(GATE)],
        sections=sections,
        footer="Made by stretto bench kernels.",
        scripted=bool(bench.growth),
    )
    write_text_atomically(path, text)


def _numbers(bench: KernelsBench) -> list[BigNumber]:
    """The ratios to each peer of the main shapes, from the least to the largest, and how many goals are met."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for row in bench.comparisons:
        if row.topic == "shapes":
            ratios.setdefault((row.net, row.peer), []).append(row.ratio)
    numbers = [
        BigNumber(
            label=f"{net} over {peer}",
            value=f"{shown(min(found))} to {shown(max(found))} x",
            detail=f"at {len(found)} shapes",
        )
        for (net, peer), found in ratios.items()
    ]
    judged = [row.ratio >= row.goal for row in bench.comparisons if row.goal is not None]
    if judged:
        numbers.append(BigNumber(label="Goals met", value=f"{sum(judged)} of {len(judged)}", detail="ratios to peers"))
    return numbers


def _growth_figures(bench: KernelsBench) -> list[Html]:
    draw = optional("plotly.graph_objects").Scatter
    figures = []
    for item in bench.growth:
        axis = AXES[item.axis]
        trace = draw(
            x=list(item.sizes),
            y=[1e3 * seconds for seconds in item.seconds],
            mode="lines+markers",
            line={"color": BLUE, "width": 2},
        )
        drawn = plot(
            [trace],
            name=f"growth-{item.axis.replace('_', '-')}",
            x={"title": axis, "type": "log"},
            y={"title": "ms", "type": "log", "dtick": "D2"},
            legend=False,
        )
        caption = f"Grows like {axis} to the power of {item.exponent:.2f}."
        figures.append(figure(drawn, title=f"Time of a step against {axis}", caption=caption))
    return figures
