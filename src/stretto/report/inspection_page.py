"""The page of an inspection."""

from pathlib import Path

from stretto.files import write_text_atomically
from stretto.report.inspection import (
    BUCKET_HEADER,
    Inspection,
    batch_rule,
    bucket_rows,
    count_rows,
    quantile_rows,
    verdict,
)
from stretto.report.lengths_figure import lengths_figure
from stretto.report.page import BigNumber, Section, columns, facts, headline, joined, page, paragraph


def write_inspection_page(inspection: Inspection, path: Path) -> None:
    """Write the inspection as one HTML file that needs nothing else."""
    ratio = inspection.slot_ratio
    numbers = [
        BigNumber(
            label="Sequences", value=f"{inspection.num_sequences:,}", detail=f"{inspection.num_steps:,} steps in all"
        ),
        BigNumber(
            label="Median length",
            value=f"{inspection.quantiles[0.5]:,.0f}",
            detail=f"from {inspection.quantiles[0.0]:,.0f} to {inspection.quantiles[1.0]:,.0f} steps",
        ),
        BigNumber(label="Padding, shuffled", value=f"{inspection.shuffled_padding:.1%}", detail="of slots"),
        BigNumber(
            label="Padding, in buckets", value=f"{inspection.padding:.1%}", detail=f"{len(inspection.edges)} buckets"
        ),
        BigNumber(
            label="Slots saved",
            value=f"{ratio:.1f}x fewer" if ratio >= 1 else f"{1 / ratio:.1f}x more",
            detail=f"{inspection.batches:,} batches an epoch",
        ),
    ]
    lengths = lengths_figure(
        bounds=inspection.bounds, counts=inspection.counts, edges=inspection.edges, whose=inspection.whose
    )
    sections = [
        Section(title="Lengths", body=joined([lengths, columns(*_across(quantile_rows(inspection)))])),
        Section(
            title="Buckets",
            body=joined(
                [
                    paragraph(f"With {batch_rule(inspection)}. {verdict(inspection)}"),
                    columns(BUCKET_HEADER, bucket_rows(inspection)),
                ]
            ),
        ),
        Section(title="The set", body=facts(count_rows(inspection))),
    ]
    text = page(
        title=f"Lengths of {inspection.name}",
        subtitle=f"What its batches will be: {batch_rule(inspection)}",
        top=[headline(numbers)],
        sections=sections,
        footer="Batches are padded to their longest sequence; shuffled batches are drawn with one seed.",
    )
    write_text_atomically(path, text)


def _across(rows: list[tuple[str, str]]) -> tuple[list[str], list[list[str]]]:
    """Names as a heading and values as the one row under it."""
    return [name for name, _ in rows], [[value for _, value in rows]]
