from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_stppo.data.tasks import TaskCursor
from megatron_stppo.evidence.bench.stage import Stage
from megatron_stppo.evidence.checks import resume as module
from megatron_stppo.evidence.checks.resume import Snapshot, resume
from megatron_stppo.model.optimizer import MOMENTS, Trainer
from megatron_stppo.training import colocated
from tests.evidence.checks import staged
from tests.ranks import run_ranks


def fresh_moments(mp: pytest.MonkeyPatch) -> None:
    """NeMo-RL #3171."""
    real = Trainer.restore

    def fresh(self: Trainer, *given: Any) -> None:
        real(self, *given)
        for part in self.optimizer.chained_optimizers:
            for state in part.optimizer.state.values():
                for moment in MOMENTS:
                    state[moment].zero_()
        self._set_adam_steps(0)

    mp.setattr(Trainer, "restore", fresh)


def schedule_from_the_start(mp: pytest.MonkeyPatch) -> None:
    """Automodel #763."""
    real = Trainer.restore
    mp.setattr(Trainer, "restore", lambda self, state, updates, *given: real(self, state, 0, *given))


def step_count_of_adam(mp: pytest.MonkeyPatch) -> None:
    """TransformerEngine #1986."""
    real = Trainer.restore

    def stale(self: Trainer, *given: Any) -> None:
        real(self, *given)
        self._set_adam_steps(1)

    mp.setattr(Trainer, "restore", stale)


def order_from_the_start(mp: pytest.MonkeyPatch) -> None:
    """verl #3457."""
    mp.setattr(TaskCursor, "restore", lambda self, state: None)


def skipped_tasks(mp: pytest.MonkeyPatch) -> None:
    """OpenRLHF #1322."""
    real = TaskCursor.restore

    def skips(self: TaskCursor, state: Any) -> None:
        real(self, state)
        self.take(1)

    mp.setattr(TaskCursor, "restore", skips)


def seeds_from_the_start(mp: pytest.MonkeyPatch) -> None:
    """ms-swift #9935: they are counted from 0 where the resumed process would start."""
    number, build = [itertools.count()], module.build_learner

    def again(*given: Any) -> Any:
        number[0] = itertools.count()
        return build(*given)

    mp.setattr(module, "build_learner", again)
    mp.setattr(colocated, "seed_of", lambda run, iteration: run.seed * 1_000_003 + next(number[0]))


def other_master_weights(mp: pytest.MonkeyPatch) -> None:
    """Megatron-LM #6920."""
    real = Trainer.restore

    def other(self: Trainer, *given: Any) -> None:
        real(self, *given)
        for wrapped in self.optimizer.chained_optimizers:
            for group in wrapped.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.data.mul_(1 + 1e-3)

    mp.setattr(Trainer, "restore", other)


FOUND = {
    fresh_moments: "actor: optimizer",
    schedule_from_the_start: "actor: steps",
    step_count_of_adam: "actor: Adam's steps",
    order_from_the_start: "tasks",
    skipped_tasks: "tasks",
    seeds_from_the_start: "0 of 4 episodes",
    other_master_weights: "actor: weights",
}


# planted together, because they are seen in different lines
TOGETHER = (
    (fresh_moments, skipped_tasks),
    (schedule_from_the_start, seeds_from_the_start),
    (step_count_of_adam, order_from_the_start),
    (other_master_weights,),
)


FEW = ("rollout.tasks_per_iteration=2", "rollout.samples_per_task=4", "update.minibatches=2")
PLAIN = ("update.critic.distributed=false",)  # an optimizer whose checkpoint has another form


def look(path: Path) -> Any:
    def planting(group: Any) -> staged.Patch:
        def plant(mp: pytest.MonkeyPatch) -> None:
            for one in group:
                one(mp)

        return plant

    def of(stage: Stage) -> Any:
        every = {group[0].__name__: planting(group) for group in TOGETHER}
        return staged.findings(stage, resume, every, again=False), stage.version

    return staged.run(of, path, *FEW, *PLAIN)


def test_planted_faults_of_resuming_are_found_and_healthy_runs_are_exact(tmp_path: Path) -> None:
    ((found, version),) = run_ranks(look, 1, staged.write(tmp_path / "project"), timeout=240)
    assert found.pop("") == []
    for group in TOGETHER:
        (line,) = found[group[0].__name__]
        for plant in group:
            assert FOUND[plant] in line, (plant.__name__, line)
    assert "critic: optimizer" in found["fresh_moments"][0]
    assert {plant for group in TOGETHER for plant in group} == FOUND.keys()
    assert version == 3 * (1 + len(TOGETHER))


TRAIN, EVALUATE = "training.loop:train", "training.rollouts:evaluate_tasks"
MEAN, BEST = "[t.reward for t in usable]", "max(o.reward for o in usable if o.group == t.group)"
# {mistakes of the loop, planted together: what is said of each}
OF_LOOP: dict[tuple[tuple[str, str, str], ...], tuple[str, ...]] = {
    (
        (TRAIN, "hold = not has_signal(batch,", "hold = True or has_signal(batch,"),
        (EVALUATE, MEAN, f"[{BEST} for t in usable]"),
    ): ("actor: weights", "evaluate/reward is"),
    (
        (TRAIN, "hold = not has_signal(batch,", "hold = False and has_signal(batch,"),
        (EVALUATE, "config.evaluate.samples, settings", "1, settings"),
    ): ("an iteration without a signal is not held", "{1} episodes of a task, not 2"),
    ((TRAIN, "publish(version=done)", "publish(version=done) if done % 2 == 0 else None"),): (
        "are published",
    ),
    (
        (TRAIN, "groups_of(played.every)", "0 * groups_of(played.every)"),
        (EVALUATE, "held_out.tasks, config", "held_out.tasks[::-1], config"),
    ): ("actor: weights", "other tasks than the held-out ones"),
    (
        (TRAIN, "log.write(done, played.own)", "log.write(done, played.own[::-1])"),
        (EVALUATE, 'counted["ok"] /', '(counted["ok"] + counted["truncated"]) /'),
    ): ("the recorded episodes", "evaluate/exact_match is"),
    ((TRAIN, "observer.log(done, row)", "observer.log(iteration, row)"),): ("rows of the iterations",),
    ((TRAIN, "batch, iteration, hold", "batch, 0, hold"),): ("mismatch/current_mean_abs is nan",),
}


def look_at_loop(path: Path) -> Any:
    def planting(mistakes: Any) -> staged.Patch:
        def plant(mp: pytest.MonkeyPatch) -> None:
            for mistake in mistakes:
                staged.mistaken(*mistake)(mp)

        return plant

    def of(stage: Stage) -> Any:
        return staged.findings(stage, resume, {str(m): planting(m) for m in OF_LOOP}, again=False)

    return staged.run(of, path, *FEW, "algorithm.preset=grpo")


def test_planted_mistakes_of_the_loop_are_found(tmp_path: Path) -> None:
    (found,) = run_ranks(look_at_loop, 1, staged.write(tmp_path / "project"), timeout=240)
    assert found.pop("") == []
    for mistakes, said in OF_LOOP.items():
        text = "; ".join(found[str(mistakes)])
        assert all(part in text for part in said), (mistakes, text)


def test_on_a_gpu_an_update_may_differ_by_a_share_of_what_it_changed() -> None:
    def at(*values: float) -> Snapshot:
        return Snapshot({"actor: weights": [torch.tensor(values)]}, {})

    before, after = at(0.0, 0.0), at(1.0, 0.0)
    assert after.differences(at(1.0, 0.0)) == []
    assert after.differences(at(1.0, 0.2)) == ["actor: weights: 1 of 1 tensors differ"]
    assert after.differences(at(1.0, 0.2), before) == []
    assert after.differences(at(1.0, 0.3), before) == ["actor: weights: 1 of 1 tensors differ"]
