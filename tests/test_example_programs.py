"""The examples run, and their notebooks."""

import importlib.util
import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SHARED = "side_by_side.py"
SCRIPTS = sorted(path for path in EXAMPLES.glob("*.py") if path.name != SHARED)
NOTEBOOKS = sorted(EXAMPLES.glob("notebooks/*.ipynb"))
NEEDS = {"forecasting": ["lightning"]}


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.filterwarnings("ignore::UserWarning:lightning")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_finds_both_versions_equal_and_trains(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for package in NEEDS.get(script.stem, []):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [str(script), "--quick"])
    runpy.run_path(str(script), run_name="__main__")
    printed = capsys.readouterr().out
    # `compare` raises an error if outputs or gradients differ.
    assert re.search(r"^equal: [1-9]\d* gradients and the output", printed, flags=re.MULTILINE)
    assert re.search(r"Stretto [\d.]+ ms per training step: [\d.]+ times as fast$", printed, flags=re.MULTILINE)


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from stretto import StrettoError

    monkeypatch.syspath_prepend(str(EXAMPLES))
    spec = importlib.util.spec_from_file_location("side_by_side", EXAMPLES / SHARED)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model, x = torch.nn.Linear(2, 2), torch.ones(3, 2)
    with pytest.raises(StrettoError, match="differs from the plain version"):
        module.compare(lambda: model(x), lambda: model(1.01 * x), model, quick=True)


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    content = nbformat.read(notebook, as_version=4)  # type: ignore[no-untyped-call]
    NotebookClient(content, timeout=None, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()


def test_examples_are_short_and_listed() -> None:
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert len(NOTEBOOKS) == 2
    for path in [*SCRIPTS, *NOTEBOOKS]:
        assert f"({path.relative_to(EXAMPLES)})" in listed
    assert not [path.name for path in SCRIPTS if len(path.read_text(encoding="utf-8").splitlines()) >= 100]
