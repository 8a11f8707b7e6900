"""When two results in single precision are equally right: both are compared with one in double precision."""

from typing import Final

import torch

ROUNDING: Final = 4.0
"""How much more than its reference a fast path may lose to rounding."""


def assert_as_exact(found: torch.Tensor, reference: torch.Tensor, exact: torch.Tensor) -> None:
    """Check that `found` is about as near to `exact` as `reference` is, by the largest error of each.

    A reference that is exact by luck asks for no more than single precision has: some units in the last place of the
    largest value.
    """
    assert found.shape == reference.shape == exact.shape
    error, allowed = ((tensor.detach() - exact.detach()).abs().max().item() for tensor in (found, reference))
    allowed = ROUNDING * (allowed + torch.finfo(torch.float32).eps * exact.abs().max().item())
    assert error <= allowed, f"the error is {error:.1e}, and {allowed:.1e} is allowed"
