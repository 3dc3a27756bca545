"""trajectories/iteration-00012.jsonl: what the policy did, for people and for scripts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_stppo.types import Trajectory

# JSON escapes control codes below space; these act on a terminal or a line reader too: C1, zero-width,
# line separators, direction overrides, and halves of surrogate pairs, which are no text at all.
_ACTING = re.compile("[\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


class TrajectoryLog:
    """Rank 0 writes every iteration's trajectories; the other ranks nothing."""

    def __init__(self, folder: Path, rank: int, tokenizer: PreTrainedTokenizerBase) -> None:
        self._folder, self._rank, self._tokenizer = folder / "trajectories", rank, tokenizer

    def write(self, iteration: int, trajectories: Sequence[Trajectory]) -> None:
        """One line per trajectory; the file appears whole, replacing one of an interrupted attempt."""
        if self._rank != 0:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"iteration-{iteration:05d}.jsonl"
        scratch = path.with_suffix(".tmp")
        lines = (encode(self._record(iteration, trajectory)) for trajectory in trajectories)
        scratch.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        os.replace(scratch, path)

    def _record(self, iteration: int, trajectory: Trajectory) -> dict[str, Any]:
        task = trajectory.task
        return {
            "iteration": iteration,
            "data_source": task.data_source,
            "split": task.split,
            "index": task.index,
            "group": trajectory.group,
            "outcome": trajectory.outcome,
            "reward": trajectory.reward,
            "searches": trajectory.searches,
            "valid_actions": trajectory.valid_actions,
            "detail": trajectory.detail,
            "targets": task.targets,
            "prompt": self._text(trajectory.prompt_ids),
            "turns": [
                {
                    "action": self._text(turn.token_ids),
                    "observation": self._text(turn.observation_ids),
                    "reward": turn.reward,
                    "policy_version": turn.policy_version,
                    "token_ids": turn.token_ids,
                    "rollout_logprob": [round(logprob, 6) for logprob in turn.rollout_logprob],
                    "observation_ids": turn.observation_ids,
                }
                for turn in trajectory.turns
            ],
            "prompt_ids": trajectory.prompt_ids,
        }

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def encode(record: dict[str, Any]) -> str:
    """One line of JSON, readable in any language and inert on a terminal.

    Example: {"action": "Lomé\\x1b[2J\\u202e"} becomes {"action": "Lomé\\\\u001b[2J\\\\u202e"}.
    """
    return _ACTING.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(record, ensure_ascii=False))
