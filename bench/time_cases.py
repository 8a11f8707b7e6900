"""The cases of the time benchmark that one process can measure: carried boundaries, exact chunks, other methods.

Shape legend: T steps, B sequences, F features of the input, H hidden units.
"""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final, final

import torch

from bench.kernel_gate import pass_gate
from bench.time_contest import (
    EXACT,
    SERIAL,
    Errors,
    Goal,
    Row,
    SolverStep,
    Subject,
    Tell,
    errors_of,
    in_turns,
    pass_exact,
    timed_rows,
)
from bench.trained_nets import LEARNING_RATE, PLACES, Nets, memory_length
from bench.training_step import AbstractStep, Batch, StepShape, drawn_batch
from stretto.cells import GRU
from stretto.solvers import Multigrid, Newton, Shooting, TrajectoryCache

FEATURES: Final = 6
CHUNKS: Final = (8, 16, 32, 64)
"""Numbers of chunks to choose from."""
FORGETS_WITHIN: Final = 256
AGREED: Final = 1e-6
WEAKER: Final = 0.8
SLOWER: Final = 0.1


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How everything is measured.

    Attributes:
        rounds: Turns of every contestant.
        chunks: Chunks of carried boundaries; None chooses the fastest.
        nets: Trained nets; None if there are no data.
        with_jax: Whether JAX is there.
        quick: Whether to use tiny sizes.
        tell: Called with a line before each part.
    """

    rounds: int
    chunks: int | None
    nets: Nets | None
    with_jax: bool
    quick: bool
    tell: Tell

    def sized(self, num_steps: int, hidden_size: int) -> tuple[int, int]:
        """T and H, or tiny ones."""
        return (256, 8) if self.quick else (num_steps, hidden_size)


CARRIED: Final = (
    ((16384, 64), Goal(over_torch=100, over_serial=1.8)),
    ((16384, 256), Goal(over_torch=20, over_serial=2.5)),
    ((8192, 512), Goal(over_torch=10, over_serial=3)),
)
FORGETS: Final = ((16384, 256), Goal(over_torch=12, over_serial=1.6))
OTHERS: Final = (2048, 16)


def carried_rows(plan: Plan) -> list[Row]:
    """One sweep from boundaries that were kept: at each shape, beside torch's layer, JAX's and our own kernel."""
    rows: list[Row] = []
    for sizes, goal in CARRIED[: 1 if plan.quick else None]:
        subject = subject_of("carried", plan, *plan.sized(*sizes))
        plan.tell(subject.where)
        wanted = subject.serial().results()
        count = plan.chunks or _fastest(subject, plan)
        ways = {f"carried, {count} chunks": False, f"gradients too, {count} chunks": True}
        steps = [
            subject.solved(
                name,
                Shooting(num_chunks=count, max_sweeps=1, cache=TrajectoryCache(adjoints=adjoints), tolerance=AGREED),
            )
            for name, adjoints in ways.items()
        ]
        errors = {step.name: _after_an_update(step, subject, wanted=wanted, most=count) for step in steps}
        rows += _beside_peers(subject, steps, plan, wanted=wanted, errors=errors, goals={steps[0].name: goal})
    return rows


def forgets_rows(plan: Plan) -> list[Row]:
    """Exact chunks on nets that forget: one at its initial weights, and one that needs all of 256 steps for it."""
    sizes, goal = FORGETS
    num_steps, hidden_size = plan.sized(*sizes)
    shape = StepShape(num_steps=num_steps, batch=1, input_size=FEATURES, hidden_size=hidden_size)
    batch = drawn_batch(shape)
    soon = forgetting(_drawn(shape), batch.x_TBF)
    late = slowed(soon, batch.x_TBF)
    rows: list[Row] = []
    for what, net in (("soon", soon), ("late", late)):
        told = f"forgets {what}, after about {net.memory:.0f} steps; drawn input"
        subject = Subject(case="forgets", net=told, cell=net.cell, batch=batch)
        plan.tell(f"{subject.where}, {what}")
        wanted = subject.serial().results()
        step = subject.solved("exact chunks", Shooting(num_chunks=plan.chunks or "auto", tolerance=AGREED))
        errors = {step.name: pass_exact(step, wanted=wanted, where=subject.where)}
        rows += _beside_peers(subject, [step], plan, wanted=wanted, errors=errors, goals={step.name: goal})
    return rows


def other_rows(plan: Plan) -> list[Row]:
    """Newton's method (DEER) and multigrid as published, at a shape that they can do."""
    num_steps, hidden_size = plan.sized(*OTHERS)
    subjects = [_at_first("others", num_steps, hidden_size)]
    if plan.nets is not None:
        subjects.append(subject_of("others", plan, num_steps, hidden_size))
    rows: list[Row] = []
    for subject in subjects:
        plan.tell(f"{subject.where}, {subject.net}")
        wanted = subject.serial().results()
        # A solver that was kept would not try again where it was in vain: what it costs would not be seen.
        exact = [
            subject.solved_anew("Newton, dense", lambda: Newton(jacobian="dense", tolerance=AGREED)),
            subject.solved_anew("Newton, diagonal", lambda: Newton(jacobian="diagonal", tolerance=AGREED)),
            subject.solved_anew("multigrid to 1e-6", lambda: Multigrid(tolerance=AGREED)),
        ]
        published = subject.solved("multigrid as published", Multigrid())
        errors = {step.name: pass_exact(step, wanted=wanted, where=subject.where) for step in exact}
        errors[published.name] = errors_of(published.results(), wanted=wanted, solution=published.solution)
        rows += _beside_peers(subject, [*exact, published], plan, wanted=wanted, errors=errors, goals={})
    return rows


def subject_of(case: str, plan: Plan, num_steps: int, hidden_size: int) -> Subject:
    """A trained net on recordings, or where there are none a net at its initial weights on drawn numbers."""
    if plan.nets is None:
        return _at_first(case, num_steps, hidden_size)
    net = plan.nets.of(hidden_size)
    x_TBF = plan.nets.recordings.joined(num_steps)[:, None]
    batch = Batch(x_TBF=x_TBF, weight_TBO=_weights(num_steps, hidden_size))
    # A copy: an update is made of it.
    return Subject(case=case, net=f"trained: {net.told}", cell=copy.deepcopy(net.cell), batch=batch)


def _at_first(case: str, num_steps: int, hidden_size: int) -> Subject:
    shape = StepShape(num_steps=num_steps, batch=1, input_size=FEATURES, hidden_size=hidden_size)
    return Subject(case=case, net="initial weights, drawn input", cell=_drawn(shape), batch=drawn_batch(shape))


def _weights(num_steps: int, hidden_size: int) -> torch.Tensor:
    return torch.randn(num_steps, 1, hidden_size, generator=torch.Generator().manual_seed(1))


def _drawn(shape: StepShape) -> GRU:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GRU(shape.input_size, shape.hidden_size)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Forgetting:
    """A net, and after how many steps it was seen to forget."""

    cell: GRU
    memory: float


def forgetting(cell: GRU, x_TBF: torch.Tensor) -> Forgetting:
    """The net, its recurrent weights made smaller until it forgets within 256 steps."""
    while True:
        memory = _memory(cell, x_TBF)
        if memory <= _within(x_TBF):
            return Forgetting(cell=cell, memory=memory)
        cell = copy.deepcopy(cell)
        with torch.no_grad():
            cell.weight_hh.mul_(WEAKER)


def slowed(net: Forgetting, x_TBF: torch.Tensor) -> Forgetting:
    """A copy that changes ever more slowly, as long as it still forgets within 256 steps."""
    while True:
        cell = copy.deepcopy(net.cell)
        assert cell.bias_ih is not None
        with torch.no_grad():
            # Of the three gates the second keeps what there is.
            cell.bias_ih[cell.hidden_size : 2 * cell.hidden_size] += SLOWER
        memory = _memory(cell, x_TBF)
        if memory > _within(x_TBF):
            return net
        net = Forgetting(cell=cell, memory=memory)


def _memory(cell: GRU, x_TBF: torch.Tensor) -> float:
    return memory_length(cell, x_TBF[:, 0], tolerance=AGREED, places=PLACES, stride=16)


def _within(x_TBF: torch.Tensor) -> int:
    return min(FORGETS_WITHIN, len(x_TBF) // PLACES)


def _fastest(subject: Subject, plan: Plan) -> int:
    """The number of chunks whose sweep takes least time."""
    counts = [count for count in CHUNKS if count <= subject.shape.num_steps]
    steps = {
        str(count): subject.solved(str(count), Shooting(num_chunks=count, max_sweeps=1, cache=TrajectoryCache()))
        for count in counts
    }
    for step in steps.values():
        step.run()
    timings = in_turns({name: step.run for name, step in steps.items()}, rounds=max(1, plan.rounds // 2))
    return int(min(timings, key=lambda name: timings[name].least))


def _after_an_update(step: SolverStep, subject: Subject, *, wanted: Mapping[str, torch.Tensor], most: int) -> Errors:
    """What carried boundaries are off after one update of all weights.

    Before that, with weights that do not change, they must come to where step after step is: that is the gate.
    """
    for _ in range(most + 1):
        found = step.results()
        if step.solution.residual <= AGREED:
            break
    output = {"output": found["output"]}
    here = {"output": wanted["output"]}
    pass_gate(output, wanted=here, name=step.name, peer=SERIAL, where=subject.where, tolerance=EXACT)
    before = copy.deepcopy(subject.cell.state_dict())
    serial = subject.serial()
    serial.results()
    torch.optim.Adam(subject.cell.parameters(), lr=LEARNING_RATE).step()
    errors = errors_of(step.results(), wanted=serial.results(), solution=step.solution)
    subject.cell.load_state_dict(before)
    return errors


def _beside_peers(
    subject: Subject,
    steps: Sequence[SolverStep],
    plan: Plan,
    *,
    wanted: Mapping[str, torch.Tensor],
    errors: Mapping[str, Errors],
    goals: Mapping[str, Goal],
) -> list[Row]:
    peers: list[AbstractStep] = [subject.torch()]
    if plan.with_jax:
        peers.append(subject.jax())
    known = dict(errors)
    for peer in peers:
        found = peer.results()
        pass_gate(found, wanted=wanted, name=peer.name, peer=SERIAL, where=subject.where)
        known[peer.name] = errors_of(found, wanted=wanted, solution=None)
    ours = subject.serial()
    ours.run()
    every: list[AbstractStep] = [*peers, ours, *steps]
    return timed_rows(subject, every, errors=known, goals={} if plan.quick else goals, rounds=plan.rounds)
