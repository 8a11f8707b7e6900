"""Random cells and batches. A quick run tries few of them, a long one a number in proportion to `STRETTO_FUZZ`.

Examples are the same in every run, unless `STRETTO_FUZZ_NEW` is set: then they are new ones.
"""

import math
import os
from typing import Any, Final

import fuzz_idioms as idioms
import fuzz_pointwise as pointwise
import fuzz_shapes as shapes
from fuzz_cell import Case, Recipe, Sizes
from fuzz_writer import Draw, Writer
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

LONG_RUN: Final = int(os.environ.get("STRETTO_FUZZ") or 0)
"""Examples of the largest test in a long run; none by default."""
IS_NEW: Final = bool(os.environ.get("STRETTO_FUZZ_NEW"))


def fuzzed(quick: int, *, share: float) -> settings:
    """Settings for a test of `quick` examples, or of a share of a long run."""
    return settings(
        max_examples=max(quick, int(share * LONG_RUN)),
        derandomize=not IS_NEW,
        deadline=None,
        print_blob=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


KINDS: Final = (
    *[pointwise.unary] * 4,
    *[pointwise.binary] * 5,
    *[pointwise.linear] * 3,
    *[idioms.gates] * 2,
    *[idioms.sum_of_products] * 2,
    idioms.several_products,
    idioms.attention,
    idioms.delay_line,
    idioms.normalised,
    *[pointwise.with_number] * 2,
    *[pointwise.with_leaf] * 3,
    *[pointwise.choice] * 4,
    *[shapes.window] * 2,
    *[shapes.parts] * 2,
    *[shapes.turned] * 2,
    *[shapes.join] * 2,
    *[shapes.reduction] * 2,
    *[shapes.over] * 2,
    *[shapes.batched] * 2,
    *[shapes.heads] * 2,
    shapes.elsewhere,
    shapes.layer_norm,
    shapes.stack,
    pointwise.comparison,
    pointwise.three,
    pointwise.matmul,
    pointwise.constant_rows,
)

_vectors = st.sampled_from(pointwise.WIDTHS).map(lambda width: (width,))
_matrices = st.tuples(st.sampled_from((2, 1, 3, 4)), st.sampled_from((3, 1, 2, 5, 8, 9)))
_sizes: st.SearchStrategy[Sizes] = st.one_of(_vectors, _vectors, _vectors, _matrices, st.just(()))


@st.composite
def recipes(
    draw: Draw,
    *,
    exotic: bool = False,
    shortest: int = 0,
    longest: int = 12,
    width: int | None = None,
    fewest_states: int = 1,
) -> Recipe:
    """Cells, with operators that no code is generated for if `exotic`; writing takes `shortest` to `longest` turns.

    With a `width`, input and output are vectors, and the input has that many features.
    """
    x: Sizes = draw(st.one_of(_vectors, _vectors, _matrices)) if width is None else (width,)
    states = tuple(draw(st.lists(_sizes, min_size=fewest_states, max_size=4)))
    w = Writer(draw, x, states, exotic=exotic)
    kinds = (*KINDS, *[shapes.exotic] * 4) if exotic else KINDS
    for _ in range(draw(st.integers(shortest, longest))):
        w.one_of(kinds)(w)
    after = tuple(_next_state(w, index) for index in range(1, 1 + len(states)))
    y = _output(w, after)
    if width is not None and len(w[y].sizes) != 1:
        y = w.add("view", y, settings=(w[y].example[0].numel(),))
    nesting = draw(st.sampled_from(("flat", *(("bare",) if len(states) == 1 else ("nested",)))))
    initial = draw(st.sampled_from(("zeros", "learned")))
    return Recipe(x=x, states=states, code=tuple(w.code), after=after, y=y, nesting=nesting, initial=initial).pruned()


def _next_state(w: Writer, state: int) -> int:
    """The next value of a state: usually a product of what was computed, sometimes another state, or itself."""
    sizes = w[state].sizes
    kind = w.one_of(("made", "made", "made", "made", "found", "found", "kept", "moved"))
    if kind == "kept":
        return state
    if kind == "moved":
        return int(w.one_of([index for index in range(w.num_inputs) if w[index].sizes == sizes]))
    found = w.pick_rows(sizes=sizes) if kind == "found" else None
    if found is None:
        found = _fitted(w, _side_by_side(w), sizes)
    if w.one_of((False, True, True)):
        mixed = w.add(w.one_of(("mix", "mul", "add", "gate")), found, state)
        found = mixed if w[mixed].sizes == sizes else found
    return w.add(w.one_of(("tanh", "sigmoid", "tanh", "atan")), found) if w.one_of((True, True, False)) else found


def _side_by_side(w: Writer) -> int:
    """A vector of some values that nothing has read yet; of any value if there are none."""
    fresh = [
        index
        for index, register in enumerate(w.registers)
        if register.is_real and register.has_rows and index not in w.used
    ]
    chosen = [w.one_of(fresh) for _ in range(w.number(1, 3))] if fresh else [w.any_rows()]
    flat = []
    for index in dict.fromkeys(chosen):
        length = w[index].example[0].numel()
        flat.append(index if w[index].sizes == (length,) else w.add("view", index, settings=(length,)))
    return flat[0] if len(flat) == 1 else w.add("cat", *flat, settings=(1,))


def _fitted(w: Writer, vector: int, sizes: Sizes) -> int:
    """A vector brought to some sizes by a product."""
    count = math.prod(sizes)
    made = w.add("linear", vector, w.add("parameter", settings=(count, w[vector].sizes[0])))
    return made if sizes == (count,) else w.add("view", made, settings=sizes)


def _output(w: Writer, after: tuple[int, ...]) -> int:
    """The output: a next state, what nothing has read yet, or anything with rows."""
    kind = w.one_of(("state", "rest", "any"))
    if kind == "state":
        return int(w.one_of(after))
    return _side_by_side(w) if kind == "rest" else w.any_rows()


@st.composite
def cases(draw: Draw) -> Case:
    """Batches of one to five sequences of up to seven steps, some of them empty."""
    longest = draw(st.integers(1, 7))
    count = draw(st.integers(1, 5))
    ragged = draw(st.booleans())
    lengths: list[int] = [longest] * count
    if ragged:
        lengths = draw(st.lists(st.integers(0, longest), min_size=count, max_size=count))
        lengths[draw(st.integers(0, count - 1))] = longest
    loss: Any = draw(st.sampled_from(("both", "y", "last", 0)))
    return Case(
        lengths=tuple(lengths),
        padding=draw(st.sampled_from((0, 0, 2))),
        given_state=draw(st.booleans()),
        x_learns=draw(st.sampled_from((True, True, False))),
        loss_on=loss,
        strided=draw(st.sampled_from((False, False, True))),
        packed=draw(st.sampled_from((False, False, True))),
        weighted=draw(st.sampled_from((True, True, False))),
        resets=draw(st.sampled_from((0.0, 0.0, 0.3, 1.0))),
        seed=draw(st.integers(0, 2**16)),
    )
