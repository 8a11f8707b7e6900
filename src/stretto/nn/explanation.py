"""What became of a cell: which operators are computed where, and what a step costs."""

from dataclasses import dataclass
from typing import final

from stretto.graph.analyse import Place
from stretto.graph.draw import draw
from stretto.kernels.build import Built
from stretto.kernels.cpp import CppKernel
from stretto.kernels.program import Program


@final
@dataclass(frozen=True, slots=True)
class Explanation:
    """What became of a cell. `str()` is a table, `svg()` a picture, `counts` the numbers.

    Attributes:
        name: Of the cell.
        kernel: "cpp", "eager" or "plain".
        reason: Why not the fastest; empty if it is.
        counts: Operators at each place, and what a step costs: `once`, `hoisted`, `loop`, `sunk`, `deferred`, `loops`,
            `forward_gemms`, `forward_passes`, `backward_gemms`, `backward_passes`, `saved` (elements a row and step).
        operators: Names of the operators at each place.
        rewrites: What was rewritten, in words.
    """

    name: str
    kernel: str
    reason: str
    counts: dict[str, int]
    operators: dict[str, list[str]]
    rewrites: list[str]
    built: Built

    @classmethod
    def of(cls, built: Built, name: str) -> "Explanation":
        """Explain what was built."""
        counts: dict[str, int] = {}
        operators: dict[str, list[str]] = {}
        if built.plan is not None and isinstance(built.program, Program):
            for place in Place:
                nodes = [node for node in built.plan.nodes_at(place) if node.dtype is not None]
                operators[place.value] = [node.label for node in nodes]
            bodies = built.program.bodies
            operators["deferred"] = [node.label for body in bodies for node in body.deferred if node.dtype is not None]
            counts = {place: len(names) for place, names in operators.items()}
            counts["loops"] = len(bodies)
            gemms = {"mm", "addmm", "bmm", "baddbmm"}
            counts["forward_gemms"] = sum(node.label in gemms for body in bodies for node in body.forward)
            counts["backward_gemms"] = sum(node.label in gemms for body in bodies for node in body.backward)
            kernels = [k for level in built.program.kernels for k in level if isinstance(k, CppKernel)]
            counts["forward_passes"] = sum(kernel.ahead.passes for kernel in kernels)
            counts["backward_passes"] = sum(kernel.back.passes for kernel in kernels)
            counts["saved"] = sum(node.row_size for body in bodies for node in body.saved)
        rewrites = built.plan.rewrites if built.plan is not None else []
        return cls(name, built.kernel, built.reason, counts, operators, rewrites, built)

    def svg(self) -> str:
        """The graph of a step as a picture."""
        return draw(self)

    def __str__(self) -> str:
        return self.name
