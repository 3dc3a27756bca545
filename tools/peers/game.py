"""The game that both trainers play. Standard library only: both environments' Pythons import this file."""

from __future__ import annotations

# What a turn is answered with, where there is another turn. It has no control tokens, so that both trainers
# encode it to the same ids; a few dozen tokens, as a short tool answer has.
OBSERVATION = (
    "\nobserved: the door in the north is open, a lamp stands on the table, the map shows a river.\n"
)


def question(number: int) -> str:
    """Return the text of prompt `number`; all are about equally long."""
    return f"You are in room {number:03} of an old house with many doors. Describe what you see, then go on."


def reward(text: str) -> float:
    """Return 1 or 0, about equally often for random text; the same for the same text."""
    return float(sum(text.encode()) % 2)
