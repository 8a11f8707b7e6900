"""The plots of one run.

Shape legend: S updates that were recorded, H bins of lengths, K buckets.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from stretto.batching import bucket_of
from stretto.extras import optional
from stretto.report.page import Html, escape, figure, sentence
from stretto.report.plot import AMBER, BLUE, BY_BUCKET, GREY, PALE, TEAL, epoch_axis, line, log_axis, plot, points
from stretto.report.record import Event, Numbers, RunRecord, column

MAX_POINTS = 3000
MIN_WINDOW: Final = 5
SLOW: Final = 4.0
"""Updates slower than this times the 90 % quantile are left outside the frame."""
MAX_EDGE_LABELS: Final = 14
METRIC_NAMES: Final = {"cer": "character error rate"}
RANK_COLOURS: Final = (BLUE, AMBER, TEAL, GREY)


def metric_name(metric: str) -> str:
    """A metric as a person calls it; what follows an underscore says how it was measured."""
    name, _, how = metric.partition("_")
    return ", ".join(filter(None, (METRIC_NAMES.get(name, name), how)))


def is_share(metric: str) -> bool:
    """Whether a metric is a share, shown in per cent."""
    return metric.partition("_")[0] in ("cer", "accuracy", "padding")


def loss_figure(record: RunRecord) -> Html:
    """Training loss per update and per epoch, and validation loss."""
    updates = record.updates
    drawn = thin(np.arange(len(updates)))
    window = max(MIN_WINDOW, len(updates) // 50)
    traces = []
    if len(updates):
        smooth_S = running_mean(updates.loss_S, window=window)
        traces = [
            line(updates.update_S[drawn], updates.loss_S[drawn], name="train, per update", colour=PALE, width=1),
            line(updates.update_S[drawn], smooth_S[drawn], name=f"train, mean of {window} updates", colour=BLUE),
        ]
    ends = column(record.epochs, "update")
    middles = (ends + np.concatenate([[0.0], ends[:-1]])) / 2 if len(ends) else ends
    epochs = (("train, mean per epoch", "train_loss", TEAL, middles), ("validation", "valid_loss", AMBER, ends))
    for name, key, colour, at in epochs:
        values = column(record.epochs, key)
        if np.isfinite(values).any():
            traces.append(line(at, values, name=name, colour=colour, markers=True))
    shown = np.concatenate([updates.loss_S, column(record.epochs, "train_loss"), column(record.epochs, "valid_loss")])
    shown = shown[np.isfinite(shown)]
    is_log = len(shown) > 0 and shown.min() > 0 and shown.max() / shown.min() > 20
    y = log_axis("loss (log scale)", shown.tolist()) if is_log else {"title": "loss"}
    text = "The mean of an epoch is drawn at its middle, validation at its end." if record.epochs else ""
    picture = plot(traces, name="loss", x={"title": "update"}, y=y, height=360)
    return figure(picture, title="Loss", caption=_caption(text, drawn, len(updates)), wide=True)


def metric_figure(record: RunRecord) -> Html:
    """The task's metric on validation data, one point per epoch."""
    name = metric_name(record.metric)
    trace = line(column(record.epochs, "epoch"), column(record.epochs, "value"), colour=AMBER, markers=True)
    tickformat = ".0%" if is_share(record.metric) else ""
    y = {"title": escape(name), "rangemode": "tozero", "tickformat": tickformat}
    picture = plot([trace], name="metric", x=epoch_axis(len(record.epochs)), y=y, legend=False)
    return figure(picture, title=sentence(name), caption="On the validation sequences, after each epoch.")


def padding_figure(record: RunRecord) -> Html:
    """The share of padded steps that is padding, update by update."""
    updates = record.updates
    drawn = thin(np.arange(len(updates)))
    window = max(MIN_WINDOW, len(updates) // 50)
    together_S = 1 - running_mean(updates.real_S, window=window) / running_mean(updates.padded_S, window=window)
    padding_S = 1 - updates.real_S / updates.padded_S
    small = {"color": PALE, "size": 3}
    traces = [
        points(updates.update_S[drawn], padding_S[drawn], name="per update", marker=small),
        line(updates.update_S[drawn], together_S[drawn], name=f"{window} updates together", colour=BLUE),
    ]
    shuffled = record.started.get("shuffled_padding")
    if shuffled is not None:
        ends = [updates.update_S[0], updates.update_S[-1]]
        traces.append(line(ends, [shuffled] * 2, name="shuffled batches", colour=AMBER, dash="dash"))
    y = {"title": "padding", "tickformat": ".0%", "rangemode": "tozero"}
    picture = plot(traces, name="padding", x={"title": "update"}, y=y)
    caption = _caption("The share of each batch that is padding.", drawn, len(updates))
    return figure(picture, title="Padding over time", caption=caption)


def shapes_figure(record: RunRecord) -> Html:
    """The shapes of the batches: sequences against padded length."""
    updates = record.updates
    drawn = thin(np.arange(len(updates)))
    bucket_S = _number_buckets(record, drawn)
    trace = points(
        updates.length_S[drawn],
        updates.rows_S[drawn],
        marker=_bucket_marker(bucket_S, size=6),
        customdata=np.stack([updates.padded_S[drawn], bucket_S], axis=1),
        hovertemplate="%{y} sequences of %{x} steps: %{customdata[0]:,} in all, bucket %{customdata[1]}<extra></extra>",
    )
    x, y = ({"title": title, "rangemode": "tozero"} for title in ("padded length in steps", "sequences in the batch"))
    picture = plot([trace], name="shapes", x=x, y=y, legend=False)
    text = "One point per update, coloured by bucket from the shortest sequences (green) to the longest (violet)."
    return figure(picture, title="Shapes of the batches", caption=_caption(text, drawn, len(updates)))


def time_figure(record: RunRecord) -> Html:
    """Milliseconds per update against the padded steps of its batch."""
    updates = record.updates
    timed = np.flatnonzero(np.isfinite(updates.took_S))
    drawn = thin(timed)
    took = updates.took_S[timed]
    usual = took <= SLOW * np.quantile(took, 0.9)
    above = int((~usual).sum())
    trace = points(
        updates.padded_S[drawn],
        updates.took_S[drawn] * 1000,
        marker=_bucket_marker(_number_buckets(record, drawn), size=5),
        customdata=np.stack([updates.rows_S[drawn], updates.length_S[drawn]], axis=1),
        hovertemplate="%{y:.1f} ms for %{customdata[0]} sequences of %{customdata[1]} steps<extra></extra>",
    )
    x = {"title": "padded steps of the batch", "rangemode": "tozero"}
    y = {"title": "milliseconds per update", "range": [0, 1150 * float(took[usual].max())]}
    picture = plot([trace], name="time", x=x, y=y, legend=False)
    text = "From one recorded update to the next where nothing but training lay between; colours are the buckets."
    if above:
        text += f" {above:,} slower {'update lies' if above == 1 else 'updates lie'} above the frame."
    return figure(picture, title="Time per update", caption=_caption(text, drawn, len(timed)))


def lengths_figure(*, bounds: Sequence[float], counts: Sequence[int], edges: Sequence[int], whose: str) -> Html:
    """The histogram of lengths, one bar per bin, with a line at each bucket edge, if there is one.

    A bin reaches from its bound up to the next, without it; the last at least to the last edge.
    """
    edges_K = np.asarray(edges, dtype=np.float64)
    low_H = np.ceil(np.asarray(bounds[:-1], dtype=np.float64))
    high_H = np.ceil(np.asarray(bounds[1:], dtype=np.float64)) - 1
    high_H[-1:] = np.maximum(high_H[-1:], edges_K.max(initial=0))
    # Lengths are whole, so a bar spans half a step below its shortest to half a step above its longest.
    bars = optional("plotly.graph_objects").Bar(
        x=(low_H + high_H) / 2,
        y=np.asarray(counts),
        width=high_H - low_H + 1,
        marker={"color": BLUE, "opacity": 0.75, "line": {"width": 0.5, "color": "#ffffff"}},
        customdata=np.stack([low_H, high_H], axis=1),
        hovertemplate="%{customdata[0]} to %{customdata[1]} steps: %{y:,} sequences<extra></extra>",
    )
    style = {"type": "line", "y0": 0, "y1": 1, "yref": "paper", "line": {"color": AMBER, "width": 1}}
    picture = plot(
        [bars],
        name="lengths",
        x={"title": "steps of a sequence", "rangemode": "tozero"},
        y={"title": "sequences"},
        height=300,
        shapes=[{"x0": edge, "x1": edge, **style} for edge in edges_K + 0.5],
        annotations=_edge_labels(edges_K, span=float(bounds[-1])),
        legend=False,
    )
    caption = f"{sum(counts):,} {whose}."
    if len(edges) == 1:
        caption += " The line is the edge of the only bucket."
    elif len(edges):
        caption += (
            f" Lines are the {len(edges)} bucket edges: a batch draws all its sequences from between two of them."
        )
    return figure(picture, title="Lengths and bucket edges", caption=caption, wide=True)


def rank_figures(epochs: Sequence[Event]) -> list[Html]:
    """Speed and waiting of each rank, epoch by epoch."""
    at = [event["epoch"] for event in epochs]

    def lines(key: str) -> list[Any]:
        return [
            line(
                at,
                [event[key][rank] / max(event["seconds"][rank], 1e-9) for event in epochs],
                name=f"rank {rank}",
                colour=RANK_COLOURS[rank % len(RANK_COLOURS)],
                markers=True,
            )
            for rank in range(len(epochs[0][key]))
        ]

    x, share = epoch_axis(len(epochs)), {"title": "share of time", "tickformat": ".0%"}
    return [
        figure(
            plot(lines("steps_real"), name="rank-speed", x=x, y={"title": "real steps per second"}),
            title="Speed of each rank",
            caption="Its own sequences, without padding.",
        ),
        figure(
            plot(lines("waited"), name="rank-wait", x=x, y=share),
            title="Waiting for the slowest",
            caption="Time between a rank's own gradients and their sum over all ranks.",
        ),
    ]


def batch_size_figure(record: RunRecord) -> Html:
    """The batch in force and the noise scale, along training."""
    decisions = record.all("batch")
    first = (record.started.get("settings") or {}).get("base_batch_size")
    start = record.last("probe").get("batch_size") or first or decisions[0]["batch_size"]
    end = max(float(decisions[-1]["update"]), float(record.updates.update_S[-1]) if len(record.updates) else 0.0)
    at = [0.0, *(float(event["update"]) for event in decisions), end]
    sizes = [start, *(event["batch_size"] for event in decisions), decisions[-1]["batch_size"]]
    traces = [line(at, sizes, name="batch size", colour=BLUE, shape="hv")]
    noise = [(event["update"], event["noise_scale"]) for event in decisions if (event["noise_scale"] or 0) > 0]
    if noise:
        traces.append(line(*zip(*noise, strict=True), name="noise scale", colour=AMBER, markers=True))
    back = [(event["update"], event["batch_size"]) for event in decisions if event["action"] == "roll-back"]
    if back:
        marker = {"color": TEAL, "size": 11, "symbol": "x"}
        traces.append(points(*zip(*back, strict=True), name="rolled back", marker=marker))
    heights = [float(value) for value in sizes] + [float(scale) for _, scale in noise]
    y = log_axis("sequences (log scale)", heights)
    caption = "A batch much smaller than the noise scale is mostly noise; one much larger wastes data."
    picture = plot(traces, name="batch-size", x={"title": "update"}, y=y)
    return figure(picture, title="Batch size and noise scale", caption=caption)


def probe_figure(entries: Sequence[Event]) -> Html:
    """Real time steps per second against the batch size, one line per length."""
    traces = []
    for number, length in enumerate(sorted({entry["length"] for entry in entries})):
        own = [entry for entry in entries if entry["length"] == length]
        sizes, speeds = zip(*((e["batch_size"], e["num_steps"] / e["seconds"]) for e in own), strict=True)
        colour = (BLUE, TEAL, AMBER, GREY)[number % 4]
        traces.append(line(sizes, speeds, name=f"{length} steps", colour=colour, markers=True))
    ticks = sorted({entry["batch_size"] for entry in entries})
    x = {
        "title": "batch size (log scale)",
        "type": "log",
        "tickvals": ticks,
        "ticktext": [f"{tick:,}" for tick in ticks],
    }
    caption = "Forward, backward and optimiser, the fastest of a few, on a copy of the model before training."
    picture = plot(traces, name="probe", x=x, y={"title": "real steps/s"})
    return figure(picture, title="Throughput of larger batches", caption=caption)


def residual_figure(record: RunRecord, epochs: Sequence[Event]) -> Html | None:
    """The residual of a solver along training; None if it is 0 throughout."""
    updates = record.updates
    shown_S = thin(np.flatnonzero(updates.residual_S > 0))
    traces, heights = [], updates.residual_S[shown_S].tolist()
    if heights:
        small = {"color": PALE, "size": 4}
        traces.append(points(updates.update_S[shown_S], updates.residual_S[shown_S], name="per update", marker=small))
    for key, name, colour in (("residual_mean", "mean per epoch", BLUE), ("residual_max", "largest", AMBER)):
        found = [(epoch["update"], epoch["solving"][key]) for epoch in epochs if epoch["solving"][key] > 0]
        heights += [value for _, value in found]
        if found:
            traces.append(line(*zip(*found, strict=True), name=name, colour=colour, markers=True))
    if not heights:
        return None
    y = log_axis("residual (log scale)", heights)
    if max(heights) / min(heights) > 1e3:
        # Over many powers of ten, a tick for each of some of them alone.
        y = {"title": y["title"], "type": "log", "exponentformat": "power", "dtick": 1}
    caption = "An epoch is drawn at its end; residuals of 0 are not drawn."
    picture = plot(traces, name="residual", x={"title": "update"}, y=y)
    return figure(picture, title="Residual along training", caption=caption, wide=True)


def running_mean(values_S: Numbers, *, window: int) -> Numbers:
    """The mean of each value and those before it, `window` in all or as many as there are; NaN is left out."""
    known_S = np.isfinite(values_S)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known_S, values_S, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known_S)])
    begins_S = np.maximum(np.arange(1, len(values_S) + 1) - window, 0)
    totals_S, nums_S = sums[1:] - sums[begins_S], counts[1:] - counts[begins_S]
    return np.where(nums_S > 0, totals_S / np.maximum(nums_S, 1), np.nan)


def thin(places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """All places, or evenly spaced ones when they are more than a page can take."""
    count = len(places)
    return places[np.unique(np.linspace(0, count - 1, min(count, MAX_POINTS)).round().astype(np.int64))]


def _caption(text: str, drawn: npt.NDArray[np.int64], count: int) -> str:
    thinned = f"{len(drawn):,} of {count:,} updates are drawn, evenly spaced; means are over all."
    return " ".join(filter(None, (text, thinned if len(drawn) < count else "")))


def _number_buckets(record: RunRecord, drawn: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The number of each drawn update's bucket, from 1; all 1 when the edges are not known."""
    length_S = record.updates.length_S[drawn].astype(np.int64)
    return bucket_of(length_S, np.array(record.edges, dtype=np.int64)) + 1


def _bucket_marker(bucket_S: npt.NDArray[np.int64], *, size: int) -> dict[str, Any]:
    return {
        "color": bucket_S,
        "colorscale": BY_BUCKET,
        "cmin": 1,
        "cmax": max(2, int(bucket_S.max(initial=1))),
        "size": size,
        "opacity": 0.75,
        "line": {"width": 0, "color": GREY},
    }


def _edge_labels(edges_K: Numbers, *, span: float) -> list[dict[str, Any]]:
    """The edges as numbers above their lines, without those that would run into their neighbour."""
    labels: list[dict[str, Any]] = []
    style = {"y": 1, "yref": "paper", "yanchor": "bottom", "showarrow": False, "font": {"size": 11, "color": "#8a5a1c"}}
    free_from = -np.inf
    for edge in edges_K[::-1]:
        if -edge >= free_from:
            labels.append({"x": edge + 0.5, "text": f"{edge:,.0f}", **style})
            free_from = -edge + span / (2 * MAX_EDGE_LABELS)
    return labels
