"""Check a configuration before a model is built: files, layout, divisibility.

Every function raises ConfigError with field, value and remedy. Uses no process group: every
rank checks on its own and gets the same result.
"""

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_stppo.base.files import check_absent
from megatron_stppo.config import Config, ConfigError, user_code
from megatron_stppo.config.algorithm import GROUPED
from megatron_stppo.config.section import Rule, enforce
from megatron_stppo.config.update import rules
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.validation import lora, model_folder, passed_on
from megatron_stppo.validation.model_layout import check_engine, check_parallel
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
SERVED = ("train", "verify", "plan")  # by replicas, with serving.replicas; other commands have own engines


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
        check_output(config)
    layout = check_parallel(config, world_size)
    if command == "plan" or plays(config, command):
        check_engine(config if command in SERVED else config.changed(serving={"replicas": None}), world_size)
        check_context(config)
    if command in (*ROLLS_OUT, "cold-start"):
        model_folder.check_chat_template(config)
    if command in ("train", "rollout", "verify", "plan"):
        enforce(_rewards(config))
    if command in ("train", "verify", "plan"):
        enforce(_batches(config, layout))
    if command in ("train", "replay", "verify", "plan"):
        model_folder.check_reference(config, layout, tokenizers=command != "plan")
    if command == "train":
        check_reporters(config)
    enforce(rules(config.update, config.algorithm))
    enforce((*_steps(config), *_critic(config, command)))
    lora.check(config)
    passed_on.check_megatron(config)
    passed_on.check_vllm(config)
    _check_own_functions(config)


def check_replica(config: Config, ranks: int) -> None:
    """Run the checks of `serve`, for a replica of this many ranks."""
    tensor = config.engine_tensor
    enforce(
        (
            Rule(
                config.serving.replicas is None,
                "serving.replicas=null: the run's own ranks serve, so that it needs no replica",
                "start it with serving.replicas=1 or more",
            ),
            Rule(
                ranks != tensor,
                f"rollout.engine_tensor={tensor}: a replica has that many ranks, and {ranks} were started",
                f"start {tensor}, or give rollout.engine_tensor={ranks}",
            ),
        )
    )
    model_folder.check_model(config)
    model_folder.check_tokenizer(config)
    model_folder.check_chat_template(config)
    check_engine(config, ranks)
    check_context(config)


def data_files(config: Config, command: str) -> tuple[str, ...]:
    """Return the fields of `data:` that the command reads. Example: ("train", "evaluate")."""
    during = ("evaluate",) if command == "train" and config.run.evaluate_every else ()
    after = ("train",) if command == "cold-start" and plays(config, command) else ()
    return DATA[command] + during + after


def plays(config: Config, command: str) -> bool:
    """Return whether the command plays episodes."""
    cold = command == "cold-start" and config.cold_start.episodes > 0 and config.data.train is not None
    return cold or command in ROLLS_OUT


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


def check_output(config: Config) -> None:
    """Check cold_start.output, which must be new: what it has may be the result of hours."""
    output, model = config.cold_start.output, config.model
    if output is None:
        raise ConfigError("cold_start.output: missing; give the folder the trained model is written to")
    check_folder("cold_start.output", output)
    for field, folder in (
        ("model.path", model.path),
        ("model.lora.path", model.lora.path),
        ("model.reference_path", model.reference_path),
        ("model.critic_path", model.critic_path),
    ):
        if folder is not None and output.exists() and output.resolve() == folder.resolve():
            raise ConfigError(f"cold_start.output={output}: is {field}; name another folder")
    check_absent("cold_start.output", output)


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
        user_code.named(f"algorithm.advantage={a.advantage}", a.advantage, modules, "advantage")
    if a.loss is not None and a.own_loss:
        user_code.named(f"algorithm.loss={a.loss}", a.loss, modules, "loss")
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


def _steps(config: Config) -> Iterator[Rule]:
    """Return the rules about the optimizer steps, the log-probs that they compare, and the experts.

    Those of the engine are of the tokens that nucleus sampling keeps, the trainer's of the whole vocabulary.
    """
    a, update, top_p = config.algorithm, config.update, config.rollout.top_p
    behaviour, steps = a.old_policy == "behaviour", update.epochs * update.minibatches
    compares = "old_policy=behaviour" if behaviour else f"mismatch={a.mismatch}"
    yield Rule(
        top_p < 1 and (behaviour or a.mismatch != "off"),
        f"rollout.top_p={top_p}: algorithm.{compares} compares the engine's log-probs, which are those of "
        "the tokens that nucleus sampling keeps, with the trainer's",
        "set rollout.top_p=1",
    )
    factors = steps if a.rate_profile is None else len(a.rate_profile)
    yield Rule(
        factors != steps,
        f"algorithm.rate_profile={a.rate_profile}: has {factors} factors, but an iteration has update.epochs="
        f"{update.epochs} * update.minibatches={update.minibatches} = {steps} optimizer steps",
        f"give {steps} factors, or change the number of steps",
    )
    serving = config.serving
    yield Rule(
        serving.replicas is not None and serving.update == "recompute" and config.replays_rollout,
        "serving.update=recompute with algorithm.routing_replay=rollout: the tokens of a turn would have "
        "experts of several versions",
        "set serving.update=drain or complete, or algorithm.routing_replay=old_policy",
    )


def _critic(config: Config, command: str) -> Iterator[Rule]:
    """Return the rules about settings of the critic, which the run must have, and train beside an actor."""
    update, rank = config.update, config.model.lora.rank
    begins = config.model.critic_path if command in ("train", "replay", "verify", "plan") else None
    for name, value, neutral in (
        ("update.critic_only", update.critic_only, 0),
        ("update.critic_steps", update.critic_steps, 1),
        ("update.critic.frozen_attention", update.critic.frozen_attention, False),
        ("model.critic_path", begins, None),
    ):
        yield Rule(
            value != neutral and not config.needs_critic,
            f"{name}={value} with algorithm.advantage={config.algorithm.advantage}: there is no critic",
            "leave it out, or choose a preset with a critic such as algorithm.preset=st_ppo",
        )
    yield Rule(
        update.critic.frozen_attention and rank > 0,
        f"update.critic.frozen_attention=True with model.lora.rank={rank}: it is for a critic of which all "
        "other weights are trained",
        "set it to false",
    )
    yield Rule(
        command in ("train", "plan") and update.critic_only >= config.run.iterations,
        f"update.critic_only={update.critic_only} with run.iterations={config.run.iterations}: the actor "
        "would never learn",
        "choose fewer, or more iterations",
    )


def _rewards(config: Config) -> Iterator[Rule]:
    """Return the rules by which an episode can be too long, and a group without variance has no signal."""
    e, r, a = config.environment, config.rollout, config.algorithm
    most = (e.max_turns + 1) * r.max_turn_tokens
    if e.kind != "agent":  # whose episodes may have several histories
        most = min(most, config.max_context)
    yield Rule(
        a.overlong_from is not None and a.overlong_from >= most,
        f"algorithm.overlong_from={a.overlong_from}: an episode has at most {most} action tokens, by "
        "environment.max_turns, rollout.max_turn_tokens and rollout.max_context",
        "choose less, or null",
    )
    if not r.resample:
        return
    yield Rule(
        a.advantage in ("gae", "kl"),
        f"rollout.resample={r.resample} with algorithm.advantage={a.advantage}: a group of equal rewards has "
        "advantages there",
        "set rollout.resample=0, or a preset with groups such as algorithm.preset=grpo",
    )
    yield Rule(
        a.truncated == "mask",
        f"rollout.resample={r.resample} with algorithm.truncated=mask: groups are resampled by the rewards "
        "of all episodes, also of those that are masked",
        "set one of them to 0 or end",
    )
    yield Rule(
        r.samples_per_task == 1,
        f"rollout.resample={r.resample} with rollout.samples_per_task=1: a group of one never has variance",
        "choose rollout.samples_per_task=4 or more, or set rollout.resample=0",
    )


def _batches(config: Config, layout: Layout) -> Iterator[Rule]:
    r, advantage = config.rollout, config.algorithm.advantage
    engines = max(1, layout.world // config.engine_tensor)  # 0 with replicas that are larger than the trainer
    tasks, samples = r.tasks_per_iteration, r.samples_per_task
    yield Rule(
        advantage in GROUPED and samples == 1,
        "rollout.samples_per_task=1: a group of one has no learning signal with "
        f"algorithm.advantage={advantage}",
        "choose 4 or more",
    )
    yield Rule(
        config.serving.replicas is None and tasks % engines > 0,
        f"rollout.tasks_per_iteration={tasks} must be a multiple of the {engines} engine replicas",
        f"choose {_multiple(tasks, engines)}",
    )
    why = f"rollout.tasks_per_iteration={tasks} * rollout.samples_per_task={samples} = "
    yield divisible(config, layout, tasks * samples, why)


def divisible(config: Config, layout: Layout, trajectories: int, why: str = "") -> Rule:
    """Return the rule that trajectories can be divided equally among minibatches and ranks.

    `why`: the start of the error message, which explains the number of trajectories.
    """
    minibatches, parts = config.update.minibatches, config.update.minibatches * layout.data
    return Rule(
        trajectories % parts > 0,
        f"{why}{trajectories} trajectories must be a multiple of update.minibatches={minibatches} * "
        f"{layout.data} data-parallel ranks",
        f"choose {_multiple(trajectories, parts)} trajectories",
    )


def _multiple(value: int, of: int) -> str:
    low = value // of * of
    return f"{low} or {low + of}" if low else str(of)


@dataclass(frozen=True)
class Candidates:
    """Divisions of a number of GPUs between a trainer and replicas, as far as layout and batch allow.

    Example: 64 GPUs, a layout of 16 GPUs and engines of 8 give the trainers (16, 32) if the batch can be
    divided by 2 but not by 3 data-parallel ranks.
    """

    trainers: tuple[int, ...]  # GPUs of the trainer, ascending; the remaining ones serve
    left_out: tuple[str, ...]  # what is not possible, and why
    refusal: str  # why colocated training is not possible; empty if layout and batch allow it


def candidates(config: Config, gpus: int) -> Candidates:
    """Return the divisions in which every GPU trains or serves, with at least one replica.

    Raises ConfigError for a configuration that no division can have.
    """
    model_folder.check_model(config)
    check_engine(config, config.engine_tensor)
    check_context(config)
    parallel = config.parallel
    unit = parallel.tensor * parallel.context * parallel.pipeline
    batch = config.rollout.episodes
    trainers, uneven, left_out = list[int](), list[int](), list[str]()
    for trainer in range(unit, gpus, unit):
        if (gpus - trainer) % config.engine_tensor:
            continue
        try:
            layout = check_parallel(config, trainer)
        except ConfigError as error:
            left_out.append(f"{trainer} GPUs for training: {error}")
            continue
        model_folder.check_reference(config, layout, tokenizers=False)
        is_even = batch % (config.update.minibatches * layout.data) == 0
        (trainers if is_even else uneven).append(trainer)
    if uneven:
        left_out.append(
            f"{', '.join(map(str, uneven))} GPUs for training: the {batch} trajectories of a batch are not a "
            f"multiple of update.minibatches={config.update.minibatches} * data-parallel ranks"
        )
    if gpus <= unit:
        left_out.append(
            f"{gpus} GPUs: parallel.tensor * context * pipeline = {unit} GPUs train, and none is left for a "
            "replica"
        )
    refusal = ""
    try:
        check(config.changed(serving={"replicas": None}), gpus, "plan")
    except ConfigError as error:
        refusal = str(error)
    return Candidates(tuple(trainers), tuple(left_out), refusal)
