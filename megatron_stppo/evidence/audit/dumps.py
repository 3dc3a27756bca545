"""What `audit-tokens` reads: a line of JSON for each episode, as another trainer has recorded it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from megatron_stppo.base.printing import one_line
from megatron_stppo.base.types import Task, Trajectory, Turn
from megatron_stppo.config import ConfigError
from megatron_stppo.config.section import Rule
from megatron_stppo.weights.sharding.hf_names import ModelShape

FORM = '{"token_ids": [..], "action_mask": [0, .., 1], "logprobs": [..], "temperature": 1.0}'


class Recorded(msgspec.Struct, frozen=True):
    """The tokens of an episode, with the log-probs of those that the model generated.

    Example: Recorded((5, 6, 7, 8, 9), (0, 0, 1, 1, 0), (-0.1, -2.0)) has a prompt of two tokens, a turn of
    two and an observation of one.
    """

    token_ids: tuple[Annotated[int, Meta(ge=0)], ...]
    action_mask: tuple[Annotated[int, Meta(ge=0, le=1)] | bool, ...]  # 1: the model generated the token
    logprobs: tuple[Annotated[float, Meta(le=1e-3)], ...]  # of these tokens, in nats
    temperature: Annotated[float, Meta(gt=0)] = 1.0
    version: int | str = "-"  # of the weights

    def trajectory(self, line: int) -> Trajectory:
        """Return the episode as the trainer scores it. line: of the file, which becomes Task.index."""
        edges = [n for n, (before, now) in enumerate(pairwise((0, *self.action_mask, 0))) if before != now]
        ids, logprobs, turns = self.token_ids, iter(self.logprobs), list[Turn]()
        for a, b, end in zip(edges[::2], edges[1::2], [*edges[2::2], len(ids)], strict=True):
            own = tuple(next(logprobs) for _ in range(a, b))
            turns.append(Turn(ids[a:b], own, ids[b:end], 0.0, ((0, b - a),)))
        return Trajectory(Task("", (), (), "", line), ids[: edges[0]], tuple(turns), "ok")

    def rules(self, shape: ModelShape) -> list[Rule]:
        """Return what is refused, for a model of this shape."""
        size, masked, given = len(self.token_ids), len(self.action_mask), len(self.logprobs)
        largest, actions, own = max(self.token_ids, default=0), sum(self.action_mask), "give its own model"
        unknown = f"token_ids: {largest} is above {shape.vocab - 1}, the largest of MODEL"
        long = f"token_ids: {size} of them, but MODEL has {shape.max_positions} positions"
        uneven = f"logprobs: {given} numbers for {actions} tokens with action_mask 1"
        record = "record ids of the engine: a text that is encoded again has others than were sampled"
        return [
            Rule(largest >= shape.vocab, unknown, own),
            Rule(size > shape.max_positions, long, f"leave the line out, or {own}"),
            Rule(masked != size, f"action_mask: {masked} numbers for {size} token_ids", "give as many"),
            Rule(not actions, "action_mask: has no 1", "leave the line out: the model generated nothing"),
            Rule(self.action_mask[:1] == (1,), "action_mask: begins with 1", "give the prompt too"),
            Rule(given != actions, uneven, record),
        ]


def read(path: Path, shape: ModelShape) -> dict[int, Recorded]:
    """Return the episodes of a file by the number of their line, from 1. Raises ConfigError with file, line,
    field and remedy."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(
            f"FILE={path}: cannot be read ({error.strerror}); give JSON lines: {FORM}"
        ) from None
    if not any(map(bytes.strip, lines)):
        raise ConfigError(f"FILE={path}: is empty; give a line for each episode: {FORM}")
    episodes = {}
    for number, line in enumerate(lines, 1):
        where = f"FILE={path} line {number}"
        try:
            episodes[number] = msgspec.json.decode(line, type=Recorded)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{where}: {one_line(str(error))}; give {FORM}") from None
        for rule in episodes[number].rules(shape):
            if rule.broken:
                raise ConfigError(f"{where}, {rule}")
    return episodes
