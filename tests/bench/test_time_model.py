"""The model of many ranks: what a relay walks is counted as its legs walk it, and what is predicted makes sense.

Shape legend: T steps, F features of the input, H hidden units.
"""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.interleaved import Timing
from bench.time_model import LENGTHS, check, predict, talk
from bench.time_ranks import Messages, PieceCost, RanksRun, output_weights
from bench.time_relay import Relayed, Round, relayed
from stretto.cells import GRU
from stretto.nn import RNN
from stretto.solvers import AbstractSolver, Chain, Leg, Serial, Solved, Sums
from stretto.solvers.ranks.leg import gap, size


class Caught(AbstractSolver):
    """Keeps the chain."""

    chain: Chain

    def solve(self, chain: Chain) -> Solved:
        self.chain = chain
        return Serial().solve(chain)


def _handed_on(
    cell: GRU, x_TF: torch.Tensor, weight_TH: torch.Tensor, *, ranks: int, piece: int, tolerance: float
) -> tuple[list[int], list[int]]:
    """The most steps of a rank in each round, forwards and backwards, of the relay's own legs in one process."""
    block, legs = len(x_TF) // ranks, []
    for rank in range(ranks):
        caught = Caught()
        RNN(cell, solver=caught)(x_TF[None, rank * block : (rank + 1) * block])
        legs.append(Leg(caught.chain, length=piece, keeps=True, needs_input=False))
    starts, ahead, back = [[torch.zeros(1, cell.hidden_size)] for _ in legs], [], []
    while True:
        before = [leg.walked for leg in legs]
        with torch.no_grad():
            for leg, start in zip(legs, starts, strict=True):
                leg.walk(start, close=tolerance)
        ahead.append(max(leg.walked - steps for leg, steps in zip(legs, before, strict=True)))
        starts = [legs[0].starts, *(leg.ends for leg in legs[:-1])]
        agreed = max(gap(start, leg.starts) for leg, start in zip(legs, starts, strict=True)) <= tolerance
        if agreed or len(ahead) == ranks:
            break
    sums, taken = [Sums(leg) for leg in legs], [0] * ranks
    for rank, leg in enumerate(legs):
        real = leg._back

        def counted(one: Any, *args: Any, rank: int = rank, real: Any = real) -> Any:
            taken[rank] += one.layout.total
            return real(one, *args)

        leg._back = counted  # type: ignore[method-assign]
    moving = [
        leg.back([torch.zeros(1, cell.hidden_size)], total, d_y_PF=weight_TH[rank * block : (rank + 1) * block])
        for rank, (leg, total) in enumerate(zip(legs, sums, strict=True))
    ]
    found = moving
    while True:
        back.append(max(taken))
        late = [*moving[1:], [torch.zeros(1, cell.hidden_size)]]
        scale = max(map(size, found))
        if len(back) == ranks or max(map(size, late)) <= tolerance * scale:
            return ahead, back
        taken[:] = [0] * ranks
        moving = [
            leg.back(one, total, negligible=tolerance * scale) for leg, one, total in zip(legs, late, sums, strict=True)
        ]
        found = [[one + more for one, more in zip(a, b, strict=True)] for a, b in zip(found, moving, strict=True)]


@settings(max_examples=12, deadline=None)
@given(
    ranks=st.integers(1, 5),
    block=st.integers(1, 24),
    piece=st.integers(1, 30),
    strength=st.sampled_from([0.2, 1.0, 4.0]),
    seed=st.integers(0, 99),
)
def test_rounds_are_counted_as_legs_walk_them(ranks: int, block: int, piece: int, strength: float, seed: int) -> None:
    torch.manual_seed(seed)
    cell = GRU(2, 3)
    with torch.no_grad():
        cell.weight_hh.mul_(strength)
    x_TF, weight_TH = torch.randn(ranks * block, 2), output_weights(ranks * block, 3)
    # Coarse enough that the last digits of one row and of several do not decide.
    found = relayed(cell, x_TF, weight_TH, ranks=ranks, piece=piece, tolerance=1e-3)
    ahead, back = _handed_on(cell, x_TF, weight_TH, ranks=ranks, piece=piece, tolerance=1e-3)
    assert [one.steps for one in found.ahead] == ahead
    assert [one.steps for one in found.back] == back
    assert [one.pieces for one in found.ahead] == [math.ceil(steps / piece) for steps in ahead]


def _run(*, message: float = 0.0, fixed: float = 0.0) -> RanksRun:
    def timing(seconds: float) -> Timing:
        return Timing(least=seconds, median=seconds, rounds=1)

    cost = PieceCost(fixed=fixed, a_step=1e-6)
    return RanksRun(
        net="made",
        hidden_size=64,
        num_steps=1 << 17,
        piece=1024,
        timings={
            "whole": timing(2e-6 * (1 << 17)),
            "quarter": timing(2e-6 * (1 << 15)),
            "relay": timing(1e-6 * (1 << 17)),
            "block alone": timing(0.1),
            "blocks at once": timing(0.11),
        },
        ratio=2.0,
        goal=1.5,
        output_error=0.0,
        gradient_error=0.0,
        residual=0.0,
        rounds=1,
        backward_rounds=1,
        work=1.0,
        ahead=cost,
        back=cost,
        messages=Messages(
            fixed=message,
            a_byte=0.0,
            maximum=message,
            agreement=message,
            summing=message,
            sum_bytes=1000,
            trips=(),
        ),
    )


def _counted(ranks: int, *, again: int = 0, num_steps: int = 1 << 17) -> Relayed:
    """A block once, and so many of its pieces again."""
    block = num_steps // ranks
    rounds = (Round(steps=block, pieces=block // 1024), *([Round(steps=1024 * again, pieces=again)] if again else []))
    return Relayed(ranks=ranks, num_steps=num_steps, ahead=rounds, back=rounds)


@pytest.mark.parametrize("ranks", [2, 16, 128])
def test_a_net_without_memory_and_free_messages_lose_nothing(ranks: int) -> None:
    found = predict(_counted(ranks), _run(), memory=1.0)
    assert found.speed_up == pytest.approx(ranks)
    assert (found.work, found.backward_work, found.talking) == (1.0, 1.0, 0.0)


def test_what_costs_more_helps_less() -> None:
    best = predict(_counted(16), _run(), memory=1024.0).speed_up
    again = predict(_counted(16, again=4), _run(), memory=1024.0)
    assert again.speed_up == pytest.approx(best * 8 / 12)
    assert (again.work, again.rounds, again.memories) == (1.5, 2, 8.0)
    pieces = predict(_counted(16), _run(fixed=1e-6 * 1024), memory=1024.0)
    assert pieces.speed_up == pytest.approx(best / 2)
    dear = predict(_counted(16), _run(message=1e-4), memory=1024.0)
    assert dear.speed_up < best
    assert 0.0 < dear.talking < 1.0


def test_messages_go_round_a_ring() -> None:
    messages = _run(message=1.0).messages
    # Two agreements and one sum go to all others; after its one round each way, a message and a maximum.
    assert talk(_counted(2), messages, num_bytes=256) == pytest.approx(2 + 1 + 2 * 2)
    assert talk(_counted(4), messages, num_bytes=256) == pytest.approx(3 * (2 + 1) + 2 * (1 + 3))
    assert talk(Relayed(ranks=1, num_steps=8, ahead=(), back=()), messages, num_bytes=256) == 0.0
    # Two ranks are done after two rounds, and have no third to pass anything on to.
    assert talk(_counted(2, again=1), messages, num_bytes=256) == pytest.approx(2 + 1 + 2 * 2)


def test_a_model_that_is_right_is_not_off() -> None:
    found = check(_counted(2), _run())
    assert found.off_one == pytest.approx(0.0)
    assert found.off_two == pytest.approx(0.0)
    assert found.off_two_sharing == pytest.approx(0.1)
    assert found.same_rounds
    assert not check(_counted(2, again=1), _run()).same_rounds
    assert check(_counted(2, again=4), _run()).off_two == pytest.approx(4 / 64)


def test_the_goal_is_for_the_trained_net_at_a_million_steps() -> None:
    asked = predict(_counted(16, num_steps=LENGTHS[-1]), _run(), memory=math.inf)
    assert (asked.goal, asked.judged, asked.memories) == (6.5, [True], None)
    assert predict(_counted(8, num_steps=LENGTHS[-1]), _run(), memory=math.inf).goal is None


def test_costs_are_found_again() -> None:
    def seconds(pieces: int) -> tuple[int, float]:
        return pieces, 2e-4 * pieces + 3e-6 * 65536

    found = PieceCost.fitted(steps=65536, many=seconds(256), few=seconds(64))
    assert found.fixed == pytest.approx(2e-4)
    assert found.a_step == pytest.approx(3e-6)
    slower_in_few = PieceCost.fitted(steps=100, many=(20, 1.0), few=(5, 2.0))
    assert (slower_in_few.fixed, slower_in_few.a_step) == (0.0, 0.02)
    trips = [(size, 2 * (1e-4 + 1e-9 * size)) for size in (256, 4096, 1 << 20)]
    answer = {"trips": trips, "maximum": 1.0, "agreement": 2.0, "sum": 3.0, "sum_bytes": 4}
    messages = Messages.of(answer)
    assert messages.fixed == pytest.approx(1e-4)
    assert messages.a_byte == pytest.approx(1e-9)
