"""Episodes that go on from what another engine has played."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_stppo.base.types import Trajectory
from megatron_stppo.environments.base import StepResult
from megatron_stppo.replicas.wire.episodes import Unfinished, unpack_record
from megatron_stppo.rollout.episodes.episode import Episode, Limits
from megatron_stppo.rollout.vllm.generation import Recall, Record, RecordedHistory, RecordedTurn
from tests.ranks import run_ranks
from tests.rollout.vllm.tiny import CONTEXT, Game, build_model, fill, task

LIMITS = Limits(max_prompt_tokens=60, max_turn_tokens=40, max_observation_tokens=30, max_context=CONTEXT)
NUMBERS = range(6)
FIRST = RecordedTurn((5, 9), (-0.1, -2.0), ((3, 2),), "stop", (4,))
SECOND = RecordedTurn((6,), (-0.3,), ((3, 1),))
RECORD = (RecordedHistory((1, 2), (FIRST, SECOND)), RecordedHistory((7,), (FIRST,)))


def test_a_turn_is_recalled_once_and_only_after_the_tokens_that_it_followed() -> None:
    recall = Recall(RECORD)
    assert recall.next((1, 3), 100) is None
    assert recall.next((1, 2, 5, 9), 100) is None, "the observation is missing"
    assert recall.next((1, 2), 100) == FIRST and recall.next((1, 2), 100) is None
    assert recall.next((1, 2, 5, 9, 4), 100) == SECOND and recall
    assert recall.next((7,), 100) == FIRST and not recall


@pytest.mark.parametrize("turn, most", [(FIRST, 2), (SECOND, 2)])
def test_a_turn_that_is_longer_than_the_limit_is_generated_anew(turn: RecordedTurn, most: int) -> None:
    record = (RecordedHistory((1,), (turn,)),)
    assert Recall(record).next((1,), most) == turn
    assert Recall(record).next((1,), most - 1) is None


def test_a_record_arrives_as_it_was_sent() -> None:
    assert unpack_record(Unfinished.of(3, RECORD).record) == RECORD


class Other(Game):
    """A game whose second observation is another one than before."""

    async def step(self, action: str) -> StepResult:
        found = await super().step(action)
        return StepResult("different ", found.reward, found.done, found.outcome, valid=found.valid)


def play(
    engine: Any, environment: Any, records: dict[int, Record], steps: int = 10**9, one_version: Any = ""
) -> Any:
    """Play greedily for some engine steps. Return (trajectories, records of what is in progress, tokens that
    were generated)."""
    from megatron_stppo.rollout.episodes.environment_host import EnvironmentHost, ToolWait
    from megatron_stppo.rollout.episodes.play import Player

    done: dict[int, Trajectory] = {}
    with EnvironmentHost(environment, concurrency=8, deadline=5, tools=ToolWait(0)) as host:
        player = Player(engine, host, one_version)
        player.begin(
            [
                Episode(
                    task(n),
                    n,
                    LIMITS,
                    engine.tokenizer,
                    engine.end_ids,
                    index=n,
                    seed=11,
                    place=n,
                    temperature=0.0,
                    earlier=records.get(n, ()),
                )
                for n in NUMBERS
            ]
        )
        ended: list[Episode] = []
        for _ in range(steps):
            if not player.playing:
                break
            answers = host.take(len(player.asked))
            ended += player.apply(answers)
            ended += player.step()
        done = {episode.index: episode.trajectory() for episode in ended}
        left = {n: player.record(n) for n in player.playing}
    engine.abort_all()
    return done, left, player.tokens


def interrupted(folder: Path) -> dict[str, Any]:
    from megatron_stppo.rollout.vllm.engine import Engine, EngineSettings

    engine = Engine(EngineSettings(folder, max_context=CONTEXT, max_sequences=16, kv_cache_gib=0.05))
    fill(engine.parameters(), folder)
    engine.published = lambda: 3
    engine.refresh()
    whole, _, tokens = play(engine, Game, {})
    seen: dict[str, Any] = {"whole": whole, "tokens": tokens, "resumed": {}}
    for steps in (1, 7, 30, 55):
        early, left, _ = play(engine, Game, {}, steps)
        engine.published = lambda: 4
        engine.refresh()
        late, _, again = play(engine, Game, left)
        seen["resumed"][steps] = early, left, {n: late[n] for n in left}, again
        engine.published = lambda: 3
        engine.refresh()
    _, left, _ = play(engine, Game, {}, 55)
    engine.published = lambda: 4
    engine.refresh()
    seen["of one version"] = {
        kind: play(engine, Game, left, one_version=kind)[0] for kind in ("turn", "episode")
    }
    engine.published = lambda: 3
    engine.refresh()
    seen["left"] = left
    seen["other"] = left, play(engine, Other, left)[0], play(engine, Other, {})[0]
    return seen


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("recorded")
    build_model(folder)
    (found,) = run_ranks(interrupted, 1, folder)
    return found


def tokens(trajectory: Trajectory) -> list[Any]:
    return [(turn.token_ids, turn.observation_ids, turn.reward) for turn in trajectory.turns]


def test_an_episode_that_was_interrupted_anywhere_ends_with_the_tokens_of_one_that_was_not(seen: Any) -> None:
    """Turns are greedy, and both versions have the same weights."""
    for early, left, late, _ in seen["resumed"].values():
        assert left
        for number in NUMBERS:
            found = early[number] if number in early else late[number]
            assert tokens(found) == tokens(seen["whole"][number])
            assert found.outcome == seen["whole"][number].outcome


def test_recorded_tokens_keep_log_probs_and_versions_and_only_the_others_are_generated(seen: Any) -> None:
    for steps, (_, left, late, again) in seen["resumed"].items():
        turns = kept = 0
        for number, record in left.items():
            for history in record:
                for turn, old in zip(late[number].turns, history.turns, strict=False):
                    count = len(old.token_ids)
                    assert turn.rollout_logprob[:count] == old.logprobs
                    assert turn.versions[0] == (3, count) and (old.reason is None or len(turn.versions) == 1)
                    assert len(turn.versions) == 1 or turn.versions[1][0] == 4
                    turns, kept = turns + 1, kept + count * (old.reason is not None)
        assert steps < 55 or turns > len(left), "some turns are complete"
        assert again <= seen["tokens"] - kept


def test_where_a_tool_answers_differently_turns_are_generated_as_usual(seen: Any) -> None:
    left, found, afresh = seen["other"]
    for number, record in left.items():
        first = record[0].turns[0].token_ids if record else ()
        assert found[number].turns[0].token_ids[: len(first)] == first
        assert tokens(found[number]) == tokens(afresh[number])


def test_a_turn_or_an_episode_that_must_have_one_version_does_not_go_on_from_another_one(seen: Any) -> None:
    by_turn, by_episode = seen["of one version"]["turn"], seen["of one version"]["episode"]
    assert any(record[0].turns[0].reason for record in seen["left"].values()), "complete turns are recorded"
    for number, record in seen["left"].items():
        complete = sum(turn.reason is not None for history in record for turn in history.turns)
        versions = [turn.versions for turn in by_turn[number].turns]
        assert [len(runs) for runs in versions] == [1] * len(versions)
        assert [runs[0][0] for runs in versions] == [3] * complete + [4] * (len(versions) - complete)
        assert {v for turn in by_episode[number].turns for v, _ in turn.versions} == {4}
