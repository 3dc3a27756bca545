"""Prefix trees: what is computed once, where it is found, and how trajectories are divided."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stppo.base.types import Batch, Task, Trajectory, Turn
from megatron_stppo.data import prefixes, routes
from megatron_stppo.data.packing import Microbatch, PackingSpec, pack, to_batch, unpack
from megatron_stppo.data.prefixes import Tree

SHARED = PackingSpec(100, share_prefixes=True)


def played(*sequences: tuple[int, ...], prompt: int = 1) -> Batch:
    """Return a batch of trajectories with these tokens, all of which after the prompt are actions."""
    task = Task("t", (), ("a",), "train", 0)

    def turns(ids: tuple[int, ...]) -> tuple[Turn, ...]:
        return (Turn(ids, (-0.5,) * len(ids), (), 0.0, ((0, len(ids)),)),) if ids else ()

    return to_batch([Trajectory(task, ids[:prompt], turns(ids[prompt:]), "ok") for ids in sequences])


def read(microbatch: Microbatch) -> list[tuple[int, ...]]:
    """Return, for every packed token, the tokens that attention sees up to it."""
    lengths = microbatch.lengths.tolist()
    starts = np.cumsum([0, *lengths])
    keys = [list(range(a, a + n)) for a, n in zip(starts, lengths, strict=False)]
    if microbatch.keys is not None:
        given = microbatch.keys[1].split(microbatch.keys[0].tolist())
        keys[: len(given)] = [one.tolist() for one in given]
    seen = []
    for start, length, own in zip(starts, lengths, keys, strict=False):
        for n in range(length):
            before = own[: len(own) - length + n + 1]
            assert before[-1] == start + n and microbatch.position_P[start + n] == len(before) - 1
            seen.append(tuple(microbatch.tokens_P[before].tolist()))
    return seen


def test_the_examples_of_the_docstrings_are_correct() -> None:
    tree = Tree.of(played((1, 2), (3, 4), (1, 2, 5)), [0, 1, 2])
    assert ([*tree.order], tree.lengths.tolist(), tree.common.tolist()) == ([0, 2, 1], [2, 3, 2], [0, 2, 0])
    cut = Tree.of(played((1, 2, 3, 4, 5), (1, 2, 3, 6, 7, 8)), [0, 1]).packed([0, 1])
    assert cut.lengths.tolist() == [5, 3]
    assert cut.places.tolist()[5:] == [0, 1, 2, 5, 6, 7] and cut.keys is not None
    assert cut.keys[1].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7]


def test_every_action_token_finds_the_token_before_it_in_the_common_part() -> None:
    batch = played((7, 1, 2, 3), (9, 1), (7, 1, 2, 4, 5), (7, 1, 2, 3), prompt=2)
    (one,) = pack(batch, [0, 1, 2, 3], SHARED)
    assert one.tokens_P.tolist() == [7, 1, 2, 3, 4, 5, 9, 1] and one.lengths.tolist() == [4, 2, 2]
    assert one.target_T.tolist() == [2, 3, 2, 4, 5, 2, 3]  # the second has no action token
    assert one.hidden_index_T.tolist() == [1, 2, 1, 2, 4, 1, 2]
    assert one.turn_offsets.tolist() == [0, 2, 5, 7] and one.longest == 5
    assert one.distinct == (8, 15)
    assert one.rows_P.tolist() == [0, 1, 2, 3, 9, 10, 4, 5]
    assert one.repeated is not None
    assert one.repeated.tolist() == [[6, 7, 8, 11, 12, 13, 14], [0, 1, 2, 0, 1, 2, 3]]


def test_little_in_common_changes_nothing() -> None:
    batch = played((1, *range(30)), (1, *range(30, 60)), (5, 6, 7))
    (shared,), (plain,) = pack(batch, [0, 1, 2], SHARED), pack(batch, [0, 1, 2], PackingSpec(100))
    assert shared.keys is None and shared.repeated is None
    assert torch.equal(shared.tokens_P, plain.tokens_P) and torch.equal(shared.lengths, plain.lengths)


def test_what_adds_least_goes_together() -> None:
    # Two tasks of three samples; one of them has 4 + 3 distinct tokens.
    questions, answers = [(1, 2, 3, 4), (1, 2, 8, 9)], (11, 12, 13)
    batch = played(*((*question, answer) for answer in answers for question in questions))
    assert Tree.of(batch, range(6)).bins(7) == [[0, 2, 4], [1, 3, 5]]
    # 1, 2 are common to both tasks, and count once in a bin that has both
    assert Tree.of(batch, range(6)).bins(12) == [[0, 1, 2, 3, 4, 5]]
    assert Tree.of(batch, range(6)).bins(11) == [[0, 2, 4], [1, 3, 5]]
    # a task that does not fit is divided
    assert Tree.of(batch, range(6)).bins(6) == [[0, 2], [1, 3], [4], [5]]


def test_a_trajectory_goes_where_it_adds_least_also_if_an_earlier_bin_has_room() -> None:
    # The last four have 1 + 7 + 3 distinct tokens, one too many. Each short one would add 2 to the first bin.
    batch = played(tuple(range(20, 28)), (1, *range(30, 37)), (1, 2), (1, 3), (1, 4))
    assert Tree.of(batch, range(5)).bins(10) == [[0, 4], [1, 2, 3]]


def test_trajectories_between_which_others_are_left_out_share_what_all_of_them_have_in_common() -> None:
    tree = Tree.of(played((1, 2, 3), (1, 4, 5), (1, 4, 6)), [0, 1, 2])
    cut = tree.packed([2, 0])
    assert cut.lengths.tolist() == [3, 2] and cut.places.tolist() == [0, 3, 4, 0, 1, 2]


def test_the_tokens_of_a_microbatchs_trajectories_are_limited_however_much_they_share() -> None:
    """Equal trajectories of 11 tokens, all of which would fit into a budget of 11: at most 16 times 11."""
    tree = Tree.of(played(*[tuple(range(11))] * 40), range(40))
    assert [len(one) for one in tree.bins(11)] == [16, 16, 8]
    assert [len(one) for one in tree.bins(10)] == [1] * 40, "each is longer than the budget"
    assert len(tree.bins(28)) == 1


def test_dummy_tokens_follow_shared_ones() -> None:
    (one,) = pack(played((1, 2, 3), (1, 2, 4)), [0, 1], replace(SHARED, multiple=8))
    assert one.lengths.tolist() == [3, 1, 4] and one.position_P.tolist()[4:] == [0, 1, 2, 3]
    assert one.rows_P.tolist()[4:] == [-1] * 4


def test_tokens_with_other_recorded_experts_are_others() -> None:
    batch = played((1, 2, 3), (1, 2, 4), (1, 2, 5))
    routes_P = torch.tensor([0, 1, 9, 0, 1, 9, 0, 2, 9], dtype=torch.uint8)[:, None, None]
    batch = replace(batch, routes_P=routes_P)
    tree = Tree.of(batch, [0, 1, 2], routes.marks(routes_P, 0))
    (one,) = pack(batch, [0, 1, 2], SHARED, tree=tree)
    assert one.tokens_P.tolist() == [1, 2, 3, 4, 2, 5] and one.routes_P is not None
    assert one.routes_P.flatten().tolist() == [0, 1, 9, 9, 2, 9]
    (by_token,) = pack(batch, [0, 1, 2], SHARED)
    assert by_token.tokens_P.tolist() == [1, 2, 3, 4, 5]


@st.composite
def trees(draw: st.DrawFn) -> list[tuple[int, ...]]:
    """Draw sequences of at least two tokens, many of which continue a part of an earlier one."""
    found: list[tuple[int, ...]] = []
    token = st.integers(0, 2)
    for _ in range(draw(st.integers(1, 8))):
        start: tuple[int, ...] = ()
        if found and draw(st.booleans()):
            of = draw(st.sampled_from(found))
            start = of[: draw(st.integers(1, len(of)))]
        found.append((*start, *draw(st.lists(token, min_size=2 - min(2, len(start)), max_size=4))))
    return [one if len(one) > 1 else (*one, 0) for one in found]


@given(trees(), st.integers(1, 30), st.integers(1, 3), st.randoms())
@settings(max_examples=150, deadline=None)
def test_every_distinct_prefix_of_a_microbatch_is_there_once(sequences, budget, multiple, random) -> None:
    batch, order = played(*sequences), list(range(len(sequences)))
    random.shuffle(order)
    spec = replace(SHARED, budget=budget, multiple=multiple)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "LEAST", 0)
        microbatches = pack(batch, order, spec)
    total = torch.zeros(len(batch.action_index_T))
    for one in microbatches:
        run = [n for n in order if batch.action_offsets[n] in one.rows_T]
        distinct = {sequences[n][:end] for n in run for end in range(1, len(sequences[n]) + 1)}
        seen = read(one)
        live = [prefix for prefix, row in zip(seen, one.rows_P.tolist(), strict=True) if row >= 0]
        assert sorted(live) == sorted(distinct) and one.tokens % multiple == 0
        assert one.distinct == (len(distinct), sum(len(sequences[n]) for n in run))
        assert len(distinct) <= budget or len(run) == 1
        expected = [sequences[n][:end] for n in run for end in range(1, len(sequences[n]))]
        assert [seen[at] for at in one.hidden_index_T.tolist()] == expected
        total += unpack([one], [one.target_T], len(total))
    assert torch.equal(total.long(), batch.tokens_P[batch.action_index_T])


@given(trees(), st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_the_tree_counts_the_distinct_prefixes(sequences, budget) -> None:
    distinct = len({one[:end] for one in sequences for end in range(1, len(one) + 1)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "LEAST", 0)
        tree = Tree.of(played(*sequences), range(len(sequences)))
    assert int((tree.lengths - tree.common).sum()) == distinct
    assert len(tree.bins(distinct)) == 1, "all of them fit into one bin"
