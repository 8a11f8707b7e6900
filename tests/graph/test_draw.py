"""Pictures of steps: well-formed, complete, escaped, the same every time, and nothing overlaps."""

from collections.abc import Callable
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from defusedxml import ElementTree
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stretto import cells
from stretto.cells import Cell, State
from stretto.graph import (
    Body,
    Graph,
    Operator,
    Plan,
    Stage,
    analyse,
    delayed_graph,
    derive,
    document,
    draw,
    trace,
    two_loop_graph,
)
from stretto.graph.draw import Band, Box, Panel, backward_panel, escape, forward_panel, is_drawn

F, H = 3, 4


def _delay_line() -> Cell:
    graph = Graph()
    graph.input("x", F)
    graph.layer("p", H, activation="tanh", bias=True)
    graph.layer("y", 2)
    graph.connect("x", "p")
    for delay in (0, 1, 4):
        graph.connect("p", "y", delay=delay)
    graph.output("y")
    return graph.cell()


class Everything(Cell):
    """Has a state that never changes, one that no loop carries, work that sinks, a constant and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.around = nn.Linear(F, H), nn.Linear(H, H)
        self.outward, self.fixed = nn.Linear(H, 2), nn.Linear(H, H)
        self.scale = torch.full((H,), 0.5)

    def initial_state(self, batch_size: int) -> State:
        return self.zeros(batch_size, H), self.zeros(batch_size, H), self.zeros(batch_size, H)

    def forward(self, x_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        h, fixed, last = state
        gate = torch.sigmoid(self.around(h))
        new = torch.tanh(self.inward(x_t) + gate * self.fixed(fixed) + torch.rand_like(h)) * self.scale
        after = h * gate + new
        return self.outward(torch.relu(after * gate)) + last[:, :2], (after, fixed, new)


CELLS: dict[str, Callable[[], Cell]] = {
    "LSTM": lambda: cells.LSTM(F, H),
    "GRU": lambda: cells.GRU(F, H),
    "LayerNormLSTM": lambda: cells.LayerNormLSTM(F, H),
    "AttentionCell": lambda: cells.AttentionCell(F, H, memory_size=2),
    "Clockwork": lambda: cells.Clockwork(F, H, periods=(1, 2)),
    "two loops": lambda: two_loop_graph(F, H).cell(),
    "delays": lambda: delayed_graph(F, H, delays=(1, 3)).cell(),
    "delay line": _delay_line,
    "everything": Everything,
}


def _analysed(cell: Cell) -> tuple[Plan, list[Body]]:
    plan = analyse(trace(cell, x_shape=(F,), x_dtype=torch.float32, state=cell.initial_state(1)))
    return plan, [derive(plan.graph, loop) for loop in plan.all_loops]


def _texts(svg: str) -> list[str]:
    return ["".join(item.itertext()) for item in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize("name", CELLS)
def test_a_picture_shows_every_operator_at_its_stage(name: str) -> None:
    torch.manual_seed(0)
    plan, bodies = _analysed(CELLS[name]())
    svg = draw(plan, bodies, title=name)
    texts = _texts(svg)
    backward = [node for body in bodies for node in [*body.backward, *body.deferred] if node.has_rows]
    for node in [node for node in [*plan.graph.nodes, *backward] if is_drawn(node)]:
        assert Operator.of(node).name in texts
    assert {"x", "y", name, "getitem"} & set(texts) == {"x", "y", name}
    for stage in Stage:
        if plan.nodes_at(stage):
            assert any(text.startswith(stage.value.capitalize()) for text in texts)


@pytest.mark.parametrize("name", CELLS)
def test_a_picture_is_the_same_every_time_and_stands_alone(name: str) -> None:
    first, second = (draw(*_analysed(CELLS[name]()), title=name) for _ in range(2))
    assert first == second
    root = ElementTree.fromstring(first)
    ground = next(root.iter("{http://www.w3.org/2000/svg}rect"))
    assert (ground.get("width"), ground.get("height"), ground.get("fill")) == (
        root.get("width"),
        root.get("height"),
        "#ffffff",
    )
    assert root.get("viewBox") == f"0 0 {root.get('width')} {root.get('height')}"
    assert {item.tag.rpartition("}")[2] for item in root.iter()} <= {
        "svg",
        "title",
        "g",
        "rect",
        "path",
        "text",
        "tspan",
    }
    assert not any("href" in key or key.startswith("on") for item in root.iter() for key in item.attrib)


@pytest.mark.parametrize("name", CELLS)
def test_nothing_overlaps(name: str) -> None:
    plan, bodies = _analysed(CELLS[name]())
    panels = [forward_panel(plan), backward_panel(bodies)]
    document(panels, title=name)
    for panel in panels:
        _assert_tidy(panel)


def _assert_tidy(panel: Panel) -> None:
    for one, other in combinations(panel.boxes, 2):
        assert not _overlap(one, other)
    for upper, lower in pairwise(panel.bands):
        assert upper.top + upper.height < lower.top
    for box in panel.boxes:
        band = panel.bands[box.band]
        assert box.middle - box.width / 2 > 0
        assert box.middle + box.width / 2 < panel.width
        assert band.top < box.top
        assert box.bottom < band.top + band.height
    for arrow in panel.arrows:
        (start, top), (end, bottom) = arrow.corners[0], arrow.corners[-1]
        assert abs(start - arrow.source.middle) <= arrow.source.width / 2
        assert abs(end - arrow.target.middle) <= arrow.target.width / 2
        assert bottom == arrow.target.top
        assert all(0 <= x <= panel.width and 0 <= y <= panel.height for x, y in arrow.corners)
        assert arrow.leads_down or arrow.delayed
        if arrow.leads_down:
            assert top == arrow.source.bottom
            assert all(y < below for (_, y), (_, below) in pairwise(arrow.corners))


def _overlap(one: Box, other: Box) -> bool:
    beside = abs(one.middle - other.middle) >= (one.width + other.width) / 2
    return not beside and one.top < other.bottom and other.top < one.bottom


def _linked(panel: Panel) -> list[tuple[str, str, str]]:
    return [(arrow.source.title, arrow.target.title, arrow.label) for arrow in panel.arrows if arrow.delayed]


def test_next_states_become_states() -> None:
    panel = forward_panel(_analysed(cells.LSTM(F, H))[0])
    assert _linked(panel) == [("mul", "state0", ""), ("add", "state1", "")]
    panel = forward_panel(_analysed(two_loop_graph(F, H).cell())[0])
    assert _linked(panel) == [("tanh", "state0", ""), ("state0", "state1", ""), ("tanh", "state2", "")]


def test_what_is_only_passed_on_is_labelled_with_a_number_of_steps() -> None:
    panel = forward_panel(_analysed(delayed_graph(F, H, delays=(1, 30)).cell())[0])
    assert _linked(panel) == [("tanh", "state0", ""), ("state0", "state29", "29 steps")]
    assert [box.title for box in panel.boxes if box.title.startswith("state")] == ["state0", "state29"]


def test_gradients_are_carried_back() -> None:
    panel = backward_panel(_analysed(cells.GRU(F, H))[1])
    assert _linked(panel) == [("add", "d state0", "")]
    results = [box.title for box in panel.boxes if box.look == "value"]
    assert results == ["d state0", "d addmm", "d bias_hh", "d weight_hh"]
    assert [band.stage for band in panel.bands] == ["backward", "deferred"]


def test_the_parts_of_a_split_are_read_from_what_was_split() -> None:
    panel = forward_panel(_analysed(cells.LSTM(F, H))[0])
    parts = [arrow for arrow in panel.arrows if arrow.target.title == "split"]
    assert [arrow.source.title for arrow in parts] == ["add"] * 4
    assert {arrow.target.look for arrow in parts} == {"view"}


def test_unusual_states_are_drawn_at_their_stage() -> None:
    panel = forward_panel(_analysed(Everything())[0])
    band = {box.title: panel.bands[box.band].stage for box in panel.boxes}
    notes = {box.title: box.reads for box in panel.boxes}
    assert (band["state0"], band["state1"], band["state2"]) == ("loop", "hoisted", "sunk")
    assert notes["state1"] == "never changes"
    assert band["random"] == "hoisted"
    assert [item for item in _linked(panel) if "state1" in item] == []


@pytest.mark.parametrize("text", ["<script>alert(1)</script>", 'a"b', "a&b", "\x00\x1b", "\ud800", "�&amp;"])
def test_text_is_escaped(text: str) -> None:
    root = ElementTree.fromstring(document([], title=text, subtitle=text, words=text))
    assert "script" not in {item.tag.rpartition("}")[2] for item in root.iter()}
    shown = "".join(c if c.isprintable() and c != "\ud800" else "\ufffd" for c in text)
    assert root.get("aria-label") == shown
    assert ["".join(item.itertext()) for item in root.iter("{http://www.w3.org/2000/svg}text")] == [shown] * 3


def test_long_names_are_escaped_shortened_and_shown_in_full_when_pointed_at() -> None:
    name = '<b>"&' + "weight_" * 20
    panel = Panel("p", bands=[Band(title="b", note="", stage="loop")])
    panel.boxes.append(Box(title="mm", shape="3", reads=name, look="product", tip=f"mm, reads {name}"))
    svg = document([panel], title="")
    assert "<b>" not in svg
    assert not any(name in text for text in _texts(svg))
    assert any(text.startswith(name[:19]) and text.endswith("…") for text in _texts(svg))
    assert f"<title>{escape(f'mm, reads {name}')}</title>" in svg


@st.composite
def _any_panel(draw: st.DrawFn) -> Panel:
    panel = Panel("any")
    num_bands, num_boxes = draw(st.integers(1, 3)), draw(st.integers(1, 14))
    panel.bands = [Band(title=f"band {number}", note="", stage="loop") for number in range(num_bands)]
    bands = sorted(draw(st.lists(st.integers(0, num_bands - 1), min_size=num_boxes, max_size=num_boxes)))
    for number, band in enumerate(bands):
        look: Any = draw(st.sampled_from(["value", "product", "work", "view"]))
        words = draw(st.text("ab ", max_size=30))
        panel.boxes.append(Box(title=f"{words}{number}", shape="1", reads=words, band=band, look=look))
    pairs = st.tuples(st.integers(0, num_boxes - 1), st.integers(0, num_boxes - 1)).filter(
        lambda pair: pair[0] != pair[1]
    )
    for source, target in sorted({(min(pair), max(pair)) for pair in draw(st.lists(pairs, max_size=25))}):
        panel.connect(panel.boxes[source], panel.boxes[target])
    for source, target in draw(st.lists(pairs, max_size=4)):
        panel.connect(panel.boxes[source], panel.boxes[target], delayed=True)
    return panel


@settings(deadline=None, max_examples=40)
@given(panel=_any_panel())
def test_any_graph_is_laid_out_tidily(panel: Panel) -> None:
    svg = document([panel], title="any")
    assert document([panel], title="any") == svg
    ElementTree.fromstring(svg)
    _assert_tidy(panel)
