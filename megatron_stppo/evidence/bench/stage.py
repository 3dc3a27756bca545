"""What the checks of `verify` share: models and engine of the run, episodes, and the line of a check."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stppo.base.types import EstimatedBatch, Minibatch, Task, Trajectory
from megatron_stppo.config import AlgorithmConfig, Config
from megatron_stppo.data.exchange import Played
from megatron_stppo.data.packing import to_batch
from megatron_stppo.evidence.bench import scoring
from megatron_stppo.evidence.bench.records import Recordings, Said, recorded, watch
from megatron_stppo.evidence.bench.scoring import Piece, Resemblance, Scored
from megatron_stppo.model.learner import Learner
from megatron_stppo.model.optimizer import Trainer, trained
from megatron_stppo.parallel.collectives import gather_records
from megatron_stppo.rollout.episodes.fitting import fitting_tasks
from megatron_stppo.rollout.episodes.play import request_seed
from megatron_stppo.rollout.vllm.vllm_setup import end_of_text_ids
from megatron_stppo.training.colocated import Worker
from megatron_stppo.training.rollouts import Rollouts, rollout_settings, seed_of
from megatron_stppo.training.stages import distribute, score
from megatron_stppo.training.update.actor_step import ActorLoss, minibatch_weights
from megatron_stppo.training.update.own import Own
from megatron_stppo.weights.sharding.hf_load import load_config

Verdict = Literal["ok", "fails", "skipped"]
TASKS = 6  # of data.train
LEAST = 24  # episodes: enough for `resemblance`
PLAYED = 10**6  # the iteration that gives them their seeds, which no other one has
MINIBATCHES, OLDEST = 2, 2  # at most: of an iteration, and serving.max_staleness


@dataclass(frozen=True)
class Checked:
    """One line of the table.

    Example: Checked("first ratio is 1", "ok", "2,412 tokens, largest difference 0").
    """

    check: str
    verdict: Verdict
    measured: str  # the numbers and their limits, or why the check was skipped
    remedy: str = ""  # where it fails: the field to look at, and what to do

    def __str__(self) -> str:
        remedy = f"\n{'':10}{self.remedy}" if self.remedy else ""
        return f"{self.verdict:9} {self.check:40} {self.measured}{remedy}"


def judged(check: str, holds: bool, measured: str, remedy: str) -> Checked:
    """Return the finding of a check that ran. remedy: for one that fails."""
    return Checked(check, "ok", measured) if holds else Checked(check, "fails", measured, remedy)


def faultless(check: str, wrong: Sequence[str], measured: str, remedy: str, shown: int = 1) -> Checked:
    """Return the finding of a check that fails for each line of `wrong`, of which it shows the first."""
    return judged(check, not wrong, "; ".join(wrong[:shown]) or measured, remedy)


@contextmanager
def replaced(owner: Any, method: str, other: Callable[..., Any]) -> Iterator[None]:
    """Context in which an object has another method."""
    own = {method: vars(owner)[method]} if method in vars(owner) else {}
    setattr(owner, method, other)
    try:
        yield
    finally:
        delattr(owner, method)
        vars(owner).update(own)


def first_wrong(
    what: str, own: Sequence[float], needed: Sequence[float], tolerance: float = 0.0
) -> list[str]:
    """Return one line for the first token with another value than needed; none if there is no such token."""
    if len(own) != len(needed):
        return [f"{len(own):,} action tokens with a {what}, {len(needed):,} were generated"]
    pairs = enumerate(zip(own, needed, strict=True))
    wrong = [t for t, (a, b) in pairs if not abs(a - b) <= tolerance * max(1.0, abs(b))]
    if not wrong:
        return []
    t = wrong[0]
    return [f"{what}: {len(wrong):,} of {len(own):,} tokens; token {t} has {own[t]:g}, not {needed[t]:g}"]


@dataclass(frozen=True)
class Agreement:
    """Engine and trainer on the same tokens."""

    scored: Scored
    older: Resemblance | None  # to the version before
    versions: frozenset[int]  # that the tokens name

    def fault(self, version: int) -> str:
        """Return why the engine's log-probs are not those of `version`, or ""."""
        if self.versions != {version}:
            return f"its tokens name the versions {sorted(self.versions)}"
        if self.older is not None and self.older.differs:
            return f"at least {self.older.least:.0%} of the difference is that to the version before"
        if self.scored.beyond:
            return f"{self.scored.beyond} tokens are above their own limits"
        return "" if self.scored.near else "their weights differ"

    def __str__(self) -> str:
        return f"{self.scored.mean:.1e} nats from the trainer ({self.scored.most:.1e} allowed)"


def small(config: Config, data: int, tasks: int) -> Config:
    """Return the configuration with iterations of few episodes, which every minibatch and rank has some of.

    data: the size of data parallelism. tasks: those that there are.
    """
    steps = min(config.update.minibatches, MINIBATCHES)
    each = -(-max(LEAST, 2 * steps * data) // tasks)
    few = {"tasks_per_iteration": tasks, "samples_per_task": each}
    # with other rewards, replicas would drop other groups
    few |= {"resample": 0} if config.serving.replicas else {}
    old = {"max_staleness": min(config.serving.max_staleness, OLDEST)}
    return config.changed(rollout=few, update={"minibatches": steps}, serving=old)


@dataclass
class Stage:
    """One rank's share of what is verified. All methods are collective."""

    config: Config
    rollouts: Rollouts
    tasks: Sequence[Task]  # the first ones of data.train
    own: Own
    version: int = 0  # of the weights that the engine has
    # with replicas: the batches that were drawn, each with the version that was served then
    drawn: list[tuple[int, list[Trajectory]]] = field(default_factory=list)

    @classmethod
    def of(cls, config: Config, rollouts: Rollouts, version: int = 0) -> Self:
        """Publish the present weights as this version, and let the engine play with them."""
        rollouts.publish(version)
        tasks = fitting_tasks(config, "train", shown=False).tasks[:TASKS]
        return cls(config, rollouts, tasks, Own.of(config), version)

    def __post_init__(self) -> None:
        self.records = Recordings(self.config.run.folder)
        with ExitStack() as stack:
            if isinstance(self.rollouts, Worker):
                rollouts, keep = self.rollouts, self.records.keep
                make = partial(recorded, rollouts.make_environment, partial(keep, "said"))
                stack.enter_context(replaced(rollouts, "make_environment", make))
                if dist.get_rank(rollouts.engine.group) == 0:  # its other ranks get the same requests
                    watch(rollouts.engine, partial(keep, "asked"))
            self.played = self.play()  # the rewards are those of the recorder
        self.records.read()
        self.episodes = everywhere(self.played)
        self.rollouts.load_for("score")
        learner = self.learner
        self.batch = score(learner, distribute(learner, self.played, 0))

    @property
    def learner(self) -> Learner:
        return self.rollouts.learner

    @property
    def actor(self) -> Trainer:
        assert self.learner.actor is not None, "models are built for training"
        return self.learner.actor

    def play(self) -> Played:
        """Play the episodes of an iteration with the published version."""
        settings = replace(rollout_settings(self.config), top_p=1.0)  # engine and trainer then agree
        samples = self.config.rollout.samples_per_task
        return self.rollouts.play(self.tasks, samples, settings, seed_of(self.config.run, PLAYED))

    def draw(self) -> Played:
        """Return the next batch of replicas."""
        played = self.rollouts.draw(len(self.drawn))
        self.drawn.append((self.version, [t for t in everywhere(played) if not t.branch]))
        return played

    def settle(self) -> None:
        """Wait until replicas have the newest version, and have played all that was admitted."""
        rollouts: Any = self.rollouts
        if not isinstance(rollouts, Worker):
            rollouts._sender.join()
            rollouts._until(lambda hub: hub.settled() and hub.is_spread())

    def record(self, number: int) -> Said | None:
        """Return what the environment of an episode has said; None if it is not recorded."""
        return self.records.said.get(self.seed(PLAYED, number))

    def seed(self, iteration: int, number: int) -> int:
        """Return the seed of an episode's environment."""
        return request_seed(seed_of(self.config.run, iteration), number, 0)

    @cached_property
    def ends(self) -> list[int]:
        """The end-of-text tokens."""
        path = self.config.model.path
        return end_of_text_ids(path, load_config(path), self.rollouts.tokenizer)

    def drop_models(self) -> None:
        """Free the models of the run. Only the engine can be closed afterwards."""
        rollouts = self.rollouts
        if isinstance(rollouts, Worker):
            rollouts.engine.published = lambda: -1  # that of the reshard holds the weights
            del rollouts.reshard, rollouts.learner
            gc.collect()
            torch.cuda.empty_cache()

    def publish(self) -> None:
        """Serve the policy's weights as the next version."""
        self.version += 1
        self.rollouts.publish(self.version)

    def loss(self, batch: EstimatedBatch, minibatch: Minibatch) -> ActorLoss:
        """Return the loss of a step, without terms that other models need."""
        a, head = plain(self.config.algorithm), self.learner.head(self.actor.model)
        return ActorLoss(batch, minibatch_weights(self.batch, minibatch.chosen, a), a, head)

    def random_T(self, seed: int) -> Tensor:
        """Return a normal number for each action token, in place of advantages: [T]."""
        return torch.randn(len(self.batch.version_T), generator=torch.Generator().manual_seed(seed))

    def logprobs(self, episodes: Sequence[Trajectory]) -> Tensor:
        """Return the trainer's log-probs of the action tokens, float32 [T]; every rank has all episodes."""
        return Piece.of(self.learner, to_batch(episodes)).logprobs()

    def agreement(self, episodes: Sequence[Trajectory], before: Sequence[Tensor] = ()) -> Agreement:
        """Compare the engine's log-probs of the episodes with the trainer's, and with those of the weights
        `before` (none: only with the trainer's)."""
        piece = Piece.of(self.learner, to_batch(episodes))
        scored, older = scoring.score(self.learner, [piece], self.version), None
        if before:
            with self.with_weights(before):
                older = scored.resembles(piece.logprobs())
        return Agreement(scored, older, frozenset(piece.batch.version_T.tolist()))

    def weights(self) -> list[Tensor]:
        """Return a copy of the weights that are trained, on the host."""
        return [w.detach().to("cpu", copy=True) for chunk in self.learner.policy for w in trained(chunk)]

    @contextmanager
    def with_weights(self, weights: Sequence[Tensor]) -> Iterator[None]:
        """Context in which the policy has weights that `weights` returned before."""
        now = self.weights()
        self.set_weights(weights)
        try:
            yield
        finally:
            self.set_weights(now)

    @torch.no_grad()
    def set_weights(self, weights: Sequence[Tensor]) -> None:
        """Give the policy weights that `weights` returned before."""
        own = [w for chunk in self.learner.policy for w in trained(chunk)]
        for weight, value in zip(own, weights, strict=True):
            weight.copy_(value)


def plain(algorithm: AlgorithmConfig) -> AlgorithmConfig:
    """Return the algorithm with its clipping and aggregation, and without terms that other models need."""
    return algorithm.changed(
        mismatch="off", kl_coefficient=0.0, entropy_coefficient=0.0, select="all", loss=None
    )


def steady(algorithm: AlgorithmConfig) -> AlgorithmConfig:
    """Return the plain algorithm whose steps have the configured learning rate."""
    return plain(algorithm).changed(correction="off", correction_probe=False, rate="constant")


def everywhere(played: Played) -> list[Trajectory]:
    """Return the trajectories of all ranks, on every rank. Collective."""
    return [t for own in gather_records(played.own, Trajectory) for t in own]


def of_every_rank(lines: Sequence[str]) -> list[str]:
    """Return the lines of all ranks, each once. Collective."""
    return list(dict.fromkeys(line for own in gather_records(lines, str) for line in own))
