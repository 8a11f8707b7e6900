"""What quality is in each application of the experiment with large batches, and when it is that of the baseline."""

import dataclasses
from typing import Final, Literal, final

from experiments.large_batch_settings import ApplicationName


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A metric of a task.

    Attributes:
        metric: Its name.
        better: Which values are.
        scale: What it is multiplied with to be shown; 100 for shares, which are shown in per cent.
        tolerance: How much worse than the baseline still counts as the same: in points as shown, or as a share.
        is_relative: Whether it is a share of the baseline's value.
        digits: Behind the point, where it is shown.
    """

    metric: str
    better: Literal["higher", "lower"]
    scale: float = 1.0
    tolerance: float = 1.0
    is_relative: bool = False
    digits: int = 1

    def worse_by(self, value: float, baseline: float) -> float:
        """How much worse than the baseline a value is, in the unit of `tolerance`; below 0 if it is better."""
        sign = 1.0 if self.better == "lower" else -1.0
        if self.is_relative:
            return sign * (value / baseline - 1.0)
        return sign * self.scale * (value - baseline)

    def is_within(self, value: float, baseline: float) -> bool:
        """Whether a value is as good as the baseline's, or better."""
        # The difference of two rounded numbers may miss a bound by a hair.
        return self.worse_by(value, baseline) <= self.tolerance * (1 + 1e-9)

    def is_better(self, value: float, other: float) -> bool:
        """Whether a value is better than another."""
        return value < other if self.better == "lower" else value > other

    def shown(self, value: float) -> str:
        """A value, without its unit."""
        shown = self.scale * value
        return f"{shown:.{self.digits}f}" if abs(shown) < 1e5 else f"{shown:.0e}"

    def said(self, value: float) -> str:
        """A value with its name and unit, for sentences."""
        return f"{self.metric} {self.shown(value)}{' %' if self.scale == PER_CENT else ''}"

    def gap(self, value: float, baseline: float) -> str:
        """The difference from the baseline in words."""
        worse = self.worse_by(value, baseline)
        size = f"{abs(worse):.1%}" if self.is_relative else f"{abs(worse):.1f} points"
        return f"{size} {'worse' if worse > 0 else 'better'}"

    @property
    def unit(self) -> str:
        """The metric with its unit, for headings."""
        return f"{self.metric}, %" if self.scale == PER_CENT else self.metric

    @property
    def allowed(self) -> str:
        """The tolerance in words."""
        return f"{self.tolerance:.0%}" if self.is_relative else f"{self.tolerance:g} point"


PER_CENT: Final = 100.0
MEASURES: Final[dict[ApplicationName, Measure]] = {
    "digits": Measure(metric="accuracy", better="higher", scale=PER_CENT),
    "language-model": Measure(metric="perplexity", better="lower", tolerance=0.03, is_relative=True),
    "translate": Measure(metric="bleu", better="higher"),
    "handwriting": Measure(metric="cer", better="lower", scale=PER_CENT),
    "digit-images": Measure(metric="accuracy", better="higher", scale=PER_CENT),
}
