"""How fast are the ways through time? Chunks, carried boundaries, ranks and other methods beside step after step."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from bench.kernel_peers import JaxStep
from bench.machine import Machine, machine_with
from bench.time_auto import auto_rows, recording_rows
from bench.time_cases import Plan, carried_rows, forgets_rows, other_rows
from bench.time_chaotic import chaotic_rows
from bench.time_contest import Row, Tell
from bench.time_model import ManyRanks, model_ranks
from bench.time_ranks import RanksRun, run_ranks
from bench.time_training import Training, train_to_accuracy
from bench.trained_nets import Nets, open_recordings
from stretto.errors import StrettoError
from stretto.extras import optional
from stretto.files import write_text_atomically
from stretto.kernels import NoCompiler, find_compiler
from stretto.training import Count

CASES: Final = ("carried", "forgets", "chaotic", "auto", "recordings", "ranks", "training", "others", "model")
ON_DATA: Final = ("auto", "recordings", "ranks", "training", "model")
"""Cases that are about trained nets."""
PEERS: Final = ("jax",)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TimeBenchSettings:
    """Settings of `stretto bench time`.

    Attributes:
        cases: What to compare, separated by blanks or commas: carried, forgets, chaotic, auto, recordings, ranks,
            training, others, model; all of them if left out.
        data: Long recordings with one label a step, to train nets on until they remember; without, what needs such
            nets is left out.
        rounds: Turns of every contestant; of torch's layer two.
        chunks: Chunks of carried boundaries and of exact solving; left out, the fastest of 8, 16, 32 and 64, and what
            `Shooting` takes by itself.
        updates: Of the nets that are trained, up to 128 units; larger ones get as many as take that long.
        epochs: Of training to the accuracy of step after step.
        calls: Of solver="auto", and on chaotic nets, small ones 16 times as many, whose total is compared.
        threads: Threads of torch; as many as it has by default. Ranks have one each.
        json: JSON file for the result, written after each case.
        out: Folder for the page with tables and plots, the picture and the JSON file.
        quick: Tiny sizes and few turns: shows that it works, and no more; its times mean nothing.
    """

    cases: tuple[str, ...] = ()
    data: Path | None = None
    rounds: Count = 7
    chunks: Count | None = None
    updates: Count = 800
    epochs: Count = 4
    calls: Count = 40
    threads: Count | None = None
    json: Path | None = None
    out: Path | None = None
    quick: bool = False

    def __post_init__(self) -> None:
        for case in self.chosen:
            if case not in CASES:
                raise StrettoError(f"there is no case {case!r}", fix=f"Choose from {', '.join(CASES)}.")

    @property
    def chosen(self) -> tuple[str, ...]:
        """The cases to run."""
        named = tuple(case for word in self.cases for case in word.split(",") if case)
        return named or CASES


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TimeBench:
    """The result of one run; what was not asked for is empty.

    Attributes:
        rows: Training steps beside each other: cases carried, forgets, chaotic, auto, recordings and others.
        ranks: Two ranks beside one.
        training: To the accuracy of step after step.
        many: What more ranks would reach.
        threads: torch's, where nothing else is said.
        quick: Whether it was only a smoke test.
        machine: Where it ran.
        settings: As given.
        missing: What was left out, each with the reason and the way to get it.
        seconds: Time of the whole run.
    """

    rows: tuple[Row, ...]
    ranks: tuple[RanksRun, ...]
    training: Training | None
    many: ManyRanks | None
    threads: int
    quick: bool
    machine: Machine
    settings: dict[str, Any]
    missing: tuple[str, ...]
    seconds: float

    @property
    def judged(self) -> list[bool]:
        """Whether each goal is met."""
        found = [row.judged for row in self.rows] + [run.judged for run in self.ranks]
        if self.training is not None:
            found.append(self.training.judged)
        if self.many is not None:
            found += [row.judged for row in self.many.predictions]
        return [met for some in found for met in some]

    def to_json(self) -> str:
        """All of it as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=2, allow_nan=False) + "\n"


def run_time_bench(settings: TimeBenchSettings | None = None, *, tell: Tell | None = None) -> TimeBench:
    """Compare ways through time; first the results, then the times.

    Args:
        settings: What to compare.
        tell: Called with a line before each part.

    Raises:
        StrettoError: If a way that promises to be exact is not, or contestants do not compute the same.
    """
    settings = settings or TimeBenchSettings()
    if settings.quick:
        settings = dataclasses.replace(settings, rounds=2, updates=3, epochs=1, calls=4)
    tell = tell or (lambda _: None)
    begun = time.perf_counter()
    missing, with_jax = _missing(settings)
    # Here, so that data which cannot be used are told of at once.
    recordings = None if settings.data is None else open_recordings(settings.data)
    plan = Plan(
        rounds=settings.rounds,
        chunks=settings.chunks,
        nets=None if recordings is None else Nets(recordings, updates=settings.updates, tell=tell),
        with_jax=with_jax,
        quick=settings.quick,
        tell=tell,
    )
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(settings.threads or torch.get_num_threads())
        bench = _nothing_yet(settings, missing=missing)
        for case, measured in _measures(plan, settings).items():
            if case not in settings.chosen:
                continue
            bench = measured(bench)
            bench = dataclasses.replace(bench, seconds=time.perf_counter() - begun)
            # After each case, so that a run that is stopped leaves what it has.
            if settings.json is not None:
                write_text_atomically(settings.json, bench.to_json())
    return bench


def _nothing_yet(settings: TimeBenchSettings, *, missing: tuple[str, ...]) -> TimeBench:
    return TimeBench(
        rows=(),
        ranks=(),
        training=None,
        many=None,
        threads=torch.get_num_threads(),
        quick=settings.quick,
        machine=machine_with(PEERS),
        settings={key: str(v) if isinstance(v, Path) else v for key, v in dataclasses.asdict(settings).items()},
        missing=missing,
        seconds=0.0,
    )


def _measures(plan: Plan, settings: TimeBenchSettings) -> dict[str, Callable[[TimeBench], TimeBench]]:
    """For each case that can be run, how its result is put in."""

    def rows(measure: Callable[[], list[Row]]) -> Callable[[TimeBench], TimeBench]:
        return lambda bench: dataclasses.replace(bench, rows=(*bench.rows, *measure()))

    found = {
        "carried": rows(lambda: carried_rows(plan)),
        "forgets": rows(lambda: forgets_rows(plan)),
        "chaotic": rows(lambda: chaotic_rows(plan, calls=settings.calls)),
        "others": rows(lambda: other_rows(plan)),
    }
    nets = plan.nets
    if nets is None:
        return found

    def ranks(bench: TimeBench) -> TimeBench:
        return bench if bench.ranks else dataclasses.replace(bench, ranks=tuple(run_ranks(plan, nets)))

    def training(bench: TimeBench) -> TimeBench:
        return dataclasses.replace(bench, training=train_to_accuracy(plan, nets.recordings, epochs=settings.epochs))

    def model(bench: TimeBench) -> TimeBench:
        bench = ranks(bench)
        return dataclasses.replace(bench, many=model_ranks(plan, nets, bench.ranks))

    made = {
        **found,
        "auto": rows(lambda: auto_rows(plan, calls=settings.calls)),
        "recordings": rows(lambda: recording_rows(plan, nets, calls=settings.calls)),
        "ranks": ranks,
        "training": training,
        "model": model,
    }
    return {case: made[case] for case in CASES}


def _missing(settings: TimeBenchSettings) -> tuple[tuple[str, ...], bool]:
    """What cannot be run here, with the reason, and whether JAX can."""
    found: dict[str, str] = {}
    try:
        optional(PEERS[0])
    except StrettoError as error:
        found[JaxStep.title] = str(error)
    except (AttributeError, OSError, RuntimeError) as error:
        found[JaxStep.title] = f"its import fails ({error}). Mend it: pip install 'stretto[peers]'."
    with_jax = not found
    try:
        find_compiler()
    except NoCompiler as reason:
        found["compiled kernels"] = f"{reason}, so our layer runs without. Install g++ or name a compiler in CXX."
    without = [case for case in ON_DATA if case in settings.chosen] if settings.data is None else []
    if without:
        found[", ".join(without)] = "these are about trained nets. Give long recordings with --data FILE."
    return tuple(f"{name}: {reason}" for name, reason in found.items()), with_jax
