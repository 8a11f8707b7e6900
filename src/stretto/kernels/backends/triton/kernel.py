"""Loops run by generated Triton.

    LoopCall --> pointers, strides, weights, scratch memory, tables of the layout --> one launch for all steps

Which tiles a kernel has is settled when it is made, but for cooperative kernels: how many programs share the rows of a
batch depends on how many rows it has, so `Team` finds their tiles when a batch comes.

Products take operands in the precision that torch is set to for float32, or in the cell's own 16 bits; states, sums and
everything stored stay in the loop's dtype.

Shape legend: B sequences, P rows of all steps together.
"""

import contextlib
import importlib.metadata
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, final

import torch

from stretto.errors import StrettoError
from stretto.graph import Body, Kind, Node, run
from stretto.kernels.backends.base import AbstractKernel, Cost, Cotangents, LoopCall, LoopGradients, LoopResult
from stretto.kernels.backends.cudagraph import RECORDERS, GraphKernel
from stretto.kernels.backends.eager import EagerKernel
from stretto.kernels.backends.generated import GeneratedKernel, LaunchError, Tensors
from stretto.kernels.backends.triton import interpreter
from stretto.kernels.backends.triton.emit import Tiles
from stretto.kernels.backends.triton.generate import TEAM_STRIDE, Generated, Pieces, generate, load, source_of
from stretto.kernels.backends.triton.targets import constants_of, float32_precision, options_of
from stretto.kernels.backends.triton.team import Team
from stretto.kernels.batched_ops import as_node_dtype
from stretto.kernels.ir import Where
from stretto.kernels.lower import Way


class AbstractTritonKernel(GeneratedKernel):
    """What kernels written in Triton have in common.

    Args:
        body: The loop's.
        device: Where it runs.
        operands: The dtype that products take their operands in; None for the loop's own.
    """

    def __init__(self, body: Body, *, device: torch.device, operands: torch.dtype | None) -> None:
        super().__init__(body, device=device)
        self.operands = operands

    @property
    def cost(self) -> Cost | None:
        """Not known here: layers run one after another, each on the whole device."""
        return None

    def forward(self, call: LoopCall, *, keep: bool) -> LoopResult:
        """Run all steps."""
        result = self.empty_result(call.layout, keep=keep)
        if call.layout.total:
            self.launch("forward", call, self.inputs(call, result), keep=keep)
        result.finals = [
            call.layout.last(after, initial.to(after.dtype))
            for after, initial in zip(result.after, call.states, strict=True)
        ]
        self.give_out(result)
        return result

    def backward(self, call: LoopCall, result: LoopResult, cotangents: Cotangents) -> LoopGradients:
        """Run all steps backward."""
        gradients, tensors = self.empty_gradients(call, cotangents)
        if call.layout.total:
            self.launch("backward", call, self.inputs(call, result) | tensors, keep=True)
        self.give_out_gradients(gradients)
        return gradients

    @abstractmethod
    def launch(self, way: Way, call: LoopCall, tensors: Tensors, *, keep: bool) -> None:
        """Run all steps in one direction, on tensors by their role.

        Raises:
            LaunchError: Nothing could be launched.
        """

    @contextlib.contextmanager
    def launching(self, *, shares: int = 1) -> Iterator[None]:
        """Kernels are launched inside, on the device; so many programs share rows.

        Raises:
            LaunchError: One could not be launched.
            StrettoError: Triton's interpreter failed.
        """
        on_cpu = self.device.type == "cpu"
        try:
            with interpreter.at_once(shares) if on_cpu else torch.cuda.device(self.device):
                yield
        except Exception as error:
            # Triton compiles at the first launch, for the arguments that it is given; what it raises is its own affair.
            version = importlib.metadata.version("triton")
            if on_cpu and type(error).__name__ == "InterpreterError":
                raise StrettoError(
                    f"the interpreter of Triton {version} failed: {error}",
                    fix="Unset TRITON_INTERPRET, or install another version: 3.9 is tested.",
                ) from error
            first = str(error).partition("\n")[0]
            raise LaunchError(
                f"Triton {version} could not launch the loop's kernel ({type(error).__name__}: {first})"
            ) from error

    def arguments(self, made: Generated | Pieces, tiles: Tiles, call: LoopCall, tensors: Tensors) -> list[Any]:
        """Of a kernel, in their order."""
        body, layout = self.body, call.layout
        ports = body.ports_of(Kind.WEIGHT)
        values: dict[Node, Any] = {port.node: tensor.detach() for port, tensor in zip(ports, call.weights, strict=True)}
        run(made.ir.prepared, values, layout.total)
        own = [buffer for buffer in made.buffers if buffer.where is not Where.UNIFORM]
        pointed = [tensors[buffer.role][buffer.index] for buffer in own]
        strides = [
            0 if tensor is self.zeros else buffer.size
            for tensor, buffer in zip(pointed, own, strict=True)
            if buffer.where is Where.STRIDED
        ]
        pointed += [values[node].to(self.stored(node)).contiguous() for node in made.ir.uniforms]
        operands = self.operand_dtype
        weights = [values[node].to(operands).contiguous() for node in made.ir.weights]
        size = layout.num_rows * made.scratch
        scratch = torch.empty(size, dtype=self.dtype, device=self.device)
        integers = torch.empty(size if made.has_integers else 1, dtype=torch.int64, device=self.device)
        errors = torch.zeros(2, dtype=torch.int32, device=self.device)
        memory = [scratch, integers, errors]
        if "arrived" in made.arguments:
            teams = -(-layout.num_nonempty // tiles.rows)
            memory.append(torch.zeros(teams * TEAM_STRIDE, dtype=torch.int64, device=self.device))
        return [
            *(tensor.detach() for tensor in pointed),
            *strides,
            *weights,
            *memory,
            *layout.tables(self.device),
            layout.num_rows,
        ]

    @property
    def operand_dtype(self) -> torch.dtype:
        """What products take: torch's "medium" precision is bfloat16."""
        if self.dtype is not torch.float32:
            return self.dtype
        return self.operands or (torch.bfloat16 if float32_precision() == "medium" else torch.float32)


@final
class TritonKernel(AbstractTritonKernel):
    """One launch for all steps forward, one for all steps backward.

    Args:
        body: The loop's.
        device: Where it runs.
        tiles: For each direction.
        operands: The dtype that products take their operands in; None for the loop's own.
        team: Finds tiles of cooperative kernels for a batch; None if there are to be none.

    Raises:
        Unsupported: If no code can be generated for the body.
    """

    def __init__(
        self,
        body: Body,
        *,
        device: torch.device,
        tiles: Mapping[Way, Tiles],
        operands: torch.dtype | None = None,
        team: Team | None = None,
    ) -> None:
        super().__init__(body, device=device, operands=operands)
        self.tiles = tiles
        self.functions: dict[Way, Generated] = {
            "forward": generate(body, "forward", tiles["forward"]),
            "backward": generate(body, "backward", tiles["backward"]),
        }
        self._team = team
        self._slower: AbstractKernel | None = None
        self._fallback = ""
        self.source = source_of(list(self.functions.values()))
        self.module = load(self.source, interpreted=device.type == "cpu")

    @property
    def passes(self) -> tuple[int, int]:
        """Loops over a row's elements per step."""
        return self.functions["forward"].passes, self.functions["backward"].passes

    @property
    def fallback(self) -> str:
        """Why its launch failed, and something slower runs the loop."""
        return self._fallback or ("" if self._team is None else self._team.reason)

    def shares_rows(self, rows: int, *, keep: bool) -> bool:
        """Whether programs share the rows of such a batch, in one direction at least."""
        ways: tuple[Way, ...] = ("forward", "backward") if keep else ("forward",)
        return self._team is not None and any(self._team.tiles(self.body, way, rows) is not None for way in ways)

    def forward(self, call: LoopCall, *, keep: bool) -> LoopResult:
        """Run all steps; by something slower from the first launch on that fails."""
        if self._slower is None:
            try:
                return super().forward(call, keep=keep)
            except LaunchError as error:
                self._slower = self._give_up(error)
        return self._slower.forward(call, keep=keep)

    def backward(self, call: LoopCall, result: LoopResult, cotangents: Cotangents) -> LoopGradients:
        """Run all steps backward."""
        if self._slower is None:
            try:
                return super().backward(call, result, cotangents)
            except LaunchError as error:
                self._slower = self._give_up(error)
        saved = [as_node_dtype(tensor, node) for tensor, node in zip(result.saved, self.body.saved, strict=True)]
        return self._slower.backward(call, replace(result, saved=saved), cotangents)

    def launch(self, way: Way, call: LoopCall, tensors: Tensors, *, keep: bool) -> None:
        """One kernel for all steps; a cooperative one where that should be faster."""
        made, tiles, module = self.functions[way], self.tiles[way], self.module
        team = None if self._team is None else self._team.tiles(self.body, way, call.layout.num_nonempty)
        if team is not None:
            made, tiles = generate(self.body, way, team), team
            module = load(source_of([made]), interpreted=self.device.type == "cpu")
        arguments = self.arguments(made, tiles, call, tensors)
        grid = (-(-call.layout.num_nonempty // tiles.rows), tiles.shares)
        on_cpu, kind = self.device.type == "cpu", "hip" if torch.version.hip else "cuda"
        constants = constants_of(tiles, real=self.dtype, operands=self.operand_dtype, keep=keep, widen=on_cpu)
        try:
            with self.launching(shares=tiles.shares):
                getattr(module, way)[grid](*arguments, **constants, **options_of(tiles, kind=kind))
        except LaunchError as error:
            if team is None or self._team is None:
                raise
            # A driver that cannot launch all programs at once, say: the kernel without meetings may be able to.
            self._team.give_up(str(error))
            return self.launch(way, call, tensors, keep=keep)
        if made.has_checks:
            found = arguments[made.arguments.index("errors")].tolist()
            if found[0]:
                raise IndexError("index out of range in a step of the loop")
            if found[1]:
                raise RuntimeError("ZeroDivisionError")
        return None

    def _give_up(self, error: LaunchError) -> AbstractKernel:
        """What runs the loop from now on."""
        self._fallback = str(error)
        warnings.warn(f"the loop runs without generated code: {self._fallback}", stacklevel=3)
        recorder = RECORDERS.get(self.device.type)
        return EagerKernel(self.body) if recorder is None else GraphKernel(self.body, self.device, recorder=recorder)
