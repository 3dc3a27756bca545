"""Simulate synchronous training: all devices play a batch, wait for its slowest episode, and train."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_stppo.plan.simulation.engine import Clock, EngineSpeed, TrainerSpeed
from megatron_stppo.plan.simulation.replica import EpisodeInPlay, ReplicaModel
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
class ColocatedForecast:
    """Means over the simulated iterations. Seconds are per iteration."""

    iteration_seconds: float
    tokens_per_second: float  # tokens of the trajectories that are trained on, prompts included
    rollout: float
    training: float
    rollout_idle: float  # share of the rollout that replicas have no sequence to run


def simulate(run: ColocatedRun, iterations: int = 12) -> ColocatedForecast:
    """Return the forecast of colocated training. Iterations are alike but for their episodes."""
    playing = stepping = training = 0.0
    tokens = 0
    for iteration in range(iterations):
        seconds, in_steps, played = _play(run, iteration)
        playing, stepping, tokens = playing + seconds, stepping + in_steps, tokens + played
        training += run.trainer.seconds(played)
    total = playing + training + run.switch * iterations
    return ColocatedForecast(
        iteration_seconds=total / iterations,
        tokens_per_second=tokens / total,
        rollout=playing / iterations,
        training=training / iterations,
        rollout_idle=1 - stepping / (playing * run.replicas),
    )


def _play(run: ColocatedRun, iteration: int) -> tuple[float, float, int]:
    """Simulate the rollout of an iteration: each replica begins an equal share of its episodes at once.

    Return (seconds, seconds in engine steps summed over replicas, tokens of all trajectories).
    """
    clock, ended = Clock(), list[EpisodeInPlay]()
    calls, count = run.work.tools.at_once, range(run.replicas)
    replicas = [ReplicaModel(clock, run.engine, calls, ended.append, overlap=run.overlap) for _ in count]
    tokens = 0
    for place in range(run.batch):
        episode = run.work.episode(iteration * run.batch + place)
        tokens += episode.sizes.tokens
        replicas[place * run.replicas // run.batch].admit(EpisodeInPlay(place, episode))
    clock.run(lambda: len(ended) == run.batch)
    return clock.now, sum(one.engine.counts.seconds for one in replicas), tokens
