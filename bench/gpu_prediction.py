"""`python -m bench gpu-prediction`: what to expect on a GPU, predicted by a model, without a GPU.

Shape legend: B sequences, H hidden units.
"""

import dataclasses
from typing import Final

import torch

from bench.gpu_targets import CELLS, F
from bench.harness import Cell as Value
from bench.harness import Report, Settings, bench
from stretto.graph import Body
from stretto.kernels import build
from stretto.kernels.backends.triton.model import (
    GPUS,
    MEETING_MICROSECONDS,
    NODE_MICROSECONDS,
    SLACK,
    Gpu,
    best_tiles,
    predict_graph,
    predict_triton,
)
from stretto.kernels.backends.triton.modes import mode_of

NETS: Final = ("GRU", "LSTM", "LayerNormLSTM")
SHAPES: Final = ((1, 32), (1, 64), (16, 128), (64, 256), (16, 512), (64, 1024))
# Others, in microseconds per step, forward and backward. Published for LSTM on an H100 with B 16: a loop in PyTorch, a
# product and a pointwise kernel per step, cuDNN's persistent LSTM in float16 of 768 units.
LOOP: Final = 146 + 327
STANDARD: Final = 7.7 + 9.8
PERSISTENT: Final = 2.0 + 3.1
PUBLISHED: Final = (
    *((H, "forward", ms / 1.024) for H, ms in ((16, 1.97), (32, 1.44), (64, 1.99), (128, 3.23))),
    *((H, "both", ms / 1.024) for H, ms in ((16, 3.47), (32, 4.1), (64, 18.94))),
)
"""FlashRNN's Triton kernels: LSTM, B 16, bfloat16, T 1024, H100; microseconds per step."""
BLOCK_GRU: Final = 62.6e3 / 512
"""TorchRL's block GRU, B 16, 512 units, T 512, GB200: microseconds per step."""
COLUMNS: Final = (
    *("cell", "B", "H", "operands", "mode", "kernel, low", "kernel, high", "CUDA graph", "cuDNN", "Python loop"),
    *("expected fastest",),
)
CAPTION: Final = (
    "Microseconds per step, forward and backward: a prediction, never measured. low: the bare model. high: times "
    f"{SLACK:g}. CUDA graph: {NODE_MICROSECONDS:g} us for each product and each kernel between two of them, in a range "
    "of two, plus reading the weights; the middle is shown. cuDNN and Python loop: published for one shape on an H100, "
    "assumed to be the same for others and on other GPUs. cuDNN has no LayerNormLSTM."
)
LOSSES: Final = (
    "Where we expect to lose: to cuDNN wherever it has a persistent kernel of the cell, float16 LSTM above all. From "
    "512 units on we expect to be about as fast as its kernels that are launched in each step, and slower from 1,024."
)
ASSUMED: Final = (
    ("units", "multiprocessors"),
    ("gigahertz", "clock, GHz"),
    ("cache_gigabytes", "second-level cache, GB/s"),
    ("cache_bytes", "second-level cache, bytes per cycle and unit"),
    ("half", "multiplications of 16 bits per cycle and unit"),
    ("tf32", "multiplications in TF32 per cycle and unit"),
    ("cache_cycles", "latency of the second-level cache, cycles"),
    ("memory_cycles", "latency of memory, cycles"),
    ("shared_cycles", "latency of shared memory, cycles"),
    ("barrier_cycles", "barrier, cycles"),
    ("product_cycles", "an instruction of a tensor core, cycles"),
    ("pass_cycles", "pointwise work on a tile, cycles"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictionSettings(Settings):
    """Predict microseconds per step on A100, H100, B200 and MI300."""


@bench("gpu-prediction", title="What to expect on a GPU: a prediction, never measured")
def run(settings: PredictionSettings, report: Report) -> None:
    """A table for each GPU, the assumptions, and a comparison with published figures."""
    report.note(
        "We do not have a GPU: these are predictions of a model, none was measured. Read them to a factor of 3."
    )
    report.note(LOSSES)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        for gpu in list(GPUS.values())[: 1 if settings.quick else None]:
            rows = [
                row_of(net, B, H, gpu, operands)
                for net in NETS[: 1 if settings.quick else None]
                for B, H in SHAPES[: 1 if settings.quick else None]
                for operands in ("TF32", "bfloat16")
            ]
            report.table(title=gpu.name, columns=COLUMNS, rows=rows, caption=CAPTION)
        block = predict_triton(bodies_of("GRU", 512), GPUS["sm_100"], rows=16, operands=torch.float32)
        report.table(
            title="Published figures of FlashRNN's Triton kernels and the model: LSTM, B 16, bfloat16, H100",
            columns=("H", "direction", "published us", "low", "high", "published / low"),
            rows=[against(*item) for item in PUBLISHED],
            caption="The factor between low and high was chosen after seeing the four points of the forward direction, "
            "which therefore do not test it. At 64 units their backward kernel is far slower than the model of ours.\n"
            f"TorchRL publishes {BLOCK_GRU:.0f} us per step for a block GRU of 512 units on a GB200, with a launch per "
            f"step; for a full GRU by our kernel the model says {block.low:.0f} to {block.high:.0f} us on a B200.",
        )
    finally:
        torch.set_float32_matmul_precision(precision)
    report.table(
        title="Assumptions",
        columns=("what", *(gpu.name for gpu in GPUS.values())),
        rows=[
            *((text, *(getattr(gpu, name) for gpu in GPUS.values())) for name, text in ASSUMED),
            ("programs that wait for each other, microseconds", *[MEETING_MICROSECONDS] * len(GPUS)),
        ],
        caption="From datasheets and published microbenchmarks, rounded, in part from memory; none was checked.",
    )


def bodies_of(net: str, size: int) -> list[Body]:
    """The loops of a cell of the library."""
    cell = CELLS[net](size)
    built = build(cell, x_shape=(F,), x_dtype=torch.float32, state=cell.initial_state(1), backend="eager")
    return built.program.bodies


def row_of(net: str, batch: int, size: int, gpu: Gpu, operands: str) -> list[Value]:
    """One shape on one GPU."""
    bodies = bodies_of(net, size)
    dtype = torch.bfloat16 if operands == "bfloat16" else torch.float32
    kernel = predict_triton(bodies, gpu, rows=batch, operands=dtype)
    graph = predict_graph(bodies, gpu, rows=batch, operands=dtype)
    known = None if net == "LayerNormLSTM" or gpu.name == "MI300" else PERSISTENT if size <= 128 else STANDARD
    each: dict[str, float] = {"kernel": kernel.middle, "CUDA graph": graph.middle}
    if known is not None:
        each["cuDNN"] = known
    modes = {mode_of(best_tiles(body, "forward", gpu, rows=batch, operands=dtype)) for body in bodies}
    mode = modes.pop() if len(modes) == 1 else "several"
    fastest = min(each, key=each.__getitem__)
    close = [name for name, value in each.items() if name != fastest and value < 2 * each[fastest]]
    told = " or ".join([fastest, *close])
    return [net, batch, size, operands, mode, kernel.low, kernel.high, graph.middle, known, float(LOOP), told]


def against(size: int, direction: str, published: float) -> list[Value]:
    """A published figure and the prediction for our kernel."""
    bodies, both = bodies_of("LSTM", size), direction == "both"
    found = predict_triton(bodies, GPUS["sm_90"], rows=16, operands=torch.bfloat16, backward=both)
    return [size, direction, published, found.low, found.high, published / found.low]
