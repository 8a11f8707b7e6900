"""How long a net remembers: the steps after which it makes no difference where it started.

Shape legend: D boundaries between chunks.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Final, final

import torch

from stretto.kernels import Layout
from stretto.solvers.chunks import Chunks
from stretto.solvers.solver import Chain
from stretto.solvers.sweep import mismatch

PROBED: Final = 8
"""A probe walks this share of a chunk: one in so many steps."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a probe found.

    Attributes:
        steps: After how many steps two walks from different states agree within the tolerance, extrapolated from what
            is left of their gap; infinite if it does not close.
        rate: What one step leaves of the gap, in the last half of the probe.
        walked: Steps of the probe, of all boundaries, from both states.
    """

    steps: float
    rate: float
    walked: int


def burnt_in(
    chain: Chain, chunks: Chunks, steps: int, states: Sequence[torch.Tensor], *, places: torch.Tensor
) -> list[torch.Tensor]:
    """States (D, ...) before some chunks after walking the last steps before each from given states (D, ...)."""
    with torch.no_grad():
        x_PF = chain.x_PF.index_select(0, chunks.tails(steps, places).to(chain.x_PF.device))
        return chain.run(Layout.even(num_steps=steps, num_rows=len(places)), x_PF, states).states


def probed(chain: Chain, chunks: Chunks, *, steps: int, tolerance: float) -> Memory:
    """Walk the last steps before each boundary twice, from different states, and see whether the walks meet."""
    every_D = chunks.sequence_C[chunks.later_D]
    one = [state.detach().index_select(0, every_D.to(state.device)) for state in chain.states]
    # Where the net comes to by itself is a place it could also have come from.
    other = [part.roll(1, 0) for part in burnt_in(chain, chunks, steps, one, places=chunks.later_D)]
    count = len(every_D)
    matters_D = torch.ones(count, dtype=torch.bool)
    gaps = [mismatch(one, other, matters_D)]
    half = max(1, steps // 2)
    # Both walks side by side, as rows of one batch.
    tails_TD = chunks.tails(steps, chunks.later_D).reshape(steps, count).repeat(1, 2)
    both = [torch.cat(pair) for pair in zip(one, other, strict=True)]
    with torch.no_grad():
        for first, last in ((0, half), (half, steps)):
            if first == last:
                continue
            rows_P = tails_TD[first:last].reshape(-1).to(chain.x_PF.device)
            layout = Layout.even(num_steps=last - first, num_rows=2 * count)
            both = chain.run(layout, chain.x_PF.index_select(0, rows_P), both).states
            gaps.append(mismatch([part[:count] for part in both], [part[count:] for part in both], matters_D))
    walked = 3 * steps * count
    if not all(map(math.isfinite, gaps)):
        return Memory(steps=math.inf, rate=math.inf, walked=walked)
    if gaps[-1] == 0.0:
        return Memory(steps=float(half if gaps[-2] == 0.0 else steps), rate=0.0, walked=walked)
    rate = (gaps[-1] / gaps[-2]) ** (1 / (steps - half or half)) if gaps[-2] else 0.0
    if gaps[-1] <= tolerance:
        return Memory(steps=float(steps), rate=rate, walked=walked)
    left = math.inf if rate >= 1 else math.log(tolerance / gaps[-1]) / math.log(rate)
    return Memory(steps=steps + left, rate=rate, walked=walked)
