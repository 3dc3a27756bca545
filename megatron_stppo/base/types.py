"""Records that the stages of training exchange.

Conventions
- A trajectory is a prompt, followed by alternating turns and observations. The policy generated the tokens of
  a turn; the environment wrote the tokens of an observation. Only turn tokens are *action tokens*.
- Axis suffixes: T action tokens, P packed tokens (prompt, turns, observations) that this rank holds, S turns,
  N trajectories, R everything after the prompts (turns and observations).
- Every offsets tensor of a Batch is int64, starts at 0, is non-decreasing and has one entry more than it has
  slices. Masks are derived from offsets, never the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

if TYPE_CHECKING:  # an environment and a script need the records without tensors, and not the import of torch
    import torch

Outcome = Literal["ok", "wrong", "truncated", "error", "timeout"]
# error and timeout are failures of the environment, not of the policy. Such trajectories carry no loss.
FAILED: frozenset[str] = frozenset({"error", "timeout"})

# Policy versions of the tokens of a turn: runs of (version, number of tokens), in the order of the tokens.
# Versions increase, because new weights may arrive while a turn is generated.
Versions = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Message:
    """One chat message. Example: Message("user", "Question: What is the capital of France?")."""

    role: str
    content: str
    # further keys that a chat template may read, JSON values: tool_calls, tool_call_id, reasoning_content, ..
    extra: dict[str, Any] = field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Message:
        """Return the message with these keys. Content that is missing or None becomes "".

        Example: {"role": "tool", "content": "5", "name": "add"} is Message("tool", "5", {"name": "add"}).
        """
        extra = {key: value for key, value in given.items() if key not in ("role", "content")}
        content = given.get("content")
        return cls(given.get("role", ""), "" if content is None else content, extra)

    def as_dict(self) -> dict[str, Any]:
        """Return the message as chat templates and clients of chat completions have it; see `of`."""
        return {"role": self.role, "content": self.content} | self.extra


@dataclass(frozen=True)
class Task:
    """One row of a data set (the verl schema, parsed).

    Example: Task("geography", (Message("user", "Question: capital of France?"),), ("Paris",), "train", 17)
    """

    data_source: str
    prompt: tuple[Message, ...]
    targets: tuple[str, ...]  # accepted answers, at least one
    split: str
    index: int
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """Tokens that the policy generated in one call of the engine, and the environment's answer to them.

    Raises ValueError if `versions` are not those of n tokens: a turn may come from a file or a replica.

    Example: Turn((5, 9), (-0.1, -2.0), (7, 7, 3), 0.0, ((4, 1), (5, 1))): two action tokens, the first by
    policy version 4 and the second by version 5, then three observation tokens.
    """

    token_ids: tuple[int, ...]  # n >= 1, exactly as the engine emitted them
    rollout_logprob: tuple[float, ...]  # n, reported by the engine, natural log
    observation_ids: tuple[int, ...]  # m >= 0
    reward: float
    versions: Versions  # of the n tokens

    def __post_init__(self) -> None:
        _check_versions(self.versions, len(self.token_ids))

    @property
    def policy_version(self) -> int:
        """The version of the oldest token."""
        return self.versions[0][0]

    @property
    def summary(self) -> TurnSummary:
        return TurnSummary(len(self.token_ids), len(self.observation_ids), self.reward, self.versions)


@dataclass(frozen=True)
class Branch:
    """A further history of an agent's episode: a conversation that does not continue an earlier one.

    Its last turn has the reward of the episode, too. Its prompt may contain turns of other histories,
    as tokens that the policy reads.
    Example: an agent that asks (1, 2), gets (7,), and then asks (1, 3) has the branch
    Branch((1, 3), (turn,)).
    """

    prompt_ids: tuple[int, ...]
    turns: tuple[Turn, ...]  # at least one
    routes: bytes = b""  # as Trajectory.routes


@dataclass(frozen=True)
class Trajectory:
    """A whole episode: prompt, turns and outcome. An agent's episode may have further histories (branches).

    Example: a 2-token prompt, a 3-token turn, its observation of 4 tokens and a 1-token turn have
    2+3+4+1 = 10 tokens, 4 action tokens at positions 2, 3, 4 and 9, and turn offsets (0, 3, 4).
    """

    task: Task
    prompt_ids: tuple[int, ...]
    turns: tuple[Turn, ...]  # at least one unless outcome is error or timeout
    outcome: Outcome
    group: int = 0  # trajectories of one task in one iteration share a group
    tool_calls: int = 0
    valid_actions: int = 0  # turns the environment could parse
    detail: str = ""  # one readable line: the extracted answer, or what failed
    overlong_prompt: int = 0  # length in tokens of a prompt too long to be played; 0 if the prompt fits
    # [tokens - 1, layers, k] in C order, uint8 or int32: the experts that the engine chose for every token
    # but the last; empty if they were not recorded, or if there are no turns
    routes: bytes = b""
    branches: tuple[Branch, ...] = ()  # the further histories of the episode, until `histories` divides it
    branch: int = 0  # the number of this history in its episode, of a trajectory that `histories` returned
    metrics: dict[str, float | None] = field(default_factory=dict)  # the environment's own, see StepResult

    def histories(self) -> list[Trajectory]:
        """Return a trajectory for each history: the one in the fields above, then the branches.

        They have the task, group and outcome of the episode. What is counted once per episode (tool calls,
        detail) is that of the first.
        """
        first = replace(self, branches=(), valid_actions=min(self.valid_actions, len(self.turns)))
        others = [
            Trajectory(
                self.task,
                branch.prompt_ids,
                branch.turns,
                self.outcome,
                self.group,
                valid_actions=len(branch.turns),
                routes=branch.routes,
                branch=number,
            )
            for number, branch in enumerate(self.branches, 1)
        ]
        return [first, *others] if others else [self]

    @property
    def token_ids(self) -> tuple[int, ...]:
        ids = list(self.prompt_ids)
        for turn in self.turns:
            ids += turn.token_ids + turn.observation_ids
        return tuple(ids)

    @property
    def summary(self) -> Summary:
        read = [self.prompt_ids, *(turn.observation_ids for turn in self.turns)]  # before each turn
        return Summary(
            self.task.index,
            len(self.prompt_ids),
            tuple(
                replace(turn.summary, state=hash(ids) if ids else 0)
                for turn, ids in zip(self.turns, read, strict=False)
            ),
            self.outcome,
            self.group,
            self.tool_calls,
            self.valid_actions,
            self.detail,
            self.overlong_prompt,
            self.branch,
            self.metrics,
        )

    @property
    def reward(self) -> float:
        return float(sum(turn.reward for turn in self.turns))


@dataclass(frozen=True)
class TurnSummary:
    """A turn without its tokens.

    Example: that of the Turn above is TurnSummary(2, 3, 0.0, ((4, 1), (5, 1))).
    """

    tokens: int
    observation: int  # tokens of the observation
    reward: float
    versions: Versions  # of the tokens
    # hash of the tokens between the turn before and this one, or of the prompt: equal for turns that answer
    # the same observation; 0: there are none
    state: int = 0

    def __post_init__(self) -> None:
        _check_versions(self.versions, self.tokens)


@dataclass(frozen=True)
class Summary:
    """A trajectory without its tokens, log-probs and task. Every rank has the summaries of all trajectories.

    The fields after `turns` are those of Trajectory.
    Example: that of the trajectory above has prompt=2, turns of 3 + 4 and 1 + 0 tokens, and length 10.
    """

    index: int  # Task.index
    prompt: int  # tokens of the prompt
    turns: tuple[TurnSummary, ...]
    outcome: Outcome
    group: int
    tool_calls: int
    valid_actions: int
    detail: str
    overlong_prompt: int
    branch: int = 0
    metrics: dict[str, float | None] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """The number of tokens."""
        return self.prompt + sum(turn.tokens + turn.observation for turn in self.turns)

    @property
    def reward(self) -> float:
        return float(sum(turn.reward for turn in self.turns))

    @property
    def policy_version(self) -> int:
        """The version of the oldest action token, of a trajectory with turns."""
        return min(turn.versions[0][0] for turn in self.turns)


@dataclass(frozen=True)
class Minibatch:
    """The trajectories of an optimizer step, and those of them that each data-parallel rank trains on.

    Example: Minibatch((2, 0, 1), ((2,), (0, 1))) of two ranks.
    """

    chosen: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...]  # of each data-parallel rank

    def first(self, most: int) -> Minibatch:
        """Return a minibatch of the first `most` trajectories of each rank."""
        parts = tuple(part[:most] for part in self.parts)
        return Minibatch(tuple(n for part in parts for n in part), parts)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Trajectories packed end to end, without padding. All tensors are on one device.

    In training, every rank has the batch of all trajectories, but tokens_P and routes_P have only the tokens
    of those that this rank trains on. The batch that packing.to_batch makes holds all tokens.

    Example: the trajectory above alone gives tokens_P of 10 entries, held_N = [0],
    sequence_offsets = [0, 10], action_index_T = [2, 3, 4, 9], turn_offsets = [0, 3, 4],
    turn_to_sequence_S = [0, 0], action_offsets = [0, 4]. If versions 3 and 4 wrote its turns, version_T is
    [3, 3, 3, 4].
    The log-prob of action token t is read from the hidden state of the token before it.
    """

    tokens_P: torch.Tensor  # int64, the held trajectories in ascending order
    held_N: torch.Tensor  # int64 into P: the first token of each trajectory; -1 if this rank does not hold it
    sequence_offsets: torch.Tensor  # [N+1] into the tokens of all trajectories, held or not
    turn_offsets: torch.Tensor  # [S+1] into T
    turn_to_sequence_S: torch.Tensor  # int64
    action_offsets: torch.Tensor  # [N+1] into T
    action_index_T: torch.Tensor  # int64 into the tokens of all trajectories
    live_N: torch.Tensor  # bool; False for trajectories that carry no loss (error, timeout)
    rollout_logprob_T: torch.Tensor  # float32, reported by the engine
    version_T: torch.Tensor  # int64, the policy version that generated the token
    reward_T: torch.Tensor  # float32; the reward of a turn is on its last token
    first_N: torch.Tensor  # bool: the first history of each episode; the others follow it
    cut_N: torch.Tensor  # bool: outcome `truncated`
    state_S: torch.Tensor  # int64, TurnSummary.state
    # uint8 or int32 [P, layers of this pipeline rank, k]: the experts that scoring and update must use; the
    # largest number of the type where the router chooses. If None, the router always chooses.
    routes_P: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        """The number of tokens of all trajectories, held or not."""
        return int(self.sequence_offsets[-1])

    @property
    def live_T(self) -> torch.Tensor:
        """Mask of the action tokens that carry loss, bool [T]."""
        return self.live_N.repeat_interleave(self.action_offsets.diff())

    @classmethod
    def of(cls, batch: Batch, **more: Any) -> Self:
        """Return the record of a later stage with the columns of `batch`, and more."""
        names = [field.name for field in fields(cls) if hasattr(batch, field.name)]
        return cls(**{name: getattr(batch, name) for name in names} | more)


@dataclass(frozen=True, kw_only=True)
class DividedBatch(Batch):
    """A batch, and the minibatches of each epoch of its update."""

    epochs: tuple[tuple[Minibatch, ...], ...]  # an epoch has every trajectory once


@dataclass(frozen=True, kw_only=True)
class ScoredBatch(DividedBatch):
    """A batch with what the models say about its action tokens, float32.

    R: everything after the prompts; these columns exist only if GAE includes observations.
    """

    old_logprob_T: torch.Tensor | None = None  # see algorithm.old_policy; None: the update computes them
    reference_logprob_T: torch.Tensor | None = None  # None without a reference
    value_T: torch.Tensor | None = None  # None without a critic
    value_R: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class EstimatedBatch(ScoredBatch):
    """A scored batch with its advantages, float32; 0 for trajectories that are not live."""

    advantage_T: torch.Tensor
    return_T: torch.Tensor | None = None  # the targets of the critic; None without one
    return_R: torch.Tensor | None = None
    deviation: float = 0.0  # of the advantages before whitening; 0: they are not whitened


@dataclass(frozen=True, kw_only=True)
class UpdatedBatch(EstimatedBatch):
    """A batch after its update, which always has old log-probs."""

    old_logprob_T: torch.Tensor


BatchT = TypeVar("BatchT", bound=Batch)
ScoredT = TypeVar("ScoredT", bound=ScoredBatch)


def _check_versions(versions: Versions, tokens: int) -> None:
    """Raise ValueError unless the runs cover the tokens of a turn, and versions start at 0 or more and
    increase."""
    numbers, counts = [version for version, _ in versions], [count for _, count in versions]
    increase = all(a < b for a, b in zip([-1, *numbers], numbers, strict=False))
    if sum(counts) != tokens or min(counts, default=0) < 1 or not increase:
        shown = f"{versions[:4]}" if len(versions) < 5 else f"{versions[:4]} and {len(versions) - 4} more"
        raise ValueError(
            f"versions={shown}: must be runs (version, tokens) with increasing versions, of {tokens} "
            "tokens together"
        )
