"""Loops run by generated C++.

Shape legend: B sequences, P rows of all steps together.
"""

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any, final

import torch

from stretto.graph import Body, Kind, Node, concrete_shape, run
from stretto.kernels.compiler import compiled
from stretto.kernels.generate import Generated, generate_backward, generate_forward, source_of
from stretto.kernels.kernel import AbstractKernel, Cotangents, Gradients, Inputs, Outputs
from stretto.kernels.layout import Layout
from stretto.kernels.memory import fresh
from stretto.kernels.row_products import threads_for

APART = 64
"""Elements that pieces of one memory begin at multiples of, so that no two threads write to one cache line."""


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_steps", "num_rows", "keep")),
        *((name, ctypes.c_void_p) for name in ("rows", "starts", "lengths", "strides", "weight_strides")),
        *((name, ctypes.c_void_p) for name in ("buffers", "weights", "packed", "scratch", "own", "room")),
    )


class _Job(ctypes.Structure):
    _fields_ = (
        ("pack", ctypes.c_void_p),
        ("work", ctypes.c_void_p),
        ("call", ctypes.c_void_p),
        ("bounds", ctypes.c_void_p),
        ("pieces", ctypes.c_int64),
    )


@final
class CppKernel(AbstractKernel):
    """One function for all steps forward, one for all steps backward.

    Args:
        body: The loop.
        dtype: Of its values.

    Raises:
        Unsupported: If the body has an operator that no code is generated for.
        NoCompiler: If the code cannot be compiled.
    """

    def __init__(self, body: Body, dtype: torch.dtype) -> None:
        super().__init__(body)
        self.dtype = dtype
        self.ahead, self.ahead_once = generate_forward(body)
        self.back, self.back_once = generate_backward(body)
        self.source = source_of([self.ahead, self.back], dtype)
        self.library = compiled(self.source, torch_version=torch.__version__)
        names = ("forward_pack", "forward_work", "backward_pack", "backward_work")
        self.addresses = {name: ctypes.cast(getattr(self.library, name), ctypes.c_void_p).value for name in names}

    def forward(self, layout: Layout, inputs: Inputs, *, keep: bool) -> Outputs:
        """Run all steps."""
        return self.forward_together([self], [layout], [inputs], keep=keep)[0]

    def backward(self, layout: Layout, inputs: Inputs, outputs: Outputs, cotangents: Cotangents) -> Gradients:
        """Run all steps backward."""
        return self.backward_together([self], [layout], [inputs], [outputs], [cotangents])[0]

    def forward_together(
        self,
        kernels: Sequence[AbstractKernel],
        layouts: Sequence[Layout],
        inputs: Sequence[Inputs],
        *,
        keep: bool,
    ) -> list[Outputs]:
        """Run loops at once, each by threads of its own where there are enough."""
        made, runs = [], []
        for kernel, layout, item in zip(kernels, layouts, inputs, strict=True):
            assert isinstance(kernel, CppKernel)
            given = kernel.tidy(item)
            result = kernel.empty_outputs(layout, keep=keep)
            tensors = {
                "before": result.after,
                "initial": given.states,
                "step": given.steps,
                "kept": given.kept,
                "after": result.after,
                "emit": result.emits,
                "saved": result.saved,
                "final": result.finals,
            }
            runs.append(_Run(kernel, "forward", layout, tensors=tensors, once=given.once, keep=keep))
            made.append(result)
        _run_all(runs)
        return made

    def backward_together(
        self,
        kernels: Sequence[AbstractKernel],
        layouts: Sequence[Layout],
        inputs: Sequence[Inputs],
        outputs: Sequence[Outputs],
        cotangents: Sequence[Cotangents],
    ) -> list[Gradients]:
        """Run the same loops backward, at once."""
        made, runs = [], []
        together = zip(kernels, layouts, inputs, outputs, cotangents, strict=True)
        for kernel, layout, item, output, arriving in together:
            assert isinstance(kernel, CppKernel)
            given = kernel.tidy(item)
            gradients, tensors = kernel.empty_gradients(layout, given, arriving)
            tensors |= {
                "before": output.after,
                "initial": given.states,
                "step": given.steps,
                "kept": given.kept,
                "after": output.after,
                "emit": output.emits,
                "saved": output.saved,
            }
            runs.append(_Run(kernel, "backward", layout, tensors=tensors, once=given.once, keep=True))
            made.append(gradients)
        _run_all(runs)
        return made

    def tidy(self, inputs: Inputs) -> Inputs:
        """Rows one after another, in the loop's dtype."""
        return Inputs(
            states=[self._rows(tensor) for tensor in inputs.states],
            steps=[self._rows(tensor) for tensor in inputs.steps],
            once=inputs.once,
            kept=[self._rows(tensor) for tensor in inputs.kept],
        )

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is self.dtype and tensor.is_contiguous():
            return tensor
        return tensor.to(self.dtype).contiguous()

    def _empty(self, rows: int, node: Node) -> torch.Tensor:
        return fresh(*concrete_shape(node.shape, rows), dtype=self.dtype)

    def empty_outputs(self, layout: Layout, *, keep: bool) -> Outputs:
        """Room for what the loop makes; what nothing will need again gets one row for each sequence."""
        body, total, rows = self.body, layout.total, layout.num_rows
        return Outputs(
            after=[self._empty(total, node) for node in body.next_states],
            emits=[self._empty(total, node) for node in body.outputs],
            finals=[self._empty(rows, node) for node in body.next_states],
            saved=[self._empty(total if keep else rows, node) for node in body.saved],
        )

    def empty_gradients(
        self, layout: Layout, inputs: Inputs, arriving: Cotangents
    ) -> tuple[Gradients, dict[str, list[torch.Tensor]]]:
        """Room for gradients, and the same by role."""
        body, total = self.body, layout.total
        carried = []
        for state, last in zip(inputs.states, arriving.finals, strict=True):
            # Two, for a step reads one and writes the other; a sequence joins in at its last step with either.
            carry = fresh(2, *state.shape, dtype=self.dtype)
            carried.append(carry.zero_() if last is None else carry.copy_(last.expand_as(carry)))
        ports = body.ports_of(Kind.PER_STEP)
        steps = [None if port.gradient is None else self._empty(total, port.node) for port in ports]
        by_node = {port.gradient: step for port, step in zip(ports, steps, strict=True) if step is not None}
        handed = [by_node[node] if node in by_node else self._empty(total, node) for node in body.to_deferred]
        kept = [
            None if port.gradient is None else torch.zeros(tensor.shape, dtype=self.dtype)
            for port, tensor in zip(body.ports_of(Kind.CONSTANT), inputs.kept, strict=True)
        ]
        gradients = Gradients(states=[carry[0] for carry in carried], steps=steps, kept=kept, handed=handed)
        nothing: list[torch.Tensor] = [torch.empty(0)]
        tensors = {
            "carry_in": carried,
            "carry_out": carried,
            "d_after": [self._arriving(t, node) for t, node in zip(arriving.after, body.next_states, strict=True)],
            "d_emit": [self._arriving(t, node) for t, node in zip(arriving.emits, body.outputs, strict=True)],
            "d_step": [nothing[0] if step is None else step for step in steps],
            "handed": handed,
            "d_kept": [nothing[0] if tensor is None else tensor for tensor in kept],
        }
        return gradients, tensors

    def _arriving(self, tensor: torch.Tensor | None, node: Node) -> torch.Tensor:
        if tensor is None:
            # One row for all: the distance between rows is zero.
            return torch.zeros(1, node.row_size, dtype=self.dtype).expand(2, -1)
        # A row of the batch may be several of the tensor's.
        return self._rows(tensor).reshape(tensor.numel() // max(1, node.row_size), node.row_size)


class _Run:
    """One loop's arguments, kept alive while it runs."""

    def __init__(
        self,
        kernel: CppKernel,
        name: str,
        layout: Layout,
        *,
        tensors: dict[str, list[torch.Tensor]],
        once: list[torch.Tensor],
        keep: bool,
    ) -> None:
        function: Generated = kernel.ahead if name == "forward" else kernel.back
        read_once = kernel.ahead_once if name == "forward" else kernel.back_once
        self.kernel, self.function, self.name = kernel, function, name
        self.layout, self.keep, self.tensors = layout, keep, tensors
        values: dict[Node, Any] = {}
        for port, tensor in zip(kernel.body.ports_of(Kind.WEIGHT), once, strict=True):
            values[port.node] = tensor.detach()
        run(function.prepared, values, layout.total)
        real = kernel.dtype
        slots = function.slots
        pointed = [tensors[slot.role][slot.index] for slot in slots[: len(slots) - len(read_once)]]
        pointed += [values[node].to(real).contiguous() for node in read_once]
        matrices = [values[node].to(real) for node in function.weights]
        self.pointers = array("q", [tensor.data_ptr() for tensor in pointed] or [0])
        self.strides = array("q", [tensor.stride(0) if tensor.dim() else 0 for tensor in pointed] or [0])
        self.weights = array("q", [tensor.data_ptr() for tensor in matrices] or [0])
        self.weight_strides = array("q", [stride for tensor in matrices for stride in tensor.stride()] or [0])
        self.alive = (pointed, matrices)

    def prepare(self, *, team: int) -> _Call:
        """Memory to work in, and the call."""
        function, rows = self.function, self.layout.num_rows
        sizes = (
            function.packed[-1],
            rows * function.scratch,
            team * rows * max(function.private, 1),
            team * rows * function.room,
        )
        places = [0]
        for size in sizes:
            places.append(places[-1] + -(-size // APART) * APART)
        self.memory = fresh(places[-1], dtype=self.kernel.dtype)
        start, each = self.memory.data_ptr(), self.memory.element_size()
        self.call = _Call(
            self.layout.num_steps,
            rows,
            int(self.keep),
            *self.layout.addresses,
            *(item.buffer_info()[0] for item in (self.strides, self.weight_strides, self.pointers, self.weights)),
            *(start + place * each for place in places[:-1]),
        )
        return self.call


def _run_all(runs: Sequence[_Run]) -> None:
    """Share loops and rows out to threads, and run them."""
    for item in runs:
        if item.layout.total == 0:
            _copy_finals(item)
    runs = [item for item in runs if item.layout.total]
    if not runs:
        return
    threads = threads_for(sum(item.layout.total * item.function.work for item in runs))
    rows = sum(item.layout.num_going for item in runs)
    alone = len(runs) == 1 and rows < threads and runs[0].function.shares_columns
    team = threads if alone else 1
    jobs = (_Job * len(runs))()
    for job, item in zip(jobs, runs, strict=True):
        pieces = 0 if alone else 1 if len(runs) % threads == 0 else min(threads, item.layout.num_going)
        job.pack = item.kernel.addresses[f"{item.name}_pack"]
        job.work = item.kernel.addresses[f"{item.name}_work"]
        job.call = ctypes.addressof(item.prepare(team=team))
        job.bounds = item.layout.bounds(max(pieces, 1)).buffer_info()[0]
        job.pieces = pieces
    busy = min(threads, max(sum(job.pieces for job in jobs), team))
    runs[0].kernel.library.stretto_run(jobs, ctypes.c_int64(len(runs)), ctypes.c_int64(busy))


def _copy_finals(item: _Run) -> None:
    for final_state, initial in zip(item.tensors.get("final", []), item.tensors["initial"], strict=False):
        final_state.copy_(initial)
