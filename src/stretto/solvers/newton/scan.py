"""Linear recurrences solved in about 2 log2(T) rounds instead of T steps: an associative scan of affine maps.

Two maps in a row are one map again. Pairs are joined until one is left, which gives every second, fourth, eighth ...
state; then those between are filled in. Only the first half multiplies matrices, about T of them altogether.

Shape legend: T steps, S numbers of a state; a linear part is a matrix (S, S), or its diagonal (S) if it is diagonal.
"""

import torch


def solve_recurrence(linear_T: torch.Tensor, offset_TS: torch.Tensor) -> torch.Tensor:
    """All states of `d_t = linear_t d_(t-1) + offset_t` from zero.

    Several recurrences are one after another in a row: the linear part of the first step of each is zero.

    Args:
        linear_T: The linear part of each step (T, S, S), or (T, S) for diagonal ones.
        offset_TS: What each step adds.

    Returns:
        The state after each step (T, S); not finite where products overflow.
    """
    if len(offset_TS) <= 1:
        return offset_TS.clone()
    pairs = len(offset_TS) // 2
    first_T, second_T = linear_T[0 : 2 * pairs : 2], linear_T[1::2]
    joined_TS = _applied(second_T, offset_TS[0 : 2 * pairs : 2], offset_TS[1::2])
    made_TS = torch.empty_like(offset_TS)
    made_TS[1::2] = odd_TS = solve_recurrence(_joined(second_T, first_T), joined_TS)
    made_TS[0] = offset_TS[0]
    between = len(offset_TS) - pairs - 1
    made_TS[2::2] = _applied(linear_T[2::2], odd_TS[:between], offset_TS[2::2])
    return made_TS


def _joined(second_T: torch.Tensor, first_T: torch.Tensor) -> torch.Tensor:
    return second_T * first_T if second_T.dim() == 2 else torch.bmm(second_T, first_T)


def _applied(linear_T: torch.Tensor, state_TS: torch.Tensor, offset_TS: torch.Tensor) -> torch.Tensor:
    if linear_T.dim() == 2:
        return torch.addcmul(offset_TS, linear_T, state_TS)
    return torch.baddbmm(offset_TS[:, :, None], linear_T, state_TS[:, :, None])[:, :, 0]
