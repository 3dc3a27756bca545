"""The task of both trainers. Standard library only, because the Pythons of both environments import it."""

from __future__ import annotations

# The observation after a turn, if another turn follows. It has no control tokens, so that both trainers
# encode it to the same ids. It has a few dozen tokens, like a short tool answer.
OBSERVATION = (
    "\nobserved: the door in the north is open, a lamp stands on the table, the map shows a river.\n"
)


def question(number: int) -> str:
    """Return the text of prompt `number`. All prompts have about the same length."""
    return f"You are in room {number:03} of an old house with many doors. Describe what you see, then go on."


def reward(text: str) -> float:
    """Return 1 or 0, about equally often for random text, and always the same for the same text."""
    return float(sum(text.encode()) % 2)
