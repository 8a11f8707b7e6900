"""One step of a cell as a graph: traced or written down, analysed, differentiated and drawn.

node, operators          what a graph is made of, and what is known about PyTorch's operators
trace                    a cell -> StepGraph
memory, equations, decompose, custom_gradient
                         what the trace makes of writes in place, of torch's own cells, of operators that are made of
                         simpler ones, and of functions with a gradient of their own
rewrite, analyse         StepGraph -> Plan: what is computed once, hoisted, in a loop, or sunk
adjoint                  Loop -> Body: the loop with its backward step, and what is deferred
summary, draw            a plan in numbers and as a picture
network                  `stretto.Graph`: layers and connections with delays, as a cell
"""

from stretto.graph.adjoint import Body, Kind, derive
from stretto.graph.analyse import Loop, Plan, Stage, analyse
from stretto.graph.custom_gradient import straight_through
from stretto.graph.draw import document, draw
from stretto.graph.network import (
    ACTIVATIONS,
    Connection,
    Graph,
    GraphCell,
    Layer,
    delayed_graph,
    lstm_graph,
    peephole_lstm_graph,
    two_loop_graph,
)
from stretto.graph.node import BatchDim, Node, concrete_shape, evaluate, run, topological_sort
from stretto.graph.operators import is_random, is_view
from stretto.graph.rewrite import widen
from stretto.graph.side_effects import GENERATORS, Attributes, attribute_tensors, holders_of
from stretto.graph.summary import PRODUCTS, LoopSummary, Operator, Product, Summary, format_shape
from stretto.graph.trace import Untraceable, constant_fill, trace

__all__ = [
    "ACTIVATIONS",
    "GENERATORS",
    "PRODUCTS",
    "Attributes",
    "BatchDim",
    "Body",
    "Connection",
    "Graph",
    "GraphCell",
    "Kind",
    "Layer",
    "Loop",
    "LoopSummary",
    "Node",
    "Operator",
    "Plan",
    "Product",
    "Stage",
    "Summary",
    "Untraceable",
    "analyse",
    "attribute_tensors",
    "concrete_shape",
    "constant_fill",
    "delayed_graph",
    "derive",
    "document",
    "draw",
    "evaluate",
    "format_shape",
    "holders_of",
    "is_random",
    "is_view",
    "lstm_graph",
    "peephole_lstm_graph",
    "run",
    "straight_through",
    "topological_sort",
    "trace",
    "two_loop_graph",
    "widen",
]
