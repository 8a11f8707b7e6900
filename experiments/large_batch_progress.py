"""How far the experiment with large batches is, and how long it will take."""

import statistics
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import final

from experiments.large_batch_applications import Application
from experiments.large_batch_cells import FOLDER, Cell, CellResult
from experiments.large_batch_measures import MEASURES
from stretto.report import duration


@final
class Progress:
    """Counts runs and their time.

    Until a run of an application at a batch has ended, its time is taken from the table of applications.

    Args:
        side_by_side: Runs that are made at a time.

    Attributes:
        done: Runs that were made.
    """

    def __init__(self, *, side_by_side: int = 1) -> None:
        self.done, self._side_by_side = 0, side_by_side
        self._left: Counter[tuple[str, int]] = Counter()
        self._applications: dict[str, Application] = {}
        self._spent: dict[tuple[str, int], list[float]] = {}

    def plan(self, application: Application, multiples: Iterable[int]) -> None:
        """Note runs that are to be made.

        Args:
            application: Of which.
            multiples: The batch of each.
        """
        self._applications[application.name] = application
        self._left.update((application.name, multiple) for multiple in multiples)

    def drop(self, application: Application, multiple: int) -> None:
        """Forget what is left of a batch, for it need not be run."""
        self._left[application.name, multiple] = 0

    @property
    def left(self) -> int:
        """Runs to be made, at most."""
        return sum(self._left.values())

    @property
    def seconds_left(self) -> float:
        """About."""
        one_by_one = sum(count * self._seconds(*place) for place, count in self._left.items())
        return one_by_one / self._side_by_side

    def outlook(self, out: Path) -> str:
        """What is to come, before it begins."""
        if not self.left:
            return "there is nothing left to run"
        return (
            f"up to {self.left} runs to make, about {duration(self.seconds_left)} if this machine is like the one that "
            f"the estimate comes from; finished runs are kept in {out / FOLDER}"
        )

    def line(self, cell: Cell, result: CellResult) -> str:
        """What to tell of a run that has ended."""
        place = (cell.application.name, cell.multiple)
        self.done += 1
        self._left[place] -= 1
        self._spent.setdefault(place, []).append(result.wall_seconds)
        measure = MEASURES[cell.application.name]
        if result.valid is None or result.test is None:
            came = f"diverged after {result.updates:,} updates"
        else:
            values = f"{measure.said(result.test)} (validation {measure.shown(result.valid)})"
            came = f"{values}, {result.updates:,} updates"
        left = f"{self.left} left, about {duration(self.seconds_left)}" if self.left > 0 else "that was the last"
        return f"{cell.title}: {came}, {duration(result.wall_seconds)}; {left}"

    def _seconds(self, name: str, multiple: int) -> float:
        if (name, multiple) in self._spent:
            return statistics.fmean(self._spent[name, multiple])
        expected = self._applications[name].expected_seconds(multiple)
        # If other batches of the same application took more or less than expected, so will this one.
        known = [
            (times, self._applications[name].expected_seconds(k)) for (n, k), times in self._spent.items() if n == name
        ]
        ratios = [statistics.fmean(times) / guess for times, guess in known]
        return expected * (statistics.median(ratios) if ratios else 1.0)
