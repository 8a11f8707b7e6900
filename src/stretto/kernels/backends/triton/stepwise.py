"""Generated kernels around products of cuBLAS: a few launches for each step, which CUDA graphs replay.

    step t    product before0 W -> scratch | kernel: gates, next state | product ... | kernel ...

Operator by operator a step of a GRU takes some 30 launches, so 5. Products are PyTorch's, at any size; what lies
between two of them is one kernel, or several where a program would read what another one makes. `cudagraph.py` records
stretches of steps.

Shape legend: R rows that run in a step, K and N the sides of a weight, G heads, M vectors per head.
"""

import math
from typing import Any, final

import torch

from stretto.graph import Body
from stretto.kernels.backends.base import LoopCall
from stretto.kernels.backends.generated import Tensors
from stretto.kernels.backends.triton.emit import Tiles
from stretto.kernels.backends.triton.generate import Pieces, generate_pieces, load
from stretto.kernels.backends.triton.kernel import AbstractTritonKernel
from stretto.kernels.backends.triton.modes import STEPWISE
from stretto.kernels.backends.triton.targets import constants_of, options_of
from stretto.kernels.ir import Buffer, Product, Where
from stretto.kernels.lower import Way
from stretto.kernels.schedule import Item, Load


@final
class StepwiseKernel(AbstractTritonKernel):
    """Launches pieces of each step, one after another.

    Args:
        body: The loop's.
        device: Where it runs.
        operands: The dtype that products take their operands in; None for the loop's own.
        tiles: Of the kernels.

    Raises:
        Unsupported: If no code can be generated for the body.
    """

    def __init__(
        self, body: Body, *, device: torch.device, operands: torch.dtype | None = None, tiles: Tiles = STEPWISE
    ) -> None:
        super().__init__(body, device=device, operands=operands)
        self.tiles = tiles
        self.pieces: dict[Way, Pieces] = {
            "forward": generate_pieces(body, "forward", tiles),
            "backward": generate_pieces(body, "backward", tiles),
        }

    @property
    def passes(self) -> tuple[int, int]:
        """Kernels per step."""
        forward, backward = (
            sum(isinstance(part, str) for part in self.pieces[way].steps) for way in ("forward", "backward")
        )
        return forward, backward

    def launch(self, way: Way, call: LoopCall, tensors: Tensors, *, keep: bool) -> None:
        """Step by step."""
        made, layout, tiles = self.pieces[way], call.layout, self.tiles
        on_cpu, kind = self.device.type == "cpu", "hip" if torch.version.hip else "cuda"
        module = load(made.source, interpreted=on_cpu)
        arguments = self.arguments(made, tiles, call, tensors)
        constants = constants_of(tiles, real=self.dtype, operands=self.operand_dtype, keep=keep, widen=on_cpu)
        options = options_of(tiles, kind=kind)
        # Its programs do not wait for each other.
        options.pop("launch_cooperative_grid", None)
        rows = _Rows(made, arguments, tensors, call, keep=keep)
        weights = dict(zip(made.ir.weights.values(), rows.weights, strict=True))
        steps = range(layout.num_steps)
        for t in reversed(steps) if way == "backward" else steps:
            count = int(layout.rows_T[t])
            grid = (-(-count // tiles.rows), tiles.shares)
            for part in made.steps:
                if isinstance(part, str):
                    with self.launching():
                        getattr(module, part)[grid](*arguments, t, **constants, **options)
                else:
                    _multiply(part, rows, t, weights)


def _multiply(item: Item, rows: "_Rows", t: int, weights: dict[Any, torch.Tensor]) -> None:
    """A product of one step, from and to memory."""
    assert isinstance(item.value, Product)
    assert isinstance(item.expression, Load)
    weight, heads, K, N = weights[item.value.weight], item.value.weight.heads, item.value.weight.K, item.value.weight.N
    many = math.prod(item.value.dims[:-1]) // heads
    source = rows.at(item.expression.buffer, t)
    first = item.expression.address.constant
    count = len(source)
    source_RMGK = source[:, first : first + many * heads * K].reshape(count, many, heads, K).to(weight.dtype)
    target = rows.at(item.buffer, t)
    if many == heads == 1:
        target[:, :N].copy_(source_RMGK[:, 0, 0] @ weight)
        return
    width = item.buffer.strides[-2]
    # A view: rows of scratch memory are wider than this.
    target_RMGN = target.as_strided((count, many, heads, N), (target.stride(0), heads * width, width, 1))
    target_RMGN.copy_(torch.einsum("rmgk,gkn->rmgn", source_RMGK, weight.reshape(heads, K, N)))


@final
class _Rows:
    """The rows of a step in each buffer, as kernels find them by pointers."""

    def __init__(self, made: Pieces, arguments: list[Any], tensors: Tensors, call: LoopCall, *, keep: bool) -> None:
        named = dict(zip(made.arguments, arguments, strict=True))
        self.weights = [named[name] for name in made.arguments if name[0] == "w"]
        self._made, self._tensors, self._layout, self._keep = made, tensors, call.layout, keep
        self._scratch: dict[bool, torch.Tensor] = {
            integer: named[name][: call.layout.num_rows * made.scratch].view(-1, made.scratch)
            for integer, name in ((False, "scratch"), *(((True, "integers"),) if made.has_integers else ()))
        }

    def at(self, buffer: Buffer, t: int) -> torch.Tensor:
        """(R, elements of a row)."""
        start, count = int(self._layout.starts_T[t]), int(self._layout.rows_T[t])
        where, size = buffer.where, buffer.size
        if where in {Where.SCRATCH, Where.PRIVATE}:
            first = buffer.index + (self._made.private if where is Where.PRIVATE else 0)
            return self._scratch[buffer.integer][:count, first:]
        if where is Where.BEFORE and t > 0:
            start = int(self._layout.starts_T[t - 1])
        elif where is Where.ROW or (where is Where.SAVED and not self._keep):
            start = 0
        tensor: torch.Tensor = self._tensors[buffer.role][buffer.index]
        if where is Where.BEFORE and t == 0:
            tensor, start = self._tensors["initial"][buffer.index], 0
        elif where in {Where.CARRY_IN, Where.CARRY_OUT}:
            tensor, start = tensor[(t + (where is Where.CARRY_IN)) & 1], 0
        if where is Where.STRIDED and tensor.dim() == 1:
            # A gradient of zero, one row for all.
            return tensor[:size].expand(count, size)
        flat: torch.Tensor = tensor.detach().reshape(-1, size)
        return flat[start : start + count]
