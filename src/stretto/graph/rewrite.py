"""Rewrites that let more leave the time loop, or make what stays cheaper. Each keeps the value."""

from collections import defaultdict
from itertools import groupby
from typing import Any

import torch

from stretto.graph.node import Node, Size, needed_for, topological_sort
from stretto.graph.trace import StepGraph

aten = torch.ops.aten


def _derive(node: Node, suffix: str, op: Any, args: tuple[Any, ...], *, shape: tuple[Size, ...]) -> Node:
    return Node(f"{node.name}_{suffix}", op, args, shape=shape, dtype=node.dtype)


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
