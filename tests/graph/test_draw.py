"""Pictures of steps: well-formed, complete, escaped, the same every time, and nothing overlaps."""

from collections.abc import Callable
from itertools import combinations, pairwise

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
from stretto.graph.draw import escape
from stretto.graph.draw_layout import Layout, Rectangle, assign_rows, lay_out
from stretto.graph.draw_panels import Band, Box, Delayed, Look, Panel, backward_panel, forward_panel, is_drawn
from stretto.graph.summary import SAME_VALUE_BACKWARD

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


def _panels(cell: Cell) -> list[Panel]:
    plan, bodies = _analysed(cell)
    return [forward_panel(plan), backward_panel(bodies)]


@pytest.mark.parametrize("name", CELLS)
def test_a_picture_shows_every_operator_at_its_stage(name: str) -> None:
    torch.manual_seed(0)
    plan, bodies = _analysed(CELLS[name]())
    svg = draw(plan, bodies, title=name)
    texts = _texts(svg)
    backward = [node for body in bodies for node in [*body.backward, *body.deferred] if node.has_rows]
    for node in [node for node in plan.graph.nodes if is_drawn(node)]:
        assert Operator.of(node).name in texts
    for node in [node for node in backward if is_drawn(node, hidden=SAME_VALUE_BACKWARD)]:
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
    for panel in _panels(CELLS[name]()):
        _assert_tidy(panel, lay_out(panel))


def _assert_tidy(panel: Panel, layout: Layout) -> None:
    for one, other in combinations(layout.boxes, 2):
        assert not _overlap(one, other)
    for upper, lower in pairwise(layout.bands):
        assert upper.bottom < lower.y
    for box, place in zip(panel.boxes, layout.boxes, strict=True):
        band = layout.bands[box.band]
        assert band.x < place.x
        assert place.x + place.width < band.x + band.width
        assert band.y < place.y
        assert place.bottom < band.bottom
    for (source, target), corners in zip(panel.edges, layout.arrows, strict=True):
        assert corners[0][1] == layout.boxes[source].bottom
        assert corners[-1][1] == layout.boxes[target].y
        assert all(y < below for (_, y), (_, below) in pairwise(corners))
        for end, box in ((corners[0][0], layout.boxes[source]), (corners[-1][0], layout.boxes[target])):
            assert box.x <= end <= box.x + box.width
    for index, item in enumerate(panel.delayed):
        corners = layout.falling[index] if index in layout.falling else layout.rising[index]
        target = layout.boxes[item.target]
        assert corners[-1] == (pytest.approx(corners[-1][0]), target.y)
        assert target.x <= corners[-1][0] <= target.x + target.width
        assert all(0 <= x <= layout.width and 0 <= y <= layout.height for x, y in corners)


def _overlap(one: Rectangle, other: Rectangle) -> bool:
    beside = one.x + one.width <= other.x or other.x + other.width <= one.x
    return not beside and one.y < other.bottom and other.y < one.bottom


def _linked(panel: Panel) -> list[tuple[str, str, str]]:
    return [(panel.boxes[d.source].title, panel.boxes[d.target].title, d.label) for d in panel.delayed]


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
    results = [box.title for box in panel.boxes if box.look is Look.VALUE]
    assert results == ["d state0", "d addmm", "d bias_hh", "d weight_hh"]
    assert [band.stage for band in panel.bands] == ["backward", "deferred"]


def test_the_parts_of_a_split_are_read_from_what_was_split() -> None:
    panel = forward_panel(_analysed(cells.LSTM(F, H))[0])
    parts = [number for number, box in enumerate(panel.boxes) if box.title == "split"]
    assert len(parts) == 4
    read = [source for source, target in panel.edges if target in parts]
    assert [panel.boxes[source].title for source in read] == ["add"] * 4
    assert {panel.boxes[part].look for part in parts} == {Look.VIEW}


def test_unusual_states_are_drawn_at_their_stage() -> None:
    panel = forward_panel(_analysed(Everything())[0])
    band = {box.title: panel.bands[box.band].stage for box in panel.boxes}
    notes = {box.title: box.reads for box in panel.boxes}
    assert (band["state0"], band["state1"], band["state2"]) == ("loop", "hoisted", "sunk")
    assert notes["state1"] == "never changes"
    assert band["random"] == "hoisted"
    assert [item for item in _linked(panel) if "state1" in item] == []


@pytest.mark.parametrize("text", ["<script>alert(1)</script>", 'a"b', "a&b", "\x00\x1b", "\ud800", "�&amp;"])
def test_text_is_escape(text: str) -> None:
    root = ElementTree.fromstring(document([], title=text, subtitle=text, words=text))
    assert "script" not in {item.tag.rpartition("}")[2] for item in root.iter()}
    shown = "".join(c if c.isprintable() and c != "\ud800" else "\ufffd" for c in text)
    assert root.get("aria-label") == shown
    assert ["".join(item.itertext()) for item in root.iter("{http://www.w3.org/2000/svg}text")] == [shown] * 3


def test_names_of_parameters_are_escape() -> None:
    class Named(Cell):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter('<b>"&', nn.Parameter(torch.ones(F)))

        def initial_state(self, batch_size: int) -> State:
            return self.zeros(batch_size, F)

        def forward(self, x_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
            assert isinstance(state, torch.Tensor)
            new = x_t + state * self.get_parameter('<b>"&')
            return new, new

    svg = draw(*_analysed(Named()), title="")
    assert "<b>" not in svg
    assert '<b>"&' in _texts(svg)


def test_long_names_are_shortened_and_shown_in_full_when_pointed_at() -> None:
    name = "weight_" * 20
    panel = Panel("p", bands=[Band(title="b", note="", stage="loop")])
    panel.add(Box(title="mm", shape="3", reads=name, band=0, look=Look.PRODUCT, tip=f"mm, reads {name}"))
    svg = document([(panel, lay_out(panel))], title="")
    assert not any(name in text for text in _texts(svg))
    assert any(text.startswith("weight_weight_") and text.endswith("…") for text in _texts(svg))
    assert f"<title>{escape(f'mm, reads {name}')}</title>" in svg


@st.composite
def _any_panel(draw: st.DrawFn) -> Panel:
    panel = Panel("any")
    num_bands, num_boxes = draw(st.integers(1, 3)), draw(st.integers(1, 14))
    panel.bands = [Band(title=f"band {number}", note="", stage="loop") for number in range(num_bands)]
    bands = sorted(draw(st.lists(st.integers(0, num_bands - 1), min_size=num_boxes, max_size=num_boxes)))
    for number, band in enumerate(bands):
        look = draw(st.sampled_from(Look))
        words = draw(st.text("ab ", max_size=30))
        panel.add(Box(title=f"{words}{number}", shape="1", reads=words, band=band, look=look, tip=""))
    pairs = st.tuples(st.integers(0, num_boxes - 1), st.integers(0, num_boxes - 1)).filter(
        lambda pair: pair[0] != pair[1]
    )
    panel.edges = sorted({(min(pair), max(pair)) for pair in draw(st.lists(pairs, max_size=25))})
    panel.delayed = [Delayed(source=source, target=target) for source, target in draw(st.lists(pairs, max_size=4))]
    return panel


@settings(deadline=None, max_examples=40)
@given(panel=_any_panel())
def test_any_graph_is_laid_out_tidily(panel: Panel) -> None:
    layout = lay_out(panel)
    _assert_tidy(panel, layout)
    assert lay_out(panel) == layout
    ElementTree.fromstring(document([(panel, layout)], title="any"))
    grid = assign_rows(panel)
    assert sorted(item for row in grid.rows for item in row) == list(range(len(grid.row_of)))
