"""Linear algebra on a small matrix of each row, in operators that code is generated for.

PyTorch's own calls LAPACK, which a kernel cannot. Elimination with the largest pivot of each column is as accurate for
matrices of a few rows, as those of filters and of mixtures are. A matrix that belongs to all rows, such as a parameter,
is left to PyTorch, and is done before the loop.

    [ a | b ]  --column by column: exchange rows, divide, subtract-->  [ 1 | a^-1 b ]
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

LARGEST: Final = 8
"""Rows of a matrix that elimination is written out for."""
LARGEST_DETERMINANT: Final = 4
"""Rows of a matrix that a determinant is written out for: its terms are as many as their factorial."""


def function_of_rows(name: str, args: Sequence[Any]) -> Callable[..., Any] | None:
    """What to call in the place of a function, given several small matrices; None for one that all rows share."""
    if name not in _OF_ROWS:
        return None
    position, function = _OF_ROWS[name]
    a = args[position] if len(args) > position else None
    if not isinstance(a, torch.Tensor) or a.dim() < 3 or not a.is_floating_point():
        return None
    return function if a.shape[-1] <= (LARGEST_DETERMINANT if function is _determinant else LARGEST) else None


def _eliminate(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """a^-1 b, the pivots, and whether rows were exchanged for each."""
    size = a.shape[-1]
    both = torch.cat([a, b], -1)
    pivots, exchanged = [], []
    for k in range(size):
        chosen = both[..., k:, k].abs().argmax(-1, keepdim=True) + k
        is_chosen = torch.zeros_like(both[..., k]).scatter(-1, chosen, 1.0).unsqueeze(-1) != 0
        top = torch.where(is_chosen, both, 0.0).sum(-2, keepdim=True)
        pivot = top[..., k : k + 1]
        pivots.append(pivot[..., 0, 0])
        exchanged.append(chosen[..., 0] != k)
        top = top / pivot
        rest = torch.where(is_chosen, both[..., k : k + 1, :], both)
        rest = rest - rest[..., k : k + 1] * top
        both = torch.cat([rest[..., :k, :], top, rest[..., k + 1 :, :]], -2)
    return both[..., size:], pivots, exchanged


class _Solve(torch.autograd.Function):
    """Elimination with the derivative of what it finds, not of how."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        x, _, _ = _eliminate(a, b)
        ctx.save_for_backward(a, x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        a, x = ctx.saved_tensors
        d_b, _, _ = _eliminate(a.mT, gradients[0])
        return -(d_b @ x.mT), d_b


class _LogDeterminant(torch.autograd.Function):
    """Sign and logarithm of the magnitude, and the inverse: what the gradient reads has a gradient itself."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, identity: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        inverse, pivots, exchanged = _eliminate(a, identity)
        ctx.save_for_backward(inverse)
        sign, log = torch.ones_like(pivots[0]), torch.zeros_like(pivots[0])
        for pivot, was in zip(pivots, exchanged, strict=True):
            sign = sign * pivot.sign() * torch.where(was, -1.0, 1.0)
            log = log + pivot.abs().log()
        ctx.mark_non_differentiable(sign)
        ctx.set_materialize_grads(False)
        return sign, log, inverse

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        (inverse,) = ctx.saved_tensors
        _, d_log, d_inverse = gradients
        d_a = None if d_log is None else d_log[..., None, None] * inverse.mT
        if d_inverse is not None:
            more = -(inverse.mT @ d_inverse @ inverse.mT)
            d_a = more if d_a is None else d_a + more
        return d_a, None


def _solve(a: torch.Tensor, b: torch.Tensor, *, left: bool = True) -> torch.Tensor:
    if not left:
        return _solve(a.mT, b.mT).mT
    if b.dim() == a.dim() - 1 and b.shape == a.shape[:-1]:
        return _solve(a, b.unsqueeze(-1)).squeeze(-1)
    sizes = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    x: torch.Tensor = _Solve.apply(a.expand(*sizes, *a.shape[-2:]), b.expand(*sizes, *b.shape[-2:]))  # type: ignore[no-untyped-call]
    return x


def _inverse(a: torch.Tensor) -> torch.Tensor:
    return _solve(a, torch.eye(a.shape[-1], dtype=a.dtype, device=a.device))


def _sign_and_log(a: torch.Tensor) -> Any:
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)
    sign, log, _ = _LogDeterminant.apply(a, identity)  # type: ignore[no-untyped-call]
    return torch.return_types.linalg_slogdet((sign, log))  # type: ignore[attr-defined]


def _log_determinant(a: torch.Tensor) -> torch.Tensor:
    sign, log = _sign_and_log(a)
    return torch.where(sign < 0, float("nan"), log)


def _determinant(a: torch.Tensor) -> torch.Tensor:
    """By its first column and the minors, which has a derivative where the matrix is singular, too."""
    size = a.shape[-1]
    if size == 1:
        return a[..., 0, 0]
    total = torch.zeros_like(a[..., 0, 0])
    for k in range(size):
        minor = torch.cat([a[..., :k, 1:], a[..., k + 1 :, 1:]], -2)
        total = total + (-1) ** k * a[..., k, 0] * _determinant(minor)
    return total


def _cholesky(a: torch.Tensor, *, upper: bool = False) -> torch.Tensor:
    size = a.shape[-1]
    # What is below the diagonal is read, and the gradient goes to both sides of it.
    both = (a + a.mT) / 2
    lower = a.tril()
    a = both + (lower + lower.tril(-1).mT - both).detach()
    columns: list[torch.Tensor] = []
    for k in range(size):
        # Where the matrix is not positive definite, PyTorch raises an error, for which it looks at values; this is NaN.
        column = a[..., k:, k]
        for done in columns:
            column = column - done[..., k:] * done[..., k : k + 1]
        column = column / column[..., :1].sqrt()
        columns.append(torch.cat([torch.zeros_like(a[..., :k, k]), column], -1))
    return torch.stack(columns, -2 if upper else -1)


def _solve_triangular(
    a: torch.Tensor, b: torch.Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> torch.Tensor:
    if not left:
        return _solve_triangular(a.mT, b.mT, upper=not upper, unitriangular=unitriangular).mT
    size = a.shape[-1]
    found: dict[int, torch.Tensor] = {}
    for k in reversed(range(size)) if upper else range(size):
        row = b[..., k, :]
        for done, x in found.items():
            row = row - a[..., k, done, None] * x
        found[k] = row if unitriangular else row / a[..., k, k, None]
    return torch.stack([found[k] for k in range(size)], -2)


def _cholesky_solve(b: torch.Tensor, factor: torch.Tensor, upper: bool = False) -> torch.Tensor:
    lower = factor.mT if upper else factor
    return _solve_triangular(lower.mT, _solve_triangular(lower, b, upper=False), upper=True)


_OF_ROWS: Final[dict[str, tuple[int, Callable[..., Any]]]] = {
    "linalg_solve": (0, _solve),
    "linalg_inv": (0, _inverse),
    "inverse": (0, _inverse),
    "linalg_det": (0, _determinant),
    "det": (0, _determinant),
    "linalg_slogdet": (0, _sign_and_log),
    "slogdet": (0, _sign_and_log),
    "logdet": (0, _log_determinant),
    "linalg_cholesky": (0, _cholesky),
    "cholesky": (0, lambda a, upper=False: _cholesky(a, upper=upper)),
    "linalg_solve_triangular": (0, _solve_triangular),
    "cholesky_solve": (1, _cholesky_solve),
    "cholesky_inverse": (
        0,
        lambda factor, upper=False: _cholesky_solve(
            torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device), factor, upper
        ),
    ),
}
"""Functions of `torch`, by name, with the position of the argument that is the matrix."""
