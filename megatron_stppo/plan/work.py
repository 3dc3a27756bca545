"""The ranks that are measured, the work of one rank in an optimizer step, and the share of it that remains
where trajectories share prefixes.

A rank of any world size is simulated in one process with torch's "fake" process group, whose groups have
ranks and sizes but transfer no data. Every trajectory has the greatest length that is allowed.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it registers the backend

from megatron_stppo.base.types import Batch, Task, Trajectory, Turn
from megatron_stppo.config import Config, ConfigError
from megatron_stppo.data.division import Packer
from megatron_stppo.data.packing import Microbatch, PackingSpec, microbatch_runs, pack, prefixes_of, to_batch
from megatron_stppo.data.prefixes import Tree
from megatron_stppo.model.pipeline import sharing_obstacle
from megatron_stppo.observe import trajectory_log
from megatron_stppo.observe.run_files import recorded
from megatron_stppo.parallel import groups
from megatron_stppo.parallel.groups import MeshRank
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.weights.sharding.tiles import Spans

NO_RUN = "prefixes that they share are not counted; --from RUN_DIR measures them"


@dataclass(frozen=True)
class Kind:
    """A set of ranks that build the same modules."""

    rank: int  # the lowest of them
    stages: Mapping[int, int]  # {pipeline stage: number of these ranks on it}


@contextlib.contextmanager
def standing_at(rank: int, world: int, config: Config) -> Iterator[MeshRank]:
    """Initialise this process as `rank` of `world` ranks inside the context, and yield its MeshRank."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield groups.initialize(config.parallel)
    finally:
        parallel_state.destroy_model_parallel()  # megatron's modules read its global groups
        dist.destroy_process_group()


def kinds(layout: Layout, training: Mapping[int, Spans]) -> list[Kind]:
    """Group the ranks by the shapes of their shards.

    Ranks with equal shapes build the same modules, so only one rank of each kind is measured.
    Example: 16 ranks on 4 equal stages make three kinds: the stage with the embedding, the stage with the
    head, and the two stages in between.
    """
    alike: dict[object, list[int]] = {}
    for rank, spans in training.items():
        sizes = tuple((name, parts[-1].local + parts[-1].size) for name, parts in spans.items())
        alike.setdefault(sizes, []).append(rank)
    return [
        Kind(ranks[0], Counter(layout.coordinates(rank).pipeline for rank in ranks))
        for ranks in alike.values()
    ]


@dataclass(frozen=True)
class Work:
    """Token and micro-batch counts of one rank.

    Example: 512 trajectories of 7,048 tokens, 2 minibatches, 2 data-parallel ranks, a budget of 16,384 tokens
    per micro-batch: 128 trajectories per rank and step, 902,144 tokens in 64 micro-batches.
    """

    longest: int  # tokens of a trajectory
    action_tokens: int  # of these, tokens that the policy wrote
    tokens: int  # of an optimizer step on one rank
    microbatches: int  # of an optimizer step on one rank

    @classmethod
    def of(cls, config: Config, cut: PackingSpec, data: int) -> Work:
        mine, longest = config.rollout.episodes // (config.update.minibatches * data), config.max_context
        microbatches = len(microbatch_runs(Tree.plain([longest] * mine), cut))
        actions = sum(len(turn.token_ids) for turn in trajectory(config, longest).turns)
        tokens = mine * longest // cut.context_size
        return cls(longest, actions, tokens, microbatches)


def trajectory(config: Config, length: int) -> Trajectory:
    """Return a trajectory of `length` tokens. Its prompt, turns and observations are as long as allowed."""
    left = length - (prompt := min(config.rollout.max_prompt_tokens, max(1, length // 2)))
    turns = []
    while left > 0:
        action = min(left, config.rollout.max_turn_tokens)
        observation = min(left - action, config.environment.max_observation_tokens)
        turns.append(Turn((0,) * action, (0.0,) * action, (0,) * observation, 0.0, ((0, action),)))
        left -= action + observation
    return Trajectory(Task("", (), ("",), "train", 0), (0,) * prompt, tuple(turns), "ok")


def fullest_microbatch(config: Config, cut: PackingSpec) -> Microbatch:
    """Return a micro-batch of trajectories of the greatest length and a shorter one that fills the budget.

    They share no prefixes. If they do, as many tokens are computed, but there may be more action tokens, and
    keys and values of more trajectories while one layer runs backward (docs/performance.md).
    Tensors that the model computes with are on the meta device; tensors that the host reads stay on the host.
    """
    longest = config.max_context
    count, rest = divmod(cut.budget * cut.context_size, longest)
    lengths = [longest] * max(1, count) + ([rest] if count and rest > 1 else [])
    batch = to_batch([trajectory(config, length) for length in lengths])
    whole = replace(cut, budget=max(cut.budget, longest), in_step=1, share_prefixes=False)
    (microbatch,) = pack(batch, range(len(lengths)), whole)
    return replace(
        microbatch,
        tokens_P=microbatch.tokens_P.to("meta"),
        position_P=microbatch.position_P.to("meta"),
        hidden_index_T=microbatch.hidden_index_T.to("meta"),
        target_T=microbatch.target_T.to("meta"),
    )


@dataclass(frozen=True)
class RecordedBatch:
    """A batch that a run recorded, and how the planned run divides it into minibatches."""

    folder: Path
    episodes: int
    batch: Batch
    minibatches: Sequence[Sequence[int]]  # trajectories


@dataclass(frozen=True)
class Sharing:
    """Example: Sharing(0.43, "prefixes shared, measured on runs/first")."""

    distinct: float  # tokens that are computed / tokens of the trajectories
    reason: str  # where the number comes from, or why it is 1

    @classmethod
    def of(cls, config: Config, packer: Packer, source: RecordedBatch | None) -> Sharing:
        """Return the share over all data-parallel ranks, with the planned minibatches and micro-batches."""
        if obstacle := sharing_obstacle(config, packer.mesh.layout):
            return cls(1.0, obstacle)
        if source is None:
            return cls(1.0, NO_RUN)
        computed = tokens = 0
        for chosen in source.minibatches:
            for part in packer.divide(source.batch, chosen).parts:
                tree = prefixes_of(source.batch, part, packer.spec)
                runs = microbatch_runs(tree, packer.spec)
                computed += sum(int(tree.packed(run).lengths.sum()) for run in runs)
                tokens += int(tree.lengths.sum())
        planned = config.rollout.episodes
        fewer = f", on {source.episodes} episodes instead of {planned}" if source.episodes < planned else ""
        routed = ", if the engine's experts agree on them" if packer.by_route else ""
        reason = f"prefixes shared{routed}, measured on {source.folder}{fewer}"
        return cls(computed / tokens if tokens else 1.0, reason)


def newest_batch(folder: Path, episodes: int) -> tuple[Batch, int]:
    """Return the first `episodes` episodes of a run's last iteration, and how many there are.

    Raises ConfigError.
    """
    if not (numbers := recorded(folder)):
        raise ConfigError(f"--from={folder}: holds no trajectories/; give the folder of a run, as runs/NAME")
    played = trajectory_log.read(folder, numbers[-1])
    number = list(accumulate(int(t.branch == 0) for t in played))  # of each trajectory's episode, from 1
    kept = [t for t, n in zip(played, number, strict=True) if n <= episodes]
    return to_batch(kept), min(number[-1], episodes)
