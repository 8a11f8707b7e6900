"""How near a training step comes to what the machine can do: its products, and its reading of weights.

Shape legend: T steps, B sequences, F features of the input, H hidden units, G gate units.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Final, Literal

import torch

from bench.interleaved import Pace, Timing, interleaved, with_threads
from bench.kernel_comparison import FIXED_NETS, SHAPES, TINY, Tell
from bench.kernel_peers import Net, drawn_cell, our_step
from bench.machine_limits import LargeProduct, RepeatedRead
from bench.training_step import StepShape, drawn_batch
from stretto.nn import RNN

Limit = Literal["products", "reads"]

GATES: Final = {"GRU": 3, "LSTM": 4}
FLOAT_BYTES: Final = 4
WIDE_SHAPES: Final = (SHAPES[4].shape, StepShape(num_steps=50, batch=128, input_size=64, hidden_size=512))
NARROW_SHAPES: Final = (
    SHAPES[1].shape,
    SHAPES[2].shape,
    StepShape(num_steps=200, batch=1, input_size=64, hidden_size=1024),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LimitRow(StepShape):
    """A training step beside a limit of the machine that was measured in the same run.

    Attributes:
        limit: "products": FLOPs of all matrix products, against a product of large square matrices by torch. "reads":
            bytes of recurrent weights that the loops read, against reading a buffer of that size over and over.
        net: Which net.
        threads: torch's, and of the measured limit.
        timing: Of our training step, all of it.
        work: Its FLOPs or bytes.
        rate: Those a second.
        machine_rate: What the machine reached.
        share: The one over the other.
    """

    limit: Limit
    net: str
    threads: int
    timing: Timing
    work: float
    rate: float
    machine_rate: float
    share: float


def step_flops(net: Net, shape: StepShape) -> float:
    """FLOPs of the products of a training step, the gradient of the input left out.

    The input's product is taken once forward and once for its weights' gradient; the state's also for its own gradient.
    """
    gates = GATES[net] * shape.hidden_size
    return 2.0 * shape.num_steps * shape.batch * gates * (2 * shape.input_size + 3 * shape.hidden_size)


def step_bytes(net: Net, shape: StepShape) -> float:
    """Bytes of recurrent weights that the loops read: all of them at each step, forward and backward."""
    return 2.0 * shape.num_steps * weight_bytes(net, shape)


def weight_bytes(net: Net, shape: StepShape) -> int:
    """Bytes of the recurrent weights."""
    return GATES[net] * shape.hidden_size * shape.hidden_size * FLOAT_BYTES


def limit_rows(
    thread_counts: Sequence[int], *, pace: Pace, quick: bool, compiles: bool, tell: Tell
) -> tuple[LimitRow, ...]:
    """Both limits at their shapes; `compiles` says whether the loop that reads can be compiled."""
    rows: list[LimitRow] = []
    shapes: list[tuple[Limit, StepShape]] = [("products", shape) for shape in ((TINY,) if quick else WIDE_SHAPES)]
    if compiles:
        shapes += [("reads", shape) for shape in ((TINY,) if quick else NARROW_SHAPES)]
    for limit, shape in shapes:
        for net in FIXED_NETS:
            tell(f"limits: {limit}, {net}, {shape}")
            rows += _rows(limit, net, shape, thread_counts=thread_counts, pace=pace, quick=quick)
    return tuple(rows)


def _rows(
    limit: Limit, net: Net, shape: StepShape, *, thread_counts: Sequence[int], pace: Pace, quick: bool
) -> list[LimitRow]:
    before = torch.get_num_threads()
    step = our_step(RNN(drawn_cell(net, shape), batch_first=False), batch=drawn_batch(shape))
    machines = {count: _machine(limit, net, shape, threads=count, quick=quick) for count in thread_counts}
    tasks: dict[str, Callable[[], object]] = {}
    for count, machine in machines.items():
        tasks[f"step {count}"] = with_threads(step.run, count)
        tasks[f"machine {count}"] = with_threads(machine.run, count)
    try:
        for task in tasks.values():
            task()
        timings = interleaved(tasks, pace=pace)
    finally:
        torch.set_num_threads(before)
    work = step_flops(net, shape) if limit == "products" else step_bytes(net, shape)
    rows = []
    for count, machine in machines.items():
        rate = work / timings[f"step {count}"].least
        machine_rate = machine.work / timings[f"machine {count}"].least
        rows.append(
            LimitRow(
                **dataclasses.asdict(shape),
                limit=limit,
                net=net,
                threads=count,
                timing=timings[f"step {count}"],
                work=work,
                rate=rate,
                machine_rate=machine_rate,
                share=rate / machine_rate,
            )
        )
    return rows


def _machine(limit: Limit, net: Net, shape: StepShape, *, threads: int, quick: bool) -> LargeProduct | RepeatedRead:
    if limit == "products":
        return LargeProduct(64) if quick else LargeProduct()
    if quick:
        return RepeatedRead(weight_bytes(net, shape), threads=threads, total_bytes=2**16)
    return RepeatedRead(weight_bytes(net, shape), threads=threads)
