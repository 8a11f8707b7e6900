"""What kernels of generated code have in common: the memory that one loop reads and writes, by its role in the loop IR.

Generated code reads contiguous rows; real numbers and booleans have the dtype that the loop computes in, and all
integers are 64-bit integers. Results are converted to the dtypes that the cell has.

Shape legend: B sequences, P rows of all steps together.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, TypeAlias

import torch

from stretto.graph import Body, Kind, Node, concrete_shape
from stretto.kernels.backends.base import AbstractKernel, Cotangents, LoopCall, LoopGradients, LoopResult
from stretto.kernels.batched_ops import as_node_dtype
from stretto.kernels.buffer_pool import empty
from stretto.kernels.layout import Layout
from stretto.kernels.lower import REAL_DTYPES, is_integer, real_dtype

Tensors: TypeAlias = "dict[str, Sequence[Any]]"
"""Tensors by their role in the loop IR; None where the generated code has no such buffer."""


class LaunchError(RuntimeError):
    """Generated code could not be launched; the message says why, and something slower runs instead."""


class GeneratedKernel(AbstractKernel):
    """A kernel whose loops are generated from the loop IR.

    Attributes:
        device: Where it runs.
        dtype: What real numbers are computed in.
    """

    def __init__(self, body: Body, *, device: torch.device) -> None:
        super().__init__(body)
        self.device = device
        self.dtype = real_dtype(body)
        made = (*body.next_states, *body.outputs, *body.saved, *body.to_deferred, *body.nodes_of(Kind.PER_STEP))
        self._one_row = {node: concrete_shape(node.shape, 1) for node in made}

    @cached_property
    def zeros(self) -> torch.Tensor:
        """The gradient of what nothing depends on: one row for all, the distance between rows is zero."""
        size = max((node.row_size for node in (*self.body.next_states, *self.body.outputs)), default=0)
        return torch.zeros(size, dtype=self.dtype, device=self.device)

    def inputs(self, call: LoopCall, result: LoopResult) -> Tensors:
        """What both directions read or write: contiguous rows of the dtypes that they are stored in."""
        body = self.body
        after = self._all_rows(result.after, body.next_states)
        return {
            "before": after,
            "initial": self._all_rows(call.states, body.next_states),
            "per_step": self._all_rows(call.per_step, body.nodes_of(Kind.PER_STEP)),
            "constant": self._all_rows(call.constants, body.nodes_of(Kind.CONSTANT)),
            "after": after,
            "output": self._all_rows(result.outputs, body.outputs),
            "saved": result.saved,
        }

    def stored(self, node: Node) -> torch.dtype:
        """What a value is stored as."""
        return torch.int64 if is_integer(node) else self.dtype

    def _all_rows(self, tensors: Sequence[torch.Tensor], nodes: Sequence[Node]) -> list[torch.Tensor]:
        pairs = zip(tensors, nodes, strict=True)
        return [self._rows(tensor, self.stored(node)) for tensor, node in pairs]

    def _rows(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if tensor.dtype is dtype and tensor.is_contiguous():
            return tensor
        return tensor.to(dtype).contiguous()

    def _empty(self, rows: int, node: Node) -> torch.Tensor:
        first, *rest = self._one_row[node]
        return self._memory(first * rows, *rest, dtype=self.stored(node))

    def _memory(self, *sizes: int, dtype: torch.dtype) -> torch.Tensor:
        if self.device.type == "cpu":
            return empty(*sizes, dtype=dtype)
        return torch.empty(*sizes, dtype=dtype, device=self.device)

    def empty_result(self, layout: Layout, *, keep: bool) -> LoopResult:
        """Memory for what the loop makes; what nothing will need again gets one row for each sequence."""
        body, total, rows = self.body, layout.total, layout.num_rows
        return LoopResult(
            after=[self._empty(total, node) for node in body.next_states],
            outputs=[self._empty(total, node) for node in body.outputs],
            finals=[self._empty(rows, node) for node in body.next_states],
            saved=[self._empty(total if keep else rows, node) for node in body.saved],
        )

    def empty_gradients(self, call: LoopCall, arriving: Cotangents) -> tuple[LoopGradients, Tensors]:
        """Memory for gradients, and the same by role."""
        body, total = self.body, call.layout.total
        carried = []
        for node, state, last in zip(body.next_states, call.states, arriving.finals, strict=True):
            if node.dtype not in REAL_DTYPES:
                carried.append(torch.zeros_like(state)[None])
                continue
            # Two, since a step reads one and writes the other. A sequence joins at its last step, whichever is read
            # there: both start as its final gradient.
            carry = self._memory(2, *state.shape, dtype=self.dtype)
            carried.append(carry.zero_() if last is None else carry.copy_(last.expand_as(carry)))
        ports = body.ports_of(Kind.PER_STEP)
        per_step = [None if port.gradient is None else self._empty(total, port.node) for port in ports]
        by_node = {port.gradient: item for port, item in zip(ports, per_step, strict=True) if item is not None}
        to_deferred = [by_node[node] if node in by_node else self._empty(total, node) for node in body.to_deferred]
        constants = [
            None if port.gradient is None else torch.zeros(tensor.shape, dtype=self.dtype, device=tensor.device)
            for port, tensor in zip(body.ports_of(Kind.CONSTANT), call.constants, strict=True)
        ]
        gradients = LoopGradients([carry[0] for carry in carried], per_step, constants, to_deferred)
        return gradients, {
            "carry_in": carried,
            "carry_out": carried,
            "d_after": [self.zeros if item is None else self._rows(item, self.dtype) for item in arriving.after],
            "d_output": [self.zeros if item is None else self._rows(item, self.dtype) for item in arriving.outputs],
            "d_per_step": per_step,
            "to_deferred": to_deferred,
            "d_constant": constants,
        }

    def give_out(self, result: LoopResult) -> None:
        """Convert what a loop made to the dtypes that the cell has."""
        for tensors, nodes in (
            (result.after, self.body.next_states),
            (result.finals, self.body.next_states),
            (result.outputs, self.body.outputs),
        ):
            _convert(tensors, nodes)

    def give_out_gradients(self, gradients: LoopGradients) -> None:
        """Likewise, of gradients."""
        body = self.body
        _convert(gradients.states, body.next_states)
        _convert(gradients.per_step, body.nodes_of(Kind.PER_STEP))
        _convert(gradients.constants, body.nodes_of(Kind.CONSTANT))
        _convert(gradients.to_deferred, body.to_deferred)


def _convert(tensors: list[Any], nodes: Sequence[Node]) -> None:
    tensors[:] = [
        None if tensor is None else as_node_dtype(tensor, node) for tensor, node in zip(tensors, nodes, strict=True)
    ]
