"""The graph experiment: the speed-up from analysing a recurrent net's graph, with one stream and with many.

After Hwang and Sung, "Single stream parallelization of generalized LSTM-like RNNs on a GPU" (ICASSP 2015): only what
lies on a cycle of the graph has to run sequentially; everything else, weight gradients included, is computed for a
whole window at once. The baseline computes one step at a time. Here the loops that remain are also compiled, which the
paper did not do.

Shape legend: T steps of a window, B streams, F features of the input.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, final

import torch
from pydantic import Field

from bench.contenders import Forward, Shape, TorchContender, draw_batch, python_loop
from bench.figure import AMBER, BLUE, TEAL, Line, Panel, draw_figure
from bench.harness import Report, Settings
from experiments.registry import experiment, to_csv, to_dict
from stretto.errors import StrettoError
from stretto.graph import Graph, delayed_graph, lstm_graph, peephole_lstm_graph, two_loop_graph
from stretto.kernels import NoCompiler, find_compiler
from stretto.nn import RNN
from stretto.timing import TimingBudget, check_equal, time_interleaved
from stretto.training import Count

NETWORKS: Final[Mapping[str, Callable[[int, int], Graph]]] = {
    "LSTM": lstm_graph,
    "peephole LSTM": peephole_lstm_graph,
    "delays": delayed_graph,
    "two loops": two_loop_graph,
}
LOOP: Final = "step by step"
ANALYSIS: Final = "graph analysis"
FUSION: Final = "analysis and fusion"
VARIANTS: Final = {
    LOOP: "the cell called in a Python loop, gradients by autograd",
    ANALYSIS: "what is off the cycles runs for the whole window at once, forward and backward; backend='eager'",
    FUSION: "the same, and the loops that remain are compiled; backend='cpp'",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphSettings(Settings):
    """Settings of `python -m experiments graph`.

    Attributes:
        out: The folder for the page, the figure and the JSON and CSV files.
        streams: Numbers of parallel streams to compare; 1 is the baseline's and always included.
        hidden_size: Units of every layer.
        input_size: Features of the input.
        window: Time steps of a training step.
        loop_window: Time steps of a training step of the baseline; its time per step hardly depends on them.
        rounds: How often every contender is timed; the fastest counts.
        budget: Seconds per network after which no new round begins once there are three.
    """

    out: Path = Path("runs/reproduce-graph")
    streams: tuple[Annotated[int, Field(ge=1)], ...] = (1, 2, 4, 8, 16, 32, 64)
    hidden_size: Count = 256
    input_size: Count = 64
    window: Count = 256
    loop_window: Count = 32
    rounds: Count = 5
    budget: Annotated[float, Field(gt=0)] = 45.0

    def tiny(self) -> "GraphSettings":
        """The same for a smoke test."""
        return dataclasses.replace(self, streams=(1, 2), hidden_size=8, input_size=4, window=8, loop_window=6, rounds=1)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GraphRow:
    """One way to train one network with some streams."""

    network: str
    variant: str
    streams: int  # sequences side by side
    window: int  # time steps of each in a training step
    min_seconds: float  # of forward and backward, with the gradients of all weights
    median_seconds: float
    rounds: int
    steps_per_second: float  # time steps of all streams, by the fastest round
    speed_up: float  # that over the baseline's with 1 stream, from the same interleaved run
    over_loop: float  # that over the baseline's with as many streams


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GraphResult:
    """The experiment."""

    rows: tuple[GraphRow, ...]  # by network, number of streams and variant, in this order
    plans: dict[str, dict[str, int]]  # what the analysis made of each network: numbers of operators at each stage
    errors: dict[str, float]  # largest relative difference of outputs and gradients between variants
    threads: int
    settings: dict[str, Any]


def reproduce_graph(settings: GraphSettings, *, progress: Callable[[str], None] = lambda _: None) -> GraphResult:
    """Run the experiment.

    Raises:
        StrettoError: If variants do not compute the same, or nothing can be compiled.
    """
    try:
        find_compiler()
    except NoCompiler as reason:
        raise StrettoError(
            f"the loops cannot be compiled: {reason}", fix="Install g++ or name a compiler in CXX."
        ) from reason
    sizes = settings.tiny() if settings.quick else settings
    rows: list[GraphRow] = []
    plans: dict[str, dict[str, int]] = {}
    errors: dict[str, float] = {}
    for network in NETWORKS:
        comparison = _Comparison(network, sizes)
        progress(f"{network}: comparing gradients")
        errors[network] = comparison.check()
        plans[network] = comparison.plan
        progress(f"{network}: timing")
        rows += comparison.time()
    return GraphResult(
        rows=tuple(rows), plans=plans, errors=errors, threads=torch.get_num_threads(), settings=to_dict(sizes)
    )


@final
class _Comparison:
    """One network, trained in every variant with every number of streams."""

    def __init__(self, network: str, settings: GraphSettings) -> None:
        self._network, self._settings = network, settings
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self._cell = NETWORKS[network](settings.input_size, settings.hidden_size).cell()
        eager = RNN(self._cell, batch_first=False, backend="eager")
        compiled = RNN(self._cell, batch_first=False, backend="cpp")
        self.plan = dict(compiled.explain(settings.input_size).counts)
        self._forward: dict[str, Forward] = {
            LOOP: python_loop(self._cell),
            ANALYSIS: lambda x_TBF: eager(x_TBF)[0],
            FUSION: lambda x_TBF: compiled(x_TBF)[0],
        }
        self._streams = sorted({1, *settings.streams})

    def check(self) -> float:
        """Refuse variants whose outputs or gradients differ; returns the largest relative difference.

        The loop is compared on its own window, the others on the whole one.
        """
        short, whole = self._settings.loop_window, self._settings.window
        pairs = ((LOOP, ANALYSIS, short), (LOOP, FUSION, short), (ANALYSIS, FUSION, whole))
        return max(
            check_equal(
                self._contender(variant, streams=streams, window=window).results(),
                self._contender(peer, streams=streams, window=window).results(),
                name=f"{self._network} by {variant}",
                peer=peer,
                where=f"{window} steps of {streams} streams",
            )
            for streams in self._streams
            for peer, variant, window in pairs
        )

    def time(self) -> list[GraphRow]:
        """Time all variants with all numbers of streams in one interleaved run."""
        keys = [(variant, streams) for streams in self._streams for variant in VARIANTS]
        tasks = {
            f"{variant} {streams}": self._contender(variant, streams=streams, window=self._window(variant)).run
            for variant, streams in keys
        }
        budget = TimingBudget(rounds=self._settings.rounds, seconds=self._settings.budget)
        timings = dict(zip(keys, time_interleaved(tasks, budget=budget).values(), strict=True))
        speeds = {key: key[1] * self._window(key[0]) / timings[key].minimum for key in keys}
        return [
            GraphRow(
                network=self._network,
                variant=variant,
                streams=streams,
                window=self._window(variant),
                min_seconds=timings[variant, streams].minimum,
                median_seconds=timings[variant, streams].median,
                rounds=timings[variant, streams].rounds,
                steps_per_second=speeds[variant, streams],
                speed_up=speeds[variant, streams] / speeds[LOOP, 1],
                over_loop=speeds[variant, streams] / speeds[LOOP, streams],
            )
            for variant, streams in keys
        ]

    def _window(self, variant: str) -> int:
        return self._settings.loop_window if variant == LOOP else self._settings.window

    def _contender(self, variant: str, *, streams: int, window: int) -> TorchContender:
        shape = Shape(
            num_steps=window,
            batch=streams,
            input_size=self._settings.input_size,
            hidden_size=self._settings.hidden_size,
        )
        return TorchContender(variant, forward=self._forward[variant], weights=self._cell, batch=draw_batch(shape))


STAGES: Final = ("loops", "once", "hoisted", "loop", "sunk", "deferred")
COLOURS: Final = {LOOP: AMBER, ANALYSIS: TEAL, FUSION: BLUE}


@experiment("graph", title="Parallelism from the graph")
def run(settings: GraphSettings, report: Report) -> None:
    """Parallelism found in the graph, with one stream and many (Hwang and Sung 2015)."""
    show(reproduce_graph(settings, progress=report.progress), report)


def show(result: GraphResult, report: Report) -> None:
    """Write tables and figure into a report."""
    report.result = to_dict(result)
    report.attach("csv", to_csv(result.rows))
    sizes = result.settings
    by_streams: dict[tuple[str, int], dict[str, GraphRow]] = {}
    for row in result.rows:
        by_streams.setdefault((row.network, row.streams), {})[row.variant] = row
    report.table(
        title=f"Training throughput: {sizes['hidden_size']} units per layer, {sizes['input_size']} inputs, windows "
        f"of {sizes['window']} steps, {result.threads} threads",
        columns=("network", "streams", *VARIANTS, "analysis x", "fusion x", "over loop"),
        rows=[
            (
                network,
                streams,
                *(rows[variant].steps_per_second for variant in VARIANTS),
                rows[ANALYSIS].speed_up,
                rows[FUSION].speed_up,
                rows[FUSION].over_loop,
            )
            for (network, streams), rows in by_streams.items()
        ],
        caption="Time steps of all streams per second, by the fastest round. x: over step by step with 1 stream, "
        "from one interleaved run. over loop: fusion over step by step with as many streams. Step by step runs "
        f"windows of {sizes['loop_window']} steps: its time per step hardly depends on their number. A training "
        "step is forward and backward with the gradients of all weights, from a state of zeros.",
    )
    report.table(
        title="What the analysis found",
        columns=("network", *STAGES, "error"),
        rows=[
            (network, *(plan.get(stage, 0) for stage in STAGES), f"{result.errors[network]:.0e}")
            for network, plan in result.plans.items()
        ],
        caption="Operators at each stage. error: the largest relative difference of outputs and gradients between "
        "variants, checked before the clock ran.",
    )
    for variant, meaning in VARIANTS.items():
        report.note(f"{variant}: {meaning}")
    networks = list(result.plans)
    panels = [
        _panel(result, network, value, title)
        for value, title in (("steps_per_second", "time steps per second"), ("speed_up", "times the baseline"))
        for network in networks
    ]
    throughput, speed_up = panels[: len(networks)], panels[len(networks) :]
    report.plot(draw_figure(throughput), title="Throughput", caption="Both axes logarithmic.")
    report.plot(draw_figure(speed_up), title="Speed-up", caption="Over step by step with one stream.")


def _panel(result: GraphResult, network: str, value: str, title: str) -> Panel:
    lines = []
    for variant, colour in COLOURS.items():
        rows = [row for row in result.rows if row.network == network and row.variant == variant]
        values = [getattr(row, value) for row in rows]
        lines.append(Line(name=variant, colour=colour, xs=[row.streams for row in rows], ys=values))
    return Panel(title=network, x="streams", y=title, lines=lines, x_scale="log", y_scale="log")
