"""An agent for environments of the package openenv-core (0.3), which run as servers.

PYTHONPATH=.:examples/agents megatron-stppo train CONFIG environment.kind=agent \
    'environment.command=[.venv-openenv/bin/python,
    -m, megatron_stppo.agents.command, "openenv_agent:agent"]'

A row of the data names the server and the fields in extra_info: {"openenv": {"url": "http://127.0.0.1:8000",
"action": "message", "observation": "text", "reset": {}}}. The text of the policy goes into the field `action`
of the environment's action, the policy reads the field `observation` of its observation, and `reset` has
further arguments for the reset. The prompt of the row comes first, then the observations.
"""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI
from openenv.core import GenericEnvClient

from megatron_stppo.environments.base import AgentEpisode

NAME = "openenv"
MAX_MIB = 4.0  # of a message of the server


async def agent(episode: AgentEpisode) -> dict[str, Any]:
    """Play until the environment is done, and return the sum of its rewards and the number of steps."""
    given = episode.task.extra[NAME]
    messages: list[Any] = [m.as_dict() for m in episode.task.prompt]
    total, steps = 0.0, 0
    async with (
        GenericEnvClient(base_url=given["url"], max_message_size_mb=MAX_MIB) as environment,
        AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key) as policy,
    ):
        result = await environment.reset(seed=episode.seed, **given.get("reset", {}))
        while not result.done:
            messages.append({"role": "user", "content": str(result.observation[given["observation"]])})
            reply = await policy.chat.completions.create(model=episode.model, messages=messages)
            said = reply.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": said})
            result = await environment.step({given["action"]: said})
            total, steps = total + float(result.reward or 0.0), steps + 1
    return {"reward": total, "steps": steps}
