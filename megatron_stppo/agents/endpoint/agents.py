"""The user's agent: a coroutine function, or a command. Its result is the reward, perhaps with details."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from megatron_stppo.agents.endpoint.command import CommandFailed, last_line
from megatron_stppo.base.printing import one_line
from megatron_stppo.base.types import Outcome
from megatron_stppo.config import ConfigError, EnvironmentConfig, user_code
from megatron_stppo.environments import contract
from megatron_stppo.environments.base import AgentEpisode, StepResult

WHERE = "the agent"  # the subject of messages about its result


Agent = Callable[[AgentEpisode], Awaitable[Any]]


def open_agent(config: EnvironmentConfig) -> Agent:
    """Return the configured agent. Raises ConfigError unless it is a coroutine function."""
    if config.command is not None:
        return partial(_commanded, config.command, config.command_variables)
    assert config.agent is not None, "the section requires an agent or a command"
    where = f"environment.agent={config.agent}"
    agent = user_code.function(where, config.agent, config.modules, "agent")
    if not inspect.iscoroutinefunction(agent):
        raise ConfigError(f"{where}: is not a coroutine function; write `async def`")
    function: Agent = agent
    return function


def result_of(returned: Any) -> StepResult:
    """Return the end of an episode from what its agent has returned.

    A number is the reward. A dict has "reward", perhaps "outcome" and "detail", and own metrics.
    Without "outcome", an episode with a reward of at least 1 is ok. Raises WrongValue for anything else.
    Example: {"reward": 0.5, "detail": "2 of 4", "moves": 7} is a wrong episode with the metric moves.
    """
    fields = dict(returned) if isinstance(returned, Mapping) else {"reward": returned}
    outcome, detail = fields.pop("outcome", None), fields.pop("detail", "")
    reward, metrics = contract.scored(WHERE, fields)
    outcome = ("ok" if reward >= 1 else "wrong") if outcome is None else outcome
    if outcome not in contract.OUTCOMES or not isinstance(detail, str):
        raise contract.WrongValue(
            f"{WHERE} returned outcome={_shown(outcome)}, detail={_shown(detail)}; give an outcome of "
            f"{', '.join(contract.OUTCOMES)}, and text"
        )
    return StepResult(
        "", reward, True, True, outcome=cast(Outcome, outcome), detail=one_line(detail), metrics=metrics
    )


def _shown(value: Any) -> str:
    return one_line(ascii(value)[:80])


async def _commanded(command: Sequence[str], variables: Sequence[str], episode: AgentEpisode) -> Any:
    """Return the result in the last line of a command. It is data of the episode: an error is an outcome."""
    line = await last_line(command, variables, episode)
    try:
        returned = json.loads(line)
        result_of(returned)
    except (ValueError, RecursionError) as error:
        raise CommandFailed(f"the command's last line is {_shown(line)}: {error}") from None
    return returned
