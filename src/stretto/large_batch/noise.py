"""How noisy gradients are, which says whether a larger batch is worth its time.

Noise shows between the independent parts of one update:

    AbstractSplit           begin, add, add, ..., take: squared norms of the parts and of their mean
      SplitByMicroBatch     parts that one process computes one after the other
      SplitByRank           each rank's own gradient, read before DistributedDataParallel averages it
    SplitNorms              what a split gives
    noise_of                estimates from one update, without bias
    NoiseScale              their averages over updates, and the noise scale phi
"""

import abc
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, final

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from stretto.checks import check_float, check_int, check_kind, check_list
from stretto.distributed import World
from stretto.errors import StrettoError
from stretto.large_batch.muon import MUON_KINDS

STATE_VERSION: Final = 6
DEBIASED_AVERAGES: Final = ("max_exp_avg_sq", "exp_avg_sq")
"""Averages of squared gradients that start at zero, as the Adam family and LAMB keep them."""
PLAIN_AVERAGES: Final = ("square_avg", "sum")
"""Averages or sums of squared gradients that are used as they are: RMSprop, Adagrad."""
ADAPTIVE_OPTIONS: Final = ("betas", "alpha")
"""Options of optimisers that have such averages after their first update."""
NORMS_FIX: Final = "Give SplitNorms, as SplitByMicroBatch or SplitByRank measures them."
SMALLEST_SQUARE: Final = 1e-100
SIZE_MEMORY_UPDATES: Final = 8
"""Updates over which the usual size of gradients is averaged."""
MAX_SIZE_JUMP: Final = 1e5
"""How far a squared gradient may be from the usual size before it becomes its own measure. In few dimensions chance
alone makes it far smaller, and chance must not set the weight of an update: with a limit of 32, the scale in two
dimensions would be off by a seventh."""
ROUNDING: Final = 0.05
"""How far the parts of an update may disagree with its mean: gradients in half precision do by about 1 %."""


def squared_norm(parameters: Iterable[torch.Tensor], optimizer: Optimizer | None = None) -> float:
    """The squared norm of the gradients, in the units that the optimiser steps in.

    An optimiser that divides each element by a root mean square v of earlier gradients (Adam, AdamW, LAMB, RMSprop,
    Adagrad) sees each element of the gradient divided by sqrt(v) + eps, with v corrected for its start at zero. The
    trust ratios of LAMB, one number per tensor, are left out. Muon sees a gate's gradient divided by the root mean
    square of the gate's momentum; that it also turns the gradient, to make it orthogonal, is left out. For SGD and
    LARS, and without an optimiser, this is the plain norm.

    Args:
        parameters: Whose gradients; those without one count as zero.
        optimizer: The optimiser that holds them, before its update.

    Returns:
        The squared norm, summed in double precision. NaN if the optimiser is adaptive but has made no update yet: a
        plain norm must not be mixed with those that follow.
    """
    held = [parameter for parameter in _tensors(parameters, owner="squared_norm") if parameter.grad is not None]
    return float(sum_of_squares([parameter.grad for parameter in held], _denominators(held, optimizer)))


def _tensors(parameters: Iterable[torch.Tensor], *, owner: str) -> list[torch.Tensor]:
    fix = "Give model.parameters()."
    found = check_list(parameters, name="parameters", owner=owner, fix=fix)
    for each in found:
        check_kind(each, torch.Tensor, name="parameters", owner=owner, fix=fix)
    return found


def sum_of_squares(
    tensors: Sequence[torch.Tensor | None], denominators: Sequence[torch.Tensor] | None = None
) -> torch.Tensor:
    """The squared norm of gradients, each divided by its denominators if there are any; None counts as zero."""
    gradients = [tensor for tensor in tensors if tensor is not None]
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    if denominators is not None:
        below = [each for each, tensor in zip(denominators, tensors, strict=True) if tensor is not None]
        gradients = list(torch._foreach_div([gradient.to_dense() for gradient in gradients], below))
    # Rows that occur twice in a sparse gradient must be added up before they are squared.
    gradients = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    # Half precision is summed in single.
    is_half = any(gradient.dtype in (torch.float16, torch.bfloat16) for gradient in gradients)
    norms = torch._foreach_norm(gradients, 2.0, dtype=torch.float32 if is_half else None)
    return torch.stack([norm.to(gradients[0].device) for norm in norms]).double().square().sum()


def _denominators(parameters: Sequence[torch.Tensor], optimizer: Optimizer | None) -> list[torch.Tensor] | None:
    """What an optimiser divides the gradient of each parameter by; None if by nothing, NaN before its first update.

    In place of a packed weight an optimiser may hold its gates, each a parameter with `packed` and `start`.

    Raises:
        StrettoError: The optimiser divides the gradients of some parameters, and does not hold others.
    """
    if optimizer is None:
        return None
    held: dict[int, list[tuple[Any, dict[str, Any]]]] = {}
    for group in optimizer.param_groups:
        for one in group["params"]:
            held.setdefault(id(getattr(one, "packed", one)), []).append((one, group))
    averages, corrections, epsilons, is_adaptive, missing = [], [], [], False, []
    for parameter in parameters:
        places = sorted(held.get(id(parameter), []), key=lambda place: getattr(place[0], "start", 0))
        found = [_average(one, optimizer.state.get(one, {}), group) for one, group in places]
        known = [average for average, _ in found if average is not None]
        missing += [] if places else [tuple(parameter.shape)]
        is_adaptive |= bool(known)
        averages.append(torch.cat(known) if len(known) > 1 else known[0] if known else torch.ones_like(parameter))
        corrections.append(found[0][1] if known else 1.0)
        epsilons.append(float(places[0][1].get("eps", 0.0)) if known else 0.0)
    if not is_adaptive:
        return None
    if missing:
        raise StrettoError(
            f"the optimiser {type(optimizer).__name__} divides gradients, and has no parameter of shape {missing[0]} "
            "that is to be measured with it",
            fix="Measure the parameters that the optimiser was made with.",
        )
    roots = torch._foreach_div(averages, corrections)
    torch._foreach_sqrt_(roots)
    torch._foreach_add_(roots, epsilons)
    return list(roots)


def _average(
    parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
) -> tuple[torch.Tensor | None, float]:
    """The average of a parameter's squared gradients, and what to divide it by."""
    if group.get("kind") in MUON_KINDS:
        if not state:
            return torch.full_like(parameter, math.nan), 1.0
        momenta = state["momentum_buffer"].unflatten(0, (group["gates"], -1))
        # Not zero where all gradients of a gate are.
        squares = momenta.square().mean(dim=(1, 2), keepdim=True).clamp_(min=torch.finfo(momenta.dtype).tiny)
        return squares.expand_as(momenta).flatten(0, 1), 1.0
    if not state and any(name in group for name in ADAPTIVE_OPTIONS):
        return torch.full_like(parameter, math.nan), 1.0
    for name in DEBIASED_AVERAGES:
        if torch.is_tensor(state.get(name)):
            # Some optimisers count the updates of a group, not of each parameter.
            count = float(state.get("step", group.get("step", math.inf)))
            return state[name], 1.0 - float(group["betas"][1]) ** count if count else math.nan
    for name in PLAIN_AVERAGES:
        if torch.is_tensor(state.get(name)):
            return state[name], 1.0
    return None, 1.0


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SplitNorms:
    """Squared norms of the mean gradients of an update's independent parts, of so many sequences each.

    `square_of_mean` is that of the gradient of the whole update, before clipping.
    """

    sizes: Sequence[float]
    squares: Sequence[float]
    square_of_mean: float


class AbstractSplit(abc.ABC):
    """Measures the parts of an update: `begin`, then `add` after each backward pass, then `take` before clipping.

    Args:
        parameters: Whose gradients.
        optimizer: As for `squared_norm`.
    """

    needs_halves = False
    """Whether an update of a single batch has parts only if it is computed in halves."""

    def __init__(self, parameters: Iterable[torch.Tensor], *, optimizer: Optimizer | None = None) -> None:
        given = _tensors(parameters, owner=type(self).__name__)
        self._parameters = [parameter for parameter in given if parameter.requires_grad]
        self._optimizer = optimizer
        self.begin()

    def begin(self, *, is_on: bool = True) -> None:
        """Begin an update, measured or not; what was measured of an unfinished one is dropped."""
        self.is_on = is_on
        self._reset()

    @abc.abstractmethod
    def _reset(self) -> None: ...

    @abc.abstractmethod
    def add(self, num_sequences: int) -> None:
        """Note that a backward pass has just added the gradient of so many sequences to `.grad`."""

    @abc.abstractmethod
    def take(self, *, scale: float | None = None) -> SplitNorms | None:
        """The norms of the update's parts, whose summed gradient is in `.grad` afterwards.

        Args:
            scale: What the sum of all parts' gradients is multiplied by to give the gradient of the update.

        Returns:
            The norms; None if the update is not measured, or fewer than two parts had sequences.
        """


@final
class SplitByMicroBatch(AbstractSplit):
    """Norms of micro-batches that one process computes one after the other.

    `add` moves the gradient out of `.grad` into a sum of its own, so that the next backward pass leaves its part alone;
    `take` moves the sum back. That costs one pass over the gradients for the norm and one for the sum, as accumulation
    in `.grad` would. Gradients must be zero or None when an update begins. The loss of each micro-batch must be
    weighted as in the update: a sum over its elements, divided by nothing or by the same number for all.

    Examples:
        split = SplitByMicroBatch(model.parameters(), optimizer=optimizer)
        for x, y in micro_batches:
            (loss_sum(model(x), y) / total).backward()
            split.add(len(x))
        noise_scale.add(split.take())
    """

    needs_halves = True

    def _reset(self) -> None:
        self._parts: list[tuple[int, float]] = []
        self._sums: list[torch.Tensor | None] = [None] * len(self._parameters)
        self._denominators: list[torch.Tensor] | None = None

    @torch.no_grad()
    def add(self, num_sequences: int) -> None:
        """Measure the gradient that was just added, and set it aside."""
        if not self.is_on:
            return
        if not self._parts:
            self._denominators = _denominators(self._parameters, self._optimizer)
        gradients = [parameter.grad for parameter in self._parameters]
        self._parts.append((num_sequences, float(sum_of_squares(gradients, self._denominators))))
        self._sums = [_add(whole, each.grad) for whole, each in zip(self._sums, self._parameters, strict=True)]
        for parameter in self._parameters:
            parameter.grad = None

    def take(self, *, scale: float | None = None) -> SplitNorms | None:
        """Put the sum of all parts into `.grad`; the gradient of the update is that sum times `scale`, 1 by default."""
        if not self.is_on or not self._parts:
            return None
        factor = 1.0 if scale is None else scale
        held = [(size, square) for size, square in self._parts if size > 0]
        total = sum(size for size, _ in held)
        norms = None
        if len(held) >= 2:
            norms = SplitNorms(
                sizes=tuple(size for size, _ in held),
                squares=tuple(square * (factor * total / size) ** 2 for size, square in held),
                square_of_mean=float(sum_of_squares(self._sums, self._denominators)) * factor**2,
            )
        for parameter, whole in zip(self._parameters, self._sums, strict=True):
            parameter.grad = whole
        self.begin()
        return norms


def _add(whole: torch.Tensor | None, part: torch.Tensor | None) -> torch.Tensor | None:
    """The sum of two gradients as autograd accumulates them: in place, unless a dense one meets a sparse sum."""
    if whole is None or part is None:
        return part if whole is None else whole
    return part.add_(whole) if whole.is_sparse and not part.is_sparse else whole.add_(part)


@final
class SplitByRank(AbstractSplit):
    """Norms of the ranks' shares of an update: each rank's own gradient, before it is averaged.

    It is read bucket by bucket as `DistributedDataParallel` exchanges gradients, which costs one pass over them.
    Backward passes under `no_sync` count as one with the pass that follows. A model can have one communication hook,
    and this is it. Every rank must call `take`.

    Args:
        model: The model, before its first backward pass.
        world: The ranks.
        optimizer: As for `squared_norm`.
    """

    def __init__(self, model: DistributedDataParallel, *, world: World, optimizer: Optimizer | None = None) -> None:
        check_kind(
            model, DistributedDataParallel, name="model", owner="SplitByRank", fix="Give the DistributedDataParallel."
        )
        super().__init__(model.parameters(), optimizer=optimizer)
        self._world, self._group = world, model.process_group
        model.register_comm_hook(self, _read_and_average)

    def _reset(self) -> None:
        self._num_sequences = 0
        self._bucket_squares: list[torch.Tensor] = []

    def add(self, num_sequences: int) -> None:
        """Count the sequences of this rank."""
        self._num_sequences += num_sequences

    def take(self, *, scale: float | None = None) -> SplitNorms | None:
        """The ranks' shares as parts; `scale` is 1/world_size by default, the average that `.grad` holds.

        Three numbers per rank are summed: the estimate needs the sum of n_i |x_i|^2 over ranks, not each of them. The
        norms are those of as many equal parts with the same sum, which give the same estimate.
        """
        if not self.is_on:
            return None
        world, count, squares = self._world, self._num_sequences, self._bucket_squares
        own = float(torch.stack(squares).sum()) if squares else math.nan
        factor = 1.0 / world.size if scale is None else scale
        square_of_mean = squared_norm(self._parameters, self._optimizer) * (world.size * factor) ** 2
        self.begin()
        total, weighted, num_parts = world.all_reduce_sum([count, own / count, 1.0] if count else [0.0] * 3)
        if num_parts < 2:
            return None
        parts = round(num_parts)
        return SplitNorms(
            sizes=(total / parts,) * parts,
            squares=(weighted * total * factor**2,) * parts,
            square_of_mean=square_of_mean,
        )


def _read_and_average(
    split: SplitByRank,
    bucket: distributed.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """A communication hook that notes the norm of a bucket, then averages it over ranks as usual."""
    if split.is_on:
        denominators = _denominators(bucket.parameters(), split._optimizer)
        split._bucket_squares.append(sum_of_squares(bucket.gradients(), denominators))
    return default_hooks.allreduce_hook(split._group, bucket)


def make_split(replica: nn.Module, optimizer: Optimizer, *, world: World) -> AbstractSplit | None:
    """The split that suits a model as one of the ranks trains it: by rank under DDP, else by micro-batch.

    None for a model that several ranks hold without exchanging gradients.
    """
    if isinstance(replica, DistributedDataParallel):
        return SplitByRank(replica, world=world, optimizer=optimizer)
    return SplitByMicroBatch(replica.parameters(), optimizer=optimizer) if world.size == 1 else None


class Noise(NamedTuple):
    """Estimates from one update, each without bias: the trace of the covariance of one sequence's gradient, and the
    squared norm of the true gradient, which may be negative by chance.
    """

    trace: float
    square: float


def noise_of(norms: SplitNorms) -> Noise:
    """What one update of K >= 2 independent parts says about noise.

    The gradients of sequences are independent, with mean G and a covariance of trace t. The mean gradient x_i of n_i
    of them has E|x_i|^2 = |G|^2 + t/n_i, so E sum n_i |x_i|^2 = N|G|^2 + K t with N = sum n_i. The gradient of the
    update, m = sum n_i x_i / N, has E N|m|^2 = N|G|^2 + t. Their difference is (K - 1) t on average, therefore

        t = (sum n_i |x_i|^2 - N|m|^2) / (K - 1)        |G|^2 = |m|^2 - t/N

    are without bias, whatever the sizes.

    Args:
        norms: Of the parts; parts without sequences are left out.

    Raises:
        StrettoError: There are fewer than two parts, or their gradients cannot have this mean.
    """
    check_kind(norms, SplitNorms, name="norms", owner="noise_of", fix=NORMS_FIX)
    sizes, squares, square_of_mean = norms.sizes, norms.squares, norms.square_of_mean
    if len(sizes) != len(squares):
        raise StrettoError(
            f"there are {len(sizes)} sizes of parts and {len(squares)} squared norms", fix="Give one of each per part."
        )
    held = [(size, square) for size, square in zip(sizes, squares, strict=True) if size > 0]
    if len(held) < 2 or any(size < 0 for size in sizes):
        raise StrettoError(
            f"noise cannot be measured from parts of the sizes {list(sizes)}",
            fix="Give two or more parts with sequences: micro-batches that are accumulated, or ranks.",
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
class NoiseScale:
    """Measures the gradient noise scale phi = t / |G|^2 with the sequence as unit.

    t is the trace of the covariance of one sequence's gradient, G the true gradient. A batch much smaller than phi is
    mostly noise: twice the batch needs half the updates. A batch much larger than phi gains nothing from growing
    (McCandlish et al. 2018, arXiv 1812.06162). Time steps of one sequence are not independent, so they
    do not count as samples.

    Both estimates of `noise_of` are averaged over updates separately, since a mean of quotients would be biased.
    Gradients shrink during training, with Adam's units by orders of magnitude. So that old ones do not drown the
    others, each update is divided by the usual size of gradients just before it, which the update's own noise has no
    part in. Where only some updates are measured, the norms of the others (`observe_norm`) carry that size forward.
    Averages are exponential and start without bias towards zero. Without noise phi is 0, also where rounding makes the
    trace negative. Where the average of |G|^2 is not positive, noise hides the gradient and `scale` is None: phi is
    then most likely large, but nothing was measured.

    Args:
        memory: Measured updates after which an observation has faded to about a third.
        min_updates: Measured updates before `scale` is known.

    Attributes:
        num_updates: Updates that were measured.
        num_nonfinite: Updates that were left out because of a norm of NaN or inf.

    Examples:
        >>> noise_scale = NoiseScale(min_updates=1)
        >>> noise_scale.add(SplitNorms(sizes=[4, 4], squares=[3.0, 3.0], square_of_mean=2.0))
        >>> noise_scale.scale
        8.0
    """

    def __init__(self, *, memory: int = 32, min_updates: int = 16) -> None:
        self.memory = check_int(memory, name="memory", owner="NoiseScale")
        self.min_updates = check_int(min_updates, name="min_updates", owner="NoiseScale")
        self.num_updates = self.num_nonfinite = 0
        # Sums over updates, which fade alike. Of each update: weight; trace, square and square squared, all relative to
        # the usual size of gradients; one over that size.
        self._sums = [0.0] * 5
        self._usual_size: float | None = None
        # The usual size in the units of `observe_norm`: now, and when the last update was measured.
        self._observed: float | None = None
        self._observed_then: float | None = None
        # The sum of squared weights, faded likewise.
        self._squared_weights = 0.0

    def add(self, norms: SplitNorms, *, stands_for: float = 1.0) -> None:
        """Take a measured update into account.

        Args:
            norms: Of its parts, as for `noise_of`.
            stands_for: Updates since the last one that was measured, this one included: how much it counts.

        Raises:
            StrettoError: The parts cannot be used, or it stands for nothing.
        """
        check_kind(norms, SplitNorms, name="norms", owner="NoiseScale", fix=NORMS_FIX)
        check_float(stands_for, name="stands_for", above=0.0)
        if not all(map(math.isfinite, (*norms.sizes, *norms.squares, norms.square_of_mean))):
            self.num_nonfinite += 1
            return
        noise = noise_of(norms)
        keep = 1.0 - 1.0 / self.memory
        relative = 1.0 / self._size_before(norms.square_of_mean)
        square = relative * noise.square
        own = (1.0, relative * noise.trace, square, square**2, relative)
        self._sums = [keep * total + stands_for * value for total, value in zip(self._sums, own, strict=True)]
        self._squared_weights = keep**2 * self._squared_weights + stands_for**2
        self.num_updates += 1

    def observe_norm(self, square: float) -> None:
        """Note the squared gradient norm of an update, measured or not, in any unit; call it after `add`.

        NaN and inf are left out.
        """
        if math.isfinite(square):
            self._observed = _follow(square, self._observed)

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
        """The noise scale in sequences; None until enough updates were measured, or if noise hides the gradient."""
        if self.num_updates < self.min_updates or self.square <= 0:
            return None
        return max(0.0, self.trace) / self.square

    @property
    def is_hidden(self) -> bool:
        """Whether the squared gradient is below two of its standard errors, so that the scale is a guess."""
        return not self._mean(2, by=0) >= 2.0 * self._error_of_square

    @property
    def cautious_scale(self) -> float | None:
        """The scale, but no larger than it would be if the squared gradient were two of its standard errors.

        Where noise is far larger than the gradient, chance alone can make the squared gradient nearly zero, and the
        scale endless. None until enough updates were measured, or if the squared gradient is that far below zero.
        """
        if self.num_updates < self.min_updates:
            return None
        square, error = self._mean(2, by=0), 2.0 * self._error_of_square
        return max(0.0, self._mean(1, by=0)) / max(square, error) if square + error > 0 else None

    def __str__(self) -> str:
        if self.num_updates < self.min_updates:
            return f"the noise scale is not known yet: {self.num_updates} of {self.min_updates} updates measured"
        if self.scale is None:
            found = f"the squared gradient averages {self.square:.3g}, the noise of a sequence {self.trace:.3g}"
            return f"too noisy to measure: {found}"
        return f"the noise scale is {self.scale:.4g} sequences"

    def state_dict(self) -> dict[str, Any]:
        """Everything that was measured, ready for JSON."""
        return {
            "version": STATE_VERSION,
            "num_updates": self.num_updates,
            "num_nonfinite": self.num_nonfinite,
            "usual_size": self._usual_size,
            "observed": [self._observed, self._observed_then],
            "squared_weights": self._squared_weights,
            "sums": list(self._sums),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave; `memory` and `min_updates` stay as they are here."""
        check_kind(state, dict, name="state", owner="NoiseScale", fix="Give what state_dict returned.")
        if state.get("version") != STATE_VERSION:
            raise StrettoError(
                f"the state of a noise scale has version {state.get('version')!r}, not {STATE_VERSION}",
                fix="Begin a new measurement.",
            )
        self.num_updates, self.num_nonfinite = int(state["num_updates"]), int(state["num_nonfinite"])
        self._sums = [float(value) for value in state["sums"]]
        self._usual_size, self._squared_weights = state["usual_size"], float(state["squared_weights"])
        self._observed, self._observed_then = state["observed"]

    @property
    def _error_of_square(self) -> float:
        """The standard error of the average squared gradient, relative to the usual size of gradients."""
        if self.num_updates < 2:
            return math.inf
        spread = math.sqrt(max(0.0, self._mean(3, by=0) - self._mean(2, by=0) ** 2))
        # The number of equally weighted updates that would be as certain; one less, for the mean is their own.
        effective = self._sums[0] ** 2 / self._squared_weights
        return spread / math.sqrt(max(effective - 1.0, SMALLEST_SQUARE))

    def _mean(self, at: int, *, by: int) -> float:
        return self._sums[at] / self._sums[by] if self._sums[by] else math.nan

    def _size_before(self, square_of_mean: float) -> float:
        """The usual squared gradient before this one, which is then taken into account; near it, if it jumps."""
        own = max(square_of_mean, SMALLEST_SQUARE)
        before = own if self._usual_size is None else self._usual_size
        if self._observed is not None and self._observed_then is not None:
            # Gradients have changed by as much since then, as the updates between have shown.
            before *= self._observed / self._observed_then
        size = min(max(before, own / MAX_SIZE_JUMP), own * MAX_SIZE_JUMP)
        self._usual_size, self._observed_then = _follow(own, size), self._observed
        return size


def _follow(own: float, usual: float | None) -> float:
    """The usual size after another one: an exponential average of logarithms."""
    own = max(own, SMALLEST_SQUARE)
    return own if usual is None else usual * (own / usual) ** (1.0 / SIZE_MEMORY_UPDATES)
