"""What runs a loop on a GPU is measured once for each kind of batch, kept, and told. The interpreter is the GPU.

Times are made up here: which way is faster on a GPU is not known. Whatever runs, results are the definition's.

Shape legend: B sequences, T steps, F features of the input.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from parity_cells import drawn, layer
from parity_oracle import assert_parity

import stretto
from cell_settings import F
from graph_recorder import TapeRecorder
from stretto.kernels.backends import cudagraph
from stretto.kernels.backends.cpp.backend import CppBackend
from stretto.kernels.backends.generated import LaunchError
from stretto.kernels.backends.triton import backend, measured
from stretto.kernels.backends.triton import interpreter as interpreting
from stretto.kernels.backends.triton.backend import TritonBackend
from stretto.kernels.backends.triton.emit import Tiles
from stretto.kernels.backends.triton.kernel import TritonKernel
from stretto.kernels.backends.triton.measured import COOPERATIVE, MeasuredKernel
from stretto.kernels.backends.triton.team import Team
from stretto.kernels.ir import Unsupported
from stretto.nn import guards

triton = pytest.importorskip("triton")

NAMES: Final = ("triton", "cudagraph", "cudagraph, operators")
RAGGED: Final = [6, 1, 4, 0]
SHARED: Final = Tiles(rows=2, elements=2, columns=2, depth=4, reduced=4, least=2, shares=2)
"""Of kernels whose programs share rows, so small that a small cell has some."""
DAMAGED: Final = ("", "[]", '{"triton": 1}', '{"triton": [-1.0]}')
Timed = list[tuple[str, bool]]


@pytest.fixture
def folder(interpreter: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The CPU counts as a GPU under "auto", of which nothing is known yet; the folder of what is kept."""
    (tmp_path / "choices").mkdir(mode=0o700)
    monkeypatch.setitem(cudagraph.RECORDERS, "cpu", TapeRecorder())
    monkeypatch.setattr(CppBackend, "refuses", lambda *_: "this stands for a GPU")
    monkeypatch.setattr(CppBackend, "is_meant_for", lambda *_: False)
    monkeypatch.setattr(TritonBackend, "is_reference", False)
    monkeypatch.setattr(TritonBackend, "is_meant_for", lambda *_: True)
    monkeypatch.setattr(measured, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(measured, "_KNOWN", {})
    monkeypatch.setattr(measured, "_DISTURBED", set())
    return tmp_path / "choices"


@pytest.fixture
def fastest(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Timed]:
    """Says which way is fastest, and whether other work disturbs; lists what was timed."""

    def say(name: str, *, quiet: bool = True) -> Timed:
        timed: Timed = []
        run = MeasuredKernel._run

        def seconds(self: MeasuredKernel, kernel: Any, call: Any, *, keep: bool) -> float:
            run(self, kernel, call, keep=keep)
            found = next(key for key, one in self.kernels.items() if one is kernel)
            timed.append((found, keep))
            return 1e-3 if found == name else 2e-3

        monkeypatch.setattr(MeasuredKernel, "_run", seconds)
        monkeypatch.setattr(measured, "ROUNDS", 1)
        monkeypatch.setattr(measured, "quiet_run", lambda run, **_: (run(), quiet))
        return timed

    return say


@pytest.fixture
def sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs may share the rows of any batch."""
    monkeypatch.setattr(Team, "_find", lambda *_: SHARED)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many programs share rows, of each kernel that was launched."""
    found: list[int] = []
    at_once = interpreting.at_once

    def noted(shares: int) -> Any:
        found.append(shares)
        return at_once(shares)

    monkeypatch.setattr(interpreting, "at_once", noted)
    return found


def stored(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.iterdir())]


@pytest.mark.parametrize("name", [NAMES[1], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[::2])])
def test_the_fastest_runs_and_equals_the_definition(name: str, folder: Path, fastest: Callable[..., Timed]) -> None:
    timed = fastest(name)
    rnn = layer("gru", 5, backend="auto")
    assert_parity(rnn, drawn(rnn, T=6, B=4, lengths=RAGGED, given=True), kernels=["auto"])
    assert {one for one, _ in timed} == set(NAMES)
    assert {tuple(found) for found in stored(folder)} == {NAMES}
    explained = rnn.explain()
    assert explained.backend == name.partition(",")[0]
    assert explained.reason == ""
    assert dict(explained.backends)[explained.backend] == "used"
    if explained.backend != "triton":
        assert dict(explained.backends)["triton"] == "cudagraph was measured to be faster"
    assert any("4 steps of 4 rows, ragged" in line and f"{name} 1 ms" in line for line in explained.measured)
    assert "measured" in str(explained)
    assert explained.as_dict()["measured"] == list(explained.measured)


def test_each_kind_of_batch_is_measured_once(folder: Path, fastest: Callable[..., Timed]) -> None:
    timed = fastest("cudagraph")
    rnn = layer("gru", 5, backend="auto")
    x_BTF = drawn(rnn, T=8, B=4).x_BTF

    def count(x: torch.Tensor, **options: Any) -> int:
        before = len(stored(folder))
        rnn(x, **options)
        return len(stored(folder)) - before

    assert count(x_BTF[:2, :2]) == 1
    for same in (x_BTF[2:, :2], x_BTF[:2, :3], x_BTF[:2, :2] + 1):
        assert count(same) == 0
    assert count(x_BTF[:1, :2]) == 1  # fewer rows
    assert count(x_BTF[:2, :4]) == 1  # more steps
    assert count(x_BTF[:2, :2], lengths=[2, 1]) == 1  # ragged
    with torch.inference_mode():
        assert count(x_BTF[:2, :2]) == 1
    assert {keep for _, keep in timed} == {True, False}
    again = len(timed)
    layer("gru", 5, backend="auto")(x_BTF[:2, :2])
    assert len(timed) == again, "a loop like it was measured"
    layer("elman", 5, backend="auto")(x_BTF[:2, :2])
    assert len(timed) > again


def test_another_process_reads_what_was_kept(
    folder: Path, fastest: Callable[..., Timed], monkeypatch: pytest.MonkeyPatch
) -> None:
    fastest("triton")
    x_BTF = torch.randn(2, 2, F, dtype=torch.float64)
    layer("gru", 5, backend="auto")(x_BTF)
    (path,) = folder.iterdir()
    path.write_text(json.dumps({"triton": [2.0], "cudagraph": [1.0], "cudagraph, operators": [3.0]}))
    monkeypatch.setattr(measured, "_KNOWN", {})
    timed = fastest("triton")
    rnn = layer("gru", 5, backend="auto")
    rnn(x_BTF)
    assert not timed
    assert rnn.explain().backend == "cudagraph"


@pytest.mark.parametrize(
    "text", ["{", '{"unknown": [1.0]}', *(pytest.param(one, marks=pytest.mark.slow) for one in DAMAGED)]
)
def test_what_is_damaged_is_measured_again(
    text: str, folder: Path, fastest: Callable[..., Timed], monkeypatch: pytest.MonkeyPatch
) -> None:
    fastest("cudagraph")
    x_BTF = torch.randn(2, 2, F, dtype=torch.float64)
    layer("gru", 5, backend="auto")(x_BTF)
    (path,) = folder.iterdir()
    path.write_text(text)
    monkeypatch.setattr(measured, "_KNOWN", {})
    rnn = layer("gru", 5, backend="auto")
    rnn(x_BTF)
    assert rnn.explain().backend == "cudagraph"
    assert set(stored(folder)[0]) == set(NAMES)


def test_a_disturbed_measurement_is_told_and_not_kept(
    folder: Path, fastest: Callable[..., Timed], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = fastest("cudagraph", quiet=False)
    x_BTF = torch.randn(2, 2, F, dtype=torch.float64)
    rnn = layer("gru", 5, backend="auto")
    rnn(x_BTF)
    rnn(x_BTF)
    assert len(timed) == 2 * len(NAMES)
    assert not stored(folder)
    assert "other work took part" in rnn.explain().measured[0]
    assert rnn.explain().backend == "cudagraph"
    monkeypatch.setattr(measured, "_KNOWN", {})  # as the next process
    fastest("triton")
    rnn = layer("gru", 5, backend="auto")
    rnn(x_BTF)
    assert rnn.explain().backend == "triton"
    assert len(stored(folder)) == 1


def test_measuring_leaves_no_trace(folder: Path, fastest: Callable[..., Timed]) -> None:
    fastest("cudagraph")
    rnn = layer("gru", 5, backend="auto")
    x_BTF = torch.randn(2, 2, F, dtype=torch.float64, requires_grad=True)
    seen: list[str] = []
    for parameter in rnn.parameters():
        parameter.register_hook(lambda _: seen.append("gradient"))
    before = [tensor.detach().clone() for tensor in (x_BTF, *rnn.parameters())]
    saved: list[int] = []
    state = torch.get_rng_state()
    counts = []
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(1) or t, lambda t: t):  # type: ignore[func-returns-value]
            rnn(x_BTF)
        counts.append(len(saved))
        saved.clear()
    assert counts[0] == counts[1]
    assert torch.equal(torch.get_rng_state(), state)
    assert not seen
    assert all(tensor.grad is None for tensor in (x_BTF, *rnn.parameters()))
    assert all(torch.equal(*pair) for pair in zip(before, (x_BTF, *rnn.parameters()), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["triton", COOPERATIVE])
def test_whether_programs_share_rows_is_measured_too(
    name: str, folder: Path, sharing: None, launched: list[int], fastest: Callable[..., Timed]
) -> None:
    timed = fastest(name)
    rnn = layer("gru", 5, backend="auto")
    batch = drawn(rnn, T=6, B=4, lengths=RAGGED, given=True)
    assert_parity(rnn, batch, kernels=["auto"])
    assert {one for one, _ in timed} == {COOPERATIVE, *NAMES}
    assert {frozenset(found) for found in stored(folder)} == {frozenset({COOPERATIVE, *NAMES})}
    assert rnn.explain().backend == "triton"
    assert rnn.explain().reason == ""
    assert any(f"{name} 1 ms" in line for line in rnn.explain().measured)
    launched.clear()
    rnn(batch.x_BTF, lengths=RAGGED)[0].sum().backward()
    # Forward and backward, and nothing is measured again.
    assert launched == [2 if name == COOPERATIVE else 1] * 2


def test_another_process_lets_programs_share_rows_as_was_measured(
    folder: Path,
    sharing: None,
    launched: list[int],
    fastest: Callable[..., Timed],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fastest("cudagraph")
    x_BTF = torch.randn(2, 2, F, dtype=torch.float64)
    layer("gru", 5, backend="auto")(x_BTF)
    (path,) = folder.iterdir()
    path.write_text(json.dumps({"triton": [2.0], COOPERATIVE: [1.0], "cudagraph": [3.0]}))
    monkeypatch.setattr(measured, "_KNOWN", {})
    timed = fastest("cudagraph")
    launched.clear()
    layer("gru", 5, backend="auto")(x_BTF)
    assert not timed
    assert launched == [2]


@pytest.mark.slow
def test_programs_that_cannot_run_at_once_are_left_out(
    folder: Path, sharing: None, fastest: Callable[..., Timed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that refuses is told once, and by `explain`; nothing is kept, for the next one may not."""
    timed = fastest("triton")
    at_once = interpreting.at_once

    def too_large(shares: int) -> Any:
        if shares > 1:
            raise RuntimeError("Triton Error [CUDA]: too many blocks in cooperative launch")
        return at_once(shares)

    monkeypatch.setattr(interpreting, "at_once", too_large)
    rnn = layer("gru", 5, backend="auto")
    batch = drawn(rnn, T=6, B=4, lengths=RAGGED)
    with pytest.warns(UserWarning, match=r"too many blocks in cooperative launch.*rows of its own") as warned:
        assert_parity(rnn, batch, kernels=["auto", "auto"])
    assert len(warned) == 1
    assert {one for one, _ in timed[len(NAMES) + 1 :]} == set(NAMES)
    explained = rnn.explain()
    assert explained.backend == "triton"
    assert "too many blocks in cooperative launch" in explained.reason
    assert f"{COOPERATIVE} could not run: cooperative kernels could not be launched" in explained.measured[0]
    assert not stored(folder)


@pytest.mark.slow
def test_kernels_that_cannot_be_launched_are_left_out(
    folder: Path, fastest: Callable[..., Timed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would run in their place is measured under its own name."""
    fastest("triton")

    def fail(*_: Any, **__: Any) -> None:
        raise LaunchError("no room")

    monkeypatch.setattr(TritonKernel, "launch", fail)
    rnn = layer("gru", 5, backend="auto")
    with pytest.warns(UserWarning, match="the loop runs without generated code: .*no room") as warned:
        assert_parity(rnn, drawn(rnn, T=6, B=4, lengths=RAGGED), kernels=["auto"])
    assert len([item for item in warned if "the loop runs" in str(item.message)]) == 1
    explained = rnn.explain()
    assert explained.backend == "cudagraph"
    assert "no room" in explained.reason
    assert not stored(folder)


def test_what_cannot_run_is_left_out(
    folder: Path, fastest: Callable[..., Timed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop whose kernels find too little memory, say, runs by whatever is left; that is told."""
    fastest("cudagraph")
    forward = cudagraph.GraphKernel.forward

    def fail(self: Any, call: Any, *, keep: bool) -> Any:
        if type(self._steps).__name__ == "StepwiseKernel":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, call, keep=keep)

    monkeypatch.setattr(cudagraph.GraphKernel, "forward", fail)
    rnn = layer("gru", 5, backend="auto")
    with pytest.warns(UserWarning, match=r"cannot run by 'cudagraph' \(OutOfMemoryError: CUDA out of memory\)") as told:
        assert_parity(rnn, drawn(rnn, T=6, B=4, lengths=RAGGED), kernels=["auto"])
    assert len(told) == 1
    assert rnn.explain().backend == "triton"
    assert "cudagraph could not run: OutOfMemoryError: CUDA out of memory" in rnn.explain().measured[0]
    assert not stored(folder)


IN_THE_WAY: Final = {
    "no Triton": "the package 'triton' is missing",
    "an old Triton": "3.5 is needed",
    "an old GPU": "Triton's kernels need a GPU of compute capability 8.0, and this one has 7.5",
    "a compiler that fails": "Triton 3.9.0 could not compile the loop for sm_90: PassManager::run failed",
    "too little shared memory": "a program needs 300 KiB of shared memory, and sm_90 has 227",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", IN_THE_WAY)
def test_what_stands_in_the_way_of_kernels_is_told_and_graphs_run(
    what: str, folder: Path, fastest: Callable[..., Timed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `explain`, and once by a warning; results are the definition's."""
    why = IN_THE_WAY[what]

    def refuse(*_: Any) -> None:
        raise Unsupported(why)

    if what == "no Triton":
        monkeypatch.setattr(TritonBackend, "unavailable", lambda _: why)
    elif what == "an old Triton":
        monkeypatch.delattr(triton, "knobs")
    elif what == "an old GPU":
        monkeypatch.setattr(TritonBackend, "supports", lambda *_: why)
    else:
        monkeypatch.setattr(backend, "_own_tiles", refuse)
    guards._warn.cache_clear()
    timed = fastest("cudagraph")
    rnn = layer("gru", 5, backend="auto")
    batch = drawn(rnn, T=6, B=4, lengths=RAGGED)
    with pytest.warns(UserWarning, match=r"GRU runs by backend 'cudagraph' .*, not by 'triton': ") as warned:
        assert_parity(rnn, batch, kernels=["auto", "auto"])
    assert len(warned) == 1
    assert why in str(warned[0].message)
    explained = rnn.explain()
    assert explained.backend == "cudagraph"
    assert why in explained.reason
    assert not any(name.startswith("triton") for name, _ in timed)


def test_nothing_is_measured_while_somebody_captures(
    folder: Path, fastest: Callable[..., Timed], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = fastest("cudagraph")
    monkeypatch.setattr(TapeRecorder, "is_busy", lambda _: True)
    rnn = layer("gru", 5, backend="auto")
    rnn(torch.randn(2, 2, F, dtype=torch.float64))
    assert not timed
    assert rnn.explain().measured == ()
    assert rnn.explain().backend == "triton"


@pytest.mark.parametrize("name", ["triton", "cudagraph"])
def test_a_backend_that_was_named_is_not_measured(name: Any, folder: Path, fastest: Callable[..., Timed]) -> None:
    timed = fastest("triton")
    rnn = layer("gru", 5, backend=name)
    rnn(torch.randn(2, 2, F, dtype=torch.float64))
    assert not timed
    assert rnn.explain().backend == name


def test_scans_are_measured_too(folder: Path, fastest: Callable[..., Timed]) -> None:
    timed = fastest("cudagraph")
    weight = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)

    def step(h: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.tanh(x + h @ weight)
        return h, h

    x_BTF, start = torch.randn(2, 2, 3, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64)
    _, ys = stretto.scan(step, start, x_BTF)
    h, wanted = start, []
    for x in x_BTF.unbind(1):
        h, y = step(h, x)
        wanted.append(y)
    torch.testing.assert_close(ys, torch.stack(wanted, 1))
    assert timed
    explained = stretto.explain(step, start, x_BTF)
    assert explained.backend == "cudagraph"  # type: ignore[union-attr]
    assert explained.measured  # type: ignore[union-attr]
