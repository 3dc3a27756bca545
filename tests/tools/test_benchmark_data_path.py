"""tools/benchmark_data_path.py on a few processes and short trajectories: the contents of its tables."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_rank_gets_the_tokens_of_its_part_and_fewer_bytes_than_those_of_all() -> None:
    sizes = ("--ranks", "2", "4", "--per-rank", "4", "--tokens", "800", "--tensor", "1")
    tool = str(ROOT / "tools/benchmark_data_path.py")
    done = subprocess.run([sys.executable, tool, *sizes], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()]
    found = {(row[0], row[1]): row[2:] for row in rows if len(row) == 6 and row[0].isdigit()}
    held = {key: int(cells[-1].replace(",", "")) for key, cells in found.items()}
    assert held["2", "all to all"] == 2 * 4 * 803 and held["4", "all to all"] == 4 * 4 * 803
    assert held["2", "divided"] == held["4", "divided"] == 4 * 803
    received = {key: float(cells[0]) for key, cells in found.items()}
    for ranks in ("2", "4"):
        assert 0 < received[ranks, "divided"] < received[ranks, "all to all"]
    broadcasts = [row for row in rows if len(row) == 3 and row[0].isdigit()]
    assert [row[0] for row in broadcasts] == ["2", "4", "8"] and all(float(row[2]) > 0 for row in broadcasts)
