from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_stppo.base.errors import CannotRecord, TooManyFailures
from megatron_stppo.base.types import Message, Task, Trajectory, Turn
from megatron_stppo.config import ConfigError
from megatron_stppo.data.packing import groups_of, to_batch
from megatron_stppo.data.validity import columns
from megatron_stppo.observe.run_files import new_folder, recorded, turns_path
from megatron_stppo.observe.trajectory_log import TrajectoryLog, encode, read
from megatron_stppo.rollout.episodes.failures import FailureLimit
from tests.full_disk import full_disk
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("world_of_one")
WORDS = ["capital", "of", "Togo", "?", "<search>", "Lomé", "<eos>"]
TASK = Task("geography", (Message("user", "capital of Togo ?"),), ("Lomé",), "train", 17)
EPISODE = Trajectory(
    TASK,
    (0, 1, 2, 3),
    (
        Turn((4, 2), (-0.5, -0.25), (5,), 0.0, ((3, 2),)),
        Turn((5, 6), (-0.125, 0.0), (), 1.0, ((3, 1), (4, 1))),
    ),
    "ok",
    group=2,
    tool_calls=1,
    valid_actions=2,
    detail="Lomé",
    metrics={"score": 0.1, "left out": None},
)


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")


def test_a_line_has_the_actions_the_observations_and_the_rewards(tmp_path: Path) -> None:
    TrajectoryLog(tmp_path, 0, tokenizer()).write(12, [EPISODE, EPISODE])
    lines = (tmp_path / "trajectories" / "iteration-00012.jsonl").read_text().splitlines()
    row = json.loads(lines[0])
    assert len(lines) == 2
    assert row["prompt"] == "capitalofTogo?"
    assert [turn["action"] for turn in row["turns"]] == ["<search>Togo", "Lomé<eos>"]
    assert row["turns"][0]["observation"] == "Lomé"
    assert row["turns"][0]["token_ids"] == [4, 2]
    assert row["turns"][0]["rollout_logprob"] == [-0.5, -0.25]
    assert (row["outcome"], row["reward"], row["targets"], row["group"]) == ("ok", 1.0, ["Lomé"], 2)


def write(folder: Path, own: list[list[Trajectory]]) -> None:
    rank = dist.get_rank()
    TrajectoryLog(folder / str(rank), rank, tokenizer()).write(5, own[rank])


def test_the_first_rank_writes_the_trajectories_of_all_ranks_in_rank_order(tmp_path: Path) -> None:
    played = [replace(EPISODE, group=n) for n in range(4)]
    run_ranks(write, 3, tmp_path, [played[:1], [], played[1:]])
    (written,) = tmp_path.iterdir()
    assert [t.group for t in read(written, 5)] == [0, 1, 2, 3]
    TrajectoryLog(tmp_path / "alone", 0, tokenizer()).write(5, played)
    name = "trajectories/iteration-00005.jsonl"
    assert (written / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()


def write_to_a_full_disk(folder: Path) -> str:
    rank = dist.get_rank()
    with full_disk(), pytest.raises(CannotRecord) as raised:
        TrajectoryLog(folder, rank, tokenizer()).write(1, [EPISODE])
    return str(raised.value)


def test_a_full_disk_ends_all_ranks_with_one_line_and_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "trajectories" / "iteration-00001.jsonl"
    remedy = "make space for it, and continue the run with --resume"
    line = f"{path}: cannot be written (File too large); {remedy}"
    assert run_ranks(write_to_a_full_disk, 3, tmp_path) == [line] * 3
    assert not list(path.parent.iterdir())
    with full_disk(), pytest.raises(CannotRecord):
        TrajectoryLog(tmp_path, 0, tokenizer()).write_turns(1, [[{"tokens": 2}]])


def test_a_written_batch_is_read_back_unchanged(tmp_path: Path) -> None:
    """Log-probs are float32: the one nearest to -0.1 and the next one, which a rounded number would lose."""
    exact = np.nextafter(np.float32([-0.1, -0.1]), np.float32([-0.1, 0]))
    turn = Turn((4, 2), tuple(map(float, exact)), (5,), float("nan"), ((3, 2),))
    played = [EPISODE, replace(EPISODE, turns=(turn,), group=3, valid_actions=1)]
    TrajectoryLog(tmp_path, 0, tokenizer()).write(12, played)
    assert recorded(tmp_path) == [12]
    again = read(tmp_path, 12)
    assert again[0] == replace(EPISODE, task=replace(TASK, prompt=()))
    batch, expected = to_batch(again), to_batch(played)
    for name, value in columns(expected).items():
        assert torch.equal(value.nan_to_num(9), getattr(batch, name).nan_to_num(9)), name
    assert groups_of([t.summary for t in again]).tolist() == [2, 3]


@pytest.mark.parametrize("line", ["{", "[]", '{"task": 1}', "\xff"])
def test_a_line_that_is_not_a_trajectory_is_named(tmp_path: Path, line: str) -> None:
    TrajectoryLog(tmp_path, 0, tokenizer()).write(1, [EPISODE])
    path = tmp_path / "trajectories" / "iteration-00001.jsonl"
    path.write_text(path.read_text() + line + "\n", encoding="latin-1" if line == "\xff" else "utf-8")
    with pytest.raises(ConfigError, match=r"iteration-00001\.jsonl line \d: is not a trajectory"):
        read(tmp_path, 1)


def test_writing_an_iteration_again_replaces_it(tmp_path: Path) -> None:
    log = TrajectoryLog(tmp_path, 0, tokenizer())
    log.write(1, [EPISODE, EPISODE])
    log.write(1, [EPISODE])
    (only,) = (tmp_path / "trajectories").iterdir()
    assert len(only.read_text().splitlines()) == 1


def test_terminal_control_codes_are_escaped_and_restored() -> None:
    hostile = "Lomé \x1b[2J \x9b31m \u202e \u2028 \ud800 \x00 \r\n"
    line = encode({"action": hostile})
    assert json.loads(line) == {"action": hostile}
    assert "Lomé" in line
    assert all(character.isprintable() for character in line)


def test_turn_records_have_their_own_file_which_is_removed_when_the_iteration_is_repeated(
    tmp_path: Path,
) -> None:
    log = TrajectoryLog(tmp_path, 0, tokenizer())
    log.write(1, [EPISODE])
    log.write_turns(1, [[{"ratio": 1.5}, {"ratio": None}]])
    beside = turns_path(tmp_path, 1)
    assert json.loads(beside.read_text()) == {"iteration": 1, "turns": [{"ratio": 1.5}, {"ratio": None}]}
    assert recorded(tmp_path) == [1]
    log.write(1, [EPISODE])
    assert not beside.exists()


def test_every_evaluation_has_its_own_folder(tmp_path: Path) -> None:
    names = [new_folder(tmp_path / "evaluate", "step_4").name for _ in range(3)]
    assert names == ["step_4", "step_4-2", "step_4-3"]
    assert new_folder(tmp_path / "evaluate", "model").name == "model"


SECOND = EPISODE.turns[1]  # ids 5 and 6, the second by version 4


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ((), "no turns, but the outcome ok"),
        (EPISODE.turns[:1], "2 valid actions in 1 turns"),
        ((EPISODE.turns[0], replace(SECOND, rollout_logprob=(-0.1,))), "turn 2: 1 log-probs of 2 tokens"),
        ((EPISODE.turns[0], replace(SECOND, token_ids=(5, -6))), "turn 2: turn: a token id below 0"),
        ((replace(SECOND, observation_ids=(7,)), SECOND), "turn 1: observation: a token id above 6"),
        (
            (EPISODE.turns[0], replace(SECOND, versions=((3, 1), (5, 1)))),
            "turn 2: version 5 did not exist before iteration 6",
        ),
    ],
)
def test_a_line_that_cannot_have_been_played_is_named_with_its_turn(
    tmp_path: Path, turns: tuple[Turn, ...], reason: str
) -> None:
    TrajectoryLog(tmp_path, 0, tokenizer()).write(5, [EPISODE, EPISODE])
    path = tmp_path / "trajectories" / "iteration-00005.jsonl"
    first, second = path.read_text().splitlines()
    changed = json.loads(second) | {"turns": msgspec.to_builtins(turns)}
    path.write_text(f"{first}\n{json.dumps(changed)}\n")
    with pytest.raises(ConfigError) as found:
        read(tmp_path, 5, vocabulary=7)
    assert f"line 2: is not a trajectory ({reason}); choose another run" in str(found.value)


def test_a_file_of_another_iteration_is_refused(tmp_path: Path) -> None:
    TrajectoryLog(tmp_path, 0, tokenizer()).write(5, [EPISODE])
    folder = tmp_path / "trajectories"
    (folder / "iteration-00005.jsonl").rename(folder / "iteration-00006.jsonl")
    with pytest.raises(ConfigError, match=r"iteration-00006\.jsonl line 1: .*iteration=5, in the file of "):
        read(tmp_path, 6)


def test_the_episodes_of_a_rollout_in_which_too_many_fail_are_written(tmp_path: Path) -> None:
    failed = replace(EPISODE, outcome="error", detail="status 401")
    with pytest.raises(TooManyFailures), TrajectoryLog(tmp_path, 0, tokenizer()).failing(5):
        FailureLimit(0.2).check([failed.summary, EPISODE.summary], [failed, EPISODE])
    assert [one.detail for one in read(tmp_path, 5)] == ["status 401", "Lomé"]


def test_the_first_rank_returns_the_digest_of_the_file(tmp_path: Path) -> None:
    written = TrajectoryLog(tmp_path, 0, tokenizer()).write(5, [EPISODE])
    data = (tmp_path / "trajectories" / "iteration-00005.jsonl").read_bytes()
    assert written == {"trajectories/sha256": hashlib.sha256(data).hexdigest()}
