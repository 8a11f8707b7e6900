"""How noisy gradients are: what a batch is compared with to tell whether a larger one is worth its time."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, final

import torch
from torch.optim import Optimizer

from stretto.distributed import Parts, denominators, square_of
from stretto.errors import StrettoError

STATE_VERSION: Final = 4
BLOCKS_A_MEMORY: Final = 8
MOST_BLOCKS: Final = 24
FEWEST_BLOCKS: Final = 4
SMALLEST: Final = 1e-100
SIZES_REMEMBERED: Final = 8
"""Updates that the size of gradients is taken from."""
FAR: Final = 1e5
"""How many times larger or smaller than those before it a squared gradient may be before it is its own measure. Where
there are few dimensions chance alone makes it far smaller, and chance must not set the weight of an update: with 32,
the scale of two dimensions would be off by a seventh. That of a single one, which nobody trains, still is."""
ROUNDING: Final = 0.05
"""How far the parts of an update may disagree with its mean: gradients in half precision do by about 1 %."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Estimates from one update, each without bias.

    Attributes:
        trace: Of the covariance of the gradient of one sequence.
        square: Of the norm of the true gradient. It may be negative by chance.
    """

    trace: float
    square: float


def noise_of(*, sizes: Sequence[float], squares: Sequence[float], square_of_mean: float) -> Noise:
    """What one update of K >= 2 independent parts tells of noise.

    The gradients of sequences are independent, with mean G and a covariance of trace t. The mean gradient x_i of n_i
    of them has E|x_i|^2 = |G|^2 + t/n_i, so E sum n_i |x_i|^2 = N|G|^2 + K t with N = sum n_i. The gradient of the
    update, m = sum n_i x_i / N, has E N|m|^2 = N|G|^2 + t. Their difference is (K - 1) t on average, therefore

        t = (sum n_i |x_i|^2 - N|m|^2) / (K - 1)        |G|^2 = |m|^2 - t/N

    are without bias, whatever the sizes.

    Args:
        sizes: Sequences of each part; parts of none are left out.
        squares: Squared norms of the parts' mean gradients.
        square_of_mean: Squared norm of the gradient of all of them together.

    Raises:
        StrettoError: If there are fewer than two parts, or their gradients cannot have this mean.
    """
    if len(sizes) != len(squares):
        raise StrettoError(
            f"there are {len(sizes)} sizes of parts and {len(squares)} squared norms", fix="Give one of each a part."
        )
    held = [(size, square) for size, square in zip(sizes, squares, strict=True) if size > 0]
    if len(held) < 2 or any(size < 0 for size in sizes):
        raise StrettoError(
            f"noise cannot be told from parts of the sizes {list(sizes)}",
            fix="Give two or more parts with sequences: micro-batches that are accumulated, or workers.",
        )
    total = math.fsum(size for size, _ in held)
    whole = total * square_of_mean
    between = math.fsum(size * square for size, square in held) - whole
    if between < -ROUNDING * whole:
        raise StrettoError(
            f"parts of the sizes {list(sizes)} with squared norms {list(squares)} cannot have a mean gradient of "
            f"squared norm {square_of_mean}: it is too large",
            fix="Scale all alike, so that the mean is sum(n_i x_i) / sum(n_i), and measure it before clipping.",
        )
    trace = between / (len(held) - 1)
    return Noise(trace=trace, square=square_of_mean - trace / total)


@final
class NoiseMeter:
    """Measures the gradient noise scale phi = t / |G|^2 with the sequence as unit.

    t is the trace of the covariance of one sequence's gradient, G the true gradient. A batch much smaller than phi is
    mostly noise: twice the batch needs half the updates. A batch much larger than phi gains nothing from growing
    (McCandlish et al. 2018, arXiv 1812.06162). Steps of one sequence are not independent, so they are no unit.

    Both estimates of `noise_of` are averaged over updates, each by itself, since a mean of quotients would be biased.
    Gradients shrink in the course of training, and by orders of magnitude in the units of Adam: so that those of long
    ago do not drown all others, each update is divided by the size that gradients had just before it, which the noise
    of the update itself has no part in; where only some updates are measured, the others tell their size (`see`).
    Averages are exponential and start without bias towards zero. Without noise
    phi is 0, also where rounding makes the trace negative. Where the average of |G|^2 is not positive, noise hides the
    gradient: `scale` is None and `said` tells it. Then phi is most likely large, but nothing was measured.

    Args:
        memory: Measured updates after which an observation has faded to about a third.
        least: Measured updates that are needed before `scale` is told.

    Attributes:
        num_updates: Updates that were measured.
        num_left_out: Updates with norms that are no numbers, which were left out.

    Example:
        >>> meter = NoiseMeter(least=1)
        >>> meter.add(sizes=[4, 4], squares=[3.0, 3.0], square_of_mean=2.0)
        >>> meter.scale
        8.0
    """

    def __init__(self, *, memory: int = 32, least: int = 16) -> None:
        if memory < 1 or least < 1:
            raise StrettoError(f"NoiseMeter got memory={memory} and least={least}", fix="Give both at least 1.")
        self.memory, self.least = memory, least
        self.num_updates = self.num_left_out = 0
        # Of stretches of time, all faded alike: updates; trace, square and the square of that, all relative to the
        # size of gradients; one over that size. And how many were measured.
        self._blocks: list[list[float]] = []
        self._size: float | None = None
        # The size of gradients in the units of `see`: now, and when the last update was measured.
        self._seen: float | None = None
        self._seen_then: float | None = None
        # The sum of squared weights, faded likewise.
        self._squared_weights = 0.0

    def add(
        self, *, sizes: Sequence[float], squares: Sequence[float], square_of_mean: float, stands_for: float = 1.0
    ) -> None:
        """Take an update into account.

        Args:
            sizes: As for `noise_of`, which says what is refused.
            squares: Likewise.
            square_of_mean: Likewise.
            stands_for: Updates since the one that was measured before, itself included: as often as it counts.

        Raises:
            StrettoError: If the parts are refused, or it stands for nothing.
        """
        if not 0 < stands_for < math.inf:
            raise StrettoError(
                f"a measured update stands for {stands_for} updates",
                fix="Give those since the one that was measured before: at least 1.",
            )
        if not all(map(math.isfinite, (*sizes, *squares, square_of_mean))):
            self.num_left_out += 1
            return
        noise = noise_of(sizes=sizes, squares=squares, square_of_mean=square_of_mean)
        keep = 1.0 - 1.0 / self.memory
        relative = 1.0 / self._size_before(square_of_mean)
        for block in self._blocks:
            block[:5] = [keep * value for value in block[:5]]
        if not self._blocks or self._blocks[-1][5] >= max(1, self.memory // BLOCKS_A_MEMORY):
            self._blocks.append([0.0] * 6)
        square = relative * noise.square
        for at, value in enumerate((1.0, relative * noise.trace, square, square**2, relative)):
            self._blocks[-1][at] += stands_for * value
        self._blocks[-1][5] += 1.0
        self._squared_weights = keep**2 * self._squared_weights + stands_for**2
        if len(self._blocks) > MOST_BLOCKS:
            oldest, second = self._blocks[:2]
            self._blocks[:2] = [[a + b for a, b in zip(oldest, second, strict=True)]]
        self.num_updates += 1

    def see(self, square: float) -> None:
        """Note the size of an update's gradient, whether it was measured or not, after that.

        Args:
            square: The squared norm, in whatever units, the same for all updates; what is no number is left out.
        """
        if math.isfinite(square):
            self._seen = _drawn_to(square, self._seen)

    @property
    def trace(self) -> float:
        """The average trace of the covariance of a sequence's gradient; NaN before the first update."""
        return self._mean(1, by=4)

    @property
    def square(self) -> float:
        """The average squared norm of the true gradient; NaN before the first update, negative if noise hides it."""
        return self._mean(2, by=4)

    @property
    def scale(self) -> float | None:
        """The noise scale in sequences; None until enough updates were seen, or if noise hides the gradient."""
        if self.num_updates < self.least or self.square <= 0:
            return None
        return max(0.0, self.trace) / self.square

    @property
    def is_hidden(self) -> bool:
        """Whether the squared gradient is less than two of its standard errors, so that the scale is a guess."""
        return not self._mean(2, by=0) >= 2.0 * self._error_of_square

    @property
    def cautious(self) -> float | None:
        """The scale; where noise hides the gradient, what it would be if that were as large as two standard errors.

        Where noise is far larger than the gradient, chance alone can make the squared gradient nearly zero, and the
        scale endless. None until enough updates were seen, or if it is below zero by as much.
        """
        if self.num_updates < self.least:
            return None
        square, error = self._mean(2, by=0), 2.0 * self._error_of_square
        return max(0.0, self._mean(1, by=0)) / max(square, error) if square + error > 0 else None

    @property
    def standard_error(self) -> float | None:
        """Of the scale: a jackknife over stretches of updates, weighted as they are; None before there are four."""
        scale, count = self.scale, len(self._blocks)
        if scale is None or count < FEWEST_BLOCKS:
            return None
        weight, trace, square = (math.fsum(block[at] for block in self._blocks) for at in range(3))
        pseudo, shares = [], []
        for block in self._blocks:
            if square - block[2] <= 0:
                return math.inf
            share = weight / block[0]
            pseudo.append(share * scale - (share - 1) * max(0.0, trace - block[1]) / (square - block[2]))
            shares.append(share)
        middle = math.fsum(value / share for value, share in zip(pseudo, shares, strict=True))
        spread = math.fsum((value - middle) ** 2 / (share - 1) for value, share in zip(pseudo, shares, strict=True))
        return math.sqrt(spread / count)

    @property
    def said(self) -> str:
        """What is known, in words."""
        if self.num_updates < self.least:
            return f"the noise scale is not known yet: {self.num_updates} of {self.least} updates measured"
        scale, error = self.scale, self.standard_error
        if scale is None:
            found = f"the squared gradient averages {self.square:.3g}, the noise of a sequence {self.trace:.3g}"
            return f"too noisy to tell: {found}"
        return f"the noise scale is {scale:.4g} sequences" + ("" if error is None else f" +- {error:.2g}")

    def state_dict(self) -> dict[str, Any]:
        """All that was measured, ready for JSON."""
        return {
            "version": STATE_VERSION,
            "num_updates": self.num_updates,
            "num_left_out": self.num_left_out,
            "size": self._size,
            "seen": [self._seen, self._seen_then],
            "squared_weights": self._squared_weights,
            "blocks": [list(block) for block in self._blocks],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave; memory and least stay as they are here."""
        if state.get("version") != STATE_VERSION:
            raise StrettoError(
                f"the state of a noise meter has version {state.get('version')!r}, not {STATE_VERSION}",
                fix="Begin a new measurement.",
            )
        self.num_updates, self.num_left_out = int(state["num_updates"]), int(state["num_left_out"])
        self._blocks = [[float(value) for value in block] for block in state["blocks"]]
        self._size = None if state["size"] is None else float(state["size"])
        self._seen, self._seen_then = (None if each is None else float(each) for each in state["seen"])
        self._squared_weights = float(state["squared_weights"])

    @property
    def _error_of_square(self) -> float:
        """The standard error of the average squared gradient, relative to the size of gradients."""
        if self.num_updates < 2:
            return math.inf
        spread = math.sqrt(max(0.0, self._mean(3, by=0) - self._mean(2, by=0) ** 2))
        # Of updates that count alike, as many would be as sure; one less, for the mean is their own.
        alike = math.fsum(block[0] for block in self._blocks) ** 2 / self._squared_weights
        return spread / math.sqrt(max(alike - 1.0, SMALLEST))

    def _mean(self, at: int, *, by: int) -> float:
        weight = math.fsum(block[by] for block in self._blocks)
        return math.fsum(block[at] for block in self._blocks) / weight if weight else math.nan

    def _size_before(self, square_of_mean: float) -> float:
        """The usual squared gradient before this one, which is then taken into account; near it, if it jumps."""
        own = max(square_of_mean, SMALLEST)
        before = own if self._size is None else self._size
        if self._seen is not None and self._seen_then is not None:
            # Gradients have changed as much since then, by what the updates between have told.
            before *= self._seen / self._seen_then
        size = min(max(before, own / FAR), own * FAR)
        self._size, self._seen_then = _drawn_to(own, size), self._seen
        return size


def _drawn_to(own: float, size: float | None) -> float:
    """The usual size after another one, an average of logarithms."""
    own = max(own, SMALLEST)
    return own if size is None else size * (own / size) ** (1.0 / SIZES_REMEMBERED)


@final
class GradientParts:
    """Takes the norms of micro-batches as their gradients are added up in `.grad`.

    It keeps one copy of the gradients, and makes three passes over them a micro-batch. Gradients must be zero or None
    when an update begins. The loss of each micro-batch must be weighted as in the update: a sum over its elements,
    divided by nothing or by the same for all micro-batches.

    Args:
        parameters: Whose gradients.
        optimizer: As for `squared_norm`.

    Example:
        parts = GradientParts(model.parameters(), optimizer=optimizer)
        for x, y in micro_batches:
            (loss_sum(model(x), y) / total).backward()
            parts.add(len(x))
        found = parts.take()
        meter.add(sizes=found.sizes, squares=found.squares, square_of_mean=found.square_of_mean)
    """

    def __init__(self, parameters: Iterable[torch.Tensor], *, optimizer: Optimizer | None = None) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._optimizer = optimizer
        self._earlier: dict[int, torch.Tensor] = {}
        self.begin()

    def begin(self) -> None:
        """Forget an update that is not finished."""
        for copy in self._earlier.values():
            copy.zero_()
        self._sizes: list[int] = []
        self._squares: list[float] = []
        self._divided_by: list[torch.Tensor] | None = None

    @torch.no_grad()
    def add(self, num_sequences: int) -> None:
        """Note the micro-batch whose gradient was just added, of so many sequences."""
        held = [(at, p.grad.to_dense()) for at, p in enumerate(self._parameters) if p.grad is not None]
        gradients = [gradient for _, gradient in held]
        if not self._sizes:
            self._divided_by = denominators(self._parameters, self._optimizer)
        divided_by = None if self._divided_by is None else [self._divided_by[at] for at, _ in held]
        for at, gradient in held:
            if at not in self._earlier:
                self._earlier[at] = torch.zeros_like(gradient)
        earlier = [self._earlier[at] for at, _ in held]
        if held:
            torch._foreach_sub_(earlier, gradients)
        self._sizes.append(num_sequences)
        self._squares.append(float(square_of(earlier, divided_by)))
        if held:
            torch._foreach_copy_(earlier, gradients)

    def take(self, *, scale: float = 1.0) -> Parts | None:
        """The parts of the update, and begin the next; None if fewer than two had sequences.

        Args:
            scale: What the gradient is multiplied by after it was added up: 1/count for losses that are sums.
        """
        sizes, squares, whole = self._sizes, self._squares, 0.0
        if sum(size > 0 for size in sizes) >= 2:
            # The copy is the gradient of all: what .grad was before it was scaled or clipped.
            divided_by = None if self._divided_by is None else [self._divided_by[at] for at in self._earlier]
            whole = float(square_of(list(self._earlier.values()), divided_by))
        self.begin()
        return scaled_parts(sizes, squares, whole, scale=scale)


def scaled_parts(sizes: Sequence[int], squares: Sequence[float], whole: float, *, scale: float) -> Parts | None:
    """The parts of an update as means over their sequences; None if fewer than two had sequences.

    Args:
        sizes: Sequences of each.
        squares: Squared norms of the parts' gradients as they were added up.
        whole: The same of the sum.
        scale: What the sum is multiplied by to be the mean that the update is made of.
    """
    held = [(size, square) for size, square in zip(sizes, squares, strict=True) if size > 0]
    total = sum(size for size, _ in held)
    if len(held) < 2:
        return None
    return Parts(
        sizes=tuple(size for size, _ in held),
        squares=tuple(square * (scale * total / size) ** 2 for size, square in held),
        square_of_mean=whole * scale**2,
    )
