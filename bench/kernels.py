"""`python -m bench kernels`: forward and backward passes of our layers against torch.nn, JAX and a Python loop.

Shape legend: T steps, B sequences, F features of the input, H hidden units.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, cast

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from bench import gpu_kernels
from bench.contenders import (
    JAX,
    Batch,
    Contender,
    Forward,
    JaxContender,
    Net,
    Shape,
    TorchContender,
    draw_batch,
    draw_cell,
    loop_contender,
    missing_peers,
    our_layer,
    torch_contender,
    torch_layer,
)
from bench.harness import Count, Report, TimedSettings, bench, chosen_parts, ratio_of
from stretto.cells import Cell
from stretto.nn import RNN
from stretto.timing import check_equal, time_interleaved, torch_threads

PARTS: Final = ("shapes", "bidirectional", "stack", "ragged", "hidden", "threads")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelsSettings(TimedSettings):
    """Compare forward and backward passes of our layers with torch.nn, JAX and a Python loop.

    Attributes:
        only: Parts to run, separated by blanks or commas: shapes, bidirectional, stack, ragged, hidden, threads;
            all of them if left out.
        thread_counts: Numbers of threads that the part "threads" compares.
        device: "cuda" runs kernels on a GPU against cuDNN, CUDA graphs and a Python loop; "interpreter" the same, tiny,
            on the CPU. Both leave out the parts.
    """

    device: Literal["cpu", "cuda", "interpreter"] = "cpu"
    only: tuple[str, ...] = ()
    thread_counts: tuple[Count, ...] = (1, 2)


TINY: Final = Shape(6, 2, 4, 8)
NETS: Final[tuple[Net, ...]] = ("GRU", "LayerNormLSTM", "LSTM")
TORCH_NETS: Final[tuple[Net, ...]] = ("GRU", "LSTM")


# The ratio to reach at each shape, by net and peer.
GOALS: Final = (("GRU", "nn.GRU"), ("GRU", JAX), ("LayerNormLSTM", "Python loop"), ("LSTM", "nn.LSTM"))
SHAPES: Final[tuple[tuple[Shape, tuple[float, ...]], ...]] = (
    (Shape(10_000, 1, 8, 32), (150, 3, 150, 2)),
    (Shape(2000, 1, 32, 64), (70, 3, 80, 2)),
    (Shape(2000, 1, 32, 256), (12, 2.5, 20, 1.2)),
    (Shape(500, 16, 32, 128), (5, 3, 6, 1.3)),
    (Shape(200, 64, 64, 256), (1.5, 1.5, 2, 1)),
)
# Their weights do not fit into one core's own cache.
LARGE_SHAPES: Final = tuple(
    (Shape(steps, batch, 64, size), ()) for batch, steps in ((1, 200), (32, 50)) for size in (512, 1024)
)
THREADED_SHAPES: Final = tuple((shape, ()) for shape, _ in SHAPES[2:])
RAGGED_SHAPES: Final = tuple(shape for shape, _ in SHAPES[3:])
BIDIRECTIONAL_SHAPE: Final = Shape(1000, 1, 32, 128)
STACK_SHAPE: Final = Shape(2000, 1, 32, 128)
STACK_LAYERS: Final = 3
SHORTEST: Final = 0.1

COLUMNS: Final = (
    *("net", "T, B, F, H", "threads", "peer", "us per step", "ours ms", "peer ms"),
    *("ratio", "goal", "met", "ratio of medians", "error"),
)
CAPTION: Final = (
    "ratio: the peer's minimum time over ours, of one interleaved run (A, B, A, B, ...). us per step: ours, one step "
    "of all sequences. error: largest difference of outputs and gradients over the largest value, checked before the "
    "clock."
)
CAPTION_OF_PEER: Final = {
    JAX: "JAX scan: jit of value_and_grad, the input projection hoisted by hand, the faster of unroll 1 and 8. It "
    "uses every processor, whatever --threads says.",
    "Python loop": "LayerNormLSTM: its recurrent gain starts at 0.3; with 1 it is chaotic, and no two implementations "
    "agree.",
}
Row = tuple[str | int | float | bool | None, ...]


@bench("kernels", title="Kernels against torch.nn, JAX and a Python loop")
def run(settings: KernelsSettings, report: Report) -> None:
    """Run the parts that were asked for."""
    if settings.device != "cpu":
        gpu_kernels.run(settings.device, report, settings.timing)
        return
    missing = missing_peers()
    for what, why in missing.items():
        report.skip(what, why)
    parts: dict[str, Callable[[], None]] = {
        "shapes": lambda: _compare_layers(
            *("Forward and backward, with the gradients of all weights", NETS, SHAPES, settings, report),
            with_jax=JAX not in missing,
        ),
        "bidirectional": lambda: _compare_bidirectional(settings, report),
        "stack": lambda: _compare_stack(settings, report),
        "ragged": lambda: _compare_ragged(settings, report),
        "hidden": lambda: _compare_layers("Large layers", TORCH_NETS, LARGE_SHAPES, settings, report),
        "threads": lambda: _compare_layers(
            "Threads", TORCH_NETS, THREADED_SHAPES, settings, report, thread_counts=settings.thread_counts
        ),
    }
    for part in chosen_parts(settings.only, PARTS):
        parts[part]()


def _compare_layers(
    title: str,
    nets: Sequence[Net],
    shapes: Sequence[tuple[Shape, tuple[float, ...]]],
    settings: KernelsSettings,
    report: Report,
    *,
    with_jax: bool = False,
    thread_counts: Sequence[int] = (),
) -> None:
    """Each net at each shape; several numbers of threads are all in one interleaved run."""
    rows: list[Row] = []
    for net in nets:
        for shape, ratios in ((TINY, ()),) if settings.quick else shapes:
            goals = {peer: ratio for (of, peer), ratio in zip(GOALS, ratios, strict=False) if of == net}
            contenders = _contenders(net, shape, report, with_jax=with_jax)
            rows += _compare(
                *contenders, settings, report, net=net, shape=shape, goals=goals, thread_counts=thread_counts
            )
    _add_table(title, rows, report)


def _compare_bidirectional(settings: KernelsSettings, report: Report) -> None:
    shape = TINY if settings.quick else BIDIRECTIONAL_SHAPE
    rnn = _gru(shape, num_layers=2, bidirectional=True)
    batch = draw_batch(shape, output_size=2 * shape.hidden_size)
    peer = torch_contender(torch_layer(_cells(rnn), "GRU", shape, directions=2), batch=batch)
    net = "2-layer BiGRU"
    _note_fallback(net, rnn, report)
    rows = _compare(our_layer(rnn, batch=batch), [peer], settings, report, net=net, shape=shape)
    _add_table("Both directions in two layers", rows, report)


def _compare_stack(settings: KernelsSettings, report: Report) -> None:
    """Three layers, scheduled as a wavefront where that pays, against the same layers one after another."""
    shape = dataclasses.replace(TINY, num_steps=64, batch=1) if settings.quick else STACK_SHAPE
    rnn = _gru(shape, num_layers=STACK_LAYERS, bidirectional=False)
    batch = draw_batch(shape)
    # Layers of their own: each has to wait for all steps of the one below.
    layers = nn.ModuleList(RNN(cell, batch_first=False) for cell in rnn.cells)

    def layer_by_layer(x_TBF: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x_TBF = layer(x_TBF)[0]
        return x_TBF

    peers = [
        TorchContender("layer by layer", forward=layer_by_layer, weights=rnn, batch=batch),
        torch_contender(torch_layer(_cells(rnn), "GRU", shape), batch=batch),
    ]
    net = f"{STACK_LAYERS}-layer GRU"
    _note_fallback(net, rnn, report)
    rows = _compare(our_layer(rnn, batch=batch), peers, settings, report, net=net, shape=shape)
    _add_table("Three layers", rows, report)


def _contenders(net: Net, shape: Shape, report: Report, *, with_jax: bool = False) -> tuple[Contender, list[Contender]]:
    """Our layer of one net and its peers: torch's own layer where there is one, else the Python loop."""
    cell, batch = draw_cell(net, shape), draw_batch(shape)
    rnn = RNN(cell, batch_first=False)
    _note_fallback(net, rnn, report)
    peers: list[Contender] = []
    if net == "LayerNormLSTM":
        peers.append(loop_contender(cell, batch=batch))
    else:
        peers.append(torch_contender(torch_layer([cell], net, shape), batch=batch))
    if with_jax and net == "GRU":
        peers.append(JaxContender(cell, batch=batch))
    return our_layer(rnn, batch=batch), peers


def _compare(
    ours: Contender,
    peers: Sequence[Contender],
    settings: KernelsSettings,
    report: Report,
    *,
    net: str,
    shape: Shape,
    goals: Mapping[str, float] | None = None,
    thread_counts: Sequence[int] = (),
) -> list[Row]:
    """Check and time the contenders of one shape; a row for each peer and number of threads."""
    report.progress(f"{net}, {shape}")
    errors: dict[tuple[int, str], float] = {}
    tasks: dict[str, Callable[[], object]] = {}
    with torch_threads(None) as current:
        counts = tuple(thread_counts) or (current,)
        for count in counts:
            torch.set_num_threads(count)
            results = ours.results()
            for peer in peers:
                errors[count, peer.name] = check_equal(
                    results, peer.results(), name=f"our {net}", peer=peer.name, where=str(shape)
                )
            tasks |= {f"{one.name} {count}": _with_threads(one, count) for one in (ours, *peers)}
        timings = time_interleaved(tasks, budget=settings.timing)
    rows: list[Row] = []
    for count in counts:
        own = timings[f"{ours.name} {count}"].minimum
        for peer in peers:
            key = f"{peer.name} {count}"
            ratio, of_medians = ratio_of(timings, key, f"{ours.name} {count}")
            goal = (goals or {}).get(peer.name)
            met = None if goal is None else ratio >= goal
            rows.append(
                (
                    *(net, shape.sizes, count, peer.name, 1e6 * own / shape.num_steps, 1e3 * own),
                    *(1e3 * timings[key].minimum, ratio, goal, met, of_medians, errors[count, peer.name]),
                )
            )
    return rows


def _with_threads(contender: Contender, count: int) -> Callable[[], None]:
    def run() -> None:
        torch.set_num_threads(count)
        contender.run()

    return run


def _add_table(title: str, rows: Sequence[Row], report: Report) -> None:
    peers = {row[COLUMNS.index("peer")] for row in rows}
    notes = [note for peer, note in CAPTION_OF_PEER.items() if peer in peers]
    report.table(title=title, columns=COLUMNS, rows=rows, caption="\n".join([CAPTION, *notes]))


def _note_fallback(net: str, rnn: RNN, report: Report) -> None:
    explanation = rnn.explain()
    if explanation.backend != "cpp":
        report.note(f"{net} ran without compiled code, {explanation.backend}: {explanation.reason}")


def _gru(shape: Shape, *, num_layers: int, bidirectional: bool) -> RNN:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return RNN(draw_cell("GRU", shape), num_layers, bidirectional, batch_first=False)


def _cells(rnn: RNN) -> list[Cell]:
    return [cast("Cell", cell) for cell in rnn.cells]


# Batches of unequal lengths ------------------------------------------------------------------------------------------


def draw_lengths(shape: Shape) -> torch.Tensor:
    """Lengths uniform in [10 %, 100 %] of T, in no order; one of them is T."""
    shortest = max(1, round(SHORTEST * shape.num_steps))
    generator = torch.Generator().manual_seed(0)
    lengths_B = torch.randint(shortest, shape.num_steps + 1, (shape.batch,), generator=generator)
    lengths_B[shape.batch // 2] = shape.num_steps
    return lengths_B


def _compare_ragged(settings: KernelsSettings, report: Report) -> None:
    """The cost of a real step in a ragged batch, against one in a batch without padding."""
    rows: list[Row] = []
    for shape in (TINY,) if settings.quick else RAGGED_SHAPES:
        report.progress(f"ragged: {shape}")
        rows += _ragged_rows(shape, settings)
    report.table(
        title="LSTM on batches of unequal lengths: uniform in [10 %, 100 %] of T",
        columns=(
            *("contender", "T, B, F, H", "real steps", "padded steps", "ms", "us per real step"),
            *("over full", "median ms", "error"),
        ),
        rows=rows,
        caption="over full: cost of a real step over one of our batch without padding; at 1, padding is free.",
    )


def _ragged_rows(shape: Shape, settings: KernelsSettings) -> list[Row]:
    lengths_B, full = draw_lengths(shape), draw_batch(shape)
    real_TB = torch.arange(shape.num_steps)[:, None] < lengths_B[None, :]
    # Outputs after a sequence's end have no weight in the loss of any contender.
    ragged = Batch(x_TBF=full.x_TBF, weight_TBO=full.weight_TBO * real_TB[:, :, None])
    cell = draw_cell("LSTM", shape)
    rnn, layer = RNN(cell, batch_first=False), torch_layer([cell], "LSTM", shape)
    ours_full, ours_ragged = "stretto, all full", "stretto, ragged"
    padded, packed = "nn.LSTM, padded", "nn.LSTM, packed"
    contenders: dict[str, Contender] = {
        ours_full: our_layer(rnn, batch=full),
        ours_ragged: our_layer(rnn, batch=ragged, lengths=lengths_B),
        padded: torch_contender(layer, batch=ragged),
        packed: TorchContender(packed, forward=_packed(layer, lengths_B), weights=layer, batch=ragged),
    }
    references = {ours_full: torch_contender(layer, batch=full), ours_ragged: contenders[packed]}
    errors = {
        name: check_equal(
            contenders[name].results(), reference.results(), name=name, peer=reference.name, where=str(shape)
        )
        for name, reference in references.items()
    }
    contenders[padded].run()
    timings = time_interleaved({name: one.run for name, one in contenders.items()}, budget=settings.timing)
    num_padded, num_real = shape.num_steps * shape.batch, int(lengths_B.sum())
    per_full = timings[ours_full].minimum / num_padded
    rows: list[Row] = []
    for name, timing in timings.items():
        real = num_padded if name == ours_full else num_real
        per_step = timing.minimum / real
        rows.append(
            (
                *(name, shape.sizes, real, num_padded, 1e3 * timing.minimum, 1e6 * per_step),
                *(per_step / per_full, 1e3 * timing.median, errors.get(name)),
            )
        )
    return rows


def _packed(layer: nn.RNNBase, lengths_B: torch.Tensor) -> Forward:
    def forward(x_TBF: torch.Tensor) -> torch.Tensor:
        y, _ = layer(pack_padded_sequence(x_TBF, lengths_B, enforce_sorted=False))
        y_TBO, _ = pad_packed_sequence(y, total_length=len(x_TBF))
        return y_TBO

    return forward
