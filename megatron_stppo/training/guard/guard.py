"""Check the metrics of every update: refused steps, spikes, and whether what the preset is named for acts.

After a spike the guard warns, dumps, rolls back, or ends the run. A rollback happens in place. The trainers
load the newest checkpoint. The iteration keeps its number and the task cursor its position, so that the run
continues with the tasks after those that caused the spike. The run rolls back to the same checkpoint only
once. A further spike before there is a newer checkpoint is only reported, because it did not come from the
data.

A preset whose mechanisms never act trains as the policy gradient alone does, whatever its name says. One
whose mechanisms act all the time trains at a small part of the configured rate.
"""

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_stppo.base.errors import DoNotRestart
from megatron_stppo.base.types import Batch
from megatron_stppo.checkpoint import saving
from megatron_stppo.config import AlgorithmConfig, Config
from megatron_stppo.data.validity import not_finite
from megatron_stppo.model.optimizer import Trainer
from megatron_stppo.parallel.collectives import any_rank, gather_records
from megatron_stppo.parallel.groups import MeshRank
from megatron_stppo.training.guard import dumps
from megatron_stppo.weights.reshard.resharder import ReshardError

WINDOW = 10  # iterations


@dataclass(frozen=True)
class Watch:
    """A column of metrics.jsonl, and what to say if its values of the last WINDOW iterations are wrong."""

    column: str
    wrong: Callable[[list[float]], bool]
    text: str


LAST = f"of the last {WINDOW} iterations"
PLAIN = "nothing is wrong if rewards rise, but the run is what it would be without it"
WATCHED = {
    "clipping": Watch(
        "actor/clip_fraction",
        lambda shares: not any(shares),
        f"clipping changed no step {LAST}; {PLAIN}",
    ),
    "selection": Watch(
        "actor/selected",
        lambda shares: min(shares) == 1,
        f"the selection took nothing out of any step {LAST}; {PLAIN}",
    ),
    "correction": Watch(
        "actor/correction_scale",
        lambda scales: all(scale == 1 for scale in scales),
        f"the correction changed no step {LAST}; it acts only where tokens are clipped, and where "
        "algorithm.correction_floor lets it",
    ),
    "controller": Watch(
        "actor/rate_scale",
        lambda factors: all(factor == 1 for factor in factors),
        f"the controller algorithm.rate changed no step {LAST}; {PLAIN}",
    ),
    "rate": Watch(
        "actor/effective_share",
        lambda shares: statistics.fmean(shares) < 0.3,
        f"the run is nearly frozen: the steps {LAST} had less than 30 % of the configured rate. Compare "
        "actor/correction_scale and actor/rate_scale: the policy moves further in a step than the bounds, or "
        "algorithm.rate_kl, allow; lower update.actor.lr, or take fewer steps from the same rollouts",
    ),
    "critic": Watch(
        "critic/explained_variance",
        lambda shares: statistics.fmean(shares) < 0.05,
        f"the critic explained less than 5 % of the variance of the returns {LAST}; raise update.critic.lr "
        "or update.critic_steps, or begin with update.critic_only or `cold-start --critic`",
    ),
}


class Acting:
    """Keeps columns of the last WINDOW iterations that applied a step. The rate's warm-up is left out."""

    def __init__(self, algorithm: AlgorithmConfig, rate: float) -> None:
        """rate: update.actor.lr."""
        applies = {
            "clipping": algorithm.clips,
            "selection": algorithm.loss is None and algorithm.select != "all",
            "correction": algorithm.correction != "off",
            "controller": algorithm.rate != "constant",
            "rate": algorithm.correction != "off" or algorithm.rate == "kl",
            "critic": algorithm.advantage == "gae",
        }
        self._values = {name: deque[float](maxlen=WINDOW) for name, it_does in applies.items() if it_does}
        self._said: set[str] = set()
        self._rate = rate

    def look(self, row: Mapping[str, Any]) -> list[str]:
        """Record an iteration's row. Return warnings, each once in a run.

        Clipping and correction, which acts only beside it, give one. A column that the row lacks, because its
        value would mean nothing, is not recorded.
        """
        if row.get("actor/held", 1.0) == 1.0 or row["actor/lr"] < self._rate * (1 - 1e-9):
            return []
        late = []
        for name, values in self._values.items():
            value = row.get(WATCHED[name].column)
            if value is not None:
                values.append(value)
            if len(values) == WINDOW and WATCHED[name].wrong([*values]) and name not in self._said:
                late.append(name)
        self._said |= set(late)
        return [WATCHED[name].text for name in late if name != "correction" or "clipping" not in late]

    def state(self) -> dict[str, Any]:
        """Return the state for the checkpoint, which JSON can represent."""
        return {
            "values": {name: list(values) for name, values in self._values.items()},
            "said": sorted(self._said),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, values in state.get("values", {}).items():
            if name in self._values:
                self._values[name].extend(values)
        self._said |= set(state.get("said", ()))


# The metrics that are checked. A magnitude up to this floor is never a spike: when the first rewards appear
# after a time without any, all these metrics rise from 0 to a small value.
FLOORS = {
    "actor/objective": 1.0,
    "actor/gradient_norm": 1.0,
    "actor/kl_to_old": 0.05,  # nats per token; the clip bounds of 0.2 allow about 0.02
    "critic/loss": 1.0,
}
TO_DEVIATION = 1.4826  # times the median absolute deviation: the standard deviation of a normal distribution
log = logging.getLogger(__name__)
LEAST = 0.1  # the deviation is at least this fraction of the median


class Spikes:
    """Detects spikes relative to the last `window` iterations, as soon as half as many have been recorded.

    The recent values are described by their median and their median absolute deviation.
    Example: window 4, deviations 10, past 2, 2, 3, 2: the median is 2, the deviation LEAST * 2, the bound 4.
    """

    def __init__(self, window: int, deviations: float) -> None:
        self._deviations, self._window = deviations, window
        self._past: dict[str, deque[float]] = {name: deque(maxlen=window) for name in FLOORS}

    def look(self, row: Mapping[str, Any]) -> list[str]:
        """Return the spikes of an iteration, and record its values. Ignores values that are missing or not
        finite. Example of a spike: "critic/loss=30 exceeds 2.5"."""
        spikes = []
        for name, past in self._past.items():
            value = abs(row.get(name, math.nan))
            if not math.isfinite(value):
                continue
            if 2 * len(past) >= self._window and value > (bound := self._bound(name)):
                spikes.append(f"{name}={value:.4g} exceeds {bound:.4g}")
            past.append(value)
        return spikes

    def _bound(self, name: str) -> float:
        past = self._past[name]
        median = statistics.median(past)
        deviation = TO_DEVIATION * statistics.median(abs(value - median) for value in past)
        return max(FLOORS[name], median + self._deviations * max(deviation, LEAST * median))

    def state(self) -> dict[str, list[float]]:
        """Return the recorded values, which JSON can represent; restore() continues from them exactly."""
        return {name: list(past) for name, past in self._past.items()}

    def restore(self, state: Mapping[str, list[float]]) -> None:
        for name, past in self._past.items():
            past.extend(state.get(name, ()))


# {whether rewards do not vary: (why no step of the actor was applied, what the user can do)}
_HELD = {
    True: ("rewards do not vary", "look at the episodes and their rewards, or use more or other tasks"),
    False: (
        "no token carries loss",
        "look at the outcomes of the episodes; algorithm.mismatch=mask can remove all tokens",
    ),
}


class UpdateGuard:
    """Checks every update, and warns, dumps, rolls back or ends the run as the configuration requires.

    Example: row |= guard.look(12, row, batch, group_N) after the update of iteration 12.
    """

    def __init__(
        self,
        config: Config,
        mesh: MeshRank,
        trainers: Mapping[str, Trainer],
        saver: saving.Saver,
        rollback: bool = True,
    ) -> None:
        """rollback: False if `saver` has no checkpoints to roll back to."""
        run = self._run = config.run
        self._rolls_back = rollback and run.rollback
        self._mesh, self._trainers, self._saver = mesh, dict(trainers), saver
        self._acting = Acting(config.algorithm, config.update.actor.lr)
        self._critic_only = config.update.critic_only
        self._spikes = Spikes(run.spike_window, run.spike_deviations)
        self._taken: int | None = None  # step of the last rollback's checkpoint
        self._held = 0  # iterations in a row in which no step of the actor was applied

    def look(
        self, iteration: int, row: Mapping[str, Any], batch: Batch, group_N: Tensor, hold: bool = False
    ) -> dict[str, float]:
        """Check an update; return the columns fault/* for the iteration's row.

        iteration: from 1. hold: whether the actor's steps were held because rewards do not vary. The metrics
        of steps that were not applied are no spikes, and later ones are not compared with them.

        Collective. All ranks return the same values. Raises DoNotRestart when more steps than
        run.nonfinite_budget were refused.
        """
        unapplied = row.get("actor/held", 0.0) == 1.0
        self._count_held(iteration, unapplied and iteration > self._critic_only, hold)
        compared = {k: v for k, v in row.items() if not (unapplied and k.startswith("actor/"))}
        spikes = self._spikes.look(compared)
        refused = [f"{role}: steps that are not finite" for role in self._trainers if row[f"{role}/skipped"]]
        spiked = any_rank(bool(spikes))
        where = _where_not_finite(batch) if refused else []
        reasons = [*refused, *where, *spikes]
        for reason in reasons:
            self._warn(iteration, reason)
        if {"none": False, "faults": spiked or bool(refused), "all": True}[self._run.dump]:
            run, mesh = self._run, self._mesh
            dumps.write(run.folder, iteration, batch, group_N, mesh, reasons, run.keep_dumps)
        self._spend_budget(where)
        for text in self._acting.look(row):
            self._warn(iteration, text)
        return {"fault/spikes": float(len(spikes))} | (
            self._roll_back(iteration) if spiked and self._rolls_back else {}
        )

    def state(self) -> dict[str, Any]:
        """Return the state for the checkpoint, which JSON can represent."""
        return {"spikes": self._spikes.state(), "held": self._held, "acting": self._acting.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._spikes.restore(state.get("spikes", {}))
        self._held = state.get("held", 0)
        self._acting.restore(state.get("acting", {}))

    def _count_held(self, iteration: int, held: bool, by_rewards: bool) -> None:
        """Count the iterations in a row in which no step of the actor was applied.

        Warns at the 1st, 2nd, 4th, 8th, .. of them, so that a long series does not fill the console.
        """
        self._held = self._held + 1 if held else 0
        if self._held & (self._held - 1) == 0 and self._held:
            often = f", {self._held} iterations in a row" if self._held > 1 else ""
            why, advice = _HELD[by_rewards]
            self._warn(iteration, f"{why}, so the actor is not updated{often}; {advice}")

    def _spend_budget(self, where: list[str]) -> None:
        """Raise DoNotRestart if more steps than run.nonfinite_budget were not finite.

        `where`: which columns of the last batch are not finite.
        """
        skipped, budget = sum(t.skipped for t in self._trainers.values()), self._run.nonfinite_budget
        if skipped > budget:
            cause = f"; the last batch: {where[0]}" if where else ""
            advice = remedy(where, any(t.updates for t in self._trainers.values()))
            raise DoNotRestart(
                f"{skipped} steps were not finite, run.nonfinite_budget={budget}{cause}; {advice}"
            )

    def _roll_back(self, iteration: int) -> dict[str, float]:
        newest = self._saver.newest()
        if newest == self._taken:
            self._warn(iteration, "no second rollback before there is a newer checkpoint")
            return {}
        skipped = {role: trainer.skipped for role, trainer in self._trainers.items()}
        state = self._saver.load(self._trainers)
        if state is None:
            self._warn(iteration, "no rollback: there is no checkpoint yet")
            return {}
        for role, trainer in self._trainers.items():
            trainer.skipped = skipped[role]  # a rollback does not refill the budget
        self._taken = newest
        self._warn(iteration, f"rolled back to step_{state['iteration']}, continuing with the next tasks")
        return {"fault/rolled_back_to": float(state["iteration"])}

    def _warn(self, iteration: int, text: str) -> None:
        if self._mesh.rank == 0:
            log.warning("iteration %d: %s", iteration, text)


def check_mismatch(config: Config, row: dict[str, Any]) -> None:
    """Raise ReshardError if the engine's log-probs differ too much from the trainer's.

    Only tokens of the version that was updated are compared: older versions have other log-probs. Without
    such tokens nothing is compared, which is usual in asynchronous training with max_staleness above 0. The
    row is equal on all ranks, so all ranks raise together. A refused update has compared nothing.

    The engine divides the probability of a token by that of all tokens which nucleus sampling keeps. They
    have top_p of the probability or more, so this raises a log-prob by -log(top_p) nats or less.
    """
    difference, r = row.get("mismatch/current_mean_abs", 0.0), config.rollout
    if difference > r.max_mismatch - math.log(r.top_p):  # NaN passes: the update has skipped and counted it
        nucleus = f" (rollout.top_p={r.top_p} explains up to {-math.log(r.top_p):.3g})" if r.top_p < 1 else ""
        raise ReshardError(
            f"engine and trainer disagree by {difference:.3g} nats per token{nucleus}, rollout.max_mismatch="
            f"{r.max_mismatch}; the engine uses other weights or another precision than the trainer"
        )


def remedy(where: list[str], applied: bool) -> str:
    """Return what the user can change. It depends on which columns of the batch are not finite, and on
    whether any step was applied before.

    Example: remedy(["reward_T: 1 of 40 .."], True).
    """
    if any(text.startswith("reward_T") for text in where):
        return "the environment returned these rewards, correct it to return finite numbers"
    if not applied:
        return "no step was applied, so the model of model.path itself computes them; give another model"
    return "lower update.actor.lr and update.critic.lr"


def _where_not_finite(batch: Batch) -> list[str]:
    """Return which columns of the batch are not finite, and on which ranks if not on all. Collective.

    Example: ["value_T: 3 of 40 not finite on ranks [1]"], although all ranks should hold the same values.
    """
    of_rank = gather_records(not_finite(batch), str)
    every = list(range(len(of_rank)))
    ranks = {text: [rank for rank in every if text in of_rank[rank]] for said in of_rank for text in said}
    return [text if on == every else f"{text} on ranks {on}" for text, on in ranks.items()]
