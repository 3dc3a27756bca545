"""Which replica plays which of the admitted episodes, and how they are put into messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")


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


def parts(items: Sequence[Item], sizes: Sequence[int], limit: int) -> Iterator[tuple[Item, ...]]:
    """Yield the items in order, in tuples whose sizes sum to at most `limit`, or of one larger item.

    Example: list(parts("abc", [3, 2, 4], 5)) is [("a", "b"), ("c",)].
    """
    part: list[Item] = []
    total = 0
    for item, size in zip(items, sizes, strict=True):
        if part and total + size > limit:
            yield tuple(part)
            part, total = [], 0
        part.append(item)
        total += size
    if part:
        yield tuple(part)
