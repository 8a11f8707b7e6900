"""What the documentation says must be true."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_documentation_builds_strictly(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "site" / "bucketing" / "index.html").exists()


def test_the_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    kernels, batches = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    names: dict[str, object] = {}
    for example, said in ((kernels, "hoisted"), (batches, "padding")):
        exec(compile(example, "README.md", "exec"), names)
        assert said in capsys.readouterr().out
    assert names["batch"].features_BTF.shape[0] == len(names["batch"].lengths)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("parallel-in-time", "iterations="),
        ("multigrid", "levels of"),
        ("newton", "solver='newton'"),
        ("large-batch", "16.0 4.0 3.2\ngrow 64 0.2 changes to 64"),
    ],
)
def test_the_examples_of_the_pages_run(name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    names: dict[str, object] = {}
    for example in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
        exec(compile(example, f"{name}.md", "exec"), names)
    assert said in capsys.readouterr().out


def test_the_tree_of_the_readme_is_the_tree() -> None:
    tree = README.partition("src/stretto/\n")[2].partition("```")[0]
    named = {line.split()[0].rstrip("/") for line in tree.splitlines() if line.startswith("  ")}
    package = ROOT / "src" / "stretto"
    real = {path.name for path in package.iterdir() if not path.name.startswith("_") and path.suffix in ("", ".py")}
    assert named == real


@pytest.mark.parametrize("command", ["make run", "make test"])
def test_the_readme_shows_the_two_commands(command: str) -> None:
    target = command.split()[1]
    assert command in README
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)


def test_no_source_file_has_a_vague_name() -> None:
    files = [path for folder in ("src", "bench", "experiments") for path in (ROOT / folder).rglob("*.py")]
    assert not [path for path in files if path.stem in {"utils", "util", "helpers", "helper", "common", "misc"}]
