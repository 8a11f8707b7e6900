"""Which tiles a kernel is written with, by the sizes of its products and the GPU.

| mode | weights | where |
|---|---|---|
| resident | read once, before the first step, and kept in shared memory | they fit, and are few enough for registers |
| streamed | read in each step, tile by tile, several of them under way | everywhere else |
| cooperative | either, a share of the columns by each of several programs | larger weights, and a batch small enough |

Programs that share rows wait for each other, so all of them must run at once: how many may share depends on the batch,
and `team.py` chooses when it comes.

What a mode needs is estimated here, from what compiled kernels were found to need: `bench/results/gpu-targets.json`.
On a GPU every choice is compiled and compared with its limits before it is used, and the next one taken if it does not
fit.
"""

import importlib.metadata
from collections.abc import Iterator
from typing import Final

import torch

from stretto.graph import Body
from stretto.kernels.backends.triton.emit import Products, Tiles, power_of_two
from stretto.kernels.backends.triton.generate import generate
from stretto.kernels.backends.triton.targets import Target, Usage, compiled_usage
from stretto.kernels.ir import Unsupported
from stretto.kernels.lower import Way

ROWS: Final = 16
"""Of a program: what tensor cores take at least."""
OTHER_BYTES: Final = 16 << 10
"""Shared memory for everything but weights: states, and tiles that change hands between threads."""
MAX_RESIDENT: Final = {"columns": 128, "depth": 512}
"""Sides of resident tiles from which registers are too few."""
MAX_SHARED_ROWS: Final = 64
"""Of the batch, that programs share: with more, results of products need too many registers."""
MAX_HELD_DEPTH: Final = 1024
"""That a program sums over in one product, of weights that it holds."""
MAX_SPILLED: Final = 64
"""Bytes of a thread; more warps and smaller tiles are tried for what spills more."""
STREAMED: Final = tuple(
    Tiles(rows=ROWS, columns=columns, depth=depth, stages=stages, warps=warps)
    for columns, depth, stages, warps in (
        *((64, 64, 3, 4), (64, 64, 3, 8), (64, 64, 2, 4), (32, 64, 2, 4)),
        *((32, 32, 2, 4), (32, 32, 1, 4), (16, 16, 1, 4)),
    )
)
"""From the fastest, as far as is known, to the one that needs least."""
STEPWISE: Final = Tiles(rows=ROWS, shares=16, stages=1)
"""Of kernels between two products: programs take every sixteenth tile of their rows' elements; none waits."""


def mode_of(tiles: Tiles) -> str:
    """The name of a mode."""
    held = "resident" if tiles.resident else "streamed"
    return held if tiles.shares == 1 else f"cooperative, {held}"


def choices(body: Body, way: Way, *, operands: torch.dtype, target: Target) -> Iterator[Tiles]:
    """Tiles that should fit, the best first; the last ones need so little that they are tried in any case."""
    each = operands.itemsize
    products = generate(body, way, Tiles()).products
    whole = resident_tiles(products)
    if whole is not None and target.kind == "cuda" and resident_bytes(products, each) <= target.shared_bytes:
        yield whole
    fitting = [tiles for tiles in STREAMED if streamed_bytes(products, tiles, each) <= target.shared_bytes]
    yield from fitting or STREAMED[-1:]


def choose_tiles(body: Body, way: Way, operands: torch.dtype, target: Target) -> Tiles:
    """The best that should fit."""
    return next(choices(body, way, operands=operands, target=target))


def cooperative_choices(
    products: list[Products], *, rows: int, units: int, operands: torch.dtype, target: Target
) -> Iterator[Tiles]:
    """Tiles of kernels whose programs share the rows of such a batch, with no more programs than units.

    Those that hold their weights come first.
    """
    each, columns = operands.itemsize, max((item.columns for item in products), default=0)
    tile_rows = min(max(power_of_two(rows), ROWS), MAX_SHARED_ROWS)
    most = units // -(-rows // tile_rows)
    width = max(power_of_two(-(-columns // max(most, 1))), ROWS)
    shares = -(-columns // width)
    if not 1 < shares <= most:
        return
    depth = power_of_two(max(item.depth for item in products))
    blocks = max(item.blocks for item in products)
    held = sum(item.blocks * width * power_of_two(item.depth) for item in products) + tile_rows * depth
    if (
        target.kind == "cuda"
        and all(item.heads == 1 for item in products)
        and depth <= MAX_HELD_DEPTH
        and held * each + OTHER_BYTES // 2 <= target.shared_bytes
    ):
        yield Tiles(
            rows=tile_rows,
            elements=width,
            columns=width,
            depth=max(depth, ROWS),
            resident=True,
            warps=8 if blocks * width * depth >= 1 << 15 else 4,
            stages=1,
            shares=shares,
        )
    for deep, stages in ((64, 3), (64, 2), (32, 2), (32, 1)):
        tiles = Tiles(rows=tile_rows, elements=width, columns=width, depth=deep, stages=stages, warps=4, shares=shares)
        if streamed_bytes(products, tiles, each) <= target.shared_bytes:
            yield tiles


def first_that_fits(body: Body, way: Way, *, operands: torch.dtype, target: Target) -> tuple[Tiles, Usage]:
    """Compile choice after choice, until one is within the limits of the GPU and spills little; what it needs there.

    Raises:
        Unsupported: If none is within the limits, or Triton cannot compile any of them.
    """
    why, fitting = "", []
    for tiles in choices(body, way, operands=operands, target=target):
        try:
            usage = compiled_usage(body, way, tiles, operands=operands, target=target)
        except Exception as error:  # noqa: BLE001 - whatever a compiler raises, a slower way runs
            version = importlib.metadata.version("triton")
            why = f"Triton {version} could not compile the loop for {target.name}: {error}"
            continue
        why = usage.exceeds(target)
        if not why:
            fitting.append((tiles, usage))
            if usage.spilled_bytes <= MAX_SPILLED:
                break
    if not fitting:
        raise Unsupported(why)
    return min(fitting, key=lambda item: max(item[1].spilled_bytes, MAX_SPILLED))


def resident_tiles(products: list[Products]) -> Tiles | None:
    """Tiles that hold whole products; None if there are none, or they are too large."""
    if not products or any(item.heads > 1 for item in products):
        return None
    columns = power_of_two(max(item.columns for item in products))
    depth = power_of_two(max(item.depth for item in products))
    if columns > MAX_RESIDENT["columns"] or depth > MAX_RESIDENT["depth"]:
        return None
    warps = 4 if max(columns, depth) <= 64 else 8
    columns, depth = max(columns, 16), max(depth, 16)
    return Tiles(rows=ROWS, elements=columns, columns=columns, depth=depth, resident=True, warps=warps, stages=1)


def resident_bytes(products: list[Products], each: int) -> int:
    """Shared memory for resident weights."""
    held = sum(item.blocks * power_of_two(item.columns) * power_of_two(item.depth) for item in products)
    deepest = max(power_of_two(item.depth) for item in products)
    return held * each + ROWS * deepest * each + OTHER_BYTES // 2


def streamed_bytes(products: list[Products], tiles: Tiles, each: int) -> int:
    """Shared memory for tiles of weights and states that are under way."""
    blocks = max((item.blocks for item in products), default=0)
    under_way = max(tiles.stages - 1, 1)
    return under_way * tiles.depth * (blocks * tiles.columns + tiles.rows) * each + OTHER_BYTES
