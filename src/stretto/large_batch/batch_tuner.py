"""The adaptive engine: measured throughput and measured gradient noise decide the batch, and a guard goes back."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Final, Literal, final

from stretto.errors import StrettoError
from stretto.large_batch.choice import Row, choose_batch, split_share
from stretto.large_batch.guard import Guard, Verdict
from stretto.large_batch.noise import NoiseMeter
from stretto.large_batch.probe import ThroughputTable
from stretto.large_batch.scaling import LargeBatch, Rule

STATE_VERSION: Final = 3
SETTINGS: Final = ("base_batch_size", "base_lr", "base_warmup_epochs", "rule", "warmup_cap")
"""What must be the same when a tuner goes on from the state of another."""
LEAST_AN_EPOCH: Final = 10
"""Updates an epoch that a batch must leave, so that noise and trouble show within an epoch or two."""
LEAST_AHEAD: Final = 100
"""Updates until the end that a batch must leave: a larger rate needs some to pay, and some to settle."""
LOOK_EVERY: Final = 8
"""Measured updates after which it is worth deciding anew."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to train with from here, and why.

    Attributes:
        action: "keep", "grow", "shrink", or "roll-back": to the weights from before the batch that failed.
        batch_size: Sequences an update, of all workers.
        accumulate: Micro-batches of one worker an update.
        lr: The peak learning rate that goes with the batch.
        warmup_epochs: The warm-up that goes with it, counted from the start of training.
        noise_scale: As measured, in sequences; None if it is not known.
        predicted_gain: Speed to the same result gained over the batch before, 0.25 for 1.25 times as soon.
        extra_data: Sequences to the same result beyond those of the batch before, as a share of them.
        reason: Why, with numbers.
        rows: Everything that was considered; empty if nothing was.
        epoch: Epochs that were done, 1.5 in the middle of the second; None for a roll-back.
    """

    action: Literal["keep", "grow", "shrink", "roll-back"]
    batch_size: int
    accumulate: int
    lr: float
    warmup_epochs: float
    noise_scale: float | None
    predicted_gain: float
    extra_data: float
    reason: str
    rows: tuple[Row, ...] = ()
    epoch: float | None = None


@final
class BatchTuner:
    """Chooses the batch size while training runs, in anyone's own loop.

    It starts at the batch that the base settings were tuned for. After each update it is told what is known of it, and
    whenever `is_due` says that enough has been measured, and at the end of each epoch, it decides: `choose_batch`
    predicts the time to the same result from the throughput that was measured and the gradient noise that is measured.
    Learning rate and warm-up follow the batch by `LargeBatch`. It reads and writes nothing, and its answers take less
    than a millisecond.

    A batch grows if the predicted gain is at least `threshold`, and no further than any of these allow:

    - `growth` times the batch in force: noise is judged anew before the next step;
    - 10 updates an epoch, so that noise and trouble still show soon;
    - 100 updates until training ends: with fewer, a larger rate has no time to make up for the updates it replaces;
    - `largest`, and below any batch that was rolled back.

    A batch also shrinks, to the base batch at most, where that is predicted to gain as much: noise may fall. A larger
    batch needs more sequences for the same result, so with a fixed number of epochs it ends a little short of it; each
    decision says by how much.

    Where noise hides the gradient, a cautious value of its scale is used in its place (`NoiseMeter.cautious`).

    Noise shows between parts of an update: micro-batches that are accumulated (`GradientParts`) or workers
    (`parts_of_ranks`). With one sequence an update on one worker there are none, and the batch stays.

    Args:
        base_batch_size: The batch that the other base settings were tuned for, in sequences over all workers.
        base_lr: Its peak learning rate.
        base_warmup_epochs: Its warm-up.
        num_sequences: Sequences of the training data.
        epochs: Epochs of the whole run.
        table: Measured seconds of a step; without it the batch stays. It may be set later.
        largest: The largest batch to use.
        threshold: The least gain that a change must bring.
        rule: As for `LargeBatch`.
        warmup_cap: As for `LargeBatch`.
        workers: How many share a batch.
        exchange_seconds: What workers spend on the sum of gradients, once an update.
        growth: The most that a batch is multiplied by at once.
        meter: Measures noise; one with default settings by default.
        guard: Looks for trouble; one with default settings by default.

    Attributes:
        batch_size: In force, in sequences over all workers.
        accumulate: Micro-batches of one worker an update, in force.
        exchange_seconds: May be set when it was measured.
        decisions: All that changed something, and of those that followed one another and kept the batch, the last.

    Example:
        >>> table = ThroughputTable.of({16: 1.0, 32: 1.05, 64: 1.1, 128: 1.3})
        >>> tuner = BatchTuner(base_batch_size=16, base_lr=0.1, num_sequences=10_000, epochs=10, table=table)
        >>> for _ in range(40):
        ...     verdict = tuner.observe(loss=1.0, sizes=[8, 8], squares=[26.0, 26.0], square_of_mean=13.5)
        >>> decision = tuner.decide(epoch=1)
        >>> decision.action, decision.batch_size, decision.lr, round(decision.noise_scale)
        ('grow', 64, 0.2, 200)
    """

    def __init__(
        self,
        *,
        base_batch_size: int,
        base_lr: float,
        base_warmup_epochs: float = 0.0,
        num_sequences: int,
        epochs: int,
        table: ThroughputTable | None = None,
        largest: int | None = None,
        threshold: float = 0.05,
        rule: Rule = "legw",
        warmup_cap: float | None = 0.2,
        workers: int = 1,
        exchange_seconds: float = 0.0,
        growth: float = 4.0,
        meter: NoiseMeter | None = None,
        guard: Guard | None = None,
    ) -> None:
        if num_sequences < base_batch_size or epochs < 1:
            raise StrettoError(
                f"{num_sequences} sequences and {epochs} epochs are too few for batches of {base_batch_size}",
                fix="Give at least one batch of sequences, and one epoch.",
            )
        if growth <= 1.0 or (largest is not None and largest < base_batch_size):
            raise StrettoError(
                f"BatchTuner got growth={growth} and largest={largest} with base_batch_size={base_batch_size}",
                fix="Give a growth above 1, and a largest batch not below the base.",
            )
        self._base = LargeBatch(
            base_batch_size=base_batch_size,
            base_lr=base_lr,
            base_warmup_epochs=base_warmup_epochs,
            batch_size=base_batch_size,
            rule=rule,
            warmup_cap=warmup_cap,
            epochs=epochs,
        )
        self._epochs, self._num_sequences = epochs, num_sequences
        self._largest, self._threshold, self._growth = largest, threshold, growth
        self._workers, self.exchange_seconds = workers, exchange_seconds
        self.meter, self.guard = meter or NoiseMeter(), guard or Guard()
        self.batch_size, self.accumulate = base_batch_size, 1
        self.decisions: list[Decision] = []
        self._earlier: list[int] = []
        self._ceiling: int | None = None
        self._trouble = ""
        self._since = self._decided_at = 0
        self._table: ThroughputTable | None = None
        self.table = table

    @property
    def table(self) -> ThroughputTable | None:
        """Measured seconds of a step."""
        return self._table

    @table.setter
    def table(self, table: ThroughputTable | None) -> None:
        self._table = table
        self.accumulate = self._accumulate(self.batch_size)

    @property
    def recipe(self) -> LargeBatch:
        """Learning rate and warm-up for the batch in force."""
        return self._recipe(self.batch_size)

    def observe(
        self,
        *,
        loss: float,
        gradient_norm: float | None = None,
        sizes: Sequence[float] | None = None,
        squares: Sequence[float] | None = None,
        square_of_mean: float | None = None,
        curvature: float | None = None,
        lr: float | None = None,
    ) -> Verdict:
        """Take an update into account, after it was made.

        Args:
            loss: Its mean loss.
            gradient_norm: Norm of its gradient, before clipping.
            sizes: Sequences of its parts; with fewer than two parts noise is not measured.
            squares: Squared norms of the parts' mean gradients.
            square_of_mean: Squared norm of its gradient, before clipping.
            curvature: `local_curvature`, if it was measured.
            lr: The rate of this update, for which the curvature is judged; the peak rate by default.

        Returns:
            Whether this looks fine. After trouble, call `roll_back` and load the weights from before.

        Raises:
            StrettoError: If the parts are incomplete or contradict each other.
        """
        self._since += 1
        if sizes is not None and squares is not None and square_of_mean is not None:
            if sum(size > 0 for size in sizes) >= 2:
                since, self._since = self._since, 0
                self.meter.add(sizes=sizes, squares=squares, square_of_mean=square_of_mean, stands_for=since)
        elif any(given is not None for given in (sizes, squares, square_of_mean)):
            raise StrettoError(
                f"observe got sizes={sizes}, squares={squares} and square_of_mean={square_of_mean}",
                fix="Give all three, or none of them.",
            )
        if gradient_norm is not None:
            self.meter.see(gradient_norm**2)
        rate = self.recipe.lr if lr is None else lr
        verdict = self.guard.observe(
            loss=loss,
            gradient_norm=gradient_norm,
            rate_times_curvature=None if curvature is None else rate * curvature,
        )
        if verdict.is_trouble:
            self._trouble = self._trouble or verdict.reason
        return verdict

    @property
    def is_due(self) -> bool:
        """Whether so much noise was measured since the last decision that another may come out differently."""
        measured = self.meter.num_updates
        return self._table is not None and measured >= max(self.meter.least, self._decided_at + LOOK_EVERY)

    def decide(self, *, epoch: float) -> Decision:
        """Decide what is trained with from here on, which is in force at once.

        Args:
            epoch: Epochs that are done; 1.5 in the middle of the second.
        """
        self._decided_at = self.meter.num_updates
        noise_scale = self._noise_scale
        obstacle = self._obstacle(epoch)
        if obstacle or self._table is None:
            return self._keep(obstacle, epoch=epoch)
        most, bound = min(self._bounds(epoch))
        choice = choose_batch(
            self._table,
            noise_scale=noise_scale,
            base_batch_size=self.batch_size,
            threshold=self._threshold,
            smallest=self._base.base_batch_size,
            largest=max(most, self.batch_size),
            workers=self._workers,
            exchange_seconds=self.exchange_seconds,
        )
        hidden = "noise hides the gradient, and its scale is a cautious guess; " if self.meter.is_hidden else ""
        reason = f"{hidden}{choice.reason}; at most {max(most, self.batch_size)} are considered: {bound}"
        try:
            recipe = self._recipe(choice.batch_size)
        except StrettoError as error:
            return self._keep(f"{error.problem}, so {choice.batch_size} is not used", epoch=epoch, rows=choice.rows)
        if choice.batch_size == self.batch_size:
            return self._keep(reason, epoch=epoch, rows=choice.rows)
        grows = choice.batch_size > self.batch_size
        self._earlier = [size for size in (*self._earlier, self.batch_size) if size < choice.batch_size]
        self.batch_size, self.accumulate = choice.batch_size, choice.accumulate
        return self._noted(
            Decision(
                action="grow" if grows else "shrink",
                batch_size=choice.batch_size,
                accumulate=choice.accumulate,
                lr=recipe.lr,
                warmup_epochs=recipe.warmup_epochs,
                noise_scale=noise_scale,
                predicted_gain=choice.predicted_gain,
                extra_data=choice.extra_data,
                reason=reason,
                rows=choice.rows,
                epoch=epoch,
            )
        )

    def roll_back(self, reason: str) -> Decision:
        """Go back to the batch before, after trouble, and never again to one as large as that in force.

        The caller loads the weights and the optimiser from before that batch. At the base batch there is none before:
        the decision keeps it, and says so.

        Args:
            reason: What went wrong, such as the reason of a `Verdict`.
        """
        failed, self._trouble = self.batch_size, ""
        self.guard.restart()
        if not self._earlier:
            return self._keep(f"{reason}; {failed} is the smallest batch, so its rate or its data are to blame")
        self._ceiling = failed if self._ceiling is None else min(failed, self._ceiling)
        self.batch_size = self._earlier.pop()
        self.accumulate = self._accumulate(self.batch_size)
        told = f"{reason}; back from {failed} to {self.batch_size}, and only batches below {failed} from here"
        return self._noted(self._unchanged("roll-back", told))

    def state_dict(self) -> dict[str, Any]:
        """Everything that later decisions depend on, ready for JSON."""
        return {
            "version": STATE_VERSION,
            "settings": self._settings,
            "batch_size": self.batch_size,
            "accumulate": self.accumulate,
            "earlier": list(self._earlier),
            "ceiling": self._ceiling,
            "trouble": self._trouble,
            "since": self._since,
            "decided_at": self._decided_at,
            "table": None if self._table is None else self._table.to_dict(),
            "exchange_seconds": self.exchange_seconds,
            "meter": self.meter.state_dict(),
            "guard": self.guard.state_dict(),
            "decisions": [dataclasses.asdict(decision) for decision in self.decisions],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave.

        Raises:
            StrettoError: If it is of another version, or its base settings are not those of this tuner.
        """
        if state.get("version") != STATE_VERSION or state["settings"] != self._settings:
            raise StrettoError(
                f"the state of a batch tuner has version {state.get('version')!r} and settings "
                f"{state.get('settings')}, not {STATE_VERSION} and {self._settings}",
                fix="Use the same settings, or begin with a new tuner.",
            )
        self.table = None if state["table"] is None else ThroughputTable.from_dict(state["table"])
        self.batch_size, self.accumulate = int(state["batch_size"]), int(state["accumulate"])
        self._earlier, self._ceiling = [int(size) for size in state["earlier"]], state["ceiling"]
        self._trouble, self.exchange_seconds = state["trouble"], float(state["exchange_seconds"])
        self._since, self._decided_at = int(state["since"]), int(state["decided_at"])
        self.meter.load_state_dict(state["meter"])
        self.guard.load_state_dict(state["guard"])
        self.decisions = [
            Decision(**{**item, "rows": tuple(Row(**row) for row in item["rows"])}) for item in state["decisions"]
        ]

    def _recipe(self, batch_size: int) -> LargeBatch:
        return dataclasses.replace(self._base, batch_size=batch_size)

    @property
    def _noise_scale(self) -> float | None:
        """As measured; where noise hides the gradient, no more than can be told."""
        return self.meter.cautious

    @property
    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self._base, name) for name in SETTINGS}

    def _accumulate(self, batch_size: int) -> int:
        if self._table is None or not self._table.batch_sizes:
            return 1
        return split_share(self._table, math.ceil(batch_size / self._workers)).accumulate

    def _obstacle(self, epoch: float) -> str:
        """Why nothing can be decided; empty if it can."""
        if self._trouble:
            return f"there was trouble: {self._trouble}"
        if epoch >= self._epochs:
            return f"all {self._epochs} epochs are done"
        if self.meter.num_updates == 0:
            return self._no_noise()
        if self._noise_scale is None:
            return self.meter.said
        if self._table is None:
            return "there is no table of throughput, see probe"
        return "" if self._table.batch_sizes else "no batch size was timed at every length, see probe"

    def _no_noise(self) -> str:
        if self.batch_size == 1 and self._workers == 1:
            return "noise cannot be measured with one sequence an update on one worker: there are no parts to compare"
        return "noise was not measured: observe got no update of two or more parts, micro-batches or workers"

    def _bounds(self, epoch: float) -> list[tuple[int, str]]:
        """The largest batches that may be considered, and why."""
        left = self._epochs - epoch
        bounds = [
            (int(self.batch_size * self._growth), f"{self._growth:g} times the batch in force"),
            (self._num_sequences // LEAST_AN_EPOCH, f"{LEAST_AN_EPOCH} updates an epoch are needed"),
            (int(self._num_sequences * left / LEAST_AHEAD), f"{LEAST_AHEAD} updates until the end are needed"),
        ]
        if self._largest is not None:
            bounds.append((self._largest, "the largest that was allowed"))
        if self._ceiling is not None:
            bounds.append((self._ceiling - 1, f"{self._ceiling} was rolled back"))
        return bounds

    def _keep(self, reason: str, *, epoch: float | None = None, rows: tuple[Row, ...] = ()) -> Decision:
        return self._noted(dataclasses.replace(self._unchanged("keep", reason), epoch=epoch, rows=rows))

    def _unchanged(self, action: Literal["keep", "roll-back"], reason: str) -> Decision:
        recipe = self.recipe
        return Decision(
            action=action,
            batch_size=self.batch_size,
            accumulate=self.accumulate,
            lr=recipe.lr,
            warmup_epochs=recipe.warmup_epochs,
            noise_scale=self._noise_scale,
            predicted_gain=0.0,
            extra_data=0.0,
            reason=reason,
        )

    def _noted(self, decision: Decision) -> Decision:
        if self.decisions and self.decisions[-1].action == decision.action == "keep":
            self.decisions.pop()
        self.decisions.append(decision)
        return decision
