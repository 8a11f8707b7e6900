"""The plots of one run.

Shape legend: S steps that were recorded.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from stretto.batching import bucket_of
from stretto.extras import optional
from stretto.report.page import Html, escaped, figure, sentence
from stretto.report.plot import AMBER, BLUE, BY_BUCKET, GREY, PALE, TEAL, log_axis, plot
from stretto.report.record import Numbers, RunRecord

MOST_POINTS = 3000
LEAST_WINDOW = 5
SLOW = 4.0
METRIC_NAMES: Final = {"cer": "character error rate"}


def metric_name(metric: str) -> str:
    """A metric as a person calls it; what follows an underscore says how it was measured."""
    name, _, how = metric.partition("_")
    return ", ".join(filter(None, (METRIC_NAMES.get(name, name), how)))


def is_share(metric: str) -> bool:
    """Whether a metric is a share, to be shown in per cent."""
    return metric.partition("_")[0] in ("cer", "accuracy", "padding")


def loss_figure(record: RunRecord) -> Html:
    """Training loss a step and an epoch, and validation loss."""
    steps, draw = record.steps, optional("plotly.graph_objects").Scatter
    drawn = _drawn(steps.step_S)
    window = max(LEAST_WINDOW, len(steps) // 50)
    traces = []
    if len(steps):
        traces = [
            draw(x=steps.step_S[drawn], y=steps.loss_S[drawn], name="train, a step", mode="lines", line=_line(PALE, 1)),
            draw(
                x=steps.step_S[drawn],
                y=running_mean(steps.loss_S, window=window)[drawn],
                name=f"train, mean of {window} steps",
                mode="lines",
                line=_line(BLUE, 2),
            ),
        ]
    ends = _of_epochs(record, "step")
    middles = (ends + np.concatenate([[0.0], ends[:-1]])) / 2 if len(ends) else ends
    epochs = (("train, mean of an epoch", "train_loss", TEAL, middles), ("validation", "valid_loss", AMBER, ends))
    for name, key, colour, at in epochs:
        values = _of_epochs(record, key)
        if np.isfinite(values).any():
            traces.append(draw(x=at, y=values, name=name, mode="lines+markers", line=_line(colour, 2)))
    shown = np.concatenate([steps.loss_S, _of_epochs(record, "train_loss"), _of_epochs(record, "valid_loss")])
    shown = shown[np.isfinite(shown)]
    log = len(shown) > 0 and shown.min() > 0 and shown.max() / shown.min() > 20
    picture = plot(
        traces,
        name="loss",
        x={"title": "step"},
        y=log_axis("loss (log scale)", shown.tolist()) if log else {"title": "loss"},
        height=360,
    )
    text = "The mean of an epoch is drawn at its middle, validation at its end." if record.epochs else ""
    return figure(picture, title="Loss", caption=_caption(text, drawn, len(steps)), wide=True)


def metric_figure(record: RunRecord) -> Html:
    """The task's metric on validation data, an epoch a point."""
    name = metric_name(record.metric)
    trace = optional("plotly.graph_objects").Scatter(
        x=_of_epochs(record, "epoch"), y=_of_epochs(record, "value"), mode="lines+markers", line=_line(AMBER, 2)
    )
    whole = {"dtick": 1} if len(record.epochs) <= 12 else {}
    picture = plot(
        [trace],
        name="metric",
        x={"title": "epoch"} | whole,
        y={"title": escaped(name), "rangemode": "tozero", "tickformat": ".0%" if is_share(record.metric) else ""},
        legend=False,
    )
    return figure(picture, title=sentence(name), caption="On the validation sequences, after each epoch.")


def padding_figure(record: RunRecord) -> Html:
    """The share of slots that is padding, step by step."""
    steps, draw = record.steps, optional("plotly.graph_objects").Scatter
    drawn = _drawn(steps.step_S)
    window = max(LEAST_WINDOW, len(steps) // 50)
    traces = [
        draw(
            x=steps.step_S[drawn],
            y=steps.padding_by_step[drawn],
            name="a step",
            mode="markers",
            marker={"color": PALE, "size": 3},
        ),
        draw(
            x=steps.step_S[drawn],
            y=(1 - running_mean(steps.real_S, window=window) / running_mean(steps.slots_S, window=window))[drawn],
            name=f"{window} steps together",
            mode="lines",
            line=_line(BLUE, 2),
        ),
    ]
    shuffled = record.started.get("shuffled_padding")
    if shuffled is not None:
        ends = [steps.step_S[0], steps.step_S[-1]]
        traces.append(
            draw(
                x=ends, y=[shuffled] * 2, name="shuffled batches", mode="lines", line=_line(AMBER, 2) | {"dash": "dash"}
            )
        )
    picture = plot(
        traces,
        name="padding",
        x={"title": "step"},
        y={"title": "padding", "tickformat": ".0%", "rangemode": "tozero"},
    )
    return figure(
        picture,
        title="Padding over time",
        caption=_caption("The share of each batch that is padding.", drawn, len(steps)),
    )


def shapes_figure(record: RunRecord) -> Html:
    """The shapes of the batches: sequences against padded length."""
    steps = record.steps
    drawn = _drawn(steps.step_S)
    bucket_S = _bucket(record, drawn)
    trace = optional("plotly.graph_objects").Scatter(
        x=steps.length_S[drawn],
        y=steps.rows_S[drawn],
        mode="markers",
        marker=_by_bucket(bucket_S, size=6),
        customdata=np.stack([steps.slots_S[drawn], bucket_S], axis=1),
        hovertemplate="%{y} sequences of %{x} steps: %{customdata[0]:,} slots, bucket %{customdata[1]}<extra></extra>",
    )
    picture = plot(
        [trace],
        name="shapes",
        x={"title": "padded length in steps", "rangemode": "tozero"},
        y={"title": "sequences in the batch", "rangemode": "tozero"},
        legend=False,
    )
    text = "A point a step, coloured by bucket from the shortest sequences (light) to the longest (dark)."
    return figure(picture, title="Shapes of the batches", caption=_caption(text, drawn, len(steps)))


def time_figure(record: RunRecord) -> Html:
    """What a step takes against the slots of its batch."""
    steps = record.steps
    timed = np.flatnonzero(np.isfinite(steps.took_S))
    drawn = timed[_drawn(timed)]
    bucket_S = _bucket(record, drawn)
    took = steps.took_S[timed]
    usual = took <= SLOW * np.quantile(took, 0.9)
    above = int((~usual).sum())
    trace = optional("plotly.graph_objects").Scatter(
        x=steps.slots_S[drawn],
        y=steps.took_S[drawn] * 1000,
        mode="markers",
        marker=_by_bucket(bucket_S, size=5),
        customdata=np.stack([steps.rows_S[drawn], steps.length_S[drawn]], axis=1),
        hovertemplate="%{y:.1f} ms for %{customdata[0]} sequences of %{customdata[1]} steps<extra></extra>",
    )
    picture = plot(
        [trace],
        name="time",
        x={"title": "slots of the batch (sequences times padded length)", "rangemode": "tozero"},
        y={"title": "milliseconds a step", "range": [0, 1150 * float(took[usual].max())]},
        legend=False,
    )
    text = "From one recorded step to the next where nothing but training lay between; colours are the buckets."
    if above:
        text += f" {above:,} slower {'step lies' if above == 1 else 'steps lie'} above the frame."
    return figure(picture, title="Time of a step", caption=_caption(text, drawn, len(timed)))


def running_mean(values_S: Numbers, *, window: int) -> Numbers:
    """The mean of each value and those before it, `window` in all or as many as there are; NaN counts for nothing."""
    known_S = np.isfinite(values_S)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known_S, values_S, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known_S)])
    begins_S = np.maximum(np.arange(1, len(values_S) + 1) - window, 0)
    totals_S, nums_S = sums[1:] - sums[begins_S], counts[1:] - counts[begins_S]
    return np.where(nums_S > 0, totals_S / np.maximum(nums_S, 1), np.nan)


def _line(colour: str, width: int) -> dict[str, Any]:
    return {"color": colour, "width": width}


def _of_epochs(record: RunRecord, key: str) -> Numbers:
    values = [epoch.get(key) for epoch in record.epochs]
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _drawn(values_S: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """All steps, or evenly spaced ones when they are more than a page can take."""
    count = len(values_S)
    return np.unique(np.linspace(0, count - 1, min(count, MOST_POINTS)).round().astype(np.int64))


def _caption(text: str, drawn: npt.NDArray[np.int64], count: int) -> str:
    told = (
        f"{len(drawn):,} of {count:,} steps are drawn, evenly spaced; means are over all." if len(drawn) < count else ""
    )
    return " ".join(filter(None, (text, told)))


def _bucket(record: RunRecord, drawn: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The number of each drawn step's bucket, from 1; all 1 when the edges are not known."""
    length_S = record.steps.length_S[drawn].astype(np.int64)
    return bucket_of(length_S, np.array(record.edges, dtype=np.int64)) + 1


def _by_bucket(bucket_S: npt.NDArray[np.int64], *, size: int) -> dict[str, Any]:
    return {
        "color": bucket_S,
        "colorscale": BY_BUCKET,
        "cmin": 1,
        "cmax": max(2, int(bucket_S.max(initial=1))),
        "size": size,
        "opacity": 0.75,
        "line": {"width": 0, "color": GREY},
    }
