"""One long sequence over two gloo ranks beside one rank, one thread each.

Shape legend: T steps, F features of the input, H hidden units.
"""

import dataclasses
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, final

import torch
from safetensors.torch import save_file

from bench.interleaved import Timing
from bench.kernel_gate import FAULT
from bench.time_cases import Plan
from bench.time_contest import EXACT
from bench.time_rank_worker import CELL
from bench.time_relay import TOLERANCE
from bench.trained_nets import Nets
from stretto.distributed import launch_ranks
from stretto.errors import StrettoError
from stretto.solvers import PIECE

MODULE: Final = "bench.time_rank_worker"
RANKS: Final = 2
LENGTH: Final = 1 << 17
UNITS: Final = (128, 64)
GOALS: Final = {128: 1.5}
QUICK_LENGTH: Final = 512
QUICK_PIECE: Final = 32


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PieceCost:
    """Seconds of a piece of a relay: whatever is in it, and of each step."""

    fixed: float
    a_step: float

    @classmethod
    def fitted(cls, *, steps: int, many: tuple[int, float], few: tuple[int, float]) -> "PieceCost":
        """From one block in many pieces and in few: how many, and seconds of all of them."""
        fixed = max(0.0, (many[1] - few[1]) / (many[0] - few[0])) if many[0] > few[0] else 0.0
        # A pause of the machine may make many pieces look dearer than they are.
        fixed = min(fixed, 0.5 * few[1] / few[0])
        return cls(fixed=fixed, a_step=(few[1] - fixed * few[0]) / steps)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """Seconds of what two ranks say to each other.

    Attributes:
        fixed: Of a message to the neighbour, whatever is in it.
        a_byte: Of each of its bytes.
        maximum: Of the largest of two numbers over ranks.
        agreement: Of a check that all ranks do the same.
        summing: Of the sum of all gradients.
        sum_bytes: Of the gradients.
        trips: Round trips as they were measured: bytes and seconds.
    """

    fixed: float
    a_byte: float
    maximum: float
    agreement: float
    summing: float
    sum_bytes: int
    trips: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, answer: dict[str, Any]) -> "Messages":
        """From what ranks have measured; a message is half of a round trip."""
        trips = tuple((int(size), float(seconds)) for size, seconds in answer["trips"])
        (few, short), (many, long) = trips[0], trips[-1]
        a_byte = max(0.0, (long - short) / (many - few)) / 2
        return cls(
            fixed=max(0.0, short / 2 - a_byte * few),
            a_byte=a_byte,
            maximum=answer["maximum"],
            agreement=answer["agreement"],
            summing=answer["sum"],
            sum_bytes=answer["sum_bytes"],
            trips=trips,
        )


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RanksRun:
    """Two ranks beside one.

    Attributes:
        net: Which.
        hidden_size: H.
        num_steps: T.
        piece: Steps after which a rank compares its walk with the one before.
        timings: Seconds by way: "whole" is one rank step after step, "relay" is both; "quarter" is one rank on a
            quarter of the steps, "block alone" one rank on its half, "blocks at once" both on their halves, with
            nothing exchanged.
        ratio: The least time of one rank over that of two.
        goal: What it should be; None where nothing is asked.
        output_error: How far outputs are from those of one rank, relative to the largest.
        gradient_error: The same of gradients.
        residual: What is left between blocks.
        rounds: Walks of a block, forwards.
        backward_rounds: Backwards.
        work: Steps that a rank walked forwards, over those of its block.
        ahead: What a piece costs forwards.
        back: Backwards.
        messages: What ranks say to each other.
    """

    net: str
    hidden_size: int
    num_steps: int
    piece: int
    timings: dict[str, Timing]
    ratio: float
    goal: float | None
    output_error: float
    gradient_error: float
    residual: float
    rounds: int
    backward_rounds: int
    work: float
    ahead: PieceCost
    back: PieceCost
    messages: Messages

    @property
    def judged(self) -> list[bool]:
        """Whether the goal is met, if there is one."""
        return [] if self.goal is None else [self.ratio >= self.goal]

    @property
    def sharing(self) -> float:
        """How much longer two ranks take that work at once than one alone, with nothing exchanged."""
        return self.timings["blocks at once"].least / self.timings["block alone"].least


def run_ranks(plan: Plan, nets: Nets) -> list[RanksRun]:
    """Start two ranks for each size of net."""
    runs = []
    for hidden_size in (8,) if plan.quick else UNITS:
        net = nets.of(hidden_size)
        num_steps, piece = (QUICK_LENGTH, QUICK_PIECE) if plan.quick else (LENGTH, PIECE)
        plan.tell(f"ranks: two gloo ranks, T={num_steps}, H={hidden_size}")
        x_TF = nets.recordings.joined(num_steps)
        weights = {f"{CELL}{name}": value.contiguous() for name, value in net.cell.state_dict().items()}
        tensors = {**weights, "x_TF": x_TF, "weight_TH": output_weights(num_steps, hidden_size)}
        answer = _answer(tensors, rounds=plan.rounds, piece=piece)
        run = _run(answer, net=net.told, hidden_size=hidden_size, num_steps=num_steps, piece=piece)
        runs.append(dataclasses.replace(run, goal=None if plan.quick else GOALS.get(hidden_size)))
    return runs


def output_weights(num_steps: int, hidden_size: int) -> torch.Tensor:
    """What each output counts in the loss (T, H)."""
    return torch.randn(num_steps, hidden_size, generator=torch.Generator().manual_seed(1))


def _answer(tensors: dict[str, torch.Tensor], *, rounds: int, piece: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="stretto-") as place:
        folder = Path(place)
        save_file(tensors, folder / "net.safetensors")
        asked = {
            "tensors": str(folder / "net.safetensors"),
            "threads": 1,
            "rounds": rounds,
            "tolerance": TOLERANCE,
            "piece": piece,
        }
        path = folder / "asked.json"
        path.write_text(json.dumps(asked), encoding="utf-8")
        code = launch_ranks([str(path)], module=MODULE, nproc=RANKS, threads=1, max_restarts=0)
        answer = path.with_suffix(".answer")
        if code or not answer.exists():
            raise StrettoError(
                f"a rank ended with the code {code}", fix="What it said stands above; see also `stretto doctor`."
            )
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return found


def _run(answer: dict[str, Any], *, net: str, hidden_size: int, num_steps: int, piece: int) -> RanksRun:
    for what in ("output", "gradient"):
        error = answer[f"{what}_error"]
        if not error <= EXACT:
            raise StrettoError(
                f"the {what} of two ranks differs from that of one by {error:.1e} of its largest value at "
                f"T={num_steps}, H={hidden_size}, and {EXACT:.0e} is allowed",
                fix=FAULT,
            )
    timings = {
        way: Timing(least=min(seconds), median=statistics.median(seconds), rounds=len(seconds))
        for way, seconds in answer["turns"].items()
    }
    ahead, back = (_cost(answer["costs"], kind) for kind in ("ahead", "back"))
    return RanksRun(
        net=net,
        hidden_size=hidden_size,
        num_steps=num_steps,
        piece=piece,
        timings=timings,
        ratio=timings["whole"].least / timings["relay"].least,
        goal=None,
        output_error=answer["output_error"],
        gradient_error=answer["gradient_error"],
        residual=answer["residual"],
        rounds=round(answer["rounds"]),
        backward_rounds=round(answer["backward_rounds"]),
        work=answer["work"],
        ahead=ahead,
        back=back,
        messages=Messages.of(answer),
    )


def _cost(costs: Sequence[dict[str, float]], kind: str) -> PieceCost:
    many, few = ((int(cost["pieces"]), float(cost[kind])) for cost in costs)
    return PieceCost.fitted(steps=int(costs[0]["steps"]), many=many, few=few)
