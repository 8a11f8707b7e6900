"""One step of a cell as a graph: traced or written down, analysed, and differentiated."""

from stretto.graph.adjoint import Body, Kind, derive
from stretto.graph.analyse import Loop, Plan, Stage, analyse
from stretto.graph.drawing.draw import draw
from stretto.graph.drawing.svg import document
from stretto.graph.interpret import evaluate, run
from stretto.graph.network.cell import GraphCell
from stretto.graph.network.graph import Graph
from stretto.graph.node import BatchDim, Node, concrete_shape
from stretto.graph.operators import is_view
from stretto.graph.recorder import Untraceable, constant_fill
from stretto.graph.summary import LoopSummary, Operator, Product, Summary, format_shape
from stretto.graph.trace import call_cell, trace

__all__ = [
    "BatchDim",
    "Body",
    "Graph",
    "GraphCell",
    "Kind",
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
    "call_cell",
    "concrete_shape",
    "constant_fill",
    "derive",
    "document",
    "draw",
    "evaluate",
    "format_shape",
    "is_view",
    "run",
    "trace",
]
