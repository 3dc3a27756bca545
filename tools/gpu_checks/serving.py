"""Run two iterations of the project that `megatron-stppo init` writes: engine, sleep, reshard, log-probs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu_checks import main
from gpu_checks.training import work

MISMATCH = 0.02  # nats per token; a small model in bfloat16 has 6e-4 on a CPU


def serving() -> dict[str, Any]:
    """Train two iterations: the engine sleeps, wakes and is written twice; both sides' log-probs agree."""
    folder = work() / "first"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
    }
    program = [sys.executable, "-m", "megatron_stppo"]
    _run([*program, "init", str(folder)], work(), environment)
    _run([sys.executable, "make_model.py"], folder, environment)
    settings = ["run.iterations=2", "run.name=check", "model.dtype=bfloat16", "run.evaluate_every=1"]
    settings += ["rollout.gpu_memory_utilization=0.3"]
    _run([*program, "train", "config.yaml", *settings], folder, environment)
    rows = [
        json.loads(line)
        for line in (folder / "runs/check/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    trained = [row for row in rows if "mismatch/mean_abs" in row]
    worst = max(row["mismatch/mean_abs"] for row in trained)
    if len(trained) != 2 or not worst < MISMATCH:
        raise AssertionError(
            f"{len(trained)} iterations of 2; engine and trainer differ by {worst} nats per token"
        )
    seconds = {name: trained[-1][name] for name in trained[-1] if name.startswith("seconds/")}
    return {"difference of log-probs, nats": worst, "ratio max": trained[-1]["actor/ratio_max"]} | seconds


def _run(line: list[str], folder: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        line, cwd=folder, env=environment, capture_output=True, text=True, check=False, encoding="utf-8"
    )
    print(done.stdout, done.stderr, flush=True)
    if done.returncode:
        raise AssertionError(f"exit status {done.returncode}: {' '.join(line)}")


if __name__ == "__main__":
    main(serving)
