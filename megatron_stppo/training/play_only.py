"""Episodes without training: the commands `rollout` and `evaluate`, and the end of `cold-start`."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from megatron_stppo.agents.endpoint.opening import open_environment
from megatron_stppo.base.errors import ToolsStayAway
from megatron_stppo.base.printing import one_line, printable
from megatron_stppo.base.types import Task, Trajectory
from megatron_stppo.checkpoint import loading
from megatron_stppo.cluster.launch import process
from megatron_stppo.config import Config, ConfigError, EnvironmentConfig
from megatron_stppo.data.tasks import TaskCursor
from megatron_stppo.data.text.plain_text import decode_plain
from megatron_stppo.environments.base import AnyEnvironment
from megatron_stppo.environments.choose import AGENT
from megatron_stppo.observe.console import RowLines, say, timed
from megatron_stppo.observe.describe import describe_groups, describe_rollouts
from megatron_stppo.observe.metrics import Metrics, counting, progress
from megatron_stppo.observe.run_files import new_folder
from megatron_stppo.observe.trajectory_log import TrajectoryLog
from megatron_stppo.parallel.collectives import broadcast_record, gather_records
from megatron_stppo.parallel.groups import MeshRank
from megatron_stppo.rollout.episodes.environment_host import EnvironmentHost
from megatron_stppo.rollout.episodes.failures import warn
from megatron_stppo.rollout.episodes.fitting import fitting_tasks
from megatron_stppo.rollout.vllm.generation import RolloutError
from megatron_stppo.rollout.vllm.requests import StopFinder
from megatron_stppo.training.colocated import Worker, assemble
from megatron_stppo.training.rollouts import evaluate_tasks, held_out_tasks, rollout_settings, seed_of
from megatron_stppo.validation import attempts

Stops = tuple[tuple[str, ...], str]  # of episodes, and why none could be reset
SHOWN, CHARACTERS = 3, 2000  # episodes that are printed after a cold start, and the most of each


def rollout(config: Config, run: Path | None = None, start: str = "latest") -> None:
    """Play the iterations up to run.iterations, with model.path or with a checkpoint of another run.

    `run`: that run's folder. `start`: its checkpoint, "step_N" or "latest". Tasks, seeds and sampling are
    those of a training run, so that the first iteration is the one that training would play next. Builds
    neither optimizer nor critic. Collective. Raises ConfigError.
    """
    worker, version = _built(config, None if run is None else (run, start))
    folder, rank = config.run.folder, worker.learner.mesh.rank
    process.log_to(folder, rank)
    attempts.record(config, rank)
    metrics = Metrics(folder, rank, reporters=[RowLines("rollouts", config.run.iterations)])
    log = TrajectoryLog(folder, rank, worker.tokenizer)
    with timed("first reshard", rank == 0):
        worker.publish(version)
    for iteration in progress(range(version, config.run.iterations), "rollouts", rank == 0, every=None):
        with metrics.phase("rollout"), log.failing(iteration + 1):
            played = worker.draw(iteration)
        written = log.write(iteration + 1, played.own)
        warn(f"iteration {iteration + 1}", played.with_dropped, rank)
        of_groups = describe_groups(played.every, played.dropped)
        metrics.log(iteration + 1, describe_rollouts(played.every, version) | of_groups | written)
    metrics.close()
    say(f"done; the episodes are in {folder / 'trajectories'}", rank == 0)
    worker.close()


def evaluate(config: Config, checkpoint: str | None = None, output: Path | None = None) -> None:
    """Evaluate model.path, or the checkpoint "step_N" or "latest", on data.evaluate, and print a table.

    Writes the numbers (result.json, which names model and checkpoint) and the episodes (trajectories/) to a
    new folder of the run: evaluate/step_N or evaluate/model, or step_N-2 and so on if it exists. `output`:
    another JSON file for the numbers. Collective. Raises ConfigError.
    """
    rank, run = process.rank(), config.run
    held_out = held_out_tasks(config, shown=rank == 0)
    worker, version = _built(config, None if checkpoint is None else (run.folder, checkpoint), draws=False)
    weights = run.folder / "checkpoints" / f"step_{version}" if checkpoint is not None else None
    say(f"weights of {weights}", rank == 0 and weights is not None)
    with timed("first reshard", rank == 0):
        worker.publish(version)
    folder = run.folder / "evaluate"
    if rank == 0:
        folder = new_folder(folder, "model" if weights is None else weights.name)
    log = TrajectoryLog(folder, rank, worker.tokenizer)
    with counting("episodes", rank == 0) as show:
        row = evaluate_tasks(worker, held_out, log, version, show)
    if rank == 0:
        table = Table("held out", "value", title=f"{run.name}, iteration {version}")
        for name, value in row.items():
            table.add_row(name, f"{value:.3f}")
        Console().print(table)
        of = {"model": str(config.model.path.absolute()), "checkpoint": weights and str(weights.absolute())}
        files = [folder / "result.json", *([output] if output is not None else [])]
        for path in files:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(of | row, indent=1), encoding="utf-8")
        say(f"done; the numbers are {files[-1]}, the episodes are in {folder}")
    worker.close()


def _built(config: Config, source: tuple[Path, str] | None, draws: bool = True) -> tuple[Worker, int]:
    """Return the worker and the version of its weights, which are not published yet.

    They are model.path's, version 0, or those of `source`: a run's folder and its checkpoint, also for the
    position in data.train if the worker `draws`.
    """
    worker = assemble(config if source is None else config.of_checkpoint(), training=False, draws=draws)
    if source is None:
        return worker, 0
    folder, step = source[0] / "checkpoints", loading.step_of(source[1])
    state = loading.load_weights(folder, "actor", worker.learner.policy, step)
    if draws and "cursor" in state:  # a converted checkpoint has no cursor
        worker.restore(state)
    return worker, int(state["iteration"])


class ColdEpisodes:
    """The first cold_start.episodes tasks that training would draw: how turns end there, and their episodes.

    The environment is opened at once. The engine is built after the training, from the folder that was
    written, as `train` would read it. All methods are collective, and raise ConfigError.
    """

    def __init__(self, config: Config, mesh: MeshRank, tokenizer: Any) -> None:
        self._config, self._mesh, self._tokenizer = config, mesh, tokenizer
        self._make = open_environment(config, resume=False)
        train = fitting_tasks(config, "train", shown=mesh.rank == 0)
        self._tasks = TaskCursor(train.tasks, config.run.seed).take(config.cold_start.episodes)
        self._stops: StopFinder | None = None  # an agent gives its stop strings with its requests
        self._known = ""
        if config.environment.kind != AGENT:
            stops = stop_strings(self._make, self._tasks, config.environment)
            self._stops, self._known = StopFinder(tokenizer, stops), one_line(", ".join(map(repr, stops)))

    def unended(self, turn: str) -> str:
        """Return why the engine would not end a turn at the end of this text, or ""."""
        if self._stops is None or self._stops.end_with(turn):
            return ""
        if not self._known:
            return (
                "the environment has no stop strings, so that the model would not learn to end a turn; give "
                "`messages`, whose turns end with the end-of-text token, in place of prompt and segments"
            )
        return f"a turn ends with the first stop string in it, and must end with one of {self._known}"

    def play(self, output: Path) -> None:
        """Play with what the cold start has written to `output`, and print some episodes and how they end."""
        config, first_rank = self._config, self._mesh.rank == 0
        written = {"lora": {"path": output}} if config.model.lora.rank else {"path": output}
        begun = (self._mesh, self._make)
        worker = assemble(config.changed(model=written), training=False, draws=False, begun=begun)
        worker.publish(0)
        with timed("episodes", first_rank):
            played = worker.play(self._tasks, 1, rollout_settings(config), seed_of(config.run, 0))
        warn("after the cold start", [t for t in played.every if t.branch == 0], self._mesh.rank)
        own = [t for t in played.own if t.branch == 0][:SHOWN]
        some = [t for of_rank in gather_records(own, Trajectory) for t in of_rank][:SHOWN]
        if first_rank:
            for episode in some:
                print(shown(episode, self._tokenizer), file=sys.stderr, flush=True)
        row, temperature = describe_rollouts(played.every, 0), f"{config.rollout.temperature:g}"
        right, valid = row["rollout/exact_match"], row["rollout/valid_action_rate"]
        say(
            f"{len(self._tasks)} episodes of data.train at rollout.temperature={temperature}: exact match "
            f"{right:.3f}, valid actions {valid:.3f}",
            first_rank,
        )
        worker.close()


def shown(episode: Trajectory, tokenizer: Any) -> str:
    """Return the end of an episode's text, safe to print, with the places where turns begin and end."""
    text = decode_plain(tokenizer, episode.prompt_ids)
    for turn in episode.turns:
        action, observation = (decode_plain(tokenizer, ids) for ids in (turn.token_ids, turn.observation_ids))
        text += f"\n[turn] {action}" + (f"\n[read] {observation}" if observation else "")
    cut, detail = "..." if len(text) > CHARACTERS else "", one_line(episode.detail)
    head = f"--- {episode.outcome}, reward {episode.reward:g}{detail and f': {detail}'}"
    return printable(f"{head}\n{cut}{text[-CHARACTERS:]}")


def stop_strings(
    make: Callable[[], AnyEnvironment], tasks: Sequence[Task], section: EnvironmentConfig
) -> tuple[str, ...]:
    """Return the stop strings of all episodes of these tasks, which the first rank resets. Collective.

    Raises ConfigError if no episode can be reset.
    """
    own = _reset(make, tasks, section) if dist.get_rank() == 0 else None
    stops, trouble = broadcast_record(own, tuple[tuple[str, ...], str], source=0)
    if trouble:
        raise ConfigError(
            f"environment.kind={section.kind}: no episode can begin: {trouble}; repair it, or set "
            "cold_start.episodes=0 to do without"
        )
    return stops


def _reset(make: Callable[[], AnyEnvironment], tasks: Sequence[Task], section: EnvironmentConfig) -> Stops:
    try:
        with EnvironmentHost(make, concurrency=section.concurrency, deadline=section.deadline) as host:
            for number, task in enumerate(tasks):
                host.reset(number, task, number)
            answers = host.take(len(tasks))
    except (RolloutError, ToolsStayAway) as error:
        return (), one_line(str(error))
    failed = [
        answer.misuse or (answer.result.detail if answer.result is not None else "") for answer in answers
    ]
    strings = dict.fromkeys(stop for answer in answers for stop in answer.stop_strings)
    return tuple(strings), failed[0] if all(failed) else ""
