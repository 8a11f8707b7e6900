"""`python -m bench gpu-targets`: the resources that the loops of all cells need on GPUs, compiled without a GPU.

Triton can compile for a GPU that is absent. Each loop is compiled in the mode that would run on that GPU, and its
registers, spills and shared memory are read from the machine code. Nothing is run or timed.
"""

import dataclasses
from collections.abc import Callable
from typing import Final

import torch

from bench.harness import Cell as Value
from bench.harness import Count, Report, Settings, bench
from stretto import cells
from stretto.cells import Cell
from stretto.checks import check_choice
from stretto.graph import Body
from stretto.kernels import build
from stretto.kernels.backends.triton.emit import Tiles
from stretto.kernels.backends.triton.model import WAYS
from stretto.kernels.backends.triton.modes import first_that_fits, mode_of
from stretto.kernels.backends.triton.targets import MAX_REGISTERS, TARGETS, Target, Usage, compiled_usage
from stretto.kernels.backends.triton.team import Team
from stretto.kernels.ir import Unsupported
from stretto.kernels.lower import Way

F: Final = 32
PERIODS: Final = (1, 2, 4, 8)
CELLS: Final[dict[str, Callable[[int], Cell]]] = {
    "GRU": lambda H: cells.GRU(F, H),
    "LSTM": lambda H: cells.LSTM(F, H),
    "LayerNormLSTM": lambda H: cells.LayerNormLSTM(F, H),
    "Elman": lambda H: cells.Elman(F, H),
    "GRU, reset before": lambda H: cells.GRU(F, H, reset="before"),
    "PeepholeLSTM": lambda H: cells.PeepholeLSTM(F, H),
    "LayerNormGRU": lambda H: cells.LayerNormGRU(F, H),
    "ProjectedLSTM": lambda H: cells.ProjectedLSTM(F, H, proj_size=H // 2),
    "CoupledLSTM": lambda H: cells.CoupledLSTM(F, H),
    "MultiplicativeLSTM": lambda H: cells.MultiplicativeLSTM(F, H),
    "LiGRU": lambda H: cells.LiGRU(F, H),
    "MinimalGatedUnit": lambda H: cells.MinimalGatedUnit(F, H),
    "IndRNN": lambda H: cells.IndRNN(F, H),
    "Clockwork": lambda H: cells.Clockwork(F, H, periods=PERIODS),
    "AttentionCell": lambda H: cells.AttentionCell(F, H, memory_size=8),
    "Zoneout of LSTM": lambda H: cells.Zoneout(cells.LSTM(F, H), p=(0.1, 0.1)),
    "RecurrentDropout of LSTM": lambda H: cells.RecurrentDropout(cells.LSTM(F, H), p=0.4),
    "ImplicitGRU": lambda H: cells.ImplicitGRU(F, H),
}
NO_SPILLS: Final = ("GRU", "LSTM", "LayerNormLSTM")
"""Cells that must not spill a register; others may spill `MAX_SPILLED` bytes."""
MAX_SPILLED: Final = 64
BATCH: Final = 16
"""Sequences of a batch for cooperative kernels."""
SIZES: Final = (64, 128, 256, 512)
COLUMNS: Final = (
    *("cell", "H", "direction", "mode", "tile", "warps", "registers", "spilled bytes", "shared KiB"),
    *("barriers", "tensor cores", "within limits"),
)
CAPTION: Final = (
    "mode: resident weights are kept in shared memory, streamed ones read at each step; cooperative programs share "
    "rows and synchronise. tile: columns x depth of a product. within limits: at most 255 registers, on AMD's GPUs "
    "512; the GPU's shared memory; no spills in GRU, LSTM and LayerNormLSTM, at most 64 bytes elsewhere. float32 with "
    "TF32 products, 16 rows per program."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetsSettings(Settings):
    """Compile the loops of all cells for absent GPUs.

    Attributes:
        cells: Names of cells; all of them if left out.
        sizes: Hidden units.
        targets: sm_80 (A100), sm_90 (H100), sm_100 (B200), gfx942 (MI300).
    """

    cells: tuple[str, ...] = tuple(CELLS)
    sizes: tuple[Count, ...] = SIZES
    targets: tuple[str, ...] = tuple(TARGETS)


@bench("gpu-targets", title="Kernels compiled for GPUs, and never run")
def run(settings: TargetsSettings, report: Report) -> None:
    """A table for each target."""
    _run(settings, report, cooperative=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CooperativeSettings(TargetsSettings):
    """Compile the cooperative kernels for a small batch, for absent GPUs.

    Attributes:
        cells: Names of cells; all of them if left out.
        sizes: Hidden units; without shared rows there is no line.
        targets: sm_80 (A100), sm_90 (H100), sm_100 (B200), gfx942 (MI300).
    """


@bench("gpu-cooperative", title="Cooperative kernels compiled for GPUs, and never run")
def run_cooperative(settings: CooperativeSettings, report: Report) -> None:
    """A table for each target, for a batch of 16 sequences."""
    _run(settings, report, cooperative=True)


def _run(settings: TargetsSettings, report: Report, *, cooperative: bool) -> None:
    for name in settings.targets:
        check_choice(name, name="target", choices=tuple(TARGETS))
    for name in settings.cells:
        check_choice(name, name="cell", choices=tuple(CELLS))
    report.note("compiled by Triton without a GPU; none of these kernels was ever run or timed on one")
    names, sizes = (("GRU",), (16,)) if settings.quick else (settings.cells, settings.sizes)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        for target in (TARGETS[name] for name in settings.targets):
            rows: list[list[Value]] = []
            for name in names:
                for size in sizes:
                    report.progress(f"{target.name}, {name}, H {size}")
                    rows += rows_of(name, size, target, cooperative=cooperative)
            report.table(title=target.name, columns=COLUMNS, rows=rows, caption=CAPTION)
            beyond = [row for row in rows if not row[-1]]
            report.note(f"{target.name}: {len(rows) - len(beyond)} of {len(rows)} kernels within limits")
            report.failed |= bool(beyond)
    finally:
        torch.set_float32_matmul_precision(precision)


def bodies_of(name: str, size: int) -> list[Body]:
    """The loops of a cell."""
    cell = CELLS[name](size)
    built = build(cell, x_shape=(F,), x_dtype=torch.float32, state=cell.initial_state(1), backend="eager")
    return built.program.bodies


def rows_of(name: str, size: int, target: Target, *, cooperative: bool = False) -> list[list[Value]]:
    """Both directions of a cell's loops, in the mode for many sequences or for few."""
    rows: list[list[Value]] = []
    for body in bodies_of(name, size):
        for way in WAYS:
            if cooperative:
                shared = Team(target, operands=torch.float32, compiles=True).tiles(body, way, BATCH)
                if shared is None:
                    continue
                tiles = shared
                usage = compiled_usage(body, way, tiles, operands=torch.float32, target=target)
                rows.append(_row(name, size, way=way, tiles=tiles, usage=usage, target=target))
                continue
            try:
                tiles, usage = first_that_fits(body, way, operands=torch.float32, target=target)
            except Unsupported as reason:
                rows.append([name, size, way, f"none: {reason}", *[None] * (len(COLUMNS) - 5), False])
                continue
            rows.append(_row(name, size, way=way, tiles=tiles, usage=usage, target=target))
    return rows


def _row(name: str, size: int, *, way: Way, tiles: Tiles, usage: Usage, target: Target) -> list[Value]:
    mode = mode_of(tiles) if tiles.shares == 1 else f"{mode_of(tiles)}, {tiles.shares} programs"
    found: list[Value] = [name, size, way, mode, f"{tiles.columns} x {tiles.depth}", tiles.warps]
    found += [usage.registers, usage.spilled_bytes, usage.shared_bytes / 1024]
    return [*found, usage.num_barriers, usage.uses_tensor_cores, is_within(usage, name, target)]


def is_within(usage: Usage, name: str, target: Target) -> bool:
    """Whether a kernel is within the limits that are asserted."""
    spilled = 0 if name in NO_SPILLS else MAX_SPILLED
    # A wavefront of AMD's has 512 vector registers of a thread.
    registers = MAX_REGISTERS if target.kind == "cuda" else 512
    return not usage.exceeds(target) and usage.spilled_bytes <= spilled and usage.registers <= registers
