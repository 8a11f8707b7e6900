"""What many ranks would reach with one long sequence, from what one and two were measured to take.

A rank walks its block in pieces, each of which takes a fixed time and a time a step, measured on one thread. How many
pieces it walks again is counted on the net itself (`time_relay`). A round ends when the rank that walks longest is
done, one message has gone to the neighbour and the largest mismatch has gone round a ring, as gloo does it; gradients
are summed once.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Final, final

from bench.time_cases import Plan
from bench.time_ranks import Messages, PieceCost, RanksRun, output_weights
from bench.time_relay import Relayed, Round, relayed
from bench.trained_nets import Nets

WORLDS: Final = (2, 4, 8, 16, 32, 64, 128, 256)
LENGTHS: Final = (1 << 17, 1 << 20)
SHORTEST: Final = 2
"""Pieces of a block; shorter ones are not worth a rank."""
FLOAT: Final = 4
GOAL: Final = 6.5
GOAL_RANKS: Final = 16
GOAL_UNITS: Final = 64


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What so many ranks would do.

    Attributes:
        hidden_size: H.
        num_steps: T.
        ranks: How many.
        memories: Steps of a block over those that the net remembers; None if it does not forget.
        rounds: Walks of a block, forwards.
        backward_rounds: Backwards.
        work: Steps that the busiest rank walks forwards, over those of its block.
        backward_work: Backwards.
        seconds: Of a training step.
        talking: Share of it that messages take.
        speed_up: Over our own kernel, step after step, on one rank with one thread.
        goal: What it should be; None where nothing is asked.
    """

    hidden_size: int
    num_steps: int
    ranks: int
    memories: float | None
    rounds: int
    backward_rounds: int
    work: float
    backward_work: float
    seconds: float
    talking: float
    speed_up: float
    goal: float | None

    @property
    def judged(self) -> list[bool]:
        """Whether the goal is met, if there is one."""
        return [] if self.goal is None else [self.speed_up >= self.goal]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """How far the model is from what was measured, relative.

    Attributes:
        hidden_size: H.
        off_one: For one rank: from a quarter of the steps to all of them.
        off_two: For two ranks.
        off_two_sharing: For two ranks, when it is allowed for that two that work at once slow each other down.
        same_rounds: Whether two ranks walked as often, forwards and backwards, as was counted.
    """

    hidden_size: int
    off_one: float
    off_two: float
    off_two_sharing: float
    same_rounds: bool


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ManyRanks:
    """The model of many ranks: how good it is where it can be checked, and what it says."""

    checks: tuple[Check, ...]
    predictions: tuple[Prediction, ...]


def model_ranks(plan: Plan, nets: Nets, runs: Sequence[RanksRun]) -> ManyRanks:
    """Count what ranks walk on each net, and predict."""
    checks: list[Check] = []
    predictions: list[Prediction] = []
    for run in runs:
        net = nets.of(run.hidden_size)
        for num_steps in (run.num_steps,) if plan.quick else LENGTHS:
            x_TF = nets.recordings.joined(num_steps)
            weight_TH = output_weights(num_steps, run.hidden_size)
            for ranks in WORLDS:
                if num_steps // ranks < SHORTEST * run.piece:
                    break
                plan.tell(f"model: T={num_steps}, H={run.hidden_size}, {ranks} ranks")
                counted = relayed(net.cell, x_TF, weight_TH, ranks=ranks, piece=run.piece)
                predictions.append(predict(counted, run, memory=net.memory))
                if (num_steps, ranks) == (run.num_steps, 2):
                    checks.append(check(counted, run))
    return ManyRanks(checks=tuple(checks), predictions=tuple(predictions))


def predict(counted: Relayed, run: RanksRun, *, memory: float) -> Prediction:
    """What ranks that walk so far would take."""
    walking, talking = _walking(counted, run), talk(counted, run.messages, num_bytes=FLOAT * run.hidden_size)
    alone = run.timings["whole"].least / run.num_steps * counted.num_steps
    asked = (run.hidden_size, counted.num_steps, counted.ranks) == (GOAL_UNITS, LENGTHS[-1], GOAL_RANKS)
    return Prediction(
        hidden_size=run.hidden_size,
        num_steps=counted.num_steps,
        ranks=counted.ranks,
        memories=counted.block / memory if math.isfinite(memory) else None,
        rounds=len(counted.ahead),
        backward_rounds=len(counted.back),
        work=counted.work,
        backward_work=counted.work_back,
        seconds=walking + talking,
        talking=talking / (walking + talking),
        speed_up=alone / (walking + talking),
        goal=GOAL if asked else None,
    )


def check(counted: Relayed, run: RanksRun) -> Check:
    """Compare the model with what one rank and two were measured to take."""
    walking, talking = _walking(counted, run), talk(counted, run.messages, num_bytes=FLOAT * run.hidden_size)
    whole, relay = run.timings["whole"].least, run.timings["relay"].least
    quarter = run.timings["quarter"].least * run.num_steps / (run.num_steps // 4)
    return Check(
        hidden_size=run.hidden_size,
        off_one=quarter / whole - 1.0,
        off_two=(walking + talking) / relay - 1.0,
        off_two_sharing=(walking * run.sharing + talking) / relay - 1.0,
        same_rounds=(len(counted.ahead), len(counted.back)) == (run.rounds, run.backward_rounds),
    )


def _walking(counted: Relayed, run: RanksRun) -> float:
    return _walked(counted.ahead, run.ahead) + _walked(counted.back, run.back)


def _walked(rounds: Sequence[Round], cost: PieceCost) -> float:
    return sum(cost.fixed * one.pieces + cost.a_step * one.steps for one in rounds)


def talk(counted: Relayed, messages: Messages, *, num_bytes: int) -> float:
    """Seconds of all messages of a step; a state has so many bytes."""
    others = counted.ranks - 1
    if not others:
        return 0.0
    # Ranks agree on what to do once forwards and once backwards. After the last possible round nothing is passed on.
    passed = sum(min(len(rounds), others) for rounds in (counted.ahead, counted.back))
    a_round = messages.fixed + num_bytes * messages.a_byte + others * messages.maximum
    moved = messages.sum_bytes * messages.a_byte
    summing = others * max(0.0, messages.summing - moved) + 2 * others / counted.ranks * moved
    return 2 * others * messages.agreement + passed * a_round + summing
