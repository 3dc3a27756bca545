"""Check a configuration before a model is built: files, layout, divisibility.

Every function raises ConfigError with field, value and remedy. Uses no process group: every
rank checks on its own and gets the same result.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import os
from pathlib import Path

from megatron_stppo.config import Config, ConfigError, old_logprob, own_code, peft_folder
from megatron_stppo.config.algorithm import GROUPED
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.validation import lora, megatron_fields, model_folder, serving, vllm_fields
from megatron_stppo.validation.model_layout import check_engine, check_parallel
from megatron_stppo.weights.sharding.hf_files import head_of_critic
from megatron_stppo.weights.sharding.hf_names import read_shape

# The files of data.* that a command reads.
DATA = {
    "train": ("train",),
    "rollout": ("train",),
    "verify": ("train",),
    "replay": (),
    "evaluate": ("evaluate",),
    "cold-start": ("demonstrations",),
    "cold-start --critic": (),
    "convert": (),
    "audit": (),
    "check-layouts": (),
    "plan": (),
}
ROLLS_OUT = ("train", "rollout", "evaluate", "verify")
WRITES_RUN = (*ROLLS_OUT, "replay")


def check(config: Config, world_size: int, command: str) -> None:
    """Run all checks that `command`, a key of DATA, needs."""
    model_folder.check_model(config)
    if command != "plan":
        model_folder.check_tokenizer(config)
    if command in WRITES_RUN:
        check_folder("run.root", config.run.folder)
    for field in data_files(config, command):
        _data_file(f"data.{field}", getattr(config.data, field))
    if command.startswith("cold-start"):
        check_output(config, critic=command != "cold-start")
    layout = check_parallel(config, world_size)
    if command in (*ROLLS_OUT, "plan"):
        check_engine(config, world_size)
        check_context(config)
    if command in (*ROLLS_OUT, "cold-start"):
        model_folder.check_chat_template(config)
    if command in ("train", "rollout", "verify", "plan"):
        _overlong(config)
        _resample(config)
    if command in ("train", "verify", "plan"):
        _batches(config, layout)
    if command in ("train", "replay", "verify", "plan"):
        model_folder.check_reference(config, layout, tokenizers=command != "plan")
    if command == "train":
        check_reporters(config)
    refused = old_logprob.refusal(config.update, config.algorithm)
    if refused:
        raise ConfigError(refused)
    _check_nucleus(config)
    _check_profile(config)
    _check_critic(config, command)
    serving.check(config)
    lora.check(config)
    megatron_fields.check(config)
    vllm_fields.check(config)
    _check_own_functions(config)


def check_replica(config: Config, ranks: int) -> None:
    """Run the checks of `serve`, for a replica of this many ranks."""
    if config.serving.replicas is None:
        raise ConfigError(
            "serving.replicas=null: the run's own ranks serve, so that it needs no replica; start it with "
            "serving.replicas=1 or more"
        )
    tensor = config.engine_tensor
    if ranks != tensor:
        raise ConfigError(
            f"rollout.engine_tensor={tensor}: a replica has that many ranks, and {ranks} were started; start "
            f"{tensor}, or give rollout.engine_tensor={ranks}"
        )
    model_folder.check_model(config)
    model_folder.check_tokenizer(config)
    model_folder.check_chat_template(config)
    check_engine(config, ranks)
    check_context(config)


def data_files(config: Config, command: str) -> tuple[str, ...]:
    """Return the fields of `data:` that the command reads. Example: ("train", "evaluate")."""
    during = ("evaluate",) if command == "train" and config.run.evaluate_every else ()
    return DATA[command] + during


def check_folder(field: str, folder: Path) -> None:
    """Raise ConfigError unless `folder` is writable or can be created. Writes nothing."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        problem = f"{there} is not a folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        problem = f"no permission to write to {there}"
    else:
        return
    raise ConfigError(f"{field}={folder}: cannot be written, {problem}; name a folder that you may write to")


def check_output(config: Config, critic: bool = False) -> None:
    """Check cold_start.output. The output may replace an earlier one of the same kind, but nothing else."""
    output = config.cold_start.output
    if output is None:
        raise ConfigError("cold_start.output: missing; give the folder the trained model is written to")
    check_folder("cold_start.output", output)
    lora, model = config.model.lora, config.model
    for field, given in (
        ("model.path", model.path),
        ("model.lora.path", lora.path),
        ("model.reference_path", model.reference_path),
        *(() if critic else (("model.critic_path", model.critic_path),)),
    ):
        if given is not None and output.exists() and output.resolve() == given.resolve():
            raise ConfigError(f"cold_start.output={output}: is {field}; name another folder")
    kind, file = ("an adapter", peft_folder.SETTINGS) if lora.rank else ("a model", "config.json")
    fits = (output / file).is_file()
    if fits and not lora.rank:
        fits = (head_of_critic(output) == "value") == critic
    kind = "a critic" if critic else kind
    if output.is_dir() and any(output.iterdir()) and not fits:
        raise ConfigError(
            f"cold_start.output={output}: is not {kind} folder, and would be replaced; name another folder"
        )


def listener_token(host: str, token_env: str | None) -> str | None:
    """Return a server's bearer token. Raises ConfigError for a host that others can reach without a token."""
    token = os.environ.get(token_env, "") if token_env else None
    if token == "":
        raise ConfigError(f"--token-env={token_env}: that variable is not set; export it or leave it out")
    if token is None and not _is_loopback(host):
        raise ConfigError(
            f"--host={host}: other machines could reach it; give --token-env NAME, or bind 127.0.0.1"
        )
    return token


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a host name: its address is not known here
        return False


def _data_file(field: str, path: Path | None) -> None:
    if path is None:
        raise ConfigError(f"{field}: missing; give a .jsonl or .parquet file")
    if not path.is_file():
        raise ConfigError(f"{field}={path}: no such file; correct the path or build the data first")
    if path.stat().st_size == 0:
        raise ConfigError(f"{field}={path}: is empty; give at least one row")


def _check_own_functions(config: Config) -> None:
    """Check that the modules of algorithm.loss and algorithm.advantage exist; they are imported later."""
    a, modules = config.algorithm, config.environment.modules
    if a.own_advantage:
        own_code.named(f"algorithm.advantage={a.advantage}", a.advantage, modules, "advantage")
    if a.loss is not None and a.own_loss:
        own_code.named(f"algorithm.loss={a.loss}", a.loss, modules, "loss")
    if a.loss is not None and config.parallel.context > 1:
        raise ConfigError(
            f"parallel.context={config.parallel.context} with algorithm.loss={a.loss}: the function gets "
            "whole segments, whose tokens are then on several ranks; set parallel.context to 1"
        )


def check_context(config: Config) -> None:
    """Check that the model's context fits the longest trajectory, and that the longest prompt leaves room for
    a turn."""
    r, e = config.rollout, config.environment
    longest = read_shape(config.model.path).max_positions
    if config.max_context > longest:
        parts = (
            f"rollout.max_context={r.max_context}"
            if r.max_context is not None
            else f"rollout.max_prompt_tokens={r.max_prompt_tokens} + (environment.max_turns={e.max_turns} "
            f"+ 1) * (rollout.max_turn_tokens={r.max_turn_tokens} + environment.max_observation_tokens="
            f"{e.max_observation_tokens}) = {config.max_context}"
        )
        raise ConfigError(
            f"{parts} exceeds the model's max_position_embeddings={longest}; lower one of these fields"
            + ("" if r.max_context is not None else f", or set rollout.max_context={longest}")
        )
    needed = r.max_prompt_tokens + r.max_turn_tokens
    if config.max_context < needed:
        raise ConfigError(
            f"rollout.max_context={r.max_context} is less than rollout.max_prompt_tokens="
            f"{r.max_prompt_tokens} + rollout.max_turn_tokens={r.max_turn_tokens}; raise it to {needed} "
            "or more, or lower these two"
        )


def check_reporters(config: Config) -> None:
    """Raise ConfigError if the configuration needs a package that is not installed."""
    project = config.telemetry.wandb_project
    if project is not None and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"telemetry.wandb_project={project}: the package wandb is not installed; pip install wandb, or "
            "remove the field"
        )


def _check_nucleus(config: Config) -> None:
    """Refuse top_p below 1 where the loss compares log-probs of the engine and of the trainer.

    The engine's are of the tokens that nucleus sampling keeps; the trainer's are of the whole vocabulary.
    """
    top_p, algorithm = config.rollout.top_p, config.algorithm
    for setting, is_set in (
        ("old_policy=behaviour", algorithm.old_policy == "behaviour"),
        (f"mismatch={algorithm.mismatch}", algorithm.mismatch != "off"),
    ):
        if top_p < 1 and is_set:
            raise ConfigError(
                f"rollout.top_p={top_p}: algorithm.{setting} compares the engine's log-probs, which are "
                "those of the tokens that nucleus sampling keeps, with the trainer's; set rollout.top_p=1"
            )


def _check_critic(config: Config, command: str) -> None:
    """Raise ConfigError for settings of a critic that the run does not have."""
    update, advantage = config.update, config.algorithm.advantage
    for name, value, neutral in (
        ("update.critic_only", update.critic_only, 0),
        ("update.critic_steps", update.critic_steps, 1),
    ):
        if value != neutral and advantage != "gae":
            raise ConfigError(
                f"{name}={value} with algorithm.advantage={advantage}: there is no critic; set it to "
                f"{neutral}, or choose a preset with a critic such as algorithm.preset=st_ppo"
            )
    path = config.model.critic_path
    if path is not None and advantage != "gae" and command in ("train", "replay", "verify", "plan"):
        raise ConfigError(
            f"model.critic_path={path} with algorithm.advantage={advantage}: there is no critic; leave it "
            "out, or choose a preset with a critic such as algorithm.preset=st_ppo"
        )
    if update.critic.frozen_attention and (advantage != "gae" or config.model.lora.rank):
        rank = config.model.lora.rank
        given = f"model.lora.rank={rank}" if advantage == "gae" else f"algorithm.advantage={advantage}"
        raise ConfigError(
            f"update.critic.frozen_attention=True with {given}: it is for a critic of which all other "
            "weights are trained; set it to false"
        )
    if command in ("train", "plan") and config.update.critic_only >= config.run.iterations:
        raise ConfigError(
            f"update.critic_only={update.critic_only} with run.iterations={config.run.iterations}: the actor "
            "would never learn; choose fewer, or more iterations"
        )


def _check_profile(config: Config) -> None:
    profile, update = config.algorithm.rate_profile, config.update
    steps = update.epochs * update.minibatches
    if profile is not None and len(profile) != steps:
        raise ConfigError(
            f"algorithm.rate_profile={profile}: has {len(profile)} factors, but an iteration has "
            f"update.epochs={update.epochs} * update.minibatches={update.minibatches} = {steps} optimizer "
            f"steps; give {steps} factors, or change the number of steps"
        )


def _overlong(config: Config) -> None:
    """Check that an episode can have more action tokens than algorithm.overlong_from."""
    e, r, first = config.environment, config.rollout, config.algorithm.overlong_from
    most = (e.max_turns + 1) * r.max_turn_tokens
    if e.kind != "agent":  # whose episodes may have several histories
        most = min(most, config.max_context)
    if first is not None and first >= most:
        raise ConfigError(
            f"algorithm.overlong_from={first}: an episode has at most {most} action tokens, by "
            "environment.max_turns, rollout.max_turn_tokens and rollout.max_context; choose less, or null"
        )


def _resample(config: Config) -> None:
    """Check that a group without variance is one without a learning signal."""
    rollout, advantage = config.rollout, config.algorithm.advantage
    if rollout.resample and advantage in ("gae", "kl"):
        raise ConfigError(
            f"rollout.resample={rollout.resample} with algorithm.advantage={advantage}: a group of equal "
            "rewards has advantages there; set rollout.resample=0, or a preset with groups such as "
            "algorithm.preset=grpo"
        )
    if rollout.resample and config.algorithm.truncated == "mask":
        raise ConfigError(
            f"rollout.resample={rollout.resample} with algorithm.truncated=mask: groups are resampled by the "
            "rewards of all episodes, also of those that are masked; set one of them to 0 or end"
        )
    if rollout.resample and rollout.samples_per_task == 1:
        raise ConfigError(
            f"rollout.resample={rollout.resample} with rollout.samples_per_task=1: a group of one never has "
            "variance; choose rollout.samples_per_task=4 or more, or set rollout.resample=0"
        )


def _batches(config: Config, layout: Layout) -> None:
    advantage = config.algorithm.advantage
    if advantage in GROUPED and config.rollout.samples_per_task == 1:
        raise ConfigError(
            "rollout.samples_per_task=1: a group of one has no learning signal with "
            f"algorithm.advantage={advantage}; choose 4 or more"
        )
    tasks, replicas = config.rollout.tasks_per_iteration, layout.world // config.engine_tensor
    if config.serving.replicas is None and tasks % replicas:
        raise ConfigError(
            f"rollout.tasks_per_iteration={tasks} must be a multiple of the {replicas} engine replicas; "
            f"choose {_multiple(tasks, replicas)}"
        )
    samples = config.rollout.samples_per_task
    check_trajectories(
        config,
        layout,
        tasks * samples,
        f"rollout.tasks_per_iteration={tasks} * rollout.samples_per_task={samples} = ",
    )


def check_trajectories(config: Config, layout: Layout, trajectories: int, why: str = "") -> None:
    """Raise ConfigError unless the trajectories can be divided equally among minibatches and ranks.

    `why`: the start of the error message, which explains the number of trajectories.
    """
    parts = config.update.minibatches * layout.data
    if trajectories % parts:
        raise ConfigError(
            f"{why}{trajectories} trajectories must be a multiple of "
            f"update.minibatches={config.update.minibatches} * {layout.data} data-parallel ranks; "
            f"choose {_multiple(trajectories, parts)} trajectories"
        )


def _multiple(value: int, of: int) -> str:
    low = value // of * of
    return f"{low} or {low + of}" if low else str(of)
