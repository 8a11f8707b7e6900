"""The graph of a step as a picture."""

from stretto.graph.adjoint import Body
from stretto.graph.analyse import Plan
from stretto.graph.drawing.backward import backward_panel
from stretto.graph.drawing.forward import forward_panel
from stretto.graph.drawing.layout import lay_out
from stretto.graph.drawing.svg import document


def draw(plan: Plan, bodies: list[Body], *, title: str, subtitle: str = "") -> str:
    """The step of a plan as SVG: what is computed where, forward and backward.

    Args:
        plan: A step, taken apart.
        bodies: Its loops with their backward steps, in order.
        title: Stands above the picture.
        subtitle: Stands under the title.
    """
    panels = [forward_panel(plan), backward_panel(bodies)]
    return document([(panel, lay_out(panel)) for panel in panels if panel.boxes], title=title, subtitle=subtitle)
