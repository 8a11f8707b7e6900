"""The example of the documentation, run as it says."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "workers.md"


def test_the_loop_of_the_documentation_runs_on_two_workers(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(example.splitlines()) <= 40
    (tmp_path / "this_file.py").write_text(example, encoding="utf-8")
    # A file for each worker's output: in one pipe the pieces of two lines may mix.
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    apart = ["--redirects", "3", "--log-dir", "logs"]
    done = subprocess.run(
        [*launch, *apart, "this_file.py"], cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False
    )
    printed = {path: path.read_text(encoding="utf-8") for path in sorted((tmp_path / "logs").rglob("std*.log"))}
    assert done.returncode == 0, (done.stderr, printed)
    lines = "".join(text for path, text in printed.items() if path.name == "stdout.log")
    weights = dict(re.findall(r"^rank (\d): weights (-?[\d.]+)$", lines, flags=re.MULTILINE))
    assert sorted(weights) == ["0", "1"]
    assert weights["0"] == weights["1"]
