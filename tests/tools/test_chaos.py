from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_a_short_run_of_every_part_loses_nothing_and_writes_its_table(tmp_path: Path) -> None:
    report = tmp_path / "reliability.md"
    shutil.copy(ROOT / "docs" / "reliability.md", report)
    given = ("--kills", "1", "--examples", "100", "--calls", "2", "--output", str(report))
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "chaos.py"), *given],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, report.read_text() + done.stderr[-3000:]
    for part in ("| 2 of its ", "| 1 SIGKILLs of 4 ranks, ", "| 1 SIGKILLs: "):
        assert part in report.read_text()
