"""Time over any number of ranks, blocks, segments and lengths: ranks are threads here, and pass tensors by reference.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stretto
from stretto.solvers import time_parallel
from stretto.state import flatten, unflatten

F, H = 2, 4


class Threads:
    """What ranks have in common."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.values: list[Any] = [None] * size
        self.rank = threading.local()

    def all(self, value: Any) -> list[Any]:
        """What every rank has, by rank; all must ask."""
        self.values[self.rank.number] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found


class ThreadRing:
    """As `stretto.solvers.time_parallel.RankRing`, over threads."""

    def __init__(self, group: Threads, *, reverse: bool) -> None:
        self._group, self.size = group, group.size
        self._step = -1 if reverse else 1
        self._rank = group.rank.number
        self.place = self.size - 1 - self._rank if reverse else self._rank

    def require_equal(self, facts: Mapping[str, Any], *, values: Sequence[float] = ()) -> list[list[float]]:
        found = self._group.all((dict(facts), list(values)))
        assert all(item[0] == found[0][0] for item in found)
        return [item[1] for item in found]

    def all_reduce_max(self, values: Sequence[float]) -> list[float]:
        return [max(column) for column in zip(*self._group.all(list(values)), strict=True)]

    def shift(self, parts: Sequence[torch.Tensor], *, by: int) -> list[torch.Tensor] | None:
        found, source = self._group.all([part.clone() for part in parts]), self._rank - by * self._step
        return found[source] if 0 <= source < self.size else None


def _on_threads(size: int, work: Callable[[Threads, int], Any]) -> list[Any]:
    ranks, found, faults = Threads(size), [None] * size, []

    def run(number: int) -> None:
        ranks.rank.number = number
        try:
            found[number] = work(ranks, number)
        except Exception as error:  # noqa: BLE001 - raised again below
            faults.append(error)
            ranks.barrier.abort()

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]
    return found


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_ranks_blocks_segments_and_lengths(data: st.DataObject) -> None:
    cell = data.draw(st.sampled_from([stretto.cells.GRU, stretto.cells.LSTM]))
    layers, both_ways = data.draw(st.integers(1, 2)), data.draw(st.booleans())
    lengths = data.draw(st.lists(st.integers(0, 14), min_size=1, max_size=4))
    segment_steps, memory = data.draw(st.integers(1, 6)), data.draw(st.sampled_from([0.2, 1.0, 4.0]))
    steps = max(1, *lengths)
    size = data.draw(st.integers(2, 5))
    inner = sorted(data.draw(st.lists(st.integers(0, steps), min_size=size - 1, max_size=size - 1)))
    bounds = [0, *inner, steps]
    torch.manual_seed(data.draw(st.integers(0, 99)))
    serial = stretto.RNN(cell(F, H), layers, both_ways, backend="eager").double()
    with torch.no_grad():
        for name, parameter in serial.named_parameters():
            if "hh" in name:
                parameter.mul_(memory)
    x_BTF = torch.randn(len(lengths), steps, F, dtype=torch.float64)
    state = serial.initial_state(len(lengths))
    begun = [torch.randn_like(part).requires_grad_() for part in flatten(state)]
    whole_BTF = x_BTF.clone().requires_grad_()
    y_BTH, after = serial(whole_BTF, unflatten(state, begun), lengths=lengths)
    weights = [torch.randn_like(part) for part in (y_BTH, *flatten(after))]
    inputs = [whole_BTF, *begun, *serial.parameters()]
    total = sum((part * w).sum() for part, w in zip((y_BTH, *flatten(after)), weights, strict=True))
    expected = torch.autograd.grad(total, inputs)  # type: ignore[arg-type]
    each = len(begun) // len(serial.cells)

    def work(ranks: Threads, number: int) -> dict[str, Any]:
        first, last = bounds[number], bounds[number + 1]
        net = copy.deepcopy(serial)
        net.solver = time_parallel.TimeParallel(group=ranks, tolerance=1e-13, segment_steps=segment_steps)  # type: ignore[arg-type]
        own_BTF = x_BTF[:, first:last].clone().requires_grad_()
        starts = [part.detach().clone().requires_grad_() for part in begun]
        own = [min(max(length - first, 0), last - first) for length in lengths]
        made, ended = net(own_BTF, unflatten(state, starts), lengths=own, sample_ids=range(len(lengths)))
        loss = (made * weights[0][:, first:last]).sum()
        for place, (part, w) in enumerate(zip(flatten(ended), weights[1:], strict=True)):
            is_backward = both_ways and place // each % 2
            loss = loss + (part * w).sum() * (number == (0 if is_backward else ranks.size - 1))
        gradients = torch.autograd.grad(loss, [own_BTF, *starts, *net.parameters()])
        return {"y": made.detach(), "gradients": gradients, "iterations": net.solution.iterations}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time_parallel, "RankRing", ThreadRing)
        found = _on_threads(size, work)

    def close(one: torch.Tensor, other: torch.Tensor) -> bool:
        return one.numel() == 0 or float((one - other).abs().max()) <= 1e-10 * max(1.0, float(other.abs().max()))

    assert close(torch.cat([item["y"] for item in found], dim=1), y_BTH.detach())
    assert close(torch.cat([item["gradients"][0] for item in found], dim=1), expected[0])
    for place, wanted in enumerate(expected[1:], start=1):
        assert close(torch.stack([item["gradients"][place] for item in found]).sum(dim=0), wanted)
    assert all(item["iterations"] <= size for item in found)
