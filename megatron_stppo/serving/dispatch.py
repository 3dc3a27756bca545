"""Which replica plays which of the admitted episodes."""

from __future__ import annotations

from collections.abc import Sequence


def shares(waiting: int, playing: Sequence[int], capacity: Sequence[int]) -> list[int]:
    """Return how many of the waiting episodes each replica gets.

    Each episode goes to the replica that then plays fewest, among those with a free place; of equal ones, to
    the last. playing, capacity: episodes per replica.
    Example: shares(5, [0, 2], [8, 8]) is [3, 2], and shares(9, [0, 0], [2, 4]) is [2, 4].
    """
    given = [0] * len(playing)
    for _ in range(waiting):
        free = [i for i, most in enumerate(capacity) if playing[i] + given[i] < most]
        if not free:
            break
        given[min(free, key=lambda i: (playing[i] + given[i], -i))] += 1
    return given
