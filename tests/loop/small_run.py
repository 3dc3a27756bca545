"""A run of the real program that is over in seconds: random tiny model, seven facts, real retrieval."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import yaml

from megatron_stppo.environments.retrieval import BM25Retriever
from tests.rollout.tiny import build_model

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
CAPITALS = ("Paris", "Rome", "Oslo", "Lima", "Cairo", "Accra", "Quito")


def write(root: Path) -> Path:
    """Model (and one with experts), index, tasks and configuration under `root`; the configuration's path."""
    build_model(root / "model")
    build_model(root / "experts", "qwen3_moe")
    corpus = [
        {"id": str(i), "contents": f'"{name}"\n{name} is a capital.'} for i, name in enumerate(CAPITALS)
    ]
    BM25Retriever.build(corpus, root / "index")
    rows = [
        {
            "data_source": "test",
            "prompt": [{"role": "user", "content": f"Which city is number {i}?"}],
            "reward_model": {"style": "rule", "ground_truth": {"target": [name]}},
            "extra_info": {"split": "train", "index": i},
        }
        for i, name in enumerate(CAPITALS)
    ]
    (root / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "run": {"name": "small", "root": str(root / "runs"), "iterations": 6, "checkpoint_every": 3},
        "model": {"path": str(root / "model")},
        "parallel": {"tensor": 2},
        "data": {"train": str(root / "tasks.jsonl"), "evaluate": str(root / "tasks.jsonl")},
        "environment": {
            "max_turns": 1,
            "max_observation_tokens": 24,
            "retrieval": {"index": str(root / "index"), "topk": 1},
        },
        "rollout": {
            "tasks_per_iteration": 4,
            "max_turn_tokens": 8,
            "max_prompt_tokens": 64,
            "kv_cache_gib": 0.05,
            "overlap_tools": False,
        },
        "update": {"minibatches": 2, "epochs": 2, "actor": {"lr": 1e-3}, "critic": {"lr": 1e-3}},
        "algorithm": {"whiten": False, "kl_coefficient": 0.01},
    }
    path = root / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def run(command: str, config: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command((command, str(config), *arguments))


def train_until(path: Path, config: Path, *arguments: str) -> None:
    """Kills the training, all ranks at once and without warning, as soon as `path` exists."""
    command = [*TORCHRUN, "--nproc-per-node=2", "-m", "megatron_stppo", "train", str(config), *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRONMENT, start_new_session=True
    ) as process:
        deadline = time.monotonic() + 240
        while not path.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        # torchrun gives each rank a session of its own: killing its group would leave them alive
        ranks = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        for pid in (process.pid, *ranks):
            os.kill(pid, signal.SIGKILL)
    assert path.exists()


def run_command(arguments: tuple[str, ...], ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """The door under torchrun, as a user starts it."""
    return subprocess.run(
        [*TORCHRUN, f"--nproc-per-node={ranks}", "-m", "megatron_stppo", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env=ENVIRONMENT,
        check=False,
    )
