"""Our layer beside its peers, shape by shape: first the gate, then the clock, all in one interleaved run."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal

import torch

from bench.interleaved import Pace, Timing, interleaved, with_threads
from bench.kernel_gate import pass_gate
from bench.kernel_peers import Field, Net, field_of
from bench.training_step import AbstractStep, StepShape

Tell = Callable[[str], None]
Topic = Literal["shapes", "bidirectional", "stack", "hidden", "threads"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(StepShape):
    """Our training step beside a peer's.

    Attributes:
        topic: The part of the benchmark it belongs to.
        net: What is trained.
        threads: torch's.
        peer: Whose.
        ours: Our time.
        theirs: The peer's.
        ratio: The peer's least time over ours.
        ratio_of_medians: The same of medians.
        goal: What the ratio should be at least; None where there is none.
        error: Largest relative difference of outputs and gradients.
        kernel: What ran of ours: "cpp", or what else and why.
    """

    topic: Topic
    net: str
    threads: int
    peer: str
    ours: Timing
    theirs: Timing
    ratio: float
    ratio_of_medians: float
    goal: float | None
    error: float
    kernel: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GoalShape:
    """A shape with the ratios that are to be reached at it, by net and peer."""

    shape: StepShape
    goals: Mapping[tuple[str, str], float]


def _goal_shape(sizes: tuple[int, int, int, int], *, gru: float, jax: float, norm: float, lstm: float) -> GoalShape:
    num_steps, batch, input_size, hidden_size = sizes
    return GoalShape(
        shape=StepShape(num_steps=num_steps, batch=batch, input_size=input_size, hidden_size=hidden_size),
        goals={
            ("GRU", "nn.GRU"): gru,
            ("GRU", "JAX scan"): jax,
            ("LayerNormLSTM", "Python loop"): norm,
            ("LSTM", "nn.LSTM"): lstm,
        },
    )


SHAPES: Final = (
    _goal_shape((10_000, 1, 8, 32), gru=150, jax=3, norm=150, lstm=2),
    _goal_shape((2000, 1, 32, 64), gru=70, jax=3, norm=80, lstm=2),
    _goal_shape((2000, 1, 32, 256), gru=12, jax=2.5, norm=20, lstm=1.2),
    _goal_shape((500, 16, 32, 128), gru=5, jax=3, norm=6, lstm=1.3),
    _goal_shape((200, 64, 64, 256), gru=1.5, jax=1.5, norm=2, lstm=1),
)
LARGE_SHAPES: Final = tuple(
    StepShape(num_steps=num_steps, batch=batch, input_size=64, hidden_size=hidden_size)
    for batch, num_steps in ((1, 200), (32, 50))
    for hidden_size in (512, 1024)
)
THREADED_SHAPES: Final = tuple(entry.shape for entry in SHAPES[2:])
TINY: Final = StepShape(num_steps=6, batch=2, input_size=4, hidden_size=8)
NETS: Final[tuple[Net, ...]] = ("GRU", "LayerNormLSTM", "LSTM")
FIXED_NETS: Final[tuple[Net, ...]] = ("GRU", "LSTM")


def shape_comparisons(*, pace: Pace, quick: bool, with_jax: bool, tell: Tell) -> tuple[Comparison, ...]:
    """All nets at the shapes that have goals."""
    entries = (GoalShape(shape=TINY, goals=SHAPES[0].goals),) if quick else SHAPES
    rows: list[Comparison] = []
    for net in NETS:
        for entry in entries:
            tell(f"shapes: {net}, {entry.shape}")
            field = field_of(net, entry.shape, with_jax=with_jax)
            goals = {} if quick else {peer: goal for (of, peer), goal in entry.goals.items() if of == net}
            rows += compare(field, topic="shapes", net=net, shape=entry.shape, pace=pace, goals=goals)
    return tuple(rows)


def hidden_comparisons(*, pace: Pace, quick: bool, tell: Tell) -> tuple[Comparison, ...]:
    """Large layers, whose weights do not fit into a core's own cache."""
    rows: list[Comparison] = []
    for net in FIXED_NETS:
        for shape in (TINY,) if quick else LARGE_SHAPES:
            tell(f"hidden: {net}, {shape}")
            rows += compare(field_of(net, shape, with_jax=False), topic="hidden", net=net, shape=shape, pace=pace)
    return tuple(rows)


def thread_comparisons(counts: Sequence[int], *, pace: Pace, quick: bool, tell: Tell) -> tuple[Comparison, ...]:
    """The same step with several numbers of threads, all of them in one interleaved run."""
    rows: list[Comparison] = []
    for net in FIXED_NETS:
        for shape in (TINY,) if quick else THREADED_SHAPES:
            tell(f"threads: {net}, {shape}")
            field = field_of(net, shape, with_jax=False)
            rows += compare(field, topic="threads", net=net, shape=shape, pace=pace, thread_counts=counts)
    return tuple(rows)


def compare(
    field: Field,
    *,
    topic: Topic,
    net: str,
    shape: StepShape,
    pace: Pace,
    goals: Mapping[str, float] | None = None,
    thread_counts: Sequence[int] | None = None,
) -> list[Comparison]:
    """Gate and time the contestants of one shape; a row for each peer and number of threads."""
    before = torch.get_num_threads()
    counts = tuple(thread_counts or (before,))
    errors: dict[tuple[int, str], float] = {}
    tasks: dict[str, Callable[[], object]] = {}
    try:
        for count in counts:
            torch.set_num_threads(count)
            found = field.ours.results()
            for peer in field.peers:
                errors[count, peer.name] = pass_gate(
                    found, wanted=peer.results(), name=f"our {net}", peer=peer.name, where=str(shape)
                )
            tasks |= {_key(step, count): with_threads(step.run, count) for step in (field.ours, *field.peers)}
        timings = interleaved(tasks, pace=pace)
    finally:
        torch.set_num_threads(before)
    rows = []
    for count in counts:
        ours = timings[_key(field.ours, count)]
        for peer in field.peers:
            theirs = timings[_key(peer, count)]
            rows.append(
                Comparison(
                    **dataclasses.asdict(shape),
                    topic=topic,
                    net=net,
                    threads=count,
                    peer=peer.name,
                    ours=ours,
                    theirs=theirs,
                    ratio=theirs.least / ours.least,
                    ratio_of_medians=theirs.median / ours.median,
                    goal=(goals or {}).get(peer.name),
                    error=errors[count, peer.name],
                    kernel=field.kernel,
                )
            )
    return rows


def _key(step: AbstractStep, threads: int) -> str:
    return f"{step.name} with {threads}"
