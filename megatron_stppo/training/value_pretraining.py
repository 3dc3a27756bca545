"""The command `cold-start --critic`: train the critic on recorded episodes before reinforcement learning.

The targets are the Monte-Carlo returns (lambda 1) of the policy that the run will begin with. They do not
depend on the critic, so that it is not its own teacher while it is wrong (VAPO, arXiv 2504.05118).
The policy is read once, to check that it has played the episodes, and no optimizer has it.
"""

import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_stppo.base.types import FAILED, Batch, EstimatedBatch, Minibatch, ScoredBatch, Trajectory
from megatron_stppo.checkpoint.convert import export_hf
from megatron_stppo.cluster.launch import process
from megatron_stppo.config import AlgorithmConfig, Config, ConfigError
from megatron_stppo.data.division import Packer, chosen_tokens
from megatron_stppo.data.packing import groups_of, to_batch
from megatron_stppo.model import build
from megatron_stppo.model.layers import layer_spec
from megatron_stppo.model.optimizer import Trainer
from megatron_stppo.model.pipeline import Model, logprobs, packer_of, values
from megatron_stppo.model.policy_head import PolicyHead
from megatron_stppo.observe import trajectory_log
from megatron_stppo.observe.console import explained, say, timed
from megatron_stppo.observe.describe import explained_variance
from megatron_stppo.observe.metrics import progress
from megatron_stppo.observe.run_files import recorded
from megatron_stppo.parallel.groups import MeshRank
from megatron_stppo.training.advantage import estimate, with_observations
from megatron_stppo.training.cold_start import by_tokens, check_refused, free_output
from megatron_stppo.training.update.critic_step import critic_step
from megatron_stppo.weights.sharding.hf_names import ModelShape, read_shape
from megatron_stppo.weights.sharding.spans import training_layouts

EVERY = 10  # steps between two measurements on the held-out episodes
LAMBDA: dict[str, Any] = {"lam": 1.0, "lam_critic": None, "lam_length": None}
COMPARED = 32  # episodes whose log-probs are compared with the policy's


def pretrain(config: Config, run: Path) -> None:
    """Train the critic on the episodes of the run in the folder `run`, and write a Hugging Face folder with
    its value head to cold_start.output. Collective. Raises ConfigError if they are not of model.path."""
    settings = config.cold_start
    mesh, shape = process.start(config), read_shape(config.model.path)
    first_rank, packer = mesh.rank == 0, packer_of(config, shape, mesh)
    played = _episodes(run, shape, config.algorithm)
    tasks = [(t.task.data_source, t.task.split, t.task.index) for t in played]
    taught, held = split(tasks, settings.held_out)
    if min(len(taught), len(held)) < mesh.data_size:
        raise ConfigError(
            f"--critic={run}: has {len(taught)} episodes to train on and {len(held)} held out, and each of "
            f"the {mesh.data_size} data-parallel ranks needs one of both; record more tasks with `rollout`"
        )
    plain = to_batch(played)
    with timed("policy", first_rank):
        _check_policy(config, run, plain, mesh, shape, packer)
    batch = monte_carlo(plain, played, config.algorithm)
    lengths = [t.summary.length for t in played]
    every = itertools.chain.from_iterable(
        by_tokens(order, lengths.__getitem__, settings.batch_tokens, mesh.data_size)
        for order in _epochs(taught, config.run.seed)
    )
    steps = [packer.divide(batch, chosen) for chosen in itertools.islice(every, settings.critic_steps)]
    unseen = packer.divide(batch, held)
    with timed("critic", first_rank):
        model = build.from_hf("critic", shape, config, mesh, process.dtype(config))
        own = config.update.critic
        critic = Trainer(build.data_parallel(model, own.distributed), own, len(steps))
    newest = max(turn.versions[-1][0] for t in played for turn in t.turns)
    say(
        f"{len(taught)} episodes to train on, {len(held)} of {len({tasks[n] for n in held})} other tasks "
        f"held out, of policy versions up to {newest}",
        first_rank,
    )
    after = 0.0  # of the held-out episodes
    for step, minibatch in enumerate(progress(steps, "critic", first_rank, every=None), 1):
        scored, before = measured(critic.model, batch, minibatch, packer)
        row = critic_step(critic, scored, minibatch, config.algorithm.value_clip, packer)
        check_refused(critic, config.run.nonfinite_budget, len(steps), "update.critic.lr")
        shown = f"loss {row['critic/loss']:.4f}, explained variance {explained(before)} before the step"
        if step % EVERY == 0 or step == len(steps):
            after = measured(critic.model, batch, unseen, packer)[1]
            shown += f", {explained(after)} held out after it"
        say(f"critic {step}/{len(steps)}: {shown}", first_rank)
    weights, spec = build.named_parameters(critic.chunks), layer_spec(config)
    layouts = training_layouts(shape, mesh.layout, spec=spec, head="value")
    output = free_output(config)
    export_hf(output, weights, layouts, shape, config.model.path, head="value")
    advice = "; below 0 it is worse than the mean return: record more tasks, or lower update.critic.lr"
    say(
        f"done; held-out explained variance {explained(after)}{advice if after < 0 else ''}; train with "
        f"model.critic_path={output} model.path={config.model.path}",
        first_rank,
    )
    process.stop()


def monte_carlo(batch: Batch, played: Sequence[Trajectory], algorithm: AlgorithmConfig) -> EstimatedBatch:
    """Return the batch with return_T: the discounted sum of the rewards from each step on, by
    algorithm.gamma, gae_level and gae_observations. No KL penalty: the policy is its reference.

    With gae_observations, T are all tokens after the prompts.
    """
    batch = with_observations(batch) if algorithm.gae_observations else batch
    plain = algorithm.changed(kl_coefficient=0.0, whiten=False, gae_observations=False, truncated="end")
    # with lambda 1 the values cancel
    scored = ScoredBatch.of(batch, epochs=(), value_T=torch.zeros(len(batch.action_index_T)))
    return estimate(scored, plain.changed(**LAMBDA), groups_of([t.summary for t in played]))


def split(tasks: Sequence[Hashable], share: float) -> tuple[list[int], list[int]]:
    """Return the episodes to train on, and those of the last tasks, a share of all, in order of appearance.

    tasks: that of each episode. Example: tasks a, b, a, c and 0.3 give [0, 1, 2] and [3].
    """
    order = list(dict.fromkeys(tasks))
    held = set(order[len(order) - math.ceil(share * len(order)) :])
    of = [task in held for task in tasks]
    return [n for n, out in enumerate(of) if not out], [n for n, out in enumerate(of) if out]


def measured(
    critic: Model, batch: EstimatedBatch, minibatch: Minibatch, packer: Packer
) -> tuple[EstimatedBatch, float]:
    """Return the batch with the critic's values of the minibatch, and their explained variance over its
    tokens. Collective."""
    value_T = values(critic, batch, packer, [minibatch])
    in_T = batch.live_T & chosen_tokens(batch, minibatch.chosen)
    assert batch.return_T is not None
    return replace(batch, value_T=value_T), explained_variance(value_T[in_T], batch.return_T[in_T])


def _episodes(run: Path, shape: ModelShape, algorithm: AlgorithmConfig) -> list[Trajectory]:
    """Return the recorded trajectories whose return is known. Raises ConfigError if there are none."""
    left_out = FAILED if algorithm.truncated == "end" else (*FAILED, "truncated")
    numbers = recorded(run)
    read = itertools.chain.from_iterable(trajectory_log.read(run, n, shape.vocab) for n in numbers)
    played = [t for t in read if t.outcome not in left_out and t.turns]
    if not played:
        raise ConfigError(
            f"--critic={run}: every episode in trajectories/ failed; record some with `rollout`"
        )
    return played


def _epochs(taught: Sequence[int], seed: int) -> Iterator[list[int]]:
    """Yield the trajectories in a random order, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield [taught[n] for n in torch.randperm(len(taught), generator=generator).tolist()]


def _check_policy(
    config: Config, run: Path, batch: Batch, mesh: MeshRank, shape: ModelShape, packer: Packer
) -> None:
    """Raise ConfigError unless the log-probs of the first episodes are those of model.path. Collective."""
    policy = build.from_hf("reference", shape, config, mesh, process.dtype(config))
    head = PolicyHead.configured(policy, mesh, shape.vocab, config, torch.cuda.is_available())
    first = packer.divide(batch, range(min(COMPARED * mesh.data_size, len(batch.live_N))))
    logprob_T, in_T = logprobs(policy, head, batch, packer, [first]), chosen_tokens(batch, first.chosen)
    difference = float((logprob_T - batch.rollout_logprob_T)[in_T].abs().mean())
    r = config.rollout
    if not difference <= r.max_mismatch - math.log(r.top_p):
        raise ConfigError(
            f"--critic={run}: the log-probs of its episodes differ from those of model.path="
            f"{config.model.path} by {difference:.3g} nats per token, rollout.max_mismatch={r.max_mismatch}: "
            "another model, tokenizer or rollout.temperature played them; record episodes with `rollout`"
        )
