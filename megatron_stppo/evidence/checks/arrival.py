"""Checks that the engine has the weights that were trained, and no keys and values of older ones.

Two steps with a learning rate far above any in use change the policy by much more than rounding does. After
each, the engine generates with the new version, and the trainer scores the tokens: the limits of `audit` hold
for every token, and the tokens must not resemble the version before. A colocated engine gets prompts of
random tokens, of which no cache can hold a part. So a difference in the episodes alone, whose prompts it has
seen, comes from its cache. Replicas get new weights while they play, and each token of their batches must be
of the version that it names.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stppo.base.types import EstimatedBatch, Task, Trajectory, Turn
from megatron_stppo.data.packing import to_batch
from megatron_stppo.evidence.bench import scoring
from megatron_stppo.evidence.bench.scoring import Piece
from megatron_stppo.evidence.bench.stage import Agreement, Checked, Stage, everywhere, judged
from megatron_stppo.model.pipeline import forward_backward
from megatron_stppo.parallel.collectives import gather_records
from megatron_stppo.rollout.vllm.generation import Finished
from megatron_stppo.training.colocated import Worker
from megatron_stppo.weights.reshard.resharder import ReshardError

WEIGHTS, CACHE = "weights arrive", "the prefix cache is fresh"
PROMPTS, PROMPT, ANSWER = 24, 300, 8  # prompts of random tokens, tokens of the longest, and of an answer
RATE, FASTER, STEPS = 1e-5, 4.0, 8  # learning rate of the step; its factor if it moves too little; attempts
# How far the steps are to move the log-probs, in limits of the mean difference, and how far at least to show
# weights that do not arrive. Adapters below a head with small weights cannot move them far.
MOVED, LEAST = 20.0, 2.0


def arrival(stage: Stage) -> Iterator[Checked]:
    """Train two large steps, and compare the engine with the trainer after each. Collective."""
    said, stale, seen = list[str](), list[str](), _seen(stage)
    stage.rollouts.load_for("score")
    most, wrong, kept, small = stage.agreement(stage.episodes).scored.most, "", "", ""
    served = dict[int, list[Tensor]]()  # the weights of each version, with replicas
    for _ in range(2):
        stage.rollouts.load_for("score")
        before = stage.weights()
        moved = large_step(stage, most)
        if not moved > LEAST * most:
            small = f"{STEPS} steps move the log-probs by {moved:.2g} nats, and {LEAST * most:.2g} would show"
            wrong = "" if moved > 0 else small
            break
        if not isinstance(stage.rollouts, Worker):
            served[stage.version] = before
            stage.draw()  # what it admits is played while the next version arrives
        try:
            stage.publish()
        except ReshardError as error:
            wrong = f"version {stage.version}: {error}"
            break
        fresh = _random_prompts(stage, seed=stage.version) or everywhere(stage.play())
        again = [*_random_prompts(stage, seed=0), *everywhere(stage.play())] if seen else []
        stage.rollouts.load_for("score")
        arrived = stage.agreement(fresh, before)
        said.append(f"version {stage.version}: {arrived}, moved by {moved:.2g}")
        if fault := arrived.fault(stage.version):
            wrong = f"{said[-1]}; {fault}"
            break
        cached = stage.agreement(again, before) if seen else arrived
        stale.append(f"version {stage.version}: {cached}")
        if cached.fault(stage.version):
            kept = stale[-1]
            break
    if small and not wrong:
        yield from (Checked(check, "skipped", small) for check in (WEIGHTS, CACHE))
        return
    if served and not wrong and stage.config.rollout.top_p == 1.0:  # else the engine's are of fewer tokens
        wrong = "; ".join(_misnamed(stage, served | {stage.version: stage.weights()}))
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


def _misnamed(stage: Stage, served: Mapping[int, list[Tensor]]) -> Iterator[str]:
    """Yield for which versions the newest batches have tokens that they have not generated. Collective."""
    stage.draw()
    stage.rollouts.load_for("score")
    batch = to_batch([t for _, episodes in stage.drawn[-2:] for t in episodes])
    for version, weights in served.items():
        piece = replace(Piece.of(stage.learner, batch), own_T=batch.version_T == version)
        if piece.own_T.any():
            with stage.with_weights(weights):
                scored = scoring.score(stage.learner, [piece], version)
            batches = Agreement(scored, None, frozenset((version,)))
            if fault := batches.fault(version):
                yield f"a batch's tokens of version {version}: {batches}; {fault}"


def _seen(stage: Stage) -> bool:
    """Let the engine generate with the present weights. Return whether its prefix cache can then hold any
    prompt."""
    stage.publish()  # wakes a colocated engine
    _random_prompts(stage, seed=0)
    rollouts = stage.rollouts
    return not isinstance(rollouts, Worker) or 0 < rollouts.engine.prefix_block < _longest(stage)


REMEDY = {
    False: "rollout.engine_tensor, parallel: report the layout with this line; the reshard does not fit it",
    True: "model.lora.sync: set it to merged, which copies whole weights, and compare",
}


def large_step(stage: Stage, most: float) -> float:
    """Take optimizer steps with a large learning rate until the log-probs of the episodes have moved far.

    Collective. Return by how much, in nats, on average. most: the limit of the mean difference. The
    advantages are random.
    """
    actor, packer = stage.actor, stage.learner.packer
    random_T = stage.random_T(stage.version)
    batch = EstimatedBatch.of(stage.batch, old_logprob_T=None, advantage_T=random_T)
    stage.rollouts.load_for("score")
    before_T = stage.logprobs(stage.episodes)
    stage.rollouts.load_for("update")
    rate, moved = RATE, 0.0
    for _ in range(STEPS):
        for minibatch in batch.epochs[0]:
            actor.zero()
            forward_backward(actor.model, packer.pack(batch, minibatch), stage.loss(batch, minibatch))
            actor.step(actor.reduce(), rate_scale=rate / actor.learning_rate)
        moved = float((stage.logprobs(stage.episodes) - before_T).abs().mean())
        if moved > MOVED * most:
            break
        rate *= FASTER
    return moved


def _longest(stage: Stage) -> int:
    """Return the number of tokens of the longest random prompt."""
    return max(1, min(PROMPT, stage.config.max_context - ANSWER))


def _random_prompts(stage: Stage, seed: int) -> list[Trajectory]:
    """Let a colocated engine continue random tokens, few in most prompts. Return all ranks' trajectories;
    none for replicas, which generate within episodes only. Collective."""
    if not isinstance(stage.rollouts, Worker):
        return []
    engine, ids = stage.rollouts.engine, f"verify-{stage.version}-{seed}-{{}}"
    generator = torch.Generator().manual_seed(1000 * seed + engine.replica)
    longest, vocab = _longest(stage), stage.learner.shape.vocab
    lengths = [max(1, longest * (n + 1) ** 2 // PROMPTS**2) for n in range(PROMPTS)]
    prompts = [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in lengths]
    temperature = stage.config.rollout.temperature
    for n, prompt in enumerate(prompts):
        engine.add(ids.format(n), prompt, seed=n, max_tokens=ANSWER, temperature=temperature)
    done: dict[str, Finished] = {}
    while engine.unfinished:
        done |= {finished.request_id: finished for finished in engine.step()}
    task, own = Task("verify", (), ("",), "train", 0), []
    for n, prompt in enumerate(prompts):
        finished = done[ids.format(n)]
        turn = Turn(finished.token_ids, finished.logprobs, (), 0.0, finished.versions)
        own.append(Trajectory(task, tuple(prompt), (turn,), "ok"))
    first = dist.get_rank(engine.group) == 0  # the ranks of a replica generate the same tokens
    return [t for of_rank in gather_records(own if first else [], Trajectory) for t in of_rank]
