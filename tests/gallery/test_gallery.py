"""Cells as people write them, from every field, run compiled, and equal the plain Python loop over them.

Each is run by its natural entry: `stretto.RNN` with the module as it is where it is called as cell(x, state), else
`stretto.scan` with the call that its users write in their loop.

Shape legend: B sequences, T steps.
"""

import importlib
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gallery_entry import GALLERY, Entry, call
from gallery_oracle import Batch, by_loop, draw_batch, errors, leaves_of, make, results
from torch import nn
from torch.utils import _pytree as pytree

import stretto
from rounding import ROUNDING

for path in sorted(Path(__file__).parent.glob("gallery_*.py")):
    importlib.import_module(path.stem)

QUICK = {"LIFRecurrentCell", "EALSTM", "Mogrifier", "SLSTM", "Bahdanau"}
"""In the quick suite: a named tuple and autograd.Function, constants, torch's cell, heads, attention."""
COMPILED = [name for name, entry in GALLERY.items() if not entry.reason]
LEFT = [name for name, entry in GALLERY.items() if entry.reason]
NOT_COMPILED = {"LRUComplex", "Izhikevich", "AdLIF"}
"""Cells that could be compiled and are not."""
NOT_TWICE = {"UGRNN"}
"""Cells with an operator that PyTorch itself differentiates once only."""
TWICE = [name for name in COMPILED if not GALLERY[name].is_random and name not in NOT_TWICE]
TREES = ("xs", "state", "fresh", "constants")
DRAWS = 4
SECOND_TOLERANCE = 1e-9
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}

pytestmark = pytest.mark.usefixtures("quick_compiler")


def cases(names: list[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


def run(entry: Entry, cell: nn.Module, batch: Batch) -> tuple[Any, Any, Any]:
    """Final state, outputs and what `explain` says, by the entry that is natural for the cell."""
    resets = {} if batch.resets_BT is None else {"resets": batch.resets_BT}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if entry.step is None:
            rnn = stretto.RNN(cell, state=_row_of(batch))
            ys, state = rnn(batch.xs, batch.state, lengths=batch.lengths, **resets)
            return state, ys, rnn.explain()

        def step(state: Any, x: Any, constants: Any = None) -> Any:
            return call(entry, cell, state, x, constants)

        options = {"lengths": batch.lengths, "constants": batch.constants, **resets}
        state, ys = stretto.scan(step, batch.state, batch.xs, **options)
        return state, ys, stretto.explain(step, batch.state, batch.xs, **options)


def _row_of(batch: Batch) -> Any:
    return pytree.tree_map(lambda part: part.detach()[0], batch.state)


def compare(entry: Entry, *, dtype: torch.dtype, ragged: bool) -> str:
    """Check a cell in one precision; returns the backend and the reason for it."""
    cell, batch = make(entry, dtype=dtype), leaves_of(draw_batch(entry, dtype=dtype, ragged=ragged))
    torch.manual_seed(3)
    state, ys, explanation = run(entry, cell, batch)
    found = results(state, ys, batch, cell)
    truth = loop_results(entry, cell, batch)
    allowed, wrong = TOLERANCE[dtype], errors(found, truth)
    if max(wrong.values()) > allowed and dtype == torch.float32:
        # Long chains lose digits by themselves: as many as the loop in single precision loses against double.
        double = _as_double(batch)
        exact = loop_results(entry, make(entry), double)
        wrong = errors(found, exact)
        allowed = max(allowed, ROUNDING * max(_rounding(entry, batch, exact, draw=draw) for draw in range(DRAWS)))
    assert max(wrong.values()) <= allowed, {name: error for name, error in wrong.items() if error > allowed}
    assert all(math.isfinite(error) for error in wrong.values())
    return explanation.backend + (f": {explanation.reason}" if explanation.reason else "")


def loop_results(entry: Entry, cell: nn.Module, batch: Batch) -> dict[str, torch.Tensor | None]:
    torch.manual_seed(3)
    return results(*by_loop(entry, cell, batch), batch, cell)


def _rounding(entry: Entry, batch: Batch, exact: dict[str, torch.Tensor | None], *, draw: int) -> float:
    """The error of the loop itself where what it is given differs in the last digit: one run may be lucky."""
    generator, cell = torch.Generator().manual_seed(draw), make(entry, dtype=torch.float32)

    def shaken(part: Any) -> Any:
        if part is None or not part.is_floating_point():
            return part
        digits = torch.randint(-1, 2, part.shape, generator=generator)
        return part.detach() * (1 + torch.finfo(torch.float32).eps * digits)

    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.copy_(shaken(parameter))
    near = leaves_of(replace(batch, **{name: pytree.tree_map(shaken, getattr(batch, name)) for name in TREES}))
    return max(errors(loop_results(entry, cell, near), exact).values())


def _as_double(batch: Batch) -> Batch:
    def double(part: Any) -> Any:
        return part.detach().double() if part is not None and part.is_floating_point() else part

    return leaves_of(replace(batch, **{name: pytree.tree_map(double, getattr(batch, name)) for name in TREES}))


@pytest.mark.parametrize("name", cases(COMPILED))
def test_cells_equal_the_loop_and_are_compiled(name: str) -> None:
    entry = GALLERY[name]
    backend = compare(entry, dtype=torch.float64, ragged=not entry.is_random)
    assert (backend == "cpp") is (name not in NOT_COMPILED), backend


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED[::2])
def test_cells_equal_the_loop_in_single_precision(name: str) -> None:
    backend = compare(GALLERY[name], dtype=torch.float32, ragged=False)
    assert (backend == "cpp") is (name not in NOT_COMPILED), backend


@pytest.mark.parametrize("name", cases(TWICE))
def test_second_derivatives_of_cells_are_those_of_the_loop(name: str) -> None:
    entry = GALLERY[name]
    cell, batch = make(entry), leaves_of(draw_batch(entry, ragged=True))
    state, ys, _ = run(entry, cell, batch)
    wrong = errors(
        results(state, ys, batch, cell, twice=True), results(*by_loop(entry, cell, batch), batch, cell, twice=True)
    )
    assert max(wrong.values()) <= SECOND_TOLERANCE, wrong


@pytest.mark.parametrize("name", cases(LEFT))
def test_what_cannot_be_compiled_says_why_and_equals_the_loop(name: str) -> None:
    backend = compare(GALLERY[name], dtype=torch.float64, ragged=False)
    assert backend.startswith("torch: ")
    assert GALLERY[name].reason in backend


def test_the_gallery_is_large_and_nearly_all_of_it_is_compiled() -> None:
    assert len(COMPILED) >= 75
    assert len({entry.field for entry in GALLERY.values()}) >= 10
    assert set(COMPILED) >= NOT_COMPILED | QUICK
    assert len(NOT_COMPILED) <= 0.05 * len(COMPILED)
