"""An agent of Anthropic's SDK with one tool, which streams the Messages API.

PYTHONPATH=.:examples/agents megatron-stppo train CONFIG environment.kind=agent \
    environment.tool_parser=hermes 'environment.command=[.venv-agents/bin/python,
    -m, megatron_stppo.agents.command, "anthropic_sdk:agent"]'
"""

from typing import Any

from anthropic import AsyncAnthropic

CAPITALS = {"France": "Paris", "Italy": "Rome", "Norway": "Oslo", "Peru": "Lima", "Ghana": "Accra"}
TOOL: Any = {
    "name": "capital",
    "description": "Look up the capital of a country.",
    "input_schema": {"type": "object", "properties": {"country": {"type": "string"}}},
}


async def agent(episode: Any) -> dict[str, Any]:
    messages: list[Any] = [{"role": "user", "content": episode.task.prompt[-1].content}]
    given: Any = {"model": episode.model, "max_tokens": 4096, "messages": messages, "tools": [TOOL]}
    async with AsyncAnthropic(base_url=episode.anthropic_base_url, auth_token=episode.api_key) as client:
        for _turn in range(3):
            async with client.messages.stream(**given) as stream:
                reply = await stream.get_final_message()
            messages.append({"role": "assistant", "content": reply.content})
            calls = [block for block in reply.content if block.type == "tool_use"]
            found = [CAPITALS.get(str(call.input.get("country")), "unknown") for call in calls]
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": text}
                for call, text in zip(calls, found, strict=True)
            ]
            if not results:
                break
            messages.append({"role": "user", "content": results})
    said = "".join(block.text for block in reply.content if block.type == "text")
    return {"reward": float(any(target in said for target in episode.task.targets)), "detail": said}
