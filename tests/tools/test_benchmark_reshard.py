"""tools/benchmark_reshard.py on two ranks and a model of a few megabytes: the contents of its JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    sizes = ["--layers", "2", "--hidden", "256", "--vocab", "300", "--rounds", "2"]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [sys.executable, *launch, str(ROOT / "tools/benchmark_reshard.py"), *sizes, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_every_pair_moves_the_minimum_and_is_timed_against_lower_bounds(tmp_path: Path) -> None:
    done = run("--output", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["pair"] for row in rows] == ["tensor=2:1", "pipeline=2:2", "data=2:2"]
    for row in rows:
        assert row["moved"] == row["bound"] and row["ratio"] == 1 and row["kept"] > 0
        assert (row["moved"] > 0) == ("plain" in row["times"])
        assert {"local copies", "reshard"} <= set(row["times"])
        assert all(0 < low <= middle <= high for low, middle, high in row["times"].values())


def test_a_pair_without_an_engine_is_refused() -> None:
    assert "--pairs 'tensor=2' is not TRAINING:ENGINE" in run("--pairs", "tensor=2").stderr


def test_a_model_that_cannot_be_divided_is_refused() -> None:
    said = run("--hidden", "128").stderr  # one head
    assert "\nparallel.tensor=2 must divide model.num_attention_heads=1" in "\n" + said
