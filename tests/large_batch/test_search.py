"""The search for a recipe: it ends within its epochs, keeps the plain recipe, and goes on from a saved state."""

import dataclasses
import json
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import StrettoError
from stretto.large_batch import Job, Outcome, Recipe, RecipeSearch, first_run_epochs

NAMES = ("plain", "a", "b", "c")


def _search(
    *, epochs: int = 20, updates_per_epoch: float = 1000.0, num_recipes: int = 4, **options: object
) -> RecipeSearch:
    recipes = [Recipe(name=name) for name in NAMES[:num_recipes]]
    return RecipeSearch(recipes, epochs=epochs, updates_per_epoch=updates_per_epoch, **options)  # type: ignore[arg-type]


def _go(search: RecipeSearch, answer: Callable[[Job], Outcome]) -> list[Job]:
    jobs = []
    while (job := search.ask()) is not None:
        assert search.ask() is job
        jobs.append(job)
        search.tell(answer(job))
    assert search.verdict
    assert search.ask() is None
    return jobs


def _outcome(
    job: Job, value: float, *, best: float | None = None, seconds: float = 0.1, epochs: float | None = None
) -> Outcome:
    done = job.epochs if epochs is None else epochs
    return Outcome(loss=value, value=value, best=value if best is None else best, epochs=done, seconds=seconds)


def _random_outcome(rng: random.Random) -> Outcome:
    loss, value, best = (rng.choice([rng.uniform(0.1, 9), 1.0, bad]) for bad in (math.nan, None, None))
    return Outcome(loss=loss, value=value, best=best, epochs=rng.uniform(0, 3), seconds=rng.uniform(0, 5))


@settings(max_examples=80)
@given(
    search=st.fixed_dictionaries(
        {
            "epochs": st.integers(1, 40),
            "updates_per_epoch": st.floats(1, 5000),
            "seconds": st.none() | st.floats(200, 1000),
            "target": st.none() | st.floats(0, 9),
        }
    ),
    seed=st.integers(0, 9999),
    stop=st.integers(0, 12),
)
def test_any_search_ends_within_its_epochs_and_goes_on_from_its_state(
    search: dict[str, Any], seed: int, stop: int
) -> None:
    epochs, rng = search["epochs"], random.Random(seed)
    one, other = _search(**search), None
    jobs: list[Job] = []
    while (job := one.ask()) is not None:
        if len(jobs) == stop:
            other = _search(**search)
            other.load_state_dict(json.loads(json.dumps(one.state_dict(), allow_nan=False)))
        outcome = _random_outcome(rng)
        if job.kind == "trial":
            # As they are: one that took much longer for its length would leave no time for an epoch, which is refused.
            outcome = dataclasses.replace(outcome, epochs=job.epochs, seconds=0.1)
        for each in filter(None, (one, other)):
            assert each.ask() == job
            each.tell(outcome)
        jobs.append(job)
    trials, runs = ([job for job in jobs if job.kind == kind] for kind in ("trial", "run"))
    assert jobs == trials + runs
    assert sum(job.epochs for job in trials) <= 0.1 * epochs + 1e-9
    # Each recipe begins only with what is left; a run that is stopped early counts for what it did.
    assert all(job.epochs == int(job.epochs) and 1 <= job.epochs <= epochs for job in runs)
    assert [job.recipe.name for job in runs].count("plain") <= 1
    if other is not None:
        assert other.ask() is None
        assert (other.verdict, other.best) == (one.verdict, one.best)


def test_the_best_of_the_trials_is_run_longer_and_longer_and_the_plain_recipe_has_the_rest() -> None:
    values = {"plain": 2.0, "a": 1.5, "b": 1.0, "c": 1.2}
    runs = iter([0.9, 0.8, 0.7, 0.6])
    jobs = _go(_search(), lambda job: _outcome(job, values[job.recipe.name] if job.kind == "trial" else next(runs)))
    assert [(job.kind, job.recipe.name) for job in jobs[:6]] == [
        *(("trial", name) for name in NAMES),
        ("trial", "plain"),
        ("trial", "b"),
    ]
    assert jobs[4].epochs == pytest.approx(3 * jobs[0].epochs)
    assert [(job.recipe.name, job.epochs) for job in jobs[6:]] == [("b", 3), ("b", 3), ("b", 6), ("b", 8)]
    assert [job.rate_factor for job in jobs[6:]] == [1.0, 0.5, 0.25, 0.125]
    assert not any(job.begins_anew for job in jobs)


@pytest.mark.parametrize(
    ("values", "last"),
    [
        ((0.9,), ("plain", 20, True)),  # overfits
        ((0.9, 0.898), ("plain", 20, True)),  # gains too little
        ((0.9, 0.8, 0.798), ("plain", 8, False)),  # was good for longer: what is left
        ((0.9, 0.8, 0.7, 0.698), ("b", 8, False)),  # and all epochs are done
    ],
)
def test_the_plain_recipe_begins_anew_after_one_run_or_two_that_failed(
    values: tuple[float, ...], last: tuple[str, int, bool]
) -> None:
    trials = {"plain": 2.0, "a": 1.5, "b": 1.0, "c": 1.2}
    runs = iter(values)

    def answer(job: Job) -> Outcome:
        if job.kind == "trial":
            return _outcome(job, trials[job.recipe.name])
        if job.recipe.name == "plain":
            return _outcome(job, 0.95)
        value = next(runs)
        return _outcome(job, 1.2 * value if len(values) == 1 else value, best=value)

    search = _search()
    jobs = _go(search, answer)
    assert (jobs[-1].recipe.name, jobs[-1].epochs, jobs[-1].begins_anew) == last
    assert search.best == min(values)  # of all runs
    if last[2]:
        assert jobs[-1].reason.endswith("; it begins anew, with all its 20 epochs")


def test_the_plain_recipe_has_what_is_left_where_the_time_is_too_short_for_all_of_it() -> None:
    search = _search(updates_per_epoch=100, num_recipes=2, seconds=20.0)
    jobs = _go(search, lambda job: _outcome(job, 1.2, best=1.0, seconds=job.epochs))
    assert [(job.recipe.name, job.epochs, job.begins_anew) for job in jobs[1:]] == [
        ("a", 3, False),
        ("plain", 16, False),
    ]


def test_the_plain_recipe_is_run_as_it_is_where_it_is_better_after_the_longer_trial() -> None:
    def answer(job: Job) -> Outcome:
        is_good = job.recipe.name == ("plain" if job.epochs > 0.5 else "a")
        return _outcome(job, 1.0 if is_good else 2.0)

    jobs = _go(_search(), answer)
    assert [(job.kind, job.recipe.name, job.epochs) for job in jobs[6:]] == [("run", "plain", 20)]


def test_a_rate_that_follows_the_updates_is_higher_in_trials_by_the_root_of_their_number() -> None:
    recipes = [Recipe(name="plain"), Recipe(name="a", rate_follows_updates=True)]
    search = RecipeSearch(recipes, epochs=20, updates_per_epoch=1000)
    jobs = _go(search, lambda job: _outcome(job, 1.0 if job.recipe.name == "a" else 2.0))
    for job in jobs:
        if job.kind == "trial":
            expected = math.sqrt(3 / job.epochs) if job.recipe.name == "a" else 1.0
            assert job.rate_factor == pytest.approx(expected)
    assert (jobs[4].epochs, jobs[4].rate_factor) == (3, 1.0)


@pytest.mark.parametrize(
    ("epochs", "updates_per_epoch", "expected"),
    [
        (25, 85, 4),  # a sixth
        (7, 198, 2),  # the least
        (10, 26, 4),  # enough for 100 updates
        (10, 5, 5),  # but no more than half
        (25, 3, 12),
        (3, 5, 2),
        (1, 1000, 1),
    ],
)
def test_a_first_run_is_short_but_has_enough_updates(epochs: int, updates_per_epoch: float, expected: int) -> None:
    assert first_run_epochs(epochs, updates_per_epoch=updates_per_epoch) == expected
    search = _search(epochs=epochs, updates_per_epoch=updates_per_epoch, num_recipes=2)
    jobs = _go(search, lambda job: _outcome(job, 1.0 if job.recipe.name == "a" else 2.0))
    assert next(job.epochs for job in jobs if job.kind == "run") == expected


def test_a_rate_that_follows_the_updates_is_higher_in_a_run_that_the_time_makes_shorter() -> None:
    recipes = [Recipe(name="plain"), Recipe(name="a", rate_follows_updates=True)]
    search = RecipeSearch(recipes, epochs=20, updates_per_epoch=100, seconds=2.5)
    jobs = _go(search, lambda job: _outcome(job, 1.0, seconds=job.epochs))
    assert [(job.kind, job.epochs) for job in jobs] == [("trial", 0.1), ("run", 2)]
    assert jobs[1].rate_factor == pytest.approx(math.sqrt(3 / 2))


def test_of_recipes_that_are_alike_the_fastest_is_taken() -> None:
    jobs = _go(_search(), lambda job: _outcome(job, 1.0, seconds={"b": 1.0}.get(job.recipe.name, 2.0)))
    assert jobs[5].recipe.name == "b"


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (lambda _: Outcome(loss=math.nan, value=None, best=None, epochs=0, seconds=1), "a diverged"),
        (lambda job: _outcome(job, 1.2, best=1.0), "a overfits: its best epoch has 1, its last 1.2"),
    ],
)
def test_the_plain_recipe_takes_over_from_one_that_fails(first: Callable[[Job], Outcome], words: str) -> None:
    search = _search(updates_per_epoch=40, num_recipes=2)
    jobs = _go(search, lambda job: first(job) if job.recipe.name == "a" else _outcome(job, 0.9))
    assert [(job.recipe.name, job.epochs) for job in jobs] == [("a", 3), ("plain", 20)]
    assert jobs[1].reason == f"{words}; it begins anew, with all its 20 epochs"
    assert search.best == 0.9


def test_it_ends_at_the_target_and_tells_early_of_one_that_is_out_of_reach() -> None:
    search = _search(updates_per_epoch=40, num_recipes=2, target=0.9, higher_is_better=True)
    jobs = _go(search, lambda job: _outcome(job, 0.91))
    assert len(jobs) == 1
    assert search.verdict == "the target is reached; the best is 0.91"
    values = iter([0.7, 0.72, 0.73, 0.735])
    search = _search(updates_per_epoch=40, num_recipes=2, target=0.9, higher_is_better=True)
    jobs = _go(search, lambda job: _outcome(job, next(values)))
    assert jobs[1].reason.endswith("; the target is 0.9")
    assert jobs[2].reason.endswith("; the target is 0.9, which is not expected to be reached: the best so far is 0.72")
    assert search.verdict.endswith("the best is 0.735, and the target of 0.9 was not reached")


def test_runs_fit_into_the_time() -> None:
    search = _search(updates_per_epoch=100, num_recipes=2, seconds=6.6)
    jobs = _go(search, lambda job: _outcome(job, 1 / (1 + len(search.history)), seconds=job.epochs))
    assert [job.epochs for job in jobs] == [0.1, 3, 3]
    assert search.verdict.startswith("the time is over")
    search = _search(updates_per_epoch=100, num_recipes=2, seconds=5.6)
    jobs = _go(search, lambda job: _outcome(job, 1 / (1 + len(search.history)), seconds=job.epochs))
    assert [job.epochs for job in jobs] == [0.1, 3, 2]
    assert jobs[-1].reason.endswith("there is time for 2 epochs")
    search = _search(epochs=2, updates_per_epoch=10_000, num_recipes=2, seconds=10.0)
    with pytest.raises(StrettoError, match=r"6.4 seconds left of 10, too few for an epoch of a, which takes about 18"):
        _go(search, lambda job: _outcome(job, 1.0 if job.recipe.name == "a" else 2.0, seconds=18 * job.epochs))
    search = _search(seconds=10.0)
    job = search.ask()
    assert job is not None
    words = r"10 seconds are too short: trials alone would take about 10\. Allow 40 seconds \(0.011 hours\) or more"
    with pytest.raises(StrettoError, match=words):
        search.tell(_outcome(job, 1.0, seconds=1.0))


def test_a_bounded_time_without_room_for_trials_is_planned_for_after_a_few_updates() -> None:
    search = _search(updates_per_epoch=100, num_recipes=2, seconds=6.0)
    jobs = _go(search, lambda job: _outcome(job, 1 / (1 + len(search.history)), seconds=2 * job.epochs))
    assert [(job.kind, job.recipe.name, job.epochs) for job in jobs] == [("trial", "a", 0.1), ("run", "a", 2)]
    assert jobs[1].reason.endswith("there is time for 2 epochs")
    search = _search(updates_per_epoch=100, num_recipes=2, seconds=1.0)
    words = r"0.8 seconds left of 1, too few for an epoch of a, which takes about 2\. Allow 4.4 seconds"
    with pytest.raises(StrettoError, match=words):
        _go(search, lambda job: _outcome(job, 1.0, seconds=2 * job.epochs))


def test_a_plain_recipe_that_was_not_timed_is_planned_as_if_it_were_as_slow_as_the_other() -> None:
    search = _search(updates_per_epoch=100, num_recipes=2, seconds=12.5)
    jobs = _go(search, lambda job: _outcome(job, 1.0, seconds=2 * job.epochs))
    assert [(job.recipe.name, job.epochs) for job in jobs[1:]] == [("a", 3), ("a", 3)]
    search = _search(updates_per_epoch=100, num_recipes=2, seconds=12.5)
    jobs = _go(search, lambda job: _outcome(job, 1.2, best=1.0, seconds=2 * job.epochs))
    assert [(job.recipe.name, job.epochs) for job in jobs[1:]] == [("a", 3), ("plain", 3)]


def test_a_search_goes_on_with_another_bound_of_the_time() -> None:
    for first, then in ((None, 100.0), (100.0, None)):
        search = _search(updates_per_epoch=100, num_recipes=2, seconds=first)
        for _ in range(2):
            job = search.ask()
            assert job is not None
            search.tell(_outcome(job, 1 / (1 + len(search.history)), seconds=job.epochs))
        other = _search(updates_per_epoch=100, num_recipes=2, seconds=then)
        other.load_state_dict(json.loads(json.dumps(search.state_dict())))
        assert [job for job, _ in other.history] == [job for job, _ in search.history]
        assert other.ask() == search.ask()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("higher_is_better", [True, False])
def test_a_metric_that_is_no_number_reaches_no_target_and_is_never_the_best(
    value: float, *, higher_is_better: bool
) -> None:
    search = _search(updates_per_epoch=40, num_recipes=2, target=0.9, higher_is_better=higher_is_better)
    assert not search.is_reached(math.nan)
    good = 0.95 if higher_is_better else 0.85
    jobs = _go(search, lambda job: _outcome(job, value if job.recipe.name == "a" else good))
    assert [(job.recipe.name, job.reason.split(";")[0]) for job in jobs][1] == ("plain", "a diverged")
    assert search.best == good


def test_numbers_of_numpy_are_saved() -> None:
    search = _search(updates_per_epoch=40, num_recipes=2)
    job = search.ask()
    assert job is not None
    numbers = [np.float32(1.5), np.float64(2.5), np.int64(3)]
    search.tell(Outcome(loss=numbers[0], value=numbers[1], best=numbers[2], epochs=numbers[2], seconds=1))
    assert json.loads(json.dumps(search.state_dict()))["told"][0]["loss"] == 1.5


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: RecipeSearch([Recipe(name="plain")], epochs=2, updates_per_epoch=9), "recipes 'plain'"),
        (lambda: RecipeSearch([Recipe(name="a")] * 2, epochs=2, updates_per_epoch=9), "names of their own"),
        (lambda: _search(epochs=0), "epochs=0"),
        (lambda: _search(target=math.nan), "target=nan"),
        (lambda: _search(seconds=0.0), "seconds=0.0"),
        (lambda: _search().tell(Outcome(loss=1, value=1, best=1, epochs=1, seconds=1)), r"Call ask\(\)"),
        (lambda: _search().load_state_dict(_search(num_recipes=2).state_dict()), "same recipes"),
        (lambda: _search().load_state_dict([]), "version None"),  # type: ignore[arg-type]
        (lambda: _search().load_state_dict({"version": 1}), "recipes None"),
        (lambda: _search().load_state_dict({"version": 1, "recipes": list(NAMES)}), "damaged: KeyError"),
        (lambda: _search().load_state_dict({"version": 1, "recipes": list(NAMES), "told": [{"x": 1}]}), "damaged"),
        (lambda: _search().tell(3), "was told 3"),  # type: ignore[arg-type]
        (lambda: Outcome(loss=1, value=1, best=1, epochs=1, seconds=-1), "seconds=-1"),
        (lambda: Outcome(loss=1, value=1, best=1, epochs=math.nan, seconds=1), "epochs=nan"),
        (lambda: Outcome(loss=1, value="1", best=1, epochs=1, seconds=1), r"value='1'.*float"),  # type: ignore[arg-type]
    ],
)
def test_bad_input_is_named(call: Callable[[], object], words: str) -> None:
    with pytest.raises(StrettoError, match=words):
        call()
