"""The one error that users see."""

import copy
import pickle
from collections.abc import Callable

import pytest

from stretto.errors import StrettoError


@pytest.mark.parametrize("problem", ["'ink.npz' is empty", "'ink.npz' is empty."])
def test_the_message_is_the_problem_and_the_way_out(problem: str) -> None:
    error = StrettoError(problem, fix="Write it again.")
    assert str(error) == "'ink.npz' is empty. Write it again."
    assert (error.problem, error.fix) == (problem, "Write it again.")
    assert isinstance(error, ValueError)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_it_survives_the_way_out_of_a_worker_process(again: Callable[[StrettoError], StrettoError]) -> None:
    error = again(StrettoError("sequence 3 is empty", fix="Remove it."))
    assert type(error) is StrettoError
    assert str(error) == "sequence 3 is empty. Remove it."
    assert (error.problem, error.fix) == ("sequence 3 is empty", "Remove it.")
