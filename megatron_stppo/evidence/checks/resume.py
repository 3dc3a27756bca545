"""Checks that a run which continues from a checkpoint is the run that was not interrupted, and what the
training loop does from one iteration to the next.

Iteration 1, a checkpoint, iteration 2, each by its stages. Then `loop.train` resumes the run with new models,
and repeats iteration 2. The loaded state must have the same bits as the saved one, on any device. So must
that iteration on a CPU. On a GPU, sums may be in another order: there the second update gets the same
episodes again, and its result may differ by NEAR of what it changed. In the loop's next iteration these
episodes have rewards of 0. Then it evaluates, and ends before it writes a checkpoint.

With replicas, the models are overwritten in place of being built again, and what the replicas do is not
repeated.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field, replace
from io import StringIO
from itertools import chain
from operator import eq
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from megatron_stppo.base.types import FAILED, Outcome, Task
from megatron_stppo.cluster.deadlines import Watchdog
from megatron_stppo.cluster.launch import process
from megatron_stppo.cluster.preemption import PreemptionNotice
from megatron_stppo.config import Config
from megatron_stppo.data.exchange import Played
from megatron_stppo.data.packing import groups_of
from megatron_stppo.evidence.bench.stage import Checked, Stage, everywhere, faultless, of_every_rank
from megatron_stppo.evidence.checks.rewards import rewarded
from megatron_stppo.model.learner import Learner, build_learner
from megatron_stppo.model.offload import Phase
from megatron_stppo.model.optimizer import Trainer, trained
from megatron_stppo.observe.run_files import read_rows
from megatron_stppo.observe.trajectory_log import read
from megatron_stppo.training import loop
from megatron_stppo.training.advantage import has_signal
from megatron_stppo.training.colocated import Worker, engine_sync
from megatron_stppo.training.rollouts import held_out_tasks
from megatron_stppo.training.stages import advantages, distribute, score, update
from megatron_stppo.weights.reshard.resharder import ReshardError

RESUME, LOOP = "resume is exact", "the loop trains, serves and evaluates"
HELD_OUT, SAMPLES = 3, 2  # tasks of an evaluation, and episodes of each
OUTCOMES: tuple[Outcome, ...] = ("truncated", "ok", "error", "wrong", "timeout")  # planted in them
GPU = ("actor/effective_lr", "actor/held")  # metrics of an update that are compared on a GPU
NEAR = 0.25  # norm of the difference on a GPU, relative to that of the change by the update
SAME = 0.5  # share of the episodes that begin with equal tokens on a GPU
BEGIN = 4  # tokens


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
    """Train two iterations, with a checkpoint between, and let the loop resume after it. Collective."""
    rollouts, config = stage.rollouts, stage.config
    rollouts.learner = replace(stage.learner, config=_small(config, stage.learner.mesh.data_size))
    checkpoints = loop.Checkpoints(stage.learner.config, stage.learner)
    rollouts.publish(stage.version)  # so that the engine is awake
    _iterate(stage)
    start = stage.version
    rollouts.load_for("checkpoint")
    saved = Snapshot.of(stage.learner)
    keeps = rollouts if isinstance(rollouts, Worker) else None  # replicas play nothing here
    checkpoints.save(start, keeps)
    checkpoints.saver.finish()
    rollouts.publish(start)
    played, row, after = _iterate(stage)
    rollouts.load_for("checkpoint")
    del checkpoints  # they hold the models
    stage.settle()  # the loop serves an older version
    looped = Looped(stage, start, saved, played, row, after)
    looped.run()
    rollouts.learner = replace(stage.learner, config=config)
    of_loop = of_every_rank(list(looped.wrong()))
    wrong = of_every_rank(looped.resumed)
    if process.rank() == 0:
        shutil.rmtree(config.run.folder / "checkpoints", ignore_errors=True)
    fresh = "new models" if isinstance(rollouts, Worker) else "models"
    on_gpu = torch.cuda.is_available()
    evaluated = f", {len(looped.evaluated.every)} episodes evaluated" if looped.evaluated else ""
    equal = f"the update within {NEAR:.0%}" if on_gpu else "and the iteration after it, with the same bits"
    text = f"{len(played.every)} episodes; {fresh} loaded the checkpoint, {equal}"
    remedy = "run.root, parallel, megatron: report this line; a resumed run is not the run that was saved"
    yield faultless(RESUME, wrong, text, remedy, shown=6)
    text = f"versions {looped.versions}; an iteration without a signal{evaluated}"
    remedy = "run, evaluate: report this line; the loop does not do with its stages what it must"
    yield faultless(LOOP, of_loop, text, remedy, shown=4)


def _small(config: Config, data: int) -> Config:
    """Return the configuration with steps of the actor in all iterations, and with few episodes.

    The engine waits for tools: otherwise their time decides which turns it computes together, and the last
    bits of the log-probs. data: the size of data parallelism.
    """
    least = -(-2 * config.update.minibatches * data // config.rollout.tasks_per_iteration)
    few = {"samples_per_task": min(config.rollout.samples_per_task, max(2, least)), "resample": 0}
    return config.changed(
        rollout=few | {"overlap_tools": False},
        update={"critic_only": 0},
        evaluate={"tasks": HELD_OUT, "samples": SAMPLES},
        telemetry={"wandb_project": None, "profile": None},
    )


def _iterate(stage: Stage) -> tuple[Played, dict[str, float], Snapshot]:
    """Run an iteration by its stages, with rewards that differ. Return episodes, metrics, and the models
    after it."""
    rollouts, iteration, own, learner = stage.rollouts, stage.version, stage.own, stage.learner
    drawn = _draw(stage, iteration)
    used = rewarded(drawn, _rewards(drawn, iteration))
    rollouts.load_for("score")
    scored = score(learner, distribute(learner, used, iteration))
    group_N = groups_of(used.every)
    batch = advantages(learner, scored, group_N, own.advantage)
    hold = not has_signal(batch, learner.config.algorithm, group_N, own.advantage)
    rollouts.load_for("update")
    row, _, _ = update(learner, batch, iteration, hold, own.loss)
    rollouts.load_for("checkpoint")
    after = Snapshot.of(learner)
    stage.publish()
    return drawn, row, after


class Ended(Exception):
    """The loop begins what is not looked at: a third iteration, or a checkpoint."""


@dataclass
class Looped:
    """The rollouts of the resumed loop. They give it planted rewards and outcomes, and note what it does."""

    stage: Stage
    start: int  # the iteration of the checkpoint
    saved: Snapshot
    played: Played  # in the iteration after it, by its stages
    row: dict[str, float]
    after: Snapshot
    resumed: list[str] = field(default_factory=list)  # what differs after the resume
    versions: list[int] = field(default_factory=list)  # that are published
    weights: list[list[Tensor]] = field(default_factory=list)  # the actor's, at the last two of them
    trained: list[Played] = field(default_factory=list)
    evaluated: Played | None = None
    strange: bool = False  # whether the evaluation has other tasks than those of the configuration
    error: str = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stage.rollouts, name)

    def run(self) -> None:
        """Let the loop resume the run. Collective."""
        last, config = self.start + 2, self.stage.learner.config
        due = {"checkpoint_every": last, "evaluate_every": last if config.data.evaluate else 0}
        config = config.changed(run=due | {"iterations": max(last, config.run.iterations)})
        self.stage.rollouts.learner = replace(self.stage.learner, config=config)
        folder, deadlines = config.run.folder, config.deadline_by_phase
        watchdog = Watchdog(folder, deadlines, process.rank(), process.world_size())
        with _silent(), watchdog:
            try:
                loop.train(config, True, watchdog, PreemptionNotice(0.0, signals=()), self._assemble)
            except (Ended, ReshardError) as error:  # the check of the mismatch, on all ranks
                self.error = str(error)

    def _assemble(self, config: Config, resume: bool) -> Any:
        _replace_models(self.stage)
        return self

    def draw(self, iteration: int) -> Played:
        if len(self.trained) == 2:
            raise Ended
        if self.trained:
            used = self.trained[0]
            rewards = [[0.0] * len(summary.turns) for summary in used.every]
        else:
            used, on_gpu = _draw(self.stage, iteration), torch.cuda.is_available()
            goes_on = not isinstance(self.stage.rollouts, Worker)  # the next batch of the replicas
            self.resumed += [] if goes_on else _drawn(self.played, used, on_gpu)
            used = self.played if on_gpu or goes_on else used
            rewards = _rewards(used, iteration)
        self.trained.append(rewarded(used, rewards))
        return self.trained[-1]

    def publish(self, version: int) -> None:
        self.stage.rollouts.load_for("checkpoint")
        now, on_gpu = Snapshot.of(self.stage.learner), torch.cuda.is_available()
        if not self.versions:
            self.resumed += self.saved.differences(now)
        elif len(self.versions) == 1:
            self.resumed += self.after.differences(now, self.saved if on_gpu else None)
        self.versions.append(version)
        self.weights = [*self.weights[-1:], now.tensors["actor: weights"]]
        self.stage.rollouts.publish(version)
        self.stage.version = version
        self.stage.settle()  # a turn cannot begin with a version and end with an older one

    def play(self, tasks: Sequence[Task], samples: int, *given: Any) -> Played:
        if len(self.versions) < 3:
            raise Ended  # the engine may be asleep
        held_out = held_out_tasks(self.stage.learner.config, shown=False).tasks
        self.strange = tuple(tasks) != held_out
        played = self.stage.rollouts.play(tasks, samples, *given)
        played = rewarded(played, _rewards(played, self.start))
        every = [replace(s, outcome=OUTCOMES[n % len(OUTCOMES)]) for n, s in enumerate(played.every)]
        self.evaluated = replace(played, every=every)
        return self.evaluated

    def load_for(self, phase: Phase) -> None:
        if phase == "checkpoint":
            raise Ended
        self.stage.rollouts.load_for(phase)

    def wrong(self) -> Iterator[str]:
        """Yield what the loop has done wrong. Collective."""
        needed, folder = [self.start + n for n in range(3)], self.stage.config.run.folder
        if self.versions != needed or len(self.trained) != 2:
            yield self.error or f"versions {self.versions} are published, not {needed}"
            return
        episodes, later = everywhere(self.trained[0]), self.trained[1]
        group_N, own = groups_of(later.every), self.stage.own.advantage
        signal = has_signal(later.described(), self.stage.config.algorithm, group_N, own)
        if process.rank():
            return
        rows = [row for row in read_rows(folder / "metrics.jsonl") if row["iteration"] > self.start]
        if [row["iteration"] for row in rows] != needed[1:]:
            yield f"rows of the iterations {[row['iteration'] for row in rows]}, not {needed[1:]}"
            return
        if not self.resumed:
            known = {k: v for k, v in self.row.items() if k in GPU or not torch.cuda.is_available()}
            yield from _unlike(rows[0], known, NEAR if torch.cuda.is_available() else 0.0)
        still, held = all(map(torch.equal, *self.weights)), rows[1].get("actor/held") == 1
        if not signal and not (still and held):
            yield "an iteration without a signal is not held"
        mean = fmean([t.reward for t in episodes if t.turns and not t.branch] or [0.0])
        yield from _unlike(rows[0], {"reward/mean": mean})
        kept, drawn = ([(t.summary, t.token_ids) for t in of] for of in (read(folder, needed[1]), episodes))
        if kept != drawn:
            yield "the recorded episodes are not those that were drawn"
        if self.stage.config.data.evaluate is not None:
            yield from self._evaluation(rows[1])

    def _evaluation(self, row: dict[str, Any]) -> Iterator[str]:
        """Yield what is wrong in the metrics of the evaluation, or in its episodes."""
        played = self.evaluated.every if self.evaluated is not None else []
        every = [s for s in played if not (s.branch or s.overlong_prompt)]
        usable = [s for s in every if s.outcome not in FAILED]
        rewards, solved = [s.reward for s in usable], [s.outcome == "ok" for s in usable]
        means = {"reward": fmean(rewards or [0.0]), "exact_match": fmean(solved or [0.0])}
        means["failed"] = len(every) - len(usable)
        yield from _unlike(row, {f"evaluate/{name}": mean for name, mean in means.items()})
        counts = set(Counter(s.group for s in played if not s.branch).values())
        served = {version for s in played for turn in s.turns for version, _ in turn.versions}
        if counts != {SAMPLES} or served - {self.versions[-1]}:
            yield f"evaluated: {counts} episodes of a task, not {SAMPLES}, by versions {served}"
        if self.strange:
            yield "evaluated: other tasks than the held-out ones (data.evaluate, evaluate.tasks)"


def _unlike(row: dict[str, Any], needed: dict[str, float], near: float = 1e-6) -> Iterator[str]:
    """Yield the metrics that are not those needed, those that are not finite left out."""
    for name, number in needed.items():
        known = math.nan if row.get(name) is None else row[name]
        if math.isfinite(number) and not math.isclose(known, number, rel_tol=near, abs_tol=near * 1e-3):
            yield f"{name} is {known:.6g}, not {number:.6g}"


@contextmanager
def _silent() -> Iterator[None]:
    """Context without the loop's lines and warnings, as of planted rewards. The logs that it opens are closed
    at the end."""
    root, before = logging.root, list(logging.root.handlers)
    logging.disable(logging.WARNING)
    try:
        with redirect_stderr(StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)
        for handler in set(root.handlers) - set(before):
            root.removeHandler(handler)
            handler.close()


def _draw(stage: Stage, iteration: int) -> Played:
    return stage.rollouts.draw(iteration) if isinstance(stage.rollouts, Worker) else stage.draw()


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
            trainer.updates = trainer.skipped = trainer.iterations = 0
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
    tokens = [[t.token_ids[len(t.prompt_ids) :][:end] for t in played.own] for played in (first, second)]
    equal, count = sum(map(eq, *tokens)), min(map(len, tokens))
    least = SAME * count if on_gpu else len(first.own)
    return [] if equal >= least else [f"{equal} of {count} episodes have the same tokens"]


def _adam_steps(trainer: Trainer) -> list[float]:
    """Return the numbers of steps in the state of the optimizer, each once."""
    parts = [part.optimizer for part in trainer.optimizer.chained_optimizers]
    every = chain.from_iterable((*part.param_groups, *part.state.values()) for part in parts)
    return sorted({float(state["step"]) for state in every if "step" in state})


def _norm(tensors: list[Tensor]) -> float:
    return math.sqrt(math.fsum(float(tensor.double().square().sum()) for tensor in tensors))
