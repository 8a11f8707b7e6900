"""Loops run by generated Triton.

    LoopCall --> pointers, strides, weights, scratch memory, tables of the layout --> one launch for all steps

Products take operands in the precision that torch is set to for float32, or in the cell's own 16 bits; states, sums and
everything stored stay in the loop's dtype.

Shape legend: B sequences, P rows of all steps together.
"""

import importlib.metadata
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, final

import torch

from stretto.errors import StrettoError
from stretto.graph import Body, Kind, Node, run
from stretto.kernels.backends.base import AbstractKernel, Cost, Cotangents, LoopCall, LoopGradients, LoopResult
from stretto.kernels.backends.cudagraph import RECORDERS, GraphKernel
from stretto.kernels.backends.eager import EagerKernel
from stretto.kernels.backends.generated import GeneratedKernel, Tensors
from stretto.kernels.backends.triton import interpreter
from stretto.kernels.backends.triton.emit import Tiles
from stretto.kernels.backends.triton.generate import Generated, generate, load, source_of
from stretto.kernels.backends.triton.targets import constants_of, float32_precision, options_of
from stretto.kernels.batched_ops import as_node_dtype
from stretto.kernels.ir import Where
from stretto.kernels.lower import Way


@final
class TritonKernel(GeneratedKernel):
    """One launch for all steps forward, one for all steps backward.

    Args:
        body: The loop's.
        device: Where it runs.
        tiles: For each direction.
        operands: The dtype that products take their operands in; None for the loop's own.

    Raises:
        Unsupported: If no code can be generated for the body.
    """

    def __init__(
        self, body: Body, *, device: torch.device, tiles: Mapping[Way, Tiles], operands: torch.dtype | None = None
    ) -> None:
        super().__init__(body, device=device)
        self.device = device
        self.tiles = tiles
        self.operands = operands
        self.functions: dict[Way, Generated] = {
            "forward": generate(body, "forward", tiles["forward"]),
            "backward": generate(body, "backward", tiles["backward"]),
        }
        self._slower: AbstractKernel | None = None
        self._fallback = ""
        self.source = source_of(list(self.functions.values()))
        self.module = load(self.source, interpreted=device.type == "cpu")

    @property
    def passes(self) -> tuple[int, int]:
        """Loops over a row's elements per step."""
        return self.functions["forward"].passes, self.functions["backward"].passes

    @property
    def cost(self) -> Cost | None:
        """Not known here: layers run one after another, each on the whole device."""
        return None

    @property
    def fallback(self) -> str:
        """Why its launch failed, and something slower runs the loop."""
        return self._fallback

    def forward(self, call: LoopCall, *, keep: bool) -> LoopResult:
        """Run all steps."""
        if self._slower is not None:
            return self._slower.forward(call, keep=keep)
        result = self.empty_result(call.layout, keep=keep)
        if not self._launch("forward", call, self.inputs(call, result), keep=keep):
            return self.forward(call, keep=keep)
        result.finals = [
            call.layout.last(after, initial.to(after.dtype))
            for after, initial in zip(result.after, call.states, strict=True)
        ]
        self.give_out(result)
        return result

    def backward(self, call: LoopCall, result: LoopResult, cotangents: Cotangents) -> LoopGradients:
        """Run all steps backward."""
        if self._slower is not None:
            saved = [as_node_dtype(tensor, node) for tensor, node in zip(result.saved, self.body.saved, strict=True)]
            return self._slower.backward(call, replace(result, saved=saved), cotangents)
        gradients, tensors = self.empty_gradients(call, cotangents)
        if not self._launch("backward", call, self.inputs(call, result) | tensors, keep=True):
            return self.backward(call, result, cotangents)
        self.give_out_gradients(gradients)
        return gradients

    def _launch(self, way: Way, call: LoopCall, tensors: Tensors, *, keep: bool) -> bool:
        """Whether the kernel could be launched; if not, something slower is to run the loop from now on."""
        layout, made = call.layout, self.functions[way]
        if not layout.total:
            return True
        arguments = self._arguments(made, call, tensors)
        errors = arguments[len(arguments) - 5]
        tiles, on_cpu = self.tiles[way], self.device.type == "cpu"
        grid = (-(-layout.num_nonempty // tiles.rows),)
        constants = constants_of(tiles, real=self.dtype, operands=self.operand_dtype, keep=keep, widen=on_cpu)
        kernel, kind = getattr(self.module, way), "hip" if torch.version.hip else "cuda"
        try:
            with interpreter.quiet() if on_cpu else torch.cuda.device(self.device):
                kernel[grid](*arguments, **constants, **options_of(tiles, kind=kind))
        except Exception as error:
            # Triton compiles at the first launch, for the arguments that it is given; what it raises is its own affair.
            version = importlib.metadata.version("triton")
            if on_cpu and type(error).__name__ == "InterpreterError":
                raise StrettoError(
                    f"the interpreter of Triton {version} failed: {error}",
                    fix="Unset TRITON_INTERPRET, or install another version: 3.9 is tested.",
                ) from error
            self._give_up(f"Triton {version} could not launch the loop's kernel", error)
            return False
        if made.has_checks:
            found = errors.tolist()
            if found[0]:
                raise IndexError("index out of range in a step of the loop")
            if found[1]:
                raise RuntimeError("ZeroDivisionError")
        return True

    def _give_up(self, problem: str, error: Exception) -> None:
        recorder = RECORDERS.get(self.device.type)
        if recorder is None:
            self._slower = EagerKernel(self.body)
        else:
            self._slower = GraphKernel(self.body, self.device, recorder=recorder)
        first = str(error).partition("\n")[0]
        self._fallback = f"{problem} ({type(error).__name__}: {first})"
        warnings.warn(f"the loop runs without generated code: {self._fallback}", stacklevel=2)

    def _arguments(self, made: Generated, call: LoopCall, tensors: Tensors) -> list[Any]:
        """In the order of `Generated.arguments`."""
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
        return [
            *(tensor.detach() for tensor in pointed),
            *strides,
            *weights,
            *(scratch, integers, errors),
            *layout.tables(self.device),
            layout.num_rows,
        ]

    @property
    def operand_dtype(self) -> torch.dtype:
        """What products take: torch's "medium" precision is bfloat16."""
        if self.dtype is not torch.float32:
            return self.dtype
        return self.operands or (torch.bfloat16 if float32_precision() == "medium" else torch.float32)
