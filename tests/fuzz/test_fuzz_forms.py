"""Random cells in random structures, with several inputs, constants and resets, as layers and as functions."""

import importlib
from collections import OrderedDict
from functools import partial
from typing import Any, Final

import pytest
from fuzz_cell import Case
from fuzz_comparison import assert_same, is_meaningful
from fuzz_forms import Form, FormBatch, FormNet, forms
from fuzz_strategies import cases, fuzzed
from hypothesis import assume, given
from hypothesis import strategies as st

from stretto.kernels import Backend, SaveChoice, build

SCAN: Final = importlib.import_module("stretto.nn.scan")
COMPILED: Final[dict[Backend, Any]] = {"eager": OrderedDict(), "cpp": OrderedDict()}
saves: st.SearchStrategy[SaveChoice] = st.sampled_from(("auto", "states"))


def _check_rnn(form: Form, case: Case, backend: Backend, save: SaveChoice, num_directions: int) -> None:
    net = FormNet(form, seed=case.seed, num_directions=num_directions)
    batch = FormBatch.of(form, case, num_directions=num_directions)
    wanted = net.by_definition(batch)
    assume(is_meaningful(net, batch, wanted))
    rnn = net.rnn(backend, save)
    assert_same(net.by_rnn(rnn, batch), wanted)
    explanation = rnn.explain()
    assert explanation.backend == backend, explanation.reason


@fuzzed(10, share=0.25)
@given(forms(), cases(), saves, st.integers(1, 2))
def test_forms_agree_with_their_definition(form: Form, case: Case, save: SaveChoice, num_directions: int) -> None:
    _check_rnn(form, case, "eager", save, num_directions)


@pytest.mark.usefixtures("quick_compiler")
@fuzzed(3, share=0.1)
@given(forms(shortest=3), cases(), saves)
def test_forms_are_compiled_and_agree_with_their_definition(form: Form, case: Case, save: SaveChoice) -> None:
    _check_rnn(form, case, "cpp", save, 1)


def _check_scan(form: Form, case: Case, backend: Backend, *, reverse: bool) -> None:
    net = FormNet(form, seed=case.seed, scans=True, reverse=reverse)
    batch = FormBatch.of(form, case)
    wanted = net.by_definition(batch)
    assume(is_meaningful(net, batch, wanted))
    with pytest.MonkeyPatch.context() as patch:
        # The same code with other operators, again and again: all are to be compiled, and each its own way.
        patch.setattr(SCAN, "MAX_VARIANTS", 1 << 30)
        patch.setattr(SCAN, "_COMPILED", COMPILED[backend])
        patch.setattr(SCAN, "build", partial(build, backend=backend))
        assert_same(net.by_scan(batch), wanted)
        found = SCAN.explain_scan(
            net.function(),
            net.each[0].initial_state(len(case.lengths)),
            batch.nested_inputs(),
            constants=batch.nested_constants(),
        )
    assert found.backend == backend, found.reason


@fuzzed(8, share=0.2)
@given(forms(), cases(), st.booleans())
def test_scanned_functions_agree_with_their_definition(form: Form, case: Case, reverse: bool) -> None:
    _check_scan(form, case, "eager", reverse=reverse)


@pytest.mark.usefixtures("quick_compiler")
@fuzzed(3, share=0.1)
@given(forms(shortest=3), cases(), st.booleans())
def test_scanned_functions_are_compiled_and_agree_with_their_definition(form: Form, case: Case, reverse: bool) -> None:
    _check_scan(form, case, "cpp", reverse=reverse)
