"""Branches on values are refused with their line; checks are passed over on request."""

import pytest
import torch

import stretto

pytestmark = pytest.mark.usefixtures("quick_compiler")


class Checked(stretto.Cell):
    """Asserts and raises, and branches if it is asked to."""

    def __init__(self, *, branches: bool = False) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 4)
        self.branches = branches

    def initial_state(self, batch_size: int) -> torch.Tensor:
        """Zeros."""
        return self.zeros(batch_size, 4)

    def forward(self, x_t: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One step."""
        new = torch.tanh(self.linear(torch.cat([x_t, state], 1)))
        assert not torch.isnan(new).any()
        if (new.abs() > 1).any():
            raise ValueError("not in range")
        if self.branches and new.sum() > 0:
            new = 0.5 * new
        return new, new


def _reason(cell: Checked) -> tuple[str, str]:
    rnn = stretto.RNN(cell, backend="auto")
    rnn(torch.zeros(2, 3, 2))
    explanation = rnn.explain()
    return explanation.backend, explanation.reason


@pytest.mark.filterwarnings("ignore")
def test_a_check_is_refused_with_its_line() -> None:
    backend, reason = _reason(Checked())
    assert backend == "torch"
    assert "test_user_code.py" in reason
    assert "assert not torch.isnan(new).any()" in reason


def test_checks_are_passed_over_on_request() -> None:
    cell = Checked()
    cell.assume_checks_pass = True
    x_BTF = torch.randn(2, 3, 2)
    y_BTF, _ = stretto.RNN(cell, backend="cpp")(x_BTF)
    torch.testing.assert_close(y_BTF, stretto.RNN(cell, backend="torch")(x_BTF)[0])


@pytest.mark.filterwarnings("ignore")
def test_a_branch_is_not_a_check() -> None:
    cell = Checked(branches=True)
    cell.assume_checks_pass = True
    backend, reason = _reason(cell)
    assert backend == "torch"
    assert "if self.branches and new.sum() > 0:" in reason
    assert "torch.where" in reason
