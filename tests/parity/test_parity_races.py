"""Kernels of Triton have the barriers that they need, and a missing one is seen. Interpreted: never run on a GPU."""

from typing import Any, Final

import pytest
import torch
from parity_cells import drawn, layer
from parity_oracle import found
from race_detector import RaceError, barriers_in, watched, without_barrier

from cell_settings import SETTINGS
from stretto.errors import StrettoError
from stretto.kernels.backends.triton import backend, kernel
from stretto.kernels.backends.triton.emit import Tiles

pytestmark = pytest.mark.usefixtures("interpreter")

TILES: Final = {
    "streamed": Tiles(),
    "tiny": Tiles(rows=2, elements=4, columns=4, depth=4, reduced=4, least=2),
    "resident": Tiles(rows=2, elements=64, columns=64, depth=64, least=4, resident=True),
    "cooperative": Tiles(rows=2, elements=2, columns=2, depth=4, reduced=4, least=2, shares=2),
    "cooperative, held": Tiles(rows=4, elements=4, columns=4, depth=64, least=4, resident=True, shares=2),
}
SEEN: Final = {
    False: "since its last barrier",
    # Threads of one program, or two programs of a team.
    True: r"since its last barrier|reads what program|writes what another program",
}
"""What is found where a barrier is missing: by whether programs share rows."""
QUICK: Final = (
    ("layer-norm-gru", "tiny"),
    ("projected", "resident"),
    ("clockwork", "streamed"),
    ("gru", "cooperative"),
)
BROKEN: Final = ("gru", "layer-norm-lstm", "projected", "clockwork", "recurrent-dropout")
"""Products that stay in registers, reductions, two products in a row, several loops, and what never changes."""
QUICK_BROKEN: Final = (("gru", "tiny"), ("projected", "streamed"), ("clockwork", "resident"), ("gru", "cooperative"))


def use(patch: pytest.MonkeyPatch, tiles: Tiles) -> None:
    patch.setattr(backend, "choose_tiles", lambda *_: tiles)


def run(setting: str) -> None:
    """Forward and backward, and forward without gradients, where stored values share one row for all steps."""
    rnn = layer(setting, 5, training=True, backend="triton")
    batch = drawn(rnn, T=4, B=3, lengths=[4, 1, 3], given=True)
    found(rnn, batch)
    with torch.no_grad():
        rnn(batch.x_BTF, batch.state, lengths=batch.lengths)


def cases(names: Any, quick: Any) -> list[Any]:
    each = [(setting, name) for setting in names for name in TILES]
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.slow) for case in each]


@pytest.mark.parametrize(("setting", "name"), cases(SETTINGS, QUICK))
def test_no_kernel_has_a_race_or_leaves_its_tensors(setting: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, TILES[name])
    with watched() as watch:
        run(setting)
    assert watch.accesses > 50


@pytest.mark.parametrize(("setting", "name"), cases(BROKEN, QUICK_BROKEN))
def test_each_barrier_is_needed(setting: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every loop, forward and backward: without it, the kernel still computes the same here, and is caught."""
    use(monkeypatch, TILES[name])
    written = kernel.source_of
    texts: list[str] = []

    def noted(made: Any) -> str:
        texts.append(written(made))
        return texts[-1]

    monkeypatch.setattr(kernel, "source_of", noted)
    run(setting)
    barriers = [(loop, number) for loop, text in enumerate(texts) for number in range(barriers_in(text))]
    assert len(barriers) >= 3 * len(texts) - 1
    for taken_out in barriers:
        seen: list[int] = []

        def broken(made: Any, taken_out: tuple[int, int] = taken_out, seen: list[int] = seen) -> str:
            seen.append(0)
            text = written(made)
            return without_barrier(text, taken_out[1]) if len(seen) - 1 == taken_out[0] else text

        monkeypatch.setattr(kernel, "source_of", broken)
        with (
            watched(),
            pytest.raises(StrettoError, match=SEEN[TILES[name].shares > 1]) as error,
        ):
            run(setting)
        cause: BaseException | None = error.value
        while cause is not None and not isinstance(cause, RaceError):
            cause = cause.__cause__
        assert cause is not None, taken_out


def test_programs_that_touch_the_same_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program is made to own the first rows, as if the program's number were forgotten."""
    use(monkeypatch, TILES["tiny"])
    written = kernel.source_of
    monkeypatch.setattr(
        kernel, "source_of", lambda made: written(made).replace("tl.program_id(0) * ROWS", "tl.program_id(0) * 0")
    )
    with watched(), pytest.raises(StrettoError, match=r"program .* (writes|reads) what"):
        run("indrnn")


def test_an_address_outside_of_all_tensors_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, TILES["tiny"])
    written = kernel.source_of
    # Rows that have ended are no longer masked.
    monkeypatch.setattr(kernel, "source_of", lambda made: written(made).replace("b < tl.load(rows + t)", "b < 64"))
    with watched(), pytest.raises(StrettoError, match="outside of every tensor"):
        run("indrnn")
