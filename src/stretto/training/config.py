"""Settings of a training run: dataclasses that give the flags, the TOML keys and the checks."""

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar, get_args, get_type_hints

import pydantic
from pydantic import Field

from stretto.errors import StrettoError
from stretto.kernels import Backend
from stretto.large_batch import OptimizerName, ScalingRule, ScheduleName
from stretto.solvers import MAX_KERNEL_ROWS, AbstractSolver, Multigrid, Shooting, TrajectoryCache

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Count = Annotated[int, Field(ge=1, lt=2**31)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
LoggerName = Literal["csv", "tensorboard", "wandb", "mlflow"]

PRESET: Final = "preset"
OF_SCHEDULES: Final = ("decay_factor", "flat_epochs")
"""Settings that mean something with some schedules only."""
MEGABYTE: Final = 1 << 20
NOT_RECORDED: Final = frozenset(
    "out resume log nproc time_parallel max_restarts rank_timeout_minutes record_sequences".split()
)
"""Settings that say where and how a run is made, and may change when it resumes."""
MAY_CHANGE: Final = frozenset({"device"})
"""Recorded settings that may change all the same."""

C = TypeVar("C")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings that every task has.

    Attributes:
        data: A file or folder that `stretto inspect` can read; left out, the task's embedded data.
        out: The run folder; left out, the next free one under runs/.
        resume: Continue the run in `out` (left out: the latest of this task) exactly where it stopped.
        log: Also log to CSV files, TensorBoard, Weights & Biases or MLflow; several may be named.
        epochs: Passes over the training data.
        patience: Stop after so many epochs without a better validation metric, and test the best weights instead of
            the last.
        auto: Find out how to train: the settings given are the plain recipe, and others are tried beside it, briefly.
            The best is run for few epochs, then longer as long as that pays. All runs together have `epochs` epochs.
            The weights with the best validation metric are tested.
        reach: Stop after the first epoch whose validation metric is as good as this: a share for accuracy, 0.96.
        max_hours: Stop after the first epoch that ends later than this, counted from the first start.
        batch_size: Most sequences in a batch; auto begins with base_batch_size (left out: the task's own) and lets
            measurements choose a larger one.
        base_batch_size: The batch, over all ranks and accumulated batches, that learning_rate and warmup_epochs belong
            to; the rule adapts both to the batch in force. Left out, they are used as they are.
        rule: How they follow the batch. Legw: the rate by the square root, the warm-up in proportion; sqrt and linear:
            the rate alone; updates, for muon: the rate by one over the square root of the updates; none: neither.
        base_epochs: For the rule updates: the epochs that learning_rate and warmup_epochs belong to, if not as many.
        max_padded_steps: Most padded steps (sequences times longest) in a batch, a hard cap.
        num_buckets: Length buckets; 1 is plain shuffled batches, auto takes as many as pay.
        largest_first: Begin the first epoch with its largest batch, which shows at once whether memory suffices.
        hidden_size: Units of the recurrent layer, per direction.
        num_layers: Recurrent layers.
        dropout: Share of activations dropped between layers.
        learning_rate: Peak of the schedule.
        optimizer: Sgd is plain; momentum and nesterov have a momentum of 0.9; lars and lamb scale the update of each
            matrix by its norm, and lars counts rates in other units: 4 to 32 are usual. Muon makes the update of each
            gate orthogonal, with Adam for all but recurrent layers: rates of 0.01 to 0.03 are usual.
        schedule: One-cycle rises and falls over the run; constant rises once and stays; the others fall after the
            warm-up: linear to zero, poly by the square of the share that is left, exponential a little at every update,
            step at times, cosine, and ptb once per epoch after some flat ones.
        warmup_epochs: Until the peak, at the base batch. Left out: 15 % of the run in one-cycle, 10 % in linear, 100
            updates from a tenth of the rate in constant, none in the others.
        warmup_cap: Largest share of the run that warmup_epochs may grow to.
        decay_factor: What the rate is multiplied by each time it falls: for exponential (0.95), step (0.1), ptb (0.5).
        flat_epochs: For ptb, epochs before the rate falls (4); for step, epochs between falls (a third of the run).
        gates: For lars and lamb: scale every gate of a recurrent layer by its own norm.
        adam_share: For muon: the rate of what Adam updates, but for embeddings and the output layer, as a multiple of
            learning_rate; 0.1 suits short runs.
        weight_decay: Left out, 0.01 in adamw and none in the others. In adamw all weights decay; in the others biases
            and gains do not.
        clip_norm: Largest norm of a gradient.
        seed: Everything random follows from it.
        backend: What runs the recurrent layers: auto uses compiled kernels where it can, which compute real steps only;
            torch is torch's own, padding included.
        threads: Cores to use; left out, torch's choice.
        device: Where to train, as torch names it; a run may resume on another.
        checkpoint_minutes: Also save this often within an epoch; every epoch is saved anyway.
        keep_checkpoints: How many to keep.
        accumulate: Batches per update, from different buckets.
        on_nan: When a loss or gradient is NaN or inf: stop, or skip that update and continue.
        nproc: Ranks to train with on this machine; each takes batches of the size given.
        time_parallel: Ranks that share the same sequences and divide their steps; it must divide the number of ranks.
        max_restarts: How often to restart all ranks when one is lost.
        rank_timeout_minutes: Minutes without an answer after which a rank counts as lost.
        record_sequences: Also record which sequences each update was made of, for an audit.
    """

    data: Path | None = None
    out: Path | None = None
    resume: bool = False
    log: tuple[LoggerName, ...] = ()
    epochs: Count = 10
    patience: Count | None = None
    auto: bool = False
    reach: Annotated[float, Field(allow_inf_nan=False)] | None = None
    max_hours: Positive | None = None
    batch_size: Count | Literal["auto"] = 32
    base_batch_size: Count | None = None
    rule: ScalingRule = "legw"
    base_epochs: Positive | None = None
    max_padded_steps: Count | None = None
    num_buckets: Count | Literal["auto"] = "auto"
    largest_first: bool = False
    hidden_size: Count = 128
    num_layers: Annotated[int, Field(ge=1, le=256)] = 1
    dropout: Share = 0.1
    learning_rate: Positive = 5e-3
    optimizer: OptimizerName = "adamw"
    schedule: ScheduleName = "one-cycle"
    warmup_epochs: NotNegative | None = None
    warmup_cap: Share | None = 0.2
    decay_factor: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    flat_epochs: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    gates: bool = False
    adam_share: Positive = 1.0
    weight_decay: NotNegative | None = None
    clip_norm: Positive = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    backend: Backend = "auto"
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    device: str = "cpu"
    checkpoint_minutes: Positive = 5.0
    keep_checkpoints: Count = 2
    accumulate: Count = 1
    on_nan: Literal["stop", "skip"] = "stop"
    nproc: Count = 1
    time_parallel: Count = 1
    max_restarts: Annotated[int, Field(ge=0, lt=2**31)] = 3
    rank_timeout_minutes: Positive = 10.0
    record_sequences: bool = False

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = pydantic.ConfigDict(extra="forbid")

    @property
    def tests_best(self) -> bool:
        """Whether the weights with the best validation metric are those that are tested and loaded."""
        return self.auto or self.patience is not None

    @property
    def first_batch_size(self) -> int:
        """The batch size to begin with, of one rank."""
        if self.batch_size == "auto":
            default = type(self).batch_size
            assert isinstance(default, int)
            return self.base_batch_size or default
        return self.batch_size

    def recorded(self) -> dict[str, Any]:
        """The settings that shape the result, as JSON-ready values; where and how it runs is left out."""
        values = {name: value for name, value in dataclasses.asdict(self).items() if name not in NOT_RECORDED}
        values["data"] = None if self.data is None else str(self.data)
        return values


@dataclasses.dataclass(frozen=True, kw_only=True)
class SolverConfig(TrainConfig):
    """More settings for a task whose model is a `stretto.RNN`.

    Attributes:
        solver: How to run through time. Serial: sequentially. Shooting: many chunks of time at once, swept until they
            agree; exact. Warm_start: one sweep, each chunk from the state where its neighbour ended when the sequence
            was last seen; not exact, and the residual is reported. Multigrid: as published; not exact, and the residual
            is reported. Auto: whichever is expected to be fastest.
        chunks: For shooting and warm_start: chunks of the longest sequence in a batch; auto fills the rows of a kernel.
        tolerance: For shooting, and for multigrid to iterate until then: the residual allowed where chunks meet.
        exact_epochs: For warm_start: run this many epochs at the end sequentially.
        cache_megabytes: For warm_start: most memory for chunk boundaries; beyond it the oldest are dropped.
    """

    solver: Literal["serial", "auto", "shooting", "warm_start", "multigrid"] = "serial"
    chunks: Count | Literal["auto"] = "auto"
    tolerance: Positive | None = None
    exact_epochs: Annotated[int, Field(ge=0, lt=2**31)] = 0
    cache_megabytes: Annotated[float, Field(gt=0.0, lt=2**40, allow_inf_nan=False)] = 1024.0

    def make_solver(self) -> AbstractSolver | Literal["serial", "auto"]:
        """A solver for one `stretto.RNN`, which must not be shared: solvers remember sequences.

        Raises:
            StrettoError: Settings contradict each other.
        """
        check_compatible(self)
        if self.solver in ("serial", "auto"):
            return "serial" if self.solver == "serial" else "auto"
        if self.solver == "multigrid":
            return Multigrid(tolerance=self.tolerance)
        if self.solver == "warm_start":
            # Not by the rows of each batch, which vary: a sequence that is cut differently is not found again.
            chunks = max(2, MAX_KERNEL_ROWS // self.first_batch_size) if self.chunks == "auto" else self.chunks
            cache = TrajectoryCache(max_bytes=max(1, int(self.cache_megabytes * MEGABYTE)))
            return Shooting(num_chunks=chunks, max_sweeps=1, cache=cache)
        return Shooting(num_chunks=self.chunks, tolerance=self.tolerance or Shooting().tolerance)


CONFLICTS: Final[tuple[tuple[Callable[[SimpleNamespace], bool], str, str], ...]] = (
    (
        lambda run: run.auto and (run.batch_size == "auto" or run.patience is not None),
        "--auto was given with --batch-size {batch_size} and --patience {patience}",
        "Give a number of sequences and leave --patience out: --auto tries larger batches, and decides when to stop.",
    ),
    (
        lambda run: run.auto and (run.time_parallel > 1 or run.solver != "serial"),
        "--auto was given with --time-parallel {time_parallel} and --solver {solver}",
        "Leave these out: recipes are tried with layers that run sequentially.",
    ),
    (
        lambda run: run.batch_size == "auto" and (run.accumulate > 1 or run.time_parallel > 1),
        "--batch-size auto was given with --accumulate {accumulate} and --time-parallel {time_parallel}",
        "Leave these out: it accumulates by itself where that pays, and trains on whole sequences.",
    ),
    (
        lambda run: run.time_parallel > 1 and run.world_size % run.time_parallel,
        "time_parallel={time_parallel} does not divide the number of ranks, which is {world_size}",
        "Start a multiple of it, with --nproc or torchrun --nproc-per-node.",
    ),
    (
        lambda run: run.time_parallel > 1 and not run.has_step_labels,
        "time_parallel={time_parallel} was given and the task {task!r} needs whole sequences on one rank",
        "Leave --time-parallel out, or train a task with a label for each step: label-steps.",
    ),
    (
        lambda run: run.time_parallel > 1 and run.backend == "torch",
        "time_parallel={time_parallel} was given and backend='torch', whose layers run on one rank alone",
        "Leave --backend or --time-parallel out.",
    ),
    (
        lambda run: run.time_parallel > 1 and run.solver != "serial",
        "time_parallel={time_parallel} was given and the solver is {solver!r}: choose one of the two",
        "Leave --solver or --time-parallel out.",
    ),
    (
        lambda run: run.backend == "torch" and run.solver != "serial",
        "backend='torch' was given and the solver is {solver!r}, which torch's own layers do not have",
        "Leave --backend or --solver out.",
    ),
    (
        lambda run: run.chunks != "auto" and run.solver not in ("shooting", "warm_start"),
        "chunks={chunks} was given and the solver is {solver!r}",
        "Leave --chunks out, or choose --solver shooting or warm_start.",
    ),
    (
        lambda run: run.tolerance is not None and run.solver not in ("shooting", "multigrid"),
        "tolerance={tolerance} was given and the solver is {solver!r}",
        "Leave --tolerance out, or choose --solver shooting or multigrid.",
    ),
    (
        lambda run: run.exact_epochs and run.solver != "warm_start",
        "exact_epochs={exact_epochs} was given and the solver is {solver!r}",
        "Leave --exact-epochs out, or choose --solver warm_start.",
    ),
    (
        lambda run: run.exact_epochs and run.exact_epochs >= run.epochs,
        "exact_epochs={exact_epochs} of epochs={epochs} leave none with a warm start",
        "Lower --exact-epochs, or choose --solver serial.",
    ),
    (
        lambda run: run.solver == "warm_start" and run.chunks == 1,
        "the solver is 'warm_start' and chunks=1 has no boundaries to start from",
        "Give --chunks 2 or more, or choose --solver serial.",
    ),
    (
        lambda run: run.solver == "warm_start" and run.world_size > 1,
        "the solver is 'warm_start' and there are {world_size} ranks: sequences change ranks every epoch, and their "
        "boundaries are known only to the rank that saw them last",
        "Train on one rank, or choose --solver serial or shooting.",
    ),
)
"""Settings that exclude each other: when, what to say, and what to do. `run` has the settings and `check_compatible`'s
arguments; `{name}` in a message is their value."""


def check_compatible(
    config: TrainConfig, *, task: str = "", world_size: int | None = None, has_step_labels: bool = True
) -> None:
    """Refuse settings that exclude each other, which would otherwise be ignored silently.

    There are as many ranks as the settings ask for unless `world_size` is given. Ranks can divide the steps of
    sequences if each has a label.
    """
    facts = {"task": task, "has_step_labels": has_step_labels}
    defaults = {"solver": "serial", "chunks": "auto", "tolerance": None, "exact_epochs": 0}
    if world_size is None:
        # The ranks are not there yet; whether their number fits is checked when they are.
        world_size = config.nproc * config.time_parallel
    values = {**defaults, **dataclasses.asdict(config), **facts, "world_size": max(world_size, config.nproc)}
    for applies, problem, fix in CONFLICTS:
        if applies(SimpleNamespace(**values)):
            raise StrettoError(problem.format(**values), fix=fix)


def with_preset(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings given, and the values of the preset they name for those left out.

    `presets` of the class, if it has any, are settings by name. An unknown preset is left for `validate`. Of a preset
    whose schedule is replaced, what belongs to that schedule is left out.
    """
    presets: Mapping[str, Mapping[str, Any]] = getattr(kind, "presets", {})
    name = values.get(PRESET)
    preset = dict(presets.get(name, {})) if isinstance(name, str) else {}
    if values.get("schedule", preset.get("schedule")) != preset.get("schedule"):
        preset = {key: value for key, value in preset.items() if key not in OF_SCHEDULES}
    return {**preset, **values}


def validate(kind: type[C], values: Mapping[str, Any], *, source: str) -> C:
    """Build settings from plain values; all problems are shown at once, with the file or call they come from."""
    hints = get_type_hints(kind)
    booleans = [
        name for name, value in values.items() if isinstance(value, bool) and not _accepts_bool(hints.get(name))
    ]
    try:
        # Python's booleans are integers too, and pydantic would read them as 0 and 1.
        return pydantic.TypeAdapter(kind).validate_python({**values, **{name: str(values[name]) for name in booleans}})
    except pydantic.ValidationError as error:
        known = ", ".join(field.name for field in dataclasses.fields(kind))  # type: ignore[arg-type]
        # A union reports one line for each of its members; one line for each setting is enough.
        faults = dict(_format_fault(entry) for entry in reversed(error.errors(include_url=False)))
        lines = "\n".join(f"  {name}: {text}" for name, text in reversed(faults.items()))
        raise StrettoError(
            f"{source} has settings that cannot be used:\n{lines}", fix=f"\nKnown settings: {known}."
        ) from error


def read_toml(path: Path) -> dict[str, Any]:
    """The keys and values of a TOML file; a key may be written with dashes or underscores."""
    try:
        if path.exists() and not path.is_file():
            raise StrettoError(f"{str(path)!r} is not a file", fix="Name a TOML file.")
        with path.open("rb") as stream:
            values = tomllib.load(stream)
    except StrettoError:
        raise
    except OSError as error:
        raise StrettoError(f"could not read {str(path)!r}: {error.strerror}", fix="Check the path.") from error
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits, or thousands of brackets, are no TOML error.
        raise StrettoError(
            f"{str(path)!r} is not a TOML file: {str(error).splitlines()[0]}", fix="Write lines such as epochs = 10."
        ) from error
    spelt = {key.replace("-", "_"): value for key, value in values.items()}
    if len(spelt) < len(values):
        twice = sorted(key for key in spelt if "_" in key and {key, key.replace("_", "-")} <= values.keys())
        raise StrettoError(
            f"{str(path)!r} has {', '.join(twice)} with dashes and with underscores", fix="Keep one of the two."
        )
    return spelt


def settings_to_toml(config: TrainConfig, *, title: str) -> str:
    """The settings as a file that `--config` reads; TOML has no None, so what is None is a comment."""
    lines = [f"# {title} --config FILE"]
    for name, value in config.recorded().items():
        key = name.replace("_", "-")
        # JSON's strings, numbers, booleans and lists are TOML's too.
        lines.append(f"# {key} is None" if value is None else f"{key} = {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


def _accepts_bool(hint: Any) -> bool:
    """Whether a type annotation is, or has among its members, bool or anything at all."""
    return hint in (None, Any, bool) or any(map(_accepts_bool, get_args(hint)))


def _format_fault(entry: Any) -> tuple[str, str]:
    name = str(entry["loc"][0]) if entry["loc"] else "settings"
    if entry["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return name, "there is no such setting"
    return name, f"{entry['msg']} (given: {entry.get('input')!r})"
