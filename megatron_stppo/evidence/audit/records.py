"""What `audit` reads: the iterations of a run, how each was played, and what is damaged in their files."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_stppo.base.printing import one_line
from megatron_stppo.base.types import Trajectory
from megatron_stppo.checkpoint import step_folder
from megatron_stppo.config import Config, ConfigError
from megatron_stppo.config.file import load
from megatron_stppo.data.text.plain_text import decode_plain
from megatron_stppo.observe import rows, trajectory_log
from megatron_stppo.observe.describe import describe_rollouts
from megatron_stppo.observe.trajectory_files import DIGEST, digest_of, played_path, recorded
from megatron_stppo.validation.attempts import ATTEMPT, attempt_path

METRICS, TOKENS = "metrics.jsonl", "rollout/action_tokens"
# Columns of a row that are computed again from the iteration's file.
COMPARED = (
    "reward/mean",
    "rollout/turns",
    "rollout/tool_calls",
    TOKENS,
    "rollout/tokens",
    *(f"outcome/{name}" for name in ("ok", "wrong", "truncated", "error", "timeout")),
)


@dataclass(frozen=True)
class PlayedIteration:
    """The trajectories of an iteration, in the order of the file's lines, and with which settings."""

    iteration: int
    trajectories: list[Trajectory]
    config: Config  # of the audit, with the temperature and dtype of the attempt that played the iteration

    @property
    def versions(self) -> set[int]:
        """The versions that the tokens name."""
        return {v for t in self.trajectories for turn in t.turns for v, _ in turn.versions}


@dataclass
class Records:
    """The records of a run.

    Example: Records([PlayedIteration(1, ..)], ["..: is missing"], {"no row": [7]}, 512).
    """

    played: list[PlayedIteration] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)  # one line each
    notes: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))  # reason: iterations
    tokens: int = 0  # action tokens of all iterations, as far as they are known


def read(config: Config, run: Path, vocabulary: int) -> Records:
    """Return the iterations of the folder `run` that metrics.jsonl has, and compare their files with it.

    If metrics.jsonl cannot be read, all files are.
    """
    found = Records()
    given = _rows(run, found)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path, trust_remote_code=False)
    numbers = {row.get(ATTEMPT) for row in given.values()}
    attempts = {number: _settings(config, run, number, found) for number in numbers}
    for iteration, row in sorted(given.items()):
        settings, path = attempts[row.get(ATTEMPT)], played_path(run, iteration)
        try:
            lines = trajectory_log.read_lines(run, iteration, vocabulary)
        except ConfigError as error:
            found.damage.append(str(error).removesuffix("; choose another run"))
            found.tokens += row.get(TOKENS, 0)
            continue
        played = [trajectory for _, trajectory in lines]
        there = sum(len(turn.token_ids) for t in played for turn in t.turns)
        found.tokens += max(there, row.get(TOKENS, 0))
        if row and DIGEST not in row:
            found.notes["no digest in metrics.jsonl, so only sums are compared"].append(iteration)
        if row.get(DIGEST, "") not in ("", digest_of(run, iteration)):
            found.damage.append(f"{path}: is not the file that was written ({DIGEST} differs)")
        found.damage.extend(f"{path}{fault}" for fault in _faults(row, lines, tokenizer))
        if settings.rollout.top_p < 1:
            found.notes["played with rollout.top_p below 1, so not audited"].append(iteration)
        elif _may_mix(given, iteration, attempts, played):
            found.notes["may hold episodes of two temperatures or top_p, so not audited"].append(iteration)
        else:
            found.played.append(PlayedIteration(iteration, played, settings))
    return found


def _rows(run: Path, found: Records) -> dict[int, dict[str, Any]]:
    """Return the rows of metrics.jsonl by iteration; an empty row for each file if they cannot be read."""
    there = recorded(run)
    try:
        given = {row["iteration"]: row for row in map(_checked, rows.read(run / METRICS))}
    except (OSError, ValueError, KeyError, AttributeError, RecursionError) as error:
        found.damage.append(f"{run / METRICS}: cannot be read, so its digests and sums are unknown ({error})")
        return {iteration: {} for iteration in there}
    given.pop(0, None)  # an evaluation before training
    ended = max([*given, *step_folder.candidates(run / "checkpoints")[:1]], default=0)
    if abandoned := [iteration for iteration in there if iteration > ended]:
        found.notes["not in metrics.jsonl: abandoned or not finished, so not audited"] += abandoned
    known = [*given, *there]
    missing = [n for n in range(min(known, default=1), ended + 1) if known and n not in given]
    found.damage += [f"{run / METRICS}: has no row of iteration {n}, which is not audited" for n in missing]
    return given


def _checked(row: dict[str, Any]) -> dict[str, Any]:
    for name in ("iteration", ATTEMPT, TOKENS):
        if name in row and type(row[name]) is not int:
            raise ValueError(f"{name}={row[name]!r} is not a whole number")
    return row


def _settings(config: Config, run: Path, attempt: int | None, found: Records) -> Config:
    """Return `config` with how an attempt played. attempt: None if metrics.jsonl cannot be read."""
    if attempt is None:
        return config
    try:
        given = load(attempt_path(run, attempt))
    except ConfigError as error:
        found.damage.append(
            f"{attempt_path(run, attempt)}: cannot be read, so that the iterations of this attempt are "
            f"scored with the settings of the newest ({one_line(str(error))})"
        )
        return config
    rollout = config.rollout.model_copy(
        update={"temperature": given.rollout.temperature, "top_p": given.rollout.top_p}
    )
    model = config.model.model_copy(update={"dtype": given.model.dtype})
    return config.model_copy(update={"rollout": rollout, "model": model})


def _may_mix(
    given: Mapping[int, Mapping[str, Any]],
    iteration: int,
    attempts: Mapping[int | None, Config],
    played: list[Trajectory],
) -> bool:
    """Return whether episodes of the attempt before, sampled in another way, can be in an iteration.

    Asynchronous training keeps episodes in a checkpoint. They have no tokens of versions after it.
    """
    attempt = given[iteration].get(ATTEMPT)
    known = [row[ATTEMPT] for number, row in given.items() if number < iteration and ATTEMPT in row]
    earlier = [number for number in known if number != attempt]
    if attempt is None or not earlier or attempts[attempt].serving.replicas is None:
        return False
    before, now = attempts[earlier[-1]].rollout, attempts[attempt].rollout
    if (before.temperature, before.top_p) == (now.temperature, now.top_p):
        return False
    first = min(number for number, row in given.items() if row.get(ATTEMPT) == attempt)
    return any(turn.policy_version < first for t in played for turn in t.turns)


def _faults(
    row: Mapping[str, Any],
    lines: list[tuple[dict[str, Any], Trajectory]],
    tokenizer: PreTrainedTokenizerBase,
) -> Iterator[str]:
    """Yield how lines differ from their row of metrics.jsonl, and texts from their tokens."""
    for number, (line, played) in enumerate(lines, 1):
        for where, written, text in _texts(line, played, tokenizer):
            if written is not None and written != text:
                yield f" line {number}: {where} is not the text of its tokens"
        if not _equal(line.get("reward", played.reward), played.reward):
            yield f" line {number}: reward={line['reward']}, and the turns have {played.reward}"
    now = _sums([played for _, played in lines])
    for name in COMPARED:
        if name in row and not _equal(row[name], now[name]):
            yield f": has {name}={now[name]:g}, and metrics.jsonl has {row[name]}"


def _texts(
    line: Mapping[str, Any], played: Trajectory, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[str, Any, str]]:
    """Yield (place, text or None, text of the tokens) of the prompt, the actions and the observations."""
    yield "prompt", line.get("prompt"), trajectory_log.prompt_text(tokenizer, played.prompt_ids)
    for number, (written, turn) in enumerate(zip(line["turns"], played.turns, strict=True), 1):
        yield f"turn {number}: action", written.get("action"), decode_plain(tokenizer, turn.token_ids)
        observation = decode_plain(tokenizer, turn.observation_ids)
        yield f"turn {number}: observation", written.get("observation"), observation


def _sums(played: list[Trajectory]) -> dict[str, float]:
    summaries = [trajectory.summary for trajectory in played]
    return describe_rollouts(summaries, version=0) | {
        TOKENS: sum(turn.tokens for summary in summaries for turn in summary.turns),
        "rollout/tokens": sum(summary.length for summary in summaries),
    }


def _equal(written: Any, now: float) -> bool:
    """metrics.jsonl has null for numbers that are not finite; sums depend on the order in the last bits."""
    finite = isinstance(written, int | float) and math.isfinite(written)
    if not finite or not math.isfinite(now):
        return not finite and not math.isfinite(now)
    return math.isclose(written, now, rel_tol=1e-9, abs_tol=1e-12)
