"""Run one trainer on one case, and read the seconds and tokens of every iteration from its report."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tools.peers.cases import SAMPLES, STEPS, TASKS, TRAJECTORIES, Case, Start
from tools.peers.game import question

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT = 1800.0  # timeout of one run, in seconds


def trl(python: Path, folder: Path, model: Path, case: Case, start: Start, iterations: int) -> dict[str, Any]:
    """Run TRL; return {"iterations": [{generation, seconds, written, read}], "versions": {..}}.

    The first iteration is left out. Raises RuntimeError with the end of the output if TRL fails.
    """
    given = {
        "model": str(model),
        "threads": start.threads,
        "amount": start.amount,
        "turns": case.turns,
        "turn_tokens": case.turn_tokens,
        "tasks": TASKS,
        "samples": SAMPLES,
        "trajectories": TRAJECTORIES,
        "steps": STEPS,
        "iterations": iterations,
    }
    specification, result = folder / "trl.json", folder / "trl-result.json"
    specification.write_text(json.dumps(given))
    result.unlink(missing_ok=True)
    script = [str(HERE / "trl_side.py"), str(specification), str(result)]
    _start([str(python)], script, start, folder / "trl.log", {})
    return json.loads(result.read_text())


def ours(folder: Path, model: Path, case: Case, start: Start, iterations: int) -> dict[str, Any]:
    """Run megatron_stppo; return the same record as `trl`."""
    rows = [
        {
            "data_source": "peers",
            "prompt": [{"role": "user", "content": question(number)}],
            "reward_model": {"style": "rule", "ground_truth": {"target": ["-"]}},
        }
        for number in range(TASKS)
    ]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "ours.yaml").write_text(yaml.safe_dump(config(folder, model, case, start, iterations)))
    metrics = folder / "ours" / "metrics.jsonl"
    shutil.rmtree(metrics.parent, ignore_errors=True)  # a run's name cannot be used twice
    script = ["-m", "megatron_stppo", "train", str(folder / "ours.yaml")]
    path = os.pathsep.join([str(HERE), str(ROOT)])
    _start([sys.executable], script, start, folder / "ours.log", {"PYTHONPATH": path})
    return {"iterations": [_row(json.loads(line)) for line in metrics.read_text().splitlines()][1:]}


def config(folder: Path, model: Path, case: Case, start: Start, iterations: int) -> dict[str, Any]:
    """Return the configuration of our run: GRPO as TRL computes it, without KL and entropy terms."""
    optimizer = {"lr": 1e-6, "warmup_fraction": 0.0, "weight_decay": 0.0, "betas": [0.9, 0.999]}
    return {
        "run": {
            "name": "ours",
            "root": str(folder),
            "iterations": iterations,
            "checkpoint_every": iterations,
        },
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": str(folder / "tasks.jsonl")},
        "environment": {
            "kind": "our_environment:factory",
            "max_turns": case.turns,
            "max_observation_tokens": 100,
        },
        "rollout": {
            "tasks_per_iteration": TASKS,
            "samples_per_task": SAMPLES,
            "max_turn_tokens": case.turn_tokens,
            "max_prompt_tokens": 128,
            "max_context": 1000,
        },
        "update": {"minibatches": STEPS, "actor": optimizer}
        | ({"tokens_per_microbatch": start.amount} if start.amount else {}),
        "algorithm": {"preset": "grpo", "kl_coefficient": 0.0, "entropy_coefficient": 0.0},
    }


def _row(row: dict[str, Any]) -> dict[str, float]:
    """Return one row of metrics.jsonl in the format of TRL's side."""
    generation = row["seconds/rollout"]
    return {
        "generation": generation,
        "seconds": row["seconds"],
        "written": round(row["rollout/tokens_per_second"] * generation),
    }


def _start(
    python: Sequence[str], script: Sequence[str], start: Start, log: Path, variables: dict[str, str]
) -> None:
    if start.processes > 1:
        python = [*python, "-m", "torch.distributed.run", "--standalone"]
        python = [*python, "--nproc-per-node", str(start.processes)]
    variables = os.environ | variables | {"OMP_NUM_THREADS": str(start.threads), "HF_HUB_OFFLINE": "1"}
    with log.open("w") as file:
        done = subprocess.run(
            [*python, *script], env=variables, stdout=file, stderr=subprocess.STDOUT, timeout=LIMIT, cwd=ROOT
        )
    if done.returncode:
        last = "\n".join(log.read_text().splitlines()[-15:])
        raise RuntimeError(f"{log}: exit code {done.returncode}; its last lines:\n{last}")
