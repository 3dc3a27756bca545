"""Forecasts of all divisions of GPUs between training and serving, and of colocated training."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path

from megatron_stppo.base.types import Trajectory
from megatron_stppo.config import Config, ConfigError
from megatron_stppo.data.ledger import Terms
from megatron_stppo.observe import trajectory_log
from megatron_stppo.observe.run_files import recorded
from megatron_stppo.parallel.weight_tree import CHILDREN
from megatron_stppo.plan.assumptions import H100, Gpu, links
from megatron_stppo.plan.dry_run import engine_use, plan_of, training_use
from megatron_stppo.plan.simulation.asynchronous import AsynchronousRun, Forecast, Window, simulate
from megatron_stppo.plan.simulation.workload import RecordedLengths, Sizes, Workload
from megatron_stppo.plan.times import engine_speed, sending_seconds, trainer_speed
from megatron_stppo.plan.usage import EngineUse, TrainingUse, broken, replica_limit
from megatron_stppo.plan.work import RecordedBatch
from megatron_stppo.weights.sharding.hf_names import read_shape

ITERATIONS = 8  # simulated and measured


@dataclass(frozen=True)
class Split:
    """A division of GPUs, and its forecast: a trainer, and `replicas` engines of `tensor` GPUs."""

    trainer: int  # GPUs
    replicas: int
    tensor: int
    forecast: Forecast


@dataclass(frozen=True)
class Outlook:
    """Forecasts for a number of GPUs."""

    gpus: int
    splits: tuple[Split, ...]  # fewest GPUs for training first
    together: Forecast | None
    left_out: tuple[str, ...]  # what is not possible, and why

    @property
    def best(self) -> Split | None:
        """The split with most tokens per second."""
        return max(self.splits, key=lambda split: split.forecast.tokens_per_second, default=None)

    @property
    def gain(self) -> float | None:
        """Tokens per second of the best split / those of colocated training; None if one is not possible."""
        if self.best is None or self.together is None:
            return None
        return self.best.forecast.tokens_per_second / self.together.tokens_per_second


class Planner:
    """Makes outlooks for one configuration. What several numbers of GPUs share is computed once."""

    def __init__(
        self,
        config: Config,
        work: Workload,
        assumed: Mapping[str, float],
        gpu: Gpu = H100,
        source: RecordedBatch | None = None,
    ) -> None:
        """assumed: the assumptions, by name. source: trajectories on which shared prefixes are measured."""
        self.config, self.work, self.assumed, self.gpu, self.source = config, work, assumed, gpu, source
        self.shape = read_shape(config.model.path)
        self.batch = config.rollout.episodes
        self.concurrency = config.serving.concurrency or config.rollout.max_sequences  # per replica
        self._serving = config.changed(rollout={"gpu_memory_utilization": assumed["replica_memory"]})
        self._uses: dict[int, TrainingUse] = {}

    @cached_property
    def tokens(self) -> float:
        """Mean tokens of an episode."""
        drawn = [self.work.episode(number).sizes.tokens for number in range(512)]
        return sum(drawn) / len(drawn)

    def outlook(self, gpus: int, trainers: Iterable[int], refused: Iterable[str], refusal: str) -> Outlook:
        """Return the outlook for `gpus` GPUs.

        trainers: possible numbers of GPUs for training. refused: why others are not possible. refusal: why
        colocated training is not possible; empty if it may be.
        """
        left_out, splits = list(refused), []
        for trainer in trainers:
            replicas = (gpus - trainer) // self.config.engine_tensor
            problems = [*replica_limit(self._serving, self._linked(replicas), self.gpu)] or [
                f"{trainer} GPUs for training: {line}"
                for line in islice(broken(self._use(trainer), self.gpu), 1)
            ]
            if problems:
                left_out += problems
            else:
                splits.append(self._apart(trainer, replicas))
        together = None if refusal else self._together(gpus, left_out)
        left_out += [f"colocated: {refusal}"] if refusal else []
        return Outlook(gpus, tuple(splits), together, tuple(dict.fromkeys(left_out)))

    def _apart(self, trainer: int, replicas: int) -> Split:
        """Return the forecast of asynchronous training."""
        config, use, gpu, assumed = self.config, self._use(trainer), self.gpu, self.assumed
        rollout, serving, tensor = config.rollout, config.serving, config.engine_tensor
        run = AsynchronousRun(
            self.work,
            Terms(
                rollout.tasks_per_iteration, rollout.samples_per_task, serving.max_staleness, serving.order
            ),
            engine_speed(config, self.shape, self._replica, self.tokens, gpu, assumed),
            trainer_speed(use, self.tokens, gpu, assumed),
            replicas,
            self.concurrency,
            serving.update,
            sending_seconds(use, self.shape, tensor, gpu, assumed),
            sending_seconds(use, self.shape, tensor, gpu, assumed, from_replica=True),
        )
        window = Window(3 + serving.max_staleness, ITERATIONS)
        return Split(trainer, replicas, tensor, simulate(run, window))

    def _together(self, gpus: int, left_out: list[str]) -> Forecast | None:
        """Return the forecast of colocated training, or None if it does not fit."""
        use, assumed = self._use(gpus), self.assumed
        made = plan_of(use, self.shape, self.gpu)
        if made.broken:
            left_out.append(f"colocated: {made.broken[0]}")
            return None
        run = AsynchronousRun(
            self.work,
            Terms(self.batch),
            engine_speed(self.config, self.shape, made.engine, self.tokens, self.gpu, assumed),
            trainer_speed(use, self.tokens, self.gpu, assumed),
            gpus // self.config.engine_tensor,
            self.batch,
            publish=made.exchange.seconds / assumed["network_share"] + assumed["switch_seconds"],
            overlap=self.config.rollout.overlap_tools,
        )
        return simulate(run, Window(0, ITERATIONS))

    @cached_property
    def _replica(self) -> EngineUse:
        """The memory of a replica's GPU."""
        return engine_use(self._serving, self.shape, self.gpu)

    def _linked(self, replicas: int) -> EngineUse:
        """The memory of a replica's GPU, with the links to the one before it and to those after it."""
        engine, count = self._replica, min(replicas - 1, 1 + CHILDREN)
        joined = links(self.config.engine_tensor, count, self.gpu.per_node)
        return replace(engine, communicators=engine.communicators + joined)

    def _use(self, gpus: int) -> TrainingUse:
        if gpus not in self._uses:
            self._uses[gpus] = training_use(self.config, self.shape, gpus, self.gpu, self.source)
        return self._uses[gpus]


def recorded_lengths(folder: Path) -> RecordedLengths:
    """Return the lengths of the episodes of a run's last 8 iterations. Raises ConfigError."""
    numbers = recorded(folder)[-8:]
    if not numbers:
        raise ConfigError(f"--from={folder}: holds no trajectories/; give the folder of a run, as runs/NAME")
    sizes = [_sizes(t) for number in numbers for t in trajectory_log.read(folder, number) if t.turns]
    if not sizes:
        raise ConfigError(f"--from={folder}: no episode of its last iterations has a turn; give another run")
    return RecordedLengths(tuple(sizes))


def _sizes(trajectory: Trajectory) -> Sizes:
    """Return the sizes of a trajectory with at least one turn."""
    read = [len(trajectory.prompt_ids), *(len(turn.observation_ids) for turn in trajectory.turns)]
    generated = [len(turn.token_ids) for turn in trajectory.turns]
    return Sizes(tuple(zip(read, generated, strict=False)))
