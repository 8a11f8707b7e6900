"""Rewrites that let more leave the time loop, or make what stays cheaper. Each keeps the value."""

import math
from collections import defaultdict
from itertools import groupby
from typing import Any, Final

import torch

from stretto.graph.node import BatchDim, Node, Size, leaves_in, map_leaves, needed_for, topological_sort
from stretto.graph.trace import StepGraph

aten = torch.ops.aten


_INDEX_DTYPES: Final = (torch.int64, torch.int32)
HALF_DTYPES: Final = (torch.bfloat16, torch.float16)


def _derive(
    node: Node,
    suffix: str,
    op: Any,
    args: tuple[Any, ...],
    *,
    shape: tuple[Size, ...],
    dtype: torch.dtype | None = None,
) -> Node:
    return Node(f"{node.name}_{suffix}", op, args, shape=shape, dtype=dtype or node.dtype)


def _state_dependent(graph: StepGraph) -> set[Node]:
    """The nodes that depend on the state."""
    moving = set(graph.states)
    for node in graph.nodes:
        if any(item in moving for item in node.inputs):
            moving.add(node)
    return moving


def split_products_of_concatenations(graph: StepGraph) -> int:
    """`W [x, h]` becomes `Wx x + Wh h`, so that the input's half does not wait for the state; how many were split."""
    moving = _state_dependent(graph)
    nodes: list[Node] = []
    count = 0
    for node in graph.nodes:
        if node.label not in {"mm", "addmm"} or node.kwargs or node.args[-1] in moving:
            nodes.append(node)
            continue
        joined, weight = node.args[-2:]
        parts = joined.args[0] if joined.label == "cat" and joined.args[1:] in {(1,), (-1,)} else []
        runs = [(moves, list(run)) for moves, run in groupby(parts, key=lambda part: part in moving)]
        if len(runs) < 2:
            nodes.append(node)
            continue
        count += 1
        nodes.extend(_split(node, runs, weight))
    graph.nodes = nodes
    return count


def _split(node: Node, runs: list[tuple[bool, list[Node]]], weight: Node) -> list[Node]:
    made: list[Node] = []
    products: dict[bool, list[Node]] = {True: [], False: []}
    start = 0
    for index, (moves, parts) in enumerate(runs):
        width = sum(part.row_size for part in parts)
        stretch, shape = (weight, 0, start, start + width), (width, weight.shape[1])
        rows = _derive(node, f"weight{index}", aten.slice.Tensor, stretch, shape=shape)
        start += width
        made.append(rows)
        side = parts[0]
        if len(parts) > 1:
            side = _derive(node, f"side{index}", aten.cat.default, (parts, 1), shape=(parts[0].shape[0], width))
            made.append(side)
        product = _derive(node, f"part{index}", aten.mm.default, (side, rows), shape=node.shape)
        made.append(product)
        products[moves].append(product)
    # Sums that do not depend on the state come first: they leave the loop together, and the bias with them.
    terms = products[False] + products[True]
    if node.label == "addmm":
        terms[0].op, terms[0].args = aten.addmm.default, (node.args[0], *terms[0].args)
    total = terms[0]
    for index, term in enumerate(terms[1:-1]):
        total = _derive(node, f"sum{index}", aten.add.Tensor, (total, term), shape=node.shape)
        made.append(total)
    node.op, node.args = aten.add.Tensor, (total, terms[-1])
    return [*made, node]


def widen(graph: StepGraph) -> None:
    """A step in half precision becomes one in single precision; what is given and returned stays as it is.

    Nothing is rounded between one operator or step and the next, and processors without arithmetic in half precision
    are as fast as in single. A step that casts to half precision from wider values rounds on purpose: it is left alone.
    """
    ends = [graph.x, graph.y, *graph.states, *graph.next_states, *graph.parameters.values()]
    half = {node: node.dtype for node in ends if node.dtype in HALF_DTYPES}
    given = [graph.x, *graph.states, *graph.parameters.values()]
    real = {node.dtype for node in given if node.dtype is not None and node.dtype.is_floating_point}
    if not half or not real <= {*HALF_DTYPES} or any(tensor.dtype in HALF_DTYPES for tensor in graph.outside):
        return
    graph.narrow = {node: dtype for node, dtype in half.items() if dtype is not None}

    def widened(leaf: Any) -> Any:
        return torch.float32 if isinstance(leaf, torch.dtype) and leaf in HALF_DTYPES else leaf

    for node in graph.nodes:
        node.dtype = widened(node.dtype)
        if any(leaf in HALF_DTYPES for leaf in leaves_in((node.args, node.kwargs)) if isinstance(leaf, torch.dtype)):
            node.args, node.kwargs = map_leaves(node.args, widened), map_leaves(node.kwargs, widened)
    graph.constants = {node: tensor.to(widened(tensor.dtype)) for node, tensor in graph.constants.items()}


def look_up_rows(graph: StepGraph) -> None:
    """Look-ups by indices become operators that are known to keep rows apart.

    `table[i]` is an embedding, `x[torch.arange(rows), i]` a gather, and `x[:, i]` a selection if `i` has no rows;
    `x[torch.arange(rows), i] = y` is a scatter.
    """
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.label in {"index", "index_put"} and all(_is_index(item) for item in node.args[1]):
            nodes.extend(_look_up(node, *node.args) if node.label == "index" else _in_rows(node, *node.args))
        nodes.append(node)
    graph.nodes = nodes


def _look_up(node: Node, source: Node, given: list[Node | None]) -> list[Node]:
    first, *others = given
    last = given[-1]
    assert last is not None
    if first is not None and first.has_rows and not source.has_rows and not others:
        return _embed(node, source, first)
    if not source.has_rows:
        return []
    if not any(given[:-1]) and len(last.shape) == 1 and not last.has_rows:
        before = _count_from_start(node, last, source.shape[len(others)])
        node.op, node.args = aten.index_select.default, (source, len(others), before[2])
        return before
    return _in_rows(node, source, given)


def _is_index(item: Node | None) -> bool:
    return item is None or item.dtype in _INDEX_DTYPES


def _embed(node: Node, table: Node, index: Node) -> list[Node]:
    """Turn `node` into an embedding; what comes before it."""
    height, *inner = table.shape
    before = _count_from_start(node, index, height)
    flat, width = table, math.prod(size for size in inner if isinstance(size, int))
    if len(inner) != 1:
        flat = _derive(node, "table", aten.reshape.default, (table, [height, width]), shape=(height, width))
        before.append(flat)
    found = _derive(node, "rows", aten.embedding.default, (flat, before[2]), shape=(*index.shape, width))
    node.op, node.args = aten.reshape.default, (found, [*index.shape, *inner])
    return [*before, found]


def _in_rows(
    node: Node, source: Node, given: list[Node | None], values: Node | None = None, accumulate: bool = False
) -> list[Node]:
    """Turn a look-up at places of each row into a gather, or `values` put there into a scatter; what comes before it.

    The first index numbers the rows. The others, for the dimensions after them, become one index into these flattened:

        x (rows, H, W)[arange(rows), i, j]    ->    x (rows, H * W) gathered at i * W + j
    """
    first, *others = (index for index in given if index is not None)
    if len(others) + 1 != len(given) or not others or not _numbers_rows(first) or not source.has_rows:
        return []
    rows, rank = source.shape[0], len(first.shape)
    sizes, inner = source.shape[1 : len(given)], source.shape[len(given) :]
    for index in others:
        if index.dtype != torch.int64 or len(index.shape) > rank or (index.has_rows and len(index.shape) < rank):
            return []
    places = [
        _broadcast(sizes_of) for sizes_of in zip(*(_aligned(index, rank) for index in (first, *others)), strict=True)
    ]
    if places[0] != rows or not all(isinstance(size, int) for size in (*places[1:], *sizes, *inner)):
        return []
    made: list[Node] = []

    def emit(suffix: str, op: Any, args: tuple[Any, ...], shape: tuple[Size, ...], dtype: Any = None) -> Node:
        made.append(_derive(node, f"{suffix}{len(made)}", op, args, shape=shape, dtype=dtype))
        return made[-1]

    at: Node | None = None
    for index, size in zip(others, sizes, strict=True):
        wide = emit("wide", aten.expand.default, (index, places), tuple(places), torch.int64)
        counted = _count_from_start(wide, wide, size)
        made += counted
        if at is not None:
            scaled = emit("scaled", aten.mul.Tensor, (at, size), tuple(places), torch.int64)
            counted = [emit("place", aten.add.Tensor, (scaled, counted[-1]), tuple(places), torch.int64)]
        at = counted[-1]
    count, width, height = (math.prod(part) for part in (places[1:], inner, sizes))  # type: ignore[arg-type]
    shape: tuple[Size, ...] = (rows, count, width)
    column = emit("column", aten.reshape.default, (at, [rows, count, 1]), (rows, count, 1), torch.int64)
    column = emit("places", aten.expand.default, (column, list(shape)), shape, torch.int64)
    flat = emit("flat", aten.reshape.default, (source, [rows, height, width]), (rows, height, width))
    if values is None:
        found = emit("found", aten.gather.default, (flat, 1, column), shape)
    else:
        full = (*places, *inner)
        if len(values.shape) > len(full) or (values.has_rows and len(values.shape) < len(full)):
            return []
        given_to = emit("values", aten.expand.default, (values, list(full)), full)
        given_to = emit("values", aten.reshape.default, (given_to, list(shape)), shape)
        put = aten.scatter_add.default if accumulate else aten.scatter.src
        found = emit("found", put, (flat, 1, column, given_to), flat.shape)
    node.op, node.args, node.kwargs = aten.reshape.default, (found, list(node.shape)), {}
    return made


def _numbers_rows(index: Node) -> bool:
    """Whether an index is the number of its row everywhere."""
    shapes = [index.shape]
    while index.label in {"detach", "alias", "view", "reshape", "unsqueeze", "expand", "clone", "_to_copy"}:
        index = index.args[0]
        shapes.append(index.shape)
    rows = BatchDim(1)
    return index.label == "arange" and index.args in {(rows,), (0, rows)} and all(shape[0] == rows for shape in shapes)


def _aligned(index: Node, rank: int) -> list[Size]:
    return [*[1] * (rank - len(index.shape)), *index.shape]


def _broadcast(sizes: tuple[Size, ...]) -> Size:
    return next((size for size in sizes if size != 1), 1)


def _count_from_start(node: Node, index: Node, size: Size) -> list[Node]:
    """Indices, of which negative ones count from the end, as the third of some nodes."""
    below = _derive(node, "below", aten.lt.Scalar, (index, 0), shape=index.shape, dtype=torch.bool)
    turned = _derive(node, "turned", aten.add.Tensor, (index, size), shape=index.shape, dtype=index.dtype)
    chosen = (below, turned, index)
    return [below, turned, _derive(node, "index", aten.where.self, chosen, shape=index.shape, dtype=index.dtype)]


def merge_products(graph: StepGraph, loop: set[Node]) -> int:
    """Products of a vector with several matrices inside the loop become one with all of them; how many were saved."""
    by_side: dict[Node, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if node in loop and node.label in {"mm", "addmm"} and not node.kwargs and node.args[-1] not in loop:
            by_side[node.args[-2]].append(node)
    saved = 0
    for side, products in by_side.items():
        if len(products) < 2:
            continue
        saved += len(products) - 1
        first = products[0]
        weights = [product.args[-1] for product in products]
        width = sum(product.row_size for product in products)
        together = _derive(first, "weights", aten.cat.default, (weights, 1), shape=(weights[0].shape[0], width))
        product = _derive(first, "all", aten.mm.default, (side, together), shape=(first.shape[0], width))
        made = [together, product]
        start = 0
        for old in products:
            stretch = (product, 1, start, start + old.row_size)
            start += old.row_size
            part = _derive(old, "part", aten.slice.Tensor, stretch, shape=old.shape)
            made.append(part)
            old.op, old.args = (
                (aten.add.Tensor, (part, old.args[0])) if old.label == "addmm" else (aten.alias.default, (part,))
            )
        graph.nodes.extend(made)
    if saved:
        graph.nodes = topological_sort(graph.nodes, lambda node: node.inputs)
    return saved


def drop_unused(graph: StepGraph) -> None:
    """Remove nodes that neither the output nor the next state needs."""
    kept = needed_for([graph.y, *graph.next_states]) | {graph.x, *graph.states, *graph.parameters.values()}
    graph.nodes = [node for node in graph.nodes if node in kept]
