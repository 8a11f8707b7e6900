"""Cells as people write them, by what runs on GPUs: generated Triton, interpreted, and CUDA graphs, replayed by a tape.

The CPU counts as the GPU: nothing here was ever run on one.
"""

import importlib
from collections import OrderedDict
from typing import Any, Final

import pytest
import torch
from gallery_entry import GALLERY
from test_gallery import COMPILED, NOT_COMPILED, compare

from graph_recorder import TapeRecorder
from stretto.kernels.backends import cudagraph
from stretto.kernels.backends.cpp.backend import CppBackend
from stretto.kernels.backends.cudagraph import GraphBackend
from stretto.kernels.backends.triton import backend
from stretto.kernels.backends.triton.backend import TritonBackend
from stretto.kernels.backends.triton.emit import Tiles

pytestmark = pytest.mark.usefixtures("interpreter")

TILES: Final = {
    "ordinary": None,
    "small": Tiles(rows=2, elements=8, columns=8, depth=8, reduced=8, least=2),
    "cooperative": Tiles(rows=2, elements=2, columns=2, depth=4, reduced=4, least=2, shares=2),
}
QUICK: Final = {("EALSTM", "small"), ("SLSTM", "ordinary")}
"""Constants, heads."""


@pytest.fixture
def by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is the GPU, whose fastest backend is Triton; steps that were compiled for the CPU are not known there."""
    monkeypatch.setattr(importlib.import_module("stretto.nn.scan"), "_COMPILED", OrderedDict())
    monkeypatch.setattr(CppBackend, "refuses", lambda *_: "this stands for a GPU")
    monkeypatch.setattr(CppBackend, "is_meant_for", lambda *_: False)
    monkeypatch.setattr(TritonBackend, "is_reference", False)
    monkeypatch.setattr(TritonBackend, "is_meant_for", lambda *_: True)


@pytest.fixture
def by_graphs(by_triton: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Likewise, without Triton."""
    monkeypatch.setitem(cudagraph.RECORDERS, "cpu", TapeRecorder())
    monkeypatch.setattr(TritonBackend, "refuses", lambda *_: "this is about graphs")
    monkeypatch.setattr(TritonBackend, "supports", lambda *_: "this is about graphs")
    monkeypatch.setattr(TritonBackend, "is_meant_for", lambda *_: False)
    monkeypatch.setattr(GraphBackend, "is_meant_for", lambda *_: True)


def cases() -> list[Any]:
    """All by ordinary tiles, some by small ones, so that batches have several programs, and some by teams."""
    chosen = {"ordinary": COMPILED, "small": [*COMPILED[1::5], "EALSTM"], "cooperative": [*COMPILED[2::12], "Bahdanau"]}
    each = [(name, tiles) for tiles in TILES for name in dict.fromkeys(chosen[tiles])]
    return [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in each]


@pytest.mark.parametrize(("name", "tiles"), cases())
def test_cells_equal_the_loop_by_triton(
    name: str, tiles: str, by_triton: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (chosen := TILES[tiles]) is not None:
        monkeypatch.setattr(backend, "choose_tiles", lambda *_: chosen)
    entry = GALLERY[name]
    taken = compare(entry, dtype=torch.float64, ragged=not entry.is_random)
    assert (taken == "triton") is (name not in NOT_COMPILED), taken


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in COMPILED])
def test_cells_equal_the_loop_by_graphs(name: str, by_graphs: None) -> None:
    entry = GALLERY[name]
    taken = compare(entry, dtype=torch.float64, ragged=not entry.is_random)
    assert (taken == "cudagraph") is (name not in NOT_COMPILED), taken
