"""Names of fields in the records of older versions, and their names now. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NOW = {
    "searches": "tool_calls",  # trajectories/
    "rollout/searches": "rollout/tool_calls",  # metrics.jsonl, as the following
    "rollout/searched": "rollout/called_tool",
    "evaluate/searched": "evaluate/called_tool",
}


def renamed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record with today's names. Example: {"reward": 1.0, "searches": 2} becomes {"reward": 1.0,
    "tool_calls": 2}.

    A turn with the one `policy_version` of all its tokens gets `versions` instead. Values of unexpected
    types are left for the reader to refuse.
    """
    now = {NOW.get(name, name): value for name, value in record.items()}
    if isinstance(turns := now.get("turns"), list):
        now["turns"] = [_with_versions(turn) for turn in turns]
    return now


def _with_versions(turn: Any) -> Any:
    if not isinstance(turn, dict) or "policy_version" not in turn:
        return turn
    ids = turn.get("token_ids")
    return turn | {"versions": [[turn["policy_version"], len(ids)]] if isinstance(ids, list) else None}
