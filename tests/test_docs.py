"""What the documentation says must be true: every Python block runs, pages build, the tree is the tree."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stretto.cli.main import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted([*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")])
ON_RANKS = "init_process_group"
"""A block with this word runs under torchrun, in two processes."""


def blocks(page: Path) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


WITH_CODE = [page for page in PAGES if blocks(page)]
DISTRIBUTED = [page for page in WITH_CODE if any(ON_RANKS in block for block in blocks(page))]
# The examples of extending are run one by one below, the programs of frameworks in tests/integrations.
ONE_BY_ONE = ("extending", "frameworks")
PLAIN = [page for page in WITH_CODE if page not in DISTRIBUTED and page.stem not in ONE_BY_ONE]


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("page", PLAIN, ids=lambda page: page.stem)
def test_the_python_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": page.stem}
    for block in blocks(page):
        exec(compile(block, page.name, "exec"), names)


@pytest.mark.slow
@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=f"{page.stem}-{number}")
        for page in DISTRIBUTED
        for number, block in enumerate(blocks(page))
    ],
)
def test_the_blocks_for_ranks_run_under_torchrun(block: str, tmp_path: Path) -> None:
    script = tmp_path / "own_loop.py"
    script.write_text(block, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "--local-addr=127.0.0.1", "--log-dir", str(tmp_path / "log"), "--redirects", "3", str(script)],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    # A file for each rank's output: in one pipe the pieces of two lines may mix.
    printed = "".join(file.read_text() for file in sorted((tmp_path / "log").rglob("std*.log")))
    assert done.returncode == 0, done.stderr + printed
    assert sorted(set(re.findall(r"^rank (\d):", printed, flags=re.MULTILINE))) == ["0", "1"]
    # Data-parallel ranks end with the same weights.
    weights = re.findall(r"^rank \d: weights (\S+)$", printed, flags=re.MULTILINE)
    assert len(set(weights)) <= 1


@pytest.mark.slow
def test_the_documentation_builds_strictly(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "site" / "batches" / "index.html").exists()


def test_pages_import_from_folders_and_no_deeper() -> None:
    deep = re.compile(r"(?:from|import) (stretto\.\w+\.\w+)")
    assert not [(page.name, found) for page in PAGES for block in blocks(page) for found in deep.findall(block)]


def test_every_page_of_the_manual_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert not [page for page in pages if page not in navigation]


@pytest.mark.parametrize(
    ("title", "said"),
    [
        ("A cell", "hoisted"),
        ("A backend", "counting [7]"),
        ("A solver", "picard within "),
        ("An optimiser", "peak 0.0020 at update 7"),
    ],
)
def test_every_example_of_extending_runs_by_itself(title: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    section = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
    (example,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    torch.manual_seed(0)
    exec(compile(example, "extending.md", "exec"), {"__name__": "example"})
    assert said in capsys.readouterr().out


def test_the_task_of_extending_is_at_most_60_lines_and_trains_with_its_own_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    (example,) = re.findall(r'```python\n("""rising.py.*?)```', page, flags=re.DOTALL)
    assert example.count("\n") <= 60
    monkeypatch.chdir(tmp_path)
    Path("rising.py").write_text(example, encoding="utf-8")
    flags = ["--epochs", "2", "--batch-size", "8", "--hidden-size", "8", "--backend", "torch"]
    assert main(["train", "rising.py:Rising", *flags, "--summary", "mean"]) == 0
    assert "accuracy" in capsys.readouterr().out
    result = json.loads(Path("runs/rising-001/result.json").read_text(encoding="utf-8"))
    assert (result["settings"]["summary"], result["epochs"]) == ("mean", 2)
    assert Path("runs/rising-001/report.html").exists()


def test_the_tree_of_the_readme_is_the_tree() -> None:
    tree = README.partition("src/stretto/\n")[2].partition("bench/")[0]
    named = {line.split()[0].rstrip("/") for line in tree.splitlines() if line.startswith("  ")}
    package = ROOT / "src" / "stretto"
    real = {path.name for path in package.iterdir() if not path.name.startswith("_") and path.suffix in ("", ".py")}
    assert named == real


@pytest.mark.parametrize("command", ["make run", "make test"])
def test_the_readme_shows_the_two_commands(command: str) -> None:
    assert command in README
    assert re.search(rf"^{command.split()[1]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)


def test_no_source_file_has_a_vague_name() -> None:
    files = [path for folder in ("src", "bench", "experiments") for path in (ROOT / folder).rglob("*.py")]
    assert not [path for path in files if path.stem in {"utils", "util", "helpers", "helper", "common", "misc"}]
