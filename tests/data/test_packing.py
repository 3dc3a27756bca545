"""Batches and microbatches, on the example of types.Trajectory and on random ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stppo.base.types import Task, Trajectory, Turn
from megatron_stppo.data import context, packing
from megatron_stppo.data.division import partition, prompts_of
from megatron_stppo.data.packing import (
    PackingSpec,
    holding,
    microbatch_runs,
    pack,
    rollout_logprobs,
    rows_of,
    to_batch,
    unpack,
    without_tokens,
)
from megatron_stppo.data.prefixes import Tree

TASK = Task("t", (), ("a",), "train", 0)


def trajectory(prompt: int, turns: list[tuple[int, int]], first: int = 0, outcome: str = "ok") -> Trajectory:
    """Return a trajectory whose token ids count up from `first`, so that ids identify positions."""
    ids = iter(range(first, first + 10_000))

    def take(n: int) -> tuple[int, ...]:
        return tuple(next(ids) for _ in range(n))

    prompt_ids = take(prompt)
    made = [Turn(take(a), (-0.5,) * a, take(o), float(i + 1), ((0, a),)) for i, (a, o) in enumerate(turns)]
    return Trajectory(TASK, prompt_ids, tuple(made), outcome)  # type: ignore[arg-type]


def test_the_example_of_the_docstring_is_correct() -> None:
    batch = to_batch([trajectory(2, [(3, 4), (1, 0)])])
    assert batch.action_index_T.tolist() == [2, 3, 4, 9]
    assert batch.turn_offsets.tolist() == [0, 3, 4]
    assert batch.turn_to_sequence_S.tolist() == [0, 0]
    assert batch.sequence_offsets.tolist() == [0, 10]


def test_a_turns_reward_sits_on_its_last_action_token() -> None:
    batch = to_batch([trajectory(2, [(3, 4), (1, 6)])])
    assert batch.reward_T.tolist() == [0, 0, 1, 2]  # the observation after it changes nothing


def test_every_action_token_has_the_version_that_generated_it() -> None:
    turns = (
        Turn((1, 2, 3), (-0.5,) * 3, (9, 9), 0.0, ((3, 1), (4, 2))),
        Turn((4,), (-0.5,), (), 1.0, ((4, 1),)),
    )
    played = Trajectory(TASK, (7,), turns, "ok")
    assert to_batch([played, trajectory(2, [(1, 1)])]).version_T.tolist() == [3, 4, 4, 4, 0]


def test_observation_and_prompt_tokens_are_not_on_the_action_axis() -> None:
    batch = to_batch([trajectory(2, [(2, 3), (2, 5)], first=100)])
    tokens = batch.tokens_P[batch.action_index_T].tolist()
    assert tokens == [102, 103, 107, 108]
    (microbatch,) = pack(batch, [0], PackingSpec(100))
    assert microbatch.target_T.tolist() == tokens
    # the hidden state that predicts a token is the one before it, an observation's for a turn's first token
    assert batch.tokens_P[microbatch.hidden_index_T].tolist() == [101, 102, 106, 107]


def test_two_turns_without_an_observation_between_them_are_not_merged() -> None:
    assert to_batch([trajectory(1, [(2, 0), (3, 0)])]).turn_offsets.tolist() == [0, 2, 5]


def test_failed_trajectories_keep_their_position_and_have_no_loss() -> None:
    batch = to_batch([trajectory(1, [(2, 0)]), trajectory(1, [(3, 0)], outcome="timeout")])
    assert batch.live_T.tolist() == [True, True, False, False, False]


def test_partition_balances_cost_and_gives_every_part_an_item() -> None:
    assert partition([5, 1, 4, 2], 2) == [[0, 1], [2, 3]]
    assert partition([9, 1, 1, 1, 1, 1], 2) == [[0], [1, 2, 3, 4, 5]]
    assert partition([0, 0, 0], 3) == [[0], [1], [2]]
    assert partition([1, 3, 2], 1) == [[0, 1, 2]]


def test_partition_keeps_what_shares_a_prompt_together_unless_that_is_slower() -> None:
    groups, saved = [0, 1, 0, 1], [4] * 4
    assert partition([5, 4, 5, 4], 2, groups, saved) == [[0, 2], [1, 3]]
    assert partition([5, 4, 5, 4], 2, groups, [0] * 4) == partition([5, 4, 5, 4], 2)
    # two groups on three ranks: none is left out, although that would cost no more
    assert all(partition([9, 9, 9, 9], 3, groups, [8] * 4))
    # one group on two ranks: half of it each
    assert partition([9, 9, 9, 9, 1], 2, [0, 0, 0, 0, 1], [8, 8, 8, 8, 0]) == [[0, 1, 4], [2, 3]]


def test_trajectories_with_one_prompt_are_of_one_group() -> None:
    batch = to_batch([trajectory(2, [(1, 0)]), trajectory(3, [(1, 2), (1, 0)]), trajectory(2, [(4, 0)])])
    tokens, group = prompts_of(batch, torch.tensor([0, 2, 1]))
    assert tokens == [2, 2, 3] and group[0] == group[1] != group[2]
    silent = to_batch([trajectory(2, []), trajectory(2, [(1, 0)])])
    tokens, group = prompts_of(silent, torch.tensor([0, 1]))
    assert tokens == [0, 2] and group[0] != group[1]


def test_microbatches_keep_the_budget_and_a_longer_trajectory_has_its_own() -> None:
    assert Tree.plain([3, 9, 2, 2]).bins(4) == [[1], [0], [2, 3]]
    assert Tree.plain([3, 1, 3, 1]).bins(4) == [[0, 1], [2, 3]]


def test_context_ranks_share_a_microbatch_so_its_budget_is_multiplied_by_their_number() -> None:
    tree = Tree.plain([3, 9, 2, 2])
    assert microbatch_runs(tree, PackingSpec(8)) == [[1], [0, 2, 3]]
    assert microbatch_runs(tree, PackingSpec(4, context_size=2)) == [[1], [0, 2, 3]]


def test_equal_microbatches_are_as_long_as_the_longest() -> None:
    batch = to_batch([trajectory(2, [(7, 0)]), trajectory(1, [(2, 0)])])
    assert [m.tokens for m in pack(batch, [0, 1], PackingSpec(4))] == [9, 3]
    assert [m.tokens for m in pack(batch, [0, 1], PackingSpec(4, equal=True))] == [9, 9]
    # Two context ranks: 9 and 3 tokens are padded to 12 and 4, which each rank has half of.
    for equal, tokens in ((False, [6, 2]), (True, [6, 6])):
        spec = PackingSpec(2, context_size=2, equal=equal)
        assert [m.tokens for m in pack(batch, [0, 1], spec)] == tokens


def test_a_microbatch_is_made_when_it_is_read_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = [], packing._pack_one
    monkeypatch.setattr(packing, "_pack_one", lambda *given: made.append(given[1]) or make(*given))
    batch = to_batch([trajectory(1, [(2, 0)]) for _ in range(3)])
    microbatches = pack(
        replace(batch, routes_P=torch.zeros(9, 1, 1, dtype=torch.uint8)), [2, 0, 1], PackingSpec(3)
    )
    assert len(microbatches) == 3 and not made
    first = next(iter(microbatches))
    assert made == [[2]]
    every = list(microbatches)
    assert every[0] is first
    assert made == [[2], [0], [1]]


def test_dummy_tokens_are_a_sequence_of_their_own() -> None:
    batch = to_batch([trajectory(1, [(2, 0)]), trajectory(1, [(2, 0)])])
    (microbatch,) = pack(batch, [0, 1], PackingSpec(100, multiple=4))
    assert microbatch.position_P.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


def test_a_batch_without_tokens_holds_no_trajectory() -> None:
    played = [trajectory(2, [(3, 0)]), trajectory(1, [(2, 0)])]
    batch = without_tokens([t.summary for t in played], rollout_logprobs(played))
    none = torch.tensor([], dtype=torch.int64)
    assert batch.held_N.tolist() == holding(batch, [], none).held_N.tolist() == [-1, -1]
    assert holding(batch, [1], torch.tensor([7, 8, 9])).held_N.tolist() == [-1, 0]
    assert rows_of(batch, []).tolist() == []


def test_unpacked_values_have_no_gradient() -> None:
    (microbatch,) = pack(to_batch([trajectory(1, [(2, 0)])]), [0], PackingSpec(9))
    assert not unpack([microbatch], [torch.ones(2).requires_grad_()], 2).requires_grad


shapes = st.lists(
    st.tuples(
        st.integers(1, 6), st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=3)
    ),
    min_size=1,
    max_size=6,
)


@given(shapes, st.integers(1, 40), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.randoms())
@settings(max_examples=60, deadline=None)
def test_unpack_undoes_pack_for_any_order_budget_padding_and_context(
    shapes, budget, multiple, context, in_step, random
) -> None:
    batch = to_batch([trajectory(p, turns, 1 + 1000 * i) for i, (p, turns) in enumerate(shapes)])
    order = list(range(len(shapes)))
    random.shuffle(order)
    batch = replace(batch, routes_P=torch.arange(len(batch.tokens_P))[:, None, None])  # a token's own row
    total = torch.zeros(len(batch.action_index_T))
    for rank in range(context):
        spec = PackingSpec(budget, multiple, rank, context, in_step)
        microbatches = pack(batch, order, spec)
        tree = Tree.plain(batch.sequence_offsets.diff()[order].tolist())
        assert len(microbatches) == len(microbatch_runs(tree, spec))
        assert len(microbatches) % in_step == 0
        for m in microbatches:
            assert m.tokens > 0 and m.tokens % multiple == 0
            assert torch.equal(m.tokens_P[m.hidden_index_T] + 1, m.target_T)  # ids count up in a trajectory
            assert int(m.sequence_offsets[-1]) == m.tokens * context
            assert m.longest == int(m.sequence_offsets.diff().max())
            assert torch.equal(m.routes_P[:, 0, 0], m.rows_P)  # -1 for dummy tokens only
        total += unpack(microbatches, [m.target_T for m in microbatches], len(total))
    # every action token is on one context rank, so the sum over ranks has all of them
    assert torch.equal(total.long(), batch.tokens_P[batch.action_index_T])


@given(shapes, st.integers(2, 4))
@settings(max_examples=30, deadline=None)
def test_context_ranks_divide_tokens_and_turns_and_know_the_undivided_offsets(shapes, size) -> None:
    batch = to_batch([trajectory(p, turns, 1 + 1000 * i) for i, (p, turns) in enumerate(shapes)])
    order, alone = list(range(len(shapes))), pack(batch, list(range(len(shapes))), PackingSpec(10_000))[0]
    parts = [pack(batch, order, PackingSpec(10_000, 1, rank, size))[0] for rank in range(size)]
    assert len({part.tokens for part in parts}) == 1
    tokens = torch.cat([part.tokens_P for part in parts])
    assert sorted(tokens[tokens > 0].tolist()) == sorted(alone.tokens_P.tolist())
    for axis in ("turn_offsets", "action_offsets"):
        assert torch.equal(sum(getattr(part, axis) for part in parts), getattr(alone, axis))
        assert all(torch.equal(getattr(part, f"whole_{axis}"), getattr(alone, axis)) for part in parts)


def test_a_context_piece_attends_to_its_sequence_up_to_the_end_of_the_piece() -> None:
    padded = torch.tensor([8, 4])
    queries, keys, where = context.attended(padded, 1, 2)
    assert (queries.tolist(), keys.tolist()) == ([2, 2, 1, 1], [4, 6, 2, 3])
    shares = torch.cat([context.share(padded, rank, 2)[0] for rank in (0, 1)])  # concatenated
    assert shares[where].tolist() == [*range(4), *range(6), 8, 9, 8, 9, 10]
