"""An agent as it is written for a hosted model, with one tool. Only the base URL and the key are the run's.

PYTHONPATH=examples/agents megatron-stppo train CONFIG environment.kind=agent \
    environment.agent=openai_sdk:agent environment.tool_parser=hermes
"""

import json
from typing import Any

from openai import AsyncOpenAI

CAPITALS = {"France": "Paris", "Italy": "Rome", "Norway": "Oslo", "Peru": "Lima", "Ghana": "Accra"}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "capital",
        "description": "Look up the capital of a country.",
        "parameters": {"type": "object", "properties": {"country": {"type": "string"}}},
    },
}


def look_up(arguments: str) -> str:
    try:
        return CAPITALS[json.loads(arguments)["country"]]
    except (ValueError, KeyError, TypeError):  # the policy may write anything
        return "unknown"


async def agent(episode: Any) -> dict[str, Any]:
    messages: list[Any] = [m.as_dict() for m in episode.task.prompt]
    async with AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key) as client:
        for _turn in range(3):
            reply = await client.chat.completions.create(model=episode.model, messages=messages, tools=[TOOL])
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                content = look_up(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
            if not message.tool_calls:
                break
    right = any(target in (message.content or "") for target in episode.task.targets)
    return {"reward": float(right), "detail": message.content or ""}
