"""What is published: a wheel and an sdist that pass twine's check, and work in an environment with nothing else."""

import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")

pytestmark = pytest.mark.slow


def _run(*words: object, cwd: Path, **environment: str) -> str:
    """What a command prints; none of our own modules or settings can be seen by it."""
    ours = ("PYTHONPATH", "STRETTO_CACHE", "STRETTO_DATA")
    env = {name: value for name, value in os.environ.items() if name not in ours} | environment
    done = subprocess.run([*map(str, words)], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel made from it alone."""
    pytest.importorskip("build", reason="the extra `dev` is not installed")
    folder = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def test_wheel_and_sdist_pass_twine_and_hold_the_product_alone(built: tuple[Path, Path]) -> None:
    pytest.importorskip("twine", reason="the extra `dev` is not installed")
    _run(sys.executable, "-m", "twine", "check", "--strict", *built, cwd=built[0].parent)
    names = set(zipfile.ZipFile(built[1]).namelist())
    assert {"stretto/py.typed", "stretto/__init__.py", "stretto/cli/main.py"} <= names
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"stretto"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_an_empty_environment_without_a_compiler_runs_the_readme_and_a_whole_job(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    place = tmp_path / "empty"
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    # The same release as here: others may bring gigabytes for a GPU.
    release = torch.__version__.partition("+")[0]
    _run(python, "-m", "pip", "install", "--quiet", f"torch=={release}", f"{built[1]}[handwriting]", cwd=tmp_path)
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    bare = {"PATH": str(place / "bin"), "STRETTO_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    (tmp_path / "readme.py").write_text(
        "\n".join(re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)), encoding="utf-8"
    )
    said = _run(python, "readme.py", cwd=tmp_path, **bare)
    assert "no C++ compiler was found" in said
    assert "without buckets" in said
    stretto = place / "bin" / "stretto"
    assert "no C++ compiler was found" in _run(stretto, "doctor", cwd=tmp_path, **bare)
    small = ["--epochs", "1", "--hidden-size", "4", "--batch-size", "64"]
    said = _run(stretto, "train", "label-steps", *small, "--out", "run", "--log", "csv", cwd=tmp_path, **bare)
    assert "pip install 'stretto[report]'" in said
    assert (tmp_path / "run" / "updates.csv").exists()
    _run(stretto, "export", "run", "--to", "c", cwd=tmp_path, **bare)
    assert (tmp_path / "run.c").exists()
    (tmp_path / "ink.py").write_text(
        "import numpy as np\n"
        "t = np.linspace(0, 6, 120)\n"
        "x = np.column_stack([np.diff(30 * t, prepend=0), np.diff(9 * np.sin(5 * t), prepend=0), t % 2 > 1.9])\n"
        "np.savez('ink.npz', x=x.astype(np.float32), offsets=np.array([0, len(x)]))\n",
        encoding="utf-8",
    )
    _run(python, "ink.py", cwd=tmp_path, **bare)
    _run(stretto, "inspect", "ink.npz", cwd=tmp_path, **bare)
