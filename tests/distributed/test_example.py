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
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "this_file.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    weights = re.findall(r"weights (-?[\d.]+)", done.stdout)
    assert len(weights) == 2
    assert weights[0] == weights[1]
