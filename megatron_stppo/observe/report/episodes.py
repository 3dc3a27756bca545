"""Read trajectories/ for the report: episodes, and the update's values for their turns."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from megatron_stppo.observe.report.lines import number, reading, short
from megatron_stppo.observe.run_files import played_path, recorded, turns_path

MAX_TEXT, MAX_TURNS = 20_000, 200  # characters of a text, turns of an episode
MAX_METRICS = 96  # of an episode
MAX_BYTES = 12 * 2**20  # of the episodes of all runs on a page
RECORDED = ("tokens", "advantage", "ratio", "clipped", "mismatch", "value")  # of training/update/ratios.py


class TurnRow(msgspec.Struct):
    action: str = ""
    observation: str = ""
    versions: list[tuple[int, int]] = []


class EpisodeRow(msgspec.Struct):
    """The fields of a line of trajectories/ that the report shows, with defaults for missing ones."""

    turns: list[TurnRow]
    data_source: str = ""
    split: str = ""
    index: int | None = None
    group: int | None = None
    branch: int = 0
    outcome: str = ""
    tool_calls: int | None = None
    valid_actions: int | None = None
    detail: str = ""
    metrics: dict[str, Any] = {}
    targets: list[str] = []
    prompt: str = ""


class TurnRecord(msgspec.Struct):
    """A line of trajectories/iteration-NNNNN.turns.jsonl."""

    turns: list[dict[str, float | None]]


def read(folder: Path, most: int, budget: int, notes: list[str]) -> dict[str, Any]:
    """Return {"episodes": [...], "left_out": a sentence}, with at most `most` episodes and `budget` bytes.

    The episodes are the first ones of every iteration. If there are more than `most` iterations, they come
    from evenly spaced ones.
    """
    there = recorded(folder)
    chosen = _spread(there, most)
    shown: list[dict[str, Any]] = []
    counts: dict[int, tuple[int, bool]] = dict.fromkeys(there, (0, True))
    for place, iteration in enumerate(chosen):
        share = most // len(chosen) + (place < most % len(chosen))
        found, more = _of_iteration(folder, iteration, share, budget // len(chosen), notes)
        shown += found
        counts[iteration] = len(found), more
    if shown and not any("tokens" in turn for episode in shown for turn in episode["turns"]):
        notes.append("the updates recorded no ratios and no advantages of these turns")
    return {"episodes": shown, "left_out": left_out(counts)}


def left_out(counts: Mapping[int, tuple[int, bool]]) -> str:
    """Return a sentence that says which episodes are shown.

    counts: (episodes shown, whether there are more) by iteration.
    Example: {1: (2, True), 2: (2, False), 3: (0, True)} gives "Episodes shown: 4, the first ones of 2 of 3
    iterations."; if there are no more than these 4, "Episodes shown: all 4."
    """
    if not counts:
        return "There are no trajectories."
    shown = sum(number for number, _ in counts.values())
    if not any(more for _, more in counts.values()):
        return f"Episodes shown: all {shown}."
    some = sum(number > 0 for number, _ in counts.values())
    return f"Episodes shown: {shown}, the first ones of {some} of {len(counts)} iterations."


def _spread(there: Sequence[int], most: int) -> list[int]:
    if len(there) <= most:
        return list(there)
    return [there[round(i * (len(there) - 1) / max(1, most - 1))] for i in range(most)]


def _of_iteration(
    folder: Path, iteration: int, most: int, budget: int, notes: list[str]
) -> tuple[list[dict[str, Any]], bool]:
    """Return (episodes, whether the file has more)."""
    records = _turn_records(folder, iteration, most, notes)
    found: list[dict[str, Any]] = []
    more = False
    with reading(folder, str(played_path(Path(), iteration)), notes) as lines:
        for line, record in lines:
            if more := len(found) >= most:
                break
            try:
                episode = msgspec.convert(record, EpisodeRow)
            except (msgspec.ValidationError, RecursionError):
                lines.damaged += 1
                continue
            shown = {"iteration": iteration, "line": line + 1} | _shown(episode, record, records.get(line))
            budget -= len(json.dumps(shown))
            if more := budget < 0:
                break
            found.append(shown)
    return found, more


def _turn_records(folder: Path, iteration: int, most: int, notes: list[str]) -> dict[int, TurnRecord]:
    """Return the update's values by line number; empty if the iteration has none."""
    name, records = str(turns_path(Path(), iteration)), dict[int, TurnRecord]()
    if not (folder / name).exists():
        return records
    with reading(folder, name, notes) as lines:
        for line, record in lines:
            if line > 2 * most:  # later lines are not shown, unless many lines are damaged
                break
            try:
                records[line] = msgspec.convert(record, TurnRecord)
            except (msgspec.ValidationError, RecursionError):
                lines.damaged += 1
    return records


def _shown(episode: EpisodeRow, record: dict[str, Any], update: TurnRecord | None) -> dict[str, Any]:
    """Return what the page shows of an episode: bounded, with the update's values."""
    updates = (
        update.turns if update and len(update.turns) == len(episode.turns) else [{}] * len(episode.turns)
    )
    turns = []
    for turn, values in list(zip(episode.turns, updates, strict=True))[:MAX_TURNS]:
        texts = {
            "action": _cut(turn.action),
            "observation": _cut(turn.observation),
            "version": _cut(_versions(turn.versions)),
        }
        turns.append(texts | _numbers({name: values.get(name) for name in RECORDED}))
    metrics = dict(list(episode.metrics.items())[:MAX_METRICS])
    index = "" if episode.index is None else episode.index
    return {
        "task": _cut(f"{episode.data_source} {episode.split} {index}"),
        "outcome": _cut(episode.outcome),
        "reward": short(number(record.get("reward"))),
        "group": episode.group,
        "branch": episode.branch,
        "tool_calls": episode.tool_calls,
        "valid": episode.valid_actions,
        "detail": _cut(episode.detail),
        "metrics": {_cut(name): value for name, value in _numbers(metrics).items()},
        "targets": [_cut(target) for target in episode.targets[:20]],
        "prompt": _cut(episode.prompt),
        "turns": turns,
        "more_turns": max(0, len(episode.turns) - MAX_TURNS),
    }


def _numbers(given: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the values that are usable numbers."""
    found = {name: short(number(value)) for name, value in given.items()}
    return {name: value for name, value in found.items() if value is not None}


def _versions(runs: Sequence[tuple[int, int]]) -> str:
    """Return the policy versions of a turn. Example: [(3, 12), (4, 5)] gives "3 (12 tokens), 4 (5)"."""
    if len(runs) < 2:
        return "".join(str(version) for version, _ in runs)
    (version, tokens), *later = runs
    return ", ".join(
        [f"{version} ({tokens} tokens)", *(f"{version} ({tokens})" for version, tokens in later)]
    )


def _cut(text: str) -> str:
    left = len(text) - MAX_TEXT
    return text if left <= 0 else f"{text[:MAX_TEXT]}\n[{left} more characters are in the file]"
