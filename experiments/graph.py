"""The graph experiment: what the analysis of a recurrent net's graph is worth, with one stream and with many.

After Hwang and Sung, "Single stream parallelization of generalized LSTM-like RNNs on a GPU" (ICASSP 2015): only what
lies on a cycle of the graph has to run step after step; all else, weight gradients among it, is computed for a whole
window at once. The baseline computes a step at a time. Here the loops that remain are also compiled, which the paper
did not do.

Shape legend: T steps of a window, B streams, F features of the input, H hidden units.
"""

import csv
import dataclasses
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, final

import torch
from pydantic import Field

from bench.interleaved import Pace, Timing, interleaved
from bench.kernel_gate import pass_gate
from bench.machine import Machine, machine_with
from bench.training_step import Forward, StepShape, TorchStep, drawn_batch, step_after_step
from stretto.errors import StrettoError
from stretto.files import write_text_atomically
from stretto.graph import Graph, GraphCell, delayed_graph, lstm_graph, peephole_lstm_graph, two_loop_graph
from stretto.kernels import NoCompiler, find_compiler
from stretto.nn import RNN
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
BASELINE: Final = (LOOP, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphSettings:
    """Settings of `stretto reproduce graph`.

    Attributes:
        out: The folder for the tables, the plot and the page.
        streams: Numbers of parallel streams to compare; 1 is the baseline's and always taken.
        hidden_size: Units of every layer.
        input_size: Features of the input.
        window: Steps of a training step.
        loop_window: Steps of a training step of the baseline; its time a step hardly depends on them.
        rounds: Turns of every contender; the least time counts.
        budget: Seconds a network after which no new round begins once there are three.
        quick: A tiny net, 1 and 2 streams and one round: shows that it works, and no more; its times mean nothing.
    """

    out: Path = Path("runs/reproduce-graph")
    streams: tuple[Annotated[int, Field(ge=1)], ...] = (1, 2, 4, 8, 16, 32, 64)
    hidden_size: Count = 256
    input_size: Count = 64
    window: Count = 256
    loop_window: Count = 32
    rounds: Count = 5
    budget: Annotated[float, Field(gt=0)] = 45.0
    quick: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GraphRow:
    """One way to train one network with some streams.

    Attributes:
        network: Which.
        variant: How.
        streams: Sequences side by side.
        window: Steps of each in a training step.
        timing: Of a training step, forward and backward with the gradients of all weights.
        steps_per_second: Real steps of all streams over the least time.
        speed_up: That over the baseline's with 1 stream, from the same interleaved run.
        over_loop: That over the baseline's with as many streams.
    """

    network: str
    variant: str
    streams: int
    window: int
    timing: Timing
    steps_per_second: float
    speed_up: float
    over_loop: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GraphResult:
    """The experiment.

    Attributes:
        rows: Every network, number of streams and variant, in this order.
        plans: What the analysis made of each network: numbers of operators at each place, loops and products.
        errors: Largest relative difference of outputs and gradients between the variants of each network.
        threads: torch's.
        machine: Where it ran.
        settings: As given.
    """

    rows: tuple[GraphRow, ...]
    plans: dict[str, dict[str, int]]
    errors: dict[str, float]
    threads: int
    machine: Machine
    settings: dict[str, Any]

    def to_json(self) -> str:
        """The content of `graph.json`."""
        return json.dumps(dataclasses.asdict(self), indent=2, allow_nan=False) + "\n"

    def to_csv(self) -> str:
        """The content of `graph.csv`: the rows."""
        stream = io.StringIO()
        table = csv.writer(stream, lineterminator="\n")
        names = [field.name for field in dataclasses.fields(GraphRow) if field.name != "timing"]
        table.writerow([*names, "least_seconds", "median_seconds", "rounds"])
        for row in self.rows:
            timing = (row.timing.least, row.timing.median, row.timing.rounds)
            table.writerow([*(getattr(row, name) for name in names), *timing])
        return stream.getvalue()


def reproduce_graph(settings: GraphSettings, *, tell: Callable[[str], None] | None = None) -> GraphResult:
    """Run the experiment and write `graph.json` and `graph.csv`.

    Args:
        settings: What to run.
        tell: If given, called with a line before each part.

    Raises:
        StrettoError: If variants do not compute the same, or nothing can be compiled.
    """
    try:
        find_compiler()
    except NoCompiler as reason:
        raise StrettoError(
            f"the loops cannot be compiled: {reason}", fix="Install g++ or name a compiler in CXX."
        ) from reason
    sizes = _tiny(settings) if settings.quick else settings
    tell = tell or (lambda _: None)
    rows: list[GraphRow] = []
    plans: dict[str, dict[str, int]] = {}
    errors: dict[str, float] = {}
    for network in NETWORKS:
        contender = _Contender(network, sizes)
        tell(f"{network}: comparing gradients")
        errors[network] = contender.compare()
        plans[network] = contender.plan
        tell(f"{network}: timing")
        rows += contender.rows()
    result = GraphResult(
        rows=tuple(rows),
        plans=plans,
        errors=errors,
        threads=torch.get_num_threads(),
        machine=machine_with(()),
        settings={key: str(v) if isinstance(v, Path) else v for key, v in dataclasses.asdict(sizes).items()},
    )
    write_text_atomically(settings.out / "graph.json", result.to_json())
    write_text_atomically(settings.out / "graph.csv", result.to_csv())
    return result


@final
class _Contender:
    """One network, trained every way with every number of streams."""

    def __init__(self, network: str, settings: GraphSettings) -> None:
        self._network, self._settings = network, settings
        self._cell = _drawn_cell(network, settings)
        layers = {
            ANALYSIS: RNN(self._cell, batch_first=False, backend="eager"),
            FUSION: RNN(self._cell, batch_first=False, backend="cpp"),
        }
        self.plan = dict(layers[FUSION].explain(settings.input_size).counts)
        self._forwards: dict[str, Forward] = {LOOP: step_after_step(self._cell)}
        self._forwards |= {variant: _outputs_of(layer) for variant, layer in layers.items()}
        self._streams = sorted({1, *settings.streams})

    def compare(self) -> float:
        """Stop unless all variants give the same; on the baseline's window, and without it on the whole one."""
        worst = 0.0
        short, whole = self._settings.loop_window, self._settings.window
        pairs = ((LOOP, ANALYSIS, short), (LOOP, FUSION, short), (ANALYSIS, FUSION, whole))
        for streams in self._streams:
            for one, other, window in pairs:
                error = pass_gate(
                    self._step(other, streams=streams, window=window).results(),
                    wanted=self._step(one, streams=streams, window=window).results(),
                    name=f"{self._network} by {other}",
                    peer=one,
                    where=f"{window} steps of {streams} streams",
                )
                worst = max(worst, error)
        return worst

    def rows(self) -> list[GraphRow]:
        """Time all of them in one interleaved run."""
        keys = [(variant, streams) for streams in self._streams for variant in self._forwards]
        steps = {_name(*key): self._step(key[0], streams=key[1], window=self._window(key[0])).run for key in keys}
        timings = interleaved(steps, pace=Pace(rounds=self._settings.rounds, budget=self._settings.budget))
        speeds = {key: key[1] * self._window(key[0]) / timings[_name(*key)].least for key in keys}
        return [
            GraphRow(
                network=self._network,
                variant=variant,
                streams=streams,
                window=self._window(variant),
                timing=timings[_name(variant, streams)],
                steps_per_second=speeds[variant, streams],
                speed_up=speeds[variant, streams] / speeds[BASELINE],
                over_loop=speeds[variant, streams] / speeds[LOOP, streams],
            )
            for variant, streams in keys
        ]

    def _window(self, variant: str) -> int:
        return self._settings.loop_window if variant == LOOP else self._settings.window

    def _step(self, variant: str, *, streams: int, window: int) -> TorchStep:
        shape = StepShape(
            num_steps=window,
            batch=streams,
            input_size=self._settings.input_size,
            hidden_size=self._settings.hidden_size,
        )
        weights = dict(self._cell.named_parameters())
        return TorchStep(variant, forward=self._forwards[variant], weights=weights, batch=drawn_batch(shape))


def _drawn_cell(network: str, settings: GraphSettings) -> GraphCell:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return NETWORKS[network](settings.input_size, settings.hidden_size).cell()


def _outputs_of(layer: RNN) -> Forward:
    def forward(x_TBF: torch.Tensor) -> torch.Tensor:
        y_TBH: torch.Tensor = layer(x_TBF)[0]
        return y_TBH

    return forward


def _name(variant: str, streams: int) -> str:
    return f"{variant}, {streams}"


def _tiny(settings: GraphSettings) -> GraphSettings:
    return dataclasses.replace(settings, streams=(1, 2), hidden_size=8, input_size=4, window=8, loop_window=6, rounds=1)
