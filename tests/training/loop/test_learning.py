"""The quickstart learns: four iterations of the real program on two ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.training.loop.small_run import ENVIRONMENT, ROOT, torchrun

QUICKSTART = ROOT / "examples" / "quickstart"


def exact_match(folder: Path, *overrides: str) -> tuple[float, float]:
    """Return the held-out exact match before and after four iterations of the quickstart."""
    build = [sys.executable, str(QUICKSTART / "build.py"), "--output", str(folder / "data"), "--tokens", "0"]
    subprocess.run(build, check=True, capture_output=True, env=ENVIRONMENT)
    given = [
        *("run.iterations=4", "run.evaluate_every=4", "evaluate.samples=1", "run.checkpoint_every=100"),
        f"run.root={folder}/runs",
        f"model.path={QUICKSTART}/model",
        *(f"data.{name}={folder}/data/{name}.jsonl" for name in ("train", "evaluate", "demonstrations")),
        f"environment.retrieval.index={folder}/data/index",
        *overrides,
    ]
    train = [*torchrun(), "train", str(QUICKSTART / "config.yaml"), *given]
    done = subprocess.run(train, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (folder / "runs/quickstart/metrics.jsonl").read_text().splitlines()]
    before, after = (row["evaluate/exact_match"] for row in rows if "evaluate/exact_match" in row)
    return before, after


def test_the_quickstart_learns_in_four_iterations(tmp_path: Path) -> None:
    """Seeds 0 to 5: from 0.373 to 0.907 on average, standard deviation 0.004, on one machine.

    With 228 questions the standard error of an evaluation is at most 0.033. Four iterations with negated
    advantages end at 0.004, with a learning rate of 1e-12 at 0.373. If the engine keeps its first weights,
    the run ends with an error.
    """
    before, after = exact_match(tmp_path)
    assert after - before > 0.4, (before, after)
