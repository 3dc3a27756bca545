"""What can be known to fail before a model is built: files, layout, divisibility.

Every function raises ConfigError naming field, value and remedy. No torch, no process group: all ranks reach
the same verdict on their own.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import os
from dataclasses import asdict
from pathlib import Path

from tokenizers import Tokenizer

from megatron_stppo.config import Config, ConfigError, ParallelConfig
from megatron_stppo.model.hf_names import read_shape
from megatron_stppo.model.mlp_spans import check_experts
from megatron_stppo.model.spans import check_layout, check_stages
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.runtime import megatron_fields, reporters

# The files of data.* that a command reads.
DATA = {
    "train": ("train",),
    "rollout": ("train",),
    "replay": (),
    "evaluate": ("evaluate",),
    "cold-start": ("demonstrations",),
    "convert": (),
    "check-invariance": (),
    "plan": (),
}
ROLLS_OUT = ("train", "rollout", "evaluate")
# What a run's folder holds once the run has something to lose.
WRITTEN = ("metrics.jsonl", "trajectories", "dumps", "checkpoints")


def check(config: Config, world_size: int, command: str) -> None:
    """Everything below, for one command: a key of DATA."""
    _model(config)
    if command != "plan":
        _tokenizer(config)
    for field in data_files(config, command):
        _data_file(f"data.{field}", getattr(config.data, field))
    if command == "cold-start" and config.cold_start.output is None:
        raise ConfigError("cold_start.output: missing; give the folder the trained model is written to")
    layout = check_parallel(config, world_size)
    if command in (*ROLLS_OUT, "plan"):
        check_engine(config, world_size)
        _context(config)
    if command in ROLLS_OUT:
        _chat_template(config)
    if command in ("train", "plan"):
        _batches(config, layout)
    if command == "train":
        reporters.check(config)
    megatron_fields.check(config)


def data_files(config: Config, command: str) -> tuple[str, ...]:
    """The fields of data: that the command reads. Example: ("train", "evaluate")."""
    during = ("evaluate",) if command == "train" and config.run.evaluate_every else ()
    return DATA[command] + during


def check_checkpoint(config: Config, checkpoint: str | None) -> None:
    """Raises ConfigError unless it is None, latest or step_N, and there."""
    if checkpoint is not None:
        check_step(config.run.folder, "checkpoint", checkpoint)


def check_step(run: Path, field: str, checkpoint: str) -> None:
    """Raises ConfigError unless the run's folder holds the checkpoint, which `field` names: latest or
    step_N."""
    folder = run / "checkpoints"
    steps = sorted(path.name for path in folder.glob("step_*") if path.name.removeprefix("step_").isdigit())
    if checkpoint not in (*steps, "latest") or not steps:
        raise ConfigError(
            f"{field}={checkpoint}: not in {folder}; choose from {steps or 'none: train first'}"
        )


def check_new(config: Config, remedy: str = "give another run.name") -> None:
    """Raises ConfigError if the run's folder holds records or checkpoints of a run: they would be
    overwritten."""
    folder = config.run.folder
    held = [name for name in WRITTEN if _holds_something(folder / name)]
    if held:
        raise ConfigError(f"run.name={config.run.name}: {folder} holds {', '.join(held)}; {remedy}")


def check_resume(config: Config) -> None:
    """Raises ConfigError unless the run's folder holds a run, with or without a checkpoint."""
    run, folder = config.run, config.run.folder
    if any((folder / name).exists() for name in ("config.yaml", "checkpoints")):
        return
    names = [path.parent.name for path in sorted(run.root.glob("*/config.yaml"))]
    near = difflib.get_close_matches(run.name, names, 1)
    hint = f"did you mean run.name={near[0]}? To start a new run," if near else "to start one,"
    raise ConfigError(f"run.name={run.name}: --resume, but {folder} holds no run; {hint} leave --resume out")


def _holds_something(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.exists() and path.stat().st_size > 0


def with_fitting_layout(config: Config, world_size: int) -> Config:
    """Return `config`, or where its `parallel` does not fit the ranks a copy in which every rank holds the
    whole model. For `convert`: what it reads and writes is the same under every layout."""
    if Layout.fits(world_size, config.parallel):
        return config
    return config.model_copy(update={"parallel": ParallelConfig()})


def listener_token(host: str, token_env: str | None) -> str | None:
    """The bearer token of a listener. Raises ConfigError for a host others can reach without one."""
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
    except ValueError:  # a name: where it leads is not known here
        return False


def _model(config: Config) -> None:
    for field, folder in (("model.path", config.model.path), ("model.critic_path", config.model.critic_path)):
        if folder is None:
            continue
        if not folder.is_dir():
            raise ConfigError(
                f"{field}={folder}: no such folder; give a Hugging Face checkpoint (config.json, "
                "tokenizer.json, *.safetensors)"
            )
        read_shape(folder)
    if config.model.critic_path is not None:
        _same_network(config.model.path, config.model.critic_path)


def _same_network(actor: Path, critic: Path) -> None:
    """A critic is built in the actor's shape; a rotary base of its own, say, would be lost without a word."""
    wanted, given = asdict(read_shape(actor)), asdict(read_shape(critic))
    for name in sorted(wanted.keys() - {"tied", "max_positions"}):
        if given[name] != wanted[name]:
            raise ConfigError(
                f"model.critic_path={critic}: its {name}={given[name]!r}, model.path's is {wanted[name]!r}; "
                "give a checkpoint of the same architecture, or leave it out"
            )


def _tokenizer(config: Config) -> None:
    path = config.model.path / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"model.path={config.model.path}: holds no tokenizer.json; add the model's own")
    try:
        Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust library raises no narrower type
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"model.path={config.model.path}: tokenizer.json is not a tokenizer ({reason}); "
            "copy it again from the model's source"
        ) from None


def _data_file(field: str, path: Path | None) -> None:
    if path is None:
        raise ConfigError(f"{field}: missing; give a .jsonl or .parquet file")
    if not path.is_file():
        raise ConfigError(f"{field}={path}: no such file; correct the path or build the data first")
    if path.stat().st_size == 0:
        raise ConfigError(f"{field}={path}: is empty; give at least one row")


def _context(config: Config) -> None:
    longest = read_shape(config.model.path).max_positions
    if config.max_context > longest:
        raise ConfigError(
            f"rollout.max_context={config.max_context} exceeds model.max_position_embeddings={longest}; "
            "lower it, or the token limits that it is the sum of"
        )


def _chat_template(config: Config) -> None:
    folder = config.model.path
    settings = folder / "tokenizer_config.json"
    inline = settings.is_file() and "chat_template" in json.loads(settings.read_text(encoding="utf-8"))
    if not inline and not (folder / "chat_template.jinja").is_file():
        raise ConfigError(f"model.path={folder}: its tokenizer has no chat_template; add chat_template.jinja")


def check_parallel(config: Config, world_size: int) -> Layout:
    """The training layout. Raises ConfigError unless it fits the ranks and the model."""
    parallel = config.parallel
    if parallel.sequence and parallel.tensor == 1:
        raise ConfigError(
            "parallel.sequence=true: there is nothing to split with parallel.tensor=1; set it to false"
        )
    shape, layout = read_shape(config.model.path), Layout.of_world(world_size, parallel)
    check_layout(shape, parallel.tensor)
    check_stages(shape, layout)
    check_experts(shape, parallel)
    if config.algorithm.routing_replay != "off" and not shape.experts:
        raise ConfigError(
            f"algorithm.routing_replay={config.algorithm.routing_replay}: the model has no experts; "
            "set it to off"
        )
    return layout


def check_engine(config: Config, world_size: int) -> None:
    """Raises ConfigError unless the engine's tensor parallel size fits the ranks and the model."""
    tensor = config.engine_tensor
    if world_size % tensor:
        raise ConfigError(
            f"rollout.engine_tensor={tensor} must divide the number of ranks {world_size}; "
            f"choose {_choices(world_size)}"
        )
    check_layout(read_shape(config.model.path), tensor, field="rollout.engine_tensor", serving=True)


def _batches(config: Config, layout: Layout) -> None:
    advantage = config.algorithm.advantage
    if advantage != "gae" and config.rollout.samples_per_task == 1:
        raise ConfigError(
            "rollout.samples_per_task=1: a group of one teaches nothing with "
            f"algorithm.advantage={advantage}; choose 4 or more"
        )
    tasks, replicas = config.rollout.tasks_per_iteration, layout.world // config.engine_tensor
    if tasks % replicas:
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
    """Raises ConfigError unless an iteration's trajectories can be dealt to minibatches and ranks; `why` is
    where their number comes from."""
    parts = config.update.minibatches * layout.data
    if trajectories % parts:
        raise ConfigError(
            f"{why}{trajectories} trajectories must be a multiple of "
            f"update.minibatches={config.update.minibatches} * {layout.data} data-parallel ranks; "
            f"choose {_multiple(trajectories, parts)} trajectories"
        )


def _choices(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def _multiple(value: int, of: int) -> str:
    low = value // of * of
    return f"{low} or {low + of}" if low else str(of)
