"""The key chain: its episodes, its files, and the control without ratios."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from megatron_stppo.base.types import Task
from megatron_stppo.config import ConfigError, EnvironmentConfig
from megatron_stppo.config.file import load
from megatron_stppo.data import tasks
from megatron_stppo.data.demonstrations import encode, validated
from megatron_stppo.environments import choose
from megatron_stppo.environments.base import StepResult
from tests.environments.playing import played

EXAMPLE = Path(__file__).parent
sys.path.insert(0, str(EXAMPLE.parent / "quickstart"))
import build_keys  # noqa: E402
from key_chain import SHUT, opened, task_row, use  # noqa: E402
from no_ratio import loss  # noqa: E402

del sys.path[0]
MODEL = EXAMPLE.parent / "quickstart" / "model"
WORDS = [f"Word{letter}" for letter in "abcdefghijklmnopqrst"]


@pytest.fixture
def three(tmp_path: Path) -> Task:
    """A task with three doors, after a round trip through a file."""
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(task_row(random.Random(0), WORDS, 3, "train", 0)) + "\n")
    (task,) = tasks.read(path)
    return task


def play(task: Task, *actions: str) -> list[StepResult]:
    factory = choose.factory(EnvironmentConfig(kind="key_chain:factory").beside(EXAMPLE))
    return played(factory(), task, *actions)


def test_the_right_keys_open_every_door(three: Task) -> None:
    first, second, last = play(three, *map(use, three.targets))
    rooms = three.extra["rooms"]
    assert (first.observation, second.observation) == (opened(2, rooms[1]), opened(1, rooms[2]))
    assert [one.reward for one in (first, second, last)] == [0, 0, 1]
    assert (last.done, last.outcome, last.metrics) == (True, "ok", {"doors": 3})


def test_the_prompt_and_each_answer_show_the_keys_of_the_next_door_only(three: Task) -> None:
    first, second, _ = play(three, *map(use, three.targets))
    shown = three.prompt[0].content, first.observation, second.observation
    assert [[target in text for target in three.targets] for text in shown] == torch.eye(3).bool().tolist()


def test_after_a_wrong_key_nothing_opens_and_the_turns_go_on(three: Task) -> None:
    one, two, three_ = three.targets
    other = next(key for key in three.extra["rooms"][1].values() if key != two)
    results = play(three, use(one), use(other), use(two))
    assert [result.observation for result in results[1:]] == [SHUT, ""]
    assert (results[-1].reward, results[-1].outcome, results[-1].metrics) == (0, "wrong", {"doors": 1})
    assert play(three, use(one), use(two), use(three_) + " ")[-1].reward == 0  # the text must be exact


def test_a_turn_without_a_key_is_not_valid_and_counts(three: Task) -> None:
    results = play(three, "", "x" * 10**6, use(three.targets[2]))
    assert [(result.valid, result.done) for result in results] == [
        (False, False),
        (False, False),
        (True, True),
    ]
    assert results[-1].reward == 0


def test_a_row_of_other_data_names_what_is_missing(tmp_path: Path) -> None:
    row = task_row(random.Random(0), WORDS, 3, "train", 0)
    del row["extra_info"]["rooms"][0]
    (path := tmp_path / "tasks.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match=r"row 0: extra_info.rooms must have a room for each of 3 targets"):
        play(*tasks.read(path), "")


def test_the_files_have_a_cold_starts_own_seed_and_turns_of_twelve_tokens(tmp_path: Path) -> None:
    build_keys.main(["--output", str(tmp_path), "--tokens", "20000", "--seed", "3"])
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    rows = [json.loads(line) for line in (tmp_path / "demonstrations.jsonl").read_text().splitlines()]
    turns = [part["text"] for row in rows for part in row["segments"] if part["kind"] == "turn"]
    assert {len(tokenizer.tokenize(turn)) for turn in turns} == {12}
    assert len(turns) > 200 and sum(map(len, encode(map(validated, rows), tokenizer))) <= 20_000
    config = load(EXAMPLE / "config.yaml")
    for doors in build_keys.DOORS:
        held_out, train = (
            {task.targets for task in tasks.read(tmp_path / f"{split}-{doors}.jsonl")}
            for split in ("evaluate", "train")
        )
        assert (len(held_out), len(train)) == (128, 2048) and not held_out & train
        assert {len(targets) for targets in train} == {doors} and doors <= config.environment.max_turns
    seeds = [
        next(build_keys.Script(seed, build_keys.one_token_words(tokenizer)).rows("skill")) for seed in (3, 4)
    ]
    assert seeds[0] == rows[0] and seeds[1] != rows[0]


def test_the_control_is_the_gradient_without_a_ratio() -> None:
    logprob_T = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantage_T = torch.tensor([0.5, -3.0])
    loss(logprob_T, logprob_T.detach() - 1, advantage_T, None).sum().backward()
    assert torch.equal(logprob_T.grad, -advantage_T)
