"""What is said about a cell: the numbers are those of its equations, and a reason is given where it is not fast."""

import json
import math
import re
from typing import Any

import pytest
import torch
from defusedxml import ElementTree
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stretto import RNN, Newton, cells
from stretto.cells import Cell, State
from stretto.graph import delayed_graph, two_loop_graph
from stretto.nn.explanation import PLACES, Explanation

TIMES = "\u00d7"
OLD_KEYS = set(
    "once hoisted loop sunk deferred loops forward_gemms backward_gemms forward_passes backward_passes saved".split()
)


class Projecting(Cell):
    """A simple cell whose output is a product, which can sink, and whose last gate nothing recurrent reads."""

    def __init__(self, input_size: int, hidden_size: int, output_size: int) -> None:
        super().__init__()
        self.hidden_size, self.input_size = hidden_size, input_size
        self.inward = nn.Linear(input_size, hidden_size)
        self.around = nn.Linear(hidden_size, hidden_size, bias=False)
        self.outward = nn.Linear(hidden_size, output_size)

    def initial_state(self, batch_size: int) -> State:
        return self.zeros(batch_size, self.hidden_size)

    def forward(self, x_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        assert isinstance(state, torch.Tensor)
        gates = self.around(state)
        new = torch.tanh(self.inward(x_t) + gates)
        return self.outward(new * torch.sigmoid(gates)), new


class Deciding(Cell):
    """Looks at values, so that no graph describes what it does."""

    input_size = 2

    def initial_state(self, batch_size: int) -> State:
        return self.zeros(batch_size, 2)

    def forward(self, x_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        assert isinstance(state, torch.Tensor)
        new = x_t + state
        return (new, new * 2) if new.sum() > 0 else (new, new)


def _explained(cell: nn.Module, input_size: int | None = None, **options: Any) -> Explanation:
    return RNN(cell, **{"backend": "eager"} | options).explain(input_size)


def _gemms(explanation: Explanation, which: str) -> list[tuple[int, int]]:
    return [(item.K, item.N) for loop in explanation.loops for item in getattr(loop, which)]


@settings(deadline=None, max_examples=8)
@given(F=st.integers(1, 9), H=st.integers(2, 9), double=st.booleans())
def test_the_numbers_of_an_lstm_are_those_of_its_equations(F: int, H: int, double: bool) -> None:
    explained = _explained(cells.LSTM(F, H).to(torch.float64 if double else torch.float32))
    counts = explained.counts
    assert _gemms(explained, "forward") == [(H, 4 * H)]
    assert _gemms(explained, "backward") == [(4 * H, H)]
    assert _gemms(explained, "deferred") == [(H, 4 * H)]
    assert (counts["once"], counts["hoisted"], counts["loop"], counts["sunk"], counts["loops"]) == (2, 1, 15, 0, 1)
    # Four gates and the squashed cell are stored; the cell and the output are states anyway.
    assert (counts["saved"], counts["saved_bytes"], counts["state"]) == (5 * H, 5 * H * (8 if double else 4), 2 * H)
    assert explained.loops[0].states == {"state0": (H,), "state1": (H,)}
    assert str(explained.operators["hoisted"][0]) == f"addmm {4 * H}"


@pytest.mark.parametrize(
    ("cell", "carried"),
    [
        (cells.GRU(3, 4), [1]),
        (cells.AttentionCell(3, 4, memory_size=2), [2]),
        (two_loop_graph(3, 4).cell(), [1, 1]),
        (delayed_graph(3, 4, delays=(1, 3)).cell(), [3]),
        (Projecting(3, 4, 2), [1]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_counts_are_flat_and_agree_with_what_is_listed(cell: Cell, carried: list[int]) -> None:
    explained = _explained(cell, 3)
    assert set(explained.counts) >= OLD_KEYS
    assert all(type(count) is int and count >= 0 for count in explained.counts.values())
    assert {place: len(found) for place, found in explained.operators.items()} == {
        place: explained.counts[place] for place in PLACES
    }
    assert [len(loop.states) for loop in explained.loops] == carried
    assert explained.counts["saved"] == sum(math.prod(item.shape) for loop in explained.loops for item in loop.saved)
    for which in ("forward", "backward", "deferred"):
        assert explained.counts[f"{which}_gemms"] == len(_gemms(explained, which))


def test_loops_behind_each_other_have_levels() -> None:
    explained = _explained(two_loop_graph(3, 4).cell(), 3)
    assert [(loop.level, list(loop.states)) for loop in explained.loops] == [(1, ["state0"]), (2, ["state2"])]
    assert "loop 2     level 2, carries state2 (4)" in str(explained)


def test_operators_are_listed_as_sunk_or_in_the_loop() -> None:
    explained = _explained(Projecting(3, 4, 2))
    assert [item.name for item in explained.operators["sunk"]] == ["addmm"]
    assert {"sigmoid", "tanh"} <= {item.name for item in explained.operators["loop"]}
    assert explained.counts["sunk_gemms"] == 1
    assert f"1 product (K {TIMES} N: 4 {TIMES} 2)" in str(explained)


def test_a_concatenation_that_was_split_is_reported() -> None:
    class Joined(Projecting):
        def __init__(self) -> None:
            super().__init__(3, 4, 2)
            self.both = nn.Linear(7, 4)

        def forward(self, x_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
            assert isinstance(state, torch.Tensor)
            new = torch.tanh(self.both(torch.cat([x_t, state], dim=1)))
            return new, new

    explained = _explained(Joined())
    assert (explained.counts["hoisted_gemms"], _gemms(explained, "forward")) == (1, [(4, 4)])
    assert len(explained.rewrites) == 1
    assert f"rewritten  {explained.rewrites[0]}"[:60] in str(explained)


def test_nothing_recurrent_is_shown() -> None:
    class Forgetful(Projecting):
        def forward(self, x_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
            del state
            new = self.inward(x_t)
            return new, new

    explained = _explained(Forgetful(3, 4, 2))
    assert (explained.counts["loops"], explained.counts["loop"], explained.counts["hoisted_gemms"]) == (0, 0, 1)
    assert "nothing is recurrent" in str(explained)
    assert "nothing is recurrent" in explained.svg()


def test_generated_code_makes_fewer_passes_than_operators() -> None:
    eager, compiled = _explained(cells.GRU(3, 4)), _explained(cells.GRU(3, 4), backend="auto")
    assert (compiled.backend, compiled.reason) == ("cpp", "")
    assert compiled.backends == (
        ("cpp", "used"),
        *((name, "cpp comes first") for name in ("triton", "cudagraph", "eager", "torch")),
    )
    for name in ("forward_passes", "backward_passes"):
        assert 0 < compiled.counts[name] < eager.counts[name]
    same = set(compiled.counts) - {"forward_passes", "backward_passes"}
    assert {name: compiled.counts[name] for name in same} == {name: eager.counts[name] for name in same}
    assert compiled.compile_seconds > 0
    assert "compiling" in str(compiled)
    assert "compiling" not in str(eager)


def test_every_backend_is_listed_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _explained(cells.GRU(3, 4))
    assert (asked.backend, asked.reason) == ("eager", "backend='eager' was asked for")
    monkeypatch.setenv("CXX", "no-such-compiler")
    without = _explained(cells.GRU(3, 4), backend="auto")
    solved = _explained(cells.GRU(3, 4), backend="auto", solver=Newton())
    assert (without.backend, solved.backend) == ("torch", "eager")
    assert dict(without.backends)["eager"] == "the cell as it is takes less time"
    assert "no-such-compiler" in without.reason
    for explained in (asked, without, solved):
        assert [name for name, _ in explained.backends] == ["cpp", "triton", "cudagraph", "eager", "torch"]
        assert dict(explained.backends)[explained.backend] == "used"
        assert f"not cpp: {explained.reason}" in " ".join(str(explained).split())
        assert explained.backend in explained.svg()
        assert json.loads(json.dumps(explained.as_dict()))["backends"] == dict(explained.backends)


def test_a_cell_without_a_graph_is_explained_with_its_reason() -> None:
    explained = _explained(Deciding(), backend="auto")
    assert (explained.backend, explained.counts, explained.operators, explained.loops) == ("torch", {}, {}, ())
    assert "depends on the data" in " ".join(str(explained).split())
    root = ElementTree.fromstring(explained.svg())
    assert "depends on the data" in "".join(root.itertext())
    assert json.loads(json.dumps(explained.as_dict()))["reason"] == explained.reason


@pytest.mark.parametrize(
    "cell", [cells.LSTM(3, 4), cells.AttentionCell(3, 4), Deciding()], ids=lambda c: type(c).__name__
)
def test_the_table_is_narrow_and_nothing_in_it_is_torn_apart(cell: Cell) -> None:
    explained = _explained(cell, backend="auto" if isinstance(cell, Deciding) else "eager")
    lines = str(explained).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0] == f"cell       {type(cell).__name__}"
    assert not any(line.endswith(TIMES) or re.search(r"\(\d+$", line) for line in lines)
    assert "\u00a0" not in str(explained)
    for found in explained.operators.values():
        for item in found:
            assert any(str(item) in line for line in lines)


def test_everything_as_plain_values() -> None:
    explained = _explained(cells.LSTM(3, 4))
    document = json.loads(json.dumps(explained.as_dict()))
    assert document["cell"] == "LSTM"
    assert document["counts"] == explained.counts
    assert document["operators"]["hoisted"] == [{"operator": "addmm", "shape": [16]}]
    assert document["loops"][0]["forward_gemms"] == [[4, 16]]
    assert document["loops"][0]["states"] == {"state0": [4], "state1": [4]}


def test_notebooks_get_escaped_text_and_the_picture() -> None:
    explained = _explained(type("<i>Cell", (cells.LSTM,), {})(3, 4))
    page, picture = explained._repr_html_(), explained.svg()
    assert picture in page
    assert "<i>" not in page
    assert "&lt;i&gt;Cell" in page
    ElementTree.fromstring(f"<div>{page}</div>")
