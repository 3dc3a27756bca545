"""An agent's episode with several histories: one trajectory each, one episode in every count.

The episode: the agent asks (1, 2), gets 7, 8; asks (1, 3), gets 9; and goes on with (4,) after 7, 8, gets 5.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest
import torch

from megatron_stppo.algorithm.baselines import group_relative
from megatron_stppo.base.errors import TooManyFailures
from megatron_stppo.base.types import Branch, EstimatedBatch, Outcome, ScoredBatch, Task, Trajectory, Turn
from megatron_stppo.config import AlgorithmConfig
from megatron_stppo.data.division import minibatches
from megatron_stppo.data.packing import to_batch
from megatron_stppo.environments.base import Request, StepResult
from megatron_stppo.observe.describe import describe_rollouts
from megatron_stppo.parallel.collectives import decode, encode
from megatron_stppo.replicas.trainer.expected import Expected
from megatron_stppo.replicas.trainer.ledger import Lengths
from megatron_stppo.replicas.wire.episodes import Done, PackedDone, packed
from megatron_stppo.rollout.episodes.environment_host import Answer
from megatron_stppo.rollout.episodes.episode import Episode, Limits
from megatron_stppo.rollout.episodes.failures import FailureLimit
from megatron_stppo.rollout.vllm.generation import Finished
from megatron_stppo.training.advantage import estimate

TASK = Task("t", (), ("a",), "train", 4)


def turn(*ids: int) -> Finished:
    return Finished("0", ids, (-0.5,) * len(ids), "end", ((3, len(ids)),))


def played(reward: float = 1.0) -> Trajectory:
    episode = Episode(TASK, 6, Limits(10, 4, 4, 20), tokenizer=None)
    episode.ask(Request(0, (1, 2)))
    episode.add_turn(turn(7, 8))
    episode.answer(StepResult("", 0.0, False, True, request=Request(1, (1, 3), ("x",), 2)))
    assert (episode.context, episode.stop_strings, episode.max_tokens) == ([1, 3], ("x",), 2)
    episode.add_turn(turn(9))
    episode.answer(StepResult("", 0.0, False, True, 1, request=Request(0, (4,))))
    assert (episode.context, episode.stop_strings, episode.max_tokens) == ([1, 2, 7, 8, 4], (), 4)
    episode.add_turn(turn(5))
    episode.answer(StepResult("", reward, True, True, outcome="ok", detail="five"))
    assert episode.played == 3
    return episode.trajectory()


def test_the_reward_belongs_to_the_last_turn_of_every_history() -> None:
    first, second = played().histories()
    assert (first.token_ids, second.token_ids) == ((1, 2, 7, 8, 4, 5), (1, 3, 9))
    assert [t.reward for t in first.turns] == [0.0, 1.0] and [t.reward for t in second.turns] == [1.0]
    assert (first.branch, second.branch, first.group, second.group) == (0, 1, 6, 6)
    assert (first.tool_calls, first.valid_actions, second.tool_calls, second.valid_actions) == (1, 2, 0, 1)
    assert second.histories() == [second], "a trajectory with one history is its own"


def test_group_statistics_are_over_episodes_and_hold_for_every_history() -> None:
    one = Trajectory(TASK, (1,), (Turn((2,), (-0.5,), (), 0.0, ((3, 1),)),), "wrong", group=6)
    batch = to_batch([*played().histories(), one])
    assert batch.first_N.tolist() == [True, False, True]
    outcome_N, group_N = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([6, 6, 6])
    centred = group_relative(outcome_N, group_N, batch.live_N, False, batch.first_N)
    assert centred.tolist() == [0.5, 0.5, -0.5], "the mean of the two episodes is 1/2"
    scaled = group_relative(outcome_N, group_N, batch.live_N, True, batch.first_N)
    assert scaled.tolist() == pytest.approx([1, 1, -1], abs=1e-6)
    assert to_batch([one]).first_N.tolist() == [True]


def with_values(trajectories: list[Trajectory], value_T: torch.Tensor) -> ScoredBatch:
    return ScoredBatch.of(to_batch(trajectories), epochs=(), value_T=value_T)


def gae(batch: ScoredBatch, **settings: object) -> EstimatedBatch:
    given = {"preset": "ppo", "kl_coefficient": 0, "whiten": False} | settings
    return estimate(batch, AlgorithmConfig(**given), torch.zeros(len(batch.live_N)))


def test_earlier_histories_get_the_reward_times_gamma_lambda_to_the_power_of_later_steps() -> None:
    """Histories of 3 and 1 tokens with the reward 1, then an episode of 1 token with the reward 2."""
    one = Trajectory(TASK, (1,), (Turn((2,), (-0.5,), (), 2.0, ((3, 1),)),), "ok", group=6)
    batch = with_values([*played().histories(), one], torch.tensor([0.5, 0.0, 0.25, 0.75, 0.5]))
    half = {"gamma": 0.5}
    # alone: deltas (-0.5, 0.125, 0.75), (0.25) and (1.5)
    alone = [-0.5 + 0.5 * (0.125 + 0.5 * 0.75), 0.125 + 0.5 * 0.75, 0.75, 0.25, 1.5]
    assert gae(batch, **half).advantage_T.tolist() == alone
    found = gae(batch, **half, gae_histories="discounted")
    assert found.advantage_T.tolist() == [*(a / 2 for a in alone[:3]), *alone[3:]], "1 token follows"
    assert found.return_T.tolist() == gae(batch, **half).return_T.tolist()
    # chained: the rewards are 0, 0, 0, 1, and 0.75 follows the third token: its delta is 0.375 - 0.25
    third = 0.125 + 0.5 * 0.25
    expected = [-0.5 + 0.5 * (0.125 + 0.5 * third), 0.125 + 0.5 * third, third, 0.25, 1.5]
    assert gae(batch, **half, gae_histories="chained").advantage_T.tolist() == expected
    # of turns, the first history has 2 (7, 8 and 5) and the second 1: deltas (-0.375, 0.75), (0.25)
    turns = gae(batch, **half, gae_level="turn", gae_histories="discounted").advantage_T.tolist()
    assert turns == [0.0, 0.0, 0.375, 0.25, 1.5]
    # lambda follows the length of the episode: 1 - 1 / (0.5 * 4) = 1/2, of the other episode 0
    given = {"lam_length": 0.5, "gae_histories": "discounted"}
    last = gae(batch, **given).advantage_T.tolist()[2:]
    assert last == [0.75 / 2, 0.25, 1.5]


@pytest.mark.parametrize("level", ["token", "turn"])
@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize(
    ("histories", "settings", "worth"),
    [
        ("chained", {"gamma": 0.9, "lam": 0.8}, 1.0),
        ("chained", {"gamma": 0.9, "lam_length": 1.5, "lam_critic": 0.5}, 1.0),
        ("discounted", {}, 1.0),
        ("discounted", {"gamma": 0.9, "lam": 0.8}, 0.0),  # CompactionRL, equation 15, if all values are 0
        ("discounted", {"gamma": 0.9, "lam_length": 1.5}, 0.0),
    ],
)
def test_an_episode_that_is_cut_into_histories_has_the_advantages_of_the_whole(
    histories: str, settings: dict[str, float], worth: float, truncated: bool, level: str
) -> None:
    draw = random.Random(1)
    whole, cut = [], []
    for number in range(7):
        sizes = [draw.randint(1, 4) for _ in range(draw.randint(1, 6))]
        turns = [Turn((5,) * n, (-0.5,) * n, (6, 6), 0.0, ((3, n),)) for n in sizes]
        turns[-1] = replace(turns[-1], reward=draw.random())
        outcome: Outcome = "truncated" if truncated and number % 2 else "ok"
        whole.append(Trajectory(TASK, (1, 2), tuple(turns), outcome))
        ends = sorted({len(turns), *(draw.randint(1, len(turns)) for _ in range(2))})
        parts = [tuple(turns[a:b]) for a, b in pairwise([0, *ends])]
        parts = [(*part[:-1], replace(part[-1], reward=turns[-1].reward)) for part in parts]
        branches = tuple(Branch((1, 9), part) for part in parts[1:])
        cut += replace(whole[-1], turns=parts[0], branches=branches).histories()
    value_T = worth * torch.rand(whole_tokens(whole), generator=torch.Generator().manual_seed(0))
    given = settings | {"gae_level": level, "gae_histories": histories}
    if histories == "chained":
        given["truncated"] = "bootstrap"
    one, several = (gae(with_values(trajectories, value_T), **given) for trajectories in (whole, cut))
    assert len(several.live_N) > len(one.live_N) == 7
    torch.testing.assert_close(several.advantage_T, one.advantage_T, rtol=0, atol=1e-6)
    if histories == "chained":
        torch.testing.assert_close(several.return_T, one.return_T, rtol=0, atol=1e-6)


def whole_tokens(trajectories: list[Trajectory]) -> int:
    return sum(len(turn.token_ids) for t in trajectories for turn in t.turns)


def test_histories_are_discounted_or_chained_by_gae_over_action_tokens_only() -> None:
    for other in ({"preset": "grpo"}, {"gae_observations": True}):
        with pytest.raises(ValueError, match="it is for GAE over action tokens; set gae_histories=alone"):
            AlgorithmConfig(gae_histories="chained", **other)


def test_metrics_count_an_episode_once_and_all_its_turns() -> None:
    row = describe_rollouts([t.summary for t in played().histories()], version=3)
    assert (row["reward/mean"], row["outcome/ok"], row["rollout/branches"]) == (1.0, 1, 2.0)
    assert (row["rollout/turns"], row["rollout/response_tokens"]) == (3.0, 4)
    assert (row["rollout/valid_action_rate"], row["rollout/tool_calls"]) == (1.0, 1.0)
    assert Lengths.of([played()]) == Lengths(episodes=1, tokens=4)


def test_a_failed_episode_counts_once_towards_the_limit() -> None:
    failed = Trajectory(TASK, (), (), "error")
    episodes = [*played().histories(), *played().histories(), failed]
    FailureLimit(0.34).check([t.summary for t in episodes])
    with pytest.raises(TooManyFailures, match="1 of 3 episodes failed"):
        FailureLimit(0.3).check([t.summary for t in episodes])


def test_a_message_with_branches_arrives_as_it_was_and_is_checked() -> None:
    whole = played()
    done = Done(70, whole)
    sent = msgspec.msgpack.encode(packed(done))
    assert msgspec.msgpack.decode(sent, type=PackedDone).unpack() == done
    expected = Expected("", 10, "", "", max_context=6)
    assert expected.fault(whole, {3}) == ""
    assert replace(expected, vocabulary=9).fault(whole, {3}) == "branch 1: turn 0: turn: a token id above 8"
    assert replace(expected, max_context=5).fault(whole, {3}) == "6 tokens exceed rollout.max_context=5"
    alone = Trajectory(TASK, (), (), "error", branches=(Branch((1,), played().turns),))
    assert expected.fault(alone, {3}) == "no turns, but the outcome error"
    assert expected.fault(played().histories()[1], {3}) == "a branch without its episode"


def test_requests_reach_the_other_ranks_of_an_engine_unchanged() -> None:
    request = Request(1, (5, 6), ("x",), 3)
    step = Answer(3, result=StepResult("", 0.0, False, True, 1, request=request, metrics={"a": 1.0}))
    for answer in (Answer(3, request=request), step):
        assert decode(encode(answer), Answer) == answer


def test_minibatches_differ_by_one_trajectory_if_branches_do_not_divide() -> None:
    parts = minibatches(torch.ones(9, dtype=torch.bool), 4, 0, 0, 0)
    assert sorted(map(len, parts)) == [2, 2, 2, 3] and sorted(n for part in parts for n in part) == list(
        range(9)
    )
