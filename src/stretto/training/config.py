"""Settings of a training run: dataclasses that give the flags, the TOML keys and the checks."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import pydantic
from pydantic import Field

from stretto.errors import StrettoError
from stretto.kernels import Backend
from stretto.large_batch import OptimizerName, ScalingRule, ScheduleName

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Count = Annotated[int, Field(ge=1, lt=2**31)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]

C = TypeVar("C")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What every task can be told.

    Attributes:
        data: A file or folder that `stretto inspect` can read; left out, the task's embedded data.
        out: The run folder; left out, the next free one under runs/.
        resume: Go on with the run in `out` (left out: the latest of this task) exactly where it stopped.
        epochs: Passes over the training data.
        batch_size: Most sequences in a batch; auto begins with base_batch_size (left out: the task's own) and lets
            measurements decide on more.
        base_batch_size: The batch, over all workers and accumulated steps, that learning_rate and warmup_epochs belong
            to; the rule adapts both to the batch in force. Left out, they are taken as they are.
        rule: How they follow the batch. Legw: the rate by the square root, the warm-up in proportion; sqrt and linear:
            the rate alone; none: neither.
        max_padded_steps: Most slots (sequences times longest) in a batch, a hard cap.
        num_buckets: Length buckets; 1 is plain shuffled batches, auto takes as many as pay.
        hidden_size: Units of the recurrent layer, each direction.
        num_layers: Recurrent layers.
        dropout: Share of activations dropped between layers.
        learning_rate: Peak of the schedule.
        optimizer: Sgd is plain; momentum and nesterov have a momentum of 0.9; lars and lamb scale the update of each
            matrix by its norm, and lars counts rates in other units: 4 to 32 are usual.
        schedule: One-cycle rises and falls over the run; constant rises once and stays; the others fall after the
            warm-up: poly by the square of what is left, exponential a little at every update, step at times, cosine,
            and ptb once an epoch after some flat ones.
        warmup_epochs: Until the peak, at the base batch. Left out: 15 % of the run in one-cycle, 100 updates from a
            tenth of the rate on in constant, none in the others.
        warmup_cap: Largest share of the run that warmup_epochs may grow to.
        decay_factor: What is left of the rate each time it falls: for exponential (0.95), step (0.1) and ptb (0.5).
        flat_epochs: For ptb, epochs before the rate falls (4); for step, epochs between falls (a third of the run).
        gates: For lars and lamb: scale every gate of a recurrent layer by its own norm.
        weight_decay: Left out, 0.01 in adamw and none in the others. In adamw all weights have it; in the others
            biases and gains have none.
        clip_norm: Largest norm of a gradient.
        seed: Everything random follows from it.
        backend: What runs the recurrent layers. Auto and cpp: generated code, which computes real steps only; eager:
            the same, operator by operator; torch: PyTorch's own layers, padding and all.
        threads: Cores to use; left out, what torch takes.
        device: Where to train, as torch names it.
        checkpoint_minutes: Also save this often within an epoch; every epoch is saved anyway.
        keep_checkpoints: How many to keep.
        accumulate: Batches that make one update, from different buckets.
        on_nan: When a loss or gradient is no number: stop, or skip that update and go on.
        nproc: Ranks to train with on this machine; each takes batches of the size given.
        time_parallel: Ranks that share the same sequences and divide their steps; it must divide their number.
        max_restarts: How often to restart all ranks when one is lost.
        rank_timeout_minutes: Minutes without an answer after which a rank counts as lost.
        record_sequences: Also record which sequences each update was made of, for an audit.
    """

    data: Path | None = None
    out: Path | None = None
    resume: bool = False
    epochs: Count = 10
    batch_size: Count | Literal["auto"] = 32
    base_batch_size: Count | None = None
    rule: ScalingRule = "legw"
    max_padded_steps: Count | None = None
    num_buckets: Count | Literal["auto"] = "auto"
    hidden_size: Count = 128
    num_layers: Count = 1
    dropout: Share = 0.1
    learning_rate: Positive = 5e-3
    optimizer: OptimizerName = "adamw"
    schedule: ScheduleName = "one-cycle"
    warmup_epochs: NotNegative | None = None
    warmup_cap: Share | None = 0.2
    decay_factor: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    flat_epochs: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    gates: bool = False
    weight_decay: NotNegative | None = None
    clip_norm: Positive = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    backend: Backend = "auto"
    threads: Count | None = None
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
    def rows(self) -> int:
        """The batch size to begin with, for one worker."""
        if self.batch_size == "auto":
            usual = type(self).batch_size
            assert isinstance(usual, int)
            return self.base_batch_size or usual
        return self.batch_size

    def recorded(self) -> dict[str, Any]:
        """The settings that shape the result, as JSON-ready values; where and how it runs is left out."""
        values = dataclasses.asdict(self)
        for key in (
            "out",
            "resume",
            "nproc",
            "time_parallel",
            "max_restarts",
            "rank_timeout_minutes",
            "record_sequences",
        ):
            values.pop(key)
        values["data"] = None if self.data is None else str(self.data)
        return values


def checked(kind: type[C], values: dict[str, Any], *, source: str) -> C:
    """Build settings from plain values; all faults are shown at once.

    Args:
        kind: The settings class of the task.
        values: Keys and values.
        source: Named in the error: the file or the call they came from.
    """
    try:
        return pydantic.TypeAdapter(kind).validate_python(values)
    except pydantic.ValidationError as error:
        known = ", ".join(field.name for field in dataclasses.fields(kind))  # type: ignore[arg-type]
        # A union reports one line for each of its members; one line for each setting is enough.
        faults = dict(_fault(entry) for entry in reversed(error.errors(include_url=False)))
        lines = "\n".join(f"  {name}: {text}" for name, text in reversed(faults.items()))
        raise StrettoError(
            f"{source} has settings that cannot be used:\n{lines}", fix=f"\nKnown settings: {known}."
        ) from error


def read_toml(path: Path) -> dict[str, Any]:
    """The keys of a TOML file; a key may be written with dashes or underscores."""
    try:
        with path.open("rb") as stream:
            values = tomllib.load(stream)
    except OSError as error:
        raise StrettoError(f"could not read {str(path)!r}: {error.strerror}", fix="Check the path.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StrettoError(f"{str(path)!r} is no TOML file: {error}", fix="Write lines such as epochs = 10.") from error
    spelt = {key.replace("-", "_"): value for key, value in values.items()}
    if len(spelt) < len(values):
        twice = sorted(key for key in spelt if "_" in key and {key, key.replace("_", "-")} <= values.keys())
        raise StrettoError(
            f"{str(path)!r} has {', '.join(twice)} with dashes and with underscores", fix="Keep one of the two."
        )
    return spelt


def _fault(entry: Any) -> tuple[str, str]:
    name = str(entry["loc"][0]) if entry["loc"] else "settings"
    if entry["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return name, "there is no such setting"
    return name, f"{entry['msg']} (given: {entry.get('input')!r})"
