"""A plan made runnable: what is computed once, for all steps at once, and in loops, in the right order.

    once      values of weights alone
    level 0   operators for all steps at once (hoisted)
    level 1   loops, which the program yields to its caller; then operators that read them
    level 2   loops that read those, and so on; the last level's operators are the sunk ones

Shape legend: B sequences, P rows of all steps together, F features of the input.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, final

import torch

from stretto.errors import StrettoError
from stretto.graph import Node, Plan, Stage, run
from stretto.kernels.backends.base import AbstractKernel, Cost, LoopCall, LoopCoroutine, Program
from stretto.kernels.batched_ops import as_node_dtype, evaluate_batched
from stretto.kernels.layout import Layout

MAX_WAVE_CHUNKS: Final = 16
CHUNK_COST: Final = 1 << 24
"""Multiplications that could be done in the time it takes to prepare a chunk of a wave, forward and backward."""
TEAM_SPEEDUP: Final = 1.9
"""How much faster a layer of large weights is by two threads or more than by one."""
MAX_WAVE_SHARE: Final = 0.75
"""The share of the time of layers one after another that a wave must be expected to take, at most."""


@final
class TracedProgram(Program):
    """A plan with a kernel for each loop, by level."""

    def __init__(self, plan: Plan, kernels: Sequence[Sequence[AbstractKernel]]) -> None:
        self.plan = plan
        self.kernels = kernels
        self.loops = [kernel for level in kernels for kernel in level]
        self._once = plan.nodes_at(Stage.ONCE)
        read = {item for level in plan.maps for node in level for item in node.inputs}
        self._read_by_maps = {index for index, state in enumerate(plan.graph.states) if state in read}
        read |= {plan.graph.y, *plan.graph.next_states}
        self._spread = [node for node in plan.per_row if node in read and node.dtype is not None]
        self._spread += [plan.graph.states[index] for index in plan.constants_per_row & self._read_by_maps]

    @property
    def cost(self) -> Cost | None:
        """What its loops cost; None if a kernel does not know."""
        return _total(kernel.cost for kernel in self.loops)

    def coroutine(
        self,
        layout: Layout,
        x_PF: torch.Tensor,
        states: Sequence[torch.Tensor],
        parameters: Mapping[str, torch.Tensor],
    ) -> LoopCoroutine:
        """Do everything but the loops; see `Program`."""
        graph = self.plan.graph
        if not graph.narrow:
            return self._coroutine(layout, x_PF, states, parameters)
        states = [as_node_dtype(state, node) for state, node in zip(states, graph.states, strict=True)]
        parameters = {name: as_node_dtype(parameters[name], node) for name, node in graph.parameters.items()}
        return self._narrowed(self._coroutine(layout, as_node_dtype(x_PF, graph.x), states, parameters))

    def _narrowed(self, coroutine: LoopCoroutine) -> LoopCoroutine:
        """What a step computed in single precision, in the dtypes that it has outside."""
        graph = self.plan.graph
        y, finals = yield from coroutine
        finals = [t.to(graph.narrow.get(node, t.dtype)) for t, node in zip(finals, graph.states, strict=True)]
        return y.to(graph.narrow.get(graph.y, y.dtype)), finals

    def _coroutine(
        self,
        layout: Layout,
        x_PF: torch.Tensor,
        states: Sequence[torch.Tensor],
        parameters: Mapping[str, torch.Tensor],
    ) -> LoopCoroutine:
        graph, plan = self.plan.graph, self.plan
        values: dict[Node, Any] = dict(graph.constants)
        values.update((node, parameters[name]) for name, node in graph.parameters.items())
        if tuple(x_PF.shape[1:]) != graph.x.row_shape:
            raise StrettoError(
                f"a step's input has the shape {tuple(x_PF.shape[1:])} and was traced as {graph.x.row_shape}",
                fix="Give inputs of one shape to one layer.",
            )
        # The step was traced on contiguous rows.
        values[graph.x] = x_PF.contiguous()
        states = [state.contiguous() for state in states]
        run(self._once, values, layout.total)
        # Parts of the state that never change, and what depends on these and on weights alone: once per sequence.
        finals: dict[int, torch.Tensor] = {index: states[index] for index in plan.constants_per_row}
        same = values | {graph.states[index]: states[index] for index in plan.constants_per_row}
        for node in plan.per_row:
            same[node] = evaluate_batched(node, same, layout.num_rows)
        for node in self._spread:
            values[node] = layout.spread(same[node])
        for loops, kernels, maps in zip(plan.loops, self.kernels, plan.maps, strict=True):
            if loops:
                # The caller runs the loops, perhaps together with those of other programs, and sends their results.
                results = yield [
                    LoopCall(
                        kernel,
                        layout,
                        states=[states[index] for index in loop.states],
                        per_step=[self._value(node, values, layout, states) for node in loop.per_step],
                        weights=[values[node] for node in loop.weights],
                        constants=[same[node] for node in loop.constants],
                    )
                    for loop, kernel in zip(loops, kernels, strict=True)
                ]
                for loop, result in zip(loops, results, strict=True):
                    outputs = zip(loop.outputs, result.outputs, strict=True)
                    values.update((node, as_node_dtype(tensor, node)) for node, tensor in outputs)
                    for index, tensor, final_state in zip(loop.states, result.after, result.finals, strict=True):
                        values[graph.next_states[index]], finals[index] = tensor, final_state
                    for index in self._read_by_maps.intersection(loop.states):
                        self._value(graph.states[index], values, layout, states)
            for node in maps:
                # A part of the state stands for its next state, shifted by one step; all else is for all steps at once.
                if node.op is None:
                    self._value(node, values, layout, states)
                elif node not in values:
                    values[node] = evaluate_batched(node, values, layout.total)
        finals |= {
            index: layout.last(self._value(node, values, layout, states), states[index])
            for index, node in enumerate(graph.next_states)
            if index not in finals
        }
        y = self._value(graph.y, values, layout, states)
        return y, [finals[index] for index in range(len(states))]

    def _value(self, node: Node, values: dict[Node, Any], layout: Layout, states: Sequence[torch.Tensor]) -> Any:
        """A value of all steps.

        A state on no loop is its next state, shifted by one step. That may be another such state: in a delay line
        h3 <- h2 <- h1 they form a chain, which is followed to a value that is known, and shifted on the way back.
        """
        chain = []
        graph = self.plan.graph
        while node not in values:
            index = graph.states.index(node)
            if index in self.plan.constants_per_row:
                values[node] = layout.spread(states[index])
            else:
                chain.append((node, index))
                node = graph.next_states[index]
        value = values[node]
        for state, index in reversed(chain):
            value = values[state] = layout.shift(value, states[index])
        return value


def _total(costs: Iterable[Cost | None]) -> Cost | None:
    given = list(costs)
    known = [cost for cost in given if cost is not None]
    if len(known) < len(given):
        return None
    return Cost(sum(cost.work for cost in known), any(cost.shares_columns for cost in known))


def wavefront_chunks(programs: Sequence[Program], layout: Layout) -> int:
    """Chunks of time for layers run as a wave, in which each works one chunk behind the one below.

        layer 2                chunk 0   chunk 1   chunk 2
        layer 1      chunk 0   chunk 1   chunk 2
        layer 0      chunk 0   chunk 1   chunk 2      ...     columns run at once, each row by one thread

    It pays where rows are too few to keep all threads busy. More chunks fill the corners of the wave better, and each
    costs some preparation. It depends on sizes alone, never on a clock: weight gradients are summed chunk by chunk.

    Args:
        programs: One for each layer, from the bottom.
        layout: Of the batch.

    Returns:
        The number that is expected to be fastest; 1 where layers had better run one after another.
    """
    threads = torch.get_num_threads()
    if len(programs) < 2 or layout.num_nonempty >= threads:
        return 1
    cost = _total(program.cost for program in programs)
    if cost is None:
        return 1
    total = cost.work * layout.total
    team = TEAM_SPEEDUP if cost.shares_columns else 1.0
    best, chosen = MAX_WAVE_SHARE * total / team, 1
    for count in range(2, min(MAX_WAVE_CHUNKS, layout.num_steps) + 1):
        each = total / len(programs) / count + CHUNK_COST
        waves = count + len(programs) - 1
        rounds = sum(-(-min(wave + 1, len(programs), waves - wave) // threads) for wave in range(waves))
        if rounds * each < best:
            best, chosen = rounds * each, count
    return chosen
