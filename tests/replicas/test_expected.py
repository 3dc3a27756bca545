"""A replica's claims that cannot be true, each found in one message."""

from __future__ import annotations

import math
import re
import struct
import time
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from megatron_stppo.base.types import Task, Trajectory, Turn
from megatron_stppo.replicas.trainer.expected import Expected
from megatron_stppo.replicas.wire.episodes import Done
from megatron_stppo.replicas.wire.messages import pack, unpack_from_replica

MAX = 2**20
EXPECTED = Expected("", 10, "", "", max_context=10)
# 2 prompt tokens, 3 + 1 + 2 tokens: 8 together; versions 3 and 4
FIRST = Turn((5, 9, 0), (-0.5, 0.0, -2.0), (7,), 0.0, ((3, 1), (4, 2)))
LAST = Turn((1, 2), (-0.1, -0.1), (), 1.0, ((4, 2),))
TRUE = Trajectory(Task("t", (), ("a",), "train", 1), (8, 9), (FIRST, LAST), "ok", valid_actions=2)


def test_a_possible_trajectory_has_no_fault() -> None:
    assert found(TRUE) == ""
    assert found(replace(TRUE, turns=(), valid_actions=0, outcome="timeout")) == ""
    assert found(replace(TRUE, turns=(), valid_actions=0, outcome="error", overlong_prompt=99)) == ""


def test_metrics_are_those_that_an_environment_can_have() -> None:
    assert found(replace(TRUE, metrics={"score": 0.5, "left_out": None})) == ""
    assert found(replace(TRUE, metrics={"score": math.nan})) == "a metric that is not a finite number"
    for metrics in ({"\x1b[2J": 1.0}, {f"m{i}": 0.0 for i in range(97)}):  # 32 for each turn, and 32
        assert found(replace(TRUE, metrics=metrics)) == "metrics that no environment can have"


def test_a_turn_follows_a_prompt() -> None:
    assert (
        found(replace(TRUE, prompt_ids=())) == "turns without a prompt"
    )  # nothing would predict its first token


def test_a_replica_cannot_claim_a_version_that_it_does_not_have() -> None:
    assert found(TRUE, held=range(4)) == "turn 0: version 4 was never sent to this replica"
    assert found(TRUE, held={4}) == "turn 0: version 3 was never sent to this replica"
    newest = replace(LAST, versions=((10**15, 2),))
    assert found(with_last(newest)) == f"turn 1: version {10**15} was never sent to this replica"


def test_versions_do_not_decrease_and_are_those_of_all_tokens() -> None:
    assert found(with_last(replace(LAST, versions=((3, 2),)))) == "turn 1: version 3 after version 4"
    for versions in ([[4, 1]], [[4, 3]], [[4, 1], [3, 1]], [[4, 2], [5, 0]], [[-1, 2]], []):
        with pytest.raises(ValueError, match=r"must be runs \(version, tokens\)"):
            sent({"versions": versions})


def test_a_message_arrives_unchanged_to_the_last_bit() -> None:
    metrics = {"score": 0.1, "a": -0.0, "left out": None}
    special = (-0.0, -5e-324, -math.inf, -0.1, -1.7976931348623157e308)
    turn = Turn((2**32 - 1, 0, 1, 2, 3), special, (4,), -0.0, ((4, 5),))
    played = replace(TRUE, turns=(FIRST, turn), routes=b"\x00\xff", group=3, detail="é", tool_calls=5)
    done = Done(-7, replace(played, metrics=metrics))
    found = unpack_from_replica(pack(done, MAX))
    assert found == done and repr(found) == repr(done)  # -0.0 == 0.0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rollout_logprob": struct.pack("<2d", -0.1, 0.01)}, "a log-prob above 0"),
        ({"rollout_logprob": struct.pack("<2d", math.nan, math.inf)}, "a log-prob above 0"),
        ({"rollout_logprob": b"x" * 15}, "buffer size must be a multiple of element size"),
        ({"token_ids": b"x" * 7}, "buffer size must be a multiple of element size"),
        ({"token_ids": b""}, "must be runs (version, tokens)"),
        ({"token_ids": [1, 2]}, "Expected `bytes`, got `array` - at `$.turns[1][0]`"),
    ],
)
def test_turns_that_are_refused_while_they_are_decoded(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        sent(change)


def test_log_probs_that_are_not_finite_or_0_up_to_rounding_are_decoded() -> None:
    """The update refuses the batch, as it does without replicas."""
    for values in ((math.nan, -math.inf), (1e-6, 0.0)):
        assert isinstance(sent({"rollout_logprob": struct.pack("<2d", *values)}), Done)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"token_ids": (1, 10)}, "turn 1: turn: a token id above 9"),
        ({"observation_ids": (2**32 - 1,)}, "turn 1: observation: a token id above 9"),
        ({"rollout_logprob": (-0.1,)}, "turn 1: 1 log-probs of 2 tokens"),
        ({"observation_ids": (0,) * 2}, ""),
        ({"observation_ids": (0,) * 3}, "11 tokens exceed rollout.max_context=10"),
    ],
)
def test_impossible_turns(change: dict[str, Any], why: str) -> None:
    assert found(with_last(replace(LAST, **change))) == why


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"prompt_ids": (8, 10)}, "prompt: a token id above 9"),
        ({"prompt_ids": (8,) * 5}, "11 tokens exceed rollout.max_context=10"),
        ({"turns": ()}, "no turns, but the outcome ok"),
        ({"valid_actions": 3}, "3 valid actions in 2 turns"),
        ({"tool_calls": -1}, "a negative number of tool calls or prompt tokens"),
        ({"overlong_prompt": 99}, "a prompt that is too long was played"),
        ({"routes": b"\0"}, "1 bytes of experts instead of 0"),
    ],
)
def test_impossible_trajectories(change: dict[str, Any], why: str) -> None:
    if change == {"turns": ()}:
        change = {"turns": (), "valid_actions": 0}
    assert found(replace(TRUE, **change)) == why


def test_recorded_experts_are_those_of_every_token_but_the_last_and_exist() -> None:
    moe = {"experts": 60, "routes": (2, 2)}  # 7 tokens * 2 layers * 2 experts of one byte
    assert found(replace(TRUE, routes=bytes([0, 59, 59, 1] * 7)), **moe) == ""
    unknown = bytes([0, 59, 255, 1] * 7)  # a replica does not send unknown experts
    assert found(replace(TRUE, routes=unknown), **moe) == "an expert outside 0 to 59"
    twice = bytes([0, 59, 1, 2] * 6 + [0, 59, 1, 1])
    assert found(replace(TRUE, routes=twice), **moe) == "an expert that is chosen twice for one token"
    assert found(replace(TRUE, routes=bytes([0, 60, 1, 2] * 7)), **moe) == "an expert outside 0 to 59"
    assert found(TRUE, **moe) == "0 bytes of experts instead of 28"
    many = np.full(28, -1, dtype=np.int32).tobytes()
    assert found(replace(TRUE, routes=many), experts=512, routes=(2, 2)) == "an expert outside 0 to 511"


def test_the_time_is_linear_in_the_number_of_turns_and_tokens() -> None:
    turn = Turn((1,) * 100, (-0.5,) * 100, (2,) * 100, 0.0, ((3, 100),))

    def seconds(turns: int) -> float:
        long = replace(TRUE, turns=(turn,) * turns)
        began = time.process_time()
        assert Expected("", 10, "", "", max_context=10**9).fault(long, held={3}) == ""
        return time.process_time() - began

    assert min(seconds(4000) for _ in range(3)) < 20 * min(seconds(400) for _ in range(3)) + 0.01


def with_last(turn: Turn) -> Trajectory:
    return replace(TRUE, turns=(FIRST, turn))


def sent(change: dict[str, Any]) -> object:
    """Return what arrives if a replica changes fields of the last turn of a message."""
    fields = ["token_ids", "rollout_logprob", "observation_ids", "reward", "versions"]
    message = msgspec.msgpack.decode(pack(Done(7, TRUE), MAX))
    turn = dict(zip(fields, message["turns"][-1], strict=True))
    message["turns"][-1] = list({**turn, **change}.values())
    return unpack_from_replica(msgspec.msgpack.encode(message))


def found(trajectory: Trajectory, held: Collection[int] = range(5), **given: Any) -> str:
    return replace(EXPECTED, **given).fault(trajectory, held)
