"""The summed loss over a vocabulary: torch's values and gradients.

Shape legend: P steps, C words.
"""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from stretto.tasks.language_model import summed_cross_entropy


@settings(deadline=None, max_examples=60)
@given(
    num_steps=st.integers(1, 9),
    num_words=st.integers(1, 30),
    scale=st.sampled_from([0.1, 1.0, 1e3]),
    weight=st.sampled_from([1.0, -0.5, 3.0]),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients_are_torchs(
    num_steps: int, num_words: int, scale: float, weight: float, seed: int
) -> None:
    torch.manual_seed(seed)
    scores_PC = (torch.randn(num_steps, num_words, dtype=torch.float64) * scale).requires_grad_()
    targets_P = torch.randint(-1, num_words, (num_steps,))
    before_PC = scores_PC.detach().clone()
    mine = summed_cross_entropy(scores_PC * 1.0, targets_P)
    (found_PC,) = torch.autograd.grad(mine * weight, scores_PC)
    theirs = functional.cross_entropy(scores_PC, targets_P, ignore_index=-1, reduction="sum")
    (wanted_PC,) = torch.autograd.grad(theirs * weight, scores_PC)
    assert mine.item() == theirs.item()
    torch.testing.assert_close(found_PC, wanted_PC, rtol=1e-12, atol=1e-14)
    assert torch.equal(scores_PC, before_PC)
    with torch.no_grad():
        assert summed_cross_entropy(scores_PC, targets_P).item() == theirs.item()


def test_a_loss_that_is_no_number_has_a_gradient_that_is_none() -> None:
    scores_PC = torch.tensor([[0.0, float("nan")], [1.0, 2.0]], requires_grad=True)
    loss = summed_cross_entropy(scores_PC, torch.tensor([0, 1]))
    (found_PC,) = torch.autograd.grad(loss, scores_PC)
    assert torch.isnan(loss)
    assert torch.isnan(found_PC[0]).all()


def test_the_gradient_can_be_taken_again() -> None:
    scores_PC, targets_P = torch.randn(4, 6, dtype=torch.float64, requires_grad=True), torch.tensor([0, 5, -1, 2])
    loss = summed_cross_entropy(scores_PC, targets_P)
    (first_PC,) = torch.autograd.grad(loss, scores_PC, retain_graph=True)
    kept_PC = first_PC.clone()
    first_PC.mul_(7.0)
    (second_PC,) = torch.autograd.grad(loss, scores_PC)
    assert torch.equal(second_PC, kept_PC)
    assert torch.autograd.gradcheck(lambda scores: summed_cross_entropy(scores, targets_P), (scores_PC,))
