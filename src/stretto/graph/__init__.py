"""One step of a cell as a graph: traced or written down, analysed, and differentiated."""

from stretto.graph.adjoint import Body, Kind, derive
from stretto.graph.analyse import Loop, Place, Plan, analyse
from stretto.graph.drawing.draw import draw
from stretto.graph.drawing.svg import document
from stretto.graph.interpret import evaluate, run
from stretto.graph.network.cell import GraphCell
from stretto.graph.network.graph import Graph
from stretto.graph.node import Node, Rows, sized
from stretto.graph.operators import is_view
from stretto.graph.recorder import Untraceable, filled
from stretto.graph.summary import LoopSummary, Operator, Product, Summary, sizes
from stretto.graph.trace import stepped, trace

__all__ = [
    "Body",
    "Graph",
    "GraphCell",
    "Kind",
    "Loop",
    "LoopSummary",
    "Node",
    "Operator",
    "Place",
    "Plan",
    "Product",
    "Rows",
    "Summary",
    "Untraceable",
    "analyse",
    "derive",
    "document",
    "draw",
    "evaluate",
    "filled",
    "is_view",
    "run",
    "sized",
    "sizes",
    "stepped",
    "trace",
]
