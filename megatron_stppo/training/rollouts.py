"""Where the trajectories come from: the interface that the training loop uses, and what it evaluates with it.

colocated.Worker plays them on the ranks of the trainer, by a ledger (data/ledger.py) with
staleness 0 (`resampled`); replicas.trainer.served.Served has replicas for it.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from megatron_stppo.base.types import FAILED, Summary, Task, Trajectory
from megatron_stppo.config import Config, RunConfig
from megatron_stppo.data.exchange import Played
from megatron_stppo.data.ledger import Ledger, Terms, without_variance
from megatron_stppo.model.learner import Learner
from megatron_stppo.model.offload import Phase
from megatron_stppo.observe.describe import environment_metrics, standard_error
from megatron_stppo.observe.trajectory_log import TrajectoryLog
from megatron_stppo.parallel.collectives import all_to_all, decode, encode, gather_records
from megatron_stppo.rollout.episodes.collect import Progress, RolloutSettings
from megatron_stppo.rollout.episodes.episode import Limits
from megatron_stppo.rollout.episodes.failures import warn
from megatron_stppo.rollout.episodes.fitting import SEED, FittingTasks, fitting_tasks

NO_TASK = Task("", (), (), "", 0)


def resampled(
    take: Callable[[int], list[Task]], play: Callable[[Sequence[Task], int], Played], terms: Terms
) -> Played:
    """Play the groups of a batch, and others in the place of those that dynamic sampling drops.

    Collective. The batch has the groups with variance and all groups of the last round, in the order in which
    they were played. Played.dropped has the other groups; it is None if none may be dropped.

    take: returns the next tasks. play: plays the groups of tasks, whose first has the given number.
    Example: 4 tasks per batch, resample=1; of the groups 0 to 3, group 1 has no variance, and group 4 is
    played in its place. The batch has groups 0, 2, 3 and 4, also if group 4 has no variance, as its groups 0,
    1, 2 and 3.
    """
    ledger, tasks, played, dropped = Ledger(terms), list[Task](), list[Played](), list[Summary]()
    new = ledger.admit(0)
    while new:
        drawn = take(len(new))
        played.append(play(drawn, len(tasks)))
        tasks += drawn
        for group in new:
            ledger.complete(group.number)
        flat = without_variance(played[-1].every).intersection(ledger.droppable())
        dropped += [summary for summary in played[-1].every if summary.group in flat]
        played[-1] = without_groups(played[-1], flat)
        new = ledger.replace(sorted(flat))
    batch = in_one(played, tasks) if dropped else played[0]
    return replace(batch, dropped=dropped if terms.resample else None)


def without_groups(played: Played, groups: set[int]) -> Played:
    """Return the rollout without some of its groups."""
    ends = [0, *accumulate(played.counts)]
    of_rank = [played.every[first:last] for first, last in pairwise(ends)]
    left = [[summary for summary in of_one if summary.group not in groups] for of_one in of_rank]
    return Played(
        [summary for of_one in left for summary in of_one],
        [trajectory for trajectory in played.own if trajectory.group not in groups],
        [len(of_one) for of_one in left],
    )


def in_one(rollouts: Sequence[Played], tasks: Sequence[Task]) -> Played:
    """Return one rollout of all trajectories, with the groups 0, 1, ... in the order of their numbers.

    Collective. Trajectories are in the order of the rollouts, and each rank gets an equal part of them. The
    order, which decides their minibatches, does not depend on the number of ranks.

    rollouts: with different groups, ascending from one rollout to the next. tasks: by the number of the
    group; every rank has them, so they are not sent.
    Example: two ranks, of which rank 0 has the trajectories a, b of the first rollout and e of the second,
    and rank 1 has c, d, f and g: rank 0 gets a, b, c, and rank 1 gets d, e, f, g.
    """
    every = [summary for rollout in rollouts for summary in rollout.every]
    number = {group: place for place, group in enumerate(sorted({summary.group for summary in every}))}
    world, rank = dist.get_world_size(), dist.get_rank()
    cuts = [len(every) * r // world for r in range(world + 1)]
    target = [r for r in range(world) for _ in range(cuts[r], cuts[r + 1])]
    owner = [r for rollout in rollouts for r, count in enumerate(rollout.counts) for _ in range(count)]
    own = iter([trajectory for rollout in rollouts for trajectory in rollout.own])
    sent: list[list[Trajectory]] = [[] for _ in range(world)]
    for source, destination in zip(owner, target, strict=True):
        if source == rank:
            sent[destination].append(replace(next(own), task=NO_TASK))
    received = [iter(of_rank) for of_rank in _exchanged(sent)]
    mine = [next(received[source]) for source, to in zip(owner, target, strict=True) if to == rank]
    return Played(
        [replace(summary, group=number[summary.group]) for summary in every],
        [replace(t, task=tasks[t.group], group=number[t.group]) for t in mine],
        [last - first for first, last in pairwise(cuts)],
    )


def _exchanged(sent: Sequence[Sequence[Trajectory]]) -> list[list[Trajectory]]:
    """Send sent[r] to rank r, and return what each rank has sent to this one. Collective."""
    payloads = [encode(list(of_rank)) for of_rank in sent]
    sizes = [row for (row,) in gather_records([[len(payload) for payload in payloads]], list[int])]
    to_me = [of_rank[dist.get_rank()] for of_rank in sizes]
    body = torch.frombuffer(bytearray(b"".join(payloads)), dtype=torch.uint8)
    got = all_to_all(body, [len(payload) for payload in payloads], to_me).cpu()
    return [decode(part.numpy().tobytes(), list[Trajectory]) for part in got.split(to_me)]


class Rollouts(Protocol):
    """All methods are collective over the trainer's ranks."""

    learner: Learner

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...

    def publish(self, version: int) -> None:
        """Serve the policy's weights as `version`. If it is served already, they must be unchanged."""

    def draw(self, iteration: int) -> Played:
        """Return the trajectories that iteration `iteration` trains on."""

    def play(
        self,
        tasks: Sequence[Task],
        samples: int,
        settings: RolloutSettings,
        seed: int,
        progress: Progress | None = None,
    ) -> Played:
        """Play `samples` episodes of each task with the published version, and return their trajectories.

        Raises Abandoned soon after any rank has received notice.
        """

    def load_for(self, phase: Phase) -> None:
        """Load what the phase needs into the device's memory."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the rollouts, JSON-serialisable."""

    def episodes(self) -> bytes:
        """Return the episodes that a checkpoint keeps besides the state, b"" if there are none."""

    def restore(self, state: Mapping[str, Any], episodes: Callable[[], bytes]) -> None:
        """Continue from a checkpoint's state. Call it before the first `publish`.

        episodes: reads those of the checkpoint. It is called on the first rank at most.
        """

    def measure(self) -> dict[str, Any]:
        """Return metrics since the last call, equal on all ranks."""

    def close(self) -> None:
        """End the engine or the replicas, and the process groups."""


def rollout_settings(config: Config, temperature: float | None = None) -> RolloutSettings:
    """Return the configured rollout settings.

    temperature: for evaluation, replaces the configured temperature; top_p is then 1.
    """
    r, e = config.rollout, config.environment
    return RolloutSettings(
        limits=Limits.of(config),
        temperature=r.temperature if temperature is None else temperature,
        top_p=r.top_p if temperature is None else 1.0,
        overlap_tools=r.overlap_tools,
        concurrency=e.concurrency,
        deadline=e.deadline,
        tool_wait=e.tool_wait,
    )


def seed_of(run: RunConfig, iteration: int) -> int:
    """Return the random seed for the rollouts of `iteration`."""
    return run.seed * 1_000_003 + iteration


def held_out_tasks(config: Config, *, shown: bool) -> FittingTasks:
    """Return the tasks that evaluations play. shown: as for `fitting_tasks`."""
    return fitting_tasks(config, "evaluate", shown=shown)


def evaluate_tasks(
    rollouts: Rollouts,
    held_out: FittingTasks,
    log: TrajectoryLog | None = None,
    iteration: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Return evaluate/* of the published weights on held-out tasks. Random seeds are the same every time.

    Collective. Equal on all ranks, except for the times.
    """
    config = rollouts.learner.config
    settings = rollout_settings(config, config.evaluate.temperature)
    started = time.perf_counter()
    with log.failing(iteration) if log is not None else nullcontext():
        played = rollouts.play(held_out.tasks, config.evaluate.samples, settings, SEED, progress)
    seconds = time.perf_counter() - started
    every = [t for t in played.every if t.branch == 0]  # an episode counts once
    warn("evaluation", every, rollouts.learner.mesh.rank)
    if log is not None:
        log.write(iteration, played.own)
    long = [t for t in every if t.overlong_prompt]  # the environment's prompt; that of the row was not
    every = [t for t in every if not t.overlong_prompt]
    counted = Counter(t.outcome for t in every)
    usable = [t for t in every if t.outcome not in FAILED]
    return {
        "evaluate/reward": statistics.fmean([t.reward for t in usable] or [0.0]),
        "evaluate/exact_match": counted["ok"] / max(1, len(usable)),
        "evaluate/standard_error": standard_error(
            [float(t.outcome == "ok") for t in usable], [t.group for t in usable]
        ),
        "evaluate/called_tool": statistics.mean(t.tool_calls > 0 for t in every),
        "evaluate/turns": sum(len(t.turns) for t in played.every) / len(every),
        "evaluate/failed": counted["error"] + counted["timeout"],
        "evaluate/overlong_prompts": held_out.overlong + len({t.group for t in long}),
        "evaluate/episodes": len(every),
        "evaluate/tokens_per_second": sum(turn.tokens for t in played.every for turn in t.turns) / seconds,
        **{f"evaluate/{name}": value for name, value in environment_metrics(every).items()},
    }
