"""Adapters that the package `peft` writes and reads; `make test-agents` installs it and runs these tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ranks import run_ranks
from tests.training.update import adapting, layouts, test_layouts

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(ROOT.glob(".venv-peft/lib/python*/site-packages"))
NATS = 1e-5  # float32

pytestmark = [
    pytest.mark.skipif(not PACKAGES, reason="needs .venv-peft: make test-agents"),
    pytest.mark.timeout(600),
]


def peft(*arguments: str) -> dict[str, torch.Tensor]:
    """Run peft_program.py with the package, and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.peft_program", *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, *PACKAGES)))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr[-3000:]
    return {name: torch.tensor(values) for name, values in json.loads(done.stdout).items()}


def step(folder: Path, parallel: dict[str, int], path: str | None = None) -> torch.Tensor:
    """Return the log-probs of the trainer with the adapters of `path`, or random ones, exported to peft/."""
    given = (str(folder / "model"), parallel, False, test_layouts.ST_PPO, str(folder))
    results = run_ranks(adapting.steps, 2, *given, "all-linear", "none", path, timeout=300)
    return torch.tensor(results[0]["own"])


def compare(trainer_T: torch.Tensor, theirs: dict[str, torch.Tensor]) -> None:
    apart = {name: float((trainer_T - of_peft_T).abs().max()) for name, of_peft_T in theirs.items()}
    print(f"largest difference over {len(trainer_T)} tokens, in nats: {apart}")
    assert apart["adapter"] < NATS and apart["merged"] < NATS < 1000 * NATS < apart["base"]


def test_an_adapter_that_peft_has_written_gives_the_log_probs_of_peft(tmp_path: Path) -> None:
    layouts.write_model(tmp_path / "model")
    theirs = peft("write", str(tmp_path / "model"), str(tmp_path / "given"))
    compare(step(tmp_path, {"pipeline": 2}, str(tmp_path / "given")), theirs)


def test_peft_reads_the_adapters_of_the_trainer_and_gets_its_log_probs(tmp_path: Path) -> None:
    layouts.write_model(tmp_path / "model")
    trainer_T = step(tmp_path, {"tensor": 2})
    compare(trainer_T, peft("read", str(tmp_path / "model"), str(tmp_path / "peft")))
