"""The front page's program runs as it is printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parent.parent / "README.md"


def test_the_complete_program_runs_on_two_ranks(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.S)
    (program,) = (block for block in blocks if block.startswith("# train.py"))
    (tmp_path / "train.py").write_text(program, "utf-8")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(tmp_path / "train.py")]
    done = subprocess.run(run, capture_output=True, text=True, timeout=240, cwd=PAGE.parent)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"^loss 0\.\d{4}$", done.stdout, re.M) and "zfx schedule: 2 ranks" in done.stdout
