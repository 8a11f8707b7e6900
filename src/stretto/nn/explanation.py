"""How a cell is computed: which operators run where, and what a step costs."""

import html
import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

from stretto.graph import LoopSummary, Operator, Product, Summary, document, draw, format_shape
from stretto.kernels import Built, Program

WIDTH: Final = 100
INDENT: Final = 11
JOINED: Final = "\u00a0"
KN: Final = "K\u00a0\u00d7\u00a0N"
IN_LOOPS: Final = ("forward", "backward", "deferred")
PLACES: Final = {
    "once": "from weights alone",
    "hoisted": "for all steps at once, before a loop",
    "loop": "one step at a time",
    "sunk": "for all steps at once, after the loops",
    "deferred": "gradients for all steps at once, after the backward loop",
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """How a cell is computed. `str()` is a table, `svg()` a picture, `counts` the numbers.

    Attributes:
        name: Of the cell.
        backend: "cpp", "triton", "eager" or "torch".
        reason: Why the fastest backend is not used; empty if it is.
        backends: Every backend in the order of preference, with "used" or the reason why it is not.
        counts: Operators at each place: `once`, `hoisted`, `loop`, `sunk`, `deferred`. How many `loops`. Cost per
            step: `forward_gemms`, `forward_passes`, `backward_gemms`, `backward_passes`, and `saved` elements
            (`saved_bytes`) per row besides the `state` elements. What is done for all steps at once: `hoisted_gemms`,
            `sunk_gemms`, `deferred_gemms`. Empty for "torch", of which nothing is known.
        operators: The operators at each place.
        loops: The loops through time, in the order in which they run.
        rewrites: What was rewritten, in words.
        analysis_seconds: Time to trace, analyse and derive.
        compile_seconds: Time to generate and compile, or to find compiled code in the cache.
        measured: What was measured on this machine to find what runs the loops, in words; empty if nothing was.
    """

    name: str
    backend: str
    reason: str
    backends: tuple[tuple[str, str], ...]
    counts: dict[str, int]
    operators: dict[str, tuple[Operator, ...]]
    loops: tuple[LoopSummary, ...]
    rewrites: tuple[str, ...]
    analysis_seconds: float
    compile_seconds: float
    measured: tuple[str, ...]
    _summary: Summary | None = field(repr=False)
    _built: Built = field(repr=False, compare=False)

    @classmethod
    def of(cls, built: Built, name: str) -> "Explanation":
        """Explain what was built."""
        built = built.now()
        summary, counts = None, {}
        if built.plan is not None:
            summary = Summary.of(built.plan, built.program.bodies)
            counts = _counts(summary, built.program)
        return cls(
            name=name,
            backend=built.backend,
            reason=built.reason,
            backends=built.choices,
            counts=counts,
            operators={} if summary is None else summary.operators,
            loops=() if summary is None else summary.loops,
            rewrites=() if built.plan is None else tuple(built.plan.rewrites),
            analysis_seconds=built.analysis_seconds,
            compile_seconds=built.compile_seconds,
            measured=built.measured,
            _summary=summary,
            _built=built,
        )

    def svg(self) -> str:
        """The graph of a step, forward and backward, as a self-contained SVG."""
        title, subtitle = f"One step of {self.name}", f"{self.backend}: {self._built.description}"
        built = self._built
        if built.plan is None:
            return document([], title=title, subtitle=subtitle, words=f"There is no graph: {self.reason}.")
        subtitle += f", because {self.reason}" if self.reason else ""
        note = "; sizes are of one row of the batch"
        return draw(built.plan, built.program.bodies, title=title, subtitle=subtitle + note)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {
            "cell": self.name,
            "backend": self.backend,
            "reason": self.reason,
            "backends": dict(self.backends),
            "counts": dict(self.counts),
            "operators": {place: _plain(found) for place, found in self.operators.items()},
            "loops": [
                {
                    "level": loop.level,
                    "states": {name: list(shape) for name, shape in loop.states.items()},
                    "saved": _plain(loop.saved),
                }
                | {f"{which}_gemms": [[item.K, item.N] for item in getattr(loop, which)] for which in IN_LOOPS}
                for loop in self.loops
            ],
            "rewrites": list(self.rewrites),
            "analysis_seconds": self.analysis_seconds,
            "compile_seconds": self.compile_seconds,
            "measured": list(self.measured),
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>\n{self.svg()}"

    def _lines(self) -> Iterator[str]:
        yield from _row("cell", self.name)
        yield from _row("backend", f"{self.backend}: {self._built.description}")
        for name, reason in self.backends:
            if name != self.backend:
                yield from _row("", f"not {name}: {reason}")
        seconds = f"analysis {_time(self.analysis_seconds)}"
        if self.compile_seconds:
            seconds += f"; generating and compiling, or finding it compiled, {_time(self.compile_seconds)}"
        yield from _row("took", seconds)
        for line in self.measured:
            yield from _row("measured", line)
        if self._summary is None:
            return
        for rewrite in self.rewrites:
            yield from _row("rewritten", rewrite)
        yield ""
        products = _products(self._summary)
        for place, found in self.operators.items():
            parts = [_count_noun(len(found), "operator")] if found else ["nothing"]
            parts += [_format_product(products[place])] if products.get(place) else []
            yield from _row(place, f"{PLACES[place]}: {', '.join(parts)}")
            yield from _row("", _list_operators(found))
        yield ""
        if not self.loops:
            yield from _row("loops", "none: nothing is recurrent")
            return
        for number, loop in enumerate(self.loops, start=1):
            states = ", ".join(f"{name} ({format_shape(shape)})" for name, shape in loop.states.items())
            yield from _row(f"loop {number}", f"level {loop.level}, carries {states}")
        yield ""
        for name in ("forward", "backward"):
            passes = _count_noun(self.counts[f"{name}_passes"], "pass", "passes")
            yield from _row(name, f"per step: {_format_product(products[name])}; {passes} over a row's elements")
        saved, size, state = (self.counts[name] for name in ("saved", "saved_bytes", "state"))
        yield from _row("stored", f"per row and step, for the backward pass: {saved} elements, {size} bytes")
        yield from _row("", f"(besides the states, {state} elements)")
        yield from _row("", _list_operators(item for loop in self.loops for item in loop.saved))


def _products(summary: Summary) -> dict[str, Sequence[Product]]:
    """All products: those at once before and after the loops, and those of all loops."""
    in_loops = {which: [item for loop in summary.loops for item in getattr(loop, which)] for which in IN_LOOPS}
    return {"hoisted": summary.hoisted, "sunk": summary.sunk, **in_loops}


def _counts(summary: Summary, program: Program) -> dict[str, int]:
    loops = summary.loops
    passes = [
        kernel.passes or (loop.forward_operators, loop.backward_operators)
        for kernel, loop in zip(program.loops, loops, strict=True)
    ]
    counts = {place: len(found) for place, found in summary.operators.items()}
    counts |= {f"{which}_gemms": len(found) for which, found in _products(summary).items()}
    return counts | {
        "loops": len(loops),
        "forward_passes": sum(ahead for ahead, _ in passes),
        "backward_passes": sum(back for _, back in passes),
        "saved": sum(math.prod(item.shape) for loop in loops for item in loop.saved),
        "saved_bytes": sum(loop.saved_bytes for loop in loops),
        "state": sum(math.prod(shape) for loop in loops for shape in loop.states.values()),
    }


def _plain(operators: Iterable[Operator]) -> list[dict[str, Any]]:
    return [{"operator": item.name, "shape": list(item.shape)} for item in operators]


def _row(name: str, text: str) -> list[str]:
    """A name in the margin, and beside it a text that is wrapped."""
    wrapped = textwrap.wrap(
        text,
        WIDTH,
        initial_indent=name.ljust(INDENT),
        subsequent_indent=" " * INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(JOINED, " ") for line in wrapped]


def _list_operators(found: Iterable[Operator | Product]) -> str:
    """Operators in order of appearance, equal ones counted; wrapping breaks none of them across lines."""
    parts = [f"{item} ({count} times)" if count > 1 else str(item) for item, count in Counter(found).items()]
    return ", ".join(text.replace(" ", JOINED) for text in parts)


def _format_product(products: Sequence[Product]) -> str:
    if not products:
        return "no products"
    return f"{_count_noun(len(products), 'product')} ({KN}: {_list_operators(products)})"


def _count_noun(count: int, name: str, several: str = "") -> str:
    return f"{count} {name if count == 1 else several or f'{name}s'}"


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
