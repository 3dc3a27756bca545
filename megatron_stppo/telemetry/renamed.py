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
    "tool_calls": 2}."""
    return {NOW.get(name, name): value for name, value in record.items()}
