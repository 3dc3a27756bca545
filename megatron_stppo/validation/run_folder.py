"""Check that a run's folder is free for a new run, holds a run that can be resumed, or has what `replay`,
`rollout` and other commands read of a run.

Uses neither torch nor a process group: every rank checks on its own and gets the same result.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from megatron_stppo.base.printing import did_you_mean
from megatron_stppo.checkpoint import step_folder
from megatron_stppo.cluster.exits import is_first_rank
from megatron_stppo.config import Config, ConfigError
from megatron_stppo.config.file import read_yaml
from megatron_stppo.data.text.tokenizer_files import different
from megatron_stppo.observe.console import say
from megatron_stppo.observe.run_files import read_rows
from megatron_stppo.validation import lora, model_folder
from megatron_stppo.validation.attempts import CONFIG
from megatron_stppo.weights.sharding.hf_names import read_shape

# Files and folders whose loss would lose results of a run.
WRITTEN = ("metrics.jsonl", "trajectories", "dumps", "checkpoints")
RECORDS = {"rollouts": "trajectories", "batches": "dumps"}  # what is replayed, and its folder


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
    if any((folder / name).exists() for name in (CONFIG, "checkpoints")):
        return _check_checkpoint(config)
    names = [path.parent.name for path in sorted(run.root.glob(f"*/{CONFIG}"))]
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
    rows = read_rows(config.run.folder / "metrics.jsonl")
    return any(row["iteration"] == step and "evaluate/exact_match" in row for row in rows)


class _Written(msgspec.Struct):
    """What a checkpoint's state.json has of models and ledger."""

    trainers: dict[str, Any]  # by role
    shape: dict[str, Any]
    tokenizer: dict[str, str]  # digests
    ledger: dict[str, Any] | None = None  # of an asynchronous run: replicas/trainer/ledger.py


def check_step(config: Config, run: Path, field: str, checkpoint: str | None) -> None:
    """Raise ConfigError unless the folder `run` holds `checkpoint`, "latest" or "step_N", of the model and
    the tokenizer in model.path; None needs none.

    `field`: the field or option that the error names.
    """
    if checkpoint is None:
        return
    folder = run / "checkpoints"
    steps = sorted(path.name for path in folder.glob("step_*") if path.name.removeprefix("step_").isdigit())
    if checkpoint not in (*steps, "latest") or not steps:
        raise ConfigError(
            f"{field}={checkpoint}: not in {folder}; choose from {steps or 'none: train first'}"
        )
    check_model(config, run, checkpoint)


def check_model(config: Config, run: Path, checkpoint: str = "latest") -> _Written | None:
    """Raise ConfigError unless model.path has the shape and the tokenizer of a run's checkpoint.

    Return what the checkpoint records, None if there is none that can be read, which loading it reports.
    """
    checkpoints, written = run / "checkpoints", None
    latest = checkpoint == "latest"
    for step in step_folder.candidates(checkpoints) if latest else [step_folder.number(checkpoint)]:
        with suppress(step_folder.Damaged, OSError, ValueError):
            path = checkpoints / f"step_{step}"
            written = msgspec.convert(step_folder.read_state(path), _Written)
            break
    if written is None:
        return None
    model = config.model.path
    shape = json.loads(json.dumps(asdict(read_shape(model))))  # with lists instead of tuples
    both = written.shape.keys() & shape.keys() - {"max_positions"}  # other versions have other fields
    if others := [name for name in both if written.shape[name] != shape[name]]:
        name = min(others)
        raise ConfigError(
            f"model.path={model}: its {name}={shape[name]!r}, that of {path} is {written.shape[name]!r}; "
            f"{_remedy(model, run)}"
        )
    if other := different(written.tokenizer, model):
        raise ConfigError(
            f"model.path={model}: its {other} differs from that of {path}; {_remedy(model, run)}"
        )
    return written


def check_tokens(config: Config, field: str, run: Path) -> None:
    """Raise ConfigError if the token ids in the records of a run are of other tokens than in model.path, as
    far as the run's own model is here. field: the argument that names the run."""
    own = model_of(run)
    if own is not None and (own / "tokenizer.json").is_file():
        model_folder.check_same_tokens("model.path", config.model.path, f"{field}={run}", own)


def model_of(run: Path) -> Path | None:
    """Return model.path of a run's newest attempt, None if its folder does not have it: that of a converted
    model."""
    section = read_yaml(run / CONFIG, "config").get("model") if (run / CONFIG).is_file() else None
    path = section.get("path") if isinstance(section, dict) else None
    return Path(path) if isinstance(path, str) else None


def with_own_model(config: Config, overrides: list[str]) -> Config:
    """Return the configuration with the model of the run in its folder, unless an override names another.

    The file may have changed since the run, or be another one with its run.name. A model that is no longer
    where the run had it is that of the file.
    """
    own, of_file = model_of(config.run.folder), config.model.path
    if own is None or not own.is_dir() or own.resolve() == of_file.resolve():
        return config
    if any(text.startswith("model.path=") for text in overrides):
        return config
    say(f"model.path={own}, that of the run in {config.run.folder}, not {of_file}", is_first_rank())
    return config.changed(model={"path": own})


def _remedy(model: Path, run: Path) -> str:
    own = model_of(run)
    if own is None:
        return "give the model that the run began with, or another run.name"
    if own.resolve() == model.resolve():
        return "restore the files of the run's model, or give another run.name"
    return f"give the run's model, model.path={own}, or another run.name"


def _check_checkpoint(config: Config) -> None:
    run = config.run.folder
    written = check_model(config, run)
    if written is None:
        return
    wanted = "a critic" if config.needs_critic else "no critic"
    held = "a critic" if "critic" in written.trainers else "no critic"
    if wanted != held:
        raise ConfigError(
            f"algorithm.advantage={config.algorithm.advantage}: trains {wanted}, the newest checkpoint in "
            f"{run} holds {held}; set algorithm as the run had it, or give another run.name"
        )
    if written.ledger is not None:
        check_resumed(config, written.ledger)


def check_resumed(config: Config, book: Mapping[str, Any]) -> None:
    """Raise ConfigError unless a run with this ledger in its checkpoint can continue with `config`."""
    if config.serving.replicas is not None:
        rollout = config.rollout
        return check_open(book, rollout.tasks_per_iteration, rollout.samples_per_task)
    if book["trained"]:
        raise ConfigError(
            f"serving.replicas=null: the checkpoint's run has trained {len(book['trained'])} tasks before "
            "others that were drawn earlier (serving.order=completion); resume with serving.replicas"
        )


def check_open(book: Mapping[str, Any], tasks: int, samples: int) -> None:
    """Raise ConfigError if a ledger has open groups, in batches of other than `tasks` groups of `samples`."""
    if book["first"] == book["next"]:
        return
    for field, kept, mine in (
        ("tasks_per_iteration", book["tasks"], tasks),
        ("samples_per_task", book["samples"], samples),
    ):
        if kept != mine:
            raise ConfigError(
                f"rollout.{field}={mine}: the checkpoint has admitted groups of a run with {kept}; resume "
                f"with rollout.{field}={kept}"
            )


def _holds_something(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.exists() and path.stat().st_size > 0


def config_of(run: Path) -> Path:
    """Return the path of a run's configuration. Raises ConfigError if `run` is not a run's folder."""
    if not (run / CONFIG).is_file():
        raise ConfigError(f"RUN_DIR={run}: holds no {CONFIG}; give a run's folder, such as runs/NAME")
    return run / CONFIG


def check_replay(config: Config, records: str, run: Path, start: str | None) -> None:
    """Raise ConfigError unless the folder `run` has records to replay, and our folder is new."""
    check_source(config, "RUN_DIR", run, start)
    check_tokens(config, "RUN_DIR", run)
    if records == "rollouts" and config.replays_rollout:
        raise ConfigError(
            "algorithm.routing_replay=rollout: trajectories/ does not contain the experts that the engine "
            "chose; replay --records batches of a run with run.dump=all, or set it to old_policy or off"
        )
    folder = run / RECORDS[records]
    if not any(folder.glob("iteration-*")):
        remedy = "choose another run" if records == "rollouts" else "that run needed run.dump=faults or all"
        raise ConfigError(f"RUN_DIR={run}: {folder.name}/ holds no iteration to replay; {remedy}")


def check_audit(config: Config, run: Path) -> None:
    """Raise ConfigError unless the trainer can compute the log-probs that the run's engine reported.

    The folder of model.lora.path is checked if it exists. Only version 0 needs it.
    """
    if config.rollout.top_p < 1:
        raise ConfigError(
            f"rollout.top_p={config.rollout.top_p}: the engine's log-probs are of the tokens that nucleus "
            "sampling keeps, which the trainer does not know; only runs with rollout.top_p=1 can be audited"
        )
    if not any((run / RECORDS["rollouts"]).glob("iteration-*")):
        raise ConfigError(f"RUN_DIR={run}: trajectories/ holds no iteration to audit; choose another run")
    check_model(config, run)
    check_tokens(config, "RUN_DIR", run)
    if has_start(config):
        lora.check(config)


def check_pretraining(config: Config, run: Path) -> None:
    """Raise ConfigError unless the episodes of the folder `run` can train a critic of all weights."""
    if config.model.lora.rank:
        raise ConfigError(
            f"--critic with model.lora.rank={config.model.lora.rank}: the critic shares the actor's weights "
            "and has no folder of its own; use update.critic_only instead, or set model.lora.rank=0"
        )
    if not config.needs_critic:
        raise ConfigError(
            f"--critic with algorithm.advantage={config.algorithm.advantage}: there is no critic; choose a "
            "preset with a critic such as algorithm.preset=st_ppo"
        )
    if config.model.reference_path is not None and config.needs_reference:
        raise ConfigError(
            f"--critic with model.reference_path={config.model.reference_path}: the run's returns would "
            "contain the KL penalty to that model, and the recorded ones do not; leave one of them out"
        )
    if not any((run / RECORDS["rollouts"]).glob("iteration-*")):
        raise ConfigError(f"--critic={run}: holds no trajectories/ of a run; record some with `rollout`")
    check_tokens(config, "--critic", run)


def has_start(config: Config) -> bool:
    """Return whether the weights with which a run began can be read."""
    return config.model.lora.path is None or config.model.lora.path.is_dir()


def check_left(config: Config, source: Path, start: str) -> None:
    """Raise ConfigError if the checkpoint `start` of `source` was written after run.iterations or more."""
    latest = start == "latest"
    done = step_folder.candidates(source / "checkpoints")[0] if latest else step_folder.number(start)
    if done >= config.run.iterations:
        raise ConfigError(
            f"run.iterations={config.run.iterations}: --start={start} of {source} has finished "
            f"{done} iterations, so nothing is left to play; give run.iterations={done + 1} or more"
        )


def check_source(config: Config, field: str, source: Path, start: str | None) -> None:
    """Raise ConfigError unless `source` is a run's folder with the checkpoint `start`, and ours is new.

    `field`: the argument that names the folder in an error.
    """
    if not source.is_dir():
        raise ConfigError(f"{field}={source}: no such folder; give a run's, such as runs/NAME")
    check_step(config, source, "--start", start)
    check_new(config)
