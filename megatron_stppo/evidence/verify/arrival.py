"""Checks that the engine has the weights that were trained, and no keys and values of older ones.

Two steps with a learning rate far above any in use change the policy by much more than rounding does. After
each, the engine generates with the new version, and the trainer scores the tokens: the limits of `audit` hold
for every token, and the tokens must not resemble the version before. A colocated engine gets prompts of
random tokens, of which no cache can hold a part. So a difference in the episodes alone, whose prompts it has
seen, comes from its cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stppo.base.types import Task, Trajectory, Turn
from megatron_stppo.cluster.launch import process
from megatron_stppo.data.packing import to_batch
from megatron_stppo.evidence.audit import limits
from megatron_stppo.evidence.audit.scoring import Piece, score
from megatron_stppo.evidence.verify.stage import Checked, Stage, everywhere, judged, whole
from megatron_stppo.model.pipeline import forward_backward
from megatron_stppo.parallel.collectives import gather_records
from megatron_stppo.rollout.vllm.generation import Finished
from megatron_stppo.training.colocated import Worker
from megatron_stppo.training.update.actor_step import ActorLoss
from megatron_stppo.weights.reshard.verify import ReshardError

WEIGHTS, CACHE = "weights arrive", "the prefix cache is fresh"
PROMPTS, PROMPT, ANSWER = 24, 300, 8  # prompts of random tokens, their length, and that of their answers
RATE, FASTER, STEPS = 1e-5, 4.0, 8  # learning rate of the step; its factor if it moves too little; attempts
# How far the steps are to move the log-probs, in limits of the mean difference, and how far at least to show
# weights that do not arrive. Adapters below a head with small weights cannot move them far.
MOVED, LEAST = 20.0, 2.0


@dataclass(frozen=True)
class Agreement:
    """Engine and trainer on the same tokens."""

    mean: float  # nats, mean difference
    most: float  # that the mean may be
    beyond: int  # tokens above their own limits
    older: float  # how much the engine's log-probs are those of the version before, at least; 0 to 1
    versions: frozenset[int]  # that the tokens name

    def holds(self, version: int) -> bool:
        right = self.mean <= self.most and not self.beyond and self.older <= limits.RESEMBLES
        return right and self.versions == {version}

    def __str__(self) -> str:
        return f"{self.mean:.1e} nats from the trainer ({self.most:.1e} allowed)"


def arrival(stage: Stage) -> Iterator[Checked]:
    """Train two large steps, and compare the engine with the trainer after each. Collective."""
    said, stale, seen = list[str](), list[str](), _seen(stage)
    wrong = kept = small = ""
    for _ in range(2):
        stage.rollouts.load_for("score")
        before = stage.weights()
        moved, most = large_step(stage)
        if not moved > LEAST * most:
            small = f"{STEPS} steps move the log-probs by {moved:.2g} nats, and {LEAST * most:.2g} would show"
            wrong = "" if moved > 0 else small
            break
        try:
            stage.publish()
        except ReshardError as error:
            wrong = f"version {stage.version}: {error}"
            break
        fresh = _random_prompts(stage, seed=stage.version) or everywhere(stage.play())
        again = [*_random_prompts(stage, seed=0), *everywhere(stage.play())]
        stage.rollouts.load_for("score")
        found = agreement(stage, fresh, before)
        said.append(f"version {stage.version}: {found}, moved by {moved:.2g}")
        if not found.holds(stage.version):
            wrong = f"{said[-1]}; {_reason(found, stage.version)}"
            break
        cached = agreement(stage, again, before)
        stale.append(f"version {stage.version}: {cached}")
        if not cached.holds(stage.version):
            kept = stale[-1]
            break
    if small and not wrong:
        yield from (Checked(check, "skipped", small) for check in (WEIGHTS, CACHE))
        return
    yield judged(WEIGHTS, not wrong, wrong or "; ".join(said), REMEDY[bool(stage.config.model.lora.rank)])
    if wrong or not seen:
        reason = "the weights do not arrive" if wrong else "there is none, or no prompt fills a block"
        yield Checked(CACHE, "skipped", reason)
        return
    yield judged(
        CACHE,
        not kept,
        f"prompts seen before, {kept or '; '.join(stale)}",
        "rollout.vllm.enable_prefix_caching=false avoids it: the engine must drop its blocks when its "
        "weights change (Engine.refresh)",
    )


def _seen(stage: Stage) -> bool:
    """Let the engine generate with the present weights. Return whether its prefix cache can then hold any
    prompt."""
    stage.publish()  # wakes a colocated engine
    _random_prompts(stage, seed=0)
    worker = stage.rollouts
    if not isinstance(worker, Worker):
        return True
    return 0 < worker.engine.prefix_block < _length(stage)


REMEDY = {
    False: "rollout.engine_tensor, parallel: report the layout with this line; the reshard does not fit it",
    True: "model.lora.sync: set it to merged, which copies whole weights, and compare",
}


def _reason(found: Agreement, version: int) -> str:
    if found.versions != {version}:
        return f"its tokens name the versions {sorted(found.versions)}"
    if found.older > limits.RESEMBLES:
        return f"at least {found.older:.0%} of the difference is that to the version before"
    return f"{found.beyond} tokens are above their own limits" if found.beyond else "their weights differ"


def agreement(stage: Stage, episodes: Sequence[Trajectory], before: Sequence[Tensor]) -> Agreement:
    """Compare the engine's log-probs of the episodes with the trainer's, and with those of the weights
    `before` (none: only with the trainer's). Collective."""
    batch, learner = to_batch(episodes), stage.learner
    every_T = torch.ones_like(batch.version_T, dtype=torch.bool)
    piece = Piece(0, whole(batch), batch, every_T, learner)
    scored = score(learner, [piece], stage.version, None)
    difference_T = (scored.named_T - piece.engine_T).abs()
    older = None
    if before:
        with stage.with_weights(before):
            older_T = piece.logprobs()
        given = (scored.named_T, scored.nudged_T, older_T, piece.engine_T, piece.sequence_T)
        older = limits.resemblance(*given)
    # a single token of a mixture of experts may choose others after rounding
    single = not (learner.shape.experts and process.dtype(stage.config) != torch.float32)
    beyond = int((~(difference_T <= scored.limit_T)).sum()) if single else 0
    return Agreement(
        float(difference_T.mean()),
        scored.most,
        beyond,
        0.0 if older is None else max(0.0, older.least),
        frozenset(batch.version_T.tolist()),
    )


def large_step(stage: Stage) -> tuple[float, float]:
    """Take optimizer steps with a large learning rate until the log-probs of the episodes have moved far.

    Collective. Return by how much, in nats, on average, and the limit of the mean difference. The advantages
    are random.
    """
    actor, packer = stage.actor, stage.learner.packer
    head, given = stage.learner.head(actor.model), replace(stage.batch, old_logprob_T=None)
    given = replace(given, advantage_T=stage.random_T(stage.version))
    stage.rollouts.load_for("score")
    before_T, most = stage.logprobs(stage.episodes), agreement(stage, stage.episodes, ()).most
    stage.rollouts.load_for("update")
    rate, moved = RATE, 0.0
    for _ in range(STEPS):
        for minibatch in stage.batch.epochs[0]:
            loss = ActorLoss(given, stage.weights_of(minibatch), stage.plain, head)
            actor.zero()
            forward_backward(actor.model, packer.pack(given, minibatch), loss)
            actor.step(actor.reduce(), rate_scale=rate / actor.learning_rate)
        moved = float((stage.logprobs(stage.episodes) - before_T).abs().mean())
        if moved > MOVED * most:
            break
        rate *= FASTER
    return moved, most


def _length(stage: Stage) -> int:
    """Return the number of tokens of a random prompt."""
    return max(1, min(PROMPT, stage.config.max_context - ANSWER))


def _random_prompts(stage: Stage, seed: int) -> list[Trajectory]:
    """Let a colocated engine continue random tokens. Return all ranks' trajectories; none for replicas,
    which generate within episodes only. Collective."""
    if not isinstance(stage.rollouts, Worker):
        return []
    engine, ids = stage.rollouts.engine, f"verify-{stage.version}-{seed}-{{}}"
    generator = torch.Generator().manual_seed(1000 * seed + engine.replica)
    shape = (PROMPTS, _length(stage))
    prompts = torch.randint(0, stage.learner.shape.vocab, shape, generator=generator).tolist()
    for n, prompt in enumerate(prompts):
        engine.add(
            ids.format(n), prompt, seed=n, max_tokens=ANSWER, temperature=stage.config.rollout.temperature
        )
    done: dict[str, Finished] = {}
    while engine.unfinished:
        done |= {one.request_id: one for one in engine.step()}
    task, own = Task("verify", (), ("",), "train", 0), []
    for n, prompt in enumerate(prompts):
        one = done[ids.format(n)]
        turn = Turn(one.token_ids, one.logprobs, (), 0.0, one.versions)
        own.append(Trajectory(task, tuple(prompt), (turn,), "ok"))
    first = dist.get_rank(engine.group) == 0  # the ranks of a replica generate the same tokens
    return [t for of_rank in gather_records(own if first else [], Trajectory) for t in of_rank]
