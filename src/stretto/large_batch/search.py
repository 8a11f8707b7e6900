"""Which recipe to train with, and for how many epochs: short trials, then runs planned to their end.

    trials of all recipes --> the best: a short run --> a longer one --> and a longer one
                                              +--------------+--> the plain recipe from the beginning
    (a tenth of the updates)      each run has a decay to zero of its own, and begins with the best weights so far

It ends as soon as the target is reached.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Final, Literal, final

from stretto.checks import check_bool, check_float, check_int, check_kind, check_list
from stretto.errors import StrettoError

TRIAL_SHARE: Final = 0.1
"""Most of the plain recipe's updates that trials may take."""
MIN_TRIAL_UPDATES: Final = 100
"""Updates of the plain recipe below which a trial says little: nets that learn after a plateau are still on it."""
DUEL_LENGTH: Final = 3
"""How many times longer the second trial of the best recipe and of the plain one is."""
FIRST_RUN_SHARE: Final = 1 / 6
"""Length of the first run, as a share of the plain recipe's."""
MIN_FIRST_UPDATES: Final = 100
"""Updates that a first run is to have, unless that takes more than half of the plain recipe's epochs."""
MIN_FIRST_RUN: Final = 2
"""Its least number of epochs: a decay within the first epoch comes before a net that learns after a plateau has."""
MIN_GAIN: Final = 0.005
"""Gain over the best before, relative to it, below which another run of a recipe is not worth its time."""
MAX_LOSS: Final = 0.01
"""Loss from a run's best epoch to its last, relative to it, above which the recipe overfits."""
RATE_OF_NEXT_RUN: Final = 0.5
"""Rate of a recipe's next run, relative to that of the one before."""
CLOSE: Final = 0.01
"""Relative difference of losses after short trials that says less than the difference in speed."""
MAX_TIMED_UPDATES: Final = 10
"""Updates that say how long an epoch takes, where the time is bounded and there is no room for trials."""
STATE_VERSION: Final = 1


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A way to train.

    Attributes:
        name: To tell it by.
        settings: What the training loop reads, and nothing else does.
        rate_follows_updates: Whether its rate is for a run of `first_run_epochs` and is to be higher in shorter trials,
            and in a first run that the time makes shorter, by the square root of how many times fewer updates these
            have, as the rule "updates" of `LargeBatch` says.
    """

    name: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rate_follows_updates: bool = False

    def __post_init__(self) -> None:
        check_kind(self.name, str, name="name", owner="Recipe", fix="Give a string.")
        check_kind(self.settings, Mapping, name="settings", owner="Recipe", fix="Give a dict.")
        check_bool(self.rate_follows_updates, name="rate_follows_updates", owner="Recipe")


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to train next.

    Attributes:
        kind: A "trial", which begins with new weights, the same for all trials, and whose weights are not needed
            afterwards; or a "run", which begins with the best weights so far, or with new ones if there are none or
            it `begins_anew`.
        recipe: How.
        epochs: How long: whole epochs in a run, some updates or more in a trial. The schedule of the recipe, all of it,
            belongs into them.
        rate_factor: What to multiply the recipe's rate by: more than 1 where there are fewer updates, if it follows
            them; and each later run has half the rate of the one before, since it begins with weights that are good
            already.
        begins_anew: Whether it is a run that begins with new weights though others came before: the plain recipe after
            others that failed, as if these had not been. The best weights of all runs count in the end.
        reason: Why, with numbers.
    """

    kind: Literal["trial", "run"]
    recipe: Recipe
    epochs: float
    rate_factor: float = 1.0
    begins_anew: bool = False
    reason: str


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a job.

    Attributes:
        loss: On the validation part; NaN or inf if it diverged.
        value: The metric on it after the last epoch; None, NaN or inf if it diverged.
        best: The metric after the best epoch; of a trial, the same.
        epochs: Done: fewer than planned if the target was reached before, or the time was over.
        seconds: It took.

    Raises:
        StrettoError: One of them is no number, or epochs or seconds are negative.
    """

    loss: float
    value: float | None
    best: float | None
    epochs: float
    seconds: float

    def __post_init__(self) -> None:
        for name in ("epochs", "seconds"):
            check_float(getattr(self, name), name=name, at_least=0.0, owner="Outcome")
        for name in ("loss", "value", "best"):
            given = getattr(self, name)
            if not isinstance(given, Real) and (given is not None or name == "loss"):
                raise StrettoError(
                    f"Outcome got {name}={given!r}", fix=f"Give {name} as a number, of a tensor by float(...)."
                )


def first_run_epochs(epochs: int, *, updates_per_epoch: float) -> int:
    """Epochs of the first run of a recipe, if the plain one has so many epochs of so many updates.

    A sixth, but at least two, and enough for 100 updates unless that is more than half of them.
    """
    enough = min(math.ceil(MIN_FIRST_UPDATES / updates_per_epoch), epochs // 2)
    return min(epochs, max(MIN_FIRST_RUN, round(FIRST_RUN_SHARE * epochs), enough))


@final
class RecipeSearch:
    """Finds out what to train with, in any training loop: ask for a job, do it, tell what came of it.

    Trials come first: of the plain recipe and as many others as may together take a tenth of the plain recipe's
    updates, at 100 or more each. The one with the least validation loss (of those within 1 % of it, the fastest) and
    the plain one try again, three times as long, and what is better then is chosen. If there is no room for trials, the
    recipe after the plain one is taken; where `seconds` are given, a trial of ten updates at most times it first.

    If the plain recipe is chosen, it is run as it is. If another is, it is run for a sixth of the epochs (two at least,
    and enough for 100 updates unless that takes more than half of them), and then for as many again as all before at
    half the rate, as long as that gains 0.5 % and the last epoch of a run is no more than 1 % worse than its best. The
    plain recipe gets the epochs that are left: so the end is seldom worse than the plain recipe's own.

    All runs together have at most `epochs` epochs; trials come on top.

    Args:
        recipes: The plain recipe, then others in the order in which they are expected to be good.
        epochs: Epochs of the plain recipe.
        updates_per_epoch: Its updates per epoch.
        target: Value of the metric on the validation part at which to stop; None goes on to the end.
        higher_is_better: Of the metric.
        seconds: Time for everything; None sets no bound.

    Attributes:
        history: Jobs that were done, and what came of them.
        best: The best value of the runs so far; None before the first.
        verdict: How it ended; empty until it has.

    Raises:
        StrettoError: There is no other recipe than the plain one, or a number is out of range.

    Examples:
        >>> search = RecipeSearch([Recipe(name="plain"), Recipe(name="muon")], epochs=20, updates_per_epoch=500)
        >>> while (job := search.ask()) is not None:
        ...     better = 0.5 if job.recipe.name == "muon" else 1.0
        ...     search.tell(Outcome(loss=better, value=better, best=better, epochs=job.epochs, seconds=1.0))
        ...     print(job.kind, job.recipe.name, f"{job.epochs:g}")
        trial plain 0.25
        trial muon 0.25
        trial plain 0.75
        trial muon 0.75
        run muon 3
        run muon 3
        run plain 20
        >>> search.best
        0.5
    """

    def __init__(
        self,
        recipes: Sequence[Recipe],
        *,
        epochs: int,
        updates_per_epoch: float,
        target: float | None = None,
        higher_is_better: bool = False,
        seconds: float | None = None,
    ) -> None:
        fix = "Give a list of Recipe: the plain one and at least one other."
        for recipe in check_list(recipes, name="recipes", owner="RecipeSearch", fix=fix):
            check_kind(recipe, Recipe, name="recipes", owner="RecipeSearch", fix=fix)
        names = [recipe.name for recipe in recipes]
        if len(names) < 2 or len(set(names)) < len(names):
            raise StrettoError(
                f"RecipeSearch got the recipes {', '.join(map(repr, names)) or 'none'}",
                fix="Give the plain recipe and at least one other, all with names of their own.",
            )
        self._epochs = check_int(epochs, name="epochs", owner="RecipeSearch")
        check_float(updates_per_epoch, name="updates_per_epoch", above=0.0, owner="RecipeSearch")
        for name, value in (("target", target), ("seconds", seconds)):
            if value is not None:
                check_float(value, name=name, owner="RecipeSearch", above=0.0 if name == "seconds" else -math.inf)
        self._plain, self._target, self._higher_is_better = recipes[0], target, higher_is_better
        self._seconds_left, self._limit = (math.inf if seconds is None else seconds), seconds
        self._per_epoch: dict[str, float] = {}
        self._first_run = first_run_epochs(epochs, updates_per_epoch=updates_per_epoch)
        trials = int(TRIAL_SHARE * epochs * updates_per_epoch / MIN_TRIAL_UPDATES) - 2 * DUEL_LENGTH
        # The shortest that is worth it, or longer if there is room for that.
        self._tried = list(recipes[:trials]) if trials >= 2 else []
        room = TRIAL_SHARE * epochs / (len(self._tried) + 2 * DUEL_LENGTH)
        self._trial_epochs = min(room, 1.0)
        self._losses: list[tuple[float, float, Recipe]] = []
        self._duel: list[tuple[float, Recipe]] = []
        self._chosen = None if self._tried else recipes[1]
        self._why = "" if self._tried else f"a run of {epochs * updates_per_epoch:.0f} updates has no room for trials"
        self._times_first = bool(
            not self._tried and seconds is not None and TRIAL_SHARE * epochs * updates_per_epoch >= 2
        )
        self._timed_epochs = min(TRIAL_SHARE * epochs, MAX_TIMED_UPDATES / updates_per_epoch)
        self._names = names
        self.history: list[tuple[Job, Outcome]] = []
        self._job: Job | None = None
        self._done, self._is_last = 0, False
        self.best: float | None = None
        self.verdict = ""

    def ask(self) -> Job | None:
        """What to train next, the same until it is told of; None at the end, of which `verdict` speaks.

        Raises:
            StrettoError: What trials left of the time is too short for an epoch.
        """
        if self._job is None and not self.verdict:
            if self._chosen is None:
                self._job = self._next_trial()
            elif self._times_first and not self.history:
                reason = "a few updates are timed, so that the run is planned for the time there is"
                self._job = Job(kind="trial", recipe=self._chosen, epochs=self._timed_epochs, reason=reason)
            else:
                self._job = self._next_run(self._chosen)
        return self._job

    def tell(self, outcome: Outcome) -> None:
        """What came of the job asked for.

        Raises:
            StrettoError: No job was asked for, or the time is too short for trials.
        """
        job = self._job
        if not isinstance(outcome, Outcome):
            raise StrettoError(f"RecipeSearch was told {outcome!r}", fix="Tell it an Outcome.")
        if job is None:
            raise StrettoError("RecipeSearch was told of a job that it did not give", fix="Call ask() before tell().")
        self._job = None
        self.history.append((job, outcome))
        self._seconds_left -= outcome.seconds
        if outcome.epochs > 0:
            self._per_epoch[job.recipe.name] = outcome.seconds / outcome.epochs
        if job.kind == "trial":
            if self._chosen is None:
                self._after_trial(job.recipe, outcome)
        else:
            self._after_run(job.recipe, outcome)

    def is_reached(self, value: float) -> bool:
        """Whether a value of the metric is as good as the target."""
        return self._target is not None and (value == self._target or self._is_better(value, than=self._target))

    def state_dict(self) -> dict[str, Any]:
        """All that was told, ready for JSON."""
        told = [
            {key: _to_json(value) for key, value in dataclasses.asdict(outcome).items()} for _, outcome in self.history
        ]
        return {"version": STATE_VERSION, "recipes": self._names, "times_first": self._times_first, "told": told}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave, with the arguments that the search was made with.

        Raises:
            StrettoError: It is of another version, of other recipes, or damaged.
        """
        version, names = (state.get(name) if isinstance(state, Mapping) else None for name in ("version", "recipes"))
        if version != STATE_VERSION or names != self._names:
            raise StrettoError(
                f"the state of a search has version {version!r} and recipes {names}, not {STATE_VERSION} and "
                f"{self._names}",
                fix="Use the same recipes, or begin a new search.",
            )
        try:
            told = [
                Outcome(**{key: float(value) if isinstance(value, str) else value for key, value in each.items()})
                for each in state["told"]
            ]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StrettoError(f"the state of a search is damaged: {error!r}", fix="Begin a new search.") from error
        if told:
            # A run that goes on with another bound of the time does not begin again.
            self._times_first = bool(state.get("times_first", False))
        for each in told:
            self.ask()
            self.tell(each)

    def _next_trial(self) -> Job:
        number = len(self._losses)
        if number < len(self._tried):
            reason = f"trial {number + 1} of {len(self._tried)}"
            return self._trial(self._tried[number], epochs=self._trial_epochs, reason=reason)
        others = [entry for entry in self._losses if entry[2] is not self._plain]
        least = min(loss for loss, _, _ in others)
        loss, _, best = min(
            (entry for entry in others if entry[0] <= least + CLOSE * abs(least)), key=lambda entry: entry[1]
        )
        recipe = (self._plain, best)[len(self._duel)]
        reason = f"{best.name} is the best of the others with a loss of {loss:.4g}: longer, beside the plain recipe"
        return self._trial(recipe, epochs=DUEL_LENGTH * self._trial_epochs, reason=reason)

    def _trial(self, recipe: Recipe, *, epochs: float, reason: str) -> Job:
        shorter = self._first_run / epochs
        factor = math.sqrt(shorter) if recipe.rate_follows_updates else 1.0
        return Job(kind="trial", recipe=recipe, epochs=epochs, rate_factor=factor, reason=reason)

    def _after_trial(self, recipe: Recipe, outcome: Outcome) -> None:
        loss = outcome.loss if math.isfinite(outcome.loss) else math.inf
        if len(self._losses) < len(self._tried):
            self._losses.append((loss, outcome.seconds, recipe))
        else:
            self._duel.append((loss, recipe))
        if len(self.history) == 1:
            all_epochs = (len(self._tried) + 2 * DUEL_LENGTH) * self._trial_epochs
            expected = outcome.seconds * all_epochs / max(outcome.epochs, 1e-9)
            if self._limit is not None and expected > self._limit / 2:
                raise StrettoError(
                    f"{self._limit:.3g} seconds are too short: trials alone would take about {expected:.3g}",
                    fix=f"Allow {_in_words(4 * expected)} or more, or train without trials.",
                )
        if len(self._duel) == 2:
            (plain, _), (other, recipe) = self._duel
            self._chosen = recipe if other < plain else self._plain
            loss, its = min(plain, other), max(plain, other)
            self._why = f"its loss after the longer trial is {loss:.4g}, that of the other {its:.4g}"

    def _next_run(self, recipe: Recipe) -> Job | None:
        left = self._epochs - self._done
        is_timed = recipe.name in self._per_epoch
        # Of a recipe that was not timed, the longest that another took: not sure enough to refuse an epoch.
        per_epoch = self._per_epoch[recipe.name] if is_timed else max(self._per_epoch.values(), default=0.0)
        least = 0.0 if is_timed or self.best is not None else 1.0
        affordable = max(least, self._seconds_left / max(per_epoch, 1e-9))
        reason, begins_anew = self._why, False
        if recipe is self._plain:
            # All of its epochs after one run or two that failed: nothing is lost but the time that these took. What is
            # left if there is no time for it, or if others were good for longer than that.
            begins_anew = 0 < self._done <= 2 * self._first_run and affordable >= self._epochs
            epochs, self._is_last = self._epochs if begins_anew else left, True
            reason += f"; it begins anew, with all its {self._epochs} epochs" if begins_anew else ""
        else:
            epochs = min(left, self._done or self._first_run)
            reason += "" if self._done else f"; the first run has {epochs} of {self._epochs} epochs"
        if affordable < epochs:
            epochs = math.floor(affordable)
            reason += f"; there is time for {epochs} epoch{'s' * (epochs != 1)}"
        if epochs < 1 <= left and self.best is None:
            needed = 2 * ((self._limit or 0.0) - self._seconds_left + per_epoch)
            raise StrettoError(
                f"there are {max(0.0, self._seconds_left):.3g} seconds left of {self._limit:.3g}, too few for an epoch "
                f"of {recipe.name}, which takes about {per_epoch:.3g}",
                fix=f"Allow {_in_words(needed)} or more.",
            )
        if epochs < 1:
            self._end("the time is over" if left > 0 else f"all {self._epochs} epochs are done")
            return None
        again = sum(job.kind == "run" and job.recipe == recipe for job, _ in self.history)
        factor = RATE_OF_NEXT_RUN**again
        if recipe.rate_follows_updates and not again:
            factor *= math.sqrt(self._first_run / epochs)
        return Job(kind="run", recipe=recipe, epochs=epochs, rate_factor=factor, begins_anew=begins_anew, reason=reason)

    def _after_run(self, recipe: Recipe, outcome: Outcome) -> None:
        # At least one, so that this ends.
        self._done += max(1, math.ceil(outcome.epochs))
        before, found, last = self.best, _finite(outcome.best), _finite(outcome.value)
        gains = found is not None and (before is None or self._gain(found, over=before) >= MIN_GAIN)
        if found is not None and (before is None or self._is_better(found, than=before)):
            self.best = found
        if self.best is not None and self.is_reached(self.best):
            self._end("the target is reached")
        elif self._is_last:
            self._end(f"all {self._done} epochs are done")
        elif found is None or last is None:
            self._chosen, self._why = self._plain, f"{recipe.name} diverged"
        elif self._gain(found, over=last) > MAX_LOSS:
            self._chosen = self._plain
            self._why = f"{recipe.name} overfits: its best epoch has {found:.4g}, its last {last:.4g}"
        elif not gains:
            self._chosen, self._why = self._plain, f"{recipe.name} gained less than {MIN_GAIN:.1%} over {before:.4g}"
        else:
            was = "" if before is None else f" after {before:.4g}"
            self._why = f"{recipe.name} has come to {found:.4g}{was}"
        if self._target is not None and not self.verdict:
            self._why += f"; {self._outlook(before)}"

    def _outlook(self, before: float | None) -> str:
        """What is to be said of the target, given the best value before the last run."""
        outlook = f"the target is {self._target:.4g}"
        if self.best is None or before is None:
            return outlook
        # Each doubling of the epochs rarely gains more than the one before.
        hoped = self.best + (self.best - before) * math.log2(self._epochs / self._done)
        if self.is_reached(hoped):
            return outlook
        return f"{outlook}, which is not expected to be reached: the best so far is {self.best:.4g}"

    def _end(self, reason: str) -> None:
        missed = self._target is not None and (self.best is None or not self.is_reached(self.best))
        best = "nothing was trained" if self.best is None else f"the best is {self.best:.4g}"
        self.verdict = f"{reason}; {best}" + (
            f", and the target of {self._target:.4g} was not reached" if missed else ""
        )

    def _is_better(self, value: float, *, than: float) -> bool:
        return value > than if self._higher_is_better else value < than

    def _gain(self, value: float, *, over: float) -> float:
        """How much better a value is than another, relative to the other."""
        return (value - over if self._higher_is_better else over - value) / max(abs(over), 1e-12)


def _finite(value: float | None) -> float | None:
    """None for NaN and inf."""
    return value if value is not None and math.isfinite(value) else None


def _in_words(seconds: float) -> str:
    return f"{seconds:.3g} seconds ({seconds / 3600:.2g} hours)"


def _to_json(value: Any) -> Any:
    """JSON has neither NaN nor inf, nor numpy's numbers."""
    number = None if value is None else float(value)
    return number if number is None or math.isfinite(number) else str(number)
