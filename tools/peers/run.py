"""Run one trainer on one case: seconds and tokens of every iteration from its report, and its peak memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from tools import processes
from tools.peers.cases import STEPS, TASKS, Case, Side, Start
from tools.peers.game import question
from tools.processes import ROOT

HERE = Path(__file__).parent
LIMIT = 1800.0  # timeout of one run, in seconds
EVERY = 0.5  # seconds between two measurements of memory
PINNED = {"trl": "1.16.0", "torch": "2.13.0", "transformers": "5.19.0", "peft": "0.21.2"}
FOLDER = ROOT / ".venv-peers"


def install() -> Path:
    """Return the Python that has TRL. Create its environment first if it does not exist."""
    python, stamp = FOLDER / "bin" / "python", FOLDER / "installed.json"
    if not stamp.exists() or json.loads(stamp.read_text(encoding="utf-8")) != PINNED:
        print(f"installing TRL into {FOLDER}", file=sys.stderr, flush=True)
        venv.create(FOLDER, with_pip=True)
        wanted = [f"{name}=={version}" for name, version in PINNED.items()]
        processes.run([python, "-m", "pip", "install", "--quiet", *wanted])
        stamp.write_text(json.dumps(PINNED), encoding="utf-8")
    return python


def trl(folder: Path, case: Case, side: Side, start: Start, iterations: int) -> dict[str, Any]:
    """Run TRL; return {"iterations": [{generation, seconds, written, read}], "memory": bytes, ..}.

    The first iteration is left out. Raises RuntimeError with the end of the output if TRL fails.
    """
    given = {
        "model": str(folder / "model"),
        "lora": side.lora,
        "threads": start.threads,
        "amount": start.amount,
        "turns": case.turns,
        "turn_tokens": case.turn_tokens,
        "tasks": TASKS,
        "samples": case.samples,
        "trajectories": case.trajectories,
        "steps": STEPS,
        "iterations": iterations,
        "episodes": None,
        "rewards": None,
    }
    return trained_by_trl(given, folder, start)


def trained_by_trl(given: Mapping[str, Any], folder: Path, start: Start) -> dict[str, Any]:
    """Run trl_side.py; return what it has written, and the peak of its memory."""
    specification, result = folder / "trl.json", folder / "trl-result.json"
    specification.write_text(json.dumps(given), encoding="utf-8")
    result.unlink(missing_ok=True)
    memory = _start([install()], [HERE / "trl_side.py", specification, result], start, folder / "trl.log", {})
    return json.loads(result.read_text(encoding="utf-8")) | {"memory": memory}


def ours(folder: Path, case: Case, side: Side, start: Start, iterations: int) -> dict[str, Any]:
    """Run megatron_stppo; return the same record as `trl`."""
    rows = [
        {
            "data_source": "peers",
            "prompt": [{"role": "user", "content": question(number)}],
            "reward_model": {"style": "rule", "ground_truth": {"target": ["-"]}},
        }
        for number in range(TASKS)
    ]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "ours.yaml").write_text(
        yaml.safe_dump(config(folder, case, side, start, iterations)), encoding="utf-8"
    )
    metrics = folder / "ours" / "metrics.jsonl"
    shutil.rmtree(metrics.parent, ignore_errors=True)  # a run's name cannot be used twice
    script = ["-m", "megatron_stppo", "train", folder / "ours.yaml"]
    memory = _start([sys.executable], script, start, folder / "ours.log", {"PYTHONPATH": str(HERE)})
    rows = [_row(json.loads(line)) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return {"iterations": rows[1:], "memory": memory}


def config(folder: Path, case: Case, side: Side, start: Start, iterations: int) -> dict[str, Any]:
    """Return the configuration of our run: without KL and entropy terms, as TRL computes GRPO.

    The only checkpoint, which TRL does not write, follows the last measured iteration and takes no memory.
    """
    optimizer = {"lr": 1e-6, "warmup_fraction": 0.0, "weight_decay": 0.0, "betas": [0.9, 0.999]}
    return {
        "run": {
            "name": "ours",
            "root": str(folder),
            "iterations": iterations,
            "checkpoint_every": iterations,
            "async_checkpoints": False,
        },
        "model": {"path": str(folder / "model"), "dtype": "float32", "lora": {"rank": side.lora}},
        "data": {"train": str(folder / "tasks.jsonl")},
        "environment": {
            "kind": "our_environment:factory",
            "max_turns": case.turns,
            "max_observation_tokens": 100,
            "after_end": "text",  # no turn ends with an end-of-text token
        },
        "rollout": {
            "tasks_per_iteration": TASKS,
            "samples_per_task": case.samples,
            "max_turn_tokens": case.turn_tokens,
            "max_prompt_tokens": 128,
            "max_context": 1000,
            "kv_cache_gib": 0.5,  # enough for all trajectories of every case
        },
        "update": {"minibatches": STEPS, "actor": optimizer}
        | ({"tokens_per_microbatch": start.amount} if start.amount else {}),
        "algorithm": {"preset": side.preset, "kl_coefficient": 0.0, "entropy_coefficient": 0.0},
    }


def _row(row: dict[str, Any]) -> dict[str, float]:
    """Return one row of metrics.jsonl in the format of TRL's side."""
    written = row["rollout/action_tokens"]
    return {
        "generation": row["seconds/rollout"],
        "seconds": row["seconds"],
        "written": written,
        "read": row["rollout/tokens"] - written,
    }


def _start(
    python: Sequence[str | Path],
    script: Sequence[str | Path],
    start: Start,
    log: Path,
    variables: dict[str, str],
) -> int:
    """Run a trainer; return the peak of its memory in bytes: the resident pages of all its processes.

    A page that processes share counts once for each. Their shares of it (PSS) take so long to read that the
    trainer would become slower.
    """
    if start.processes > 1:
        python = [*python, "-m", "torch.distributed.run", "--standalone"]
        python = [*python, "--nproc-per-node", str(start.processes)]
    variables = processes.variables(
        variables | {"OMP_NUM_THREADS": str(start.threads), "HF_HUB_OFFLINE": "1"}
    )
    peak, code, end = 0, None, time.monotonic() + LIMIT
    with (
        log.open("wb") as file,
        processes.started(
            [*python, *script], env=variables, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT
        ) as program,
    ):
        while code is None and time.monotonic() < end:
            peak = max(peak, sum(map(_resident, processes.tree(program))))
            with suppress(psutil.TimeoutExpired):
                code = program.wait(EVERY)
    if code != 0:
        what = f"no end after {LIMIT:.0f} s" if code is None else f"exit status {code}"
        raise RuntimeError(f"{log}: {what}; its last lines:{processes.last_lines(log)}")
    return peak


def _resident(process: psutil.Process) -> int:
    with suppress(psutil.NoSuchProcess):
        return int(process.memory_info().rss)
    return 0
