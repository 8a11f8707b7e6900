"""`python -m bench kernels --device cuda`: our kernels on a GPU against cuDNN, a Python loop and CUDA graphs.

We have never run it on a GPU. `--device interpreter` runs tiny shapes without one, to test the program.

Shape legend: T steps, B sequences, F features of the input, H hidden units.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import torch

from bench.contenders import (
    Batch,
    Contender,
    Net,
    Shape,
    draw_batch,
    draw_cell,
    loop_contender,
    our_layer,
    torch_contender,
    torch_layer,
)
from bench.gpu_prediction import LOOP, PERSISTENT, STANDARD
from bench.harness import Cell as Value
from bench.harness import Report
from stretto.errors import StrettoError
from stretto.kernels import build, interpreted
from stretto.kernels.backends.cudagraph import RECORDERS
from stretto.kernels.backends.triton.model import Prediction, gpu_of, predict_graph, predict_triton
from stretto.kernels.backends.triton.targets import target_of
from stretto.nn import RNN
from stretto.timing import TOLERANCE, TimingBudget, check_equal, time_interleaved

NETS: Final[tuple[Net, ...]] = ("GRU", "LSTM", "LayerNormLSTM")
SIZES: Final = ((1000, 1, 32, 64), (500, 16, 32, 128), (200, 64, 64, 256), (200, 16, 64, 512), (100, 64, 64, 1024))
SHAPES: Final = tuple(
    Shape(num_steps=steps, batch=batch, input_size=features, hidden_size=size) for steps, batch, features, size in SIZES
)
TINY: Final = (Shape(num_steps=3, batch=2, input_size=3, hidden_size=4),)
OURS, GRAPHS, CUDNN, PYTHON = "stretto, triton", "stretto, cudagraph", "cuDNN", "Python loop"
TF32_TOLERANCE: Final = 0.05
COLUMNS: Final = (
    *("net", "T, B, F, H", "contender", "us per step", "ms", "predicted us, low", "predicted us, high"),
    *("ours is faster by", "error, full precision", "error, TF32"),
)
CAPTION: Final = (
    "Forward and backward, with the gradients of all weights, in TF32; minima of an interleaved run. "
    "predicted: by the model of docs/measurements/gpu-prediction.md; for cuDNN and the loop a published figure of one "
    "shape. error: largest difference from the first contender over the largest value, checked before the clock."
)


def run(device: str, report: Report, timing: TimingBudget) -> None:
    """A row for each net, shape and contender.

    Args:
        device: "cuda", or "interpreter" for the CPU.
        report: What is measured goes there; on a GPU also into a file to send in.
        timing: How often everything is timed.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise StrettoError(
            "torch finds no GPU here", fix="Choose --device interpreter to see whether the benchmark runs, or cpu."
        )
    on_gpu = device == "cuda"
    where = torch.device("cuda" if on_gpu else "cpu")
    if on_gpu:
        name = torch.cuda.get_device_name()
        report.note(f"{name}, CUDA {torch.version.cuda or torch.version.hip}")
        if report.json_path is None:
            report.json_path = Path(f"kernels-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.json")
        report.note(f"please send us {report.json_path}: we do not have a GPU")
    else:
        report.note("interpreted on the CPU: it shows that everything runs, and its times mean nothing")
    rows: list[list[Value]] = []
    with contextlib.nullcontext() if on_gpu else interpreted():
        for net in NETS if on_gpu else NETS[::2]:
            for shape in SHAPES if on_gpu else TINY:
                report.progress(f"{net}, {shape}")
                try:
                    rows += _rows(net, shape, where, report, timing)
                except StrettoError as error:
                    # It will hardly be run again, so keep the other rows.
                    report.failed = True
                    report.skip(f"{net}, {shape}", error)
                report.table(
                    title=f"On {name if on_gpu else 'the interpreter'}", columns=COLUMNS, rows=rows, caption=CAPTION
                )


def _rows(net: Net, shape: Shape, device: torch.device, report: Report, timing: TimingBudget) -> list[list[Value]]:
    """Checked, then timed."""
    cell, drawn = draw_cell(net, shape).to(device), draw_batch(shape)
    batch = Batch(x_TBF=drawn.x_TBF.to(device), weight_TBO=drawn.weight_TBO.to(device))
    contenders: dict[str, Contender] = {}
    if net != "LayerNormLSTM":
        contenders[CUDNN] = torch_contender(torch_layer([cell], net, shape).to(device), batch=batch)
    contenders[PYTHON] = loop_contender(cell, batch=batch)
    layers = [RNN(cell, batch_first=False, backend="triton")]
    if device.type in RECORDERS:
        layers.append(RNN(cell, batch_first=False, backend="cudagraph"))
        contenders[GRAPHS] = our_layer(layers[-1], batch=batch)
    contenders[OURS] = our_layer(layers[0], batch=batch)
    exact = _errors(contenders, "highest", net, shape)
    for rnn in layers:
        if reason := rnn.explain().reason:
            report.note(f"{net}, {shape}, {rnn.backend}: {reason}")
    with _precision("high"):
        rough = _errors(contenders, "high", net, shape)
        tasks = {name: _waiting(one.run, device) for name, one in contenders.items()}
        timings = time_interleaved(tasks, budget=timing, only_twice=(PYTHON,))
        predicted = _predictions(net, shape, device)
    least = {name: item.minimum for name, item in timings.items()}
    rows: list[list[Value]] = []
    for name, seconds in least.items():
        low, high = predicted[name]
        rows.append([net, shape.sizes, name, 1e6 * seconds / shape.num_steps, 1e3 * seconds, low, high])
        rows[-1] += [seconds / least[OURS], exact.get(name), rough.get(name)]
    return rows


def _errors(contenders: dict[str, Contender], precision: str, net: Net, shape: Shape) -> dict[str, float]:
    """Errors of the outputs and gradients of each contender, relative to the first."""
    with _precision(precision):
        (first, reference), *others = [(name, one.results()) for name, one in contenders.items()]
    tolerance = TF32_TOLERANCE if precision == "high" else TOLERANCE
    return {
        name: check_equal(found, reference, name=f"{net} by {name}", peer=first, where=str(shape), tolerance=tolerance)
        for name, found in others
    }


@contextlib.contextmanager
def _precision(name: str) -> Iterator[None]:
    """Of products in single precision, cuDNN's too."""
    earlier, now = torch.get_float32_matmul_precision(), torch.backends.cudnn
    torch.set_float32_matmul_precision(name)
    try:
        with torch.backends.cudnn.flags(
            enabled=now.enabled,
            benchmark=now.benchmark,
            deterministic=now.deterministic,
            allow_tf32=name != "highest",
        ):
            yield
    finally:
        torch.set_float32_matmul_precision(earlier)


def _waiting(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Until the device is done."""

    def run() -> None:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run


def _predictions(net: Net, shape: Shape, device: torch.device) -> dict[str, tuple[float, float]]:
    """Microseconds per step of each contender."""
    cell = draw_cell(net, shape)
    built = build(
        cell, x_shape=(shape.input_size,), x_dtype=torch.float32, state=cell.initial_state(1), backend="eager"
    )
    bodies = built.program.bodies
    gpu = gpu_of(target_of(device))
    kernel: Prediction = predict_triton(bodies, gpu, rows=shape.batch, operands=torch.float32)
    graph = predict_graph(bodies, gpu, rows=shape.batch, operands=torch.float32)
    known = float(PERSISTENT if shape.hidden_size <= 128 else STANDARD)
    return {
        OURS: (kernel.low, kernel.high),
        GRAPHS: (graph.low, graph.high),
        CUDNN: (known, known),
        PYTHON: (float(LOOP), float(LOOP)),
    }
