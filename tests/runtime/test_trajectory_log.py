from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_stppo.runtime.trajectory_log import TrajectoryLog, encode
from megatron_stppo.types import Message, Task, Trajectory, Turn

WORDS = ["capital", "of", "Togo", "?", "<search>", "Lomé", "<eos>"]
TASK = Task("geography", (Message("user", "capital of Togo ?"),), ("Lomé",), "train", 17)
EPISODE = Trajectory(
    TASK,
    (0, 1, 2, 3),
    (Turn((4, 2), (-0.5, -0.25), (5,), 0.0, 3), Turn((5, 6), (-0.125, 0.0), (), 1.0, 3)),
    "ok",
    group=2,
    searches=1,
    valid_actions=2,
    detail="Lomé",
)


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")


def test_a_line_holds_what_was_written_read_and_earned(tmp_path: Path) -> None:
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


def test_only_the_first_rank_writes(tmp_path: Path) -> None:
    TrajectoryLog(tmp_path, 1, tokenizer()).write(1, [EPISODE])
    assert not list(tmp_path.iterdir())


def test_writing_an_iteration_again_replaces_it(tmp_path: Path) -> None:
    log = TrajectoryLog(tmp_path, 0, tokenizer())
    log.write(1, [EPISODE, EPISODE])
    log.write(1, [EPISODE])
    (only,) = (tmp_path / "trajectories").iterdir()
    assert len(only.read_text().splitlines()) == 1


def test_text_that_acts_on_a_terminal_is_escaped_and_comes_back() -> None:
    hostile = "Lomé \x1b[2J \x9b31m \u202e \u2028 \ud800 \x00 \r\n"
    line = encode({"action": hostile})
    assert json.loads(line) == {"action": hostile}
    assert "Lomé" in line
    assert all(character.isprintable() for character in line)
