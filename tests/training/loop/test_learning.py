"""Examples learn: four iterations of the real program on two ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.loop.small_run import ENVIRONMENT, ROOT, torchrun

QUICKSTART = ROOT / "examples" / "quickstart"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learning") / "data"
    build = [sys.executable, str(QUICKSTART / "build.py"), "--output", str(folder), "--tokens", "0"]
    subprocess.run(build, check=True, capture_output=True, env=ENVIRONMENT)
    return folder


@pytest.mark.parametrize("example", ["quickstart", "own_algorithm"])
def test_an_example_learns_in_four_iterations(data: Path, example: str) -> None:
    """The quickstart with the seeds 0 to 5: from 0.373 to 0.907 on average, standard deviation 0.004.

    own_algorithm uses a loss and an advantage of its own, without a critic, and passes options to vLLM and
    megatron. With 228 questions the standard error of an evaluation is at most 0.033. The quickstart ends at
    0.004 with negated advantages, at 0.373 with a learning rate of 1e-12. If the engine keeps its first
    weights, the run ends with an error.
    """
    given = [
        *("run.iterations=4", "run.evaluate_every=4", "evaluate.samples=1", "run.checkpoint_every=100"),
        f"run.root={data.parent}/runs",
        f"model.path={QUICKSTART}/model",
        *(f"data.{name}={data}/{name}.jsonl" for name in ("train", "evaluate")),
        f"environment.retrieval.index={data}/index",
    ]
    train = [*torchrun(), "train", str(ROOT / "examples" / example / "config.yaml"), *given]
    done = subprocess.run(train, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = data.parent / "runs" / example / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    before, after = (row["evaluate/exact_match"] for row in rows if "evaluate/exact_match" in row)
    assert after - before > 0.4, (before, after)
