"""Checks that a run which continues from a checkpoint is the run that was not interrupted.

Iteration 1, a checkpoint, iteration 2. Then new models load the checkpoint, and iteration 2 is repeated. The
loaded state must have the same bits as the saved one, on any device. So must the second iteration on a CPU.
On a GPU, sums may be in another order: there the second update gets the same episodes again, and its result
may differ by NEAR of what it changed.

With replicas, the episodes are those of the stage, the models are overwritten in place of being built again,
and what the replicas do is not repeated.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_stppo.base.types import Trajectory
from megatron_stppo.cluster.launch import process
from megatron_stppo.config import Config
from megatron_stppo.data.exchange import Played
from megatron_stppo.data.packing import groups_of
from megatron_stppo.evidence.bench.stage import Checked, Stage, judged, of_every_rank
from megatron_stppo.evidence.checks.rewards import rewarded
from megatron_stppo.model.learner import Learner, build_learner
from megatron_stppo.model.optimizer import Trainer, trained
from megatron_stppo.training.colocated import Worker, engine_sync
from megatron_stppo.training.loop import Checkpoints
from megatron_stppo.training.stages import advantages, distribute, score, update

RESUME = "resume is exact"
NEAR = 0.25  # norm of the difference on a GPU, relative to that of the change by the update
SAME = 0.5  # share of the episodes that begin with equal tokens on a GPU
BEGIN = 4  # tokens


@dataclass(frozen=True)
class Iterated:
    """An iteration: its episodes, its metrics, and the models after it."""

    played: Played
    row: dict[str, float]
    after: Snapshot


@dataclass(frozen=True)
class Snapshot:
    """All that an update reads and changes on a rank, on the host."""

    tensors: dict[str, list[Tensor]]
    numbers: dict[str, Any]

    @classmethod
    def of(cls, learner: Learner) -> Snapshot:
        tensors, numbers = dict[str, list[Tensor]](), dict[str, Any]()
        for role, trainer in learner.trainers.items():
            weights = [t for chunk in trainer.chunks for t in (*trained(chunk), *chunk.buffers())]
            for kind, held in (("weights", weights), ("optimizer", list(trainer.states()))):
                tensors[f"{role}: {kind}"] = [t.detach().to("cpu", copy=True) for t in held]
            steps = (trainer.updates, trainer.skipped, trainer.warmup, trainer.learning_rate)
            more = {"steps": steps, "memory": repr(trainer.memory), "Adam's steps": _adam_steps(trainer)}
            numbers |= {f"{role}: {name}": value for name, value in more.items()}
        return cls(tensors, numbers)

    def differences(self, other: Snapshot, before: Snapshot | None = None) -> list[str]:
        """Return a line for each entry of the other one that differs.

        before: the state before the update, if results may be NEAR; None: they must be equal.
        """
        out = [
            f"{name}: {other.numbers[name]}, not {value}"
            for name, value in self.numbers.items()
            if other.numbers[name] != value
        ]
        for name, mine in self.tensors.items():
            pairs = list(zip(mine, other.tensors[name], strict=True))
            wrong = sum(not torch.equal(a, b) for a, b in pairs)
            if wrong and before is not None:
                apart = _norm([a.float() - b.float() for a, b in pairs])
                past = zip(mine, before.tensors[name], strict=True)
                wrong *= not apart <= NEAR * _norm([a.float() - b.float() for a, b in past])
            if wrong:
                out.append(f"{name}: {wrong} of {len(mine)} tensors differ")
        return out


def resume(stage: Stage) -> Iterator[Checked]:
    """Train two iterations, with a checkpoint between, and repeat the second one after it. Collective."""
    rollouts, config = stage.rollouts, stage.config
    rollouts.learner = replace(stage.learner, config=_small(config, stage.learner.mesh.data_size))
    checkpoints = Checkpoints(stage.learner.config, stage.learner)
    rollouts.publish(stage.version)  # so that the engine is awake
    _iterate(stage)
    start = stage.version
    rollouts.load_for("checkpoint")
    saved = Snapshot.of(stage.learner)
    keeps = rollouts if isinstance(rollouts, Worker) else None  # replicas play nothing here
    checkpoints.save(start, keeps)
    checkpoints.saver.finish()
    rollouts.publish(start)
    first = _iterate(stage)
    rollouts.load_for("checkpoint")
    del checkpoints  # they hold the models
    _replace_models(stage)
    iteration, _ = Checkpoints(stage.learner.config, stage.learner).load(rollouts)
    lines = [] if iteration == start else [f"iteration {iteration}, not {start}"]
    lines += saved.differences(Snapshot.of(stage.learner))
    stage.version = start
    rollouts.publish(start)
    on_gpu = torch.cuda.is_available()
    second = _iterate(stage, first.played if on_gpu else None)
    lines += _drawn(first.played, second.played, on_gpu)
    lines += first.after.differences(second.after, saved if on_gpu else None)
    lines += [] if on_gpu else _rows(first.row, second.row)
    rollouts.learner = replace(stage.learner, config=config)
    wrong = of_every_rank(lines)
    if process.rank() == 0:
        shutil.rmtree(config.run.folder / "checkpoints", ignore_errors=True)
    fresh = "new models" if isinstance(rollouts, Worker) else "models"
    equal = f"the update within {NEAR:.0%}" if on_gpu else "and the iteration after it, with the same bits"
    yield judged(
        RESUME,
        not wrong,
        "; ".join(wrong[:6])
        if wrong
        else f"{len(second.played.every)} episodes; {fresh} loaded the checkpoint, {equal}",
        "run.root, parallel, megatron: report this line; a resumed run is not the run that was saved",
    )


def _small(config: Config, data: int) -> Config:
    """Return the configuration with steps of the actor in all iterations, and with few episodes.

    The engine waits for tools: otherwise their time decides which turns it computes together, and the last
    bits of the log-probs. data: the size of data parallelism.
    """
    least = -(-2 * config.update.minibatches * data // config.rollout.tasks_per_iteration)
    few = {"samples_per_task": min(config.rollout.samples_per_task, max(2, least)), "resample": 0}
    return config.changed(rollout=few | {"overlap_tools": False}, update={"critic_only": 0})


def _iterate(stage: Stage, played: Played | None = None) -> Iterated:
    """Run an iteration of the loop with rewards that differ. played: episodes to use in place of those that
    are drawn."""
    rollouts, iteration, own = stage.rollouts, stage.version, stage.own
    learner = stage.learner
    drawn = rollouts.draw(iteration) if isinstance(rollouts, Worker) else stage.played
    used = drawn if played is None else played
    used = rewarded(used, _rewards(used, iteration))
    rollouts.load_for("score")
    scored = score(learner, distribute(learner, used, iteration))
    batch = advantages(learner, scored, groups_of(used.every), own.advantage)
    rollouts.load_for("update")
    row, _, _ = update(learner, batch, iteration, own=own.loss)
    rollouts.load_for("checkpoint")
    after = Snapshot.of(learner)
    stage.publish()
    return Iterated(drawn, row, after)


def _rewards(played: Played, iteration: int) -> list[list[float]]:
    generator = torch.Generator().manual_seed(iteration)
    sizes = [len(summary.turns) for summary in played.every]
    return [torch.randn(size, generator=generator).tolist() for size in sizes]


def _replace_models(stage: Stage) -> None:
    """Build the models again, as a resumed run does. Those that replicas are served from are overwritten."""
    rollouts, learner = stage.rollouts, stage.learner
    if not isinstance(rollouts, Worker):
        for trainer in learner.trainers.values():
            weights = (weight for chunk in trainer.chunks for weight in trained(chunk))
            for tensor in (*weights, *trainer.states()):  # a checkpoint of adapters has no frozen weights
                tensor.detach().zero_()
            trainer.updates = trainer.skipped = trainer.warmup = 0
        return
    config, shape, mesh = learner.config, learner.shape, learner.mesh
    del learner
    stage.drop_models()  # a GPU has no room for both
    rollouts.learner = build_learner(config, shape, mesh, process.dtype(config))
    rollouts.reshard = engine_sync(rollouts.learner, rollouts.engine)


def _drawn(first: Played, second: Played, on_gpu: bool) -> list[str]:
    """Return a line if other episodes were drawn."""
    wanted, drawn = ([summary.index for summary in played.every] for played in (first, second))
    if drawn != wanted:
        return [f"tasks {drawn[:8]} are drawn, not {wanted[:8]}"]
    end = BEGIN if on_gpu else None
    pairs = list(zip(first.own, second.own, strict=False))
    equal = sum(_tokens(a)[:end] == _tokens(b)[:end] for a, b in pairs)
    least = SAME * len(pairs) if on_gpu else len(first.own)
    return [] if equal >= least else [f"{equal} of {len(pairs)} episodes have the same tokens"]


def _tokens(trajectory: Trajectory) -> tuple[int, ...]:
    return trajectory.token_ids[len(trajectory.prompt_ids) :]


def _rows(first: dict[str, float], second: dict[str, float]) -> list[str]:
    """Return a line with the metrics that differ."""
    same = {k for k, v in first.items() if k in second and (v == second[k] or math.isnan(v))}
    wrong = sorted((first.keys() | second.keys()) - same)
    return [f"metrics: {', '.join(wrong[:4])}"] if wrong else []


def _adam_steps(trainer: Trainer) -> list[float]:
    """Return the numbers of steps in the state of the optimizer, each once."""
    steps = set[float]()
    for wrapped in trainer.optimizer.chained_optimizers:
        steps |= {float(group["step"]) for group in wrapped.optimizer.param_groups if "step" in group}
        steps |= {float(state["step"]) for state in wrapped.optimizer.state.values() if "step" in state}
    return sorted(steps)


def _norm(tensors: list[Tensor]) -> float:
    return math.sqrt(math.fsum(float(tensor.double().square().sum()) for tensor in tensors))
