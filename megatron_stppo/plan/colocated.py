"""Simulate synchronous training: all devices play a batch, wait for its slowest episode, and train."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_stppo.plan.simulation.clock import Clock
from megatron_stppo.plan.simulation.replica import EpisodeInPlay, ReplicaModel
from megatron_stppo.plan.simulation.speeds import EngineSpeed, TrainerSpeed
from megatron_stppo.plan.simulation.workload import EpisodeSource


@dataclass(frozen=True)
class ColocatedRun:
    """What is simulated. Seconds are those of the machine that is planned for."""

    work: EpisodeSource
    batch: int  # episodes of an iteration
    engine: EngineSpeed  # of each replica
    trainer: TrainerSpeed
    replicas: int = 1
    switch: float = 0.0  # seconds of the reshard, and of moving models and engine in and out of GPU memory
    overlap: bool = True  # rollout.overlap_tools


@dataclass(frozen=True)
class RolloutForecast:
    """One simulated rollout."""

    seconds: float
    tokens: int  # of all trajectories
    idle: float  # share of time without a sequence to run, mean over replicas
    steps: int  # of all engines
    generated: int  # tokens of all engines
    prefilled: int  # tokens
    context: float  # tokens of context, summed over sequences and steps


@dataclass(frozen=True)
class ColocatedForecast:
    """Means over the measured iterations. Seconds are per iteration."""

    iteration_seconds: float
    tokens_per_second: float  # tokens of the trajectories that are trained on, prompts included
    batch_tokens: float  # per iteration
    rollout: float
    training: float
    switch: float
    durations: tuple[float, ...] = field(repr=False)  # seconds of each iteration
    rollout_idle: float  # share of the rollout that replicas have no sequence to run


def simulate(run: ColocatedRun, iterations: int = 12) -> ColocatedForecast:
    """Return the forecast of colocated training. Iterations are alike but for their episodes."""
    rollouts = [play(run, iteration) for iteration in range(iterations)]
    trainings = [run.trainer.seconds(one.tokens) for one in rollouts]
    durations = [one.seconds + train + run.switch for one, train in zip(rollouts, trainings, strict=True)]
    tokens, playing = sum(one.tokens for one in rollouts), sum(one.seconds for one in rollouts)
    idle = sum(one.idle * one.seconds for one in rollouts)
    return ColocatedForecast(
        iteration_seconds=sum(durations) / iterations,
        tokens_per_second=tokens / sum(durations),
        batch_tokens=tokens / iterations,
        rollout=playing / iterations,
        training=sum(trainings) / iterations,
        switch=run.switch,
        durations=tuple(durations),
        rollout_idle=idle / playing if playing else 0.0,
    )


def play(run: ColocatedRun, iteration: int) -> RolloutForecast:
    """Simulate the rollout of one iteration. Each replica begins an equal share of its episodes at once."""
    clock, ended = Clock(), list[EpisodeInPlay]()
    calls = run.work.tools.at_once
    replicas = [
        ReplicaModel(clock, run.engine, calls, ended.append, overlap=run.overlap) for _ in range(run.replicas)
    ]
    tokens = 0
    for place in range(run.batch):
        episode = run.work.episode(iteration * run.batch + place)
        tokens += episode.sizes.tokens
        replicas[place * run.replicas // run.batch].admit(EpisodeInPlay(place, episode, iteration))
    clock.run(lambda: len(ended) == run.batch)
    counts = [one.engine.counts for one in replicas]
    return RolloutForecast(
        seconds=clock.now,
        tokens=tokens,
        idle=1 - sum(one.seconds for one in counts) / max(clock.now * run.replicas, 1e-9),
        steps=sum(one.steps for one in counts),
        generated=sum(one.generated for one in counts),
        prefilled=sum(one.prefilled for one in counts),
        context=sum(one.context for one in counts),
    )
