"""Compare two ways to compute the same thing: are they equal, and which is faster?"""

import argparse
from collections.abc import Callable

import torch

from stretto.timing import QUICK, TimingBudget, check_equal, time_interleaved


def quick_was_asked(description: str | None) -> bool:
    """Parse the one flag that all examples have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a tiny smoke test; its numbers mean nothing")
    return bool(parser.parse_args().quick)


def compare(
    plain: Callable[[], torch.Tensor], fast: Callable[[], torch.Tensor], model: torch.nn.Module, *, quick: bool
) -> None:
    """Compare outputs and gradients, then time forward and backward of both in turn.

    `plain` and `fast` return the same outputs, computed with the parameters of `model`.
    """
    torch.manual_seed(0)

    def results(run: Callable[[], torch.Tensor]) -> dict[str, torch.Tensor]:
        model.zero_grad()
        output = run()
        (output * torch.linspace(-1, 1, output.numel()).reshape(output.shape)).mean().backward()
        gradients = {f"the gradient of {k}": p.grad for k, p in model.named_parameters() if p.grad is not None}
        return {"the output": output.detach()} | {name: gradient.clone() for name, gradient in gradients.items()}

    expected, actual = results(plain), results(fast)  # also compiles, which is not timed
    error = check_equal(actual, expected, name="Stretto", peer="the plain version", where="this batch")
    budget = QUICK if quick else TimingBudget(rounds=15, seconds=20)
    times = time_interleaved({"plain": lambda: results(plain), "fast": lambda: results(fast)}, budget=budget)
    slow, soon = times["plain"].median, times["fast"].median
    print(f"equal: {len(actual) - 1} gradients and the output, to {error:.0e} of the largest value")
    print(f"plain {1e3 * slow:.1f} ms, Stretto {1e3 * soon:.1f} ms per training step: {slow / soon:.1f} times as fast")
