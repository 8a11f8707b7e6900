"""The adaptive engine: measured throughput and gradient noise choose the batch, and a guard rolls it back."""

import dataclasses
import math
from numbers import Real
from typing import Any, Final, Literal, final

from stretto.checks import check_float, check_int, check_kind
from stretto.errors import StrettoError
from stretto.large_batch.choose import Candidate, Choice, choose_batch, split_share
from stretto.large_batch.guard import Guard
from stretto.large_batch.noise import NORMS_FIX, NoiseScale, SplitNorms
from stretto.large_batch.scaling import LargeBatch
from stretto.large_batch.throughput import TABLE_FIX, ThroughputTable

Action = Literal["keep", "grow", "shrink", "roll-back"]
STATE_VERSION: Final = 4
COMPARED_SETTINGS: Final = ("base_batch_size", "base_lr", "base_warmup_epochs", "rule", "warmup_cap")
"""What must be the same when a tuner continues from the state of another."""
MIN_UPDATES_PER_EPOCH: Final = 10
"""Updates per epoch that a batch must leave, so that noise and trouble show within an epoch or two."""
MIN_UPDATES_LEFT: Final = 100
"""Updates until the end that a batch must leave: a larger rate needs some to pay off, and some to settle."""
MEASUREMENTS_BETWEEN_DECISIONS: Final = 8
"""Measured updates after which another decision may come out differently."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to train with from here on, and why.

    Attributes:
        action: "keep", "grow", "shrink", or "roll-back": to the weights from before the batch that failed.
        batch_size: Sequences per update, over all ranks.
        accumulate: Micro-batches of one rank per update.
        lr: The peak learning rate that goes with the batch.
        warmup_epochs: The warm-up that goes with it, counted from the start of training.
        noise_scale: As measured, in sequences; None if it is not known.
        predicted_gain: Speed to the same result gained over the batch before, 0.25 for 1.25 times as soon.
        extra_data: Sequences to the same result beyond those of the batch before, as a share of them.
        reason: Why, with numbers.
        candidates: Everything that was considered; empty if nothing was.
        epoch: Epochs done, 1.5 in the middle of the second; None for a roll-back.
    """

    action: Action
    batch_size: int
    accumulate: int
    lr: float
    warmup_epochs: float
    noise_scale: float | None
    predicted_gain: float
    extra_data: float
    reason: str
    candidates: tuple[Candidate, ...] = ()
    epoch: float | None = None


@final
class BatchTuner:
    """Chooses the batch size while training runs, in any training loop.

    It starts at the batch of the settings given. Tell it about each update with `observe`, and call `decide` whenever
    `is_due` says that enough has been measured, and at the end of each epoch: `choose_batch` predicts the time to the
    same result from measured throughput and measured gradient noise. Learning rate and warm-up follow the batch by
    `LargeBatch`. It reads and writes nothing, and answers in less than a millisecond.

    A batch grows if the predicted gain is at least `min_gain`, and no further than any of these allow:

    - `max_growth` times the batch in force: noise is measured again before the next growth;
    - 10 updates per epoch, so that noise and trouble still show soon;
    - 100 updates until training ends: with fewer, a larger rate has no time to make up for the updates it replaces;
    - `max_batch_size`, and below any batch that was rolled back.

    A batch also shrinks, to the base batch at most, where that is predicted to gain as much: noise may fall. A larger
    batch needs more sequences for the same result, so with a fixed number of epochs it ends a little short of it; each
    decision says by how much.

    Where noise hides the gradient, a cautious value of its scale is used (`NoiseScale.cautious_scale`).

    Noise shows between parts of an update: accumulated micro-batches (`SplitByMicroBatch`) or ranks (`SplitByRank`).
    With one sequence per update on one rank there are no parts, and the batch stays.

    Args:
        settings: The batch to start with, and the base that rate and warm-up are scaled from; `epochs` is required.
        num_sequences: Sequences of the training data.
        table: Measured seconds per update; without it the batch stays. It may be set later.
        max_batch_size: The largest batch to use.
        min_gain: The least gain that a change must bring.
        max_growth: The most that a batch is multiplied by at once.
        world_size: Ranks that share a batch.
        exchange_seconds: What ranks spend on the all-reduce of gradients, once per update.
        noise: Measures noise; one with default settings by default.
        guard: Looks for trouble; one with default settings by default.

    Attributes:
        batch_size: In force, in sequences over all ranks.
        accumulate: Micro-batches of one rank per update, in force.
        exchange_seconds: May be set once it was measured.
        decisions: All that changed something, and the last of each run of decisions that kept the batch.

    Examples:
        >>> table = ThroughputTable.of({16: 1.0, 32: 1.05, 64: 1.1, 128: 1.3})
        >>> settings = LargeBatch(base_batch_size=16, base_lr=0.1, batch_size=16, epochs=10)
        >>> tuner = BatchTuner(settings, num_sequences=10_000, table=table)
        >>> for _ in range(40):
        ...     norms = SplitNorms(sizes=[8, 8], squares=[26.0, 26.0], square_of_mean=13.5)
        ...     trouble = tuner.observe(loss=1.0, norms=norms)
        >>> decision = tuner.decide(epoch=1)
        >>> decision.action, decision.batch_size, decision.lr, round(decision.noise_scale)
        ('grow', 64, 0.2, 200)
    """

    def __init__(
        self,
        settings: LargeBatch,
        *,
        num_sequences: int,
        table: ThroughputTable | None = None,
        max_batch_size: int | None = None,
        min_gain: float = 0.05,
        max_growth: float = 4.0,
        world_size: int = 1,
        exchange_seconds: float = 0.0,
        noise: NoiseScale | None = None,
        guard: Guard | None = None,
    ) -> None:
        check_kind(settings, LargeBatch, name="settings", owner="BatchTuner", fix="Give LargeBatch(..., epochs=...).")
        if noise is not None:
            check_kind(noise, NoiseScale, name="noise", owner="BatchTuner", fix="Give a NoiseScale, or leave it out.")
        if guard is not None:
            check_kind(guard, Guard, name="guard", owner="BatchTuner", fix="Give a Guard, or leave it out.")
        if settings.epochs is None:
            raise StrettoError("BatchTuner got settings without epochs", fix="Give LargeBatch(epochs=...).")
        self._settings, self._epochs = settings, settings.epochs
        self._num_sequences = check_int(num_sequences, name="num_sequences", at_least=settings.batch_size)
        if max_batch_size is not None:
            check_int(max_batch_size, name="max_batch_size", at_least=settings.batch_size)
        self._max_batch_size = max_batch_size
        self._min_gain = check_float(min_gain, name="min_gain", at_least=0.0)
        self._max_growth = check_float(max_growth, name="max_growth", above=1.0)
        self._world_size = check_int(world_size, name="world_size")
        self.exchange_seconds = check_float(exchange_seconds, name="exchange_seconds", at_least=0.0)
        self.noise, self.guard = noise or NoiseScale(), guard or Guard()
        self.batch_size, self.accumulate = settings.batch_size, 1
        self.decisions: list[Decision] = []
        self._earlier_sizes: list[int] = []
        self._ceiling: int | None = None
        self._trouble = ""
        self._updates_since_measured = self._measured_at_decision = 0
        self._table: ThroughputTable | None = None
        self.table = table

    @property
    def table(self) -> ThroughputTable | None:
        """Measured seconds per update."""
        return self._table

    @table.setter
    def table(self, table: ThroughputTable | None) -> None:
        if table is not None:
            check_kind(table, ThroughputTable, name="table", owner="BatchTuner", fix=TABLE_FIX)
        self._table = table
        self.accumulate = self._accumulate(self.batch_size)

    @property
    def settings(self) -> LargeBatch:
        """Learning rate and warm-up for the batch in force."""
        return dataclasses.replace(self._settings, batch_size=self.batch_size)

    @property
    def can_roll_back(self) -> bool:
        """Whether there is a smaller batch to go back to."""
        return bool(self._earlier_sizes)

    def observe(
        self,
        *,
        loss: float,
        gradient_norm: float | None = None,
        norms: SplitNorms | None = None,
        curvature: float | None = None,
        lr: float | None = None,
    ) -> str:
        """Take an update into account, after it was made.

        Args:
            loss: Its mean loss.
            gradient_norm: Norm of its gradient, before clipping.
            norms: Squared norms of its parts, if they were measured; fewer than two parts say nothing.
            curvature: `local_curvature`, if it was measured.
            lr: The rate of this update, by which the curvature is judged; the peak rate by default.

        Returns:
            What went wrong; empty if nothing did. After trouble, call `roll_back` and load earlier weights.

        Raises:
            StrettoError: The parts contradict each other.
        """
        for name, value in (("loss", loss), ("gradient_norm", gradient_norm), ("curvature", curvature), ("lr", lr)):
            if value is not None or name == "loss":
                # NaN and inf are what the guard looks for.
                check_kind(value, Real, name=name, owner="BatchTuner.observe", fix=f"Give {name} as a number: .item().")
        if norms is not None:
            check_kind(norms, SplitNorms, name="norms", owner="BatchTuner.observe", fix=NORMS_FIX)
        self._updates_since_measured += 1
        if norms is not None and sum(size > 0 for size in norms.sizes) >= 2:
            self.noise.add(norms, stands_for=self._updates_since_measured)
            self._updates_since_measured = 0
        if gradient_norm is not None:
            self.noise.observe_norm(gradient_norm**2)
        rate = self.settings.lr if lr is None else lr
        trouble = self.guard.observe(
            loss=loss,
            gradient_norm=gradient_norm,
            rate_times_curvature=None if curvature is None else rate * curvature,
        )
        self._trouble = self._trouble or trouble
        return trouble

    @property
    def is_due(self) -> bool:
        """Whether enough noise was measured since the last decision for another one to come out differently."""
        enough = max(self.noise.min_updates, self._measured_at_decision + MEASUREMENTS_BETWEEN_DECISIONS)
        return self._table is not None and self.noise.num_updates >= enough

    def decide(self, *, epoch: float) -> Decision:
        """Decide what to train with from here on, after so many epochs; the decision is in force at once."""
        check_float(epoch, name="epoch", at_least=0.0, owner="BatchTuner.decide")
        self._measured_at_decision = self.noise.num_updates
        obstacle = self._obstacle(epoch)
        if obstacle or self._table is None:
            return self._record("keep", obstacle, epoch=epoch)
        largest, bound = min(self._bounds(epoch))
        largest = max(largest, self.batch_size)
        choice = choose_batch(
            self._table,
            noise_scale=self.noise.cautious_scale,
            base_batch_size=self.batch_size,
            min_gain=self._min_gain,
            min_batch_size=self._settings.base_batch_size,
            max_batch_size=largest,
            world_size=self._world_size,
            exchange_seconds=self.exchange_seconds,
        )
        hidden = "noise hides the gradient, so its scale is a cautious guess; " if self.noise.is_hidden else ""
        reason = f"{hidden}{choice.reason}; at most {largest} are considered: {bound}"
        try:
            dataclasses.replace(self._settings, batch_size=choice.batch_size)
        except StrettoError as error:
            reason = f"{error.problem}, so {choice.batch_size} is not used"
            return self._record("keep", reason, epoch=epoch, choice=choice)
        if choice.batch_size == self.batch_size:
            return self._record("keep", reason, epoch=epoch, choice=choice)
        grows = choice.batch_size > self.batch_size
        self._earlier_sizes = [size for size in (*self._earlier_sizes, self.batch_size) if size < choice.batch_size]
        self.batch_size, self.accumulate = choice.batch_size, choice.accumulate
        return self._record("grow" if grows else "shrink", reason, epoch=epoch, choice=choice)

    def roll_back(self, reason: str) -> Decision:
        """Return to the batch before, after the trouble that `observe` named, and never again to one as large.

        The caller loads the weights and the optimiser from before that batch. At the first batch there is none before:
        the decision keeps it, and says so.
        """
        failed, self._trouble = self.batch_size, ""
        self.guard.restart()
        if not self._earlier_sizes:
            return self._record("keep", f"{reason}; {failed} is the smallest batch, so look at its rate and its data")
        self._ceiling = failed if self._ceiling is None else min(failed, self._ceiling)
        self.batch_size = self._earlier_sizes.pop()
        self.accumulate = self._accumulate(self.batch_size)
        reason = f"{reason}; back from {failed} to {self.batch_size}, and only batches below {failed} from here"
        return self._record("roll-back", reason)

    def state_dict(self) -> dict[str, Any]:
        """Everything that later decisions depend on, ready for JSON."""
        return {
            "version": STATE_VERSION,
            "settings": self._compared_settings,
            "batch_size": self.batch_size,
            "accumulate": self.accumulate,
            "earlier_sizes": list(self._earlier_sizes),
            "ceiling": self._ceiling,
            "trouble": self._trouble,
            "updates_since_measured": self._updates_since_measured,
            "measured_at_decision": self._measured_at_decision,
            "table": None if self._table is None else self._table.to_dict(),
            "exchange_seconds": self.exchange_seconds,
            "noise": self.noise.state_dict(),
            "guard": self.guard.state_dict(),
            "decisions": [dataclasses.asdict(decision) for decision in self.decisions],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave.

        Raises:
            StrettoError: It is of another version, or its base settings are not those of this tuner.
        """
        check_kind(state, dict, name="state", owner="BatchTuner", fix="Give what state_dict returned.")
        if state.get("version") != STATE_VERSION or state.get("settings") != self._compared_settings:
            raise StrettoError(
                f"the state of a batch tuner has version {state.get('version')!r} and settings "
                f"{state.get('settings')}, not {STATE_VERSION} and {self._compared_settings}",
                fix="Use the same settings, or begin with a new tuner.",
            )
        self.table = None if state["table"] is None else ThroughputTable.from_dict(state["table"])
        self.batch_size, self.accumulate = int(state["batch_size"]), int(state["accumulate"])
        self._earlier_sizes, self._ceiling = [int(size) for size in state["earlier_sizes"]], state["ceiling"]
        self._trouble, self.exchange_seconds = state["trouble"], float(state["exchange_seconds"])
        self._updates_since_measured = int(state["updates_since_measured"])
        self._measured_at_decision = int(state["measured_at_decision"])
        self.noise.load_state_dict(state["noise"])
        self.guard.load_state_dict(state["guard"])
        self.decisions = [
            Decision(**{**item, "candidates": tuple(Candidate(**each) for each in item["candidates"])})
            for item in state["decisions"]
        ]

    @property
    def _compared_settings(self) -> dict[str, Any]:
        return {name: getattr(self._settings, name) for name in COMPARED_SETTINGS}

    def _accumulate(self, batch_size: int) -> int:
        if self._table is None or not self._table.batch_sizes:
            return 1
        _, accumulate, _ = split_share(self._table, math.ceil(batch_size / self._world_size))
        return accumulate

    def _obstacle(self, epoch: float) -> str:
        """Why nothing can be decided; empty if it can."""
        if self._trouble:
            return f"there was trouble: {self._trouble}"
        if epoch >= self._epochs:
            return f"all {self._epochs:g} epochs are done"
        if self.noise.num_updates == 0:
            is_single = self.batch_size == 1 and self._world_size == 1
            needed = "one sequence per update on one rank has none" if is_single else "micro-batches or ranks"
            return f"noise was not measured: observe got no update of two or more parts, {needed}"
        if self.noise.cautious_scale is None:
            return str(self.noise)
        if self._table is None:
            return "there is no throughput table, see probe"
        return "" if self._table.batch_sizes else "no batch size was timed at every length, see probe"

    def _bounds(self, epoch: float) -> list[tuple[int, str]]:
        """The largest batches that may be considered, and why."""
        left = self._num_sequences * (self._epochs - epoch)
        bounds = [
            (int(self.batch_size * self._max_growth), f"{self._max_growth:g} times the batch in force"),
            (self._num_sequences // MIN_UPDATES_PER_EPOCH, f"{MIN_UPDATES_PER_EPOCH} updates per epoch are needed"),
            (int(left / MIN_UPDATES_LEFT), f"{MIN_UPDATES_LEFT} updates until the end are needed"),
        ]
        if self._max_batch_size is not None:
            bounds.append((self._max_batch_size, "max_batch_size"))
        if self._ceiling is not None:
            bounds.append((self._ceiling - 1, f"{self._ceiling} was rolled back"))
        return bounds

    def _record(
        self, action: Action, reason: str, *, epoch: float | None = None, choice: Choice | None = None
    ) -> Decision:
        """The decision for the batch now in force; of several in a row that keep it, the last is remembered."""
        settings = self.settings
        taken = choice if choice is not None and choice.batch_size == self.batch_size else None
        decision = Decision(
            action=action,
            batch_size=self.batch_size,
            accumulate=self.accumulate,
            lr=settings.lr,
            warmup_epochs=settings.warmup_epochs,
            noise_scale=self.noise.cautious_scale,
            predicted_gain=0.0 if taken is None else taken.predicted_gain,
            extra_data=0.0 if taken is None else taken.extra_data,
            reason=reason,
            candidates=() if choice is None else choice.candidates,
            epoch=epoch,
        )
        if self.decisions and self.decisions[-1].action == action == "keep":
            self.decisions.pop()
        self.decisions.append(decision)
        return decision
