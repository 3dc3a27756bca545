"""The settings of TRL's GRPO that all our comparisons with it have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def common(given: dict[str, Any], share: int, rows: int, output: Path) -> dict[str, Any]:
    """Return arguments of GRPOConfig.

    given: the specification, with `steps` (optimizer steps per iteration), `iterations` and `samples` per
    prompt. share: trajectories per optimizer step and process, of which `rows` are in a forward pass.
    """
    return {
        "output_dir": str(output),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": share // rows,
        "steps_per_generation": share // rows * given["steps"],
        "num_generations": given["samples"],
        "max_steps": given["iterations"] * given["steps"],
        "max_completion_length": 1000,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "seed": 0,
    }
