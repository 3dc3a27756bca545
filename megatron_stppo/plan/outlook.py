"""Forecasts of all divisions of GPUs between training and serving, and of colocated training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_stppo.config import Config
from megatron_stppo.plan import asynchronous, colocated
from megatron_stppo.plan.dry_run import TrainingUse, plan_of, planned_dtype, training_use
from megatron_stppo.plan.engine import EngineUse
from megatron_stppo.plan.exchange import applied_bytes, shard_bytes
from megatron_stppo.plan.hardware import H100, Gpu
from megatron_stppo.plan.limits import serving_limit, training_limits
from megatron_stppo.plan.machine import engine_speed, trainer_speed, transfer_seconds
from megatron_stppo.plan.simulation.buffer import BatchRule
from megatron_stppo.plan.simulation.forecast import Forecast
from megatron_stppo.plan.simulation.workload import Workload
from megatron_stppo.sharding.hf_names import ModelShape, read_shape
from megatron_stppo.sharding.spans import row_widths, serving_spans
from megatron_stppo.sharding.transfers import served_adapters

ITERATIONS = 8  # simulated and measured
SPARE = 0.25  # share of time: if replicas of the best split are idle for longer, fewer are tried


@dataclass(frozen=True)
class Split:
    """A division of GPUs. Example: Split(16, 6, 8) is a trainer of 16 GPUs and 6 replicas of 8."""

    trainer: int
    replicas: int
    tensor: int  # GPUs of a replica

    @property
    def gpus(self) -> int:
        return self.trainer + self.replicas * self.tensor


@dataclass(frozen=True)
class SplitForecast:
    split: Split
    forecast: Forecast


@dataclass(frozen=True)
class Outlook:
    """Forecasts for a number of GPUs."""

    gpus: int
    splits: tuple[SplitForecast, ...]  # fewest GPUs for training first
    together: colocated.ColocatedForecast | None
    left_out: tuple[str, ...]  # what is not possible, and why
    best: SplitForecast | None  # the split with most tokens per second
    enough: int | None  # replicas with which the best split is as fast, if that is fewer

    @property
    def gain(self) -> float | None:
        """Tokens per second of the best split / those of colocated training; None if one is not possible."""
        if self.best is None or self.together is None:
            return None
        return self.best.forecast.tokens_per_second / self.together.tokens_per_second


class Planner:
    """Makes outlooks for one configuration. What several numbers of GPUs share is computed once."""

    def __init__(self, config: Config, work: Workload, given: Mapping[str, float], gpu: Gpu = H100) -> None:
        """given: the assumptions, by name."""
        self.config, self.work, self.given, self.gpu = config, work, given, gpu
        self.shape: ModelShape = read_shape(config.model.path)
        self._uses: dict[int, TrainingUse] = {}

    @cached_property
    def tokens(self) -> float:
        """Mean tokens of an episode."""
        drawn = [self.work.episode(number).sizes.tokens for number in range(512)]
        return sum(drawn) / len(drawn)

    def outlook(self, gpus: int, trainers: Sequence[int], refused: Sequence[str], refusal: str) -> Outlook:
        """Return the outlook for `gpus` GPUs.

        trainers: possible numbers of GPUs for training. refused: why others are not possible. refusal: why
        colocated training is not possible; empty if it may be.
        """
        left_out, splits = list(refused), []
        for trainer in trainers:
            problem = self._problem(trainer)
            if problem:
                left_out.append(problem)
                continue
            tensor = self.config.engine_tensor
            split = Split(trainer, (gpus - trainer) // tensor, tensor)
            splits.append(SplitForecast(split, self.apart(split)))
        if refusal:
            left_out.append(f"colocated: {refusal}")
        together = None if refusal else self._together(gpus, left_out)
        best = max(splits, key=lambda one: one.forecast.tokens_per_second, default=None)
        enough = None if best is None else self._enough(best)
        return Outlook(gpus, tuple(splits), together, tuple(dict.fromkeys(left_out)), best, enough)

    def apart(self, split: Split) -> Forecast:
        """Return the forecast of asynchronous training with a split."""
        config, use = self.config, self._use(split.trainer)
        serving = config.serving
        run = asynchronous.AsynchronousRun(
            self.work,
            BatchRule(
                config.rollout.tasks_per_iteration,
                serving.max_staleness,
                serving.order,
                config.rollout.samples_per_task,
            ),
            engine_speed(config, self.shape, self.replica, self.tokens, self.gpu, self.given),
            trainer_speed(use, self.tokens, self.gpu, self.given),
            split.replicas,
            self.concurrency,
            serving.update,
            transfer_seconds(use, self.shape, split.tensor, self.gpu, self.given),
        )
        return asynchronous.simulate(run, asynchronous.Window(3 + serving.max_staleness, ITERATIONS))

    def _enough(self, best: SplitForecast) -> int | None:
        """Return the fewest replicas with at least 99 % of the tokens per second, if that is fewer."""
        low, high = 1, best.split.replicas
        if best.forecast.replica_idle < SPARE:
            return None
        while low < high:
            middle = (low + high) // 2
            found = self.apart(replace(best.split, replicas=middle))
            fast = found.tokens_per_second >= 0.99 * best.forecast.tokens_per_second
            low, high = (low, middle) if fast else (middle + 1, high)
        return low if low < best.split.replicas else None

    @cached_property
    def replica(self) -> EngineUse:
        """The memory of a replica's GPU."""
        tensor, size = self.config.engine_tensor, planned_dtype(self.config).itemsize
        spans, widths = serving_spans(self.shape, tensor, 0), row_widths(self.shape)
        rollout = self.config.rollout.model_copy(
            update={"gpu_memory_utilization": self.given["replica_memory"]}
        )
        config = self.config.model_copy(update={"rollout": rollout})
        weights = shard_bytes(spans, widths, size)
        weights += applied_bytes(spans, self.shape, served_adapters(config.model.lora, self.shape), size)
        return EngineUse.of(config, self.shape, weights, size, self.gpu)

    @property
    def concurrency(self) -> int:
        """Episodes in progress per replica."""
        return self.config.serving.concurrency or self.config.rollout.max_sequences

    @property
    def batch(self) -> int:
        return self.config.rollout.tasks_per_iteration * self.config.rollout.samples_per_task

    def _use(self, gpus: int) -> TrainingUse:
        if gpus not in self._uses:
            self._uses[gpus] = training_use(self.config, self.shape, gpus, self.gpu)
        return self._uses[gpus]

    def _problem(self, trainer: int) -> str:
        """Return why a trainer of so many GPUs, or its replicas, do not fit in memory; empty if they fit."""
        rollout = {"gpu_memory_utilization": self.given["replica_memory"]}
        config = self.config.model_copy(update={"rollout": self.config.rollout.model_copy(update=rollout)})
        problem = next(serving_limit(config, self.replica, self.gpu), "")
        if problem:
            return problem
        use = self._use(trainer)
        lines = training_limits(self.config, use.layout, use.stages, 0, self.gpu)
        return f"{trainer} GPUs for training: {lines[0]}" if lines else ""

    def _together(self, gpus: int, left_out: list[str]) -> colocated.ColocatedForecast | None:
        """Return the forecast of colocated training, or None if it does not fit."""
        use = self._use(gpus)
        made = plan_of(use, self.shape, self.gpu)
        if made.broken:
            left_out.append(f"colocated: {made.broken[0]}")
            return None
        given = self.given
        run = colocated.ColocatedRun(
            self.work,
            self.batch,
            engine_speed(self.config, self.shape, made.engine, self.tokens, self.gpu, given),
            trainer_speed(use, self.tokens, self.gpu, given),
            gpus // self.config.engine_tensor,
            made.exchange.seconds / given["network_share"] + given["switch_seconds"],
            self.config.rollout.overlap_tools,
        )
        return colocated.simulate(run, ITERATIONS)
