"""Write trajectories to trajectories/iteration-00012.jsonl, for people, for scripts, and for `replay`.

Line k of iteration-00012.turns.jsonl contains the update's values for each turn of line k. It is written
after the update, and is missing if the update was refused.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from transformers import PreTrainedTokenizerBase

from megatron_stppo.base.errors import CannotRecord, TooManyFailures
from megatron_stppo.base.files import replacing
from megatron_stppo.base.types import Trajectory
from megatron_stppo.config import ConfigError
from megatron_stppo.data.text.plain_text import decode_plain
from megatron_stppo.data.validity import episode_fault, ids_fault, turn_fault
from megatron_stppo.observe.run_files import DIGEST, played_path, turns_path
from megatron_stppo.parallel.collectives import first, raise_together, send_to_first

# JSON escapes control codes below space. These characters also affect a terminal or a program that reads
# lines: C1, zero-width, line separators, direction overrides, and halves of surrogate pairs (not valid text).
_ACTING = re.compile("[\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")

_IN_TURN = re.compile(r"(.*) - at `\$\.turns\[(\d+)\](.*)`", re.DOTALL)  # of msgspec's errors


class TrajectoryLog:
    """Writes every iteration's trajectories. Every rank encodes its own, and rank 0 writes the file."""

    def __init__(self, folder: Path, rank: int, tokenizer: PreTrainedTokenizerBase) -> None:
        self._run, self._rank, self._tokenizer = folder, rank, tokenizer

    def write(self, iteration: int, own: Sequence[Trajectory]) -> dict[str, Any]:
        """Write one line per trajectory: those of this rank and of all others, in rank order. Collective.

        Replaces the file of an interrupted attempt when it is complete. Return the column of metrics.jsonl
        with the digest of the file, on rank 0; {} on other ranks. Raises CannotRecord on all ranks if the
        disk refuses it: a run whose records have holes cannot be audited or replayed.
        """
        parts = send_to_first(_lines(self._record(iteration, trajectory) for trajectory in own))
        if self._rank == 0:
            turns_path(self._run, iteration).unlink(missing_ok=True)  # of an interrupted attempt
        digest = hashlib.sha256()
        self._replace(played_path(self._run, iteration), _hashing(parts, digest))
        return {DIGEST: digest.hexdigest()} if self._rank == 0 else {}

    @contextmanager
    def failing(self, iteration: int) -> Iterator[None]:
        """Context for playing the episodes of an iteration, which are also written if too many fail.

        Collective, as the error TooManyFailures is.
        """
        try:
            yield
        except TooManyFailures as error:
            self.write(iteration, error.own)
            raise

    def write_turns(self, iteration: int, turns: Iterable[list[dict[str, Any]]]) -> None:
        """Write one line per trajectory on rank 0 (training/update/ratios.py); no file if `turns` is empty.

        Collective. Raises as `write` does.
        """
        records = [{"iteration": iteration, "turns": of_one} for of_one in turns] if self._rank == 0 else []
        self._replace(turns_path(self._run, iteration), iter([_lines(records)] if records else []))

    def _replace(self, path: Path, parts: Iterator[bytes]) -> None:
        """Write the file on rank 0; no file without parts. Collective. Raises CannotRecord on all ranks."""
        refused = None
        if (begin := next(parts, None)) is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with replacing(path) as scratch, scratch.open("wb") as file:
                    file.writelines(itertools.chain((begin,), parts))
            except OSError as error:
                refused = error.strerror or str(error)
                deque(parts, maxlen=0)  # the other ranks wait until they have sent theirs
        raise_together(refused, lambda found: CannotRecord(path, first(found)), str)

    def _record(self, iteration: int, trajectory: Trajectory) -> dict[str, Any]:
        task = trajectory.task
        return {
            "iteration": iteration,
            "data_source": task.data_source,
            "split": task.split,
            "index": task.index,
            "group": trajectory.group,
            "branch": trajectory.branch,
            "outcome": trajectory.outcome,
            "reward": trajectory.reward,
            "tool_calls": trajectory.tool_calls,
            "valid_actions": trajectory.valid_actions,
            "detail": trajectory.detail,
            "overlong_prompt": trajectory.overlong_prompt,
            "metrics": trajectory.metrics,
            "targets": task.targets,
            "prompt": self._tokenizer.decode(
                list(trajectory.prompt_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            ),
            "turns": [
                {
                    "action": decode_plain(self._tokenizer, turn.token_ids),
                    "observation": decode_plain(self._tokenizer, turn.observation_ids),
                    "reward": turn.reward,
                    "versions": turn.versions,
                    "token_ids": turn.token_ids,
                    "rollout_logprob": [_float32(logprob) for logprob in turn.rollout_logprob],
                    "observation_ids": turn.observation_ids,
                }
                for turn in trajectory.turns
            ],
            "prompt_ids": trajectory.prompt_ids,
        }


def _hashing(parts: Iterable[bytes], digest: hashlib._Hash) -> Iterator[bytes]:
    """Yield the parts, and add them to the digest."""
    for part in parts:
        digest.update(part)
        yield part


def read(run: Path, iteration: int, vocabulary: int = sys.maxsize) -> list[Trajectory]:
    """Return an iteration's trajectories, without the task's messages and extra fields.

    When packed, they are bit for bit the batch that was trained on. vocabulary: the model's number of tokens.
    Raises ConfigError with file, line, turn and field for a trajectory that cannot have been played.
    """
    path = played_path(run, iteration)
    found: list[Trajectory] = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            # fields that a Trajectory does not have, such as the text of an action, are ignored
            played = msgspec.convert(row | {"task": row | {"prompt": ()}}, Trajectory)
            if reason := _fault(row, played, iteration, vocabulary):
                raise ValueError(reason)
            found.append(played)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); choose another run") from None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        # msgspec.ValidationError is a ValueError
        reason = _IN_TURN.sub(lambda at: f"turn {int(at[2]) + 1}{at[3]}: {at[1]}", str(error))
        raise ConfigError(
            f"{path} line {len(found) + 1}: is not a trajectory ({reason}); choose another run"
        ) from None
    if not found:
        raise ConfigError(f"{path}: is empty; choose another run")
    return found


def _fault(row: dict[str, Any], played: Trajectory, iteration: int, vocabulary: int) -> str:
    """Return why a line cannot be of this iteration, or cannot be a trajectory, or ""."""
    if row.get("iteration", iteration) != iteration:
        return f"iteration={row['iteration']}, in the file of iteration {iteration}"
    if reason := episode_fault(played) or ids_fault("prompt", played.prompt_ids, vocabulary):
        return reason
    for number, turn in enumerate(played.turns, 1):
        newest = turn.versions[-1][0]
        late = f"version {newest} did not exist before iteration {newest + 1}" if newest >= iteration else ""
        if reason := turn_fault(turn, vocabulary) or late:
            return f"turn {number}: {reason}"
    return ""


def _lines(records: Iterable[dict[str, Any]]) -> bytes:
    return "".join(f"{encode(record)}\n" for record in records).encode()


def _float32(value: float) -> float:
    """Return the shortest decimal that is the same float32: the engine and the batch use float32."""
    return float(str(np.float32(value)))


def encode(record: dict[str, Any]) -> str:
    """Return one line of JSON that is readable in any language and safe to print on a terminal.

    Example: {"action": "Lomé\\x1b[2J\\u202e"} becomes {"action": "Lomé\\\\u001b[2J\\\\u202e"}.
    """
    return _ACTING.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(record, ensure_ascii=False))
