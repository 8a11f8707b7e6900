"""What a step of a loop should take on a GPU: a model, not a measurement. Nothing here was ever run on one.

    step = max(weights read, arithmetic) + latencies in a row           of each direction, for 16 rows

Each step waits for the one before, so latencies add up: of the products' chains, of reads, of barriers, of pointwise
work. Weights come from shared memory (resident) or from the second-level cache (streamed), which all programs share.
Programs that share rows (cooperative) do a share of the work each, and wait for each other instead of at a barrier. A
replayed CUDA graph takes so many microseconds per operator, whatever it does.

Sizes and peaks are from datasheets, latencies from published microbenchmarks, rounded; all are assumptions. Beside the
four published points that it was calibrated with it is 2.1 to 3.0 times too fast, so that it gives a range: bare, and
times `SLACK`. It decides between kernels and CUDA graphs under "auto", and is printed beside measurements.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, final

import torch

from stretto.graph import Body, Node
from stretto.kernels.backends.triton.emit import Tiles
from stretto.kernels.backends.triton.generate import Generated, generate, generate_pieces
from stretto.kernels.backends.triton.modes import STEPWISE, choose_tiles, cooperative_choices
from stretto.kernels.backends.triton.targets import TARGETS, Target, float32_precision
from stretto.kernels.ir import Unsupported
from stretto.kernels.lower import Way

WAYS: Final[tuple[Way, Way]] = ("forward", "backward")
SLACK: Final = 2.3
"""What others' kernels of Triton took over the bare model, about; chosen after seeing those: they do not test it."""
NODE_MICROSECONDS: Final = 2.5
"""Of an operator on little data in a replayed graph; assumed."""
SHARED_BYTES_PER_CYCLE: Final = 128
MEETING_MICROSECONDS: Final = 1.0
"""Of programs that wait for each other; assumed. A published kernel of 768 units takes 2 microseconds per step."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU as the model sees it.

    Attributes:
        name: Its name.
        target: What kernels are compiled for.
        units: Multiprocessors.
        gigahertz: Of them.
        cache_gigabytes: Of the second-level cache per second, for all units.
        cache_bytes: Of the second-level cache per cycle, for one unit.
        half: Multiplications with operands of 16 bits per cycle and unit.
        tf32: Likewise in TF32.
        single: Likewise in single precision, without tensor cores.
        cache_cycles: Latency of the second-level cache.
        memory_cycles: Of memory.
        shared_cycles: Of shared memory.
        barrier_cycles: Of a barrier of a program.
        product_cycles: Of one instruction of a tensor core.
        pass_cycles: Of pointwise work on a tile, from load to store.
        device: The user's own, which has limits of its own; None for the one that the model was made for.
    """

    name: str
    target: str
    units: int
    gigahertz: float
    cache_gigabytes: float
    cache_bytes: int
    half: int
    tf32: int
    single: int
    cache_cycles: int = 270
    memory_cycles: int = 750
    shared_cycles: int = 33
    barrier_cycles: int = 30
    product_cycles: int = 33
    pass_cycles: int = 220
    device: Target | None = None

    @property
    def limits(self) -> Target:
        """What kernels must fit."""
        return self.device or TARGETS[self.target]


GPUS: Final = {
    gpu.target: gpu
    for gpu in (
        Gpu(
            name="A100",
            target="sm_80",
            units=108,
            gigahertz=1.41,
            cache_gigabytes=4500,
            cache_bytes=64,
            half=1024,
            tf32=512,
            single=64,
        ),
        Gpu(
            name="H100",
            target="sm_90",
            units=132,
            gigahertz=1.755,
            cache_gigabytes=5500,
            cache_bytes=64,
            half=1228,
            tf32=614,
            single=128,
        ),
        Gpu(
            name="B200",
            target="sm_100",
            units=148,
            gigahertz=1.85,
            cache_gigabytes=9000,
            cache_bytes=64,
            half=1228,
            tf32=614,
            single=128,
        ),
        Gpu(
            name="MI300",
            target="gfx942",
            units=304,
            gigahertz=2.1,
            cache_gigabytes=10000,
            cache_bytes=64,
            half=1024,
            tf32=512,
            single=128,
            cache_cycles=500,
            memory_cycles=1500,
            shared_cycles=64,
        ),
    )
}
"""By target. With 16 rows the older instructions of tensor cores are used: 60 % of the peak on H100, so on B200."""


@final
@dataclass(frozen=True, slots=True)
class Prediction:
    """Microseconds per step, forward and backward: if all goes as well as it can, and as it went for others."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        """The geometric mean."""
        return float((self.low * self.high) ** 0.5)


def gpu_of(target: Target) -> Gpu:
    """The one that a target is, or the one that it resembles most: the same maker's oldest. Its limits are its own."""
    found = GPUS.get(target.name) or GPUS["gfx942" if target.kind == "hip" else "sm_80"]
    return replace(found, units=target.units or found.units, device=target)


def _rate(gpu: Gpu, operands: torch.dtype) -> int:
    """Multiplications per cycle and unit."""
    if operands.itemsize == 2:
        return gpu.half
    if operands is torch.float64:
        return gpu.single // 2
    return gpu.single if float32_precision() == "highest" else gpu.tf32


def predict_kernel(made: Generated, tiles: Tiles, gpu: Gpu, *, rows: int, operands: torch.dtype) -> float:
    """Microseconds of a step in one direction, bare."""
    each = operands.itemsize
    work = sum(item.blocks * item.columns * item.depth * item.heads for item in made.products) / tiles.shares
    rate = _rate(gpu, operands)
    programs = -(-rows // tiles.rows) * tiles.shares
    busy, waves = min(programs, gpu.units), -(-programs // gpu.units)
    read = work * each / (SHARED_BYTES_PER_CYCLE if tiles.resident else gpu.cache_bytes)
    if not tiles.resident:
        read = max(read, busy * work * each / gpu.cache_gigabytes * gpu.gigahertz)
    multiply = tiles.rows * work / rate
    wait = gpu.barrier_cycles if tiles.shares == 1 else MEETING_MICROSECONDS * gpu.gigahertz * 1e3
    chain: float = gpu.memory_cycles + made.num_barriers * wait + made.passes * gpu.pass_cycles
    if tiles.shares > 1:
        # Every program reads the whole state, which the others wrote.
        read += tiles.rows * sum(item.depth for item in made.products) * each / gpu.cache_bytes
    for item in made.products:
        chain += item.depth / (32 / each) * gpu.product_cycles + 2 * gpu.shared_cycles
        chain += 0 if tiles.resident else 2 * gpu.cache_cycles
    return waves * (max(read, multiply) + chain) / gpu.gigahertz / 1e3


def predict_triton(
    bodies: Sequence[Body], gpu: Gpu, *, rows: int, operands: torch.dtype, backward: bool = True
) -> Prediction:
    """Of loops one after another, in the modes that would be taken for a batch of so many rows."""
    total = 0.0
    for body in bodies:
        for way in WAYS if backward else WAYS[:1]:
            tiles = best_tiles(body, way, gpu, rows=rows, operands=operands)
            total += predict_kernel(generate(body, way, tiles), tiles, gpu, rows=rows, operands=operands)
    return Prediction(total, SLACK * total)


def best_tiles(body: Body, way: Way, gpu: Gpu, *, rows: int, operands: torch.dtype) -> Tiles:
    """Those that should be fastest for a batch, of all that should fit."""
    alone = choose_tiles(body, way, operands, gpu.limits)
    return next(iter(cooperative_tiles(body, way, alone, gpu, rows=rows, operands=operands)), alone)


def cooperative_tiles(
    body: Body, way: Way, alone: Tiles, gpu: Gpu, *, rows: int, operands: torch.dtype, slack: float = 1.0
) -> list[Tiles]:
    """Tiles of kernels whose programs share rows, that should be faster for a batch than one program for its rows.

    Those that hold weights come first: what they need less of is time. With a slack, also those that should take so
    many times longer: they may turn out to be faster.
    """
    products = generate(body, way, Tiles()).products
    found = cooperative_choices(products, rows=rows, units=gpu.units, operands=operands, target=gpu.limits)

    def predicted(tiles: Tiles) -> float:
        return predict_kernel(generate(body, way, tiles), tiles, gpu, rows=rows, operands=operands)

    bound = slack * predicted(alone)
    return [tiles for tiles in found if predicted(tiles) < bound]


def predict_graph(bodies: Sequence[Body], gpu: Gpu, *, rows: int, operands: torch.dtype) -> Prediction:
    """Of the same loops in a replayed CUDA graph: so much for each launch, and products of cuBLAS's at any size."""
    nodes, work = 0.0, 0.0
    for body in bodies:
        try:
            made = [generate_pieces(body, way, STEPWISE) for way in WAYS]
        except Unsupported:
            nodes += sum(is_launched(node) for node in (*body.forward, *body.backward))
        else:
            # A product is copied to where the next kernel reads it.
            nodes += sum(part.num_launches + part.num_products for part in made)
        # The state's gradient is added to what arrives from outputs.
        nodes += len(body.next_states)
        products = (item for way in WAYS for item in generate(body, way, Tiles()).products)
        work += sum(item.blocks * item.columns * item.depth * item.heads for item in products)
    read = max(
        work * operands.itemsize / gpu.cache_gigabytes / 1e3,
        rows * work / gpu.units / _rate(gpu, operands) / gpu.gigahertz / 1e3,
    )
    return Prediction(0.8 * NODE_MICROSECONDS * nodes + read, 1.6 * NODE_MICROSECONDS * nodes + SLACK * read)


def is_launched(node: Node) -> bool:
    """Whether an operator computes something, or is only another view of its input."""
    schema: Any = getattr(node.op, "_schema", None)
    return schema is not None and all(result.alias_info is None for result in schema.returns)
