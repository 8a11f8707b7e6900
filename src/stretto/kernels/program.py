"""A plan made runnable: what is computed once, for all steps at once, and in loops, in the right order.

Shape legend: B sequences, P rows of all steps together, F features of the input.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch

from stretto.errors import StrettoError
from stretto.graph import Body, Loop, Node, Plan, Stage, run
from stretto.kernels.folded import evaluate_folded
from stretto.kernels.kernel import AbstractKernel, Inputs
from stretto.kernels.layout import Layout
from stretto.kernels.loops import LoopRequest, LoopResult, run_loops, truth

Walk: TypeAlias = "Generator[list[LoopRequest], list[LoopResult], tuple[torch.Tensor, list[torch.Tensor]]]"


@final
@dataclass(slots=True)
class Program:
    """A plan with a kernel for each loop, by level."""

    plan: Plan
    kernels: list[list[AbstractKernel]]

    @property
    def bodies(self) -> list[Body]:
        """The loops' bodies."""
        return [kernel.body for kernel in self.loops]

    @property
    def loops(self) -> list[AbstractKernel]:
        """What runs the loops."""
        return [kernel for level in self.kernels for kernel in level]

    def parts(
        self,
        layout: Layout,
        x_PF: torch.Tensor,
        states: Sequence[torch.Tensor],
        parameters: Mapping[str, torch.Tensor],
    ) -> Walk:
        """Do everything but the loops: they are asked for, so that those of several programs can run at once.

        Args:
            layout: Of the rows.
            x_PF: The input's rows.
            states: Initial states (B, ...), sequences sorted as in `layout`.
            parameters: Parameters and buffers of the cell by name.

        Returns:
            A generator of loops to run, which is sent their results and returns outputs of all rows and final states.
        """
        graph, plan = self.plan.graph, self.plan
        values: dict[Node, Any] = dict(graph.constants)
        values.update((node, parameters[name]) for name, node in graph.parameters.items())
        if tuple(x_PF.shape[1:]) != graph.x.row_shape:
            raise StrettoError(
                f"a step's input has the shape {tuple(x_PF.shape[1:])} and was traced as {graph.x.row_shape}",
                fix="Give inputs of one shape to one layer.",
            )
        # The step was traced on rows that lie one after another.
        values[graph.x] = x_PF.contiguous()
        states = [state.contiguous() for state in states]
        run(plan.nodes_at(Stage.ONCE), values, layout.total)
        finals: dict[int, torch.Tensor] = {index: states[index] for index in plan.constants_per_row}
        for index in plan.constants_per_row:
            if any(graph.states[index] in node.inputs for level in plan.maps for node in level):
                values[graph.states[index]] = layout.spread(states[index])
        after = dict(zip(graph.states, graph.next_states, strict=True))
        position = {state: index for index, state in enumerate(graph.states)}
        for loops, kernels, maps in zip(plan.loops, self.kernels, plan.maps, strict=True):
            if loops:
                results = yield self._requests(loops, kernels, layout, states, values)
                self._take(loops, results, layout, states, values=values, finals=finals)
            for node in maps:
                if node.op is None:
                    if node not in values:
                        earlier = self._value(after[node], values, layout, states)
                        values[node] = layout.shifted(earlier, states[position[node]])
                elif node not in values:
                    values[node] = evaluate_folded(node, values, layout.total)
        for index, node in enumerate(graph.next_states):
            if index not in finals:
                finals[index] = layout.last(self._value(node, values, layout, states), states[index])
        y = self._value(graph.y, values, layout, states)
        return y, [finals[index] for index in range(len(states))]

    def _value(self, node: Node, values: dict[Node, Any], layout: Layout, states: Sequence[torch.Tensor]) -> Any:
        """A value of all steps; states that were only needed here are made now."""
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
            value = values[state] = layout.shifted(value, states[index])
        return value

    def _requests(
        self,
        loops: Sequence[Loop],
        kernels: Sequence[AbstractKernel],
        layout: Layout,
        states: Sequence[torch.Tensor],
        values: dict[Node, Any],
    ) -> list[LoopRequest]:
        return [
            LoopRequest(
                kernel,
                layout,
                Inputs(
                    states=[states[index] for index in loop.states],
                    steps=[self._value(node, values, layout, states) for node in loop.per_step],
                    once=[values[node] for node in loop.weights],
                    kept=[states[index] for index in loop.constants_per_row],
                ),
            )
            for loop, kernel in zip(loops, kernels, strict=True)
        ]

    def _take(
        self,
        loops: Sequence[Loop],
        results: Sequence[LoopResult],
        layout: Layout,
        states: Sequence[torch.Tensor],
        *,
        values: dict[Node, Any],
        finals: dict[int, torch.Tensor],
    ) -> None:
        graph = self.plan.graph
        for loop, result in zip(loops, results, strict=True):
            values.update((node, truth(t, node)) for node, t in zip(loop.outputs, result.emits, strict=True))
            for index, after, final_state in zip(loop.states, result.after, result.finals, strict=True):
                values[graph.next_states[index]] = after
                finals[index] = final_state
            for index in loop.states:
                state = graph.states[index]
                if state not in values and any(state in node.inputs for level in self.plan.maps for node in level):
                    values[state] = layout.shifted(values[graph.next_states[index]], states[index])


def run_together(walks: Sequence[Walk]) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Run programs that do not depend on each other, their loops at once.

    Returns:
        Outputs of all rows and final states, of each program.
    """
    finished: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
    asking: dict[int, list[LoopRequest]] = {}
    answers: dict[int, list[LoopResult] | None] = dict.fromkeys(range(len(walks)))
    while answers:
        asking = {}
        for index, answer in answers.items():
            try:
                asking[index] = walks[index].send(answer)  # type: ignore[arg-type]
            except StopIteration as end:
                finished[index] = end.value
        results = iter(run_loops([request for requests in asking.values() for request in requests]) if asking else [])
        answers = {index: [next(results) for _ in requests] for index, requests in asking.items()}
    return [finished[index] for index in range(len(walks))]
