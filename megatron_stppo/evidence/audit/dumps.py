"""What `audit-tokens` reads: a line of JSON for each episode, as another trainer has recorded it."""

from itertools import pairwise
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from megatron_stppo.base.printing import one_line
from megatron_stppo.base.types import Task, Trajectory, Turn
from megatron_stppo.config import ConfigError
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

    def fault(self, shape: ModelShape) -> str:
        """Return why a model of this shape cannot score the episode, and what to do, or ""."""
        size, masked, given = len(self.token_ids), len(self.action_mask), len(self.logprobs)
        largest, actions = max(self.token_ids, default=0), sum(self.action_mask)
        vocab, longest = shape.vocab, shape.max_positions
        rules = {
            f"token_ids: {largest} is not below vocab_size={vocab}; give the episode's model": largest
            >= vocab,
            f"token_ids: {size} tokens, max_position_embeddings={longest}; leave them out": size > longest,
            f"action_mask: {masked} numbers for {size} token_ids; give as many": masked != size,
            "action_mask: has no 1; leave the line out, the model generated nothing": not actions,
            "action_mask: begins with 1; give the prompt too": self.action_mask[:1] == (1,),
            f"logprobs: {given} numbers for {actions} tokens with action_mask 1; record the engine's ids, "
            "because a text that is encoded again has others than were sampled": given != actions,
        }
        return next((fault for fault, broken in rules.items() if broken), "")


def read(path: Path, shape: ModelShape) -> dict[int, Recorded]:
    """Return the episodes of a file by the number of their line, from 1. Raises ConfigError with file, line,
    field and remedy."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"FILE={path}: cannot be read ({error.strerror}); give lines of {FORM}") from None
    episodes = dict[int, Recorded]()
    for number, line in enumerate(lines, 1):
        where = f"FILE={path} line {number}"
        try:
            episodes[number] = msgspec.json.decode(line, type=Recorded)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{where}: {one_line(str(error))}; give {FORM}") from None
        if fault := episodes[number].fault(shape):
            raise ConfigError(f"{where}, {fault}")
    if not episodes:
        raise ConfigError(f"FILE={path}: is empty; give lines of {FORM}")
    return episodes
