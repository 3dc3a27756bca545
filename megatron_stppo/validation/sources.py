"""Check that a run's folder has what `replay` or `rollout` reads, and that the output folder is free.

Uses neither torch nor a process group: every rank checks on its own and gets the same result.
"""

from pathlib import Path

from megatron_stppo.checkpoint import step_folder
from megatron_stppo.config import Config, ConfigError
from megatron_stppo.validation import lora
from megatron_stppo.validation.attempts import CONFIG
from megatron_stppo.validation.run_folder import check_model, check_new, check_step, check_tokens

RECORDS = {"rollouts": "trajectories", "batches": "dumps"}  # what is replayed, and its folder


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
