"""The interface of an environment (reset, step, close), which a user implements for a new task."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from megatron_stppo.base.types import Message, Outcome, Task

# Metrics that the endpoint for agents adds to those of an agent, both counts of an episode.
MALFORMED_CALLS = "endpoint/malformed_calls"  # completions with calls of tools that cannot be parsed
REPEATED = "endpoint/repeated_requests"  # requests that got the recorded completion of an earlier one


class ToolAway(Exception):
    """A tool does not answer any request at present: its server is down, restarts or is overloaded.

    An environment raises it from reset or step, with a message of one line. The environment must then be in
    the state that it had before the call. A factory may raise it too. The rollout repeats the call until it
    returns, for up to environment.tool_wait seconds; after that the run writes a checkpoint and ends with
    exit code 85. A failure of one episode only, such as a query that the tool refuses, is an outcome of that
    episode instead.
    Example: raise ToolAway("sandbox: connection refused").
    """


@dataclass(frozen=True)
class Request:
    """A completion that an agent asks for: what the policy reads next, as tokens, and how its turn ends.

    Example: Request(0, (1, 2, 3)) begins an episode; Request(0, (4,)) continues it after the first turn;
    Request(1, (1, 5)) begins a second history.
    """

    history: int  # the history that is continued; the number of histories so far for a new one
    token_ids: tuple[int, ...]  # what is new: the whole prompt of a new history, else what follows its turn
    stop_strings: tuple[str, ...] = ()
    max_tokens: int | None = None  # of the turn; None: as many as the run allows


@dataclass(frozen=True)
class Completion:
    """A turn, as an agent's environment gets it. Example: Completion("Hi", (5, 2), (-0.1, -2.0), "end")."""

    text: str  # without the end-of-text token
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()  # natural log, of the sampled distribution
    reason: str = ""  # generation.Reason


@dataclass(frozen=True)
class AgentEpisode:
    """What an agent gets: a task, and the endpoint that answers for the policy.

    Example: AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key).
    """

    task: Task
    base_url: str
    api_key: str = field(repr=False)
    model: str
    seed: int  # differs between the episodes of a task

    @property
    def anthropic_base_url(self) -> str:
        """The same endpoint for clients of Anthropic's API, which append /v1/messages."""
        return self.base_url.removesuffix("/v1")


@dataclass(frozen=True)
class StepResult:
    """The environment's answer to one action.

    Example: StepResult("\\n\\n<information>..</information>\\n\\n", 0.0, False, True, 1) after a search;
    StepResult("", 1.0, True, True, 0, "ok", "Paris") after the right answer.
    """

    observation: str  # the text that the policy reads next; "" if done
    reward: float  # credited to the last action token of this turn
    done: bool
    valid: bool  # the action could be parsed
    tool_calls: int = 0  # calls of tools that the action made, those that failed included
    outcome: Outcome | None = None  # set if and only if done
    detail: str = ""  # one line for the user: the extracted answer, or what failed
    request: Request | None = None  # of an agent that is not done, in place of the observation
    # Own numbers of the episode by name. A later step replaces the number of the same name. metrics.jsonl has
    # their means as environment/NAME. None: a value that cannot be used (contract.metrics), which is counted.
    metrics: Mapping[str, float | None] = field(default_factory=dict)


@runtime_checkable
class Environment(Protocol):
    """The environment of one episode. Its methods are async, so that slow tools overlap with generation.

    A failure of the environment itself is an outcome (error, timeout), never a reward of 0. A tool that does
    not answer any request is reported by raising ToolAway.
    """

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings that end a turn; they stay in the action."""
        ...

    async def reset(self, task: Task, seed: int) -> list[Message]: ...

    async def step(self, action: str) -> StepResult: ...

    async def close(self) -> None: ...


@runtime_checkable
class CompletionEnvironment(Protocol):
    """An environment that answers completions with requests for further ones, such as an agent's.

    It reads and writes tokens where an Environment reads and writes text. If it has a number `tool_calls`,
    these are the calls of tools of the last completion; they count where `complete` fails.
    """

    async def reset(self, task: Task, seed: int) -> Request: ...

    async def complete(self, completion: Completion) -> StepResult: ...

    async def close(self) -> None: ...


AnyEnvironment = Environment | CompletionEnvironment
