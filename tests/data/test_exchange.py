"""Distributed trajectories on 4 ranks, compared with the batch of all trajectories on every rank."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_stppo.base.types import Task, Trajectory, Turn
from megatron_stppo.data.packing import PackingSpec, holding, pack, to_batch, token_ids
from tests.ranks import run_ranks

RANKS, COUNT = 4, 32
# name: (layout, epochs)
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "data": ({}, 1),
    "data, three epochs": ({}, 3),
    "tensor and sequence": ({"tensor": 2, "sequence": True}, 1),
    "context": ({"context": 2}, 2),
    "pipeline": ({"pipeline": 2}, 1),
    "experts": ({"expert": 2}, 2),
    "no data parallelism": ({"tensor": 2, "pipeline": 2}, 1),
}
# trajectories that are left on each rank; one rank has none
LEFT = [range(0, 5), range(5, 5), range(5, 20), range(20, COUNT)]


def trajectories() -> list[Trajectory]:
    """Return trajectories of 1 to 4 turns; 4 share a prompt. Some failed, one before its first turn."""
    draw = random.Random(5)

    def ids(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw.randrange(150_000) for _ in range(draw.randint(low, high)))

    def turn() -> Turn:
        action = ids(1, 12)
        return Turn(
            action, tuple(-draw.random() for _ in action), ids(0, 8), draw.random(), ((3, len(action)),)
        )

    prompts = [ids(3, 16) for _ in range(COUNT // 4)]
    played = []
    for n in range(COUNT):
        turns = tuple(turn() for _ in range(0 if n == 9 else draw.randint(1, 4)))
        outcome: Any = "error" if n == 9 else draw.choice(["ok", "wrong", "timeout"])
        task = Task("t", (), ("a",), "train", n)
        played.append(Trajectory(task, prompts[n // 4], turns, outcome, n // 4, detail=f"answer {n}"))
    return played


def observe(cases: dict[str, tuple[dict[str, Any], int]]) -> dict[str, dict[str, Any]]:
    from megatron_stppo.cluster.launch import process

    process.prepare(engine=False)
    from megatron_stppo.config import ParallelConfig
    from megatron_stppo.parallel import groups

    found = {}
    for name, (parallel, epochs) in cases.items():
        layout = ParallelConfig.model_validate(parallel)
        mesh = groups.replace(layout) if found else groups.initialize(layout)
        found[name] = compare(mesh, parallel, epochs)
    found["without experts"] = {"error": refused(mesh.rank)}
    return found


def refused(rank: int) -> str:
    """Return the message of this rank if the trajectories of ranks 2 and 3 have no recorded experts."""
    from megatron_stppo.config import ConfigError
    from megatron_stppo.data.exchange import Played

    every = trajectories()
    own = [replace(t, routes=bytes(max(0, len(t.token_ids) - 1) if t.turns else 0)) for t in every]
    played = Played.of([(own if rank < 2 else every)[n] for n in LEFT[rank]])
    try:
        played.routes(played.described(), [range(COUNT)] * RANKS, layers=1, chosen=1, experts=8)
    except ConfigError as error:
        return str(error)
    return ""


def compare(mesh: Any, parallel: dict[str, Any], epochs: int) -> dict[str, Any]:
    """Return what differs from the batch of all trajectories, and which trajectories this rank holds."""
    from megatron_stppo.config import Config
    from megatron_stppo.data.division import Packer
    from megatron_stppo.data.exchange import Played, undivided
    from megatron_stppo.data.validity import columns
    from megatron_stppo.model.learner import Learner
    from megatron_stppo.training.stages import _routes, distribute

    config = Config.model_validate(
        {"model": {"path": "m"}, "parallel": parallel, "update": {"epochs": epochs, "minibatches": 4}}
    )
    sequence = mesh.tensor_size if config.parallel.sequence else 1
    spec = PackingSpec(
        60, sequence, mesh.context_rank, mesh.context_size, share_prefixes=mesh.context_size == 1
    )
    given: Any = (config, mesh, None, [], None, None, None, Packer(spec, mesh, 8, "cpu"), None)
    learner = Learner(*given)
    every = trajectories()
    played = Played.of([every[n] for n in LEFT[mesh.rank]])
    batch, whole = distribute(learner, played, 3), to_batch(every)
    differs = [name for name in SAME if not torch.equal(getattr(batch, name), getattr(whole, name))]
    again = columns(undivided(batch, mesh.tensor_and_token_group))
    differs += [f"undivided {k}" for k, x in columns(whole).items() if not torch.equal(again[k], x)]
    count = 0
    for epoch, steps in enumerate(batch.epochs):
        for step in steps:
            pairs = zip(learner.packer.pack(batch, step), learner.packer.pack(whole, step), strict=True)
            for own, expected in pairs:
                count += 1
                at, of = own.rows_P, expected.rows_P  # into other tensors, the same tokens
                moved = torch.where(at < 0, -1, batch.tokens_P[at])
                differs += (
                    [] if torch.equal(moved, torch.where(of < 0, -1, whole.tokens_P[of])) else ["rows_P"]
                )
                if own.repeated is not None:
                    again = batch.tokens_P[own.repeated], whole.tokens_P[expected.repeated]
                    differs += [] if _equal(*again) else ["repeated"]
                for field in fields(own):
                    values = getattr(own, field.name), getattr(expected, field.name)
                    if field.name not in ("rows_P", "repeated") and not _equal(*values):
                        differs.append(f"{field.name} of epoch {epoch}: {values}")
    # a pass records the tokens themselves as their experts, for the trajectories that this rank scores
    scored = [n for step in batch.epochs[0] for n in step.parts[mesh.data_rank]]
    of_scored = torch.isin(torch.repeat_interleave(_held(batch), _lengths(batch)), torch.tensor(scored))
    record: Any = SimpleNamespace(routes=lambda _: torch.where(of_scored, batch.tokens_P, 0)[:, None, None])
    routes_P = _routes(learner, record, batch)
    differs += [] if torch.equal(routes_P[:, 0, 0], batch.tokens_P) else ["routes"]
    return {
        "differs": differs,
        "summaries": played.every == [t.summary for t in every],
        "held": _held(batch).tolist(),
        "tokens": len(batch.tokens_P),
        "scored": sorted(scored),
        "data_rank": mesh.data_rank,
        "microbatches": count,
    }


SAME = (
    *("sequence_offsets", "turn_offsets", "turn_to_sequence_S", "action_offsets", "action_index_T"),
    *("live_N", "rollout_logprob_T", "reward_T", "state_S"),
)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return all(map(_equal, a, b))
    return torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b


def _held(batch: Any) -> torch.Tensor:
    return torch.nonzero(batch.held_N >= 0).squeeze(1)


def _lengths(batch: Any) -> torch.Tensor:
    return batch.sequence_offsets.diff()[_held(batch)]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def seen() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(observe, RANKS, CASES)


@pytest.mark.parametrize("name", CASES)
def test_microbatches_are_bit_for_bit_those_of_all_trajectories_on_every_rank(seen: Any, name: str) -> None:
    for rank in seen:
        assert rank[name]["differs"] == []
        assert rank[name]["summaries"] and rank[name]["microbatches"] >= 4 * CASES[name][1]


@pytest.mark.parametrize("name", CASES)
def test_a_rank_holds_only_the_tokens_that_it_trains_on(seen: Any, name: str) -> None:
    lengths = [len(t.token_ids) for t in trajectories()]
    found, epochs = [rank[name] for rank in seen], CASES[name][1]
    for rank in found:
        assert rank["tokens"] == sum(lengths[n] for n in rank["held"])
        assert set(rank["held"]) >= set(rank["scored"])
    held = {rank["data_rank"]: rank["held"] for rank in found}
    assert all(rank["held"] == held[rank["data_rank"]] for rank in found)
    if epochs == 1:
        assert sorted(n for of_rank in held.values() for n in of_rank) == list(range(COUNT)), "each once"
    else:
        assert all(len(of_rank) < COUNT for of_rank in held.values())


def test_experts_that_are_missing_on_some_ranks_are_refused_on_all_with_the_same_message(seen: Any) -> None:
    (message,) = {rank["without experts"]["error"] for rank in seen}
    assert message.startswith("algorithm.routing_replay=rollout: a trajectory of task 5 has 0 bytes of ")
    assert message.endswith("set it to old_policy or off")


def test_tokens_that_a_rank_does_not_hold_are_refused() -> None:
    every = trajectories()
    part = holding(to_batch(every), [2], token_ids(every[2:3]))
    assert len(pack(part, [2], PackingSpec(100))) == 1
    with pytest.raises(AssertionError, match="on other ranks"):
        list(pack(part, [2, 3], PackingSpec(100)))
