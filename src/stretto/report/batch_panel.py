"""How the batch size of a run was chosen: every decision, what it was based on, and what came of it."""

from collections.abc import Sequence
from typing import Any, Final

from stretto.extras import optional
from stretto.report.page import Html, bullets, columns, figure, grid, joined, paragraph
from stretto.report.plot import AMBER, BLUE, GREY, TEAL, log_axis, plot
from stretto.report.record import Event, RunRecord

MEANING: Final = (
    "The batch was chosen while the run trained: seconds of a step were probed at several batch sizes, the noise of "
    "gradients was measured all along, and again and again the batch was taken that is predicted to reach the same "
    "result soonest, if that is at least 5 % sooner. Rate and warm-up follow the batch. Of decisions within an epoch, "
    "those that kept the batch show in the plot only."
)


def batch_html(record: RunRecord) -> Html | None:
    """Words, plots and a table of decisions; None for a run whose batch was given."""
    if not record.decisions:
        return None
    drawn = [_sizes_figure(record)]
    table = (record.probed.get("table") or {}).get("entries") or []
    measured = [entry for entry in table if entry.get("seconds")]
    if measured:
        drawn.append(_probe_figure(measured))
    told = [event for event in record.decisions if is_worth_telling(event)]
    why = bullets(f"After {_when(event)}: {event['reason']}." for event in told)
    return joined([paragraph(MEANING), grid(drawn), _table(told), why])


def is_worth_telling(decision: Event) -> bool:
    """Whether it changed something, or was made at the end of an epoch."""
    return decision["action"] != "keep" or float(decision["epoch"]).is_integer()


def _sizes_figure(record: RunRecord) -> Html:
    """The batch in force and the noise scale, along training."""
    draw = optional("plotly.graph_objects").Scatter
    decisions = record.decisions
    first = (record.started.get("settings") or {}).get("base_batch_size")
    start = record.probed.get("batch_size") or first or decisions[0]["batch_size"]
    end = max(float(decisions[-1]["step"]), float(record.steps.step_S[-1]) if len(record.steps) else 0.0)
    at = [0.0, *(float(event["step"]) for event in decisions), end]
    sizes = [start, *(event["batch_size"] for event in decisions), decisions[-1]["batch_size"]]
    traces = [draw(x=at, y=sizes, name="batch size", mode="lines", line={"color": BLUE, "width": 2, "shape": "hv"})]
    noise = [(event["step"], event["noise_scale"]) for event in decisions if (event["noise_scale"] or 0) > 0]
    if noise:
        steps, scales = zip(*noise, strict=True)
        traces.append(draw(x=steps, y=scales, name="noise scale", mode="lines+markers", line={"color": AMBER}))
    back = [event for event in decisions if event["action"] == "roll-back"]
    if back:
        marks = {"color": TEAL, "size": 11, "symbol": "x"}
        places = {"x": [event["step"] for event in back], "y": [event["batch_size"] for event in back]}
        traces.append(draw(**places, name="rolled back", mode="markers", marker=marks))
    heights = [float(value) for value in sizes] + [float(scale) for _, scale in noise]
    picture = plot(traces, name="batch-size", x={"title": "step"}, y=log_axis("sequences (log scale)", heights))
    caption = "A batch much smaller than the noise scale is mostly noise; one much larger wastes data."
    return figure(picture, title="Batch size and noise scale", caption=caption)


def _probe_figure(entries: Sequence[Event]) -> Html:
    """Real steps a second against the batch size, a line a length."""
    draw = optional("plotly.graph_objects").Scatter
    lengths = sorted({entry["length"] for entry in entries})
    colours = [BLUE, TEAL, AMBER, GREY]
    traces = []
    for number, length in enumerate(lengths):
        own = [entry for entry in entries if entry["length"] == length]
        traces.append(
            draw(
                x=[entry["batch_size"] for entry in own],
                y=[entry["num_steps"] / entry["seconds"] for entry in own],
                name=f"{length} steps",
                mode="lines+markers",
                line={"color": colours[number % len(colours)]},
            )
        )
    sizes = [float(entry["batch_size"]) for entry in entries]
    picture = plot(traces, name="probe", x=log_axis("batch size (log scale)", sizes), y={"title": "real steps/s"})
    caption = "Forward, backward and update, the least of a few, on a copy of the model before training."
    return figure(picture, title="What larger batches bring", caption=caption)


def _table(decisions: Sequence[Event]) -> Html:
    header = ["after", "step", "decision", "batch", "rate", "noise scale", "predicted gain"]
    return columns(header, [_row(event) for event in decisions])


def _row(event: Event) -> list[Any]:
    noise, gain = event["noise_scale"], event["predicted_gain"]
    accumulated = f" in {event['accumulate']} parts" if event["accumulate"] > 1 else ""
    return [
        _when(event),
        f"{event['step']:,}",
        event["action"],
        f"{event['batch_size']:,}{accumulated}",
        f"{event['rate']:.3g}",
        "not known" if noise is None else f"{noise:,.3g}",
        f"{gain:.0%}" if gain else "-",
    ]


def _when(event: Event) -> str:
    return f"step {event['step']:,}" if event["action"] == "roll-back" else f"epoch {event['epoch']:.3g}"
