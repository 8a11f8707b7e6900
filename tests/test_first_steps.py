"""The first steps of a new user: from an empty cache to an accelerated update, also as a user without a home."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FIRST_UPDATE = """
import torch

import stretto

torch.manual_seed(0)
model = stretto.accelerate(torch.nn.Sequential(torch.nn.GRU(3, 8, batch_first=True)))
optimizer = torch.optim.Adam(model.parameters())
before = [weight.detach().clone() for weight in model.parameters()]
y_BTH, _ = model(torch.randn(4, 20, 3))
y_BTH.square().mean().backward()
optimizer.step()
assert all(not torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
print(stretto.explain(model))
"""
CAPABILITY = "dac_read_search"
"""To read whatever the tests themselves are read from, such as root's own Python, and to write none of it."""
ANOTHER = [
    *"setpriv --reuid=65534 --regid=65534 --clear-groups".split(),
    f"--inh-caps=-all,+{CAPABILITY}",
    f"--ambient-caps=-all,+{CAPABILITY}",
]


def _run(*words: str, environment: dict[str, str], without: tuple[str, ...] = ()) -> "subprocess.CompletedProcess[str]":
    kept = {name: value for name, value in os.environ.items() if name not in ("STRETTO_CACHE", *without)}
    return subprocess.run(
        words, env=kept | environment, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_an_empty_cache_is_no_obstacle_to_the_first_update(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    done = _run(sys.executable, "-c", FIRST_UPDATE, environment={"STRETTO_CACHE": str(cache)})
    assert done.returncode == 0, done.stderr
    assert "GRU" in done.stdout
    if "cpp" in done.stdout:
        assert list((cache / "kernels").iterdir())


def _can_be_another() -> bool:
    if not hasattr(os, "getuid") or os.getuid() != 0 or shutil.which("setpriv") is None:
        return False
    return subprocess.run([*ANOTHER, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not _can_be_another(), reason="only root, with setpriv, can be another user")
@pytest.mark.parametrize("home", ["none", "missing", "closed"])
def test_a_user_without_a_home_of_his_own_trains_and_asks_the_doctor(home: str, tmp_path: Path) -> None:
    temporary, closed = tmp_path / "tmp", tmp_path / "closed"
    temporary.mkdir()
    temporary.chmod(0o1777)
    closed.mkdir(mode=0o755)
    environment = {"TMPDIR": str(temporary), "PYTHONDONTWRITEBYTECODE": "1"}
    if home != "none":
        environment["HOME"] = str(closed if home == "closed" else "/nonexistent")
    without = ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
    python = [*ANOTHER, sys.executable]
    trained = _run(*python, "-W", "error", "-c", FIRST_UPDATE, environment=environment, without=without)
    assert trained.returncode == 0, trained.stderr
    assert "cpp" in trained.stdout or shutil.which("c++") is None
    doctor = _run(*python, "-m", "stretto", "doctor", environment=environment, without=without)
    said = doctor.stdout + doctor.stderr
    assert "Traceback" not in said
    assert f"{temporary}/stretto-65534" in said.replace("\n                   ", "")
    private = temporary / "stretto-65534"
    assert (private.stat().st_uid, private.stat().st_mode & 0o777) == (65534, 0o700)
    assert not list(closed.iterdir())
