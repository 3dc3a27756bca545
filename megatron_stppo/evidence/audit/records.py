"""What `audit` reads: the iterations of a run, how each was played, and what is damaged in their files."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_stppo.base.files import sha256
from megatron_stppo.base.printing import one_line
from megatron_stppo.base.types import Trajectory
from megatron_stppo.checkpoint import step_folder
from megatron_stppo.config import Config, ConfigError
from megatron_stppo.config.file import load
from megatron_stppo.observe import trajectory_log
from megatron_stppo.observe.run_files import DIGEST, played_path, read_rows, recorded
from megatron_stppo.validation.attempts import ATTEMPT, attempt_path

METRICS, TOKENS = "metrics.jsonl", "rollout/action_tokens"


@dataclass(frozen=True)
class PlayedIteration:
    """The trajectories of an iteration, in the order of the file's lines, and with which settings."""

    iteration: int
    trajectories: Sequence[Trajectory]
    config: Config  # of the audit, with the temperature and dtype of the attempt that played the iteration
    lines: Sequence[int] = ()  # of a file, if they are not 1, 2, ..

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
    """Return the iterations of the folder `run` that metrics.jsonl has, and compare their digests.

    If metrics.jsonl cannot be read, all files are read.
    """
    records = Records()
    rows = _rows(run, records)
    numbers = {row.get(ATTEMPT) for row in rows.values()}
    attempts = {number: _settings(config, run, number, records) for number in numbers}
    for iteration, row in sorted(rows.items()):
        settings, path = attempts[row.get(ATTEMPT)], played_path(run, iteration)
        try:
            played = trajectory_log.read(run, iteration, vocabulary)
        except ConfigError as error:
            records.damage.append(str(error).removesuffix("; choose another run"))
            records.tokens += row.get(TOKENS, 0)
            continue
        there = sum(len(turn.token_ids) for t in played for turn in t.turns)
        records.tokens += max(there, row.get(TOKENS, 0))
        if row and DIGEST not in row:
            records.notes["no digest in metrics.jsonl, so that a changed file is not noticed"].append(
                iteration
            )
        if row.get(DIGEST, "") not in ("", sha256(path)):
            records.damage.append(f"{path}: is not the file that was written ({DIGEST} differs)")
        if settings.rollout.top_p < 1:
            records.notes["played with rollout.top_p below 1, so not audited"].append(iteration)
        elif _may_mix(rows, iteration, attempts, played):
            records.notes["may hold episodes of two temperatures or top_p, so not audited"].append(iteration)
        else:
            records.played.append(PlayedIteration(iteration, played, settings))
    return records


def _rows(run: Path, records: Records) -> dict[int, dict[str, Any]]:
    """Return the rows of metrics.jsonl by iteration; an empty row for each file if they cannot be read."""
    there = recorded(run)
    try:
        rows = {row["iteration"]: row for row in map(_checked, read_rows(run / METRICS))}
    except (OSError, ValueError, KeyError, AttributeError, RecursionError) as error:
        records.damage.append(
            f"{run / METRICS}: cannot be read, so its digests and sums are unknown ({error})"
        )
        return {iteration: {} for iteration in there}
    rows.pop(0, None)  # an evaluation before training
    ended = max([*rows, *step_folder.candidates(run / "checkpoints")[:1]], default=0)
    if abandoned := [iteration for iteration in there if iteration > ended]:
        records.notes["not in metrics.jsonl: abandoned or not finished, so not audited"] += abandoned
    known = [*rows, *there]
    missing = [n for n in range(min(known, default=1), ended + 1) if known and n not in rows]
    records.damage += [f"{run / METRICS}: has no row of iteration {n}, which is not audited" for n in missing]
    return rows


def _checked(row: dict[str, Any]) -> dict[str, Any]:
    for name in ("iteration", ATTEMPT, TOKENS):
        if name in row and type(row[name]) is not int:
            raise ValueError(f"{name}={row[name]!r} is not a whole number")
    return row


def _settings(config: Config, run: Path, attempt: int | None, records: Records) -> Config:
    """Return `config` with how an attempt played. attempt: None if metrics.jsonl cannot be read."""
    if attempt is None:
        return config
    try:
        played = load(attempt_path(run, attempt))
    except ConfigError as error:
        records.damage.append(
            f"{attempt_path(run, attempt)}: cannot be read, so that the iterations of this attempt are "
            f"scored with the settings of the newest ({one_line(str(error))})"
        )
        return config
    sampling = {"temperature": played.rollout.temperature, "top_p": played.rollout.top_p}
    return config.changed(rollout=sampling, model={"dtype": played.model.dtype})


def _may_mix(
    rows: Mapping[int, Mapping[str, Any]],
    iteration: int,
    attempts: Mapping[int | None, Config],
    played: list[Trajectory],
) -> bool:
    """Return whether episodes of the attempt before, sampled in another way, can be in an iteration.

    Asynchronous training keeps episodes in a checkpoint. They have no tokens of versions after it.
    """
    attempt = rows[iteration].get(ATTEMPT)
    known = [row[ATTEMPT] for number, row in rows.items() if number < iteration and ATTEMPT in row]
    earlier = [number for number in known if number != attempt]
    if attempt is None or not earlier or attempts[attempt].serving.replicas is None:
        return False
    before, now = attempts[earlier[-1]].rollout, attempts[attempt].rollout
    if (before.temperature, before.top_p) == (now.temperature, now.top_p):
        return False
    first = min(number for number, row in rows.items() if row.get(ATTEMPT) == attempt)
    return any(turn.policy_version < first for t in played for turn in t.turns)
