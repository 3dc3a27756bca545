"""The training loop, with the stages in the paper's order.

rollout  ->  score  ->  advantage  ->  update  ->  reshard  ->  (rollout)

Row k of metrics.jsonl describes iteration k, which updates policy version k - 1. This version generated its
rollouts, in asynchronous training also older ones; evaluate/* are of version k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron_stppo.base.errors import Abandoned, EngineLost, Requeue, ToolsStayAway, TooManyFailures
from megatron_stppo.checkpoint import saving
from megatron_stppo.checkpoint.step_folder import OWED
from megatron_stppo.cluster.deadlines import Watchdog
from megatron_stppo.cluster.launch import process
from megatron_stppo.cluster.preemption import PreemptionNotice
from megatron_stppo.config import Config
from megatron_stppo.data.packing import groups_of
from megatron_stppo.model.learner import Learner
from megatron_stppo.observe import console
from megatron_stppo.observe.describe import describe, describe_groups
from megatron_stppo.observe.metrics import progress
from megatron_stppo.observe.observer import Observer
from megatron_stppo.observe.reporters import Reporter, WeightsAndBiases
from megatron_stppo.observe.run_files import truncate
from megatron_stppo.observe.trajectory_log import TrajectoryLog
from megatron_stppo.parallel.collectives import any_rank
from megatron_stppo.rollout.episodes.failures import warn
from megatron_stppo.rollout.episodes.fitting import FittingTasks
from megatron_stppo.training.advantage import has_signal
from megatron_stppo.training.guard.guard import UpdateGuard, check_mismatch
from megatron_stppo.training.rollouts import Rollouts, evaluate_tasks, held_out_tasks
from megatron_stppo.training.stages import advantages, distribute, score, update
from megatron_stppo.training.update.own import Own
from megatron_stppo.training.update.ratios import turns
from megatron_stppo.validation import attempts

SKIPPED = "step_{0} is not evaluated ({1}); `megatron-stppo evaluate CONFIG --checkpoint step_{0}` does it"
Assemble = Callable[[Config, bool], Rollouts]  # the flag: the run is resumed


def train(
    config: Config, resume: bool, watchdog: Watchdog, notice: PreemptionNotice, assemble: Assemble
) -> None:
    """Train up to iteration run.iterations. Collective.

    assemble: builds the models and what plays the episodes: training.colocated.assemble, or
    replicas.trainer.start.assemble.
    With `resume`, it continues from the newest checkpoint, if there is one. A preemption notice to any rank,
    tools that stay unreachable, and an engine that fails on a GPU lead to a checkpoint and to Requeue.
    """
    training = _Training.build(config, resume, watchdog, assemble)
    notice.listen()
    run, rollouts, observer, log = config.run, training.rollouts, training.observer, training.log
    learner, own, leave = rollouts.learner, training.own, False
    training.begin()
    for iteration in training.iterations():
        done = iteration + 1
        # rollout: multi-turn episodes against the environment
        with observer.phase("rollout"), training.leaving(iteration), log.failing(done):
            played = rollouts.draw(iteration)
        written = log.write(done, played.own) | {attempts.ATTEMPT: training.attempt}
        warn(f"iteration {done}", played.with_dropped, learner.mesh.rank)
        # score: log-probs by actor (unless the update computes them) and reference, values by the critic
        with observer.phase("score"):
            rollouts.load_for("score")
            scored = score(learner, distribute(learner, played, iteration))
        # advantage: advantages and returns of the action tokens
        with observer.phase("advantage"):
            group_N = groups_of(played.every)
            batch = advantages(learner, scored, group_N, own.advantage)
            hold = not has_signal(batch, config.algorithm, group_N, own.advantage)
        # update: optimizer steps of actor (ST-PPO) and critic
        with observer.phase("update"):
            rollouts.load_for("update")
            row, last, updated = update(learner, batch, iteration, hold, own.loss)
            row |= describe(played.every, updated, iteration) | describe_groups(played.every, played.dropped)
            row |= training.checkpoints.guard.look(done, row, updated, group_N, hold)
        log.write_turns(done, turns(updated, last, config.algorithm))
        row |= observer.measure(updated) | rollouts.measure() | written
        check_mismatch(config, row)
        # reshard: copy the actor's weights to the engine
        with observer.phase("reshard"), training.leaving(done, row):
            rollouts.publish(version=done)
        # evaluate: episodes of held-out tasks, until the run must leave, because they may take too long
        evaluates = bool(run.evaluate_every) and (done % run.evaluate_every == 0 or done == run.iterations)
        leave = notice.due(any_rank, begins="evaluation" if evaluates else "iteration")
        console.say(SKIPPED.format(done, notice.reason), learner.mesh.rank == 0 and evaluates and leave)
        if evaluates and not leave:
            row |= training.evaluate(done, row)
            leave = notice.due(any_rank, ended="evaluation")
        observer.log(done, row)
        # checkpoint: after observer.log, so that no run resumes after an iteration that was not reported
        if done % run.checkpoint_every == 0 or done == run.iterations or leave:
            training.checkpoint(done, ends=leave or done == run.iterations)
        training.checkpoints.saver.check()
        if leave:
            break
    training.finish()
    if leave and done < run.iterations:
        raise Requeue(f"step_{done} of {run.iterations} is checkpointed and can be resumed: {notice.reason}")


@dataclass(frozen=True)
class _Training:
    """What the iterations of a run share."""

    rollouts: Rollouts
    checkpoints: Checkpoints
    observer: Observer
    log: TrajectoryLog
    own: Own  # functions of the user
    held_out: FittingTasks | None  # tasks, if they are evaluated during training
    first: int  # the iteration of the checkpoint that training continues from; 0 in a new run
    owed: dict[str, Any] | None  # its row, if its evaluation failed
    attempt: int  # at this run, from 1; 0 on other ranks than the first

    @classmethod
    def build(cls, config: Config, resume: bool, watchdog: Watchdog, assemble: Assemble) -> _Training:
        """Build models and engine, load the newest checkpoint and publish the actor's weights. Collective."""
        run, rank, preset = config.run, process.rank(), config.algorithm.preset
        reporting: list[Reporter] = [console.RowLines(preset, run.iterations)]
        if rank == 0 and config.telemetry.wandb_project is not None:
            reporting.append(WeightsAndBiases(config, resume))
        held_out = held_out_tasks(config, shown=rank == 0) if run.evaluate_every else None
        own = Own.of(config)
        rollouts = assemble(config, resume)
        learner = rollouts.learner
        checkpoints = Checkpoints(config, learner)
        first, owed = checkpoints.load(rollouts) if resume else (0, None)
        console.say(f"resumed from step_{first} of {run.iterations}", rank == 0 and first > 0)
        process.log_to(run.folder, rank)
        attempt = attempts.record(config, rank, first)
        if rank == 0 and owed is not None and held_out is not None:  # written again, with the evaluation
            truncate(run.folder / "metrics.jsonl", first - 1)
        observer = Observer(config, learner.shape, learner.mesh, watchdog, first, reporting)
        log = TrajectoryLog(run.folder, rank, rollouts.tokenizer)
        with console.timed("first reshard", rank == 0):
            rollouts.publish(version=first)
        return cls(rollouts, checkpoints, observer, log, own, held_out, first, owed, attempt)

    def iterations(self) -> Iterator[int]:
        """Yield the iterations that are left, from 0, with a progress bar on rank 0."""
        config = self.rollouts.learner.config
        left = range(self.first, config.run.iterations)
        shown = self.rollouts.learner.mesh.rank == 0
        return self.observer.profiled(progress(left, config.algorithm.preset, shown, every=None))

    def begin(self) -> None:
        """Evaluate a new run, and a resumed one whose last evaluation failed. Collective.

        Raises Abandoned if the run must leave: nothing is trained yet, and the next attempt evaluates again.
        """
        if self.held_out is None or (self.first and self.owed is None):
            rank, owed = self.rollouts.learner.mesh.rank, self.owed is not None
            return console.say(SKIPPED.format(self.first, "run.evaluate_every=0"), rank == 0 and owed)
        try:
            self.observer.log(self.first, (self.owed or {}) | self._evaluate(self.first, self.owed))
        except Abandoned as reason:
            self.finish()
            again = f"step_{self.first} is evaluated first with --resume"
            raise Abandoned(f"nothing was trained, and {again}: {reason}") from None

    def evaluate(self, done: int, row: dict[str, Any]) -> dict[str, Any]:
        """Return the metrics of held-out tasks, none if the run must leave. Collective.

        Arguments as in `leaving`. If it fails, the checkpoint says so, and a resumed run evaluates
        first: it must not hide the failure.
        """
        try:
            return self._evaluate(done, row)
        except Abandoned as reason:
            console.say(SKIPPED.format(done, reason), self.rollouts.learner.mesh.rank == 0)
            return {}

    def _evaluate(self, done: int, row: dict[str, Any] | None) -> dict[str, Any]:
        with self.observer.phase("evaluate"), self.leaving(done, row, evaluates=True):
            assert self.held_out is not None, "evaluations are due only with run.evaluate_every"
            return evaluate_tasks(self.rollouts, self.held_out)

    def checkpoint(self, done: int, ends: bool) -> None:
        """Start to write a checkpoint. The next row reports how long this takes. Collective.

        ends: whether nothing is played afterwards, so that the engine may stay asleep.
        """
        with self.observer.phase("checkpoint"):
            self.rollouts.load_for("checkpoint")
            self.checkpoints.save(done, self.rollouts)
            if not ends:
                self.rollouts.publish(version=done)

    def finish(self) -> None:
        """Wait for the last checkpoint and close everything. Collective."""
        with self.observer.phase("checkpoint"):
            self.checkpoints.saver.finish()
        self.observer.close()
        self.rollouts.close()

    @contextmanager
    def leaving(
        self, done: int, row: dict[str, Any] | None = None, evaluates: bool = False
    ) -> Iterator[None]:
        """Context for playing episodes, or waiting for them.

        It turns ToolsStayAway and EngineLost into a checkpoint and Requeue, and writes a checkpoint before
        TooManyFailures is raised.
        Collective. If the GPU of any rank no longer works, no checkpoint is written, and only a save in
        progress is completed.
        done: the number of iterations that are done. row: metrics of the last one, if they are not reported
        yet; they are reported before the checkpoint is saved. evaluates: these are episodes of an evaluation.
        """
        try:
            yield
        except (ToolsStayAway, EngineLost, TooManyFailures) as reason:
            of, saver = self.rollouts.learner.config.run.iterations, self.checkpoints.saver
            logged = self.observer.log(done, row) if row is not None else {}
            if isinstance(reason, TooManyFailures) and done == self.first:
                raise  # nothing was trained since the checkpoint, which a resumed run continues from
            with self.observer.phase("checkpoint"):
                if any_rank(process.gpu_failed()):
                    saver.finish()
                    newest = f"step_{saver.newest()} of {of} is the newest checkpoint"
                    raise Requeue(f"{newest}, and a GPU failed after it: {reason}") from None
                self.rollouts.load_for("checkpoint")
                owed = {name: logged[name] for name in row} if row and evaluates else None
                self.checkpoints.save(done, self.rollouts, owed)
            self.finish()
            if isinstance(reason, TooManyFailures):
                raise
            raise Requeue(f"step_{done} of {of} is checkpointed and can be resumed: {reason}") from None


class Checkpoints:
    """Saves a run's models, the state of its rollouts and of its guard, and continues from them.

    All methods are collective.
    """

    def __init__(self, config: Config, learner: Learner, rollback: bool = True) -> None:
        """rollback: see UpdateGuard."""
        self._learner = learner
        self.saver = saving.Saver(config.run.folder / "checkpoints", config, learner.mesh.layout)
        self.guard = UpdateGuard(config, learner.mesh, learner.trainers, self.saver, rollback)

    def save(self, done: int, rollouts: Rollouts | None = None, owed: dict[str, Any] | None = None) -> None:
        """Start to write the checkpoint of iteration `done`.

        rollouts: None if nothing is played. owed: the iteration's row, if its evaluation failed and a resumed
        run must repeat it.
        """
        played, episodes = (rollouts.state(), rollouts.episodes()) if rollouts is not None else ({}, b"")
        state = {"iteration": done} | self._learner.beginning | played | self.guard.state()
        state |= {OWED: owed} if owed is not None else {}
        self.saver.save(done, self._learner.trainers, state, episodes)

    def load(self, rollouts: Rollouts) -> tuple[int, dict[str, Any] | None]:
        """Load the newest checkpoint. Return its iteration and what it owes; (0, None) without one."""
        state = self.saver.load(self._learner.trainers)
        if state is None:
            return 0, None
        iteration = self.continue_from(state)
        if "cursor" in state:  # absent in the checkpoint of a converted model
            rollouts.restore(state, self.saver.episodes)
        return iteration, state.get(OWED)

    def continue_from(self, state: Mapping[str, Any]) -> int:
        """Continue from the state of a checkpoint whose models are loaded. Return its iteration."""
        self._learner.check_beginning(state)
        self.guard.restore(state)
        return int(state["iteration"])
