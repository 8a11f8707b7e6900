"""The tables of `stretto bench faults`."""

from collections.abc import Iterable

from rich import box
from rich.table import Table

from bench.fault_nodes import NodesOutcome
from bench.fault_strikes import KINDS
from bench.faults import FaultsBench


def tables(bench: FaultsBench) -> list[Table]:
    """What came of the strikes, and of two nodes."""
    return [_strikes(bench), *([] if bench.nodes is None else [_nodes(bench.nodes)])]


def _strikes(bench: FaultsBench) -> Table:
    kinds = [strike.kind for strike in bench.strikes]
    return _facts(
        f"{bench.workers} workers struck while they train",
        [
            *((what, kinds.count(kind)) for kind, what in KINDS.items() if kind in kinds),
            ("strikes survived", f"{bench.survived} of {bench.asked}"),
            ("went on from a checkpoint", bench.resumed),
            ("epochs", bench.dealt.epochs),
            ("sequences lost", bench.dealt.lost),
            ("sequences repeated", bench.dealt.repeated),
            ("final weights equal the undisturbed run's", "yes, to the last bit" if bench.same_weights else "NO"),
            ("seconds, all in all", f"{bench.seconds:.0f}"),
        ],
    )


def _nodes(nodes: NodesOutcome) -> Table:
    return _facts(
        "Two nodes, one of them dropped and back",
        [
            ("workers, each time all were started", ", ".join(map(str, nodes.workers))),
            ("epochs", nodes.dealt.epochs),
            ("sequences lost", nodes.dealt.lost),
            ("sequences repeated", nodes.dealt.repeated),
            ("exit codes of the nodes", ", ".join(map(str, nodes.exit_codes))),
        ],
    )


def _facts(title: str, rows: Iterable[tuple[str, object]]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in rows:
        table.add_row(name, str(value))
    return table
