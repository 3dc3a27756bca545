"""Check that a run's folder is free for a new run, or holds a run that can be resumed.

Uses neither torch nor a process group: every rank checks on its own and gets the same result.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from megatron_stppo.base.printing import did_you_mean
from megatron_stppo.checkpoint import step_folder
from megatron_stppo.config import Config, ConfigError
from megatron_stppo.observe import rows
from megatron_stppo.validation import serving
from megatron_stppo.weights.sharding.hf_names import read_shape

# Files and folders whose loss would lose results of a run.
WRITTEN = ("metrics.jsonl", "trajectories", "dumps", "checkpoints")


def check_new(config: Config, remedy: str = "give another run.name") -> None:
    """Raise ConfigError if the run's folder holds records or checkpoints, which would be overwritten."""
    folder = config.run.folder
    held = [name for name in WRITTEN if _holds_something(folder / name)]
    if held:
        raise ConfigError(f"run.name={config.run.name}: {folder} holds {', '.join(held)}; {remedy}")


def check_resume(config: Config) -> None:
    """Raise ConfigError unless the run's folder holds a run that `config` can resume.

    The run may have no checkpoint yet. If it has one, model and critic must be as in `config`, and the
    episodes that an asynchronous run has admitted must fit.
    """
    run, folder = config.run, config.run.folder
    if any((folder / name).exists() for name in ("config.yaml", "checkpoints")):
        return _check_checkpoint(config, folder / "checkpoints")
    names = [path.parent.name for path in sorted(run.root.glob("*/config.yaml"))]
    asked = did_you_mean(run.name, names, "run.name={}")
    hint = f"{asked} To start a new run," if asked else "to start one,"
    raise ConfigError(f"run.name={run.name}: --resume, but {folder} holds no run; {hint} leave --resume out")


def finished(config: Config) -> int | None:
    """Return the iteration of the newest checkpoint if no later one is to be trained, else None.

    None if its evaluation failed and was not repeated, or if the checkpoint lacks a file: then loading it
    falls back to an earlier one. Contents are not compared.
    """
    run, checkpoints = config.run, config.run.folder / "checkpoints"
    try:
        step = step_folder.latest(checkpoints)
        step_folder.inspect(path := checkpoints / f"step_{step}")
        owes = run.evaluate_every and step_folder.OWED in step_folder.read_state(path)
        return step if step >= run.iterations and not (owes and not _evaluated(config, step)) else None
    except (step_folder.Damaged, OSError, ValueError):
        return None


def _evaluated(config: Config, step: int) -> bool:
    """Return whether metrics.jsonl has the evaluation of an iteration."""
    found = rows.read(config.run.folder / "metrics.jsonl")
    return any(row["iteration"] == step and "evaluate/exact_match" in row for row in found)


class _Written(msgspec.Struct):
    """What a checkpoint's state.json has of models and ledger."""

    trainers: dict[str, Any]  # by role
    shape: dict[str, Any]
    ledger: dict[str, Any] | None = None  # of an asynchronous run: replicas/trainer/ledger.py


def _check_checkpoint(config: Config, checkpoints: Path) -> None:
    try:
        path = checkpoints / f"step_{step_folder.latest(checkpoints)}"
        written = msgspec.convert(step_folder.read_state(path), _Written)
    except (step_folder.Damaged, OSError, ValueError):
        return  # there is no checkpoint yet, or it is damaged, which loading it reports
    shape = json.loads(json.dumps(asdict(read_shape(config.model.path))))  # with lists instead of tuples
    for name in sorted(written.shape.keys() - {"max_positions"}):
        if written.shape[name] != shape.get(name):
            raise ConfigError(
                f"model.path={config.model.path}: its {name}={shape.get(name)!r}, that of {path} is "
                f"{written.shape[name]!r}; give the model that the run began with, or another run.name"
            )
    wanted = "a critic" if config.needs_critic else "no critic"
    found = "a critic" if "critic" in written.trainers else "no critic"
    if wanted != found:
        raise ConfigError(
            f"algorithm.advantage={config.algorithm.advantage}: trains {wanted}, {path} holds {found}; "
            "set algorithm as the run had it, or give another run.name"
        )
    if written.ledger is not None:
        serving.check_resumed(config, written.ledger)


def _holds_something(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.exists() and path.stat().st_size > 0
