"""Does the engine choose well? Its noise meter, its batch beside a grid, many workers, and what measuring costs."""

import dataclasses
import itertools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal, final, get_args

import torch

from bench.machine import Machine, machine_with
from bench.tuner_cases import CASES, cut_data, made_task
from bench.tuner_grid import MULTIPLES, QUICK_MULTIPLES, Grid, run_grid
from bench.tuner_many import ManyWorkers, many_workers, time_shares
from bench.tuner_noise import QuadraticRow, quadratic_row
from bench.tuner_overhead import Overhead, measure_overhead
from stretto.errors import StrettoError
from stretto.files import write_text_atomically
from stretto.training import Count

TaskName = Literal["digits", "digits-momentum", "digit-images", "language-model", "handwriting"]
TASK_NAMES: Final[tuple[TaskName, ...]] = get_args(TaskName)
DIMENSIONS: Final = (10, 100, 1000)
PARTS: Final = (2, 8)
DTYPES: Final = (torch.float64, torch.float32)
QUADRATIC_UPDATES: Final = 2000
TURNS: Final = 8
"""Turns of the comparison of updates that are watched with those that are not."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TunerBenchSettings:
    """Settings of `stretto bench tuner`.

    Attributes:
        data: A folder with the data set mnist, of which a part is used for digits and digit-images; left out, drawn
            digits are. The language-model and handwriting train on embedded data.
        tasks: What to train; digits with Adam, and with the momentum of the published experiment.
        seeds: First weights and orders of data; each is a round over all batches. Updates to a target differ by half
            from one to the other.
        rounds: Rounds of each seed.
        quick: Tiny sizes, to a target that any run reaches: shows that it works, and no more; no number means anything.
        out: Folder for the page with tables and plots, and the JSON file.
        json: JSON file for the result, written after each task.
    """

    data: Path | None = None
    tasks: tuple[TaskName, ...] = TASK_NAMES
    seeds: Count = 5
    rounds: Count = 1
    quick: bool = False
    out: Path | None = None
    json: Path | None = None


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TunerBench:
    """The result of one run.

    Attributes:
        quadratics: The noise meter where the noise is known.
        grids: Given batches beside the chosen one, one a task.
        many: What the engine would do with 64 workers, one a task whose noise could be told.
        overheads: What measuring costs, one a task.
        threads: torch's.
        machine: Where it ran.
        settings: As given.
        missing: What was not as asked for, and why.
        seconds: Time of the whole run.
    """

    quadratics: tuple[QuadraticRow, ...]
    grids: tuple[Grid, ...]
    many: tuple[ManyWorkers, ...]
    overheads: tuple[Overhead, ...]
    threads: int
    machine: Machine
    settings: dict[str, Any]
    missing: tuple[str, ...]
    seconds: float

    def to_json(self) -> str:
        """The content of the JSON file, what follows from the runs included; what is no number, or endless, is null."""
        followed = [
            {
                "task": grid.task,
                "best": grid.best,
                "chosen": grid.chosen,
                "batch_ratio": grid.batch_ratio,
                "run_ratio": grid.run_ratio,
                "is_within": grid.is_within,
                "noise_scale": grid.noise_scale,
                "steps": [{**dataclasses.asdict(row), "error": row.error} for row in grid.steps],
            }
            for grid in self.grids
        ]
        values = {**dataclasses.asdict(self), "followed": followed}
        values["overheads"] = [{**dataclasses.asdict(each), "share": each.share} for each in self.overheads]
        return json.dumps(_finite(values), indent=2, allow_nan=False) + "\n"


def run_tuner_bench(settings: TunerBenchSettings, *, tell: Callable[[str], None]) -> TunerBench:
    """Ask all questions, the noise meter first, then task by task.

    Args:
        settings: What to train, and how often.
        tell: Called with how far it is.

    Raises:
        StrettoError: The settings or data cannot be used.
    """
    if not settings.tasks or len(set(settings.tasks)) < len(settings.tasks):
        raise StrettoError(
            f"the tasks to train are {list(settings.tasks)}", fix=f"Name each once, of {', '.join(TASK_NAMES)}."
        )
    begun = time.perf_counter()
    missing: list[str] = []
    quadratics = _quadratics(settings, tell=tell)
    grids: list[Grid] = []
    many: list[ManyWorkers] = []
    overheads: list[Overhead] = []
    for name in settings.tasks:

        def say(line: str, *, name: str = name) -> None:
            tell(f"{name}: {line}")

        case = CASES[name].quick if settings.quick else CASES[name]
        data, note = cut_data(name, case, folder=settings.data)
        missing += [note] if note else []
        grid = run_grid(
            name,
            case,
            data,
            multiples=QUICK_MULTIPLES if settings.quick else MULTIPLES,
            seeds=1 if settings.quick else settings.seeds,
            rounds=1 if settings.quick else settings.rounds,
            tell=say,
        )
        grids.append(grid)
        given, auto = (made_task(name, case, data, batch_size=size, seed=0) for size in (case.base_batch_size, "auto"))
        say("what measuring costs")
        cost = measure_overhead(given, auto, turns=1 if settings.quick else TURNS)
        overheads.append(dataclasses.replace(cost, task=name))
        if grid.noise_scale is None:
            missing.append(f"{name}: noise hid the gradient, so many workers were not simulated")
        else:
            say("64 workers, simulated")
            num_bytes = sum(weight.numel() * weight.element_size() for weight in given.build_model().parameters())
            found = many_workers(
                name,
                time_shares(given),
                noise_scale=grid.noise_scale,
                base_batch_size=case.base_batch_size,
                best=grid.best,
                num_bytes=num_bytes,
            )
            many.append(found)
        faults = [run.fault for runs in (*grid.given.values(), grid.auto) for run in runs if run.fault]
        missing += [f"{name}: a run ended early: {fault}" for fault in dict.fromkeys(faults)]
        bench = TunerBench(
            quadratics=quadratics,
            grids=tuple(grids),
            many=tuple(many),
            overheads=tuple(overheads),
            threads=torch.get_num_threads(),
            machine=machine_with([]),
            settings={key: str(v) if isinstance(v, Path) else v for key, v in dataclasses.asdict(settings).items()},
            missing=tuple(missing),
            seconds=time.perf_counter() - begun,
        )
        if settings.json is not None:
            write_text_atomically(settings.json, bench.to_json())
    return bench


def _quadratics(settings: TunerBenchSettings, *, tell: Callable[[str], None]) -> tuple[QuadraticRow, ...]:
    dimensions, updates = ((100,), 200) if settings.quick else (DIMENSIONS, QUADRATIC_UPDATES)
    rows = []
    for dimension, parts, dtype in itertools.product(dimensions, PARTS, DTYPES):
        tell(f"a quadratic of {dimension} dimensions, {parts} parts")
        # As many sequences for each number of parts.
        count = 2 * updates // parts
        rows.append(quadratic_row(dimension=dimension, parts=parts, dtype=dtype, updates=count))
    return tuple(rows)


def _finite(value: Any) -> Any:
    """The same for JSON: null for what is no number."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
