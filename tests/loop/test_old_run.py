"""Today's code continues, reports and replays a run that an older version wrote (tests/fixtures/old_run)."""

from __future__ import annotations

import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from megatron_stppo.telemetry import rows
from tests.forking import stand_in
from tests.loop.small_run import ENVIRONMENT

FIXTURE = Path(__file__).parents[1] / "fixtures" / "old_run"
TRAINED = (
    "actor/objective", "actor/gradient_norm", "actor/kl_to_old", "critic/loss", "critic/gradient_norm",
    "reward/mean", "rollout/tool_calls", "rollout/called_tool", "mismatch/mean_abs", "kl/reference",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the model, the tasks, the configuration, the environment and the run runs/first."""
    with tarfile.open(FIXTURE / "run.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    (tmp_path / "environment.py").write_text((FIXTURE / "environment.py").read_text())
    return tmp_path


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [stand_in.python(), "-m", "megatron_stppo", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
        env=ENVIRONMENT | {"PYTHONPATH": str(folder)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def written(run: Path) -> list[dict[str, Any]]:
    """Return the rows as they are in the file, without today's names for old columns."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_run_has_the_old_names(folder: Path) -> None:
    assert [row["rollout/searches"] for row in written(folder / "runs/first")] == [1.0, 1.0]


def test_an_old_run_is_resumed_and_its_rows_get_the_new_names(folder: Path) -> None:
    done = command(folder, "train", "config.yaml", "run.iterations=3", "--resume")
    assert "resumed from step_2" in done.stderr
    found = written(folder / "runs/first")
    assert [row["iteration"] for row in found] == [1, 2, 3]
    assert [row["rollout/tool_calls"] for row in found] == [1.0] * 3
    assert [row["rollout/called_tool"] for row in found] == [1.0] * 3
    assert not [name for row in found for name in row if "search" in name]
    assert found[2]["actor/gradient_norm"] > 0
    assert found[2]["mismatch/mean_abs"] < 1e-5, "the engine has the checkpoint's weights"
    assert (folder / "runs/first/checkpoints/step_3").is_dir()


def test_an_old_run_is_reported_with_the_new_names(folder: Path) -> None:
    command(folder, "report", "runs/first")
    page = (folder / "runs/first/report.html").read_text()
    assert '"rollout/tool_calls":[[1,2],[1.0,1.0]]' in page
    assert page.count('"tool_calls":1,') == 8, "episodes"
    assert '"rollout/search' not in page


def test_replayed_rollouts_of_an_old_run_give_its_numbers(folder: Path) -> None:
    command(folder, "replay", "runs/first", "run.name=again")
    found, recorded = (rows.read(folder / "runs" / name / "metrics.jsonl") for name in ("again", "first"))
    for row, expected in zip(found, recorded, strict=True):
        assert {name: row[name] for name in TRAINED} == pytest.approx(
            {name: expected[name] for name in TRAINED}, rel=1e-3, abs=1e-6
        )
