"""Cooperative kernels: how many programs share the rows of a batch, found when a batch comes.

              columns 0..31   32..63   64..95
    rows 0-15   program 0      1        2       a team: all read the whole state, each makes its columns of the next,
    rows 16-31  program 3      4        5       then they meet; all programs of the grid must run at once

One program that reads all weights in each step is slow where they are large. A team reads each of them once per step,
or holds them, but waits for its slowest member: that pays from some 256 units on, where there are few rows. A model
says when (`model.py`), and the compiler whether it fits. Under "auto" the model only says what is worth a measurement
(`measured.py`).
"""

import warnings
from typing import Final, final

import torch

from stretto.graph import Body
from stretto.kernels.backends.triton.emit import Tiles, power_of_two
from stretto.kernels.backends.triton.model import cooperative_tiles, gpu_of
from stretto.kernels.backends.triton.modes import MAX_SHARED_ROWS, MAX_SPILLED, choose_tiles
from stretto.kernels.backends.triton.targets import Target, compiled_usage
from stretto.kernels.lower import Way

MAX_KEPT: Final = 64
"""Choices that are remembered."""


@final
class Team:
    """Finds the tiles of cooperative kernels of one loop.

    Args:
        target: The GPU, or the one that the interpreter stands for.
        operands: What products take.
        compiles: Whether a kernel is compiled and compared with the limits of the GPU before it is taken.
        slack: How many times longer than one program for its rows they may take, as the model says.
    """

    def __init__(self, target: Target, *, operands: torch.dtype, compiles: bool, slack: float = 1.0) -> None:
        self.target = target
        self.operands = operands
        self.reason = ""
        self._compiles = compiles
        self._slack = slack
        self._found: dict[tuple[Way, int], Tiles | None] = {}

    def tiles(self, body: Body, way: Way, rows: int) -> Tiles | None:
        """For a batch of so many rows; None if one program for some rows should be as fast, or nothing else fits."""
        if self.reason:
            return None
        # Batches up to the next power of two share a kernel, and beyond the largest team those of as many teams.
        rounded = power_of_two(rows) if rows <= MAX_SHARED_ROWS else -(-rows // MAX_SHARED_ROWS) * MAX_SHARED_ROWS
        if (way, rounded) not in self._found:
            if len(self._found) >= MAX_KEPT:
                self._found.clear()
            self._found[way, rounded] = self._find(body, way, rounded)
        return self._found[way, rounded]

    def give_up(self, why: str) -> None:
        """Say once that programs cannot run at once here; from now on none do."""
        self.reason = f"cooperative kernels could not be launched ({why.partition(chr(10))[0]})"
        warnings.warn(f"{self.reason}: each program has rows of its own instead", stacklevel=3)

    def _find(self, body: Body, way: Way, rows: int) -> Tiles | None:
        alone = choose_tiles(body, way, self.operands, self.target)
        gpu = gpu_of(self.target)
        found = cooperative_tiles(body, way, alone, gpu, rows=rows, operands=self.operands, slack=self._slack)
        return next((tiles for tiles in found if not self._compiles or self._fits(body, way, tiles)), None)

    def _fits(self, body: Body, way: Way, tiles: Tiles) -> bool:
        try:
            usage = compiled_usage(body, way, tiles, operands=self.operands, target=self.target)
        except Exception:  # noqa: BLE001 - whatever a compiler raises, another way runs
            return False
        return not usage.exceeds(self.target) and usage.spilled_bytes <= MAX_SPILLED
